"""Proposed tasks: who is shown what, what an attempt is compared with, and what is said of a reply
that is no task."""

import math

import pytest

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.testing import ScriptedClient, run_rollout_sync


class Sums(vf.ProposerSolverEnv):
    """Tasks such as 2+3."""

    def task_of(self, row, text):
        return text if "+" in text else None

    def score(self, task, text):
        return text == str(sum(map(int, task.split("+"))))


def play(replies, **options):
    env = Sums(
        dataset=[{"question": "Write a sum."}],
        system_prompt="Be brief.",
        **{"attempts": 3} | options,
    )
    client = ScriptedClient(replies, tokens=True)
    return env, client, run_rollout_sync(env, client, env.train_table[0].row)


def test_each_attempt_is_shown_the_task_and_no_other_attempt():
    env, client, state = play(["2+3", "5", "6", "5", "5"])
    shown = [[m["content"] for m in request.prompt] for request in client.requests]
    assert shown == [["Be brief.", "Write a sum."], *[["Be brief.", "2+3"]] * env.attempts]
    assert [m["name"] for m in state["completion"]] == ["proposer", "solver", "solver", "solver"]
    assert state["stop_condition"] == "no_next_role"


@pytest.mark.parametrize("correct", [(), (0,), (0, 2), (0, 1, 2)])
def test_an_attempt_is_compared_with_the_other_attempts_at_its_task(correct):
    scores = [float(number in correct) for number in range(3)]
    rollout = play(["2+3", *("5" if score else "no" for score in scores)])[2].rollout()
    for number, score in enumerate(scores):
        siblings = [value for sibling, value in enumerate(scores) if sibling != number]
        assert rollout.role_rewards[f"solver_{number + 1}"] == pytest.approx(
            score - sum(siblings) / 2
        )
    rate = sum(scores) / 3
    assert rollout.metrics["solve_rate"] == pytest.approx(rate)
    assert (
        rollout.role_rewards["proposer"]
        == rollout.reward
        == pytest.approx(1 - rate if rate else 0.0)
    )
    assert [len(rollout.of_role(role).turns) for role in rollout.role_rewards] == [1, 1, 1, 1]


def test_a_reply_that_is_no_task_ends_the_rollout_and_trains_the_proposer_alone():
    _, client, state = play(["What?", "5"])
    rollout = state.rollout()
    assert len(client.requests) == 1
    assert rollout.error is None
    assert rollout.role_rewards == {"proposer": -1.0}
    assert (rollout.metrics["is_task"], rollout.metrics["solve_rate"]) == (0.0, 0.0)


def test_the_reward_is_the_solve_rate_where_the_proposer_is_not_trained():
    author = vf.Role("author", client=ScriptedClient("1+1"))
    _, client, state = play(["2", "2", "3"], roles=(author, "pupil"))
    assert state["reward"] == pytest.approx(2 / 3)
    assert len(client.requests) == 3
    assert set(state.rollout().role_rewards) == {"pupil_1", "pupil_2", "pupil_3"}


def test_the_turns_of_a_solver_with_a_client_are_not_trained():
    solver = vf.Role("solver", client=ScriptedClient(["5", "6"]))
    state = play(["2+3"], roles=("proposer", solver))[2]
    assert state.rollout().role_rewards == {"proposer": pytest.approx(1 / 3)}


def test_rewards_are_unknown_when_attempts_are_missing():
    rollout = play(["2+3", "5", "5"], max_turns=2)[2].rollout()
    assert math.isnan(rollout.reward)
    assert all(math.isnan(reward) for reward in rollout.role_rewards.values())


def test_a_truncated_reply_is_empty_text():
    env = Sums(dataset=[{"question": "Write a sum."}], attempts=2)
    client = ScriptedClient([{"content": "1+2", "finish_reason": "length"}])
    assert env.evaluate(client, "m").outputs[0].metrics["is_task"] == 0.0


def test_a_rubric_adds_metrics():
    state = play(["2+3", "5", "5", "5"], rubric=vf.Rubric([], weights=[]))[2]
    assert state["reward"] == 0.0
    rubric = vf.Rubric()
    rubric.add_metric(lambda state: 7.0)
    assert 7.0 in play(["2+3", "5", "5", "5"], rubric=rubric)[2]["metrics"].values()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attempts": 1}, "attempts is 1"),
        ({"roles": ("a", "b", "c")}, "the proposer, then the solver"),
    ],
)
def test_a_wrong_definition_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        play([], **options)
