"""``examples/verifiers_env``: its scripts and its keys, against rLLM's recorded shapes of both
ages.

The scripts through hydra itself: ``python3 tests/real/peers.py rllm``.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import verifiers as vf
from support.rllm_package import write
from verifiers_integrations.rllm import from_config
from verifiers_integrations.rllm_start import start_of

EXAMPLE = Path(__file__).parents[2] / "examples/verifiers_env"
SCRIPTS = sorted(EXAMPLE.glob("*.sh"))
ENV = {"env_id": "primeintellect/alphabet-sort", "env_args": {"max_turns": 5, "difficulty": "hard"}}


@pytest.fixture
def train(monkeypatch):
    """The module ``train.py``."""
    spec = importlib.util.spec_from_file_location("verifiers_env_train", EXAMPLE / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "workflow", raising=False)
    return module


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Puts a double of an age on the path."""

    def install(age):
        monkeypatch.syspath_prepend(str(write(tmp_path, age)))

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rllm", "workflow")]:
        del sys.modules[name]


# --- words


def test_the_older_words_are_moved_to_the_unified_trainers_names():
    words = ["+backend=tinker", "+verifiers.env_id=x", "model.name=m", "trainer.total_epochs=1"]
    words += [
        "trainer.logger=[console,wandb]",
        "sampling.temperature=1.0",
        "data.train_batch_size=4",
        "+trainer.x=1",
    ]
    start = start_of(words, is_unified=True)
    assert (start.config_name, start.backend, start.is_unified) == ("unified", "tinker", True)
    assert start.words == (
        "rllm/backend=tinker", "+backend=tinker", "+verifiers.env_id=x", "model.name=m",
        "rllm.trainer.total_epochs=1", "rllm.trainer.logger=[console,wandb]", "rllm.rollout.train.temperature=1.0",
        "data.train_batch_size=4", "+rllm.trainer.x=1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "config", "first"),
    [
        (["+backend=tinker"], "tinker_rl_trainer", "+backend=tinker"),
        (["+backend=verl"], "agent_ppo_trainer", "rllm.workflow.use_workflow=true"),
        ([], "agent_ppo_trainer", "rllm.workflow.use_workflow=true"),
    ],
)
def test_the_older_trainer_has_a_configuration_per_backend(words, config, first):
    start = start_of(words, is_unified=False)
    assert (start.config_name, start.words[0], start.module) == (
        config,
        first,
        "trainer.agent_trainer",
    )


def test_verls_own_names_stay():
    words = ["trainer.n_gpus_per_node=2", "trainer.total_epochs=1"]
    assert start_of(words, is_unified=True).words == ("rllm/backend=verl", *words)


@pytest.mark.parametrize(
    ("words", "unified", "problem"),
    [
        (["backend=vllm"], True, "backend is 'vllm'"),
        (["backend=fireworks"], False, "install a newer one"),
    ],
)
def test_a_backend_that_is_not_there_is_refused(words, unified, problem):
    with pytest.raises(vf.ConfigError, match=problem):
        start_of(words, is_unified=unified)


@pytest.mark.parametrize("age", ["unified", "older"])
def test_the_age_of_what_is_installed_is_seen(installed, age):
    installed(age)
    assert start_of([]).is_unified == (age == "unified")


# --- a run


@pytest.mark.parametrize("age", ["unified", "older"])
@pytest.mark.parametrize("backend", ["verl", "tinker"])
def test_every_key_below_verifiers_does_what_it_says(train, installed, capsys, age, backend):
    installed(age)
    config = {
        "verifiers": {**ENV, "sampling_args": {"max_tokens": 7}, "max_samples": 20},
        "backend": backend,
        "data": {"train_batch_size": 4},
    }
    train.run(config, start_of([f"+backend={backend}"]))
    told = json.loads(capsys.readouterr().out.partition("TRAINED ")[2])
    assert (told["backend"], told["train"], told["held_out"], told["turns"]) == (backend, 20, 20, 5)
    assert told["asked"]["max_tokens"] == 7
    assert len(told["steps"]) == 4
    assert all(steps > 1 for steps in told["steps"]), "a sorting game has several turns"
    assert set(told["reasons"]) <= {"ENV_DONE", "MAX_TURNS_EXCEEDED"}
    assert told["registered"] == (
        ["verifiers", "train"] if (age, backend) == ("older", "verl") else None
    )


@pytest.mark.parametrize(
    "settings",
    [{"sampling": {"temperature": 0.6}}, {"rllm": {"rollout": {"train": {"temperature": 0.6}}}}],
)
def test_tinker_at_another_temperature_is_refused_wherever_it_stands(settings):
    with pytest.raises(vf.ConfigError, match=r"samples of temperature 1\.0"):
        from_config({"verifiers": ENV, "backend": "tinker", **settings})


def test_the_backend_of_the_unified_configuration_is_known():
    with pytest.raises(vf.ConfigError, match=r"samples of temperature 1\.0"):
        from_config(
            {
                "verifiers": {**ENV, "sampling_args": {"temperature": 0.5}},
                "rllm": {"backend": "tinker"},
            }
        )


def test_an_unknown_argument_of_the_environment_is_named():
    with pytest.raises(vf.ConfigError, match="colour"):
        from_config({"verifiers": {**ENV, "env_args": {"colour": "red"}}})


# --- files


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses(path):
    assert subprocess.run(["bash", "-n", path], capture_output=True, check=False).returncode == 0
    assert os.access(path, os.X_OK)


def test_there_are_the_files_that_the_guide_lists():
    names = (
        "README.md train.py workflow.py openai_wrapper.py train_verifiers.sh"
        " train_verifiers_tinker.sh test_train.sh"
    )
    assert set(names.split()) <= {path.name for path in EXAMPLE.iterdir()}


def test_a_script_without_rllm_says_so_in_one_sentence():
    if importlib.util.find_spec("rllm") is not None:
        pytest.skip("rllm is installed")
    variables = {**os.environ, "PYTHON": sys.executable}
    ran = subprocess.run(
        ["bash", EXAMPLE / "test_train.sh"],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    said = "rllm is not installed: pip install git+https://github.com/rllm-org/rllm\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", said)


def test_the_key_file_is_read_and_what_is_set_wins(train, tmp_path, monkeypatch):
    monkeypatch.setenv("KEPT_KEY", "mine")
    monkeypatch.setenv("TINKER_API_KEY", "before")
    monkeypatch.delenv("TINKER_API_KEY")
    path = tmp_path / ".env"
    path.write_text('# a comment\nTINKER_API_KEY="your-api-key"\nexport KEPT_KEY=other\n')
    train.load_env_file(path)
    assert (os.environ["TINKER_API_KEY"], os.environ["KEPT_KEY"]) == ("your-api-key", "mine")
