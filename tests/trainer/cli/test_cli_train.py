"""``vf-train``: what it refuses and how it says so, and real runs: to the end, interrupted,
continued."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from transformers import TrainerControl, TrainerState

from support.kill import run_child
from verifiers.errors import ConfigError
from verifiers.results.trainings import edge_rewards
from verifiers.storage.files import LOCK_NAME, HeldFile
from verifiers_trainer.cli import ablation, tmux
from verifiers_trainer.cli.display import show_logs
from verifiers_trainer.cli.first_checks import check_first
from verifiers_trainer.cli.report import finish
from verifiers_trainer.cli.train import quickstart_command, train_command
from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer
from verifiers_trainer.run.metrics_files import read_metrics
from verifiers_trainer.run.progress import ProgressLine, duration, two_columns

ENVIRONMENT = """
import os, signal
import verifiers as vf

def load_environment(size: int = 8, reward: str = "vowels", interrupt_at: int = -1):
    calls = 0

    def vowels(completion, **kwargs):
        nonlocal calls
        calls += 1
        if calls == interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        text = completion[-1]["content"]
        if reward in ("solved", "fails") and calls > 32:
            return 1.0 if reward == "solved" else 1 / 0
        return sum(c in "aeiou" for c in text) / max(1, len(text)) if reward != "constant" else 1.0

    rows = [{"question": f"{number} vowels", "answer": ""} for number in range(size)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[vowels]))
"""

FILE = """
model = "builtin:tiny"

[env]
id = "vowel-task"

[trainer.args]
run_name = "test"
rollouts_per_example = 4
batch_size = 16
micro_batch_size = 4
max_steps = 2
max_tokens = 6
max_seq_len = 64
use_lora = false
embedded_threads = 1
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs ``vf-train`` in an empty folder that has ``run.toml`` and the environment
    ``vowel-task``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "vowel_task.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.delitem(sys.modules, "vowel_task", raising=False)
    (tmp_path / "run.toml").write_text(FILE)

    def runner(*words: str) -> Any:
        return CliRunner().invoke(train_command, list(words))

    yield runner
    sys.modules.pop("vowel_task", None)


