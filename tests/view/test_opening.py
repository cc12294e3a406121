"""``vf.open_view``: results and run directories as a page, from Python."""

import json
import urllib.request
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.testing import ScriptedClient


@pytest.fixture
def env():
    return vf.SingleTurnEnv(dataset=[{"question": "1 + 1", "answer": "2"}], env_id="sums")


def runs_of(view):
    with urllib.request.urlopen(f"{view.url}api/runs", timeout=10) as answer:
        return json.load(answer)["runs"]


def test_results_that_were_not_saved_are_shown_and_leave_nothing(env):
    with vf.open_view(env.evaluate(ScriptedClient("2"), "m"), browser=False) as view:
        (run,) = runs_of(view)
        assert run["kind"] == "evaluation"
        folder = Path(view._temporary.name)
        assert folder.is_dir()
        assert view.url in view._repr_html_()
    assert not folder.exists()
    with pytest.raises(OSError):
        runs_of(view)


def test_a_saved_run_is_shown_in_place(env, tmp_path):
    results = env.evaluate(ScriptedClient("2"), "m", results_path=str(tmp_path / "run"))
    for runs in (results, tmp_path, tmp_path / "run"):
        with vf.open_view(runs, browser=False) as view:
            assert len(runs_of(view)) == 1
    assert (tmp_path / "run").is_dir()


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(vf.ConfigError, match="nowhere"):
        vf.open_view(tmp_path / "nowhere", browser=False)
