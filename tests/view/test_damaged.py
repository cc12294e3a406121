"""Folders of others in the list of runs: pipes, devices, and files that are not as a run writes
them."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.errors import ConfigError, JournalError
from verifiers.results.labels import LABELS_NAME
from verifiers.storage.directory import CONFIG_NAME, METADATA_NAME, RESULTS_NAME
from verifiers.storage.files import LOCK_NAME
from verifiers.testing import ScriptedClient
from verifiers.view.catalog import Catalog
from verifiers.view.library import Library

DEEP = "[" * 100_000 + "]" * 100_000
VALUES = (5, "text", [1, {}], {"a": {}}, [[1]], True, 1e300, None)


@pytest.fixture
def runs(tmp_path) -> Path:
    env = vf.SingleTurnEnv(
        dataset=[{"question": "1 + 1"}], rubric=vf.Rubric([lambda completion: 1.0])
    )
    for name in ("first", "second"):
        env.evaluate(ScriptedClient("2"), "m", results_path=tmp_path / name)
    return tmp_path


def in_time(call, seconds: float = 20.0):
    """The result of a call that may wait for ever without the guard."""
    results: list = []

    def run():
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001  compared by the caller
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "it waits for ever"
    return results[0]


def listed(folder: Path) -> dict[str, dict]:
    return {run["id"]: run for run in Library(Catalog([folder])).runs()["runs"]}


@pytest.mark.parametrize("name", [METADATA_NAME, CONFIG_NAME, LOCK_NAME, LABELS_NAME])
@pytest.mark.parametrize("kind", ["fifo", "zero", "deep"])
def test_no_file_of_a_run_hangs_or_breaks_its_readers(runs, name, kind):
    file = runs / "first" / name
    file.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "zero":
        file.symlink_to("/dev/zero")
    else:
        file.write_text(DEEP)
    assert in_time(lambda: listed(runs)).keys() == {"first", "second"}
    results = in_time(lambda: vf.load_results(runs / "first"))
    if name == CONFIG_NAME or (name == LABELS_NAME and kind != "deep"):
        assert isinstance(results, ConfigError)
        assert name in str(results)
    else:
        assert results["completions"][0][0]["content"] == "2"


def test_a_deep_row_is_damage_with_its_line(runs):
    file = runs / "first" / RESULTS_NAME
    file.write_text(f'{{"example_id": 0, "info": {DEEP}}}\n')
    with pytest.raises(JournalError, match=f"{file}:1: this line is not a saved rollout"):
        vf.load_results(runs / "first")
    library = Library(Catalog([runs]))
    assert "not a saved rollout" in library.columns("first")["damage"]


@pytest.mark.parametrize("value", VALUES)
def test_one_damaged_run_does_not_take_the_others_from_the_list(runs, value):
    metadata = runs / "first" / METADATA_NAME
    config = runs / "first" / CONFIG_NAME
    stored, settings = json.loads(metadata.read_text()), json.loads(config.read_text())
    for name in stored:
        metadata.write_text(json.dumps(stored | {name: value}))
        assert listed(runs)["second"]["reward"] is not None
        in_time(lambda: vf.load_results(runs / "first").summary())
    metadata.write_text(json.dumps(stored))
    for name in settings["config"]:
        config.write_text(json.dumps(settings | {"config": settings["config"] | {name: value}}))
        assert listed(runs).keys() == {"first", "second"}
        with contextlib.suppress(ConfigError):
            Library(Catalog([runs])).run("first")


def test_a_damaged_training_is_listed_as_damaged(tmp_path):
    for name, line in {"good": {"step": 1, "time": 1.0}, "bad": {"time": 10.0**300}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    training = listed(tmp_path)
    assert training["bad"]["status"] == "damaged"
    assert training["good"]["status"] != "damaged"


def test_without_the_guard_one_run_fails_the_whole_list(tmp_path, monkeypatch):
    """Negative control."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "metrics.jsonl").write_text('{"time": 1e300}\n')
    monkeypatch.setattr("verifiers.view.describe.DAMAGE", ())
    with pytest.raises(ArithmeticError):
        listed(tmp_path)