def refused(result: Any) -> str:
    """The message of a run that was refused as it should be: exit 2, one paragraph, no traceback,
    no folder."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert not Path("outputs").exists()
    return result.stderr


# --- what is refused ------------------------------------------------------------------------------


def test_without_anything_to_train_it_says_what_to_give(run):
    assert "vf-train quickstart" in refused(run())


def test_every_mistake_is_named_at_once(run):
    Path("run.toml").write_text(FILE.replace("max_steps = 2", "max_step = 2\ntemperature = 7.0"))
    said = refused(
        run("@", "run.toml", "--env.args.siz", "3", "--dry-rum", "--trainer.args.batch_size", "10")
    )
    for expected in (
        "run.toml:12: unknown key 'max_step' in [trainer.args], did you mean \"max_steps\"?",
        "did you mean 'size'?",
        '--dry-rum: there is no setting "dry_rum", did you mean "--dry-run"?',
    ):
        assert expected in said


def test_every_value_out_of_range_is_named_at_once(run):
    Path("run.toml").write_text(FILE.replace("max_steps = 2", "max_steps = 2\ntemperature = 7.0"))
    said = refused(run("@", "run.toml", "--trainer.args.batch_size", "10"))
    for expected in (
        "run.toml:13: temperature must be a number from 1e-06 to 2, not 7.0",
        "--trainer.args.batch_size: batch_size 10 is not divisible by rollouts_per_example",
    ):
        assert expected in said


MISTAKES = {
    "max_step = 3": (
        "run.toml:16: unknown key 'max_step' in [trainer.args], did you mean \"max_steps\"?"
    ),
    'max_tokens = "many"': "run.toml:16: max_tokens ",
    "temperature = -1": "run.toml:16: temperature must be a number from 1e-06 to 2, not -1",
    "num_iterations = 0": "run.toml:16: num_iterations must be a whole number",
    "updates_per_batch = 99": "run.toml:16: updates_per_batch 99 divides a batch of",
    "label_smoothing_factor = 0.1": (
        "run.toml:16: label_smoothing_factor is 0.1, which this trainer does not support"
    ),
    "[trainr]\ngpus = 1": 'run.toml:16: there is no setting "trainr", did you mean "trainer"?',
}


@pytest.mark.parametrize(
    "mistake", [*MISTAKES, "--model=./nofolder", "--env.id=reverse-txt", "--env.args.siz=3"]
)
def test_a_mistake_is_named_without_the_imports_that_take_seconds(run, warm, mistake, tmp_path):
    """In a child, which fails when ``transformers`` or ``torch`` was imported."""
    Path("run.toml").write_text(
        FILE if mistake.startswith("--") else FILE.replace("max_tokens = 6\n", "") + mistake
    )
    script = (
        "import os, sys; os.chdir(sys.argv[1]); sys.path.insert(0, 'modules')\n"
        "from verifiers_trainer.cli.train import main\n"
        "try: main(sys.argv[2:])\nexcept SystemExit as stop: print('exit code', stop.code)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    words = ["run.toml", mistake] if mistake.startswith("--") else ["run.toml"]
    child = warm.run(script, Path.cwd(), *words)
    said = {
        "--model=./nofolder": (
            f"--model: model './nofolder': there is no folder {tmp_path / 'nofolder'}"
        ),
        "--env.id=reverse-txt": (
            "--env.id: no environment 'reverse-txt' is installed, did you mean 'reverse-text'?"
        ),
        "--env.args.siz=3": "environment 'vowel-task' does not know 'siz' (did you mean 'size'?)",
    }
    assert (child.lines, child.returncode) == (["exit code 2"], 0), child.stderr
    assert (MISTAKES | said)[mistake] in " ".join(child.stderr.split()), child.stderr
    assert not Path("outputs").exists()


def test_a_batch_that_is_right_with_another_spelling_a_recipe_or_a_loss_passes_the_first_checks():
    for words in (
        ["--loss=sft", "--trainer.args.batch_size=4", "--trainer.args.micro_batch_size=4"],
        [
            "--trainer.args.batch_size=48",
            "--trainer.args.micro_batch_size=16",
            "--trainer.args.max_steps=1",
        ],
        ["--trainer.args.num_generations=3", "--trainer.args.batch_size=9"],
        [
            "--trainer.algorithm=rl",
            "--trainer.args.num_generations=3",
            "--trainer.args.batch_size=9",
        ],
    ):
        check_first(["--model=builtin:tiny", "--env.id=reverse-text", *words])
    loss = ["--loss=ppo", "--trainer.args.advantage=mean", "--trainer.args.rollouts_per_example=16"]
    for words in ([], loss):
        with pytest.raises(ConfigError, match="nearest that are: 32 or 48"):
            check_first(
                [
                    "--model=builtin:tiny",
                    "--env.id=reverse-text",
                    "--trainer.args.batch_size=40",
                    *words,
                ]
            )


def test_a_loss_in_a_file_beside_the_toml_is_found(run, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("configs").mkdir()
    Path("configs/run.toml").write_text(FILE)
    Path("configs/beside_toml.py").write_text(
        "from verifiers_trainer.algorithm.losses import LOSSES\nf = LOSSES['ppo']\n"
    )
    Path("in_folder.py").write_text(
        "from verifiers_trainer.algorithm.losses import LOSSES\nf = LOSSES['ppo']\n"
    )
    for loss in ("beside_toml:f", "in_folder:f", "beside_toml.py:f", "configs/beside_toml.py:f"):
        result = run("configs/run.toml", "--trainer.args.loss", loss, "--dump-config")
        assert result.exit_code == 0, result.stderr
        assert loss in result.stdout
    assert "no file absent.py" in refused(
        run("configs/run.toml", "--trainer.args.loss", "absent.py:f")
    )
    Path("configs/bent.py").write_text("def f(:\n")
    assert "bent.py:1" in refused(run("configs/run.toml", "--trainer.args.loss", "bent.py:f"))
    assert 'did you mean "f"?' in refused(
        run("configs/run.toml", "--trainer.args.loss", "beside_toml.py:ff")
    )


def test_an_unknown_environment_is_refused_with_a_suggestion(run):
    said = refused(run("@", "run.toml", "--env.id", "reverse-txt"))
    assert said.startswith("vf-train: --env.id: ")
    assert "'reverse-text'" in said
    assert "vf-install" in said


def test_an_environment_that_fails_to_load_is_named(run):
    Path("modules/vowel_task.py").write_text("import not_there_at_all\ndef load_environment(): ...")
    assert "not_there_at_all" in refused(run("@", "run.toml"))


def test_an_environment_without_a_reward_is_refused(run):
    Path("modules/vowel_task.py").write_text(
        "import verifiers as vf\ndef load_environment():\n    return"
        " vf.SingleTurnEnv(dataset=[{'question': 'a', 'answer': 'b'}], rubric=vf.Rubric())"
    )
    result = run("@", "run.toml")
    assert result.exit_code == 2
    assert "reward function" in result.stderr


def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_loaded(run):
    Path("file").write_text("")
    said = refused(run("@", "run.toml", "--output-dir", "file/run", "--model", "no/such-model"))
    assert "cannot write to file/run" in said
    assert "is a file" in said


def test_a_model_that_cannot_be_loaded_is_refused(run):
    Path("empty-model").mkdir()
    assert "'empty-model'" in refused(run("@", "run.toml", "--model", "empty-model"))
    assert "'no/such-model'" in refused(run("@", "run.toml", "--model", "no/such-model"))
    assert "did you mean 'builtin:tiny'" in run("@", "run.toml", "--model", "builtin:tinny").stderr


def test_a_model_without_a_chat_template_is_refused_where_a_server_renders_the_messages(run):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = None
    build_tiny_model().save_pretrained("plain-model")
    tokenizer.save_pretrained("plain-model")
    result = run("@", "run.toml", "--model", "plain-model", "--vllm-url", "http://127.0.0.1:1/v1")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr


def test_values_that_transformers_refuses_are_refused_without_a_traceback(run):
    said = refused(run("@", "run.toml", "--trainer.args.lr_scheduler_type", "constantly"))
    assert "[trainer.args]" in said
    assert "constantly" in said


def test_fresh_and_resume_contradict_each_other_and_resume_needs_a_checkpoint(run):
    assert "give one of them" in refused(run("@", "run.toml", "--fresh", "--resume"))
    assert "holds no valid checkpoint" in refused(run("--resume", "@", "run.toml"))
    assert "elsewhere holds no valid checkpoint" in refused(
        run("@", "run.toml", "--resume", "elsewhere")
    )


def test_a_folder_that_another_run_holds_is_refused(run):
    folder = Path("outputs/test")
    folder.mkdir(parents=True)
    held = HeldFile(folder / LOCK_NAME)
    try:
        result = run("@", "run.toml")
    finally:
        held.release()
    assert result.exit_code == 2
    assert "being written by" in result.stderr


def test_json_reports_errors_too(run):
    result = run("@", "run.toml", "--env.args.siz", "3", "--json")
    said = json.loads(result.stdout)
    assert (said["ok"], said["exit_code"], result.exit_code) == (False, 2, 2)
    assert "'size'" in said["error"]


def test_a_traceback_is_shown_only_when_asked_for(run):
    assert "Traceback" not in run("@", "run.toml", "--env.id", "nope-nope").stderr
    assert "Traceback" in run("@", "run.toml", "--env.id", "nope-nope", "-v").stderr


def test_an_unexpected_error_is_one_sentence_and_exit_3(capsys):
    def body(result: dict[str, Any]) -> int:
        raise ZeroDivisionError("by \x1b[31mzero")

    assert finish(body, verbose=False, as_json=False) == 3
    said = capsys.readouterr().err
    assert "ZeroDivisionError: by \\x1b[31mzero" in said
    assert "-v" in said


# --- without training -----------------------------------------------------------------------------


def test_a_dry_run_loads_everything_shows_it_and_writes_nothing(run):
    result = run("@", "run.toml", "--dry-run", "--env.args.size=12")
    assert result.exit_code == 0, result.output
    for expected in (
        "builtin:tiny",
        "vowel-task(size=12)",
        "4 examples x 4",
        "12 for training",
        "outputs/test",
    ):
        assert expected in result.stdout
    assert not Path("outputs").exists()
    assert json.loads(run("@", "run.toml", "--dry-run", "--json").stdout)["plan"]["device"] == "cpu"


def test_a_dry_run_refuses_the_checkpoint_that_the_training_refuses(run):
    run("@", "run.toml", "--trainer.args.max_steps", "1")
    words = "@", "run.toml", "--env.args.size=12"
    dry, trained = run(*words, "--dry-run"), run(*words)
    assert dry.exit_code == trained.exit_code == 2, dry.output
    assert "--fresh" in dry.stderr
    assert dry.stderr.splitlines()[-1] == trained.stderr.splitlines()[-1]
    assert run("@", "run.toml", "--dry-run").exit_code == 0  # negative control


IMPORTS = """
import gc, sys
from verifiers_trainer.cli.train import importing

