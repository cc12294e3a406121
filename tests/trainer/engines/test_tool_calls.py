"""Formats of tool calls: what is read, what stays text, and what is warned of."""

import json
import logging

import pytest

pytest.importorskip("verifiers_trainer", reason="the trainer is not installed")
from verifiers_trainer.engines.http.tool_calls import (
    for_tools,
    parse_qwen3_coder,
    resolve_tool_call_parser,
)

SCHEMA = {
    "name": "write",
    "parameters": {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "lines": {"type": "array"},
            "flag": {"type": ["boolean", "null"]},
        }
    },
}


def call(name="write", **values):
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def arguments(text):
    around, calls = for_tools(parse_qwen3_coder, [{"function": SCHEMA}])(text)
    return around, [(c["name"], json.loads(c["arguments"])) for c in calls]


def test_values_have_the_types_of_the_schema():
    text = call(text='{"a": 1}', count="3", lines='["x"]', flag="true", other="7")
    expected = {"text": '{"a": 1}', "count": 3, "lines": ["x"], "flag": True, "other": "7"}
    assert arguments(text) == ("", [("write", expected)])


def test_a_value_keeps_its_lines_and_what_only_looks_like_json_stays_text():
    text = "I write.\n" + call(text="\n  a\n<b>\n", count="three") + call("stop")
    expected = [("write", {"text": "\n  a\n<b>\n", "count": "three"}), ("stop", {})]
    assert arguments(text) == ("I write.", expected)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=write>\n<parameter=text>\nno end",
        "<function=write><parameter=text>a</parameter> and then",
        call(text="<function=write>") + "<function=write>",
        "I would use <function=write>.",
    ],
)
def test_a_call_that_is_not_whole_leaves_the_text_as_it_is(text):
    assert parse_qwen3_coder(text) == (text, [])


def test_a_call_in_the_reasoning_is_not_made():
    thought = f"<think>I could {call(text='no')}</think>"
    around, calls = arguments(thought + call(text="yes"))
    assert (around, calls) == (thought, [("write", {"text": "yes"})])


@pytest.mark.parametrize("size", [1, 200_000])
def test_it_takes_linear_time(size):
    assert parse_qwen3_coder("<function=a>" * size + "<parameter=" * size)[1] == []


@pytest.mark.parametrize(
    "mark",
    [
        "<|channel|>commentary to=functions.name",
        "[TOOL_CALLS]",
        "<｜tool▁calls▁begin｜>",
        "<|tool_calls_section_begin|>",
        "<tool_call>name\n<arg_key>key</arg_key>",
        '<minimax:tool_call>\n<invoke name="name">',
    ],
)
def test_a_template_whose_format_is_not_read_is_warned_of(mark, caplog):
    with caplog.at_level(logging.WARNING):
        resolve_tool_call_parser("auto", f"…{mark}…")
    assert "they stay text" in caplog.text


@pytest.mark.parametrize("template", [None, "{{ messages }}", "<tool_call>", "<function=name>"])
def test_other_templates_are_silent(template, caplog):
    resolve_tool_call_parser("auto", template)
    assert not caplog.records
