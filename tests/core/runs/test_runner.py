"""Many rollouts: isolation between them, groups, retries, the circuit breaker, cancellation, what
stops a run."""

import asyncio
import gc
import math
import time
import warnings

import pytest

import verifiers as vf
from support.small_envs import Talk, add_one, exact, row, single_turn, sums
from verifiers.data.examples import examples_from
from verifiers.runs.plan import Job
from verifiers.runs.rollout import Progress, RunContext, generate_group
from verifiers.runs.runner import Runner
from verifiers.testing import ScriptedClient


class Kept:
    """A sink that remembers what it was given."""

    def __init__(self):
        self.writes, self.completed = [], []

    async def store(self, jobs, states):
        await asyncio.sleep(0)
        self.writes.append([(job.example.example_id, job.sibling) for job in jobs])

    def complete(self, jobs, states):
        self.completed.append([state["advantage"] for state in states])


def jobs_of(env, siblings=1):
    examples = examples_from(sums(len(env.train_table)), env.row_format)
    return [
        Job(example, n, siblings, index * siblings + n)
        for index, example in enumerate(examples)
        for n in range(siblings)
    ]


async def run(env, client, siblings=1, concurrency=8, abort_after=0, **context):
    sink = Kept()
    runner = Runner(
        env,
        RunContext(client, "m", **context),
        sink,
        concurrency=concurrency,
        abort_after=abort_after,
    )
    await runner.run(jobs_of(env, siblings))
    return sink, runner


# --- isolation


async def test_siblings_share_nothing_they_could_change():
    class Changing(vf.SingleTurnEnv):
        def setup_state(self, state):
            assert state["info"] == {"tags": ["a"]}
            assert state["prompt"][0]["content"] == "hello"
            assert state["tool_defs"] == [{"name": "t"}]
            assert state["sampling_args"] == {"extra_body": {"k": 1}}
            state["info"]["tags"].append("mine")
            state["prompt"][0]["content"] = "changed"
            state["tool_defs"][0]["name"] = "changed"
            state["sampling_args"]["extra_body"]["k"] = 2

    env = Changing(dataset=[row(info={"tags": ["a"]})], tool_defs=[{"name": "t"}])
    for _ in range(2):
        results = await env.evaluate(
            ScriptedClient("x"), "m", rollouts_per_example=4, sampling_args={"extra_body": {"k": 1}}
        )
        assert results["errors"] == [None] * 4
    assert env.train_table[0].row["info"] == {"tags": ["a"]}


async def test_siblings_over_one_shared_row_are_the_fault_without_copies():
    """Negative control: states made of the row itself see each other's changes."""
    env = single_turn(1)
    first_row = env.train_table.take(1)[0].row | {"info": {"tags": []}}
    first = await env.init_state(first_row, None, "m")
    first["info"]["tags"].append("mine")
    assert (await env.init_state(first_row, None, "m"))["info"] == {"tags": ["mine"]}


async def test_at_most_so_many_rollouts_are_in_flight():
    client = ScriptedClient("x", delay_s=0.002)
    await run(single_turn(20), client, concurrency=4)
    assert client.max_in_flight == 4


@pytest.mark.parametrize(
    ("option", "limit"), [("max_concurrent_generation", 3), ("max_concurrent", 2)]
)
async def test_model_calls_can_be_limited(option, limit):
    client = ScriptedClient("x", delay_s=0.002)
    await single_turn(12).evaluate(client, "m", **{option: limit})
    assert client.max_in_flight == limit


async def test_scoring_can_be_limited():
    running, most = 0, 0

    async def slow(completion):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return 1.0

    await single_turn(12, rubric=vf.Rubric(funcs=[slow])).evaluate(
        ScriptedClient("x"), "m", max_concurrent_scoring=2
    )
    assert most == 2


async def test_a_slow_rollout_holds_up_nobody():
    async def reply(request):
        await asyncio.sleep(0.3 if request.prompt[-1]["content"] == "0 + 1" else 0)
        return "x"

    finished = []
    env = single_turn(10)
    await env.evaluate(
        ScriptedClient(reply),
        "m",
        max_concurrent=2,
        on_progress=lambda rows, _: finished.extend(r.example_id for r in rows),
    )
    assert finished[-1] == 0


