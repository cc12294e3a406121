"""Messages that are dicts and answer attributes; tool calls in both spellings; responses."""

import copy
import dataclasses
import inspect
import json
import pickle

import msgspec
import pytest

import verifiers as vf
from verifiers.types import AttributeDict, Choice, Immutable

MESSAGES = [
    vf.SystemMessage("s"),
    vf.UserMessage(content="u"),
    vf.AssistantMessage("a", reasoning_content="because"),
    vf.AssistantMessage(tool_calls=[vf.ToolCall("1", "add", {"a": 1})]),
    vf.ToolMessage("3", tool_call_id="1"),
    vf.TextMessage("t"),
]


def test_messages_equal_their_dicts_and_store_no_none():
    assert vf.UserMessage(content="x") == {"role": "user", "content": "x"}
    assert vf.AssistantMessage("x") == {"role": "assistant", "content": "x"}
    assert vf.AssistantMessage() == {"role": "assistant", "content": ""}
    assert vf.ToolMessage("3", "id") == {"role": "tool", "content": "3", "tool_call_id": "id"}
    assert all(None not in m.values() for m in MESSAGES if not m.tool_calls)


def test_only_an_assistant_message_beside_tool_calls_has_no_content():
    called = vf.AssistantMessage(tool_calls=[vf.ToolCall("1", "f")])
    assert called["content"] is None
    assert vf.AssistantMessage(tool_calls=[]) == {"role": "assistant", "content": ""} | {
        "tool_calls": []
    }


def test_known_fields_read_as_attributes_and_absent_ones_as_none():
    m = vf.UserMessage("hi")
    assert (m.role, m.content, m.tool_calls, m.name, m.tool_call_id) == (
        "user",
        "hi",
        None,
        None,
        None,
    )
    assert "tool_calls" not in m
    with pytest.raises(KeyError):
        m["tool_calls"]
    with pytest.raises(AttributeError, match="colour"):
        m.colour
    m["colour"] = "red"
    m.name = "ann"
    assert (m.colour, m["name"]) == ("red", "ann")


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.role)
def test_messages_survive_copy_pickle_and_json(message):
    for again in (copy.copy(message), copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
        assert again == message
        assert type(again) is type(message)
    assert json.loads(json.dumps(message)) == message
    assert message.model_dump() == dict(message)


def test_a_message_from_a_file(tmp_path):
    (tmp_path / "prompt.txt").write_text("Be brief.\n")
    assert vf.SystemMessage.from_path(tmp_path / "prompt.txt") == {
        "role": "system",
        "content": "Be brief.\n",
    }


def test_a_tool_call_is_nested_and_answers_flat():
    call = vf.ToolCall("1", "add", {"a": 1})
    assert call == {
        "id": "1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }
    assert (call["name"], call.name, call.get("arguments"), call.function.name) == (
        "add",
        "add",
        '{"a": 1}',
        "add",
    )
    assert vf.ToolCall.from_wire({"id": "1", "name": "add", "arguments": '{"a": 1}'}) == call
    assert vf.ToolCall.from_wire(call) == call
    assert call.get("colour", 3) == 3
    with pytest.raises(AttributeError):
        call.colour
    assert type(pickle.loads(pickle.dumps(call))) is vf.ToolCall


def test_extra_keys_of_a_tool_call_are_kept():
    assert vf.ToolCall.from_wire({"id": "1", "function": {"name": "f"}, "index": 4})["index"] == 4


def test_a_tool_is_nested_and_answers_flat():
    tool = vf.Tool("add", "adds", {"type": "object"}, strict=True)
    assert tool["type"] == "function"
    assert (tool.name, tool["description"], tool.get("parameters"), tool.strict) == (
        "add",
        "adds",
        {"type": "object"},
        True,
    )
    assert vf.Tool.from_wire(tool) == tool
    assert vf.Tool.from_wire({"name": "f"}) == vf.Tool("f")
    assert vf.Tool("f").strict is None


def test_content_parts_are_the_wire_form():
    assert vf.TextContentPart("x") == {"type": "text", "text": "x"}
    assert vf.ImageUrlContentPart("data:x") == {"type": "image_url", "image_url": {"url": "data:x"}}
    assert vf.InputAudioContentPart(data="AA", format="mp3") == {
        "type": "input_audio",
        "input_audio": {"data": "AA", "format": "mp3"},
    }


def test_a_response_answers_as_openai_objects_do():
    response = vf.Response(vf.AssistantMessage("4"), usage=vf.Usage(3, 1))
    assert response.choices == [Choice(response.message, "stop")]
    assert response.choices[0].message.content == "4"
    assert (response.usage.prompt_tokens, response.usage.total_tokens, response.text) == (3, 4, "4")
    assert vf.Response(vf.AssistantMessage(tool_calls=[vf.ToolCall("1", "f")])).text == ""


def test_requests_and_responses_cannot_be_changed():
    with pytest.raises(AttributeError):
        vf.ModelRequest([], "m").model = "other"
    with pytest.raises(AttributeError):
        vf.Response(vf.AssistantMessage("4")).model = "other"


def test_attribute_dicts_read_and_write_both_ways_and_keep_their_class():
    d = AttributeDict(a=1)
    d.b = 2
    assert (d.a, d["b"]) == (1, 2)
    with pytest.raises(AttributeError, match="'c'"):
        d.c
    assert type(copy.deepcopy(d)) is AttributeDict


# --- immutable records ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenPoint:
    """The negative control: what each of these tests holds of a frozen dataclass."""

    x: int
    notes: dict[str, int] = dataclasses.field(default_factory=dict)
    y: int = 5


class ImmutablePoint(Immutable, frozen=True):
    x: int
    notes: dict[str, int] = msgspec.field(default_factory=dict)
    y: int = 5


@pytest.mark.parametrize("cls", [FrozenPoint, ImmutablePoint])
def test_an_immutable_is_a_frozen_dataclass_to_its_users(cls):
    point = cls(3, {"a": 1})
    assert dataclasses.is_dataclass(point)
    assert [field.name for field in dataclasses.fields(cls)] == ["x", "notes", "y"]
    assert [field.default for field in dataclasses.fields(cls)] == [
        dataclasses.MISSING,
        dataclasses.MISSING,
        5,
    ]
    assert dataclasses.fields(cls)[1].default_factory is dict
    assert dataclasses.asdict(point) == {"x": 3, "notes": {"a": 1}, "y": 5}
    assert dataclasses.replace(point, x=4) == cls(4, {"a": 1}) != point
    assert pickle.loads(pickle.dumps(point)) == copy.deepcopy(point) == copy.copy(point) == point
    assert repr(point) == f"{cls.__name__}(x=3, notes={{'a': 1}}, y=5)"
    assert cls(3).notes is not cls(3).notes
    assert list(inspect.signature(cls).parameters) == ["x", "notes", "y"]
    assert msgspec.json.encode(point) == b'{"x":3,"notes":{"a":1},"y":5}'
    with pytest.raises(AttributeError):
        point.x = 4
    with pytest.raises(AttributeError):
        del point.x
    with pytest.raises(TypeError):
        dataclasses.replace(point, z=4)


def test_a_request_compares_and_prints_without_the_state_of_its_rollout():
    requests = [
        vf.ModelRequest([vf.UserMessage("hi")], "m", state=state) for state in (None, {"secret": 1})
    ]
    assert requests[0] == requests[1]
    assert "secret" not in repr(requests[1])
    assert requests[0] != vf.ModelRequest([vf.UserMessage("hi")], "another")
    assert pickle.loads(pickle.dumps(requests[1])).state is None
