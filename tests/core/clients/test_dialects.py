"""The dialects of the wire, without IO: what one direction writes, the other reads back equal."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

import verifiers as vf
from verifiers.clients.dialects import (
    DIALECTS,
    DialectRequest,
    EventDecoder,
    StreamedError,
    messages,
    responses,
)
from verifiers.clients.payload import encode, to_fields
from verifiers.clients.reply import decode, streamed_error, to_response
from verifiers.errors import ConfigError, EmptyModelResponseError, MalformedResponse
from verifiers.types import Message, ToolCall

NAMES = sorted(DIALECTS)
STREAMED = ("messages", "responses")
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=30)
VISIBLE = TEXT.filter(str.strip)
"""Blank text beside other parts is left out, and the messages API takes none (test_sendable)."""
IDENTIFIERS = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda x: st.lists(x, max_size=3),
    max_leaves=4,
)
CALLS = st.builds(ToolCall, IDENTIFIERS, IDENTIFIERS, st.dictionaries(TEXT, JSON, max_size=3))
IMAGES = st.builds(
    vf.ImageUrlContentPart,
    st.sampled_from(
        ["http://host/a.png", "data:image/png;base64,iVBORw0KGgo=", "data:image/jpeg;base64,AAAA"]
    ),
)
PARTS = st.lists(st.builds(vf.TextContentPart, VISIBLE) | IMAGES, min_size=2, max_size=4)
SIGNED = {
    "chat": st.just([]),
    "messages": st.lists(
        st.builds(
            lambda t, s: {"type": "thinking", "thinking": t, "signature": s},
            TEXT,
            IDENTIFIERS.map("s-".__add__),
        )
        | st.builds(lambda d: {"type": "redacted_thinking", "data": d}, IDENTIFIERS),
        max_size=2,
    ),
    "responses": st.lists(
        st.builds(
            lambda i, t, e: {
                "type": "reasoning",
                "id": f"rs_{i}",
                "summary": [{"type": "summary_text", "text": t}],
                "encrypted_content": e,
            },
            IDENTIFIERS,
            TEXT,
            IDENTIFIERS,
        ),
        max_size=2,
    ),
}


class Chat:
    """The side of a client of chat completions: our own for bodies, OpenAI's for streams."""

    def __init__(self):
        self.is_done = False
        self._state = ChatCompletionStreamState()

    def feed(self, data):
        if data == "[DONE]":
            self.is_done = True
        elif error := json.loads(data).get("error"):
            raise streamed_error(error)
        else:
            self._state.handle_chunk(ChatCompletionChunk.model_validate_json(data))

    def body(self):
        body = self._state.current_completion_snapshot.to_dict()
        for call in body["choices"][0]["message"].get("tool_calls") or ():
            del call["index"]  # which the library keeps, and a body has not
        return body

    @staticmethod
    def request_body(request):
        return to_fields(request, "max_completion_tokens")

    @staticmethod
    def parse_response(body, request, where):
        return to_response(decode(encode(body), where), request, where)


Chat.stream_reader = Chat
CLIENTS = {"chat": Chat, "messages": messages, "responses": responses}


def thought_in(block):
    return block.get("thinking") or "\n".join(part["text"] for part in block.get("summary", ()))


@st.composite
def assistants(draw, name):
    calls = draw(st.lists(CALLS, max_size=3, unique_by=lambda call: call["id"]))
    blocks = draw(SIGNED[name])
    if name == "messages":
        text = draw(VISIBLE if not calls else VISIBLE | st.none())
    else:
        text = draw(TEXT | st.none())
    message = Message(role="assistant", content=text or (None if calls else ""))
    if calls:
        message["tool_calls"] = calls
    if blocks:
        message["thinking_blocks"] = blocks
        thought = "\n".join(filter(None, map(thought_in, blocks)))
    else:
        thought = draw(TEXT | st.just(""))
    if thought:
        message["reasoning_content"] = thought
    return message


