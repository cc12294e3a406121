"""Prompts that begin with the sampled ids: only the messages after the last completion are
rendered.

Guarantee: the ids of the next prompt are exactly the ids of the turn before, then the template's
text for the messages after it. A truncated turn gets the template's end-of-turn token, which is
part of the prompt and has no loss. An unknown conversation (a fork, an edited history) is rendered
in full. The model receives its earlier reasoning even where its template would drop it, as
intended.

Used by ``exact.client`` in the trainer, and by ``integrations.token_client`` for other trainers.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verifiers.data.messages import canonical_arguments
from verifiers.data.tool_examples import example_arguments
from verifiers.errors import ConfigError
from verifiers_trainer.engines.http.chat import (
    BadRequest,
    Tokenizer,
    ids_of,
    images_of,
    plain_message,
    rendered_text,
)
from verifiers_trainer.engines.processing import Processing

MAX_REMEMBERED, MAX_TOKENS = 65_536, 2**27
"""Most completions, and tokens of them (512 MiB); the least recently used are dropped first."""
MARK = "\u2402vf-sampled\u2403"
"""Placeholder for the sampled completion while the messages after it are rendered."""


@dataclass(slots=True, eq=False)
class _Answer:
    """A conversation up to a sampled completion; its prefix is shared with ``before``."""

    before: _Answer | None
    new: np.ndarray
    """int32, the ids after those of ``before``."""
    num_tokens: int
    num_holders: int = 0
    """Reference count: the cache, and entries that have it as ``before``."""

    def ids(self) -> np.ndarray:
        """int32, of the whole conversation."""
        parts: list[np.ndarray] = []
        answer: _Answer | None = self
        while answer is not None:
            parts.append(answer.new)
            answer = answer.before
        return np.concatenate(parts[::-1])


class ExactHistory:
    """A cache of sampled ids by conversation; ``processing``: of a model that sees."""

    def __init__(self, tokenizer: Tokenizer, processing: Processing | None = None):
        self._tokenizer, self._processing = tokenizer, processing
        self._answers: OrderedDict[tuple[str | None, str], _Answer] = OrderedDict()
        self.num_tokens = 0
        """Number of ids in memory, including dropped entries that others extend."""

    def remember(
        self,
        prompt: Any,
        message: Mapping[str, object],
        prompt_ids: Sequence[int] | np.ndarray,
        token_ids: Sequence[int] | np.ndarray,
        rollout_id: str | None,
    ) -> None:
        """Store that ``message`` was sampled as ``token_ids`` after ``prompt`` (``prompt_ids``)."""
        messages = list(prompt)
        ids = np.concatenate([np.asarray(prompt_ids, np.int32), np.asarray(token_ids, np.int32)])
        newest = self._newest(messages, rollout_id)
        before = None if newest is None else newest[1]
        if before is not None and not np.array_equal(ids[: before.num_tokens], before.ids()):
            before = None  # that turn was rendered again, or truncated on the left
        new = ids if before is None else ids[before.num_tokens :].copy()
        self._hold((rollout_id, _digest([*messages, message])), _Answer(before, new, len(ids)))
        while len(self._answers) > MAX_REMEMBERED or (
            self.num_tokens > MAX_TOKENS and len(self._answers) > 1
        ):
            self._release(self._answers.popitem(last=False)[1])

    def _hold(self, key: tuple[str | None, str], answer: _Answer) -> None:
        answer.num_holders = 1
        self.num_tokens += len(answer.new)
        if answer.before is not None:
            answer.before.num_holders += 1
        if (same := self._answers.pop(key, None)) is not None:
            self._release(same)
        self._answers[key] = answer

    def _release(self, answer: _Answer | None) -> None:
        """Decrement the reference count; at 0 free the entry and release its prefix."""
        while answer is not None:
            answer.num_holders -= 1
            if answer.num_holders:
                return
            self.num_tokens -= len(answer.new)
            answer = answer.before

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Iterable[Mapping[str, Any]] | None,
        rollout_id: str | None,
        variables: Mapping[str, object] | None = None,
    ) -> list[int] | None:
        """Ids of the next prompt; None when it has no known completion. ``variables`` are the
        template's.

        *Raises* ConfigError when the template does not end a turn with a special token, BadRequest
        when it refuses the messages.
        """
        newest = self._newest(messages, rollout_id)
        if newest is None:
            return None
        index, answer = newest
        ids = answer.ids().tolist()
        end, new_messages = self._after(messages, index, tools, variables or {})
        closing = [] if ids[-1] == end else [end]
        images = () if self._processing is None else images_of(messages[index + 1 :])
        return [*ids, *closing, *ids_of(new_messages, images, self._tokenizer, self._processing)]

    def _newest(
        self, messages: Sequence[Mapping[str, object]], rollout_id: str | None
    ) -> tuple[int, _Answer] | None:
        """The index of the last known completion, with its entry."""
        for index in range(len(messages) - 1, -1, -1):
            if messages[index].get("role") != "assistant":
                continue
            key = rollout_id, _digest(messages[: index + 1])
            if key in self._answers:
                self._answers.move_to_end(key)
                return index, self._answers[key]
        return None

    def _after(
        self,
        messages: Sequence[Mapping[str, object]],
        index: int,
        tools: Iterable[Mapping[str, object]] | None,
        variables: Mapping[str, object],
    ) -> tuple[int, str]:
        """(id of the token that ends message ``index``, the template's text after it, ready for the
        next answer)."""
        # nothing that a model or a user wrote may stand between the mark and the end of the message
        marked = [{**m, "content": MARK} if n == index else dict(m) for n, m in enumerate(messages)]
        plain = [plain_message(message, self._processing) for message in marked]
        if "tool_calls" in plain[index]:
            calls = plain[index]["tool_calls"]
            plain[index]["tool_calls"] = [_without_arguments(call) for call in calls]

        def render(turns: list[dict[str, object]], answer: bool) -> str:
            options = {"tools": list(tools) if tools else None, "add_generation_prompt": answer}
            return rendered_text(self._tokenizer, turns, variables, **options)

        text, eos = render(plain, True), str(self._tokenizer.eos_token or "")
        _, has_mark, after = text.partition(MARK)
        # some templates drop the content of messages with calls
        if not has_mark and "tool_calls" in plain[index]:
            prefix = render(plain[: index + 1], False)
            if text.startswith(prefix):
                last_end = prefix[prefix.rindex(eos) :] if eos and eos in prefix else ""
                after = last_end + text[len(prefix) :]
        end = self._end_of_turn(render)
        if end is None or end not in after:
            end = self._first_special(after)
        if end is None:
            raise ConfigError(
                'history="exact" needs a chat template that ends each turn with a special token,'
                f" such as {self._tokenizer.eos_token!r}; this one does not: leave history as it is"
            )
        return int(self._tokenizer.convert_tokens_to_ids(end)), after.partition(end)[2]

    def _end_of_turn(self, render: Callable[[list[dict[str, object]], bool], str]) -> str | None:
        """The token that ends an answer, in a conversation without such a token in its messages."""
        talk = [("user", "Well?"), ("assistant", MARK), ("user", "And now?")]
        plain = [
            plain_message({"role": role, "content": content}, self._processing)
            for role, content in talk
        ]
        try:
            text = render(plain, True)
        except BadRequest:
            return None
        return self._first_special(text.partition(MARK)[2])

    def _first_special(self, text: str) -> str | None:
        """The end token if the text has it, else its first special token."""
        eos = str(self._tokenizer.eos_token or "")
        if eos and eos in text:
            return eos
        specials = [
            token for token in self._tokenizer.all_special_tokens if token and token in text
        ]
        return min(specials, key=text.index, default=None)


def _without_arguments(call: dict[str, Any]) -> dict[str, object]:
    return {**call, "function": {**call["function"], "arguments": {}}}


def require_exact_history(
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] | None,
    processing: Processing | None = None,
) -> None:
    """Check the chat template with a completion and a call of the first of ``tools``, before
    sampling.

    *Raises* ConfigError when the template does not end turns with a special token, BadRequest when
    it fails.
    """
    talks: list[list[dict[str, object]]] = [
        [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And now?"}]
    ]
    if tools:
        function = tools[0]["function"]
        arguments = json.dumps(example_arguments(function.get("parameters") or {}))
        call = {
            "id": "call-0",
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }
        result = {
            "role": "tool",
            "content": "1",
            "tool_call_id": "call-0",
            "name": function["name"],
        }
        talks.append([{"role": "assistant", "content": None, "tool_calls": [call]}, result])
    prompt = [{"role": "user", "content": "Well?"}]
    for answer, following in talks:
        history = ExactHistory(tokenizer, processing)
        history.remember(prompt, answer, [0], [0], None)
        history.prompt_ids([*prompt, answer, following], tools, None)


def _digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """A digest of the rendered fields of a conversation, equal for dicts and message objects."""
    fields = [
        [
            m.get("role"),
            m.get("content") or "",
            m.get("tool_call_id"),
            [_call(call) for call in m.get("tool_calls") or ()],
        ]
        for m in messages
    ]
    return hashlib.sha256(json.dumps(fields, default=str, sort_keys=True).encode()).hexdigest()


def _call(call: Mapping[str, Any]) -> list[Any]:
    """Name and arguments; arguments are compared as values, because agents serialise them again."""
    function = call.get("function") or call
    return [function.get("name"), canonical_arguments(function.get("arguments"))]
