"""Promise: one rollout's failure is that rollout's failure. It never costs a neighbour, a request,
or the run."""

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest

import verifiers as vf
from support.small_envs import Talk, add_one, single_turn, sums
from support.threads import no_new_thread
from verifiers.testing import FakeServer, ScriptedClient

COUNT, BAD = 100, 37
HOOKS = (
    "setup_state",
    "env_response",
    "get_prompt_messages",
    "add_model_response",
    "render_completion",
)


def one(completion):
    return 1.0


def spoilt(hook, error):
    """An environment in which one hook fails for one of a hundred rows."""

    class Spoilt(vf.MultiTurnEnv):
        def env_response(self, messages, state):
            return "again"

    original = getattr(Spoilt, hook)

    def failing(self, *args):
        state = next(a for a in args if isinstance(a, vf.State))
        if state["example_id"] == BAD and (hook != "get_prompt_messages" or state["turn"]):
            raise error
        return original(self, *args)

    setattr(Spoilt, hook, failing)
    return Spoilt(dataset=sums(COUNT), rubric=vf.Rubric(funcs=[one]), max_turns=2)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    "error",
    [KeyError("x"), SystemExit(1), RecursionError(), MemoryError()],
    ids=lambda e: type(e).__name__,
)
def test_a_hook_that_raises_in_one_of_a_hundred_costs_one(hook, error):
    client = ScriptedClient("x")
    results = spoilt(hook, error).evaluate(client, "m", max_concurrent=16)
    assert [n for n, e in enumerate(results["errors"]) if e] == [BAD]
    failure = results["errors"][BAD]
    assert (failure.error, failure.where) == ("EnvironmentFault", hook)
    assert type(error).__name__ in failure.traceback
    assert results["rewards"].count(1.0) == COUNT - 1
    assert results.metadata.num_errors == 1


@pytest.mark.parametrize("mark", [vf.setup, vf.stop, vf.cleanup], ids=lambda mark: mark.__name__)
@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(1)], ids=lambda e: type(e).__name__)
def test_a_marked_method_that_raises_in_one_of_a_hundred_costs_one(mark, error):
    def broken(self, state):
        if state["example_id"] == BAD:
            raise error

    env = type("Marked", (Talk,), {"broken": mark(broken)})(
        COUNT, max_turns=2, rubric=vf.Rubric(funcs=[one])
    )
    results = env.evaluate(ScriptedClient("x"), "m", max_concurrent=16)
    assert [(n, e.where) for n, e in enumerate(results["errors"]) if e] == [(BAD, "broken")]
    assert results["rewards"].count(1.0) == COUNT - 1


async def test_gathering_coroutines_that_raise_loses_everything():
    """Negative control: what a naive runner does with the same fault."""
    env = spoilt("env_response", KeyError("x"))
    asked = []

    async def naive(row):
        if row["example_id"] == BAD:
            raise KeyError("x")
        await asyncio.sleep(0.01)
        asked.append(row)

    with pytest.raises(KeyError):
        await asyncio.gather(*(naive(example.row) for example in env.train_table))
    assert asked == []
    await asyncio.sleep(0.05)
    assert len(asked) == COUNT - 1  # the orphans went on after the call had returned


def test_the_server_sees_no_request_after_the_return():
    with FakeServer("x", delay_s=0.005) as server:
        spoilt("env_response", KeyError("x")).evaluate(
            vf.ClientConfig(api_base_url=server.url), "scripted", max_concurrent=16
        )
        asked = server.count
        time.sleep(0.2)
        assert server.count == asked == 2 * COUNT - 1


def test_a_hundred_rollouts_that_change_what_they_are_given_leave_siblings_and_examples_as_they_were():
    def vain(completion, info, prompt):
        assert info == {"board": [1]}
        for argument in (completion, info, prompt):
            argument.clear()
        return 1.0

    class Changing(Talk):
        def env_response(self, messages, state):
            messages.clear()
            return "more"

        def setup_state(self, state):
            state["info"]["board"].append(1)
            state["prompt"][0]["content"] += "!"
            state["input"]["extra"].clear()

    rows = [{**row, "info": {"board": []}, "extra": [1, 2]} for row in sums(5)]
    env = Changing(dataset=rows, max_turns=2, rubric=vf.Rubric(funcs=[vain]))
    for _ in range(2):
        client = ScriptedClient("x")
        results = env.evaluate(client, "m", rollouts_per_example=10)
        assert results["errors"] == [None] * 50
        assert results["rewards"] == [1.0] * 50
        assert {len(request.prompt) for request in client.requests} == {1, 3}
    assert all(
        example.row["info"] == {"board": []} and example.row["extra"] == [1, 2]
        for example in env.train_table
    )


