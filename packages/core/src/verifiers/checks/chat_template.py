"""Does a chat template only ever append? ``check_increasing_context`` renders a conversation turn by turn and looks.

The promise: for every model turn, the token ids of its prompt followed by those of its answer's text must stand at the
beginning of the next turn's prompt. Where they do not, the report names the first token that differs, with what stands
around it in both. A template that drops earlier ``<think>`` parts fails; the turns of a rollout then share no prefix,
and a trainer has to train every turn as a sample of its own.

This module needs no model. What a template makes of a tool call is compared from the prompt after it on (the model's
own spelling of a call is not known here), and the last token of an answer is not compared, because a tokenizer may
join it with what follows. Recorded token ids are merged or forked by ``results`` and by the trainer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.data.messages import normalize_chat
from verifiers.data.tool_examples import example_arguments
from verifiers.errors import ConfigError
from verifiers.types import Message

AROUND = 8
"""Tokens that a window shows on either side of a difference."""

CONSEQUENCE = (
    " As it is, every turn of a multi-turn rollout is a sample of its own: correct, but the shared tokens are computed "
    "again for each turn. Single-turn environments are not affected."
)
ADVICE = {
    "think": "The template changes or drops earlier <think> parts: use a chat template that keeps them." + CONSEQUENCE,
    "generation prompt": (
        "What the template writes before an answer changes once the answer is part of the conversation: make it open "
        "every assistant message as add_generation_prompt=True does." + CONSEQUENCE
    ),
    "other": "The template rewrites what it has rendered before: use one that only appends." + CONSEQUENCE,
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
THANKS = {"role": "user", "content": "Thanks."}
"""Said after the last answer, so that there is a next prompt to find it in."""


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
    """One of "plain", "think", "tools", "think and tools", and "given"."""
    turn: int
    """The model turn, 0 is the first, whose prompt does not begin with what came before it."""
    part: str
    """What was changed of that: "conversation", "generation prompt", or "answer" (of the turn before)."""
    position: int
    """Index of the first token that differs."""
    before: TokenWindow
    after: TokenWindow

    def __str__(self) -> str:
        return (
            f"conversation {self.conversation!r}: the prompt of turn {self.turn} does not begin with what came before; "
            f"the {self.part} differs at token {self.position}\n"
            f"    before: {list(self.before.ids)} {self.before.text!r}\n"
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
        thinks = "think" in first.conversation or "<think>" in first.before.text
        return ADVICE[first.part if first.part in ADVICE else "think" if thinks else "other"]

    def __str__(self) -> str:
        lines = [f"the chat template {'only appends' if self.ok else 'does NOT only append'}"]
        failed = {difference.conversation for difference in self.differences}
        lines += [f"  {name}: {'differs' if name in failed else 'ok'}" for name in self.checked]
        lines += [f"  {name}: not rendered, the template says: {said}" for name, said in self.refused]
        lines += [str(difference) for difference in self.differences]
        return "\n".join([*lines, self.advice] if self.advice else lines)


def check_increasing_context(
    tokenizer: object, messages: Sequence[Any] | None = None, tools: Sequence[Mapping[str, Any]] | None = None
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
        raise ConfigError(
            f"{type(tokenizer).__name__} has no apply_chat_template; give a tokenizer with a chat template"
        )
    given = None if tools is None else [dict(tool) for tool in tools]
    checked: list[str] = []
    differences: list[Difference] = []
    refused: list[tuple[str, str]] = []
    for name, conversation, offered in _conversations(messages, given):
        try:
            found = _first_difference(_Renderer(tokenizer, offered), name, conversation)
        except Exception as error:  # a template is a program: whatever it raises is its answer to this conversation
            said = f"{type(error).__name__}: {error}"
            if name in ("given", "plain"):
                raise ConfigError(f"the chat template cannot render the conversation {name!r}: {said}") from error
            refused.append((name, said))
            continue
        checked.append(name)
        if found is not None:
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
        yield "given", conversation if conversation[-1]["role"] != "assistant" else [*conversation, THANKS], tools
        return
    first, second = _user("What is 2 + 2?"), _user("And 3 + 3?")
    yield "plain", [first, _assistant("It is 4."), second, _assistant("It is 6."), THANKS], tools
    yield (
        "think",
        [
            first,
            _assistant("<think>\nTwo twos are four.\n</think>\n\nIt is 4."),
            second,
            _assistant("<think>\nTwo threes are six.\n</think>\n\nIt is 6."),
            THANKS,
        ],
        tools,
    )
    offered = tools or [WEATHER]
    for name, thought in (("tools", ""), ("think and tools", "<think>\nI should look.\n</think>\n\n")):
        call: dict[str, Any] = {"id": "call00001", "type": "function", "function": _call_of(offered[0])}
        yield (
            name,
            [
                first,
                {**_assistant(thought), "tool_calls": [call]},
                {
                    "role": "tool",
                    "content": "It is sunny.",
                    "tool_call_id": call["id"],
                    "name": call["function"]["name"],
                },
                _assistant(f"{thought}The answer is sunny."),
                second,
                _assistant(f"{thought}It is 6."),
                THANKS,
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


@dataclass(frozen=True, slots=True)
class _Renderer:
    tokenizer: Any
    tools: list[dict[str, Any]] | None

    def ids(self, messages: Sequence[dict[str, Any]], generation_prompt: bool = True) -> list[int]:
        """The ids of a conversation, whatever container the tokenizer puts them in."""
        return self._flat(
            self.tokenizer.apply_chat_template(
                list(messages), tools=self.tools, add_generation_prompt=generation_prompt, tokenize=True
            )
        )

    def answer_ids(self, message: Mapping[str, Any]) -> list[int]:
        """The ids of an answer's text but the last one, which may be joined with what follows."""
        text = message["content"]
        return self._encoded(text.rstrip())[:-1] if isinstance(text, str) else []

    def window(self, ids: list[int], position: int) -> TokenWindow:
        shown = ids[max(0, position - AROUND) : position + AROUND]
        decode = getattr(self.tokenizer, "decode", None)
        return TokenWindow(tuple(shown), decode(shown) if callable(decode) else "")

    def _encoded(self, text: str) -> list[int]:
        if callable(self.tokenizer):
            return self._flat(self.tokenizer(text, add_special_tokens=False))
        return self._flat(self.tokenizer.encode(text, add_special_tokens=False))

    def _flat(self, rendered: Any) -> list[int]:
        if hasattr(rendered, "keys"):
            rendered = rendered["input_ids"]
        if isinstance(rendered, str):
            return self._encoded(rendered)
        ids = rendered.tolist() if hasattr(rendered, "tolist") else list(rendered)
        return list(ids[0]) if ids and isinstance(ids[0], list | tuple) else ids


def _first_difference(renderer: _Renderer, conversation: str, messages: list[dict[str, Any]]) -> Difference | None:
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for turn, (place, following) in enumerate(zip(places, [*places[1:], len(messages)], strict=True), 1):
        prompt = renderer.ids(messages[:place])
        before, after = prompt + renderer.answer_ids(messages[place]), renderer.ids(messages[:following])
        if after[: len(before)] == before:
            continue
        unequal = (at for at, (old, new) in enumerate(zip(before, after, strict=False)) if old != new)
        position = next(unequal, min(len(before), len(after)))
        if position >= len(prompt):
            part = "answer"
        else:
            without = renderer.ids(messages[:place], generation_prompt=False)
            part = "conversation" if position < len(without) else "generation prompt"
        windows = renderer.window(before, position), renderer.window(after, position)
        return Difference(conversation, turn, part, position, *windows)
    return None