@st.composite
def conversations(draw, name):
    """Conversations as a model sees them: each call has its result before the next turn."""
    texts = VISIBLE if name == "messages" else TEXT
    talk = [vf.SystemMessage(draw(texts))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        talk.append(vf.UserMessage(draw(texts | PARTS)))
        if draw(st.booleans()):
            talk.append(vf.SystemMessage(draw(texts)))
        message = draw(assistants(name))
        talk.append(message)
        talk += [
            vf.ToolMessage(draw(texts | PARTS), call["id"]) for call in message.tool_calls or ()
        ]
    return talk


TOOLS = st.lists(
    st.builds(
        vf.Tool,
        IDENTIFIERS,
        TEXT,
        st.just({"type": "object", "properties": {"a": {"type": "integer"}}}),
        st.sampled_from([None, True]),
    ),
    max_size=2,
)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.7]),
        "top_p": st.just(0.9),
        "max_tokens": st.integers(1, 9),
        "tool_choice": st.sampled_from(
            ["auto", "none", "required", {"type": "function", "function": {"name": "add"}}]
        ),
        "parallel_tool_calls": st.just(False),
        "reasoning_effort": st.just("low"),
    },
)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_call_is_read_as_it_was_written(name, data):
    dialect = DIALECTS[name]
    talk, tools, sampling = data.draw(conversations(name)), data.draw(TOOLS), data.draw(SAMPLING)
    request = vf.ModelRequest(talk, "m", tools=tools, sampling_args=sampling)
    body = CLIENTS[name].request_body(request)
    read = dialect.parse_request(json.loads(json.dumps(body)))
    assert read.messages == talk
    assert list(read.tools) == tools
    expected = (
        {"max_tokens": messages.DEFAULT_MAX_TOKENS, **sampling} if name == "messages" else sampling
    )
    if name == "messages" and "parallel_tool_calls" in sampling:
        expected = {"tool_choice": "auto", **expected}
    assert read.sampling_args == expected
    assert (read.model, read.stream) == ("m", False)


def responses_of(name):
    usage = st.builds(
        lambda cached, written, uncached, out, thought: vf.Usage(
            cached + written + uncached, out + thought, cached, written, thought
        ),
        *[st.integers(0, 5)] * 5,
    )

    def build(message, usage, cut):
        reason = "length" if cut else "tool_calls" if message.tool_calls else "stop"
        return vf.Response(message, reason, usage=usage)

    return st.builds(build, assistants(name), usage, st.booleans())


def whole(response, name):
    return response.message, response.finish_reason, response.usage, response.model


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_an_answer_is_read_as_it_was_written_in_one_body_and_in_a_stream(name, data):
    dialect, sent = DIALECTS[name], data.draw(responses_of(name))
    if name == "chat":
        sent.message.pop("thinking_blocks", None)
    request = DialectRequest([vf.UserMessage("hi")], "m", with_usage=True)
    call = vf.ModelRequest(request.messages, "m")
    expected = (sent.message, sent.finish_reason, sent.usage, "m")
    body = json.loads(json.dumps(dialect.response_body(sent, request)))
    assert whole(CLIENTS[name].parse_response(body, call, "here"), name) == expected

    wire = b"".join(
        [
            *dialect.stream_opening(request),
            dialect.keep_alive(request),
            *dialect.stream_rest(sent, request),
        ]
    )
    decoder, reader = EventDecoder(), CLIENTS[name].stream_reader()
    size = data.draw(st.integers(1, 200))
    for start in range(0, len(wire), size):
        for event in decoder.feed(wire[start : start + size]):
            assert not reader.is_done
            reader.feed(event)
    assert reader.is_done
    assert whole(CLIENTS[name].parse_response(reader.body(), call, "here"), name) == expected


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_an_answer_goes_back_verbatim_in_the_next_call(name, data):
    """The message of an answer, sent in the next prompt, is read as the message that
    was answered."""
    dialect, client, sent = DIALECTS[name], CLIENTS[name], data.draw(responses_of(name))
    answered = client.parse_response(
        dialect.response_body(sent, DialectRequest([], "m")), vf.ModelRequest([], "m"), "here"
    ).message
    talk = [vf.UserMessage("hi"), answered]
    read = dialect.parse_request(client.request_body(vf.ModelRequest(talk, "m"))).messages
    assert read == [vf.UserMessage("hi"), sent.message]


def stream_of(dialect, response, request=None):
    """The events of a whole stream."""
    request = request or DialectRequest([], "m")
    return [*dialect.stream_opening(request), *dialect.stream_rest(response, request)]


