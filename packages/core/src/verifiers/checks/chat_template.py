"""Check that a chat template only appends: ``check_increasing_context`` renders a conversation turn
by turn.

Invariant: for every model turn, the token ids of its prompt followed by those of its completion's
text are a prefix of the next turn's prompt. Otherwise the report names the first token that
differs, with the tokens around it in both renderings. A template that drops earlier ``<think>``
parts fails: the turns of a rollout then share no prefix, and a trainer has to train every turn as a
separate sample.

Needs no model. Tool calls are compared only from the following prompt on, because the model's
spelling of a call is unknown here. The last token of a completion is not compared, because a
tokenizer may merge it with the text that follows. ``results`` and the trainer merge or fork
recorded token ids.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.data.chat_template import rendered
from verifiers.data.messages import normalize_chat
from verifiers.data.tool_examples import example_arguments
from verifiers.errors import ConfigError
from verifiers.types import Message

AROUND = 8
"""Tokens shown on either side of a difference."""

CONSEQUENCE = (
    " With this template every turn of a multi-turn rollout is a separate sample: correct, but the"
    " shared tokens are computed again for each turn. Single-turn environments are not affected."
)
ADVICE = {
    "think": (
        "The template changes or drops earlier <think> parts: use a chat template that keeps them."
        + CONSEQUENCE
    ),
    "generation prompt": (
        "The template opens an assistant message in the history differently from the generation"
        " prompt: make it open every assistant message as add_generation_prompt=True does."
        + CONSEQUENCE
    ),
    "other": "The template rewrites earlier messages: use one that only appends." + CONSEQUENCE,
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
"""The tool of the default conversations when none are given."""
THANKS = {"role": "user", "content": "Thanks."}
"""Appended after the last completion, so that a following prompt contains it."""


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Tokens around a position of a rendering: ``AROUND`` before it and ``AROUND`` from it on."""

    ids: tuple[int, ...]
    text: str
    """The ids decoded; "" when the tokenizer cannot decode."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token where a later rendering differs from the earlier rendering."""

    conversation: str
    """One of "plain", "think", "tools", "think and tools", and "given" (the caller's messages)."""
    turn: int
    """Index of the model turn (from 0) whose prompt does not begin with the earlier rendering."""
    part: str
    """The part that differs: "conversation", "generation prompt", or "answer" (the previous turn's
    completion)."""
    position: int
    """Index of the first token that differs."""
    before: TokenWindow
    after: TokenWindow

    def __str__(self) -> str:
        return (
            f"conversation {self.conversation!r}: the prompt of turn {self.turn} does not begin"
            f" with the previous rendering; the {self.part} differs at token {self.position}"
            f"\n    before: {list(self.before.ids)} {self.before.text!r}"
            f"\n    after:  {list(self.after.ids)} {self.after.text!r}"
        )


@dataclass(frozen=True, slots=True)
class ContextReport:
    """Result of ``check_increasing_context``."""

    checked: tuple[str, ...]
    """Names of the rendered conversations."""
    differences: tuple[Difference, ...]
    """The first difference of each conversation that has a difference."""
    refused: tuple[tuple[str, str], ...] = ()
    """(conversation, error message) for default conversations that the template cannot render."""

    @property
    def ok(self) -> bool:
        """Whether every rendering begins with the previous rendering."""
        return not self.differences

    @property
    def first_difference(self) -> Difference | None:
        return self.differences[0] if self.differences else None

    @property
    def advice(self) -> str:
        """How to fix the first difference; "" when there is none."""
        first = self.first_difference
        if first is None:
            return ""
        thinks = "think" in first.conversation or "<think>" in first.before.text
        return ADVICE[first.part if first.part in ADVICE else "think" if thinks else "other"]

    def __str__(self) -> str:
        lines = [f"the chat template {'only appends' if self.ok else 'does NOT only append'}"]
        failed = {difference.conversation for difference in self.differences}
        lines += [f"  {name}: {'differs' if name in failed else 'ok'}" for name in self.checked]
        lines += [f"  {n}: not rendered, the template raised {text}" for n, text in self.refused]
        lines += map(str, self.differences)
        return "\n".join([*lines, self.advice] if self.advice else lines)


def check_increasing_context(
    tokenizer: object,
    messages: Sequence[object] | None = None,
    tools: Sequence[Mapping[str, object]] | None = None,
) -> ContextReport:
    """Check that every rendering of a growing conversation begins with the previous rendering,
    token by token.

    ``tokenizer``: anything with ``apply_chat_template``. ``messages``: a conversation with at least
    one assistant message; default: four that hold plain text, ``<think>`` parts, tool calls with
    results, and both. ``tools`` are rendered with the conversation, and the default tool calls call
    the first of them.

    Raises ``ConfigError`` without a chat template, without an assistant message, and when the
    template cannot render ``messages`` or the plain-text conversation.

    >>> from verifiers.testing import ByteTokenizer
    >>> check_increasing_context(ByteTokenizer()).ok, check_increasing_context(ByteTokenizer(keep_reasoning=False)).ok
    (True, False)
    """
    if not callable(getattr(tokenizer, "apply_chat_template", None)):
        raise ConfigError(
            f"{type(tokenizer).__name__} has no apply_chat_template; pass a tokenizer with a chat"
            " template"
        )
    tool_dicts = None if tools is None else [dict(tool) for tool in tools]
    checked: list[str] = []
    differences: list[Difference] = []
    refused: list[tuple[str, str]] = []
    for name, conversation, offered in _conversations(messages, tool_dicts):
        try:
            difference = _first_difference(_Renderer(tokenizer, offered), name, conversation)
        except Exception as error:
            # a template may raise anything, for example to reject a role; it is reported
            message = f"{type(error).__name__}: {error}"
            if name in ("given", "plain"):
                raise ConfigError(
                    f"the chat template cannot render the conversation {name!r}: {message}"
                ) from error
            refused.append((name, message))
            continue
        checked.append(name)
        if difference is not None:
            differences.append(difference)
    return ContextReport(tuple(checked), tuple(differences), tuple(refused))


