"""Conversations to prompt tokens and completion text back to a message. No sampling, no HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from verifiers.errors import ConfigError

ToolCall = dict[str, str]
"""``name`` and ``arguments`` (JSON text), in the model's order."""
ToolCallParser = Callable[[str], tuple[str, list[ToolCall]]]
"""Completion text -> (text around the calls, the calls). Text it cannot read comes back whole, without calls."""

_HERMES_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_CACHED_PROMPTS = 1024
_CACHED_BYTES = 16_384


class BadRequest(Exception):
    """A request that cannot be served as asked; ``param`` names the field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def parse_hermes(text: str) -> tuple[str, list[ToolCall]]:
    """Calls written as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

    One call that is not such an object makes the whole text content: half of a model's calls is nobody's intent.

    >>> parse_hermes('Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', [{'name': 'add', 'arguments': '{"a": 1}'}])
    """
    calls: list[ToolCall] = []
    for written in _HERMES_CALL.findall(text):
        try:
            call = json.loads(written)
        except ValueError:
            return text, []
        if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
            return text, []
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return text, []
        calls.append({"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)})
    if not calls:
        return text, []
    return _HERMES_CALL.sub("", text).strip(), calls


TOOL_CALL_PARSERS: dict[str, ToolCallParser] = {"hermes": parse_hermes}


def resolve_tool_call_parser(chosen: str | ToolCallParser | None) -> ToolCallParser | None:
    """The parser of that name; a callable or None is returned as it is. Raises ConfigError for an unknown name."""
    if chosen is None or callable(chosen):
        return chosen
    if chosen not in TOOL_CALL_PARSERS:
        known = ", ".join(sorted(TOOL_CALL_PARSERS))
        raise ConfigError(
            f"no tool_call_parser {chosen!r}; known: {known}, or give a function", field="tool_call_parser"
        )
    return TOOL_CALL_PARSERS[chosen]


class ChatFormat:
    """A tokenizer's side of the endpoint: prompts in, text out.

    Siblings of a group send one prompt many times, so rendered prompts are cached by the bytes that asked for them.
    Used by one thread at a time.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._piece = lru_cache(maxsize=None)(lambda token: tokenizer.decode([token]))
        self._cached_prompt = lru_cache(maxsize=_CACHED_PROMPTS)(self._render)

    def prompt_ids(self, messages: bytes, tools: bytes | None) -> np.ndarray:
        """int32 [P] of a conversation given as the JSON of ``messages`` and ``tools``, ready for the answer.

        Raises BadRequest when the template refuses it.
        """
        long = len(messages) + len(tools or b"") > _CACHED_BYTES
        return self._render(messages, tools) if long else self._cached_prompt(messages, tools)

    def encode(self, text: str) -> np.ndarray:
        """int32 [P] of plain text, with the special tokens the tokenizer puts around it."""
        return np.array(self._tokenizer(text)["input_ids"], np.int32)

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return len(self._tokenizer)

    def piece(self, token: int) -> str:
        """The text of one token by itself."""
        return self._piece(token)

    def _render(self, messages_json: bytes, tools_json: bytes | None) -> np.ndarray:
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise BadRequest("the tokenizer has no chat template; set tokenizer.chat_template", "messages")
        messages = [_plain_message(message) for message in _list_of_objects(messages_json, "messages")]
        tools = _list_of_objects(tools_json, "tools") if tools_json is not None else None
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program: whatever it raises is this request's error
            message = f"the chat template refuses these messages: {type(error).__name__}: {error}"
            raise BadRequest(message, "messages") from error
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _list_of_objects(written: bytes, field: str) -> list[dict]:
    value = json.loads(written)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise BadRequest(f"{field} must be a list of objects", field)
    if field == "messages" and not value:
        raise BadRequest("messages must not be empty", field)
    return value


def _plain_message(message: dict) -> dict:
    """A message as templates read it: content as text, arguments of tool calls as objects."""
    plain = {key: value for key, value in message.items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise BadRequest("each of messages needs a role", "messages")
    plain["content"] = _plain_text(plain.get("content", ""))
    if "tool_calls" in plain:
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _plain_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) != len(parts):
        raise BadRequest("messages hold content that is not text; the embedded engine serves text only", "messages")
    return "".join(texts)


def _plain_call(call: dict) -> dict:
    function = dict(call.get("function") or {})
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError):
        arguments = function["arguments"]  # what the model wrote, rendered as it stands
    return {**call, "function": {**function, "arguments": arguments}}
