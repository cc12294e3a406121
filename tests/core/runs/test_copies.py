"""``on_results``: a run is complete when the copies of its results are written."""

from __future__ import annotations

import asyncio
import threading

import pytest

import verifiers as vf
from verifiers.storage.directory import is_complete, read_metadata
from verifiers.testing import ScriptedClient


def make_env():
    rows = [{"question": f"{n}", "answer": "x"} for n in range(3)]
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([lambda completion: 1.0]))


def test_the_results_are_handed_over_before_the_run_counts_as_complete(tmp_path):
    seen = []

    def copy(results):
        thread = threading.current_thread() is threading.main_thread()
        seen.append((results["rewards"], results.metadata.status, is_complete(tmp_path), thread))

    make_env().evaluate(ScriptedClient("x"), "m", results_path=tmp_path, on_results=copy)
    assert seen == [([1.0, 1.0, 1.0], "complete", False, False)]
    assert is_complete(tmp_path)


def test_a_copy_that_fails_leaves_the_run_unfinished_and_the_same_call_asks_nothing(tmp_path):
    client, env = ScriptedClient("x"), make_env()

    async def fail(results):
        raise vf.ConfigError("the shelf is full")

    with pytest.raises(vf.ConfigError, match="the shelf is full"):
        env.evaluate(client, "m", results_path=tmp_path, on_results=fail)
    assert read_metadata(tmp_path)["status"] == "failed"
    copies = []
    env.evaluate(client, "m", results_path=tmp_path, on_results=copies.append)
    assert (len(client.requests), len(copies), is_complete(tmp_path)) == (3, 1, True)


def test_a_dataset_that_cannot_be_published_is_published_by_the_same_call(tmp_path):
    client, env = ScriptedClient("x"), make_env()
    with pytest.raises(ValueError, match="Repo id must be"):
        env.evaluate(
            client, "m", results_path=tmp_path, push_to_hub=True, hub_name="no/name/of/a/dataset"
        )
    assert read_metadata(tmp_path)["status"] == "failed"
    env.evaluate(client, "m", results_path=tmp_path)
    assert (len(client.requests), is_complete(tmp_path)) == (3, True)


def test_a_cancelled_run_waits_for_the_copy_that_it_began(tmp_path):
    begun, may_end, ended = threading.Event(), threading.Event(), []

    def copy(results):
        begun.set()
        may_end.wait(10)
        ended.append(True)

    async def main():
        call = make_env().a_evaluate(
            ScriptedClient("x"), "m", results_path=tmp_path, on_results=copy
        )
        task = asyncio.ensure_future(call)
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.sleep(0.02)
        waited = not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return waited

    assert asyncio.run(main())
    assert (ended, read_metadata(tmp_path)["status"]) == ([True], "interrupted")
