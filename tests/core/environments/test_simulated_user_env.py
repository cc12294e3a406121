"""A simulated user: what each side sees, who begins, how a conversation ends, and
what is trained."""

import pytest

import verifiers as vf
from verifiers.environments.multi_agent.simulated_user import FIRST_REQUEST
from verifiers.errors import ConfigError
from verifiers.testing import ScriptedClient, run_rollout_sync

SECRET = "You want to go to Rome and have 30 euros."


def talk(user_replies, replies, question="Book me a train.", info=None, **options):
    user = ScriptedClient(user_replies)
    if question:
        prompt = [{"role": "user", "content": question}]
    else:
        prompt = [{"role": "system", "content": "Sell trains."}]
    row = {"prompt": prompt, "info": {"instructions": SECRET} if info is None else info}
    options.setdefault("roles", [vf.Role("user", client=user), "assistant"])
    env = vf.SimulatedUserEnv(dataset=[row], **options)
    model = ScriptedClient(replies, tokens=True)
    return user, model, run_rollout_sync(env, model, env.train_table[0].row)


def texts(request):
    return [message["content"] for message in request.prompt]


def test_the_instructions_are_the_users_alone():
    user, model, state = talk(["To Rome.", "[END]"], ["Where to?", "Booked."])
    assert state["error"] is None
    assert [texts(request)[1:] for request in user.requests] == [
        [FIRST_REQUEST, "Book me a train.", "Where to?"],
        [FIRST_REQUEST, "Book me a train.", "Where to?", "To Rome.", "Booked."],
    ]
    assert all(
        SECRET in texts(request)[0] and "[END]" in texts(request)[0] for request in user.requests
    )
    assert [texts(request) for request in model.requests] == [
        ["Book me a train."],
        ["Book me a train.", "Where to?", "To Rome."],
    ]
    assert SECRET not in str([request.prompt for request in model.requests])


def test_roles_alternate_as_chat_templates_demand():
    user, model, _ = talk(["To Rome.", "[END]"], ["Where to?", "Booked."])
    for request in (*user.requests, *model.requests):
        roles = [message["role"] for message in request.prompt if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]


def test_without_a_first_message_the_user_writes_it():
    user, model, state = talk(["A train to Rome.", "[END]"], ["Booked."], question=None)
    assert texts(user.requests[0])[1:] == [FIRST_REQUEST]
    assert texts(model.requests[0]) == ["A train to Rome."]
    assert [message["name"] for message in state["completion"]] == ["user", "assistant", "user"]


def test_the_conversation_ends_with_the_users_mark_and_not_with_the_assistants():
    _, model, state = talk(["Well?", "Good. <done>"], ["<done>", "Booked."], end_mark="<done>")
    assert state["stop_condition"] == "no_next_role"
    assert len(model.requests) == 2


def test_the_conversation_ends_after_max_turns():
    _, _, state = talk("And then?", "Well.", max_turns=5)
    assert len(state["trajectory"]) == 5


def test_the_assistant_alone_is_trained():
    rollout = talk(["To Rome.", "[END]"], ["Where to?", "Booked."])[2].rollout()
    assert set(rollout.role_rewards) == {"assistant"}
    assert len(rollout.of_role("assistant").turns) == 2
    same_model = vf.SimulatedUserEnv(dataset=[{"question": "?"}])
    assert same_model.trained_roles == ("assistant",)
    assert vf.SimulatedUserEnv(
        trained_roles=["user"], dataset=[{"question": "?"}]
    ).trained_roles == ("user",)


def test_a_prompt_of_the_role_takes_the_instructions():
    client = ScriptedClient("[END]")
    role = vf.Role("user", system_prompt="Be rude. {instructions}", client=client)
    talk("", ["Where to?"], roles=[role, "assistant"])
    assert texts(client.requests[0])[0] == f"Be rude. {SECRET}"


def test_a_row_without_instructions_is_an_error_of_its_rollout():
    state = talk(["[END]"], ["Where to?"], info={"other": 1})[2]
    assert 'info["instructions"]' in str(state["error"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roles": ("a", "b", "c")}, "the user, then the assistant"),
        ({"end_mark": " "}, "end_mark is empty"),
    ],
)
def test_a_wrong_definition_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        talk("[END]", "Well.", **options)
