"""Does a chat template only ever append? ``check_increasing_context`` renders a conversation turn by turn and looks.

The promise: for every model turn, the prompt, then the conversation with the answer, then the next prompt are rendered
to token ids, and each must begin with all of the one before it. Where one does not, the report names the first token
that differs, with what stands around it in both. A template that drops earlier ``<think>`` parts fails; turns of one
rollout then share no prefix, and a trainer has to train every turn as a sample of its own.

This module needs no model and compares renderings alone: that a model's own spelling of an answer survives rendering
(templates may trim spaces) is not tested. Recorded token ids are merged or forked by ``results`` and by the trainer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError
from verifiers.messages import normalize_chat
from verifiers.tool_examples import example_arguments
from verifiers.types import Message

AROUND = 8
"""Tokens that a window shows on either side of a difference."""

ADVICE = {
    "think": (
        "The template changes or drops earlier <think> parts, so the turns of a multi-turn rollout share no prefix. "
        'Train with history="exact", which keeps the sampled ids, or use a chat template that keeps earlier thinking. '
        "Single-turn environments are not affected."
    ),
    "generation": (
        "The generation prompt is not what the template writes before the same answer in a finished conversation, so "
        'what was sampled cannot be found again. Train with history="exact", or make the template open every '
        "assistant message the way add_generation_prompt=True does. Single-turn environments are not affected."
    ),
    "other": (
        "The template rewrites what it has rendered before, so the turns of a multi-turn rollout share no prefix. "
        'Train with history="exact", or use a chat template that only appends. Single-turn environments are not '
        "affected."
    ),
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
"""The tool of the default conversations when none are given."""


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Tokens around a position of one rendering, ``AROUND`` before it and ``AROUND`` from it on."""

    ids: tuple[int, ...]
    text: str
    """The ids decoded; "" when the tokenizer cannot decode."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a later rendering is not what the earlier one was."""

    conversation: str
    """"plain", "think", "tools", "think and tools", or "given"."""
    turn: int
    """The model turn, 0 is the first, whose rendering no longer begins with the one before it."""
    step: str
    """What was rendered: "prompt" (with the generation prompt) or "answer" (the conversation with the answer)."""
    position: int
    """Index of the first token that differs."""
    before: TokenWindow
    after: TokenWindow

    def __str__(self) -> str:
        what = "its prompt" if self.step == "prompt" else "the conversation with its answer"
        return (
            f"conversation {self.conversation!r}, turn {self.turn}: {what} differs from what was rendered before at "
            f"token {self.position}\n    before: {list(self.before.ids)} {self.before.text!r}\n"
            f"    after:  {list(self.after.ids)} {self.after.text!r}"
        )


@dataclass(frozen=True, slots=True)
class ContextReport:
    """What ``check_increasing_context`` found."""

    checked: tuple[str, ...]
    """The conversations that were rendered."""
    differences: tuple[Difference, ...]
    """The first difference of each conversation that has one."""
    refused: tuple[tuple[str, str], ...] = ()
    """(conversation, what the template said) for default conversations that the template does not render at all."""

    @property
    def ok(self) -> bool:
        """Whether every rendering began with the one before it."""
        return not self.differences

    @property
    def first_difference(self) -> Difference | None:
        return self.differences[0] if self.differences else None

    @property
    def advice(self) -> str:
        """What to do about the first difference; "" when there is none."""
        first = self.first_difference
        if first is None:
            return ""
        if first.step == "answer":
            return ADVICE["generation"]
        return ADVICE["think" if "think" in first.conversation or "think>" in first.before.text else "other"]

    def __str__(self) -> str:
        lines = [f"the chat template {'only appends' if self.ok else 'does NOT only append'}"]
        failed = {difference.conversation for difference in self.differences}
        lines += [f"  {name}: {'differs' if name in failed else 'ok'}" for name in self.checked]
        lines += [f"  {name}: not rendered, the template says: {said}" for name, said in self.refused]
        lines += [str(difference) for difference in self.differences]
        return "\n".join([*lines, self.advice] if self.advice else lines)


def check_increasing_context(
    tokenizer: Any, messages: Sequence[Any] | None = None, tools: Sequence[Mapping[str, Any]] | None = None
) -> ContextReport:
    """Whether every rendering of a growing conversation begins with the rendering before it, token by token.

    ``tokenizer``: anything with ``apply_chat_template``. ``messages``: a conversation with at least one assistant
    message; default: four that hold plain text, ``<think>`` parts, tool calls with results, and both. ``tools`` are
    rendered with the conversation, and the default tool calls call the first of them.

    Raises ``ConfigError`` without a chat template, without an assistant message, and when the template refuses the
    conversation that was given or plain text.

    >>> from verifiers.testing import ByteTokenizer
    >>> check_increasing_context(ByteTokenizer()).ok, check_increasing_context(ByteTokenizer(keep_reasoning=False)).ok
    (True, False)
    """
    if not callable(getattr(tokenizer, "apply_chat_template", None)):
        raise ConfigError(f"{type(tokenizer).__name__} has no apply_chat_template; give a tokenizer with a chat template")
    given = None if tools is None else [dict(tool) for tool in tools]
    checked: list[str] = []
    differences: list[Difference] = []
    refused: list[tuple[str, str]] = []
    for name, conversation, offered in _conversations(messages, given):
        try:
            renderings = list(_renderings(tokenizer, conversation, offered))
        except Exception as error:  # a template is a program: whatever it raises is its answer to this conversation
            said = f"{type(error).__name__}: {error}"
            if name in ("given", "plain"):
                raise ConfigError(f"the chat template cannot render the conversation {name!r}: {said}") from error
            refused.append((name, said))
            continue
        checked.append(name)
        if (found := _first_difference(tokenizer, name, renderings)) is not None:
            differences.append(found)
    return ContextReport(tuple(checked), tuple(differences), tuple(refused))