def read_stream(client, wire):
    """The reader of a whole stream."""
    reader = client.stream_reader()
    for data in EventDecoder().feed(wire):
        reader.feed(data)
    return reader


# --- what agent programs send ---------------------------------------------------------------------

CODEX = {
    "model": "m",
    "stream": True,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "client_metadata": {"session_id": "s"},
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Run.",
            "strict": False,
            "parameters": {},
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edit.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
        },
        {"type": "local_shell"},
        {
            "type": "namespace",
            "name": "agents",
            "description": "",
            "tools": [{"type": "function", "name": "spawn", "parameters": {}}],
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "input": [
        {
            "type": "message",
            "id": "m1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be brief."}],
        },
        {
            "type": "message",
            "id": "m2",
            "role": "user",
            "content": [{"type": "input_text", "text": "say hi"}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "think"}],
            "content": None,
            "encrypted_content": "abc",
        },
        {
            "type": "message",
            "status": "completed",
            "id": "msg_0",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "doing", "annotations": []}],
        },
        {
            "type": "function_call",
            "status": "completed",
            "id": "fc_1",
            "name": "exec_command",
            "arguments": '{"cmd": "ls"}',
            "call_id": "c1",
        },
        {
            "type": "custom_tool_call",
            "id": "ctc_1",
            "status": "completed",
            "call_id": "c2",
            "name": "apply_patch",
            "input": "*** Begin Patch",
        },
        {"type": "function_call_output", "id": "fco_1", "call_id": "c1", "output": "a.txt"},
        {"type": "custom_tool_call_output", "id": "ctco_1", "call_id": "c2", "output": "Done"},
    ],
}
CLAUDE_CODE = {
    "model": "m",
    "max_tokens": 32000,
    "stream": True,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "u"},
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "tools": [
        {
            "name": "Bash",
            "description": "Run.",
            "input_schema": {"type": "object"},
            "cache_control": {"type": "ephemeral"},
        },
        {"name": "web_search", "type": "web_search_20250305"},
    ],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "list", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "system", "content": "A reminder."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "sig"},
                {"type": "text", "text": "doing"},
                {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "ls"}},
                {
                    "type": "tool_use",
                    "id": "c2",
                    "name": "Bash",
                    "input": {"command": "pwd"},
                    "cache_control": {"type": "ephemeral"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "a.txt"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "text", "text": "/"}],
                    "is_error": True,
                },
                {"type": "text", "text": "and now?"},
            ],
        },
    ],
}


def test_a_request_of_codex_is_one_conversation():
    read = responses.parse_request(CODEX)
    assert [message["role"] for message in read.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
    ]
    message = read.messages[2]
    assert (message.content, message.reasoning_content) == ("doing", "think")
    assert [(call["id"], call.name, json.loads(call.arguments)) for call in message.tool_calls] == [
        ("c1", "exec_command", {"cmd": "ls"}),
        ("c2", "apply_patch", {"input": "*** Begin Patch"}),
    ]
    assert message.thinking_blocks == [CODEX["input"][2]]
    assert [(m.content, m.tool_call_id) for m in read.messages[3:]] == [
        ("a.txt", "c1"),
        ("Done", "c2"),
    ]
    assert [tool.name for tool in read.tools] == [
        "exec_command",
        "apply_patch",
        "local_shell",
        "agents__spawn",
    ]
    assert "start: X" in read.tools[1].description
    assert read.dropped_tools == ("web_search",)
    assert (read.stream, read.sampling_args) == (
        True,
        {"tool_choice": "auto", "parallel_tool_calls": True},
    )


def test_a_call_is_answered_in_the_form_of_its_tool():
    request = responses.parse_request(CODEX)
    calls = [
        ToolCall("c3", "apply_patch", {"input": "*** End"}),
        ToolCall("c4", "local_shell", {"command": ["ls"]}),
        ToolCall("c5", "agents__spawn", {"n": 1}),
        ToolCall("c6", "exec_command", {"cmd": "ls"}),
    ]
    response = vf.Response(vf.AssistantMessage(None, calls), "tool_calls")
    items = responses.response_body(response, request)["output"]
    assert [
        (item["type"], item["call_id"], item.get("name"), item.get("namespace")) for item in items
    ] == [
        ("custom_tool_call", "c3", "apply_patch", None),
        ("local_shell_call", "c4", None, None),
        ("function_call", "c5", "spawn", "agents"),
        ("function_call", "c6", "exec_command", None),
    ]
    assert (items[0]["input"], items[1]["action"]["command"]) == ("*** End", ["ls"])
    # the agent sends its calls back: the same message again
    again = responses.parse_request(CODEX | {"input": items}).messages[0]
    assert again == response.message


