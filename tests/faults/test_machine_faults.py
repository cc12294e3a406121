"""What a machine or a server changes in the middle of a run: its clock, its model, who may write
where."""

import json
import time
from dataclasses import replace

import pytest

from support.small_envs import add_one, single_turn
from verifiers.storage.journal import read_journal
from verifiers.testing import ScriptedClient

# --- the clock ------------------------------------------------------------------------------------


def going_backwards(monkeypatch, step_s=3600.0):
    """Every look at the wall clock is an hour earlier than the one before."""
    now = [time.time()]

    def earlier():
        now[0] -= step_s
        return now[0]

    monkeypatch.setattr(time, "time", earlier)


def test_a_clock_that_goes_backwards_changes_no_result_and_no_duration(monkeypatch, tmp_path):
    before = single_turn(4).evaluate(ScriptedClient(add_one), "m", results_path=tmp_path / "before")
    going_backwards(monkeypatch)
    results = single_turn(4).evaluate(ScriptedClient(add_one), "m", results_path=tmp_path / "run")
    assert results["rewards"] == before["rewards"] == [1.0] * 4
    assert 0.0 <= results.metadata.time < 60.0
    assert json.loads((tmp_path / "run/metadata.json").read_text())["status"] == "complete"
    client = ScriptedClient(add_one)
    again = single_turn(4).evaluate(client, "m", results_path=tmp_path / "run")
    assert (again["rewards"], client.requests) == ([1.0] * 4, [])


def test_measured_with_that_clock_a_duration_is_negative(monkeypatch):
    """Negative control."""
    going_backwards(monkeypatch)
    started = time.time()
    assert time.time() - started < 0


# --- the model ------------------------------------------------------------------------------------


class Renamed(ScriptedClient):
    """Right answers under these names, one after another, then under the last."""

    def __init__(self, names):
        super().__init__(add_one)
        self.names = list(names)

    async def complete(self, request):
        response = await super().complete(request)
        return replace(response, model=self.names.pop(0) if len(self.names) > 1 else self.names[0])


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_server_that_changes_its_model_is_told_and_every_row_names_its_own(
    tmp_path, caplog, sessions
):
    """Also when it does so between two sessions of the run."""
    client = Renamed(["m"] * 2 + ["m-small"])
    if sessions == 2:
        single_turn(2).evaluate(client, "m", results_path=tmp_path)
    results = single_turn(4).evaluate(client, "m", results_path=tmp_path, max_concurrent=1)
    assert results.metadata.served_models == {"m": 2, "m-small": 2}
    assert "the server answered as 2 models: m (2 rollouts), m-small (2 rollouts)" in caplog.text
    assert [row.get("served_models") for row in read_journal(tmp_path / "results.jsonl")] == [
        *(None, None, ["m-small"], ["m-small"])
    ]


@pytest.mark.parametrize(("name", "served"), [("m", {}), ("m-2026-11", {"m-2026-11": 4})])
def test_a_server_that_keeps_its_model_is_not_warned_about(caplog, name, served):
    """Negative control; another name than the requested one is only noted."""
    results = single_turn(4).evaluate(Renamed([name]), "m")
    assert results.metadata.served_models == served
    assert "the server answered as" not in caplog.text
