"""Turns made from text, for rollouts without recorded ids. What the model sampled may have been other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verifiers.data.messages import message_text
from verifiers.rollouts.state import TrajectoryStepTokens


def text_turns(prompt: Any, completion: Any, tools: Any, tokenizer: Any) -> list[TrajectoryStepTokens]:
    """One turn per assistant message: the rendered conversation before it, and what the message adds to it.

    A completion text after a prompt text is one turn. A completion without an assistant message is one empty turn.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        return [_turn(tokenizer.encode(prompt), tokenizer.encode(completion, add_special_tokens=False))]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    turns = []
    for index, message in enumerate(answer):
        if message["role"] == "assistant":
            given = _rendered(tokenizer, [*before, *answer[:index]], tools, generation=True)
            whole = _rendered(tokenizer, [*before, *answer[: index + 1]], tools, generation=False)
            if whole[: len(given)] == given:
                said = whole[len(given) :]
            else:  # a template that rewrites the past: the text of the message alone
                said = tokenizer.encode(message_text(message), add_special_tokens=False)
            turns.append(_turn(given, said))
    return turns or [_turn(_rendered(tokenizer, before, tools, generation=True), [])]


def _rendered(tokenizer: Any, messages: Sequence[Any], tools: Any, generation: bool) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=list(tools) if tools else None,
        add_generation_prompt=generation,
        tokenize=True,
        return_dict=False,
    )
    return list(rendered)


def _turn(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> TrajectoryStepTokens:
    return TrajectoryStepTokens(prompt_ids, completion_ids, np.zeros(len(completion_ids), np.float32))
