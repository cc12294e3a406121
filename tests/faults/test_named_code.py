"""Promise: opening, printing, comparing and scoring again run no code that data name; the user
does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import verifiers as vf
from support.eval_command import runner_of
from verifiers.cli.compare import COMMAND as COMPARE
from verifiers.cli.rescore import COMMAND as RESCORE
from verifiers.storage.directory import CONFIG_NAME, METADATA_NAME
from verifiers.testing import ScriptedClient
from verifiers.view.catalog import Catalog
from verifiers.view.library import Library

HOSTILE = """
from pathlib import Path
import verifiers as vf

Path(__file__).with_name("ran").touch()

def load_environment():
    return vf.SingleTurnEnv(dataset=[{"question": "1"}], rubric=vf.Rubric([lambda completion: 1.0]))

def loss(inputs):
    return inputs

reward = loss
"""


@pytest.fixture
def folder(eval_folder, tmp_path, monkeypatch) -> Path:
    """A working folder with a run that another person made, and with code of theirs."""
    (tmp_path / "run").mkdir()
    for file in (tmp_path / "hostile.py", tmp_path / "run" / "hostile.py"):
        file.write_text(HOSTILE)
    monkeypatch.delitem(sys.modules, "hostile", raising=False)
    env = vf.SingleTurnEnv(
        eval_dataset=[{"question": "1 + 1"}], rubric=vf.Rubric([lambda completion: 1.0])
    )
    env.evaluate(ScriptedClient("2"), "m", results_path=tmp_path / "run")
    yield tmp_path
    sys.modules.pop("hostile", None)


def ran(folder: Path) -> bool:
    """Whether the code ran; and forget it."""
    marks = list(folder.rglob("ran"))
    for mark in marks:
        mark.unlink()
    return bool(marks)


def note_in_run(folder: Path, base_url: str) -> None:
    file = folder / "run" / CONFIG_NAME
    stored = json.loads(file.read_text())
    stored["noted"]["base_url"] = base_url
    file.write_text(json.dumps(stored))


def name_in_run(folder: Path, env_id: str) -> None:
    metadata = folder / "run" / METADATA_NAME
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"env_id": env_id}))
    config = json.loads((folder / "run" / CONFIG_NAME).read_text())
    config["config"]["env_id"] = env_id
    (folder / "run" / CONFIG_NAME).write_text(json.dumps(config))


NAMES = ("hostile", "run/hostile.py", "./run/hostile", "hostile.py")


@pytest.mark.parametrize("env_id", NAMES)
def test_scoring_again_takes_an_installed_environment_alone_from_the_run(folder, capfd, env_id):
    vf_rescore = runner_of(RESCORE, capfd)
    name_in_run(folder, env_id)
    refused = vf_rescore("run")
    assert refused.code == 2
    assert f"run names the environment {env_id!r}, which is not installed" in refused.err
    assert f"--env {env_id}" in refused.err
    assert not ran(folder)
    # negative control: by the user's own word it runs
    assert vf_rescore("run", "--env", env_id).code == 0
    assert ran(folder)


def test_an_installed_environment_is_taken_but_not_what_shadows_it(folder, capfd, monkeypatch):
    vf_rescore = runner_of(RESCORE, capfd)
    name_in_run(folder, "toy")
    assert vf_rescore("run").code == 0
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "toy.py").write_text(HOSTILE)
    monkeypatch.chdir(folder / "elsewhere")
    assert vf_rescore("../run").code == 2
    assert not ran(folder)


@pytest.mark.parametrize("env_id", NAMES)
def test_opening_and_comparing_run_nothing(folder, capfd, env_id):
    name_in_run(folder, env_id)
    vf.load_results("run").summary()
    library = Library(Catalog(["run"]))
    (run,) = library.runs()["runs"]
    library.run(run["id"])
    assert runner_of(COMPARE, capfd)("run", "run").code in (0, 2)
    assert not ran(folder)


@pytest.mark.parametrize("env_id", NAMES)
def test_printing_the_settings_of_an_eval_file_runs_nothing(folder, vf_eval, env_id):
    (folder / "eval.toml").write_text(f'[[eval]]\nenv_id = "{env_id}"\nmodel = "m"\n')
    words = ("eval.toml", "-b", "http://127.0.0.1:9/v1")
    printed = vf_eval(*words, "--dump-config")
    assert printed.code == 0, printed.err
    assert env_id in printed.out
    assert not ran(folder)
    vf_eval(*words, "--dry-run")  # negative control
    assert ran(folder)


TRAIN = """
model = "builtin:tiny"
[env]
id = "toy"
[trainer.args]
run_name = "test"
batch_size = 4
rollouts_per_example = 2
micro_batch_size = 4
max_tokens = 4
"""  # small, as a dry run trains a step
CHANGES = {
    "env": ('id = "toy"', 'id = "hostile"'),
    "loss": ("run_name", 'loss = "hostile:loss"\nrun_name'),
    "loss of a file": ("run_name", 'loss = "hostile.py:loss"\nrun_name'),
    "advantage": ("run_name", 'advantage = "hostile:reward"\nrun_name'),
}


@pytest.mark.parametrize("change", CHANGES)
def test_printing_the_settings_of_a_training_file_runs_nothing(folder, change):
    from verifiers_trainer.cli.train import train_command

    (folder / "train.toml").write_text(TRAIN.replace(*CHANGES[change]))
    printed = CliRunner().invoke(train_command, ["@", "train.toml", "--dump-config"])
    assert printed.exit_code == 0, printed.output
    assert "hostile" in printed.stdout
    assert not ran(folder)
    CliRunner().invoke(train_command, ["@", "train.toml", "--dry-run"])  # negative control
    assert ran(folder)


def test_a_training_on_a_saved_run_takes_an_installed_environment_alone_from_it(folder):
    from verifiers_trainer.cli.train import train_command

    name_in_run(folder, "run/hostile.py")
    text = TRAIN.replace('[env]\nid = "toy"\n', "") + 'saved_runs = "run"\n'
    (folder / "train.toml").write_text(text)
    refused = CliRunner().invoke(train_command, ["@", "train.toml", "--dry-run"])
    assert refused.exit_code == 2
    assert "which is not installed" in " ".join(refused.stderr.split())
    assert not ran(folder)


def test_a_saved_run_does_not_choose_where_keys_are_sent(folder, vf_eval, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "canary-of-this-machine")
    note_in_run(folder, "https://collects.example/v1")
    refused = vf_eval("toy", "--resume", "run", "--dry-run")
    assert refused.code == 2
    assert "run names the endpoint https://collects.example/v1" in refused.paragraph
    assert "-b https://collects.example/v1" in refused.paragraph
    # negative control: the user's own word, a server of this machine, and a vendor's usual address
    words = ("toy", "--resume", "run", "--dump-config")
    assert vf_eval(*words, "-b", "https://collects.example/v1").code == 0
    for usual in ("http://127.0.0.1:9/v1", "https://api.openai.com/v1"):
        note_in_run(folder, usual)
        assert usual in vf_eval(*words).out
