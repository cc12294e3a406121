"""``Rubric``: construction rules, values, rewards, advantages and the forms of scoring."""

import asyncio
import math
import threading
from contextlib import asynccontextmanager
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

import verifiers as vf
import verifiers.rollouts.author_code as mark
from support.small_envs import Talk
from verifiers.errors import (
    ConfigError,
    EnvironmentFault,
    ModelUnavailable,
    RolloutError,
    ScoringError,
    ToolCallError,
    TooManyFaults,
)
from verifiers.results.texts import number_lines
from verifiers.rollouts import values
from verifiers.rollouts.state import State, TrajectoryStep
from verifiers.rubrics import RolloutScore, Rubric, scoring
from verifiers.testing import ScriptedClient

NAN = math.nan


def state_of(text="4", **more):
    return State(
        prompt=[{"role": "user", "content": "2+2"}],
        completion=[{"role": "assistant", "content": text}],
        answer="4",
        **more,
    )


def exact(completion, answer):
    return float(completion[-1]["content"] == answer)


def length(completion):
    return len(completion[-1]["content"])


def giving(value, name="given"):
    def function(completion):
        return value

    function.__name__ = name
    return function


# --- construction


@pytest.mark.parametrize(
    ("funcs", "weights"),
    [
        ([exact, length], [1.0]),
        ([exact], [NAN]),
        ([exact], ["much"]),
        (None, [1.0]),
        ([exact, exact], None),
    ],
    ids=["too few weights", "nan weight", "text weight", "weights alone", "one name twice"],
)
def test_a_rubric_that_cannot_be_meant_is_refused(funcs, weights):
    with pytest.raises(ConfigError):
        Rubric(funcs, weights)


def test_a_second_lambda_gets_a_number():
    rubric = Rubric([lambda answer: 1.0, lambda answer: 2.0, lambda answer: 3.0])
    assert rubric.get_reward_func_names() == ["<lambda>", "<lambda>_2", "<lambda>_3"]


def test_a_callable_object_is_named_after_its_class():
    class Closeness:
        def __call__(self, answer):
            return 1.0

    assert Rubric([Closeness()])._get_reward_func_names() == ["Closeness"]


@pytest.mark.parametrize(
    "rubric", [Rubric, vf.JudgeRubric, vf.ToolRubric, lambda **kw: vf.RubricGroup([Rubric()], **kw)]
)
def test_an_unknown_keyword_is_refused(rubric):
    with pytest.raises(ConfigError, match=r"does not know 'wieghts' \(did you mean 'weights'\?\)"):
        rubric(wieghts=[1.0])
    with pytest.raises(ConfigError, match=r"does not know 'dataset_name'; it knows: .*parser"):
        rubric(dataset_name="sums")


def test_keywords_of_a_subclass_become_attributes_and_misspellings_do_not():
    class Sums(Rubric):
        # resembles a parameter of Rubric, and is declared
        def __init__(self, weight="easy", **kwargs):
            super().__init__(weight=weight, **kwargs)

    rubric = Sums("hard", dataset_name="sums")
    assert (rubric.weight, rubric.dataset_name) == ("hard", "sums")
    with pytest.raises(ConfigError, match="did you mean 'weights'"):
        Sums(funcs=[exact], weigths=[1.0])
    with pytest.raises(ConfigError, match="would hide"):
        Sums(score_group=1)


def test_marked_methods_of_a_subclass_register_themselves():
    class Graded(Rubric):
        @mark.reward(weight=0.5)
        def correct(self, completion, answer):
            return exact(completion, answer)

        @mark.metric
        def size(self, completion):
            return length(completion)

    rubric = Graded()
    assert (rubric.get_reward_func_names(), rubric.get_reward_weights()) == (
        ["correct", "size"],
        [0.5, 0.0],
    )
    assert rubric.score_rollout_sync(state_of())["reward"] == 0.5


def test_a_plain_rubric_has_one_group_weight():
    rubric = Rubric([exact])
    assert rubric.get_group_weights() == [1.0]
    rubric.set_group_weights([0.25])
    assert rubric.score_rollout_sync(state_of())["reward"] == 0.25
    with pytest.raises(ConfigError):
        rubric.set_group_weights([1.0, 2.0])


# --- values


@pytest.mark.parametrize(
    "value",
    [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), Decimal("1.0"), Fraction(2, 2)],
)
async def test_numbers_of_every_kind_are_values(value):
    score = await Rubric([giving(value)]).score_rollout(state_of())
    assert score["reward"] == 1.0
    assert type(score["given"]) is float


