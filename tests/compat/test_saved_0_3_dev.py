"""Runs and a checkpoint that commit 2889499 saved load, read as a run of now does, and resume."""

import functools
import importlib
import json
import shutil
from pathlib import Path

import pytest

import verifiers as vf
from support import golden

pytest.importorskip("torch", reason="needs the trainer")
SAVED = Path(__file__).parents[1] / "data/saved_0_3_dev"
NAMES = ["talk", "forks", "turn_rewards", "errors", "tools", "roles", "versions"]
PARTS = ("row", "samples", "exports")
OF_A_FILE = ("rollout_key", "example_hash", "sibling")
"""Columns that only a row that was read has."""


@pytest.fixture
def environments(monkeypatch):
    monkeypatch.syspath_prepend(SAVED)
    return importlib.import_module("saved_environments")


@pytest.fixture
def copy_of(tmp_path):
    return lambda name: Path(shutil.copytree(SAVED / name, tmp_path / name))


def dumps(results):
    parts = json.loads(
        json.dumps([{part: dump[part] for part in PARTS} for dump in golden.dump(results)])
    )
    for part in parts:
        for name in OF_A_FILE:
            part["row"].pop(name, None)
    return parts


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_run_reads_as_a_run_of_now(name, environments, copy_of, tmp_path):
    results, requests = environments.evaluate(name, tmp_path / "now")
    read = vf.load_results(copy_of(name))

    assert (len(read), len(requests) >= 6) == (6, True)
    assert dumps(read) == dumps(results)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_run_is_finished_and_what_it_has_is_not_run_again(name, environments, copy_of):
    folder = copy_of(name)
    journal = folder / "results.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-2]))
    before = dumps(vf.load_results(SAVED / name))

    results, requests = environments.evaluate(name, folder)

    per_rollout = sum(len(state["trajectory"]) for state in results["states"][-2:])
    assert len(requests) == per_rollout
    assert dumps(results) == before
    assert len(journal.read_bytes().splitlines()) == 6


def test_another_reward_function_would_be_refused(environments, copy_of, monkeypatch):
    """Negative control: what is saved is compared."""
    constant = lambda completion, answer: 1.0  # noqa: E731
    constant.__name__ = constant.__qualname__ = "exact"
    monkeypatch.setattr(environments, "exact", constant)

    with pytest.raises(vf.RunMismatch) as caught:
        environments.evaluate("talk", copy_of("talk"))
    assert any("funcs" in key for key in caught.value.differences), caught.value.differences


def test_a_checkpoint_of_two_roles_resumes_to_the_same_losses(environments, copy_of, monkeypatch):
    training = importlib.import_module("support.training")
    # its environment is in this module of the tests, which has changed since
    accepting = functools.partial(training.small_trainer, accept_changed_code=True)
    monkeypatch.setattr(training, "small_trainer", accepting)
    saved = [
        float.fromhex(loss) for loss in json.loads((SAVED / "training-losses.json").read_text())
    ]

    losses = environments.train(copy_of("training"), resume_from_checkpoint=True)

    assert [float.fromhex(loss) for loss in losses] == pytest.approx(saved[2:], rel=1e-5)