def test_marks_for_the_cache_do_not_change_a_conversation():
    read = messages.parse_request(CLAUDE_CODE)
    bare = json.loads(
        json.dumps(CLAUDE_CODE).replace(', "cache_control": {"type": "ephemeral"}', "")
    )
    assert "cache_control" not in json.dumps(bare)
    plain = messages.parse_request(bare)
    assert (read.messages, read.tools) == (plain.messages, plain.tools)
    # a mark turns a text into a block with a text: still the same
    bare["messages"][0]["content"] = "list"
    assert messages.parse_request(bare).messages == read.messages


def test_a_request_of_claude_code_is_one_conversation():
    read = messages.parse_request(CLAUDE_CODE)
    assert [m["role"] for m in read.messages] == [
        "system",
        "user",
        "system",
        "assistant",
        "tool",
        "tool",
        "user",
    ]
    message = read.messages[3]
    assert message.thinking_blocks == [{"type": "thinking", "thinking": "hm", "signature": "sig"}]
    assert [json.loads(call.arguments) for call in message.tool_calls] == [
        {"command": "ls"},
        {"command": "pwd"},
    ]
    assert [m.content for m in read.messages[4:]] == ["a.txt", "/", "and now?"]
    assert [tool.name for tool in read.tools] == ["Bash"]
    assert read.dropped_tools == ("web_search",)
    assert read.sampling_args == {"max_tokens": 32000}
    assert read.settings["thinking"] == {"type": "enabled", "budget_tokens": 1024}


def test_blocks_in_another_order_go_back_in_that_order():
    blocks = [
        {"type": "text", "text": "first"},
        {"type": "thinking", "thinking": "hm", "signature": "sig"},
        {"type": "text", "text": "then"},
        {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "ls"}},
    ]
    request = vf.ModelRequest([vf.UserMessage("hi")], "m")
    response = messages.parse_response(
        {"content": blocks, "stop_reason": "tool_use"}, request, "here"
    )
    assert (response.message.content, response.message.reasoning_content) == ("firstthen", "hm")
    talk = vf.ModelRequest([*request.prompt, response.message, vf.ToolMessage("a", "c1")], "m")
    assert messages.request_body(talk)["messages"][1]["content"] == blocks
    # an environment that rewrites the text is believed: thinking stays, the order is the usual one
    response.message["content"] = "rewritten"
    written = messages.request_body(talk)["messages"][1]["content"]
    assert written == [blocks[1], {"type": "text", "text": "rewritten"}, blocks[3]]


def test_items_in_another_order_go_back_in_that_order():
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "a"}],
        },
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "y"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    ]
    request = vf.ModelRequest([vf.UserMessage("hi")], "m")
    response = responses.parse_response({"output": items, "status": "completed"}, request, "here")
    talk = vf.ModelRequest([*request.prompt, response.message, vf.ToolMessage("a", "c1")], "m")
    assert responses.request_body(talk)["input"][1:5] == items
    response.message["content"] = "b"
    kinds = [item["type"] for item in responses.request_body(talk)["input"][1:]]
    assert kinds == ["reasoning", "reasoning", "message", "function_call", "function_call_output"]


