"""Which calls of an agent belong together, on conversations as real agents were seen
to write them."""

import json

import verifiers as vf
from verifiers.clients.dialects import DIALECTS
from verifiers.data.messages import canonical_arguments
from verifiers_agents.conversation import Conversation

SYSTEM = vf.SystemMessage("You are an agent.")
TOOLS = ["bash"]


def user(text):
    return vf.UserMessage(text)


def said(text, *calls):
    return vf.AssistantMessage(text, list(calls) or None)


def call(arguments, call_id="c1"):
    return vf.ToolCall(call_id, "bash", arguments)


def told(text, call_id="c1"):
    return vf.ToolMessage(text, call_id)


def roles_of(*calls):
    """Roles of (prompt, answer, tools)."""
    conversation = Conversation()
    for prompt, answer, tools in calls:
        conversation.add(conversation.restored(prompt), answer, tools)
    return conversation.roles()


def test_a_message_that_means_the_same_is_the_known_one():
    conversation = Conversation()
    sampled = vf.AssistantMessage(
        "Let me look.\n", [call('{"command":"ls","n":1}')], reasoning_content="hm"
    )
    conversation.add([SYSTEM, user("go")], sampled)
    for again in (
        said("Let me look.\n", call('{"command": "ls", "n": 1}')),
        said("Let me look.", call('{\n  "n": 1,\n  "command": "ls"}')),
        vf.AssistantMessage(
            [{"type": "text", "text": "Let me look.\n"}], [call('{"command":"ls","n":1}')]
        ),
    ):
        restored = conversation.restored([SYSTEM, user("go"), again, told("a")])
        assert restored[2] is sampled
        assert restored[3] == told("a")


def test_negative_control_a_message_that_means_something_else_stays():
    conversation = Conversation()
    conversation.add([user("go")], said("x", call('{"command":"ls"}')))
    for prompt in (
        [user("go"), said("x", call('{"command":"rm"}'))],
        [user("go!"), said("x", call('{"command":"ls"}'))],
        [user("go"), said("y", call('{"command":"ls"}'))],
        [user("go"), said("x", call('{"command":"ls"}', "c2"))],
    ):
        assert conversation.restored(prompt) == prompt


def test_marks_for_a_cache_are_no_change():
    conversation = Conversation()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    conversation.add([vf.UserMessage([{"type": "text", "text": "go"}, image])], said("seen"))
    marked = vf.UserMessage(
        [{"type": "text", "text": "go"}, {**image, "cache_control": {"type": "ephemeral"}}]
    )
    restored = conversation.restored([marked, said("seen")])
    assert "cache_control" not in json.dumps(restored)


def test_every_dialect_gives_back_what_it_was_given():
    """Through the real dialects: the answer as a body, read again from the next request."""
    sampled = said("Look.", call('{"command":"ls"}'), call("{not json", "c2"))
    response = vf.Response(sampled, "tool_calls")
    requests = {
        "chat": {"model": "m", "messages": [{"role": "user", "content": "go"}]},
        "responses": {"model": "m", "input": "go"},
        "messages": {
            "model": "m",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "go"}],
        },
    }
    for name, body in requests.items():
        dialect = DIALECTS[name]
        request = dialect.parse_request(body)
        answer = dialect.response_body(response, request)
        if name == "chat":
            again = {"messages": [*body["messages"], answer["choices"][0]["message"]]}
        elif name == "messages":
            again = {
                "messages": [*body["messages"], {"role": "assistant", "content": answer["content"]}]
            }
        else:
            again = {"input": [{"role": "user", "content": "go"}, *answer["output"]]}
        echo = dialect.parse_request(body | again).messages[1]
        conversation = Conversation()
        conversation.add(request.messages, sampled, (), echo)
        assert conversation.restored([user("go"), echo])[1] is sampled, name


def test_a_title_before_and_a_summary_after_are_side_calls():
    work = [SYSTEM, user("Fix it.")]
    first = said(None, call('{"command":"ls"}'))
    assert roles_of(
        ([user("A title for: Fix it.")], said("Fixing"), []),
        (work, first, TOOLS),
        ([*work, first, told("a")], said("Fixed."), TOOLS),
        ([user("Say what was done.")], said("It was fixed."), []),
    ) == ["side", "main", "main", "side"]


def test_a_program_without_tools_has_main_turns_alone():
    assert roles_of(([user("one")], said("1"), []), ([user("two")], said("2"), [])) == [
        "main",
        "main",
    ]


def test_a_conversation_inside_of_another_is_a_subagents():
    work = [SYSTEM, user("Fix it.")]
    first = said(None, call('{"task":"search"}'))
    search = [vf.SystemMessage("You search."), user("search")]
    assert roles_of(
        (work, first, TOOLS),
        (search, said(None, call('{"command":"grep"}', "c9")), TOOLS),
        (
            [*search, said(None, call('{"command":"grep"}', "c9")), told("b", "c9")],
            said("found it in b"),
            TOOLS,
        ),
        ([*work, first, told("found it in b")], said("Fixed."), TOOLS),
    ) == ["main", "subagent", "subagent", "main"]


def test_a_compacted_history_is_a_summary_and_a_new_start():
    work = [SYSTEM, user("Fix it.")]
    first = said(None, call('{"command":"ls"}'))
    ask = [*work, first, told("a" * 99), user("Summarise what happened so far.")]
    conversation = Conversation()
    for prompt, answer, tools in [
        (work, first, TOOLS),
        (ask, said("The folder holds a file a."), []),
        ([SYSTEM, user("Before: The folder holds a file a. Go on.")], said("Fixed."), TOOLS),
    ]:
        conversation.add(conversation.restored(prompt), answer, tools)
    assert conversation.roles() == ["main", "summary", "main"]
    assert conversation.num_rewrites == 1


def test_canonical_arguments():
    assert canonical_arguments('{"a": 1,"b":[2]}') == canonical_arguments('{"b": [2], "a": 1}')
    assert canonical_arguments("") == canonical_arguments("{}")
    assert canonical_arguments(" {oops ") == "{oops"
