"""Rollouts of every kind are to a file, an author and the trainer what commit 2889499 made of them.

``support.golden`` has the kinds and what is dumped. A round trip through a file and through a
worker changes nothing.
"""

import json

import pytest

import verifiers as vf
from support import golden
from verifiers.runs.workers.packing import pack_state, unpack_state

pytest.importorskip("torch", reason="needs the trainer")


@pytest.fixture(scope="module", params=golden.KINDS)
def kind(request):
    """The name of a kind, and its runs of now with their dumps."""
    return request.param, golden.dumps_of_now(request.param)


def without_error(rollout):
    """A file and a worker give the error as a record of it, which prints otherwise."""
    assert "error" in rollout
    return {key: value for key, value in rollout.items() if key not in ("error", "cause")}


def test_every_rollout_is_what_it_was(kind):
    name, runs = kind
    dumps = [item for _, items in runs for item in items]
    before_all = golden.dumps_on_disk(name)

    assert len(dumps) == len(before_all) > 0
    for number, (item, before) in enumerate(zip(dumps, before_all, strict=True)):
        for part in before:
            assert item[part] == before[part], f"{part} of rollout {number} of {name}"


def test_a_saved_run_reads_as_it_was(kind, tmp_path):
    for number, (results, dumps) in enumerate(kind[1]):
        results.save(tmp_path / str(number))
        read = vf.load_results(tmp_path / str(number))
        for item, before in zip(
            json.loads(json.dumps(list(golden.dump(read)))), dumps, strict=True
        ):
            assert item["samples"] == before["samples"]
            assert item["exports"] == before["exports"]
            assert without_error(item["rollout"]) == without_error(before["rollout"])


def test_a_rollout_that_a_worker_sends_is_what_it_was(kind):
    for results, dumps in kind[1]:
        for state, before in zip(results["states"], dumps, strict=True):
            sent = unpack_state(pack_state(state))
            rollout = json.loads(json.dumps(golden.rollout_view(sent.rollout())))
            assert without_error(rollout) == without_error(before["rollout"])
            view = json.loads(json.dumps(golden.state_view(sent)))
            assert {key: view[key] for key in view} == {key: before["state"][key] for key in view}


def test_the_kinds_are_about_a_hundred_rollouts():
    assert sum(len(golden.dumps_on_disk(name)) for name in golden.KINDS) >= 100
    assert {path.stem for path in golden.FOLDER.glob("*.jsonl")} == set(golden.KINDS)


def test_a_rollout_that_differs_would_be_found():
    """Negative control: a reward, a token and a key of the state each show."""
    (results, dumps), *_ = golden.dumps_of_now("turn_rewards")
    state, *_ = results["states"]
    for change in (
        lambda: state.update(reward=0.5),
        lambda: state.update(answer="another"),
        lambda: state["trajectory"][0]["tokens"].__setitem__("completion_ids", [1, 2]),
    ):
        before = json.dumps(dumps[0])
        change()
        dumps = list(golden.dump(results))
        assert json.dumps(dumps[0]) != before
