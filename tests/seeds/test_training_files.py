"""The files of the last guide, as they are: read by the real command, and run with a small model in
place of theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from support.guide_files import HOSTED, VF_RL
from verifiers_trainer.cli.train import train_command

SMALL = """
--model builtin:tiny --trainer.args.use_lora=false --trainer.args.max_steps 1 --trainer.args.rollouts_per_example 2
--trainer.args.batch_size 4 --trainer.args.micro_batch_size 2 --trainer.args.max_tokens 8
--trainer.args.max_seq_len 1024 --trainer.args.zero_variance keep --trainer.args.embedded_threads 1
""".split()


def command(*words):
    return CliRunner().invoke(train_command, list(words))


def file(text, name="run.toml"):
    Path(name).write_text(text)
    return name


WIKI = """
import verifiers as vf

def load_environment(max_turns: int = 10):
    def search(query: str) -> str:
        '''Search the pages.

        Args:
            query: what to look for
        '''
        return f"nothing about {query}"

    def length(completion, **_):
        return float(len(completion[-1].get("content") or ""))

    rows = [{"question": f"Where is {name}?", "answer": ""} for name in "abcdefgh"]
    return vf.ToolEnv(tools=[search], dataset=rows, rubric=vf.Rubric(funcs=[length]), max_turns=max_turns)
"""


@pytest.fixture
def wiki_search(tmp_path, monkeypatch):
    """An environment of the file's name and arguments, with pages that are not there."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wiki_search_stand_in.py").write_text(WIKI)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return VF_RL.replace("primeintellect/wiki-search", "wiki-search-stand-in")


def test_the_file_of_vf_rl_says_what_it_asks_for_and_what_is_ignored(wiki_search):
    result = command("@", file(wiki_search), "--dump-config")
    assert result.exit_code == 0, result.output
    for line in (
        'model = "Qwen/Qwen3-4B-Instruct-2507"',
        "max_turns = 10",
        "batch_size = 1024",
        "max_tokens = 512",
    ):
        assert line in result.stdout


def test_the_file_of_vf_rl_trains(wiki_search):
    result = command("@", file(wiki_search), *SMALL, "--json")
    assert result.exit_code == 0, result.output
    assert "ignored: " in result.stderr
    for key in ("inference.gpus", "inference.args.enable_auto_tool_choice", "trainer.gpus"):
        assert key in result.stderr
    outcome = json.loads(result.stdout)
    assert (outcome["run_dir"], outcome["step"]) == ("outputs/wiki-search", 1)


def test_the_file_of_hosted_training_trains_here():
    # this model sorts nothing, so every reward is 0: without a baseline the step is made all the
    # same
    result = command(
        "@", file(HOSTED), *SMALL, "--trainer.args.advantage", "none", "--no-wandb", "--json"
    )
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)
    assert (outcome["run_dir"], outcome["step"]) == ("outputs/qwen3-30b-i-alphabet-sort", 1)
    assert outcome["metrics"]["turns/mean"] >= 1


GRPO = """
model = "builtin:tiny"

[env]
id = "reverse-text"
args = { unit = "word" }

[trainer.args]
run_name = "grpo"
num_generations = 4
per_device_train_batch_size = 4
gradient_accumulation_steps = 2
max_completion_length = 8
loss_type = "dr_grpo"
gae_lambda = 0.95
max_steps = 1
zero_variance = "keep"
report_to = "none"
"""


def test_a_file_in_the_words_of_grpo_has_its_defaults():
    dumped = command("@", file(GRPO), "--dump-config")
    assert dumped.exit_code == 0, dumped.output
    assert "trainer.algorithm" not in dumped.stdout
    for line in (
        "batch_size = 8",
        "rollouts_per_example = 4",
        "micro_batch_size = 4",
        'loss = "dr_grpo"',
        'aggregation = "constant_length"',
        "use_lora = false",
        "max_completion_len = 8",
        "mask_truncated_completions = true",
    ):
        assert line in dumped.stdout.splitlines()
    again = command("@", file(dumped.stdout, "again.toml"), "--dump-config")
    assert again.stdout == dumped.stdout


def test_a_file_in_the_words_of_grpo_is_explained_and_tried_out():
    result = command("@", file(GRPO), "--dry-run")
    assert result.exit_code == 0, result.output
    assert "ignored: trainer.args.gae_lambda (there is no critic" in result.stderr
    assert "derived: num_generations is a setting of GRPO" in result.stdout
    assert "8 rollouts = 2 examples x 4, in micro-batches of 4" in result.stdout
    assert "ok      checkpoint: " in result.stdout


def test_the_algorithm_can_be_said():
    settings = '\n[trainer]\nalgorithm = "{}"\n[trainer.args]\nrun_name = "x"\n'
    start = 'model = "builtin:tiny"\n[env]\nid = "reverse-text"\n'
    assert (
        'loss = "dr_grpo"'
        in command("@", file(start + settings.format("grpo")), "--dump-config").stdout
    )
    assert (
        'loss = "cispo"'
        in command("@", file(start + settings.format("rl")), "--dump-config").stdout
    )
    said = command("@", file(start + settings.format("grop")), "--dump-config")
    assert said.exit_code == 2
    assert "trainer.algorithm must be one of rl, grpo, not 'grop'" in said.stderr


@pytest.mark.parametrize(
    ("setting", "loss"),
    [
        ("lr = 0.001", "cispo"),
        ("epochs = 2", "cispo"),
        ("group_size = 4", "cispo"),
        ("kl_coef = 0.0", "cispo"),
        ("num_generations = 4", "dr_grpo"),
        ("gradient_accumulation_steps = 1", "dr_grpo"),
    ],
)
def test_names_of_grpo_scripts_alone_select_its_objective(setting, loss):
    text = f'model = "builtin:tiny"\n[env]\nid = "reverse-text"\n[trainer.args]\n{setting}\n'
    assert f'loss = "{loss}"' in command("@", file(text), "--dump-config").stdout


def test_another_name_is_checked_like_the_setting_and_the_later_one_wins():
    said = command("@", file(GRPO.replace("num_generations = 4", 'num_generations = "four"')))
    assert said.exit_code == 2
    told = "run.toml:10: num_generations must be a whole number from 1 to 1000000, not 'four'"
    assert told in said.stderr
    later = command("@", file(GRPO), "--trainer.args.rollouts_per_example", "2", "--dump-config")
    assert "rollouts_per_example = 2" in later.stdout
    wrong = command("@", file(GRPO), "--trainer.args.num_generations", "3")
    assert "--trainer.args.num_generations" not in wrong.stdout
    assert "batch_size 8 (per_device_train_batch_size 4 x processes 1" in wrong.stderr


def test_a_file_that_is_not_there_is_said_without_loading_torch(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys; from verifiers_trainer.cli.train import main\n"
        "try: main(['@', 'nothing.toml'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.stdout.split() == ["2", "False"]
    assert "nothing.toml cannot be read: No such file or directory" in done.stderr
