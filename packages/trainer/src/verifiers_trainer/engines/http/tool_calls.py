"""Parse tool calls in a completion's text, in the format of the model's chat template.

A parser never raises, takes time linear in the text, and does not guess: when one call of a
completion cannot be parsed, the whole completion stays text, so that calls are never executed in
part. Calls in the reasoning are drafts, and a tag that no JSON follows is prose. The environment
validates arguments and tool names.

    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Hermes, Qwen, SmolLM and most others
    llama3_json   {"name": ..., "parameters": {...}}; {...}                    Llama 3.1 and later
    qwen3_coder   <tool_call><function=NAME><parameter=KEY>VALUE</parameter>…  Qwen3-Coder, Qwen3.5 and later
    none          the text is passed through
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from verifiers.data.text import OPEN, split_reasoning
from verifiers.errors import ConfigError
from verifiers.results.coverage import CALL_MARKS

ToolCall = dict[str, str]
"""``name`` and ``arguments`` (JSON text), in the model's order."""
ToolCallParser = Callable[[str], tuple[str, list[ToolCall]]]
"""Completion text -> (text around the calls, the calls); the whole text if it cannot be parsed."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n]*[;,]?[ \t\r\n]*")


class _NotACall(ValueError):
    """The text is not a call of this format."""


def parse_hermes(text: str) -> tuple[str, list[ToolCall]]:
    """Calls written as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

    The last call may lack its closing tag: some models end their turn instead. Tags inside JSON
    strings are text, and so is a tag that no object follows: the model writes of it.

    >>> parse_hermes('Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', [{'name': 'add', 'arguments': '{"a": 1}'}])
    """
    position = _end_of_reasoning(text)
    around: list[str] = [text[:position]]
    calls: list[ToolCall] = []
    while (start := text.find(_OPEN, position)) >= 0:
        begin = start + len(_OPEN)
        content = _SPACE.match(text, begin).end()  # type: ignore[union-attr]
        if text[content : content + 1] not in ("", "{", "["):
            around.append(text[position:begin])
            position = begin
            continue
        around.append(text[position:start])
        try:
            value, position = _object_at(text, begin)
            calls.append(_call(value, "arguments", "parameters"))
        except _NotACall:
            return text, []
        if text.startswith(_CLOSE, position):
            position += len(_CLOSE)
        elif position < len(text):
            return text, []
    if not calls:
        return text, []
    return "".join([*around, text[position:]]).strip(), calls


def _end_of_reasoning(text: str) -> int:
    """Where the reasoning ends; 0 if the tag that closes it stands within a call."""
    end = len(text) - len(split_reasoning(text)[1])
    position = 0
    while not text.lstrip().startswith(OPEN) and 0 <= (start := text.find(_OPEN, position)) < end:
        position = start + len(_OPEN)
        with contextlib.suppress(_NotACall):
            _, position = _object_at(text, position)
        if position > end:
            return 0
    return end


def parse_llama3_json(text: str) -> tuple[str, list[ToolCall]]:
    """A completion that consists of calls: ``{"name": ..., "parameters": {...}}``, several in
    a row, with semicolons between them, or as a list; after ``<|python_tag|>`` or not.

    >>> parse_llama3_json('{"name": "add", "parameters": {"a": 1}}')
    ('', [{'name': 'add', 'arguments': '{"a": 1}'}])
    """
    reasoning, answer = split_reasoning(text)
    if calls := _llama3_calls(text):  # first: a closing tag within a call is text of the call
        return "", calls
    if reasoning and (calls := _llama3_calls(answer)):
        return text[: len(text) - len(answer)].strip(), calls
    return text, []


def _llama3_calls(text: str) -> list[ToolCall]:
    position = _SPACE.match(text).end()  # type: ignore[union-attr]
    if text.startswith(_PYTHON_TAG, position):
        position += len(_PYTHON_TAG)
    calls: list[ToolCall] = []
    try:
        while position < len(text):
            value, position = _object_at(text, position)
            position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
            for entry in value if isinstance(value, list) else [value]:
                call = _call(entry, "parameters", "arguments")
                if not entry.keys() & {"parameters", "arguments"}:
                    raise _NotACall  # an answer in JSON: {"name": "Ann", "age": 9}
                calls.append(call)
    except _NotACall:
        return []
    return calls


def parse_qwen3_coder(
    text: str, tools: Iterable[Mapping[str, Any]] = ()
) -> tuple[str, list[ToolCall]]:
    """Calls written as XML, whose values are texts: a value whose schema in ``tools`` has another
    type is read as JSON, if it is JSON.

    >>> call = "<tool_call>\\n<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>"
    >>> parse_qwen3_coder(call)
    ('', [{'name': 'add', 'arguments': '{"a": "1"}'}])
    """
    functions = [tool.get("function") or tool for tool in tools]
    schemas = {function.get("name"): function.get("parameters") or {} for function in functions}
    position = _end_of_reasoning(text)
    around: list[str] = [text[:position]]
    calls: list[ToolCall] = []
    for start in _XML_CALL.finditer(text, position):
        if start.start() < position:
            return text, []  # inside the value of another call
        around.append(text[position : start.start()])
        properties, position = schemas.get(start["name"], {}).get("properties") or {}, start.end()
        arguments: dict[str, object] = {}
        while (opened := _XML_PARAMETER.match(text, position)) is not None:
            end = text.find("</parameter>", opened.end())
            if end < 0:
                return text, []
            value = text[opened.end() : end].removeprefix("\n").removesuffix("\n")
            arguments[opened["name"]] = _typed(value, properties.get(opened["name"]))
            position = end + len("</parameter>")
        if (closed := _XML_END.match(text, position)) is None:
            return text, []
        calls.append(_call({"name": start["name"], "arguments": arguments}, "arguments"))
        position = closed.end()
    if not calls:
        return text, []
    return "".join([*around, text[position:]]).strip(), calls


_XML_CALL = re.compile(r"(?:<tool_call>\s{0,9})?<function=(?P<name>[^<>\s]{1,200})>")
_XML_PARAMETER = re.compile(r"\s{0,9}<parameter=(?P<name>[^<>\s]{1,200})>")
_XML_END = re.compile(r"\s{0,9}</function>(?:\s{0,9}</tool_call>)?")


def _typed(text: str, schema: object) -> Any:
    """The text as its schema's type; the text itself for a string, and if it is not JSON."""
    declared = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    if declared == "string" or (isinstance(declared, list) and "string" in declared):
        return text
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text