with importing():
    assert not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count() > 10_000
gc.unfreeze()
sys.modules["torch"] = sys  # a program that calls the command decides itself
with importing():
    assert gc.isenabled()
assert gc.get_freeze_count() == 0
"""


def test_the_command_keeps_what_it_imports_out_of_garbage_collection_where_the_process_is_its_own():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=60)


def test_a_dumped_configuration_is_the_same_run(run):
    dumped = run("@", "run.toml", "--trainer.args.max_steps", "7", "--dump-config")
    assert dumped.exit_code == 0, dumped.output
    Path("again.toml").write_text(dumped.stdout)
    assert "max_steps = 7" in dumped.stdout
    assert run("@again.toml", "--dump-config").stdout == dumped.stdout


def test_what_has_no_effect_is_said_in_one_line(run):
    result = run("@", "run.toml", "--inference.gpus", "2", "--trainer.gpus", "1", "--dry-run")
    assert "ignored: inference.gpus, trainer.gpus (there is no CUDA device" in result.stderr
    assert "ignored" not in run("@", "run.toml", "--inference.gpus", "2", "--dry-run", "-q").stderr


def test_help_names_the_ways_to_start():
    said = CliRunner().invoke(train_command, ["--help"]).stdout
    assert "vf-train quickstart" in said
    assert "--dump-config" in said
    assert CliRunner().invoke(train_command, ["--version"]).stdout.startswith("vf-train")


def test_the_quickstart_refuses_what_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(quickstart_command, ["--loss", "cisspo"])
    assert result.exit_code == 2
    assert "cisspo" in result.stderr
    assert CliRunner().invoke(quickstart_command, ["--steps", "0"]).exit_code == 2


# --- training -------------------------------------------------------------------------------------


def test_a_run_trains_goes_on_and_begins_again(run):
    first = run("@", "run.toml", "--json")
    assert first.exit_code == 0, first.output
    said = json.loads(first.stdout)
    assert (said["ok"], said["step"], said["run_dir"]) == (True, 2, "outputs/test")
    assert said["checkpoint"] == "outputs/test/checkpoint-2"
    assert Path("outputs/test/learning_curve.png").is_file()
    for expected in ("step 2/2", "reward", "outputs/test/metrics.jsonl", "vf-train @ run.toml"):
        assert expected in first.stderr

    assert "is already trained" in run("@", "run.toml").stderr
    another = run("@", "run.toml", "--trainer.args.temperature", "0.5")
    assert another.exit_code == 2
    assert "temperature was 1.0, is 0.5" in another.stderr
    assert "is already trained" not in another.stderr

    longer = run("@", "run.toml", "--trainer.args.max_steps", "3")
    assert longer.exit_code == 0, longer.output
    assert "outputs/test/checkpoint-2" in longer.stderr
    assert [row["step"] for row in read_metrics(Path("outputs/test/metrics.jsonl"))] == [1, 2, 3]

    changed_run = run(
        "@", "run.toml", "--trainer.args.max_steps", "4", "--trainer.args.temperature", "0.5"
    )
    assert changed_run.exit_code == 2
    assert "temperature was 1.0, is 0.5" in changed_run.stderr
    assert "--fresh" in changed_run.stderr

    fresh = run("@", "run.toml", "--fresh", "--trainer.args.max_steps", "1")
    assert fresh.exit_code == 0, fresh.output
    assert [row["step"] for row in read_metrics(Path("outputs/test/metrics.jsonl"))] == [1]
    assert Path("outputs/test/earlier-1/checkpoint-3").is_dir()


def test_a_second_run_trains_the_adapter_of_the_first_and_is_resumed(run):
    lora = ("--trainer.args.use_lora", "true", "--trainer.args.max_steps", "1")
    first = run("@", "run.toml", *lora, "--trainer.args.lora_rank", "4", "--output-dir", "one")
    assert first.exit_code == 0, first.output
    words = ("@", "run.toml", *lora, "--model", "one/checkpoint-1", "--output-dir", "two")
    second = run(*words)
    assert second.exit_code == 0, second.output
    shown = " ".join(second.stderr.split())
    assert "LoRA rank 4, alpha 32: the adapter of the model, trained further" in shown
    assert "trains the adapter one/checkpoint-1 further: rank 4" in shown
    more = run(*words, "--trainer.args.max_steps", "2")
    assert more.exit_code == 0, more.output
    assert Path("two/checkpoint-2/adapter_model.safetensors").is_file()
    other = run(*words, "--trainer.args.lora_rank", "8", "--output-dir", "three")
    assert other.exit_code == 2
    assert "lora_rank is 8, and that of the adapter in one/checkpoint-1 is 4" in other.stderr


def test_ctrl_c_saves_the_last_whole_step_and_the_same_command_goes_on(run):
    before = signal.getsignal(signal.SIGINT)
    result = run("@", "run.toml", "--trainer.args.max_steps", "50", "--env.args.interrupt_at", "60")
    assert result.exit_code == 130, result.output
    assert "press Ctrl-C again to exit immediately" in result.stderr
    steps = [row["step"] for row in read_metrics(Path("outputs/test/metrics.jsonl"))]
    assert 1 <= len(steps) < 50
    assert Path(f"outputs/test/checkpoint-{steps[-1]}").is_dir()
    assert (
        "vf-train @ run.toml --trainer.args.max_steps 50 --env.args.interrupt_at 60"
        in result.stdout
    )
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_signal_leaves_at_once():
    code = """
