"""Prompts that begin with what was sampled: only the messages after the model's last answer are rendered.

Promise: the ids of a next prompt are exactly the ids of the turn before, then the template's text for what came after
it. A turn that a limit cut gets the end-of-turn token the template expects; it stands in the prompt and carries no
loss. A conversation this memory has not seen (a fork, an edited history) is rendered in full. The model sees its
earlier reasoning again even where its template would leave it out: that is the point.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.errors import ConfigError
from verifiers_trainer.engines.chat import _plain_message

MAX_REMEMBERED = 16_384
"""Conversations; the oldest are forgotten first."""
MARK = "\u2402vf-sampled\u2403"
"""Stands for the sampled answer while the messages after it are rendered."""


class ExactHistory:
    """What was sampled, by the conversation it belongs to."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._known: OrderedDict[tuple[str | None, str], list[int]] = OrderedDict()

    def remember(
        self,
        prompt: Any,
        message: Mapping[str, Any],
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        rollout_id: str | None,
    ) -> None:
        """``message`` was sampled as ``token_ids`` after ``prompt``, which was ``prompt_ids``."""
        self._known[rollout_id, _digest([*prompt, message])] = [*prompt_ids, *token_ids]
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], tools: Any, rollout_id: str | None) -> list[int] | None:
        """Ids of the next prompt; None when no answer in it is known.

        *Raises* ConfigError when the template does not end a turn with the tokenizer's end token.
        """
        for index in range(len(messages) - 1, -1, -1):
            if messages[index].get("role") != "assistant":
                continue
            known = self._known.get((rollout_id, _digest(messages[: index + 1])))
            if known is not None:
                end = self._tokenizer.eos_token_id
                closing = [] if known[-1] == end else [end]
                return [*known, *closing, *self._rest(messages, index, tools)]
        return None

    def _rest(self, messages: Sequence[Mapping[str, Any]], index: int, tools: Any) -> list[int]:
        """Ids of the template's text after the end of message ``index``, with the start of the next answer."""
        plain = [_plain_message(dict(message)) for message in messages]
        plain[index] = {**plain[index], "content": MARK}
        text = self._tokenizer.apply_chat_template(
            plain, tools=list(tools) if tools else None, add_generation_prompt=True, tokenize=False
        )
        _, found, after = text.partition(MARK)
        _, ended, rest = after.partition(self._tokenizer.eos_token)
        if not found or not ended:
            raise ConfigError(
                f'history="exact" needs a chat template that ends each turn with {self._tokenizer.eos_token!r}; '
                'this one does not: use history="render"'
            )
        return list(self._tokenizer(rest, add_special_tokens=False)["input_ids"])


def _digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """Of what a template shows of a conversation: the same whether it came back as dicts or as objects."""
    shown = [
        [
            m.get("role"),
            m.get("content") or "",
            m.get("tool_call_id"),
            [_call(call) for call in m.get("tool_calls") or ()],
        ]
        for m in messages
    ]
    return hashlib.sha256(json.dumps(shown, default=str).encode()).hexdigest()


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or call
    return [function.get("name"), function.get("arguments")]