# --- groups


def by_group(completions, answers):
    return [float(len(completions))] * len(completions)


async def test_a_group_is_scored_and_stored_as_one():
    env = single_turn(3, rubric=vf.Rubric(funcs=[exact, by_group]))
    sink, _ = await run(env, ScriptedClient(add_one), siblings=4, concurrency=3)
    assert sorted(sink.writes) == [[(example, n) for n in range(4)] for example in range(3)]
    assert sink.completed == [[0.0] * 4] * 3


async def test_without_group_functions_each_rollout_is_stored_at_once():
    sink, _ = await run(single_turn(2), ScriptedClient(["1", "2"]), siblings=2, concurrency=1)
    assert sink.writes == [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)]]
    assert sink.completed == [[0.5, -0.5], [-0.5, 0.5]]


async def test_a_group_does_not_hold_places_of_finished_members():
    """Two places, groups of four: with places held until the group is done this would never end."""
    env = single_turn(4, rubric=vf.Rubric(funcs=[by_group]))
    sink, _ = await asyncio.wait_for(run(env, ScriptedClient("x"), siblings=4, concurrency=2), 5)
    assert len(sink.writes) == 4


async def test_advantages_are_computed_once_from_the_final_reward():
    calls = []

    class OwnRubric(vf.Rubric):
        @vf.reward
        def score(self, completion):
            return float(completion[-1]["content"])

        @vf.advantage
        def advantages(self, states):
            calls.append([s["reward"] for s in states])
            return [10 * s["reward"] for s in states]

    env = single_turn(1, rubric=OwnRubric())
    sink, _ = await run(env, ScriptedClient(["1", "2"]), siblings=2, concurrency=1)
    assert calls == [[1.0, 2.0]]
    assert sink.completed == [[10.0, 20.0]]
    # such a group is stored whole: its advantages are not ours to repeat
    assert sink.writes == [[(0, 0), (0, 1)]]


async def test_play_group_plays_siblings_side_by_side():
    env = single_turn(1)
    client = ScriptedClient(["1", "2", "1"], delay_s=0.02)
    states = await generate_group(env, jobs_of(env, 3), RunContext(client, "m"))
    assert client.max_in_flight == 3
    assert sorted(s["reward"] for s in states) == [0.0, 1.0, 1.0]
    assert sum(s["advantage"] for s in states) == pytest.approx(0)


