"""What is read out of a completion's text: tool calls by format, thoughts. Never an error, never a
guess."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.data.messages import message_text
from verifiers.data.text import split_reasoning
from verifiers.errors import ConfigError
from verifiers_trainer.engines.http.chat import _plain_text
from verifiers_trainer.engines.http.replies import message_of_reply
from verifiers_trainer.engines.http.tool_calls import (
    TOOL_CALL_PARSERS,
    parse_hermes,
    parse_llama3_json,
    resolve_tool_call_parser,
    tool_call_format,
)

PARSERS = (parse_hermes, parse_llama3_json)
FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": {}}', '"parameters": {"a": 1}}', "{", "}", "[", "]",
     '"', "\\", "\\ud800", ";", " ", "\n", "NaN", "1e999", "<|python_tag|>", "null", "ü", "\x00", "\ud800"]
)  # fmt: skip
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(
        st.text(st.characters(codec="utf-8"), min_size=1),
        st.dictionaries(st.text(), JSON, max_size=3),
    ),
    min_size=1,
    max_size=4,
)


def hermes(calls) -> str:
    return "\n".join(
        f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in calls
    )


def llama(calls) -> str:
    return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)


# --- tool calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parse", PARSERS)
@given(pieces=st.lists(FRAGMENTS | st.text(max_size=5), max_size=30))
def test_anything_is_read_without_an_error_and_what_is_no_call_stays_as_it_is(parse, pieces):
    text = "".join(pieces)
    around, calls = parse(text)
    if not calls:
        assert around == text
    for call in calls:
        assert call["name"]
        assert isinstance(json.loads(call["arguments"]), dict)
        (call["name"] + call["arguments"]).encode()  # it travels as UTF-8


@pytest.mark.parametrize(("parse", "write"), [(parse_hermes, hermes), (parse_llama3_json, llama)])
@given(calls=CALLS)
def test_calls_that_were_written_are_read(parse, write, calls):
    around, read = parse(write(calls))
    assert around == ""
    assert [(call["name"], json.loads(call["arguments"])) for call in read] == calls


@given(calls=CALLS, before=st.text(st.characters(exclude_characters="<")), cut=st.integers(1, 60))
def test_one_call_that_is_cut_makes_all_of_it_text(calls, before, cut):
    last = len(hermes(calls[-1:])) - len("<tool_call></tool_call>")
    text = (before + hermes(calls))[: -len("</tool_call>") - min(cut, last)]
    assert parse_hermes(text) == (text, [])


def test_the_formats_in_detail():
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse_hermes(f"so: {good}\n{good}") == ("so:", [{"name": "f", "arguments": "{}"}] * 2)
    for bad in (
        "<tool_call>{</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f"} and more</tool_call>',
    ):
        assert parse_hermes(good + bad) == (good + bad, [])
    assert parse_hermes('<tool_call>{"name": "f", "arguments": {}}') == (
        "",
        [{"name": "f", "arguments": "{}"}],
    )
    quoted = '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>'
    assert parse_hermes(quoted)[1] == [{"name": "f", "arguments": '{"x": "</tool_call>"}'}]
    call = '{"name": "f", "parameters": {"a": 1}}'
    expected = {"name": "f", "arguments": '{"a": 1}'}
    assert parse_llama3_json(f"<|python_tag|>{call}") == ("", [expected])
    assert parse_llama3_json(f"[{call}, {call}]") == ("", [expected] * 2)
    assert parse_llama3_json(f"{call}\n{call}") == ("", [expected] * 2)
    for text in (f"The call is {call}", f"{call} is the call", '{"a": 1}', "[]", "", "42"):
        assert parse_llama3_json(text) == (text, [])


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "unit",
    ["<tool_call>", "<tool_call> \n", "[", '{"a":', " ", '"', "</tool_call>", '{"name": "f", "parameters": {}};',
     '<tool_call>{"name": "f", "arguments": {}}</tool_call>', '<tool_call>{"name": "f"'],
)  # fmt: skip
def test_time_grows_with_the_length_and_not_with_its_square(parse, unit):
    def took(length: int) -> float:
        text = unit * (length // len(unit))
        begun = time.process_time()
        parse(text)
        return time.process_time() - begun

    took(20_000)
    # 25 times the text: 25 times the time, or 625 times if it were quadratic; a scheduler's slip is
    # far from either.
    assert took(500_000) < 150 * max(took(20_000), 0.0005)


def test_the_parser_is_chosen_by_name_or_by_the_template():
    assert resolve_tool_call_parser("auto", "... <tool_call> ...") is parse_hermes
    llama3 = (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name'
        " and its value}."
    )
    assert tool_call_format(llama3) == "llama3_json"
    assert tool_call_format(None) == tool_call_format("{{ messages }}") == "hermes"
    assert (
        resolve_tool_call_parser("none")
        is resolve_tool_call_parser(None)
        is TOOL_CALL_PARSERS["none"]
        is None
    )
    with pytest.raises(ConfigError, match="llama3_json"):
        resolve_tool_call_parser("pythonic")


# --- thoughts -------------------------------------------------------------------------------------


def test_thoughts_and_what_is_said():
    assert split_reasoning("\n<think>\na\n</think>\n\nb") == ("a", "b")
    assert split_reasoning("a</think>b", opened=True) == ("a", "b")
    assert split_reasoning("a</think>b") == ("a", "b")
    assert split_reasoning("<think>cut off") == ("cut off", "")
    assert split_reasoning("cut off", opened=True) == ("cut off", "")
    assert split_reasoning("no thought ") == ("", "no thought ")
    assert split_reasoning("<think></think> b") == ("", "b")


@settings(max_examples=200)
@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", " ", "x"]) | st.text(max_size=3)).map(
        "".join
    )
)
def test_no_text_is_lost_in_the_split(text):
    for opened in (False, True):
        thought, answer = split_reasoning(text, opened)
        untagged = text.replace("<think>", "").replace("</think>", "")
        kept = (thought + answer).replace("<think>", "").replace("</think>", "")
        assert "".join(kept.split()) == "".join(untagged.split())


# --- calls beside thoughts ------------------------------------------------------------------------

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
LLAMA = '{"name": "f", "parameters": {}}'
READ = [{"name": "f", "arguments": "{}"}]


@pytest.mark.parametrize(("parse", "call"), [(parse_hermes, CALL), (parse_llama3_json, LLAMA)])
def test_calls_in_the_reasoning_are_drafts(parse, call):
    for thought in (f"<think>I could {call}, but no.</think>", f"I could {call}, but no.</think>"):
        assert parse(f"{thought}I will not.") == (f"{thought}I will not.", [])
        assert parse(f"{thought}\n{call}") == (thought, READ)
    assert parse(f"<think>\n{call}") == (f"<think>\n{call}", [])


@pytest.mark.parametrize(("parse", "write"), [(parse_hermes, hermes), (parse_llama3_json, llama)])
def test_a_closing_tag_in_the_arguments_of_a_call_closes_nothing(parse, write):
    calls = [("f", {"text": "a</think>b"}), ("g", {})]
    assert [call["name"] for call in parse(write(calls))[1]] == ["f", "g"]


def test_a_tag_that_is_named_in_prose_hides_no_call():
    assert parse_hermes(f"I use `<tool_call>`.\n{CALL}") == ("I use `<tool_call>`.", READ)
    assert parse_hermes("I use <tool_call> tags.") == ("I use <tool_call> tags.", [])
    assert parse_hermes(f"{CALL}<tool_call>") == (f"{CALL}<tool_call>", [])  # one that is cut


@pytest.mark.parametrize("separate_reasoning", [False, True])
def test_a_reply_that_is_cut_in_a_thought_of_the_template_calls_nothing(separate_reasoning):
    for opened in (True, False):
        message, _ = message_of_reply(
            f"so {CALL}", "length", parse_hermes, "1", opened, separate_reasoning
        )
        assert bool(message.tool_calls) is not opened  # negative control: without the template


def test_text_parts_of_a_message_are_joined_as_rewards_read_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _plain_text(parts) == message_text({"role": "user", "content": parts}) == "a\nb"


@pytest.mark.parametrize("name", ["arguments", "parameters"])
def test_either_name_of_the_arguments_is_read(name):
    written = json.dumps({"name": "add", name: {"a": 1}})
    calls = [{"name": "add", "arguments": '{"a": 1}'}]
    assert parse_hermes(f"<tool_call>{written}</tool_call>") == ("", calls)
    assert parse_llama3_json(written) == ("", calls)


@pytest.mark.parametrize(
    "answer",
    ['{"name": "Ann", "age": 9}', '{"name": "Ann"}', '[{"name": "Ann"}, {"name": "Bob"}]'],
)
def test_an_answer_in_json_with_a_name_is_no_call(answer):
    assert parse_llama3_json(answer) == (answer, [])
    assert parse_hermes(answer) == (answer, [])