TOOL_CALL_PARSERS: dict[str, ToolCallParser | None] = {
    "hermes": parse_hermes,
    "llama3_json": parse_llama3_json,
    "qwen3_coder": parse_qwen3_coder,
    "none": None,
}


def for_tools(
    parser: ToolCallParser | None, tools: Iterable[Mapping[str, object]]
) -> ToolCallParser | None:
    """The parser for a request with these tools: a format whose values are texts needs schemas."""
    if parser is parse_qwen3_coder:
        return functools.partial(parse_qwen3_coder, tools=list(tools))
    return parser


def resolve_tool_call_parser(
    parser: str | ToolCallParser | None, chat_template: str | None = None
) -> ToolCallParser | None:
    """The parser of that name; ``auto`` is the parser whose format the chat template shows.

    A callable or None is returned as it is. Raises ConfigError for an unknown name.
    """
    if parser is None or callable(parser):
        return parser
    if parser == "auto":
        parser = tool_call_format(chat_template)
    if parser not in TOOL_CALL_PARSERS:
        names = ", ".join(["auto", *sorted(TOOL_CALL_PARSERS)])
        raise ConfigError(
            f"no tool_call_parser {parser!r}; known: {names}, or give a function",
            field="tool_call_parser",
        )
    return TOOL_CALL_PARSERS[parser]


def tool_call_format(chat_template: str | None) -> str:
    """The tool-call format in a chat template; hermes when it shows none; a format that is not read
    is warned of.

    >>> tool_call_format('Respond in the format {"name": function name, "parameters": dictionary}.')
    'llama3_json'
    """
    template = chat_template or ""
    if "<function=" in template:
        return "qwen3_coder"
    if _OPEN in template and "<arg_key>" not in template:
        return "hermes"
    if _PYTHON_TAG in template or '{"name": function name, "parameters":' in template:
        return "llama3_json"
    if unread := next((mark for mark in CALL_MARKS if mark in template), None):
        log.warning(
            "the chat template writes tool calls with %r, a format that no tool_call_parser here"
            " reads: they stay text. Give tool_call_parser a function, or train with a server of"
            " vLLM and its parser",
            unread,
        )
    return "hermes"


log = logging.getLogger(__name__)


def _refuse_constant(name: str) -> object:
    raise _NotACall(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _object_at(text: str, position: int) -> tuple[Any, int]:
    """The JSON value that begins at ``position`` and the position after it; white space on both
    sides is skipped."""
    begin = _SPACE.match(text, position).end()  # type: ignore[union-attr]
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested thousands deep
        raise _NotACall from error
    return value, _SPACE.match(text, end).end()  # type: ignore[union-attr]


def _call(value: object, *names_of_arguments: str) -> ToolCall:
    if not (isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"]):
        raise _NotACall
    candidates = [value[name] for name in names_of_arguments if name in value]
    arguments = candidates[0] if candidates else {}
    if not isinstance(arguments, dict) or not _is_text(value["name"]):
        raise _NotACall
    try:
        text = json.dumps(arguments, ensure_ascii=False)
    except RecursionError as error:
        raise _NotACall from error
    # A lone surrogate is legal in JSON as an escape, but cannot be encoded as text.
    return {"name": value["name"], "arguments": text if _is_text(text) else json.dumps(arguments)}


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