async def test_a_cancelled_group_leaves_no_coroutine_behind():
    env = single_turn(1)
    gc.collect()  # what earlier tests left
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # "coroutine … was never awaited"
        task = asyncio.ensure_future(
            generate_group(env, jobs_of(env, 5), RunContext(ScriptedClient("x", delay_s=60), "m"))
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gc.collect()


async def test_a_run_error_of_one_sibling_is_raised_as_itself():
    env = single_turn(1)
    client = ScriptedClient("x", errors={1: vf.AuthenticationFailed("no key")}, delay_s=0.01)
    with pytest.raises(vf.AuthenticationFailed):
        await generate_group(env, jobs_of(env, 3), RunContext(client, "m"))
    assert client.in_flight == 0


# --- scores


async def test_monitored_metrics_stand_beside_the_rubrics_and_touch_no_reward():
    def num_turns(completion):
        return 99.0

    def broken(state):
        raise ValueError("no")

    async def later(state):
        return 2

    env = Talk(max_turns=3, rubric=vf.Rubric(funcs=[exact]))
    env.monitor_rubric.add_metric(broken)
    env.monitor_rubric.add_metric(later)
    results = await env.evaluate(ScriptedClient("1"), "m")
    metrics = results.outputs[0].metrics
    assert (metrics["exact"], metrics["num_turns"], metrics["later"]) == (1.0, 3.0, 2.0)
    assert math.isnan(metrics["broken"])
    assert results["rewards"] == [1.0]
    assert env.rubric.get_reward_func_names() == ["exact"]
    metric_env = Talk(max_turns=3, rubric=vf.Rubric(funcs=[num_turns]))
    assert (await metric_env.evaluate(ScriptedClient("1"), "m")).outputs[0].metrics == {
        "num_turns": 99.0
    }


async def test_unscored_rollouts_have_unknown_rewards():
    results = await single_turn(2).evaluate(ScriptedClient("1"), "m", score_rollouts=False)
    assert all(map(math.isnan, results["rewards"] + results["advantages"]))
    assert math.isnan(results.metadata.avg_reward)
    assert "exact" not in results["metrics"]


async def test_a_rollout_that_ended_in_an_error_has_an_unknown_reward_unless_it_is_the_models_doing():
    errors = {
        0: vf.ModelUnavailable("down"),
        1: vf.ToolCallError("broke"),
        2: vf.OverlongPromptError("long"),
    }
    results = await single_turn(3).evaluate(
        ScriptedClient("x", errors=errors), "m", max_concurrent=1
    )
    assert math.isnan(results["rewards"][0])
    assert results["rewards"][1:] == [0.0, 0.0]
    assert results.metadata.num_errors == 2
    assert results["stop_conditions"] == ["has_error", "has_error", "prompt_too_long"]


@pytest.mark.parametrize("method", ["score_rollout", "score_group"])
async def test_a_scoring_method_of_the_authors_own_that_fails_costs_the_reward_only(method):
    async def broken(self, *args, **kwargs):
        raise SystemExit("out")

    env = single_turn(2, rubric=type("Own", (vf.Rubric,), {method: broken})(funcs=[exact]))
    results = await env.evaluate(ScriptedClient("1"), "m")
    assert all(map(math.isnan, results["rewards"]))
    if method == "score_rollout":
        assert [e.error for e in results["errors"]] == ["ScoringError"] * 2


async def test_a_rubrics_clean_up_runs_once_per_rollout_in_every_mode():
    for options in ({}, {"independent_scoring": True}, {"rollouts_per_example": 2}):
        cleaned = []
        rubric = vf.Rubric(funcs=[exact])
        rubric.add_cleanup_handler(lambda state, cleaned=cleaned: cleaned.append(id(state)))
        results = await single_turn(2, rubric=rubric).evaluate(ScriptedClient("1"), "m", **options)
        assert len(cleaned) == len(set(cleaned)) == len(results)


async def test_a_rubrics_clean_up_runs_for_siblings_of_a_group_that_never_ended():
    cleaned = []
    rubric = vf.Rubric(funcs=[exact])
    rubric.add_cleanup_handler(lambda state: cleaned.append(state["trajectory_id"]))
    env = single_turn(1, rubric=rubric)
    client = ScriptedClient("1", errors={2: vf.AuthenticationFailed("no key")})
    with pytest.raises(vf.AuthenticationFailed):
        await run(env, client, siblings=4, concurrency=1)
    assert len(cleaned) == 2


# --- playing again


class Flaky(vf.SingleTurnEnv):
    """The sandbox fails on the first ``bad`` attempts of every rollout."""

    def __init__(self, bad, error, **parameters):
        self.bad, self.error, self.played = bad, error, 0
        super().__init__(dataset=sums(1), rubric=vf.Rubric(funcs=[exact]), **parameters)

    def setup_state(self, state):
        self.played += 1
        if self.played <= self.bad:
            raise self.error


@pytest.mark.parametrize(
    ("error", "bad", "retries", "played", "ok"),
    [
        (vf.SandboxUnavailable("no sandbox"), 2, 2, 3, True),
        (vf.SandboxUnavailable("no sandbox"), 3, 2, 3, False),
        (vf.InfraError("lost"), 1, 0, 1, False),
        (vf.ModelUnavailable("down"), 1, 5, 1, False),  # the client repeated it already
        (ValueError("bug"), 1, 5, 1, False),
    ],
)
async def test_only_retryable_faults_that_are_not_the_models_are_played_again(
    error, bad, retries, played, ok
):
    env = Flaky(bad, error)
    results = await env.evaluate(ScriptedClient("1"), "m", max_retries=retries)
    assert env.played == played
    assert (results["errors"] == [None]) is ok
    assert results["states"][0].attempts == played


# --- an author's own loop


async def test_an_overridden_rollout_is_isolated_timed_and_scored():
    class OwnEnv(vf.Environment):
        async def rollout(self, input, client, model, sampling_args=None):
            state = await self.init_state(input, client, model, sampling_args)
            if input["answer"] == "2":
                raise KeyError("bug")
            if input["answer"] == "3":
                await asyncio.sleep(60)
            if input["answer"] == "4":
                return {"no": "state"}
            response = await self.get_model_response(state, state["prompt"])
            await self.add_model_response(state, state["prompt"], response)
            state["completion"] = [response.message]
            return state

    env = OwnEnv(dataset=sums(5), rubric=vf.Rubric(funcs=[exact]))
    client = ScriptedClient(add_one)
    results = await env.evaluate(client, "m", rollout_timeout_s=0.2, seed=3)
    assert results["rewards"][0] == results["rewards"][4] == 1.0
    assert [e and e.error for e in results["errors"]] == [
        None,
        "EnvironmentFault",
        "RolloutTimeout",
        "EnvironmentFault",
        None,
    ]
    assert results["errors"][1].where == "rollout"
    assert results["stop_conditions"][2] == "timeout_reached"
    assert "not a State" in results["errors"][3].message
    assert all(request.seed is not None for request in client.requests)
    assert results["timings"][0].generation_ms > 0
    assert (await env.a_rollout(sums(1)[0], ScriptedClient("1"), "m"))["completion"][
        0
    ].content == "1"


async def test_an_overridden_rollout_may_call_the_loop_it_replaces():
    class Wrapping(Talk):
        async def rollout(self, input, client, model, sampling_args=None):
            state = await super().rollout(input, client, model, sampling_args)
            state["wrapped"] = True
            return state

    env = Wrapping(2, max_turns=2)
    client = ScriptedClient("x", tokens=True)
    context = RunContext(client, "m", require_tokens=True, seed=7)
    states = await generate_group(env, jobs_of(env), context)
    assert all(s["wrapped"] and s["turn"] == 2 and s.run is context for s in states)
    assert all(r.require_tokens and r.seed is not None for r in client.requests)


# --- seeds


async def test_seeds_follow_from_seed_example_sibling_and_turn_alone():
    async def seeds(seed, siblings=2, concurrency=8, count=2):
        env, client = Talk(count, max_turns=2), ScriptedClient("x", delay_s=0.001)
        await run(env, client, siblings, concurrency, seed=seed)
        return sorted(r.seed for r in client.requests)

    first = await seeds(1)
    assert len(set(first)) == 8
    assert await seeds(1, concurrency=1) == first
    assert set(await seeds(1, siblings=1)) < set(first)
    assert set(first) < set(await seeds(1, count=3))
    assert not set(await seeds(2)) & set(first)
    client = ScriptedClient("x")
    await run(single_turn(1), client)
    assert client.requests[0].seed is None


# --- what stops a run


async def test_a_run_stops_when_everything_fails_with_one_cause():
    client = ScriptedClient(
        "x", errors=lambda request: vf.ModelUnavailable("HTTP 503 from everywhere")
    )
    with pytest.raises(vf.TooManyFaults) as caught:
        await single_turn(1000).evaluate(client, "m", abort_after=10, max_concurrent=4)
    assert (caught.value.cause, caught.value.count, caught.value.exit_code) == (
        "ModelUnavailable",
        10,
        3,
    )
    assert "HTTP 503 from everywhere" in str(caught.value)
    assert isinstance(caught.value.__cause__, vf.ModelUnavailable)
    assert len(client.requests) <= 10 + 4


async def test_without_the_breaker_the_whole_plan_fails():
    """Negative control."""
    client = ScriptedClient("x", errors=lambda request: vf.ModelUnavailable("down"))
    results = await single_turn(100).evaluate(client, "m", abort_after=0)
    assert results.metadata.num_errors == len(client.requests) == 100


async def test_successes_and_the_models_own_failures_are_no_streak():
    def some_fail(request):
        n = int(request.prompt[-1]["content"].split()[0])
        return vf.ModelUnavailable("down") if n % 4 else None

    results = await single_turn(200).evaluate(
        ScriptedClient("x", errors=some_fail), "m", abort_after=5, max_concurrent=1
    )
    assert results.metadata.num_errors == 150
    broken = ScriptedClient(
        "x", errors=lambda request: vf.ToolCallError("the model calls nonsense")
    )
    assert len(await single_turn(50).evaluate(broken, "m", abort_after=5)) == 50


async def test_a_run_error_stops_everything_and_no_model_call_follows():
    client = ScriptedClient("x", delay_s=0.005, errors={20: vf.AuthenticationFailed("no key")})
    with pytest.raises(vf.AuthenticationFailed):
        await single_turn(500).evaluate(client, "m", max_concurrent=8)
    asked = len(client.requests)
    assert asked < 40
    assert client.in_flight == 0
    await asyncio.sleep(0.05)
    assert len(client.requests) == asked


async def test_a_hook_that_outlives_its_run_cannot_call_the_model():
    env, client = single_turn(1), ScriptedClient("x")
    results = await env.evaluate(client, "m")
    with pytest.raises(vf.RunError, match="over"):
        await env.get_model_response(results["states"][0], "one more")
    assert len(client.requests) == 1


async def test_cancelling_a_run_takes_less_than_a_second_and_leaves_nothing():
    env = Talk(200, max_turns=5)
    client = ScriptedClient("x", delay_s=0.01)
    before = asyncio.all_tasks()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task = asyncio.ensure_future(env.evaluate(client, "m", max_concurrent=64))
        await asyncio.sleep(0.1)
        task.cancel()
        started = time.perf_counter()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.perf_counter() - started < 1
        asked = len(client.requests)
        await asyncio.sleep(0.05)
        assert (len(client.requests), client.in_flight) == (asked, 0)
        assert asyncio.all_tasks() == before
        gc.collect()


async def test_workers_whose_cancellation_is_swallowed_stop_before_their_next_rollout():
    class Stubborn(Talk):
        async def env_response(self, messages, state):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                state["final_env_response"] = "never mind"

    client = ScriptedClient("x")
    task = asyncio.ensure_future(Stubborn(100).evaluate(client, "m", max_concurrent=4))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(client.requests) == 4


async def test_a_stray_cancellation_inside_a_hook_costs_its_rollout_only():
    class Stray(Talk):
        async def env_response(self, messages, state):
            inner = asyncio.ensure_future(asyncio.sleep(60))
            inner.cancel()
            await inner

    results = await Stray(3).evaluate(ScriptedClient("x"), "m")
    assert [e.error for e in results["errors"]] == ["EnvironmentFault"] * 3


# --- what a display sees


async def test_progress_counts_what_is_durable():
    progress = Progress()
    seen = []
    client = ScriptedClient(add_one, errors={2: vf.ModelUnavailable("down")}, tokens=True)
    await single_turn(4).evaluate(
        client,
        "m",
        max_concurrent=1,
        progress=progress,
        on_progress=lambda rows, _: seen.append(progress.done),
    )
    assert seen == [0, 1, 2, 3]
    assert (progress.total, progress.done, progress.rewards, progress.reward_sum) == (4, 4, 3, 3.0)
    assert progress.errors == {"ModelUnavailable": 1}
    assert progress.running == {}
    assert progress.output_tokens > 0


async def test_a_running_rollout_says_what_it_waits_for():
    progress = Progress()
    task = asyncio.ensure_future(
        single_turn(1).evaluate(ScriptedClient("x", delay_s=60), "m", progress=progress)
    )
    await asyncio.sleep(0.05)
    ((_, state),) = progress.running.values()
    assert state.waiting_for == "the model"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