@pytest.mark.parametrize(
    "value",
    [None, "1", NAN, math.inf, -math.inf, [1.0], 10**400, 1j, np.complex64(1), np.array([1.0])],
)
async def test_anything_else_is_an_unknown_reward_that_names_the_function(value):
    state = state_of()
    score = await Rubric([giving(value, "odd")]).score_rollout(state)
    assert math.isnan(score["reward"])
    assert math.isnan(score["odd"])
    assert isinstance(state["error"], ScoringError)
    assert state["error"].function == "odd"
    assert "'odd'" in str(state["error"])


@pytest.mark.parametrize("rewards", [(1e308, 0.0), (-1e308, 0.0), (9e18, 9e18)])
def test_rewards_that_no_statistic_can_add_up_are_unknown_and_the_run_ends_as_any(
    tmp_path, rewards, monkeypatch
):
    rubric = Rubric([giving(value, name) for value, name in zip(rewards, "ab", strict=True)])
    env = vf.SingleTurnEnv(dataset=[{"question": "?", "answer": "!"}] * 2, rubric=rubric)

    def evaluated():
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        options = {"rollouts_per_example": 2, "save_results": True, "results_path": folder}
        return env.evaluate(ScriptedClient(["hi"]), model="m", **options), folder

    results, folder = evaluated()
    assert np.isnan(results["reward"]).all()
    assert all("beyond ±1e+19" in error["message"] for error in results["error"])
    assert np.isnan(vf.load_results(folder)["reward"]).all()

    monkeypatch.setattr(scoring, "LARGEST", math.inf)
    monkeypatch.setattr(values, "LARGEST", math.inf)
    if rewards[1] == 0:
        with pytest.raises(OverflowError):  # negative control
            evaluated()