import os, signal, time
from verifiers.cli.common.interrupt import Interrupt
with Interrupt(lambda: print("stopping"), lambda reason: print("leaving", flush=True)):
    os.kill(os.getpid(), signal.{0})
    print("still here")
    if {1}:
        os.kill(os.getpid(), signal.{0})
        time.sleep(30)
"""
    once = run_child(code.format("SIGINT", False))
    assert (once.lines, once.returncode) == (["stopping", "still here"], 0)
    twice = run_child(code.format("SIGINT", True))
    assert (twice.lines, twice.returncode) == (["stopping", "still here", "leaving"], 130)
    assert run_child(code.format("SIGTERM", True)).returncode == 143


def test_a_run_that_cannot_learn_fails_with_exit_3_and_its_reason(run):
    result = run(
        "@",
        "run.toml",
        "--env.args.reward",
        "constant",
        "--trainer.args.no_signal_steps",
        "1",
        "--json",
    )
    assert result.exit_code == 3, result.output
    assert "no learning signal" in result.stderr
    assert json.loads(result.stdout)["run_dir"] == "outputs/test"


def test_a_run_that_fails_keeps_its_last_step_its_curve_and_the_command_that_resumes_it(run):
    words = (
        "@",
        "run.toml",
        "--env.args.reward",
        "fails",
        "--trainer.args.max_off_policy_steps",
        "0",
        "--json",
    )
    result = run(*words, "--trainer.args.max_steps", "9")
    assert result.exit_code == 3, result.output
    assert "division by zero" in result.stderr
    outcome = json.loads(result.stdout)
    assert Path(outcome["checkpoint"]) == Path(f"outputs/test/checkpoint-{outcome['step']}")
    assert outcome["step"] >= 1
    assert f"{outcome['checkpoint']} is valid: vf-train @ run.toml " in result.stderr
    assert Path("outputs/test/learning_curve.png").stat().st_size > 10_000


def test_a_solved_task_is_exit_0_with_a_checkpoint(run):
    words = (
        "@",
        "run.toml",
        "--env.args.reward",
        "solved",
        "--trainer.args.max_off_policy_steps",
        "0",
        "--json",
    )
    result = run(*words, "--trainer.args.max_steps", "50", "--trainer.args.no_signal_steps", "1")
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)
    assert outcome["solved"]
    assert outcome["step"] < 50
    assert Path(outcome["checkpoint"]).is_dir()
    assert "solved: training ended before its last step" in result.stderr
    assert "next" not in result.stderr


def test_quiet_prints_the_results_alone(run):
    result = run("@", "run.toml", "--trainer.args.max_steps", "1", "-q")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith("reward ")
    names = [line.split("  ")[0] for line in lines]
    assert {"numbers", "rollouts", "learning curve", "checkpoint"} < set(names)
    assert not [line for line in lines if line.startswith(("info", "step", "model"))]
    assert lines[-1].endswith("# evaluates the trained model")


# --- in a tmux session, in another folder ---------------------------------------------------------


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.parametrize("has_server", [False, True])
def test_a_session_has_a_pane_for_the_trainer_and_one_for_the_log_of_a_server(tmp_path, has_server):
    name, log = f"vf-test-{os.getpid()}", tmp_path / "inference.log"
    log.write_text("the server is up\n")
    environment = {**os.environ, "TERM": "xterm"}
    attach = tmux.start(name, ["--help"], environment, log if has_server else None)
    try:
        assert attach == f"tmux -L {name} attach"
        with pytest.raises(ConfigError, match=f"there is a tmux session {name}"):
            tmux.start(name, ["--help"], environment, None)
        wanted = ["Train a model in an environment", *(["the server is up"] if has_server else [])]
        deadline, shown = time.monotonic() + 60, [""]
        while time.monotonic() < deadline and not all(
            text in pane for text, pane in zip(wanted, shown, strict=False)
        ):
            panes = [
                [*words, "-t", f"{name}:0.{n}"] for n in range(len(wanted)) for words in [CAPTURE]
            ]
            shown = [
                subprocess.run(["tmux", "-L", name, *p], capture_output=True, text=True).stdout
                for p in panes
            ]
        assert all(text in pane for text, pane in zip(wanted, shown, strict=True)), shown
        counted = subprocess.run(
            ["tmux", "-L", name, "list-panes"], capture_output=True, text=True
        ).stdout
        assert len(counted.splitlines()) == len(wanted)
    finally:
        subprocess.run(["tmux", "-L", name, "kill-server"], check=False)


CAPTURE = ["capture-pane", "-p", "-S", "-500"]


def test_the_command_starts_itself_in_the_session(run, monkeypatch):
    started = []
    monkeypatch.setattr(
        tmux, "start", lambda *args: started.append(args) or "tmux -L train1 attach"
    )
    result = run("--tmux", "train1", "@", "run.toml", "--json")
    assert result.exit_code == 0, result.output
    ((name, words, environment, log),) = started
    assert (name, log) == ("train1", None)
    assert words[:2] == ["@", "run.toml"]
    assert "--output-dir=outputs/test" in words
    assert not [word for word in words if "tmux" in word]
    assert environment["PATH"] == os.environ["PATH"]
    assert json.loads(result.stdout)["tmux"] == "tmux -L train1 attach"
    run("--tmux", "@", "run.toml")
    assert started[1][0] == "vf-train"


def test_paths_are_relative_to_the_folder_of_cwd(run, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    result = run("--cwd", str(tmp_path), "@", "run.toml", "--dump-config")
    assert result.exit_code == 0, result.output
    assert Path.cwd() == tmp_path
    assert (
        "--cwd: cannot run in nowhere: No such file"
        in run("--cwd", "nowhere", "@", "run.toml").stderr
    )


# --- what is shown --------------------------------------------------------------------------------


class _Steps:
    """A trainer as far as the display knows it."""

    last_step = {
        "reward/mean": 0.25,
        "loss": -0.5,
        "grad_norm": 1.0,
        "entropy": 2.0,
        "tokens/trained": 100,
    }


def _played(console: Console, steps: int, quiet: bool = False) -> ProgressLine:
    line = ProgressLine(_Steps(), console, quiet)
    state, control = TrainerState(max_steps=steps), TrainerControl()
    line.on_train_begin(None, state, control)
    line.on_evaluate(None, state, control, metrics={"eval_reward": 0.75})
    for step in range(1, steps + 1):
        state.global_step = step
        line.on_step_end(None, state, control)
    line.on_train_end(None, state, control)
    return line


def test_progress_off_a_terminal_is_the_first_and_the_last_line_of_a_fast_run():
    console = Console(file=io.StringIO())
    _played(console, 20)
    lines = console.file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/20", "step 20/20"]
    for expected in (
        "reward 0.250",
        "loss -0.5000",
        "grad 1",
        "entropy 2.000",
        "tok/s",
        "left 0:00",
        "eval 0.750",
    ):
        assert expected in lines[-1]


def test_progress_on_a_terminal_is_one_line_redrawn_and_quiet_shows_none():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    _played(console, 3)
    assert "step 3/3" in console.file.getvalue()
    assert console.file.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in console.file.getvalue()
    silent = Console(file=io.StringIO())
    _played(silent, 3, quiet=True)
    assert silent.file.getvalue() == ""


def test_log_messages_go_to_the_console_escaped_and_the_loggers_are_put_back():
    console = Console(file=io.StringIO())
    logger = logging.getLogger("verifiers_trainer.trainer")
    before = logging.getLogger("verifiers_trainer").handlers
    with show_logs(console, logging.WARNING):
        logger.warning("model said \x1b[2J")
        logger.info("not shown")
    assert console.file.getvalue() == "warning: model said \\x1b[2J\n"
    assert logging.getLogger("verifiers_trainer").handlers == before


def test_the_ends_of_a_run_are_compared_over_ten_steps_at_most():
    rows = [{"reward/mean": value} for value in [0.0] * 10 + [0.5] * 10 + [1.0] * 10] + [
        {"eval_reward": 1.0}
    ]
    assert edge_rewards(rows) == (0.0, 1.0, 10)
    assert edge_rewards([{"reward/mean": None}]) is None


def test_small_formats():
    assert (duration(5), duration(3600)) == ("0:05", "1:00:00")
    assert two_columns([("a", "1"), ("long", "2\x07")]) == "a     1\nlong  2\\x07"


# --- several runs of a file -----------------------------------------------------------------------


SWEEP = """
[[ablation]]
[ablation.sweep]
seed = [0, 1]
[ablation.sweep.env.args]
reward = ["vowels", "solved"]
"""


def test_an_ablation_is_every_combination_with_what_flags_leave(run):
    Path("sweep.toml").write_text(FILE + SWEEP)
    runs = ablation.combinations(["@", "sweep.toml"])
    assert [run.name for run in runs] == [
        "seed=0,env.args.reward=vowels",
        "seed=0,env.args.reward=solved",
        "seed=1,env.args.reward=vowels",
        "seed=1,env.args.reward=solved",
    ]
    assert runs[0].words == ["--trainer.args.seed=0", '--env.args.reward="vowels"']
    remaining = ablation.combinations(["@", "sweep.toml", "--trainer.args.seed", "7"])
    assert [run.name for run in remaining] == ["env.args.reward=vowels", "env.args.reward=solved"]
    assert ablation.combinations(["@", "sweep.toml", *runs[0].words]) == []  # a run of it
    assert ablation.combinations(["@", "run.toml"]) == []


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("[[ablation]]\nseed = 1\n", "number 1 sweeps nothing"),
        ("[[ablation]]\n[ablation.sweep]\nseed = 1\n", "seed in .* must be a list of values"),
        ("[[ablation]]\n[ablation.sweep]\nseed = []\n", "not an empty list"),
        ("[[ablation]]\n[ablation.sweep]\nsead = [1]\n", "sead"),
        ("[[ablation]]\n[ablation.sweep]\nseed = [1, -4]\n", "seed"),
    ],
)
def test_an_ablation_that_cannot_run_is_refused_before_the_first_run(run, table, said):
    Path("run.toml").write_text(FILE + table)
    assert re.search(said, refused(run("@", "run.toml")))


def test_the_means_are_over_the_seeds():
    runs = [
        ablation.Combination({"trainer.args.seed": seed, "trainer.args.beta": beta})
        for beta in (0, 0.1)
        for seed in (0, 1)
    ]
    rewards = [(0.2, None), (0.4, None), (0.5, 0.5), (None, None)]
    rows = [{"reward": reward, "eval_reward": evaluated} for reward, evaluated in rewards]
    unknown = "unknown: two seeds of each are the least that show what a seed changes"
    assert ablation.table_of(runs, rows).splitlines()[1:] == [
        "beta=0    reward 0.300 ± 0.141 (0.200 0.400)",
        "beta=0.1  reward 0.500 (0.500)  evaluated 0.500 (0.500)",
        "difference to beta=0, by Welch's t test over the seeds",
        f"beta=0.1  reward {unknown}",
        f"beta=0.1  evaluated {unknown}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [True, False])
def test_an_ablation_trains_each_and_ends_with_the_means(run, as_json):
    Path("vowel_task.py").write_text(ENVIRONMENT)  # each run is a process of its own
    Path("sweep.toml").write_text(FILE + "[[ablation]]\n[ablation.sweep]\nseed = [0, 1]\n")
    words = ["@", "sweep.toml", "--trainer.args.max_steps", "1", "-q"]
    outcome = run(*words, *(["--json"] if as_json else []))
    assert outcome.exit_code == 0, outcome.output
    assert "all  reward" in (outcome.stderr if as_json else outcome.stdout)
    if as_json:
        results = json.loads(outcome.stdout)["runs"]
        assert [result["settings"] for result in results] == [{"seed": 0}, {"seed": 1}]
        assert all(Path(result["run_dir"], "checkpoint-1").is_dir() for result in results)