def test_reasoning_of_another_vendor_is_sent_as_reasoning_without_a_signature():
    signed = vf.AssistantMessage(
        "a",
        reasoning_content="hm",
        thinking_blocks=[{"type": "thinking", "thinking": "hm", "signature": "s"}],
    )
    talk = vf.ModelRequest([vf.UserMessage("hi"), signed], "m")
    items = responses.request_body(talk)["input"]
    assert items[1]["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert "thinking" not in json.dumps(items)
    assert len(responses.request_body(talk, without=frozenset(["reasoning"]))["input"]) == 2
    assert (
        messages.request_body(talk, without=frozenset(["reasoning"]))["messages"][1]["content"][0][
            "signature"
        ]
        == "s"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [("chat", "length"), ("messages", "max_tokens"), ("responses", "max_output_tokens")],
)
def test_a_cut_by_max_tokens_is_told(name, reason):
    dialect, request = DIALECTS[name], DialectRequest([], "m")
    response = vf.Response(vf.AssistantMessage("a"), "length")
    wire = b"".join(stream_of(dialect, response)).decode()
    assert reason in json.dumps(dialect.response_body(response, request))
    assert f':"{reason}"' in wire
    complete = vf.Response(vf.AssistantMessage("a"), "stop")
    assert f':"{reason}"' not in b"".join(stream_of(dialect, complete)).decode()


def test_arguments_that_are_no_object_survive_where_an_object_is_required():
    call = ToolCall("c1", "f", '{"a": ')
    talk = [
        vf.UserMessage("hi"),
        vf.AssistantMessage(None, [call]),
        vf.ToolMessage("bad JSON", "c1"),
    ]
    body = messages.request_body(vf.ModelRequest(talk, "m"))
    assert isinstance(body["messages"][1]["content"][0]["input"], dict)
    assert messages.parse_request(body).messages == talk


REFUSED = [
    ("chat", {"model": "m"}, "messages"),
    ("chat", {"messages": []}, "model"),
    ("chat", {"model": "m", "messages": [], "n": 2}, "n is 2"),
    ("chat", {"model": "m", "messages": [{"content": "x"}]}, "role"),
    ("chat", {"model": "m", "messages": ["x"]}, "messages"),
    ("responses", {"model": "m"}, "input"),
    (
        "responses",
        {"model": "m", "input": "x", "previous_response_id": "r"},
        "previous_response_id",
    ),
    (
        "responses",
        {"model": "m", "input": [{"type": "item_reference", "id": "i"}]},
        "item_reference",
    ),
    ("responses", {"model": "m", "input": [{"role": "robot", "content": "x"}]}, "robot"),
    ("responses", {"model": "m", "input": [{"role": "user", "content": 3}]}, "content"),
    ("messages", {"model": "m", "messages": "x"}, "messages"),
    ("messages", {"model": "m", "messages": [{"role": "tool", "content": "x"}]}, "tool"),
    ("messages", {"model": "m", "messages": [{"role": "user", "content": [3]}]}, "blocks"),
]


@pytest.mark.parametrize(("name", "body", "message"), REFUSED)
def test_a_request_that_cannot_be_read_is_refused_by_name(name, body, message):
    with pytest.raises(ConfigError, match=message):
        DIALECTS[name].parse_request(body)


@pytest.mark.parametrize(
    ("name", "sampling", "message"),
    [
        ("messages", {"frequency_penalty": 1.0}, "frequency_penalty"),
        ("messages", {"seed": 1}, "seed"),
        ("responses", {"stop": ["x"]}, "stop"),
        ("responses", {"logit_bias": {"1": 2}}, "logit_bias"),
    ],
)
def test_an_argument_that_the_dialect_lacks_is_refused_by_name(name, sampling, message):
    with pytest.raises(ConfigError, match=message):
        DIALECTS[name].request_body(
            vf.ModelRequest([vf.UserMessage("x")], "m", sampling_args=sampling)
        )


@pytest.mark.parametrize("name", ["messages", "responses"])
def test_token_ids_are_not_promised_where_none_come(name):
    with pytest.raises(ConfigError, match="token ids"):
        DIALECTS[name].request_body(
            vf.ModelRequest([vf.UserMessage("x")], "m", require_tokens=True)
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("status", "text"), [(400, "too long"), (429, "slow down"), (500, "broken")]
)
def test_an_error_in_a_stream_has_the_status_it_has_outside(name, status, text):
    dialect, request = DIALECTS[name], DialectRequest([], "m")
    wire = b"".join(dialect.stream_opening(request)) + dialect.error_event(status, text, request)
    with pytest.raises(StreamedError, match=text) as caught:
        read_stream(CLIENTS[name], wire)
    assert caught.value.status == status
    assert text in json.dumps(dialect.error_body(status, text))


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_that_was_cut_is_not_done(name):
    events = stream_of(DIALECTS[name], vf.Response(vf.AssistantMessage("a")))
    assert read_stream(CLIENTS[name], b"".join(events)).is_done
    assert not read_stream(CLIENTS[name], b"".join(events[:-1])).is_done


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "body", [{}, {"content": 3}, {"output": {}, "choices": 3}, {"output": [3], "content": [3]}]
)
def test_an_answer_of_another_form_is_named(name, body):
    with pytest.raises(MalformedResponse, match="here answered 200"):
        CLIENTS[name].parse_response(body, vf.ModelRequest([], "m"), "here")


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("data", ["3", "{", '{"type": "content_block_delta", "index": 7}'])
def test_data_that_is_no_event_is_a_value_error(name, data):
    reader = DIALECTS[name].stream_reader()
    if data.startswith('{"') and name != "messages":
        reader.feed(data)  # an event of another dialect holds nothing
        assert not reader.is_done
        return
    with pytest.raises(ValueError):
        reader.feed(data)