class Endless(Talk):
    async def env_response(self, messages, state):
        await asyncio.sleep(0.001)
        return "more"


async def test_an_environment_without_end_is_bounded_by_the_run_and_its_turns_are_kept():
    results = await Endless(1, max_turns=-1).evaluate(
        ScriptedClient("x"), "m", rollout_timeout_s=0.2
    )
    assert results["errors"][0].error == "RolloutTimeout"
    assert len(results["completions"][0]) > 3
    assert results["is_truncated"] == [True]
    assert results["stop_conditions"] == ["timeout_reached"]


async def test_without_the_bound_it_ends_when_the_caller_does():
    """Negative control."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(
            Endless(1, max_turns=-1).evaluate(
                ScriptedClient("x", delay_s=0.01), "m", rollout_timeout_s=None
            ),
            0.5,
        )


def test_a_plan_of_failures_ends_after_a_few():
    broken = spoilt("setup_state", KeyError("x"))
    type(broken).setup_state = lambda self, state: {}["missing"]
    client = ScriptedClient("x")
    with pytest.raises(vf.TooManyFaults, match="KeyError: 'missing'") as caught:
        broken.evaluate(client, "m", max_concurrent=4)
    assert (caught.value.cause, caught.value.count) == ("EnvironmentFault", 32)
    assert client.requests == []


def test_construction_and_evaluation_in_a_thread_inside_a_loop_and_twice():
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    rewards = []

    def both():
        for _ in range(2):
            rewards.append(single_turn(3).evaluate(ScriptedClient(add_one), "m")["rewards"])

    async def inside():
        both_here = [single_turn(3), single_turn(3)]
        results = await asyncio.gather(
            *(env.evaluate(ScriptedClient(add_one), "m") for env in both_here)
        )
        rewards.extend(r["rewards"] for r in results)
        rewards.append(single_turn(3).evaluate_sync(ScriptedClient(add_one), "m")["rewards"])

    with no_new_thread():
        thread = threading.Thread(target=both)
        thread.start()
        thread.join()
        asyncio.run(inside())
    assert rewards == [[1.0] * 3] * 5
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_the_naive_ways_fail_in_a_thread_and_inside_a_loop():
    """Negative control: handlers are for the main thread, and a loop runs no second one."""
    failures = []

    def handle():
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        except ValueError as error:
            failures.append(str(error))

    thread = threading.Thread(target=handle)
    thread.start()
    thread.join()

    async def inside():
        work = asyncio.sleep(0)
        try:
            asyncio.run(work)
        except RuntimeError as error:
            failures.append(str(error))
        work.close()

    asyncio.run(inside())
    assert len(failures) == 2


def test_cancelling_half_way_ends_within_a_second_without_a_warning(tmp_path):
    code = f"""
import asyncio, gc, time
import verifiers as vf
from verifiers.testing import ScriptedClient

class Env(vf.MultiTurnEnv):
    async def env_response(self, messages, state):
        await asyncio.sleep(0.01)
        return "more"

def score(completions):
    return [1.0] * len(completions)

async def main():
    env = Env(dataset=[{{"question": str(n)}} for n in range(500)], rubric=vf.Rubric(funcs=[score]), max_turns=4)
    client, begun = ScriptedClient("x", delay_s=0.01), asyncio.Event()
    task = asyncio.ensure_future(
        env.generate(None, client, "m", rollouts_per_example=4, max_concurrent=64, results_path={str(tmp_path)!r},
                     on_progress=lambda outputs, metadata: begun.set())
    )
    await begun.wait()
    task.cancel()
    started = time.perf_counter()
    try:
        await task
    except asyncio.CancelledError:
        pass
    asked = len(client.requests)
    print(time.perf_counter() - started < 1, client.in_flight, asked > 100)
    await asyncio.sleep(0.1)
    print(len(client.requests) == asked, len(asyncio.all_tasks()))

asyncio.run(main())
gc.collect()
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", code], capture_output=True, text=True
    )
    assert done.stdout.split() == ["True", "0", "True", "True", "1"], done.stderr
    assert "never" not in done.stderr
    assert "Traceback" not in done.stderr


def test_coroutines_made_before_their_tasks_begin_are_what_warns():
    """Negative control: nested coroutines are never awaited when the tasks are cancelled before
    they start."""

    async def inner():
        return 1

    async def outer(awaitable):
        return await awaitable

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outer(inner()).close()  # what a cancellation before the start does
        gc.collect()
    assert any("never awaited" in str(w.message) for w in caught)
