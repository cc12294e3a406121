"""Older forms of scoring: which classes and objects are adapted, and when."""

import pytest

import verifiers as vf
from verifiers.environments.group_rubric import EnvGroupRubric
from verifiers.rollouts.state import State
from verifiers.rubrics import RolloutScore, RolloutScores, Rubric


def exact(completion, answer):
    return float(completion == answer)


def state_of(completion="4"):
    return State(prompt="2+2", completion=completion, answer="4")


async def staged(rubric, *states):
    """Rewards after both stages, as the runner calls them."""
    for state in states:
        await rubric.score_individual(state)
    await rubric.score_group_stage(list(states))
    return [state["reward"] for state in states]


class Nine:
    """A base that an author mixes in."""

    async def score_group(self, states, **kwargs):
        for state in states:
            state["reward"] = 9.0


class ByColumns(Rubric):
    def score_rollouts(self, prompts, completions, answers, states, tasks, infos, max_concurrent):
        return RolloutScores(
            [float(len(text)) for text in completions], {"seen": [1.0] * len(states)}
        )


class ByFields(Rubric):
    async def score_rollout(self, prompt, completion, answer, state):
        score = await super().score_rollout(prompt, completion, answer, state)
        return RolloutScore(score["reward"] / 2, {"half": 1.0})


async def test_a_class_without_older_methods_keeps_the_two_stages():
    class Plain(Rubric):
        def helper(self):
            return 1

    assert Plain.score_individual is Rubric.score_individual
    assert Plain.score_group_stage is Rubric.score_group_stage
    assert not Plain.scores_itself
    assert await staged(Plain([exact]), state_of(), state_of("5")) == [1.0, 0.0]


async def test_what_a_mixed_in_base_replaces_is_called():
    class Mixed(Nine, Rubric):
        pass

    rubric = Mixed([exact])
    assert rubric.scores_itself
    assert rubric.has_group_rewards
    assert await staged(rubric, state_of("5")) == [9.0]


async def test_a_subclass_adds_to_what_its_base_replaced():
    class Both(ByFields):
        async def score_group(self, states):
            for state in states:
                state["reward"] += 1

    assert await staged(ByFields([exact]), state_of()) == [0.5]
    assert await staged(Both([exact]), state_of()) == [1.5]


async def test_columns_are_scored_in_the_group_stage_alone():
    states = [state_of("4"), state_of("44")]
    rubric = ByColumns()
    await rubric.score_individual(states[0])
    assert states[0]["reward"] is None
    assert await staged(rubric, *states) == [1.0, 2.0]
    assert states[0]["metrics"] == {"seen": 1.0}


async def test_too_few_rewards_of_columns_are_refused_and_cleaned_up():
    class Short(Rubric):
        def score_rollouts(self, **columns):
            return {"reward": [1.0]}

    tidied = []
    rubric = Short()
    rubric.add_cleanup_handler(lambda states: tidied.append(len(states)), stage="group")
    with pytest.raises(vf.ScoringError, match="for 2 rollouts"):
        await staged(rubric, state_of(), state_of())
    assert tidied == [2]


async def test_a_method_set_on_an_object_is_called_for_that_object_alone():
    changed, plain = Rubric([exact]), Rubric([exact])
    native = changed.score_rollout

    async def doubled(state):
        await native(state)
        state["reward"] *= 2

    changed.score_rollout = doubled
    assert changed.scores_itself
    assert not changed.has_group_rewards
    assert await staged(changed, state_of()) == [2.0]
    assert await staged(plain, state_of()) == [1.0]
    assert not plain.scores_itself


async def test_lists_of_an_override_are_read_at_every_pass():
    class Growing(Rubric):
        extra = 0

        def get_reward_funcs(self):
            return [*super().get_reward_funcs(), *([lambda answer: 1.0] * self.extra)]

        def _get_reward_weights(self):
            return [1.0] * (1 + self.extra)

    rubric = Growing([exact])
    assert await staged(rubric, state_of()) == [1.0]
    rubric.extra = 1
    assert await staged(rubric, state_of()) == [2.0]
    assert rubric.get_reward_func_names() == ["exact", "<lambda>"]


async def test_the_rubric_of_a_group_takes_older_forms():
    env = vf.SingleTurnEnv(dataset=[{"question": "2+2", "answer": "4"}], rubric=Rubric([exact]))
    rubric = EnvGroupRubric({"sums": env})
    assert list(rubric.env_map) == ["sums"]
    assert rubric.all_reward_names == ["exact"]
    assert (await rubric.score_rollout(prompt="2+2", completion="4", answer="4", task="sums"))[
        "reward"
    ] == 1.0
    plain = {"prompt": "2+2", "completion": "5", "answer": "4", "task": "sums"}
    await rubric.score_group([plain])
    assert (plain["reward"], plain["metrics"]) == (0.0, {"exact": 0.0})


def test_the_scores_of_a_blocking_call_may_be_awaited():
    async def awaited():
        return await scores

    scores = Rubric([exact]).score_rollouts(
        prompts=["2+2"], completions=["4"], answers=["4"], states=[{}]
    )
    with pytest.raises(StopIteration):
        awaited().send(None)
    assert scores["reward"] == [1.0]
