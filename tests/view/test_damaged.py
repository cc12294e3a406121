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
from verifiers.view.export import export
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


LINE = {"step": 1, "policy_version": 1, "time": 1.0, "reward/mean": 0.5, "tokens/trained": 5}
ROW = '{"example_id": 0, "prompt": "q", "completion": "a", "reward": 1.0, "metrics": {"a": 1}}\n'
SETTINGS = '{"config": {"reward_functions": %s, "reward_weights": ["x"]}, "fingerprint": "y"}'
ODD = {
    "a version without a bound": {"metrics.jsonl": json.dumps(LINE | {"canary/version": 1e999})},
    "a version that is huge": {"metrics.jsonl": json.dumps(LINE | {"canary/version": 10**300})},
    "a disagreement in words": {
        "metrics.jsonl": json.dumps(LINE | {"sampler/disagreement": "x"})
        + "\n"
        + json.dumps(LINE | {"sampler/disagreement": 1})
    },
    "a lag without a number": {"metrics.jsonl": json.dumps(LINE | {"tokens/lag/x": 1})},
    "a line without a version": {"metrics.jsonl": json.dumps({"step": 1, "tokens/trained": 1})},
    "weights in words": {RESULTS_NAME: ROW, CONFIG_NAME: SETTINGS % '["a"]'},
    "functions as a number": {RESULTS_NAME: ROW, CONFIG_NAME: SETTINGS % "5"},
    "no rows": {RESULTS_NAME: "no json\n"},
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_run_does_not_take_the_others_from_a_copy(runs, kind):
    (runs / "odd").mkdir()
    for name, text in ODD[kind].items():
        (runs / "odd" / name).write_text(f"{text}\n")
    library = Library(Catalog([runs]))
    page = export(library, runs.parent / f"{runs.name}-copy")
    copied = {folder.name for folder in (page.parent / "data").iterdir() if folder.is_dir()}
    names = sorted(run["id"] for run in library.runs()["runs"])
    assert {str(names.index(name)) for name in ("first", "second")} <= copied
    for name in ("first", "second"):
        assert (page.parent / "data" / str(names.index(name)) / "rows" / "rollouts-0.js").exists()


@pytest.mark.parametrize("kind", [kind for kind in ODD if "metrics.jsonl" in ODD[kind]])
def test_odd_metrics_have_curves_and_an_unknown_proof(runs, kind):
    (runs / "odd").mkdir()
    for name, text in ODD[kind].items():
        (runs / "odd" / name).write_text(f"{text}\n")
    metrics = Library(Catalog([runs])).metrics("odd")
    assert metrics["lines"][0]["step"] == 1
    assert metrics["proof"]["verdict"] == "unknown"
