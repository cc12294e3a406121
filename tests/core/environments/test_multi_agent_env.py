"""Roles: who sees what, who answers, whose reward is whose, and what a saved rollout
keeps of it."""

import json
import math

import pytest

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.results.rows import output_to_state
from verifiers.runs.plan import Job
from verifiers.runs.rollout import RunContext, generate_job
from verifiers.testing import ScriptedClient, run_rollout_sync

ROW = {"question": "Begin.", "info": {"ann": "ann's secret", "bob": "bob's secret"}}


class Secrets(vf.MultiAgentEnv):
    """Each role is shown its secret at first, then what the other said aloud."""

    def observe(self, state, role):
        if not any(step["extras"]["role"] == role for step in state["trajectory"]):
            return state["info"][role]
        return super().observe(state, role)


class Telling(Secrets):
    """Negative control: shows each role the secrets of both."""

    def observe(self, state, role):
        return f"{state['info']}"


def ann(state):
    return 1.0


def bob(state):
    if state["info"].get("bob_is_unknown"):
        raise ValueError("no verdict")
    return -1.0


def talk(cls=Secrets, client=None, **options):
    roles = options.pop("roles", ("ann", "bob"))
    rubric = options.pop("rubric", vf.Rubric([ann, bob], weights=[1.0, 0.0]))
    row = options.pop("row", ROW)
    env = cls(roles, dataset=[row], rubric=rubric, **{"max_turns": 5} | options)
    client = client or ScriptedClient([f"said {n}" for n in range(9)], tokens=True)
    return env, client, run_rollout_sync(env, client, env.train_table[0].row)


def leaks(client):
    """Numbers of the requests that hold a secret of the other role."""
    texts = [json.dumps(request.prompt) for request in client.requests]
    return [n for n, text in enumerate(texts) if ("bob's" if n % 2 == 0 else "ann's") in text]


def test_a_role_sees_its_own_messages_and_what_observe_shows_it():
    _, client, state = talk(
        system_prompt="Be brief.", roles=(vf.Role("ann", system_prompt="You are Ann."), "bob")
    )
    assert state["stop_condition"] == "max_turns_reached"
    assert leaks(client) == []
    contents = [[(m["role"], m["content"]) for m in request.prompt] for request in client.requests]
    assert contents[2] == [
        ("system", "You are Ann."),
        ("user", "ann's secret"),
        ("assistant", "said 0"),
        ("user", "said 1"),
    ]
    assert contents[3] == [
        ("system", "Be brief."),
        ("user", "bob's secret"),
        ("assistant", "said 1"),
        ("user", "said 2"),
    ]
    assert leaks(talk(Telling)[1]) == [0, 1, 2, 3, 4]


def test_by_default_a_role_hears_the_others_and_who_spoke_where_there_are_several():
    env = vf.MultiAgentEnv(("a", "b", "c"), dataset=[{"question": "Begin."}], max_turns=4)
    client = ScriptedClient(["one", "two", "three", "four"])
    run_rollout_sync(env, client, env.train_table[0].row)
    heard = [[m["content"] for m in request.prompt] for request in client.requests]
    assert heard == [
        ["Begin."],
        ["Begin.", "a: one"],
        ["Begin.", "a: one", "b: two"],
        ["Begin.", "one", "b: two", "c: three"],
    ]


def test_each_role_has_its_turns_its_reward_and_token_exact_prompts():
    env, _, state = talk()
    rollout = state.rollout()
    assert [turn.role for turn in rollout.turns] == ["ann", "bob", "ann", "bob", "ann"]
    assert rollout.role_rewards == {"ann": 1.0, "bob": -1.0}
    assert rollout.reward == 1.0
    for role, count in (("ann", 3), ("bob", 2)):
        part = rollout.of_role(role)
        assert (len(part.turns), part.reward) == (count, rollout.role_rewards[role])
        # its own history, as sampled
        for before, after in zip(part.turns, part.turns[1:], strict=False):
            history = [*before.prompt_ids, *before.completion_ids]
            assert after.prompt_ids[: len(history)].tolist() == history
    assert [(m["name"], m["content"]) for m in state["completion"][:2]] == [
        ("ann", "said 0"),
        ("bob", "said 1"),
    ]
    # messages, of the role's own last turn
    assert [step.shared for step in state["trajectory"]] == [0, 0, 2, 2, 4]
    assert env.trained_roles == ("ann", "bob")