# --- bodies of another form -----------------------------------------------------------------------

JUNK = st.sampled_from([None, 3, "x", [], {}, [3], {"x": 3}, True])
CHAT = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "b", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "stream_options": {"include_usage": True},
}
REQUESTS = {"chat": CHAT, "responses": CODEX, "messages": CLAUDE_CODE}


def spoilt(data, value):
    """A copy of data in which one value, at any depth, is another."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 4)):
        copy = value.copy()
        key = data.draw(
            st.sampled_from(sorted(copy) if isinstance(copy, dict) else range(len(copy)))
        )
        copy[key] = spoilt(data, copy[key])
        return copy
    return data.draw(JUNK)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_request_with_any_field_of_another_type_is_read_or_refused(name, data):
    body = spoilt(data, REQUESTS[name])
    if isinstance(body, dict):
        with suppress(ConfigError):
            DIALECTS[name].parse_request(body)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_an_answer_with_any_field_of_another_type_is_read_or_named(name, data):
    dialect, request = DIALECTS[name], vf.ModelRequest([], "m")
    message = vf.AssistantMessage("a", [ToolCall("c", "f", "{}")], reasoning_content="b")
    sent = vf.Response(message, "tool_calls", usage=vf.Usage(3, 2, 1))
    body = spoilt(data, dialect.response_body(sent, DialectRequest([], "m")))
    if isinstance(body, dict):
        with suppress(MalformedResponse, EmptyModelResponseError, StreamedError):
            CLIENTS[name].parse_response(body, request, "here")


@pytest.mark.parametrize("name", STREAMED)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_an_event_with_any_field_of_another_type_is_read_or_a_value_error(name, data):
    dialect = DIALECTS[name]
    message = vf.AssistantMessage("a", [ToolCall("c", "f", "{}")], reasoning_content="b")
    wire = b"".join(stream_of(dialect, vf.Response(message, "tool_calls")))
    events = [json.loads(event) for event in EventDecoder().feed(wire) if event != "[DONE]"]
    reader = dialect.stream_reader()
    with suppress(ValueError, MalformedResponse, EmptyModelResponseError, StreamedError):
        for event in events[: data.draw(st.integers(0, len(events) - 1))]:
            reader.feed(json.dumps(event))
        reader.feed(json.dumps(spoilt(data, data.draw(st.sampled_from(events)))))
        dialect.parse_response(reader.body(), vf.ModelRequest([], "m"), "here")


def test_a_streamed_item_without_a_number_for_its_place_is_a_value_error():
    reader = DIALECTS["responses"].stream_reader()
    item = {"type": "message", "content": []}
    reader.feed(json.dumps({"type": "response.output_item.done", "item": item}))
    with pytest.raises(ValueError, match="output_index is not a number: None"):
        reader.feed(
            json.dumps({"type": "response.output_item.done", "output_index": None, "item": item})
        )


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("messages", {"name": "f", "input_schema": "x"}),
        ("responses", {"type": "function", "name": "f", "parameters": "x"}),
    ],
)
def test_a_schema_that_is_no_object_is_refused_by_name(name, tool):
    request = DIALECTS[name].request_body(vf.ModelRequest([vf.UserMessage("q")], "m")) | {
        "tools": [tool]
    }
    with pytest.raises(
        vf.ConfigError, match=r"(input_schema|parameters) is str: it must be an object"
    ):
        DIALECTS[name].parse_request(request)
