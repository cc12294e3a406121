"""``RubricGroup``: several rubrics in one pass."""

import math

import pytest

import verifiers.rollouts.author_code as mark
from verifiers.errors import ConfigError
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric, RubricGroup


def state_of(text="4"):
    return State(prompt="2+2", completion=[{"role": "assistant", "content": text}], answer="4")


def exact(completion, answer):
    return float(completion[-1]["content"] == answer)


def short(completion):
    return float(len(completion[-1]["content"]) < 2)


def pair(**options):
    return RubricGroup([Rubric([exact], [2.0]), Rubric([short])], **options)


async def test_the_reward_is_the_weighted_sum_of_the_childrens():
    assert (await pair(weights=[1.0, 0.5]).score_rollout(state_of()))["reward"] == 2.5
    assert (await pair().score_rollout(state_of("5")))["reward"] == 1.0


async def test_weights_can_be_set_and_restored_by_list_and_by_name():
    group = pair(names=["right", "style"])
    before = group.get_group_weights()
    group.set_group_weights([1.0, 3.0])
    assert (await group.score_rollout(state_of()))["reward"] == 5.0
    group.set_group_weights({"style": 0.0})
    assert (await group.score_rollout(state_of()))["reward"] == 2.0
    group.set_group_weights(before)
    assert (await group.score_rollout(state_of()))["reward"] == 3.0
    before.append(9.0)
    assert group.get_group_weights() == [1.0, 1.0]


@pytest.mark.parametrize("weights", [[1.0], [1.0, math.nan], {"nobody": 1.0}])
def test_weights_that_do_not_fit_are_refused_and_change_nothing(weights):
    group = pair()
    with pytest.raises(ConfigError):
        group.set_group_weights(weights)
    assert group.get_group_weights() == [1.0, 1.0]


@pytest.mark.parametrize(
    "options",
    [{"weights": [1.0]}, {"names": ["one"]}, {"names": ["same", "same"]}, {"weights": ["x", 1]}],
)
def test_a_group_that_cannot_be_meant_is_refused(options):
    with pytest.raises(ConfigError):
        pair(**options)


def test_an_empty_group_and_a_stranger_are_refused():
    with pytest.raises(ConfigError):
        RubricGroup([])
    with pytest.raises(ConfigError, match="not function"):
        RubricGroup([exact])


async def test_metrics_of_one_name_are_kept_apart(caplog):
    with caplog.at_level("INFO", "verifiers.rubrics"):
        group = RubricGroup([Rubric([exact]), Rubric([exact], [0.5])])
    assert "exact_2" in caplog.text
    score = await group.score_rollout(state_of())
    assert score["metrics"] == {"exact": 1.0, "exact_2": 1.0}
    assert score["reward"] == 1.5


async def test_functions_keep_their_own_rubrics_parser_and_objects():
    first, second = Rubric(parser="A"), Rubric(parser="B")
    for rubric in (first, second):
        rubric.add_class_object("name", rubric.parser)
    first.add_reward_func(lambda parser, name: float(parser == "A" == name))
    second.add_reward_func(lambda parser, name: float(parser == "B" == name))
    group = RubricGroup([first, second])
    assert (await group.score_rollout(state_of()))["reward"] == 2.0
    assert group.parser == "A"


async def test_what_is_added_goes_to_the_first_child_and_counts_at_once():
    group = pair()
    await group.score_rollout(state_of())
    group.add_metric(lambda completion: 7.0)
    group.rubrics[1].add_reward_func(lambda answer: 1.0, 10.0)
    score = await group.score_rollout(state_of())
    assert group.rubrics[0].get_reward_func_names() == ["exact", "<lambda>"]
    assert score["reward"] == 13.0
    assert score["<lambda>"] == 7.0


async def test_advantages_are_computed_once_from_the_final_reward():
    states = [state_of("4"), state_of("55")]
    await pair(weights=[1.0, 0.5]).score_group(states)
    assert [s["advantage"] for s in states] == [1.25, -1.25]


async def test_groups_nest():
    outer = RubricGroup(
        [pair(weights=[1.0, 0.5]), Rubric([lambda answer: 1.0])], weights=[2.0, 1.0]
    )
    assert (await outer.score_rollout(state_of()))["reward"] == 6.0
    assert outer.get_reward_func_names() == ["exact", "short", "<lambda>"]


def test_two_children_with_advantages_are_refused_and_one_is_used():
    class OwnAdvantages(Rubric):
        @mark.advantage
        def own(self, states):
            return [0.5] * len(states)

    assert RubricGroup([Rubric([exact]), OwnAdvantages()]).has_advantages
    with pytest.raises(ConfigError, match="@advantage"):
        RubricGroup([OwnAdvantages(), OwnAdvantages()])


@pytest.mark.parametrize("count", [1, 2])
async def test_an_advantage_method_that_raises_is_the_error_of_each_rollout_and_the_rewards_stay(
    count,
):
    class Failing(Rubric):
        @mark.advantage
        def own(self, states):
            raise ValueError("no baseline")

    states = [state_of() for _ in range(count)]
    await Failing([exact]).score_group(states)
    assert [state["reward"] for state in states] == [1.0] * count
    assert all("no baseline" in str(state["error"]) for state in states)
    assert all(math.isnan(state["advantage"]) for state in states)


async def test_group_functions_and_cleanup_of_children_take_part():
    tidied = []
    ranked = Rubric([lambda completions: [float(i) for i in range(len(completions))]])
    ranked.add_cleanup_handler(lambda states: tidied.append(len(states)), stage="group")
    group = RubricGroup([Rubric([exact]), ranked])
    assert group.has_group_rewards
    assert (await group.score_group([state_of(), state_of()]))["reward"] == [1.0, 2.0]
    assert tidied == [2]


async def test_an_overridden_cleanup_of_a_child_or_of_the_group_is_called():
    tidied = []

    class Older(Rubric):
        async def cleanup(self, state):
            tidied.append("child")

    class OlderGroup(RubricGroup):
        async def cleanup(self, state):
            tidied.append("group")
            await super().cleanup(state)

    await RubricGroup([Rubric([exact]), Older()]).score_rollout(state_of())
    assert tidied == ["child"]
    tidied.clear()
    await OlderGroup([Rubric([exact]), Older()]).score_rollout(state_of())
    assert tidied == ["group", "child"]