def test_an_unknown_reward_is_unknown_for_that_role_only():
    rollout = talk(row={**ROW, "info": {**ROW["info"], "bob_is_unknown": True}})[2].rollout()
    assert rollout.role_rewards["ann"] == rollout.reward == 1.0
    assert math.isnan(rollout.role_rewards["bob"])


def test_a_role_without_a_reward_function_has_the_reward_of_the_rollout():
    rollout = talk(rubric=vf.Rubric([bob, lambda state: 3.0], weights=[0.0, 2.0]))[2].rollout()
    assert rollout.role_rewards == {"ann": 6.0, "bob": -1.0}


def test_a_role_with_a_client_is_played_by_it_and_never_trained():
    opponent = ScriptedClient(["fixed"])
    roles = (
        "ann",
        vf.Role("bob", client=opponent, model="other", sampling_args={"temperature": 0.5}),
    )
    env, client, state = talk(roles=roles)
    assert len(client.requests) == 3
    assert [(r.model, r.sampling_args["temperature"]) for r in opponent.requests] == [
        ("other", 0.5)
    ] * 2
    assert env.trained_roles == ("ann",)
    assert [turn.role for turn in state.rollout().turns] == ["ann"] * 3
    assert state.rollout().role_rewards == {"ann": 1.0}


@pytest.mark.parametrize("has_client", [True, False])
async def test_tokens_are_required_of_the_trained_model_alone(has_client):
    opponent = ScriptedClient(["fixed"])
    roles = ("ann", vf.Role("bob", client=opponent) if has_client else "bob")
    env = Secrets(roles, dataset=[ROW], max_turns=2)
    client = ScriptedClient(["said"], tokens=True)
    job = Job(env.train_table[0], 0, 1, 0)
    await generate_job(env, job, RunContext(client=client, model="m", require_tokens=True))
    assert [request.require_tokens for request in client.requests] == [True] * (
        1 if has_client else 2
    )
    assert [request.require_tokens for request in opponent.requests] == [False] * has_client


def test_a_saved_run_keeps_the_rewards_and_roles_and_resumes(tmp_path):
    env = Secrets(
        ("ann", "bob"),
        dataset=[ROW, {**ROW, "question": "Again."}],
        max_turns=3,
        rubric=vf.Rubric([ann, bob]),
    )
    client = ScriptedClient(["said"], tokens=True)
    options = {"results_path": tmp_path / "run", "state_columns": ["trajectory"]}
    env.evaluate(client, "m", num_examples=1, **options)
    assert len(client.requests) == 3
    resumed = env.evaluate(client, "m", num_examples=2, **options)
    assert len(client.requests) == 6  # the first rollout was read
    assert [(row["ann"], row["bob"]) for row in resumed.outputs] == [(1.0, -1.0)] * 2
    for row in vf.load_results(tmp_path / "run").outputs:
        assert [message["name"] for message in row.completion] == ["ann", "bob", "ann"]
        rollout = output_to_state(row).rollout()
        assert [turn.role for turn in rollout.turns] == ["ann", "bob", "ann"]
        assert rollout.role_rewards == {"ann": 1.0, "bob": -1.0}


def test_the_next_role_decides_who_acts_and_none_ends_the_rollout():
    class Twice(vf.MultiAgentEnv):
        async def next_role(self, state):
            return None if len(state["trajectory"]) == 2 else "b"

    env = Twice(("a", "b"), dataset=[{"question": "?"}])
    state = run_rollout_sync(env, ScriptedClient("x"), env.train_table[0].row)
    assert (state["stop_condition"], [m["name"] for m in state["completion"]]) == (
        "no_next_role",
        ["b", "b"],
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roles": ["one"]}, "at least two roles"),
        ({"roles": ["one", "one"]}, "different names"),
        ({"roles": ["one", 2]}, "vf.Role objects and names"),
        ({"roles": ["a", "b"], "trained_roles": ["c"]}, "which is none of a, b"),
        (
            {"roles": [vf.Role("a", client="local"), "b"], "trained_roles": ["a"]},
            "which has a client of its own",
        ),
        ({"roles": ["a", "b"], "message_type": "completion"}, "message_type"),
    ],
)
def test_a_wrong_definition_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        vf.MultiAgentEnv(dataset=[ROW], **options)
