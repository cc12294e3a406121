"""Tokenise turns from text, for rollouts without recorded ids; sampled tokens may differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from verifiers.data.chat_template import rendered
from verifiers.data.messages import message_text
from verifiers.rollouts.transcript import NOT_SAMPLED
from verifiers.rollouts.turn import Turn


def text_turns(
    prompt: Sequence[Mapping[str, object]] | str,
    completion: Sequence[Mapping[str, object]] | str,
    tools: Iterable[Mapping[str, object]] | None,
    tokenizer: Any,
) -> list[Turn]:
    """A turn per assistant message: the rendered conversation before it, and the tokens that it
    adds.

    Two texts, prompt and completion, are one turn. A completion without an assistant message is one
    empty turn.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        completion_ids = tokenizer.encode(completion, add_special_tokens=False)
        return [_turn(tokenizer.encode(prompt), completion_ids)]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    before, messages = list(prompt), list(completion)
    turns = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt_ids = _rendered(tokenizer, [*before, *messages[:index]], tools, generation=True)
            so_far = [*before, *messages[: index + 1]]
            full_ids = _rendered(tokenizer, so_far, tools, generation=False)
            if full_ids[: len(prompt_ids)] == prompt_ids:
                completion_ids = full_ids[len(prompt_ids) :]
            else:  # the template rewrites earlier messages: encode the message's text alone
                completion_ids = tokenizer.encode(message_text(message), add_special_tokens=False)
            turns.append(_turn(prompt_ids, completion_ids))
    return turns or [_turn(_rendered(tokenizer, before, tools, generation=True), [])]


def _rendered(
    tokenizer: object,
    messages: Sequence[Any],
    tools: Iterable[Mapping[str, object]] | None,
    generation: bool,
) -> list[int]:
    ids = rendered(
        tokenizer,
        [dict(message) for message in messages],
        tools=list(tools) if tools else None,
        add_generation_prompt=generation,
        tokenize=True,
        return_dict=False,
    )
    return list(ids)


def _turn(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> Turn:
    return Turn(prompt_ids, completion_ids, np.zeros(len(completion_ids), np.float32), NOT_SAMPLED)
