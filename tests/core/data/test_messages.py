"""Every form of message becomes one form, without stored Nones; printing is safe."""

import json

import pytest
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

from verifiers.data.examples import RowFormat, format_row
from verifiers.data.messages import (
    concat_messages,
    is_prefix,
    last_text,
    message_text,
    message_to_printable,
    messages_to_printable,
    normalize_messages,
    render_text,
    strip_nones,
)
from verifiers.environments import SingleTurnEnv
from verifiers.errors import ConfigError, DatasetError
from verifiers.types import (
    AssistantMessage,
    ImageUrlContentPart,
    Message,
    SystemMessage,
    TextContentPart,
    TextMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_text_is_one_user_message_in_chat_mode_and_itself_in_completion_mode():
    assert normalize_messages("hi") == [{"role": "user", "content": "hi"}]
    assert normalize_messages("hi", "completion") == "hi"


def test_nothing_is_an_empty_conversation():
    assert normalize_messages(None) == []
    assert normalize_messages([]) == []
    assert normalize_messages(None, "completion") == ""


def test_one_message_is_a_conversation_of_one():
    assert normalize_messages({"role": "user", "content": "hi"}) == [UserMessage("hi")]


def test_messages_in_form_are_passed_on_as_the_same_objects_in_a_new_list():
    messages = [
        SystemMessage("s"),
        UserMessage("u"),
        AssistantMessage(None, [ToolCall("c1", "add")]),
        ToolMessage("3", "c1"),
    ]
    normal = normalize_messages(messages)
    assert normal is not messages
    assert all(a is b for a, b in zip(normal, messages, strict=True))


def test_dicts_become_messages_of_their_role_that_answer_attributes():
    user, assistant = normalize_messages(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    assert isinstance(user, UserMessage)
    assert isinstance(assistant, AssistantMessage)
    assert assistant.content == "b"
    assert assistant.tool_calls is None


def test_unknown_keys_and_roles_are_kept():
    (message,) = normalize_messages([{"role": "developer", "content": "x", "cache": {"ttl": 5}}])
    assert message == {"role": "developer", "content": "x", "cache": {"ttl": 5}}


# fault 16: "tool_calls" in m was always true
def test_a_key_that_is_absent_is_not_in_the_message():
    (message,) = normalize_messages(
        [{"role": "assistant", "content": "x", "tool_calls": None, "name": None}]
    )
    assert "tool_calls" not in message
    assert dict(message) == {"role": "assistant", "content": "x"}
    (message,) = normalize_messages([{"role": "assistant", "content": "x", "tool_calls": []}])
    assert "tool_calls" not in message


def test_content_none_stays_only_beside_tool_calls():
    with_calls, without, user = normalize_messages(
        [
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "assistant", "content": None},
            {"role": "user", "content": None},
        ]
    )
    assert with_calls["content"] is None
    assert without["content"] == ""
    assert user["content"] == ""


def test_a_message_object_with_nones_is_cleaned_too():
    (message,) = normalize_messages([Message({"role": "user", "content": "x", "name": None})])
    assert dict(message) == {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"id": "c1", "name": "add", "arguments": '{"a": 1}'},
        json.dumps(CALL),
        ToolCall("c1", "add", {"a": 1}),
    ],
)
def test_tool_calls_of_every_form_are_stored_nested_and_read_flat(call):
    (message,) = normalize_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message.tool_calls == [CALL]
    assert message.tool_calls[0].name == "add"
    assert message["tool_calls"][0]["arguments"] == '{"a": 1}'


def test_openai_objects_are_dumped():
    message_object = ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": None, "tool_calls": [CALL]}
    )
    (message,) = normalize_messages([message_object])
    assert message == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert isinstance(message.tool_calls[0], ToolCall)


def test_pydantic_messages_and_parts_are_dumped():
    class Part(BaseModel):
        type: str = "text"
        text: str = "hello"

    class Custom(BaseModel):
        role: str = "user"
        content: list[Part] = [Part()]
        name: str | None = None

    assert normalize_messages([Custom()]) == [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]}
    ]
    assert normalize_messages([{"role": "user", "content": [Part()]}]) == normalize_messages(
        Custom()
    )


def test_nulls_that_arrow_filled_in_are_undone_at_any_depth():
    filled = {
        "role": "user",
        "tool_calls": None,
        "content": [
            {"type": "text", "text": "see", "image_url": None},
            {"type": "image_url", "text": None, "image_url": {"url": "u", "detail": None}},
        ],
    }
    assert normalize_messages([filled]) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "u"}},
            ],
        }
    ]
    assert strip_nones({"a": [{"b": None, "c": 1}, None]}) == {"a": [{"c": 1}, None]}


