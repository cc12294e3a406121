"""What reward functions receive, by parameter name."""

import functools

import pytest

from verifiers.errors import ConfigError, ScoringError
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric


def state_of(**more):
    return State(
        prompt=[{"role": "user", "content": "2+2"}],
        completion=[{"role": "assistant", "content": "4"}],
        answer="4",
        task="sum",
        info={"level": 1},
        example_id=7,
        **more,
    )


async def received(function, *states, rubric=None):
    """What a function that records its arguments got."""
    rubric = rubric or Rubric()
    rubric.add_reward_func(function)
    states = states or (state_of(),)
    await (
        rubric.score_group(list(states))
        if rubric.has_group_rewards
        else rubric.score_rollout(states[0])
    )
    return states


async def test_core_names_are_the_rollouts_values():
    got = {}

    def check(prompt, completion, answer, state, task, info):
        got.update(locals())
        return 1.0

    (state,) = await received(check)
    assert got["state"] is state
    assert (got["prompt"], got["answer"], got["task"], got["info"]) == (
        state["prompt"],
        "4",
        "sum",
        {"level": 1},
    )
    assert got["completion"][-1]["content"] == "4"


async def test_appending_to_a_message_list_changes_nothing():
    def greedy(prompt, completion):
        completion.append({"role": "assistant", "content": "more"})
        prompt.clear()
        return 1.0

    (state,) = await received(greedy)
    assert len(state["completion"]) == 1
    assert len(state["prompt"]) == 1


async def test_columns_objects_and_the_parser_arrive_by_name():
    got = {}
    parser = object()
    rubric = Rubric(parser=parser)
    rubric.add_class_object("database", "db")
    rubric.add_score_object_provider(lambda state: {"judge_id": state["example_id"]})

    def check(difficulty, database, judge_id, parser, missing=3):
        got.update(locals())
        return 1.0

    await received(check, state_of(difficulty="hard"), rubric=rubric)
    got.pop("got")
    assert got == {
        "difficulty": "hard",
        "database": "db",
        "judge_id": 7,
        "parser": parser,
        "missing": 3,
    }


async def test_core_wins_over_objects_over_providers_over_columns():
    got = {}
    rubric = Rubric()
    rubric.add_class_object("answer", "object")
    rubric.add_class_object("rank", "object")
    rubric.add_score_object_provider(lambda state: {"rank": "provider", "level": "provider"})

    def check(answer, rank, level):
        got.update(locals())
        return 1.0

    await received(check, state_of(rank="column", level="column"), rubric=rubric)
    got.pop("got")
    assert got == {"answer": "4", "rank": "object", "level": "provider"}


async def test_keyword_arguments_receive_every_name():
    got = {}

    def check(answer, **others_of_call):
        got.update(others_of_call)
        return 1.0

    await received(check, state_of(difficulty="hard"))
    assert {"prompt", "completion", "state", "task", "info", "difficulty", "parser"} <= got.keys()
    assert "answer" not in got


async def test_group_functions_receive_lists_in_group_order():
    got = {}

    def check(completions, answers, difficulty):
        got.update(locals())
        return [1.0] * len(completions)

    await received(check, state_of(difficulty="easy"), state_of(difficulty="hard"))
    assert got["answers"] == ["4", "4"]
    assert got["difficulty"] == ["easy", "hard"]


async def test_a_partial_keeps_its_name_and_bound_arguments():
    def near(answer, tolerance):
        return tolerance

    rubric = Rubric([functools.partial(near, tolerance=0.5)])
    assert rubric.get_reward_func_names() == ["near"]
    assert (await rubric.score_rollout(state_of()))["near"] == 0.5


@pytest.mark.parametrize(
    "function",
    [lambda prompt, /: 1, lambda *messages: 1, int.__add__],
    ids=["positional-only", "star-args", "builtin"],
)
def test_signatures_that_names_cannot_fill_are_refused(function):
    with pytest.raises(ConfigError):
        Rubric([function])


def test_singular_and_plural_names_together_are_refused():
    with pytest.raises(ConfigError, match=r"'state'.*'states'"):
        Rubric([lambda state, states: 1.0])


def test_a_group_stage_with_a_singular_name_is_refused():
    with pytest.raises(ConfigError, match="'answers', not 'answer'"):
        Rubric().add_reward_func(lambda answer: [1.0], stage="group")


def test_the_stage_decides_where_names_do_not():
    rubric = Rubric()
    rubric.add_reward_func(lambda difficulty: [1.0], stage="group")
    assert rubric.has_group_rewards


def test_a_parameter_nothing_supplies_is_named_before_the_run():
    def close(answr):
        return 1.0

    rubric = Rubric([close])
    with pytest.raises(
        ConfigError, match=r"'close' needs an argument 'answr'.*did you mean 'answer'"
    ):
        rubric.check_arguments({"question"})
    rubric.check_arguments({"question", "answr"})


def test_providers_are_believed_before_the_run():
    rubric = Rubric([lambda secret: 1.0])
    rubric.add_score_object_provider(lambda state: {"secret": 1})
    rubric.check_arguments(set())


async def test_outside_a_run_a_missing_argument_is_a_scoring_error():
    state = state_of()
    await Rubric([lambda nowhere: 1.0]).score_rollout(state)
    assert isinstance(state["error"], ScoringError)
    assert "'nowhere'" in str(state["error"])


async def test_a_failing_provider_leaves_the_reward_unknown_and_is_named():
    def lookup(state):
        raise ConnectionError("no database")

    rubric = Rubric([lambda answer: 1.0])
    rubric.add_score_object_provider(lookup)
    state = state_of()
    score = await rubric.score_rollout(state)
    assert score["reward"] != score["reward"]
    assert state["error"].function == "lookup"
