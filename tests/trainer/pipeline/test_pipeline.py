"""The pipeline against a scripted client: how much runs, what is trained, what ends a run, what it
says meanwhile."""

import asyncio
import copy
import hashlib
import json
import math
import random
import re
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import verifiers as vf
from support.pipeline import (
    GROUP,
    Policy,
    advance,
    counting_env,
    dead_if,
    indices,
    number,
    pipeline,
    pipeline_config,
    question,
    steps,
    turn_of_each,
)
from support.threads import no_new_thread
from verifiers.errors import (
    AuthenticationFailed,
    ConfigError,
    GenerationStalled,
    NoLearningSignal,
    RunError,
    TooManyFaults,
)
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.status import Status
from verifiers.runs.rollout import RunContext
from verifiers_trainer.algorithm.batch import Group
from verifiers_trainer.pipeline import health, saved_state
from verifiers_trainer.pipeline.custom_batches import CustomRows
from verifiers_trainer.pipeline.health import SignalMeter, upper_bound
from verifiers_trainer.pipeline.pipeline import Pipeline
from verifiers_trainer.pipeline.schedule import PipelineState, Pool, Signal, Solved
from verifiers_trainer.pipeline.thread import PipelineThread

RECORD = Rollout((), 0.0, {}, Status("stop"))