@pytest.mark.parametrize(
    "bad", [[3], [{"content": "x"}], [{"role": None, "content": "x"}], object(), [["a"]]]
)
def test_what_is_no_message_is_refused_by_name(bad):
    with pytest.raises(ConfigError, match="message"):
        normalize_messages(bad)


def test_a_tool_call_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="tool call"):
        normalize_messages([{"role": "assistant", "tool_calls": ["not json"]}])


def test_completion_mode_joins_text_messages_and_refuses_chat():
    assert normalize_messages([TextMessage("a"), TextMessage("b")], "completion") == "ab"
    with pytest.raises(ConfigError, match="role 'user'"):
        normalize_messages([UserMessage("a")], "completion")


def test_text_of_every_content_form():
    assert message_text(UserMessage("a")) == "a"
    assert message_text(AssistantMessage(None, [ToolCall("c", "f")])) == ""
    assert (
        message_text(
            UserMessage([TextContentPart("a"), ImageUrlContentPart("u"), TextContentPart("b")])
        )
        == "a\nb"
    )
    assert message_text(ChatCompletionMessage(role="assistant", content="x")) == "x"
    assert message_text({"role": "user"}) == ""


def test_last_text_reads_every_message_form():  # fault 1: an object message gave an empty question
    class Custom(BaseModel):
        role: str = "user"
        content: str = "second"

    assert last_text([UserMessage("first"), Custom(), AssistantMessage("a")], "user") == "second"
    assert last_text([AssistantMessage("a")], "user") is None
    assert last_text("2 + 2", "user") == "2 + 2"


def test_concatenation_of_text_and_of_messages():
    assert concat_messages(["a", "b"]) == "ab"
    assert concat_messages([[UserMessage("a")], AssistantMessage("b")]) == [
        UserMessage("a"),
        AssistantMessage("b"),
    ]
    assert concat_messages([]) == []


def test_prefixes():
    a, b = UserMessage("a"), AssistantMessage("b")
    assert is_prefix([a], [a, b])
    assert is_prefix([], [a])
    assert not is_prefix([b], [a, b])
    assert not is_prefix([a, b], [a])
    assert is_prefix("ab", "abc")
    assert not is_prefix("ab", [a])


def test_rendering_shows_thoughts_calls_and_parts_escaped():
    shown = render_text(
        [
            UserMessage([TextContentPart("look"), ImageUrlContentPart("data:...")]),
            AssistantMessage(
                "\x1b[31mred", [ToolCall("c1", "add", '{"a": 1}')], reasoning_content="hm"
            ),
        ]
    )
    assert (
        shown
        == 'user: look\n[image]\n\nassistant: <think>hm</think>\n\\x1b[31mred\n-> add({"a": 1})'
    )


def test_printable_messages_have_text_content_and_leave_the_originals_alone():
    original = UserMessage(
        [
            TextContentPart("hear"),
            {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        ]
    )
    assert message_to_printable(original) == {"role": "user", "content": "hear\n[audio]"}
    assert isinstance(original["content"], list)
    assert messages_to_printable("text") == "text"
    assert (
        messages_to_printable([original, AssistantMessage(None, [ToolCall("c", "f")])])[1][
            "content"
        ]
        == ""
    )


# --- content parts

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


def test_parts_that_a_server_can_read_pass_as_they_are():
    parts = [
        {"type": "text", "text": "What is it?"},
        IMAGE,
        AUDIO,
        {"type": "file", "file": {"id": 3}},
    ]
    row = format_row({"prompt": [{"role": "user", "content": parts}]}, RowFormat())
    assert row["prompt"][0]["content"] == parts
    assert (
        messages_to_printable(row["prompt"])[0].content == "What is it?\n[image]\n[audio]\n[file]"
    )


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            {"type": "image_url", "image_url": "http://host/a.png"},
            r"'image_url' needs a text in part\['image_url'\]\['url'\]",
        ),
        (
            {"type": "input_audio", "input_audio": {"format": "wav"}},
            r"part\['input_audio'\]\['data'\]",
        ),
        ({"type": "text", "text": None}, r"part\['text'\]"),
        ({"image_url": {"url": "x"}}, "a content part is a dict with a 'type'"),
        (3, "a content part is a dict with a 'type', not 3"),
    ],
)
def test_a_part_that_no_server_can_read_is_refused_with_its_row(part, said):
    rows = [{"question": "fine"}, {"prompt": [{"role": "user", "content": [IMAGE, part]}]}]
    with pytest.raises(
        DatasetError, match=f"row 1 of the dataset: the prompt cannot be read: .*{said}"
    ):
        SingleTurnEnv(dataset=rows).train_table[1]