# --- conversations --------------------------------------------------------------------------------


def _conversations(
    messages: Sequence[Any] | None, tools: list[dict[str, Any]] | None
) -> Iterator[tuple[str, list[dict[str, Any]], list[dict[str, object]] | None]]:
    """(name, messages, tools) of each conversation; some templates reject a system message."""
    if messages is not None:
        conversation = [_plain(message) for message in normalize_chat(list(messages))]
        if not any(message["role"] == "assistant" for message in conversation):
            raise ConfigError("messages contain no assistant message; the check needs at least one")
        end = [THANKS] if conversation[-1]["role"] == "assistant" else []
        yield "given", [*conversation, *end], tools
        return
    first, second = ({"role": "user", "content": t} for t in ("What is 2 + 2?", "And 3 + 3?"))
    answers = _assistant("It is 4."), _assistant("It is 6.")
    thoughts = (
        _assistant("<think>\nTwo twos are four.\n</think>\n\nIt is 4."),
        _assistant("<think>\nTwo threes are six.\n</think>\n\nIt is 6."),
    )
    for name, (answer, last_answer) in (("plain", answers), ("think", thoughts)):
        yield name, [first, answer, second, last_answer, THANKS], tools
    offered = tools or [WEATHER]
    for name, thought in (
        ("tools", ""),
        ("think and tools", "<think>\nI should look.\n</think>\n\n"),
    ):
        tool = offered[0].get("function") or offered[0]
        arguments = example_arguments(tool.get("parameters") or {})
        function = {"name": tool["name"], "arguments": arguments}
        call = {"id": "call00001", "type": "function", "function": function}
        result = {"tool_call_id": call["id"], "name": tool["name"]}
        messages = [
            first,
            {**_assistant(thought), "tool_calls": [call]},
            {"role": "tool", "content": "It is sunny.", **result},
            _assistant(f"{thought}The answer is sunny."),
            second,
            _assistant(f"{thought}It is 6."),
            THANKS,
        ]
        yield name, messages, offered


def _assistant(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def _plain(message: Message) -> dict[str, Any]:
    """A message as plain dicts for the template; JSON arguments of tool calls are parsed."""
    plain = {**message, "content": message.get("content") or ""}
    if message.tool_calls:
        plain["tool_calls"] = [
            {**call, "function": {"name": call["name"], "arguments": _object(call["arguments"])}}
            for call in message.tool_calls
        ]
    return plain


def _object(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:  # not JSON: pass the model's text to the template
        return arguments


# --- rendering and comparing ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Renderer:
    tokenizer: Any
    tools: list[dict[str, object]] | None

    def ids(
        self, messages: Sequence[Mapping[str, object]], generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation, from any container that tokenizers return."""
        options = {"tools": self.tools, "add_generation_prompt": generation_prompt}
        return self._flat(rendered(self.tokenizer, list(messages), tokenize=True, **options))

    def answer_ids(self, message: Mapping[str, object]) -> list[int]:
        """Token ids of a completion's text, without the last: a tokenizer may merge it with the
        text that follows."""
        text = message["content"]
        return self._encoded(text.rstrip())[:-1] if isinstance(text, str) else []

    def window(self, ids: list[int], position: int) -> TokenWindow:
        window_ids = ids[max(0, position - AROUND) : position + AROUND]
        decode = getattr(self.tokenizer, "decode", None)
        return TokenWindow(tuple(window_ids), decode(window_ids) if callable(decode) else "")

    def _encoded(self, text: str) -> list[int]:
        encode = self.tokenizer if callable(self.tokenizer) else self.tokenizer.encode
        return self._flat(encode(text, add_special_tokens=False))

    def _flat(self, rendered: Any) -> list[int]:
        if hasattr(rendered, "keys"):
            rendered = rendered["input_ids"]
        if isinstance(rendered, str):
            return self._encoded(rendered)
        ids = rendered.tolist() if hasattr(rendered, "tolist") else list(rendered)
        return list(ids[0]) if ids and isinstance(ids[0], list | tuple) else ids


def _first_difference(
    renderer: _Renderer, conversation: str, messages: Sequence[Mapping[str, object]]
) -> Difference | None:
    starts = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    turns = itertools.pairwise([*starts, len(messages)])
    for turn, (start, following) in enumerate(turns, 1):
        prompt = renderer.ids(messages[:start])
        before = prompt + renderer.answer_ids(messages[start])
        after = renderer.ids(messages[:following])
        if after[: len(before)] == before:
            continue
        unequal = (
            at for at, (old, new) in enumerate(zip(before, after, strict=False)) if old != new
        )
        position = next(unequal, min(len(before), len(after)))
        if position >= len(prompt):
            part = "answer"
        else:
            without = renderer.ids(messages[:start], generation_prompt=False)
            part = "conversation" if position < len(without) else "generation prompt"
        windows = renderer.window(before, position), renderer.window(after, position)
        return Difference(conversation, turn, part, position, *windows)
    return None