def eventually(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert condition()


# --- how much runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_what_runs_at_once_follows_from_the_lag(lag):
    policy = Policy()
    policy.held = True
    with pipeline(policy, max_off_policy_steps=lag) as source:
        eventually(lambda: policy.in_flight == 2 * (lag + 1) * GROUP)
        policy.held = False
        source.next_batch()
        eventually(lambda: not source.pipeline.running)
        begun = source.pipeline.state.next_index
        assert begun == 2 * (lag + 1)  # nothing more before the weights have changed
        advance(source, policy)
        assert source.pipeline.state.next_index == begun + 2


@pytest.mark.parametrize(
    ("max_steps", "num_new"), [(2, 0), (3, 2), (-1, 2)]
)  # the last two: negative controls
def test_no_rollout_is_started_with_the_policy_after_the_last_step(max_steps, num_new):
    policy = Policy()
    with pipeline(policy, max_off_policy_steps=0, max_steps=max_steps) as source:
        steps(source, policy, 2)
        source.settle()
        assert source.pipeline.state.next_index == 4 + num_new
        state = source.snapshot()
    # a resumed, longer run
    with pipeline(policy, None, 2, state, max_off_policy_steps=0, max_steps=4) as source:
        assert sorted(indices(source.next_batch())) == [4, 5]


def test_no_more_than_max_concurrent_rollouts_are_in_flight():
    policy = Policy(delay=lambda request: 0.002)
    with pipeline(policy, max_off_policy_steps=2, max_concurrent=9) as source:
        steps(source, policy, 4)
    assert policy.max_in_flight == 8  # whole groups of four


# --- which seeds are sampled with -----------------------------------------------------------------


def same_rows(count, member=""):
    return vf.SingleTurnEnv(
        dataset=[{"question": f"{member}q0"}] * count, rubric=vf.Rubric(funcs=[number])
    )


def played_seeds(env, num_batches, state=None, **settings):
    """(the seed of every request, the pipeline's state after the batches)"""
    policy = Policy()
    version = 0 if state is None else state.delivered
    with pipeline(policy, env, version, state, max_off_policy_steps=0, **settings) as source:
        steps(source, policy, num_batches)
        source.settle()
        state = source.snapshot()
    return [request.seed for request in policy.requests], state


@pytest.mark.parametrize("shuffle", [False, True])
def test_equal_rows_are_sampled_with_seeds_of_their_own_within_a_pass_and_after_it(shuffle):
    # two passes of 4 rows x 4 siblings
    seeds, _ = played_seeds(same_rows(4), 4, shuffle_dataset=shuffle)
    assert len(set(seeds[:16])) == 16
    assert len(set(seeds)) == len(seeds)


def test_one_row_alone_is_sampled_with_other_seeds_in_every_group():
    seeds, _ = played_seeds(same_rows(1), 4)
    assert len(set(seeds)) == len(seeds) > 4 * GROUP


def test_a_resumed_pass_over_equal_rows_goes_on_with_the_same_seeds():
    all_seeds, _ = played_seeds(same_rows(6), 3)
    first, state = played_seeds(same_rows(6), 1)
    second, _ = played_seeds(same_rows(6), 2, state)
    assert len(first) == 4 * GROUP  # the second batch's groups had finished too, and are saved
    assert first + second == all_seeds


def test_rows_that_differ_are_sampled_with_the_seeds_of_their_content_alone():
    """Version 0.2.0's seeds: those of a checkpoint of it go on."""
    seeds, _ = played_seeds(counting_env(4), 1, seed=3)
    table = counting_env(4).train_table
    expected = [
        int.from_bytes(
            hashlib.sha256(f"{3 * 1_000_003}:{table[row].hash}:{sibling}:0".encode()).digest()[:4],
            "big",
        )
        & 0x7FFFFFFF
        for row in range(2)
        for sibling in range(GROUP)
    ]
    assert seeds[: 2 * GROUP] == expected


# --- how old what is trained may be ---------------------------------------------------------------


def slow_one_in_five(seed):
    order = random.Random(seed)
    return lambda request: 0.05 if int(question(request)[1:]) % 5 == 0 else order.random() * 0.004


@pytest.mark.parametrize(("lag", "seed"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_no_token_older_than_the_lag_is_trained_and_no_slow_rollout_is_left_behind(lag, seed):
    policy = Policy(delay=slow_one_in_five(seed))
    with pipeline(policy, max_off_policy_steps=lag) as source:
        batches = steps(source, policy, 12)
    for version, batch in enumerate(batches):
        assert len(batch.groups) == 2
        assert min(group.oldest_version for group in batch.groups) >= version - lag
        assert batch.stats["staleness/max"] <= lag
        assert batch.stats["groups/dropped_stale"] == 0
    trained = sorted(index for batch in batches for index in indices(batch))
    slow = [index for index in range(24 - 2 * lag) if index % 5 == 0]
    assert set(slow) <= set(trained)
    assert len(trained) == len(set(trained)) == 24


def test_without_the_waiting_the_slow_ones_are_dropped_and_the_drop_is_counted(monkeypatch):
    monkeypatch.setattr(Pipeline, "_would_go_stale", lambda self, num_left: False)
    policy = Policy(delay=slow_one_in_five(3))
    with pipeline(policy, max_off_policy_steps=1) as source:
        batches = steps(source, policy, 12)
    assert sum(batch.stats["groups/dropped_stale"] for batch in batches) > 0
    for version, batch in enumerate(batches):  # and still nothing too old is trained
        assert min(group.oldest_version for group in batch.groups) >= version - 1


def test_tokens_of_unknown_age_are_refused():
    class Silent(Policy):
        version = property(lambda self: -1, lambda self, value: None)

    with (
        pipeline(Silent()) as source,
        pytest.raises(ConfigError, match="does not report which policy version"),
    ):
        source.next_batch()


# --- groups of zero variance ----------------------------------------------------------------------


def test_dead_groups_are_dropped_counted_and_replaced():
    policy = Policy(dead_if(lambda n: n % 3 == 0))
    with pipeline(policy, max_off_policy_steps=0) as source:
        first, second = steps(source, policy, 2)
    assert (indices(first), indices(second)) == ([1, 2], [4, 5])
    assert (
        first.stats["groups/dead"],
        first.stats["groups/live"],
        first.stats["groups/backfilled"],
    ) == (1, 2, 1)
    assert first.stats["rollouts/generated"] == 3 * GROUP
    assert first.stats["reward/mean"] == pytest.approx((1 + 0.5 + 0.5) / 3)


def test_oversample_bounds_what_is_generated_and_the_short_batch_says_so():
    policy = Policy(dead_if(lambda n: n % 4))
    with pipeline(policy, max_off_policy_steps=0, oversample=1.5) as source:
        batch = source.next_batch()
        assert indices(batch) == [0]
        assert (batch.stats["batch/short"], batch.stats["batch/fill"]) == (1, 0.5)
        assert source.pipeline.state.next_index == 3  # 1.5 batches of two groups
        advance(source, policy)
        assert indices(source.next_batch()) == [4]


def test_dead_groups_can_be_kept_with_advantage_zero():
    policy = Policy(dead_if(lambda n: n == 0))
    with pipeline(policy, max_off_policy_steps=0, zero_variance="keep") as source:
        batch = source.next_batch()
    assert indices(batch) == [0, 1]
    assert batch.advantages_G[0].tolist() == [0.0] * GROUP
    assert batch.stats["rollouts/trained"] == 2 * GROUP


@pytest.fixture
def few(monkeypatch):
    """The bounds on rollouts, small enough for a test of a whole pipeline."""
    monkeypatch.setattr(health, "NO_SIGNAL_ROLLOUTS", 64)
    monkeypatch.setattr(health, "SOLVED_ROLLOUTS", 32)


def failing_if(condition):
    """Answers 0 to every sibling of the questions for whose number ``condition`` holds."""
    return turn_of_each(lambda name, turn: "0" if condition(int(name[1:])) else str(turn % 2))


def test_rollouts_without_any_signal_since_the_start_end_the_run_with_a_histogram(few):
    with pipeline(
        policy := Policy(dead_if(lambda n: True)), counting_env(12), max_off_policy_steps=0
    ) as source:
        with pytest.raises(
            NoLearningSignal, match=r"\(64 rollouts\) since the start of the run: no group"
        ) as raised:
            source.next_batch()
    assert raised.value.histogram == {1.0: 64}
    assert len(policy.requests) == 64


@pytest.mark.parametrize(("examples", "least"), [(60, 4096), (1500, 6000), (100_000, 4096)])
def test_a_small_set_is_seen_whole_before_a_run_ends(examples, least):
    meter = SignalMeter(pipeline_config(), Signal(), examples * GROUP)
    same = Group(0, 0, tuple(replace(RECORD, reward=0.0) for _ in range(1000)))
    for batch in range(1, 20):
        meter.note_nothing([same])
        if 1000 * batch >= least:
            break
        assert not meter.is_solved()
    with pytest.raises(NoLearningSignal, match=f"{1000 * batch} rollouts"):
        meter.is_solved()
    assert 1000 * (batch - 1) < least


def test_the_hard_limit_of_those_who_set_it_counts_batches():
    policy = Policy(dead_if(lambda n: True))
    with pipeline(policy, max_off_policy_steps=0, no_signal_steps=3, oversample=1.0) as source:
        with pytest.raises(NoLearningSignal, match=r"in 3 batches \(24 rollouts\)") as raised:
            source.next_batch()
        assert raised.value.histogram == {1.0: 24}
        assert source.pipeline.state.next_index == 6


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_that_ever_had_signal_goes_on_and_warns_at_growing_intervals(
    few, caplog, tmp_path, resumed
):
    policy, env = Policy(failing_if(lambda n: 2 <= n < 80)), counting_env(90)
    with pipeline(policy, env, max_off_policy_steps=0) as source:
        steps(source, policy, 1)
        state = source.snapshot()
        if not resumed:
            assert 80 in indices(source.next_batch())
    if resumed:
        saved_state.save_pipeline(tmp_path, state, 1, {})
        loaded, version, _ = saved_state.load_pipeline(tmp_path)
        assert loaded.signal == state.signal
        with pipeline(policy, env, version, loaded, max_off_policy_steps=0) as source:
            assert 80 in indices(source.next_batch())
    *warned, last = (record.message for record in caplog.records)
    batches = [int(re.search(r"\((\d+) batches", message)[1]) for message in warned]
    assert batches == [1, 2, 4, 8, 16]
    assert re.search(
        r"rewards: 0 x \d+; a reward above 0 in at most 0.0\d+ of the rollouts, at 95 %", warned[-1]
    )
    assert last.startswith("skipped ")


@pytest.mark.parametrize("settings", [{}, {"no_signal_steps": 0}])
def test_with_the_limit_off_a_run_without_signal_goes_on_where_by_default_it_ends(few, settings):
    policy = Policy(failing_if(lambda n: n < 40))
    with pipeline(policy, counting_env(90), max_off_policy_steps=0, **settings) as source:
        if settings:
            assert indices(source.next_batch()) == [40, 41]
        else:
            with pytest.raises(NoLearningSignal, match="64 rollouts"):
                source.next_batch()


# --- solved ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "least"), [({}, 40), ({"no_signal_steps": 2}, 32)])
def test_a_task_whose_rollouts_all_have_the_best_reward_is_solved(few, caplog, settings, least):
    policy = Policy(
        turn_of_each(
            lambda name, turn: "1" if turn >= GROUP or int(name[1:]) >= 4 else str(turn % 2)
        )
    )
    with pipeline(policy, counting_env(10), max_off_policy_steps=0, **settings) as source:
        assert None not in steps(source, policy, 2)
        assert source.next_batch() is None
        at_best = source.pipeline.state.signal.at_best
    assert (
        f"solved: the last {at_best} rollouts all had the best reward of the run, 1" in caplog.text
    )
    assert least <= at_best < least + 16, "one pass, or the hard limit"


@pytest.mark.parametrize(
    ("reward", "schedule"),
    [
        (lambda completion, **_: 0.0, None),  # equal from the start: nobody knows a better one
        (lambda completion, **_: 1.0, None),
        (
            lambda completion, **_: number(completion),
            "rows",
        ),  # rows that a subclass draws: others may follow
    ],
)
def test_rewards_that_were_always_equal_and_rows_of_a_subclass_are_never_solved(reward, schedule):
    meter = SignalMeter(pipeline_config(), Signal(), 8, may_be_solved=schedule is None)
    if schedule:
        meter.note_batch([Group(0, 0, (replace(RECORD, reward=0.0), replace(RECORD, reward=1.0)))])
    completion = [{"role": "assistant", "content": "1"}]
    same = Group(0, 0, tuple(replace(RECORD, reward=reward(completion)) for _ in range(512)))
    for _ in range(7):
        meter.note_nothing([same])
        assert not meter.is_solved()
    meter.note_nothing([same])
    if schedule:
        assert not meter.is_solved()
    else:
        with pytest.raises(NoLearningSignal):
            meter.is_solved()


def test_one_worse_rollout_begins_the_count_anew():
    meter = SignalMeter(pipeline_config(), Signal(), 8)
    best, worse = (
        Group(0, 0, tuple(replace(RECORD, reward=r) for _ in range(500))) for r in (1.0, 0.5)
    )
    meter.note_nothing([best])
    meter.note_nothing([worse])
    meter.note_nothing([best])
    assert not meter.is_solved()
    meter.note_nothing([best])
    assert meter.is_solved()


# --- dead batches are kept for reading ------------------------------------------------------------


def test_every_dead_batch_and_every_dropped_group_is_recorded():
    recorded = []
    config = pipeline_config(max_off_policy_steps=0, oversample=1.0)
    policy = Policy(dead_if(lambda n: n < 6 or n == 8))
    context = RunContext(
        client=policy, model="policy", require_tokens=True, seed=0, rollout_timeout_s=30.0
    )
    env = counting_env()
    inner = Pipeline(
        env, list(env.train_table), context, config, record_dropped=lambda *a: recorded.append(a)
    )
    source = PipelineThread(inner)
    source.start()
    try:
        batches = steps(source, policy, 2)
    finally:
        source.close()
    dropped = [
        (step, [group.index for group in groups], bool(numbers))
        for step, groups, numbers in recorded
    ]
    assert dropped == [(1, [0, 1], True), (1, [2, 3], True), (1, [4, 5], True)]
    # counted by their step
    assert [[group.index for group in batch.discarded] for batch in batches] == [[], [8]]
    assert [numbers["dead/rollouts"] for _, _, numbers in recorded[:3]] == [8, 16, 24]
    assert recorded[0][2]["dead/reward"] == 1.0


def test_the_bound_of_a_rate():
    # exact: the rate at which no success in so many is as unlikely as 5 %
    for trials in (1, 7, 500):
        assert (1 - upper_bound(0, trials)) ** trials == pytest.approx(0.05)
    exact = next(p / 10_000 for p in range(10_000) if binomial_cdf(5, 500, p / 10_000) < 0.05)
    assert upper_bound(5, 500) == pytest.approx(exact, rel=0.03)


def binomial_cdf(k, n, p):
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


# --- groups of zero variance that are kept --------------------------------------------------------


def test_a_dead_batch_that_is_kept_is_a_step():
    policy = Policy(dead_if(lambda n: True))
    settings = {"max_off_policy_steps": 0, "zero_variance": "keep", "generation_timeout": 5.0}
    with pipeline(policy, **settings) as source:
        batches = steps(source, policy, 20)
    assert [indices(batch) for batch in batches] == [[2 * n, 2 * n + 1] for n in range(20)]
    assert all(batch.stats["groups/dead"] == 2 for batch in batches)
    assert all(rows for batch in batches for rows in batch.rows_R), (
        "rows to compute a gradient of, zero as it is"
    )


@pytest.mark.parametrize("masks", [False, True])
def test_a_batch_whose_rollouts_are_all_overlong_says_that_and_not_that_rewards_are_equal(masks):
    settings = {"max_off_policy_steps": 0, "max_seq_len": 4, "no_signal_steps": 1}
    with pipeline(Policy(), **settings, mask_truncated_completions=masks) as source:
        with pytest.raises(NoLearningSignal, match=r"Raise max_seq_len") as raised:
            source.next_batch()
    assert "all rollouts were overlong or truncated" in str(raised.value)
    assert ("which mask_truncated_completions leaves out" in str(raised.value)) == masks


def test_a_batch_whose_advantages_are_nan_says_that_and_not_that_it_was_too_long():
    def nowhere(rewards_G, lengths_G):
        return [np.full(len(rewards), math.nan) for rewards in rewards_G]

    settings = {"max_off_policy_steps": 0, "no_signal_steps": 1, "advantage": nowhere}
    with pipeline(Policy(), **settings) as source:
        with pytest.raises(NoLearningSignal, match="Correct the function that computes") as raised:
            source.next_batch()
    assert "all rollouts had an advantage of NaN" in str(raised.value)
    assert "overlong" not in str(raised.value)


# --- failures -------------------------------------------------------------------------------------


class FailsOnce(vf.SingleTurnEnv):
    """The first rollout of every example raises in a hook."""

    async def setup_state(self, state):
        self.seen = getattr(self, "seen", set())
        if state["example_id"] not in self.seen:
            self.seen.add(state["example_id"])
            raise ConnectionError("no database")


def fails_for_zero(completion, **_):
    if completion[-1]["content"] == "2":
        raise ConnectionError("no judge")
    return number(completion)


def none_for_two(completion, **_):
    return None if completion[-1]["content"] == "2" else number(completion)


def counted():
    """0, 1, 2, 3 to the siblings of each question."""
    return turn_of_each(lambda name, turn: str(turn))


@pytest.mark.parametrize(
    ("env", "rewards"),
    [
        (counting_env(cls=FailsOnce), [math.nan, 0, 1, 2]),
        (counting_env(reward=fails_for_zero), [0, 1, math.nan, 3]),
        (counting_env(reward=none_for_two), [0, 1, math.nan, 3]),
    ],
    ids=["environment", "reward", "none"],
)
def test_an_unknown_reward_is_in_no_baseline_and_its_rollout_is_not_trained(env, rewards):
    with pipeline(Policy(counted()), env, max_off_policy_steps=0) as source:
        batch = source.next_batch()
    for group, advantages in zip(batch.groups, batch.advantages_G, strict=True):
        np.testing.assert_array_equal(sorted(group.rewards), sorted(rewards))
        is_known = ~np.isnan(group.rewards)
        np.testing.assert_allclose(
            advantages[is_known], group.rewards[is_known] - group.rewards[is_known].mean()
        )
        assert np.isnan(advantages[~is_known]).all()
    assert batch.stats["reward/unscored"] == batch.stats["rollouts/errors"] == 2
    assert batch.stats["rollouts/trained"] == 6


def test_a_group_with_too_few_known_rewards_is_replaced():
    class FailsOften(vf.SingleTurnEnv):
        async def setup_state(self, state):
            if state["example_id"] == 0 and state.seed_key[-1] in "01":
                raise ConnectionError("no database")

    with pipeline(
        Policy(counted()), counting_env(cls=FailsOften), max_off_policy_steps=0
    ) as source:
        assert indices(source.next_batch()) == [1, 2]


def test_when_most_rollouts_fail_the_run_ends_and_names_the_cause(caplog):
    def no_judge(completion, **_):
        raise ConnectionError("no judge")

    with pipeline(Policy(), counting_env(reward=no_judge), max_off_policy_steps=0) as source:
        with pytest.raises(
            TooManyFaults, match=r"8 of the last 8 rollouts failed.*no judge"
        ) as raised:
            source.next_batch()
    assert raised.value.count == 8
    assert "no judge" in raised.value.cause
    assert sum("a rollout of example" in record.message for record in caplog.records) == 1


def test_failures_below_the_bound_do_not_end_the_run():
    with pipeline(Policy(counted()), counting_env(cls=FailsOnce), max_error_fraction=0.3) as source:
        assert source.next_batch().stats["rollouts/errors"] == 2


def test_an_error_of_the_whole_run_is_raised_as_it_is_and_at_once():
    policy = Policy(errors={5: AuthenticationFailed("the key was refused", url="http://x")})
    with pipeline(policy, generation_timeout=20.0) as source:
        started = time.monotonic()
        with pytest.raises(AuthenticationFailed, match="the key was refused") as raised:
            source.next_batch()
        assert time.monotonic() - started < 1
        assert raised.value.url == "http://x"
        # and again: the pipeline does not come back to life
        with pytest.raises(AuthenticationFailed):
            source.next_batch()


def test_an_error_that_comes_while_the_trainer_waits_ends_the_wait():
    policy = Policy(errors={0: AuthenticationFailed("too late")}, delay=lambda request: 0.1)
    with pipeline(policy) as source:
        started = time.monotonic()
        with pytest.raises(AuthenticationFailed):
            source.next_batch()
        assert time.monotonic() - started < 1


def test_a_bug_in_the_pipeline_itself_is_raised_too(monkeypatch):
    monkeypatch.setattr(Pipeline, "_collect", lambda self, group: 1 / 0)
    with pipeline(Policy()) as source, pytest.raises(ZeroDivisionError):
        source.next_batch()


def test_a_timeout_error_of_the_pipeline_is_not_taken_for_our_own_deadline(monkeypatch):
    def slow(self, group):
        raise TimeoutError("of a library")

    monkeypatch.setattr(Pipeline, "_collect", slow)
    with pipeline(Policy()) as source, pytest.raises(TimeoutError, match="of a library"):
        source.next_batch()


def test_a_group_that_somebody_else_cancels_is_an_error_and_not_a_silence():
    policy = Policy()
    policy.held = True
    with pipeline(policy) as source:
        eventually(lambda: policy.in_flight)
        source.thread.loop.call_soon_threadsafe(source.pipeline.running[0].task.cancel)
        with pytest.raises(RunError, match="example 0 were cancelled"):
            source.next_batch()


# --- waits ----------------------------------------------------------------------------------------


def test_a_wait_that_takes_too_long_names_what_it_waited_for():
    policy = Policy(delay=lambda request: 60 if question(request) == "q1" else 0)
    with pipeline(policy, generation_timeout=0.3, max_off_policy_steps=0) as source:
        with pytest.raises(
            GenerationStalled, match=r"example 1, started at policy version 0; .* 4 for the model"
        ) as raised:
            source.next_batch()
    assert raised.value.elapsed_s == 0.3
    assert "the model" in raised.value.waiting_for


@pytest.mark.parametrize("dead", [False, True])
def test_a_batch_may_take_longer_than_the_timeout_while_rollouts_finish(dead):
    policy = Policy(dead_if(lambda n: dead and n < 12), delay=lambda request: 0.1)
    settings = {"generation_timeout": 0.4, "max_concurrent": GROUP, "max_off_policy_steps": 0}
    settings |= {"batch_size": 2 * GROUP if dead else 8 * GROUP}
    with pipeline(policy, counting_env(20), **settings) as source:
        started = time.monotonic()
        batch = source.next_batch()
    assert time.monotonic() - started > 0.8
    assert len(batch.groups) == (2 if dead else 8)


def test_a_wait_for_a_hook_names_the_hook():
    class Stuck(vf.SingleTurnEnv):
        async def setup_state(self, state):
            await asyncio.sleep(60)

    with pipeline(Policy(), counting_env(cls=Stuck), generation_timeout=0.3) as source:
        with pytest.raises(GenerationStalled, match="4 for setup_state"):
            source.next_batch()


def test_code_that_blocks_the_event_loop_is_named_with_its_line(monkeypatch):
    monkeypatch.setattr("verifiers_trainer.engines.loop_thread.ANSWER_S", 0.2)
    release = threading.Event()

    class Blocks(vf.SingleTurnEnv):
        async def setup_state(self, state):
            release.wait(10)

    with pipeline(Policy(), counting_env(cls=Blocks), generation_timeout=0.3) as source:
        try:
            with pytest.raises(
                GenerationStalled,
                match=r"blocks the event loop of all rollouts at .*threading.py:\d+ \(wait\)",
            ):
                source.next_batch()
        finally:
            release.set()


# --- the end --------------------------------------------------------------------------------------


def test_close_leaves_no_thread_and_no_task():
    before = set(threading.enumerate())
    policy = Policy()
    policy.held = True
    with pipeline(policy, max_off_policy_steps=2) as source:
        eventually(lambda: len(source.pipeline.running) == 6)
        tasks = [group.task for group in source.pipeline.running.values()]
        policy.held = True
        source.close()
        assert all(task.cancelled() for task in tasks)
        assert source.thread.loop.is_closed()
        assert not [
            t for t in set(threading.enumerate()) - before if t.name == "verifiers-pipeline"
        ]
        source.close()


def test_constructing_starts_nothing():
    env = counting_env()
    with no_new_thread():
        PipelineThread(Pipeline(env, list(env.train_table), None, pipeline_config()))


# --- the same again -------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
def test_in_deterministic_mode_the_order_in_which_rollouts_finish_changes_nothing(lag):
    def play(seed):
        order = random.Random(seed)
        policy = Policy(dead_if(lambda n: n % 4 == 1), delay=lambda request: order.random() * 0.01)
        with pipeline(policy, max_off_policy_steps=lag, deterministic=True) as source:
            batches = steps(source, policy, 6)
        timed = ("time/wait_generation", "time/pack")
        stats = [{k: v for k, v in batch.stats.items() if k not in timed} for batch in batches]
        return [indices(batch) for batch in batches], stats

    first, again, once_more = play(1), play(2), play(3)
    assert first == again == once_more


def test_a_snapshot_continues_where_it_was_taken():
    policy = Policy()
    with pipeline(policy, max_off_policy_steps=1) as source:
        first = source.next_batch()
        eventually(lambda: not source.pipeline.running)
        advance(source, policy)
        policy.held = True
        saved = source.snapshot()
    assert indices(first) == [0, 1]
    assert [group.index for group in saved.ready] + saved.requeue == [2, 3, 4, 5]

    resumed = Policy()
    with pipeline(resumed, version=1, state=saved, max_off_policy_steps=1) as source:
        later = steps(source, resumed, 2)
    assert [index for batch in later for index in indices(batch)] == [2, 3, 4, 5]
    assert later[0].groups[0].oldest_version == 0  # what was finished was kept, not played again


def test_interrupted_groups_are_played_again_even_when_the_share_of_the_batch_is_used_up():
    policy = Policy()
    policy.held = True
    with pipeline(policy, max_off_policy_steps=0, oversample=1.0) as source:
        eventually(lambda: len(source.pipeline.running) == 2)
        saved = source.snapshot()
    assert saved.requeue == [0, 1]

    again = Policy()
    with pipeline(again, state=saved, max_off_policy_steps=0, oversample=1.0) as source:
        batch = source.next_batch()
    assert indices(batch) == [0, 1]
    assert (batch.stats["batch/short"], batch.stats["batch/fill"]) == (0, 1.0)


def test_dropped_groups_that_no_batch_has_counted_are_part_of_a_snapshot():
    policy = Policy(dead_if(lambda n: n == 3))
    with pipeline(policy, max_off_policy_steps=1, deterministic=True) as source:
        source.next_batch()
        source.settle()
        assert [group.index for group in source.snapshot().discarded] == [3]


# --- examples that are solved ---------------------------------------------------------------------


def solving(solved, **settings):
    """A pipeline over six examples, of which those with a number in ``solved`` always earn 1."""
    policy = Policy(dead_if(lambda n: n in solved))
    return policy, pipeline(policy, counting_env(6), max_off_policy_steps=0, **settings)


def played(policy):
    return Counter(question(request) for request in policy.requests)


def test_examples_solved_twice_in_a_row_are_played_no_more(caplog):
    policy, running = solving({0, 3}, skip_solved=True)
    with running as source:
        batches = steps(source, policy, 12)
    assert [played(policy)[f"q{n}"] // GROUP for n in (0, 3)] == [2, 2]
    assert min(played(policy)[f"q{n}"] // GROUP for n in (1, 2, 4, 5)) >= 4
    assert batches[-1].stats["examples/solved"] == 2
    assert source.pipeline.state.solved.best_reward == 1.0
    plain_policy, plain = solving({0, 3})
    with plain as source:
        batches = steps(source, plain_policy, 12)
    assert played(plain_policy)["q0"] // GROUP > 3, "negative control"
    assert "examples/solved" not in batches[-1].stats


def test_an_example_that_is_solved_once_and_then_not_stays():
    answers = turn_of_each(
        lambda name, turn: "1" if name == "q0" and turn // GROUP % 2 == 0 else str(turn % 2)
    )
    policy = Policy(answers)
    with pipeline(policy, counting_env(6), max_off_policy_steps=0, skip_solved=True) as source:
        batches = steps(source, policy, 12)
    assert batches[-1].stats["examples/solved"] == 0
    assert played(policy)["q0"] // GROUP >= 4


def test_when_all_examples_are_solved_all_are_played():
    policy = Policy(turn_of_each(lambda name, turn: "1" if turn < 2 * GROUP else str(turn % 2)))
    settings = {"max_off_policy_steps": 0, "skip_solved": True}
    with pipeline(policy, counting_env(4), **settings) as source:
        batch = source.next_batch()
    assert len(batch.groups) == 2
    assert len(source.pipeline.state.solved) == 4


def test_a_mean_near_the_best_reward_counts_as_solved_and_a_best_of_nothing_never():
    def group(index, *rewards):
        return Group(index, index % 10, tuple(replace(RECORD, reward=reward) for reward in rewards))

    solved = Solved()
    solved.count(
        [group(1, 1.8, 1.85), group(11, 1.8, 1.8), group(2, 2.0, 0.0), group(12, 1.0, 1.7)]
    )
    assert (1 in solved, 2 in solved, len(solved)) == (True, False, 1)
    solved.count([group(21, math.nan, math.nan)])
    assert 1 in solved, "an unknown reward says nothing"
    solved.count([group(31, 1.0, 1.0)])
    assert 1 not in solved
    nothing = Solved()
    nothing.count([group(1, 0.0, -1.0), group(11, 0.0, 0.0)])
    assert len(nothing) == 0


def test_what_is_solved_is_part_of_a_snapshot(tmp_path):
    policy, running = solving({0, 3}, skip_solved=True)
    with running as source:
        steps(source, policy, 9)
        state = source.snapshot()
    assert len(state.solved) == 2
    saved_state.save_pipeline(tmp_path, state, 9, {}, "builtin:tiny")
    # what vf-view names
    assert json.loads((tmp_path / saved_state.STATE).read_text())["model"] == "builtin:tiny"
    loaded, version, _ = saved_state.load_pipeline(tmp_path)
    assert (loaded.solved, loaded.skipped) == (state.solved, state.skipped)
    again = Policy(dead_if(lambda n: n in {0, 3}))
    with pipeline(
        again, counting_env(6), version, loaded, max_off_policy_steps=0, skip_solved=True
    ) as source:
        steps(source, again, 6)
    assert played(again).keys() == {"q1", "q2", "q4", "q5"}


def test_in_deterministic_mode_what_is_skipped_does_not_depend_on_who_finishes_first():
    def run(seed):
        order = random.Random(seed)
        policy = Policy(dead_if(lambda n: n % 3 == 0), delay=lambda request: order.uniform(0, 0.01))
        settings = {"skip_solved": True, "deterministic": True, "max_off_policy_steps": 1}
        with pipeline(policy, counting_env(9), **settings) as source:
            batches = [indices(batch) for batch in steps(source, policy, 12)]
            source.settle()
            return batches, source.pipeline.state.solved, played(policy)

    first = run(1)
    assert len(first[1]) == 3
    assert run(2) == first


def test_rows_that_a_hook_chose_are_all_played():
    config = pipeline_config(skip_solved=True)
    env = counting_env(6)
    rows = CustomRows(lambda step: [], env.row_format, list(env.train_table), config)
    assert not rows.may_skip
    with pytest.raises(ConfigError, match="skip_solved and difficulty_schedule both select"):
        pipeline_config(skip_solved=True, difficulty_schedule=[(1.0, "easy")]).resolve()


# --- the pool of examples that are sometimes solved -----------------------------------------------


def pooled(**settings):
    """A pipeline over six examples: q0 always earns 1, q3 never, the others half of the time."""
    always = {"q0": "1", "q3": "0"}
    policy = Policy(turn_of_each(lambda name, turn: always.get(name, str(turn % 2))))
    running = pipeline(policy, counting_env(6), max_off_policy_steps=0, **settings)
    return policy, running


def test_examples_that_are_sometimes_solved_are_sampled_first():
    policy, running = pooled(curriculum="pool")
    with running as source:
        batches = steps(source, policy, 16)
    counts = {name: count // GROUP for name, count in played(policy).items()}
    assert counts["q0"] == counts["q3"] == 3, "in passes 0, 2 and 6"
    assert min(counts[f"q{n}"] for n in (1, 2, 4, 5)) >= 7
    numbers = [batches[-1].stats[f"examples/{name}"] for name in ("in_pool", "easy", "hard")]
    assert numbers == [4, 1, 1]
    plain_policy, plain = pooled()
    with plain as source:
        batches = steps(source, plain_policy, 16)
    assert played(plain_policy)["q0"] // GROUP >= 7, "negative control"
    assert "examples/in_pool" not in batches[-1].stats


def test_an_example_that_is_learned_comes_back_into_the_pool():
    answers = turn_of_each(
        lambda name, turn: "0" if name == "q3" and turn < GROUP else str(turn % 2)
    )
    policy = Policy(answers)
    with pipeline(policy, counting_env(6), max_off_policy_steps=0, curriculum="pool") as source:
        steps(source, policy, 18)
        assert source.pipeline.state.pool.measured[3].outside == 0
    assert played(policy)["q3"] // GROUP >= 5, "one pass left out"


def test_examples_that_all_rest_are_sampled_in_turn():
    policy = Policy(turn_of_each(lambda name, turn: "1" if turn < GROUP else str(turn % 2)))
    settings = {"max_off_policy_steps": 0, "curriculum": "pool", "no_signal_steps": 0}
    with pipeline(policy, counting_env(4), **settings) as source:
        assert len(source.next_batch().groups) == 2


@pytest.mark.parametrize("seed", range(20))
def test_a_rest_follows_from_the_groups_of_its_example_alone(seed):
    rng = random.Random(seed)
    lowest, span = rng.uniform(-3, 3), rng.uniform(0.1, 5)

    def group(index, share):
        rewards = (lowest, lowest + span) if share is None else (lowest + share * span,) * 2
        return Group(index, index, tuple(replace(RECORD, reward=reward) for reward in rewards))

    pool = Pool()
    pool.count([group(9, 0.0)])
    assert not pool.passes_over(9), "while all rewards are equal nothing is easy or hard"
    pool.count([group(1, None)])
    for times in range(1, 5):
        share = rng.choice([rng.uniform(0, 0.19), rng.uniform(0.81, 1)])
        pool.count([group(2, share), group(3, rng.uniform(0.21, 0.79))])
        visits = [pool.passes_over(2) for _ in range(12)]
        assert visits == [n < min(2**times - 1, 7) for n in range(12)]
        assert not pool.passes_over(3)
    pool.count([group(2, 0.5)])
    assert not pool.passes_over(2)
    pool.count([replace(group(4, 0.0), rollouts=(replace(RECORD, reward=math.nan),))])
    assert 4 not in pool.measured, "an unknown reward says nothing"


def test_the_pool_is_part_of_a_snapshot_and_goes_on_as_without_a_stop(tmp_path):
    settings = {"curriculum": "pool", "deterministic": True, "max_off_policy_steps": 1}

    def answer(name, turn):  # each question has a share of right answers of its own
        return str(int(turn % GROUP < GROUP * (int(name[1:]) * 5 % 9) / 8))

    def running(num_steps, version=0, state=None):
        order = random.Random(num_steps)
        policy = Policy(turn_of_each(answer), delay=lambda request: order.uniform(0, 0.003))
        with pipeline(policy, counting_env(9), version, state, **settings) as source:
            batches = [indices(batch) for batch in steps(source, policy, num_steps)]
            source.settle()
            return batches, source.snapshot()

    whole, last = running(14)
    first, state = running(6)
    saved_state.save_pipeline(tmp_path, state, 6, {})
    loaded, version, _ = saved_state.load_pipeline(tmp_path)
    assert loaded.pool == state.pool
    assert loaded.pool.measured
    second, again = running(8, version, loaded)
    assert first + second == whole
    assert again.pool == last.pool
    loaded.pool = Pool()
    assert running(8, version, loaded)[0] != second, "negative control"


def test_a_checkpoint_without_a_pool_begins_one(tmp_path):
    saved_state.save_pipeline(tmp_path, PipelineState(), 0, {})
    content = json.loads((tmp_path / saved_state.STATE).read_text())
    del content["pool"]
    (tmp_path / saved_state.STATE).write_text(json.dumps(content))
    assert saved_state.load_pipeline(tmp_path)[0].pool == Pool()


@pytest.mark.parametrize(
    "other",
    [{"skip_solved": True}, {"difficulty_schedule": [(1.0, 1)]}, {"env_weights": {"a": 1.0}}],
)
def test_a_pool_and_another_choice_of_examples_are_refused(other):
    (name,) = other
    with pytest.raises(ConfigError, match=f"curriculum='pool' and {name} both select the examples"):
        pipeline_config(curriculum="pool", **other).resolve()


# --- stopped within the updates of a batch --------------------------------------------------------

AMID = {"updates_per_batch": 2, "max_off_policy_steps": 1}


def resumed_amid(saved, **settings):
    """(the batch that a run which stopped after its first update trains next, the one after it)."""
    policy = Policy()
    with pipeline(policy, version=1, state=saved, **AMID | settings) as source:
        first = source.next_batch()
        advance(source, policy)
        return first, source.next_batch()


def test_a_batch_that_was_stopped_within_is_trained_on_although_an_older_group_has_finished():
    """Group 0 takes long: the batch is 1 and 2, and 0 is in a later one."""
    policy = Policy()
    policy.delay = lambda request: 0.4 if question(request) == "q0" else 0.01
    with pipeline(policy, stale_policy="drop", **AMID) as source:
        batch = source.next_batch()
        advance(source, policy)
        eventually(lambda: any(group.index == 0 for group in source.snapshot().ready))
        saved = source.snapshot()
    assert indices(batch) == [1, 2]
    first, later = resumed_amid(copy.deepcopy(saved), stale_policy="drop")
    assert indices(first) == [1, 2]
    assert 0 in indices(later)
    first, _ = resumed_amid(saved)  # whatever the order of later batches is
    assert indices(first) == [1, 2]


def test_a_short_batch_that_was_stopped_within_is_not_filled_up(tmp_path):
    """Of four groups that ``oversample`` allows one has a signal."""
    policy = Policy(dead_if(lambda n: n != 3))
    settings = {"oversample": 1.0, "max_off_policy_steps": 1, "updates_per_batch": 2}
    with pipeline(policy, **settings) as source:
        batch = source.next_batch()
        advance(source, policy)
        saved = source.snapshot()
    assert (indices(batch), batch.stats["batch/short"]) == ([3], 1)
    saved_state.save_pipeline(tmp_path, saved, 1, {})
    state, _, _ = saved_state.load_pipeline(tmp_path)
    first, later = resumed_amid(state, oversample=1.0)
    assert (indices(first), first.stats["batch/short"]) == ([3], 1)
    assert min(indices(later)) > 3


def test_what_a_batch_has_counted_is_not_counted_again_when_it_goes_on():
    policy = Policy(dead_if(lambda n: n in (0, 1)))
    settings = {"zero_variance": "keep", "skip_solved": True, **AMID}
    with pipeline(policy, counting_env(2), **settings) as source:
        source.next_batch()
        advance(source, policy)
        saved = source.snapshot()
    counted = dict(saved.solved.streaks), saved.signal.batches
    again = Policy(dead_if(lambda n: n in (0, 1)))
    with pipeline(again, counting_env(2), version=1, state=saved, **settings) as source:
        source.next_batch()
        advance(source, again)
        state = source.pipeline.state
        assert (dict(state.solved.streaks), state.signal.batches) == counted