@pytest.mark.parametrize(
    "error", [ValueError("bad"), SystemExit(1), RecursionError(), MemoryError()]
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_whatever_a_function_raises_stays_on_its_rollout(error, is_async):
    def sync(completion):
        raise error

    async def coroutine(completion):
        raise error

    state = state_of()
    await Rubric([coroutine if is_async else sync]).score_rollout(state)
    assert math.isnan(state["reward"])
    assert state["error"].__cause__ is error


async def test_an_unknown_metric_without_weight_leaves_the_reward_known():
    state = state_of()
    rubric = Rubric([exact])
    rubric.add_metric(giving("no number", "broken"))
    score = await rubric.score_rollout(state)
    assert score["reward"] == 1.0
    assert math.isnan(score["broken"])
    assert state["error"].function == "broken"


async def test_an_earlier_error_is_kept():
    failed = ToolCallError("the tool broke")
    state = state_of(error=failed)
    await Rubric([giving(None)]).score_rollout(state)
    assert state["error"] is failed


async def test_scoring_again_judges_anew():
    answers = [None, 1.0]
    rubric = Rubric([lambda completion: answers.pop(0)])
    state = state_of()
    assert math.isnan((await rubric.score_rollout(state))["reward"])
    assert (await rubric.score_rollout(state))["reward"] == 1.0
    assert state["error"] is None


# --- which rollouts are scored


@pytest.mark.parametrize(
    "error", [ModelUnavailable("down"), EnvironmentFault("hook"), RolloutError("x")]
)
async def test_a_rollout_that_failed_is_unknown_and_no_function_sees_it(error):
    seen = []
    state = state_of(error=error)
    await Rubric([lambda state: seen.append(state) or 1.0]).score_rollout(state)
    assert math.isnan(state["reward"])
    assert state["error"] is error
    assert not seen


async def test_an_error_of_the_models_own_doing_is_scored():
    state = state_of(error=ToolCallError("bad arguments"))
    assert (await Rubric([exact]).score_rollout(state))["reward"] == 1.0


@pytest.mark.parametrize(
    "rubric",
    [Rubric(), Rubric(funcs=[]), Rubric(funcs=[], weights=[]), Rubric([exact], [0.0])],
    ids=["default", "empty", "empty lists", "no weight"],
)
async def test_without_a_weighted_function_the_reward_is_unknown(rubric):
    assert math.isnan((await rubric.score_rollout(state_of()))["reward"])


async def test_scoring_off_leaves_reward_unknown_and_metrics_empty():
    score = await Rubric([exact]).dummy_score_rollout(state_of())
    assert math.isnan(score["reward"])
    assert score["metrics"] == {}
    scores = await Rubric([exact]).dummy_score_group([state_of(), state_of()])
    assert all(map(math.isnan, scores["reward"]))


# --- order


async def test_a_function_reads_what_an_earlier_one_stored():
    def first(state):
        state["half"] = 0.5
        return 1.0

    async def second(state):
        state["quarter"] = state["half"] / 2
        return state["half"]

    def third(state):
        return state["quarter"]

    score = await Rubric([first, second, third]).score_rollout(state_of())
    assert score["metrics"] == {"first": 1.0, "second": 0.5, "third": 0.25}


async def test_parallel_functions_run_together():
    meeting = threading.Barrier(2, timeout=5)

    def first(completion):
        return meeting.wait() >= 0

    def two(completion):
        return meeting.wait() >= 0

    rubric = Rubric([first, two], parallelize_scoring=True, timeout_s=5)
    assert (await rubric.score_rollout(state_of()))["reward"] == 2.0


async def test_a_plain_function_may_return_an_awaitable():
    async def later():
        return 0.25

    assert (await Rubric([lambda completion: later()]).score_rollout(state_of()))["reward"] == 0.25


# --- groups


def ranked(completions):
    sizes = [len(c[-1]["content"]) for c in completions]
    return [float(size == max(sizes)) for size in sizes]


async def test_group_functions_count_in_the_reward_and_advantages_are_centred():
    states = [state_of("4"), state_of("44")]
    scores = await Rubric([exact, ranked], [1.0, 0.5]).score_group(states)
    assert scores["reward"] == [1.0, 0.5]
    assert scores["ranked"] == [0.0, 1.0]
    assert [s["advantage"] for s in states] == [0.25, -0.25]


async def test_group_functions_cannot_score_one_rollout():
    with pytest.raises(ConfigError, match="'ranked'"):
        await Rubric([ranked]).score_rollout(state_of())


async def test_a_failed_sibling_is_not_shown_to_group_functions_and_costs_nobody():
    failed = state_of(error=ModelUnavailable("down"))
    failed["completion"] = None
    states = [state_of("4"), failed, state_of("44")]
    await Rubric([ranked]).score_group(states)
    assert [s["reward"] for s in states if s is not failed] == [0.0, 1.0]
    assert math.isnan(failed["reward"])
    assert math.isnan(failed["advantage"])
    assert math.isnan(failed["metrics"]["ranked"])


@pytest.mark.parametrize(
    "values", [[1.0], 1.0, "ab", None], ids=["short", "number", "text", "none"]
)
async def test_a_group_value_that_is_no_fitting_list_is_unknown_for_all(values):
    states = [state_of(), state_of()]
    await Rubric([exact, lambda completions: values]).score_group(states)
    assert all(math.isnan(s["reward"]) and isinstance(s["error"], ScoringError) for s in states)
    assert [s["metrics"]["exact"] for s in states] == [1.0, 1.0]


async def test_one_bad_value_in_a_list_is_one_unknown_reward():
    states = [state_of(), state_of()]
    await Rubric([lambda completions: [1.0, None]]).score_group(states)
    assert states[0]["reward"] == 1.0
    assert math.isnan(states[1]["reward"])
    assert states[0]["error"] is None


async def test_an_unknown_reward_is_in_no_baseline():
    states = [state_of("4"), state_of("5"), state_of("x", error=ModelUnavailable(""))]
    await Rubric([exact]).score_group(states)
    assert [s["advantage"] for s in states[:2]] == [0.5, -0.5]
    assert math.isnan(states[2]["advantage"])


async def test_an_advantage_method_replaces_the_formula():
    class Sharp(Rubric):
        @mark.advantage
        def sign(self, states):
            return [1.0 if s["reward"] > 0 else -1.0 for s in states]

    rubric = Sharp([exact])
    states = [state_of("4"), state_of("5"), state_of(error=ModelUnavailable(""))]
    await rubric.score_group(states)
    assert rubric.has_advantages
    assert [s["advantage"] for s in states[:2]] == [1.0, -1.0]
    assert math.isnan(states[2]["advantage"])


async def test_two_advantage_methods_are_refused():
    class Torn(Rubric):
        @mark.advantage
        def one(self, states): ...

        @mark.advantage
        def two(self, states): ...

    with pytest.raises(ConfigError, match="'one' and 'two'"):
        Torn()


async def test_steps_get_the_rewards_the_author_left_open():
    set_step, empty = TrajectoryStep(reward=0.1, advantage=0.2), TrajectoryStep()
    states = [state_of("4", trajectory=[set_step, empty]), state_of("5")]
    await Rubric([exact]).score_group(states)
    assert (set_step["reward"], set_step["advantage"], empty["reward"], empty["advantage"]) == (
        0.1,
        0.2,
        1.0,
        0.5,
    )


async def test_the_runner_scores_in_two_stages():
    states = [state_of("4"), state_of("44")]
    rubric = Rubric([exact, ranked])
    for state in states:
        await rubric.score_individual(state)
        assert state["reward"] is None
        assert state["metrics"] == {"exact": exact(state["completion"], "4")}
    await rubric.score_group_stage(states)
    assert [s["reward"] for s in states] == [1.0, 1.0]
    simple = state_of()
    await Rubric([exact]).score_individual(simple)
    assert simple["reward"] == 1.0
    assert simple["advantage"] is None
    assert simple["timing"]["scoring_ms"] > 0


async def test_cleanup_handlers_run_once_after_the_group_also_when_one_fails(caplog):
    seen = []

    class Tidy(Rubric):
        @mark.cleanup(priority=1)
        async def each(self, state):
            seen.append(state["completion"][-1]["content"])
            raise OSError("already gone")

        @mark.cleanup(stage="group")
        def all(self, states):
            seen.append(len(states))

    await Tidy([exact]).score_group([state_of("4"), state_of("5")])
    assert seen == ["4", "5", 2]
    assert "already gone" in caplog.text


async def test_an_overridden_cleanup_is_called_for_each_rollout_and_stands_for_the_handlers():
    seen = []

    class Tidy(Rubric):
        @mark.cleanup(priority=1)
        def handler(self, state):
            seen.append(f"handler {state['completion'][-1]['content']}")

        @mark.cleanup(stage="group")
        def all(self, states):
            seen.append(len(states))

    class Older(Tidy):
        async def cleanup(self, state):
            seen.append(f"before {state['reward']}")
            await super().cleanup(state)
            seen.append("after")

    class Silent(Tidy):
        def cleanup(self, state):
            seen.append("only this")

    await Tidy([exact]).score_rollout(state_of("4"))
    assert seen == ["handler 4", 1]
    seen.clear()
    await Older([exact]).score_group([state_of("4"), state_of("5")])
    assert seen == ["before 1.0", "handler 4", "after", "before 0.0", "handler 5", "after", 2]
    seen.clear()
    await Silent([exact]).score_rollout(state_of("4"))
    assert seen == ["only this", 1]


async def test_an_overridden_cleanup_may_be_decorated_or_put_on_the_instance_and_fail(caplog):
    seen = []

    class Decorated(Rubric):
        @mark.cleanup
        async def cleanup(self, state):
            seen.append("decorated")
            await super().cleanup(state)

    rubric = Decorated([exact])
    rubric.add_cleanup_handler(lambda state: seen.append("added"))
    await rubric.score_rollout(state_of("4"))
    assert seen == ["decorated", "added"]
    seen.clear()
    plain = Rubric([exact])
    plain.cleanup = lambda state: seen.append(state["answer"])
    state = state_of("4")
    await plain.score_rollout(state)
    assert (seen, state["reward"]) == (["4"], 1.0)

    def failing(state):
        raise OSError("already gone")

    plain.cleanup = failing
    await plain.score_rollout(state := state_of("4"))
    assert state["reward"] == 1.0
    assert "already gone" in caplog.text


# --- forms


async def test_the_semaphore_given_surrounds_scoring():
    log = []

    @asynccontextmanager
    async def slot():
        log.append("in")
        yield
        log.append("out")

    await Rubric([exact]).score_rollout(state_of(), score_sem=slot())
    await Rubric([exact]).score_rollout(state_of(), slot())
    assert log == ["in", "out"] * 2


def test_the_seed_call_scores_by_keywords_and_fills_a_plain_state():
    state = {}
    score = Rubric([exact]).score_rollout_sync(
        prompt="2+2", completion=[{"role": "assistant", "content": "4"}], answer="4", state=state
    )
    assert (score["reward"], score.get("correct", 0), score.reward) == (1.0, 0, 1.0)
    assert state["reward"] == 1.0
    assert isinstance(score, RolloutScore)


async def test_the_old_positional_form_and_further_columns():
    def hard(difficulty, info):
        return difficulty == "hard" and info == {}

    done = [{"role": "assistant", "content": "4"}]
    score = await Rubric([exact, hard]).score_rollout(
        "2+2", done, "4", {}, "default", None, difficulty="hard"
    )
    assert score["reward"] == 2.0


async def test_a_metric_named_reward_hides_nothing():
    score = await Rubric([giving(3.0, "reward"), exact]).score_rollout(state_of())
    assert score["reward"] == 4.0
    assert score["metrics"]["reward"] == 3.0


def columns(*texts):
    return {
        "prompts": ["2+2"] * len(texts),
        "completions": [[{"role": "assistant", "content": text}] for text in texts],
        "answers": ["4"] * len(texts),
        "states": [{} for _ in texts],
    }


def test_score_rollouts_blocks_without_a_loop():
    assert sum(Rubric([exact]).score_rollouts(**columns("4", "5", "4"))["reward"]) == 2.0


async def test_score_rollouts_is_awaitable_under_a_loop_and_its_sync_form_blocks():
    rubric = Rubric([exact])
    assert (await rubric.score_rollouts(**columns("4"), max_concurrent=1))["reward"] == [1.0]
    assert rubric.score_rollouts_sync(**columns("4", "5"))["reward"] == [1.0, 0.0]
    assert rubric.score_group_sync([state_of()])["exact"] == [1.0]


def test_score_rollouts_forms_groups_only_when_asked():
    assert Rubric([ranked]).score_rollouts(**columns("4", "44", "1", "2"), group_size=2)[
        "reward"
    ] == [0, 1, 1, 1]
    with pytest.raises(ConfigError, match="score_group"):
        Rubric([ranked]).score_rollouts(**columns("4", "44"))
    with pytest.raises(ConfigError, match="group_size=3"):
        Rubric([exact]).score_rollouts(**columns("4", "44"), group_size=3)


def test_uneven_columns_are_refused():
    with pytest.raises(ConfigError, match="1 values of 'answer' and 2 states"):
        Rubric([exact]).score_rollouts(**columns("4", "5") | {"answers": ["4"]})


def test_a_blocking_call_leaves_no_thread():
    before = set(threading.enumerate())
    Rubric([exact]).score_rollout_sync(state_of())
    assert set(threading.enumerate()) == before


async def test_an_authors_own_score_rollout_is_what_the_runner_calls():
    class Old(Rubric):
        async def score_rollout(self, prompt, completion, answer, state, **kwargs):
            return RolloutScore(0.5, {"old": 0.5})

    class Newer(Rubric):
        async def score_rollout(self, state, score_sem=None):
            async with score_sem:
                await super().score_rollout(state)
            state["reward"] += 1

    old, newer = state_of(), state_of()
    await Old().score_individual(old)
    await Newer([exact]).score_individual(newer)
    assert (old["reward"], old["metrics"], newer["reward"]) == (0.5, {"old": 0.5}, 2.0)


# --- what ends the run


async def test_errors_of_the_run_are_not_swallowed():
    async def judge(completion):
        raise TooManyFaults("the judge is down")

    with pytest.raises(TooManyFaults):
        await Rubric([judge]).score_group([state_of(), state_of()])


async def test_cancellation_is_not_an_error_of_the_function():
    started = asyncio.Event()

    async def slow(completion):
        started.set()
        await asyncio.sleep(60)

    state = state_of()
    task = asyncio.ensure_future(Rubric([slow]).score_individual(state))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert state["error"] is None


async def test_a_prompt_that_does_not_fit_is_the_cause_that_a_reward_function_finds_nothing():
    def last(completion):
        return float(completion[-1].content == "x")

    env = vf.SingleTurnEnv(dataset=[{"question": "q"}], rubric=vf.Rubric(funcs=[last]))
    client = ScriptedClient("x", errors={0: vf.OverlongPromptError("9000 tokens")})
    results = await env.a_evaluate(client, "m", num_examples=1)
    assert "the first prompt does not fit the context" in results["errors"][0]["message"]
    assert "IndexError" in results["errors"][0]["message"]
    later = ScriptedClient("x", errors={1: vf.OverlongPromptError("9000 tokens")})
    talk = Talk(rubric=vf.Rubric(funcs=[lambda completion: completion[9]]))  # negative control
    results = await talk.a_evaluate(later, "m", num_examples=1)
    assert "first prompt" not in results["errors"][0]["message"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"funcs": len}, r"funcs must be a list, not <built-in function len>: funcs=\[…\]"),
        ({"funcs": [len], "weights": 1}, r"weights must be a list, not 1: weights=\[…\]"),
    ],
)
def test_a_function_or_a_weight_in_place_of_a_list_is_named(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        vf.Rubric(**arguments)


# --- functions that do not apply


def only_digits(completion):
    """Of weight 0: says nothing of a reply without digits."""
    text = completion[-1]["content"]
    return float(text == "4") if text.isdigit() else None


def only_short(completion):
    return 1.0 if len(completion[-1]["content"]) < 3 else vf.NOT_APPLICABLE


async def only_short_siblings(completions):
    return [only_short(completion) for completion in completions]


def evaluated(rubric, replies, **options):
    rows = [{"question": str(number), "answer": "4"} for number in range(len(replies))]
    env = vf.SingleTurnEnv(eval_dataset=rows, rubric=rubric)
    client = ScriptedClient(lambda request: replies[int(request.prompt[-1].content)])
    return env.evaluate(client, "m", **options)


def test_a_metric_of_none_is_left_out_of_its_mean_and_counted_beside_it():
    rubric = Rubric([exact, only_digits], weights=[1.0, 0.0])
    results = evaluated(rubric, ["4", "5", "four", "V"])
    assert results.rewards == [1.0, 0.0, 0.0, 0.0]
    assert results["errors"] == [None] * 4
    metadata = results.metadata
    assert (metadata.avg_metrics["only_digits"], metadata.metric_counts["only_digits"]) == (0.5, 2)
    assert (metadata.num_unscored, metadata.metric_counts["exact"]) == (0, 4)
    lines = dict(number_lines(results.summary()))
    assert lines["  only_digits"] == "0.500 (in 2 of 4 rollouts)"
    assert lines["  exact"] == "0.250"
    assert results.outputs[2]["not_applicable"] == ["only_digits"]
    assert "only_digits" not in results.outputs[2]["metrics"]
    assert "not_applicable" not in results.outputs[0]


@pytest.mark.parametrize("function", [only_short, only_short_siblings])
def test_the_reward_is_that_of_the_functions_that_apply(function):
    results = evaluated(Rubric([exact, function], weights=[1.0, 0.5]), ["4", "5", "four"])
    assert results.rewards == [1.5, 0.5, 0.0]
    assert results["errors"] == [None] * 3


def test_where_no_weighted_function_applies_the_reward_is_unknown_and_says_why():
    results = evaluated(Rubric([only_short, only_digits], weights=[1.0, 0.0]), ["4", "four"])
    assert results.rewards[0] == 1.0
    assert math.isnan(results.rewards[1])
    assert "'only_short' returned None or NOT_APPLICABLE" in results["errors"][1]["message"]
    assert results.metadata.num_unscored == 1


def test_none_of_a_weighted_function_is_a_failure_that_is_quoted():
    (error,) = evaluated(Rubric([only_digits]), ["four"])["errors"]
    assert "reward function 'only_digits' returned None; return a number" in error["message"]


def test_what_does_not_apply_is_the_same_from_files_of_any_size(tmp_path, monkeypatch):
    rubric = Rubric([exact, only_digits, only_short], weights=[1.0, 0.0, 1.0])
    held = evaluated(rubric, ["4", "5", "four"], results_path=tmp_path / "a")
    monkeypatch.setattr("verifiers.runs.store.LARGE_PLAN", 0)
    large = evaluated(rubric, ["4", "5", "four"], results_path=tmp_path / "b")
    read = vf.load_results(tmp_path / "a")
    for results in (large, read):
        assert results.rewards == held.rewards
        assert results.metadata.metric_counts == held.metadata.metric_counts
    assert read.outputs[2]["not_applicable"] == held.outputs[2]["not_applicable"]


async def test_a_second_scoring_begins_anew():
    state = state_of("four")
    await Rubric([exact, only_short]).score_rollout(state)
    assert state.record.not_applicable == ["only_short"]
    state["completion"][-1]["content"] = "4"
    await Rubric([exact, only_short]).score_rollout(state)
    assert (state.record.not_applicable, state["reward"]) == ([], 2.0)