# --- what is rendered -----------------------------------------------------------------------------------------------


def _conversations(
    messages: Sequence[Any] | None, tools: list[dict[str, Any]] | None
) -> Iterator[tuple[str, list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """(name, messages, tools) of what is checked. No system message: some templates refuse one."""
    if messages is not None:
        conversation = [_plain(message) for message in normalize_chat(list(messages))]
        if not any(message["role"] == "assistant" for message in conversation):
            raise ConfigError("messages hold no assistant message; the check needs at least one answer")
        yield "given", conversation, tools
        return
    first, second = _user("What is 2 + 2?"), _user("And 3 + 3?")
    yield "plain", [first, _assistant("It is 4."), second, _assistant("It is 6."), _user("Thanks.")], tools
    yield (
        "think",
        [
            first,
            _assistant("<think>\nTwo twos are four.\n</think>\n\nIt is 4."),
            second,
            _assistant("<think>\nTwo threes are six.\n</think>\n\nIt is 6."),
            _user("Thanks."),
        ],
        tools,
    )
    offered = tools or [WEATHER]
    for name, thought in (("tools", ""), ("think and tools", "<think>\nI should look.\n</think>\n\n")):
        call = {"id": "call00001", "type": "function", "function": _call_of(offered[0])}
        yield (
            name,
            [
                first,
                {**_assistant(thought), "tool_calls": [call]},
                {"role": "tool", "content": "It is sunny.", "tool_call_id": "call00001", "name": _call_of(offered[0])["name"]},
                _assistant(f"{thought}The answer is sunny."),
                second,
                _assistant(f"{thought}It is 6."),
                _user("Thanks."),
            ],
            offered,
        )


def _call_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function") or tool
    return {"name": function["name"], "arguments": example_arguments(function.get("parameters") or {})}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates read it: plain dicts, arguments of tool calls as objects where they are JSON."""
    plain = {**message, "content": message.get("content") or ""}
    if message.tool_calls:
        plain["tool_calls"] = [
            {**call, "function": {"name": call["name"], "arguments": _object(call["arguments"])}}
            for call in message.tool_calls
        ]
    return plain


def _object(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:  # not JSON: the template sees what the model wrote
        return arguments


# --- rendering and comparing ----------------------------------------------------------------------------------------


def _renderings(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> Iterator[tuple[int, str, list[int]]]:
    """(turn, step, ids) in the order in which a rollout sees them; the last is the prompt after the last message."""
    turn = 0
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            yield turn, "prompt", _ids(tokenizer, messages[:place], tools, True)
            yield turn, "answer", _ids(tokenizer, messages[: place + 1], tools, False)
            turn += 1
    if messages[-1]["role"] != "assistant":
        yield turn, "prompt", _ids(tokenizer, messages, tools, True)


def _ids(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool
) -> list[int]:
    """The ids of a conversation, whatever container the tokenizer puts them in."""
    rendered = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=True)
    if hasattr(rendered, "keys"):
        rendered = rendered["input_ids"]
    if isinstance(rendered, str):
        rendered = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    ids = rendered.tolist() if hasattr(rendered, "tolist") else list(rendered)
    return list(ids[0]) if ids and isinstance(ids[0], list | tuple) else ids


def _first_difference(
    tokenizer: Any, conversation: str, renderings: Sequence[tuple[int, str, list[int]]]
) -> Difference | None:
    for (_, _, before), (turn, step, after) in zip(renderings, renderings[1:], strict=False):
        if after[: len(before)] == before:
            continue
        same = (place for place, (old, new) in enumerate(zip(before, after, strict=False)) if old != new)
        position = next(same, min(len(before), len(after)))
        windows = (_window(tokenizer, before, position), _window(tokenizer, after, position))
        return Difference(conversation, turn, step, position, *windows)
    return None


def _window(tokenizer: Any, ids: list[int], position: int) -> TokenWindow:
    shown = ids[max(0, position - AROUND) : position + AROUND]
    decode = getattr(tokenizer, "decode", None)
    return TokenWindow(tuple(shown), decode(shown) if callable(decode) else "")
