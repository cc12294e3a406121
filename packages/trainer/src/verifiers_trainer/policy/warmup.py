"""Supervised warm-up: fine-tune a model on an environment's reference answers until it sometimes succeeds.

Reinforcement learning needs rewards that differ, and a randomly initialised model gets none. Fine-tuning (next-token
loss on the answer's tokens) stops as soon as the sampled reward reaches a target, so that RL still has something to
improve. This is supervised learning on training rows, before the RL loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from verifiers.environments.base import Environment
from verifiers.errors import ConfigError
from verifiers.parsers import XMLParser

IGNORED = -100


def warm_up(
    model: Any,
    tokenizer: Any,
    env: Environment,
    *,
    reward: Callable[[], float],
    target: float,
    answers: Callable[[dict[str, Any]], str] | None = None,
    max_steps: int = 120,
    probe_every: int = 10,
    rows_per_step: int = 64,
    learning_rate: float = 1e-3,
    seed: int = 0,
    on_step: Callable[[int, float, float | None], None] | None = None,
) -> int:
    """Fine-tune ``model`` on reference answers until ``reward()`` reaches ``target``; returns the number of steps.

    ``answers`` maps a row to the assistant's text; by default the row's ``answer`` inside the tags that the
    environment's ``XMLParser`` reads. ``reward`` evaluates the current model every ``probe_every`` steps.
    ``on_step(step, loss, reward or None)`` is called after each step. Gradients are cleared at the end.

    *Raises* ConfigError without training rows, and without ``answers`` when the parser is not an ``XMLParser``.
    """
    rows = [example.row for example in env.train_table or ()]
    if not rows:
        raise ConfigError("the warm-up needs training rows, and the environment has none: pass dataset=…")
    answers = answers or tagged_answers(env)
    encoded = [_encode(tokenizer, row["prompt"], answers(row)) for row in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    order = random.Random(seed)
    for step in range(1, max_steps + 1):
        loss = _supervised_loss(model, order.sample(encoded, min(rows_per_step, len(encoded))), tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        latest_reward = reward() if step % probe_every == 0 else None
        if on_step is not None:
            on_step(step, float(loss.detach()), latest_reward)
        if latest_reward is not None and latest_reward >= target:
            return step
    return max_steps


def tagged_answers(env: Environment) -> Callable[[dict[str, Any]], str]:
    """A function from a row to its ``answer`` inside the tags that the environment's parser reads."""
    parser = env.parser
    if not isinstance(parser, XMLParser):
        raise ConfigError(
            f"a warm-up needs an environment whose parser is an XMLParser, not {type(parser).__name__}; or pass "
            "answers=, a function from a row to the correct assistant text"
        )
    tag = parser.answer_field
    return lambda row: f"<{tag}>{row['answer']}</{tag}>"


def _encode(tokenizer: Any, prompt: Any, answer: str) -> tuple[list[int], list[int]]:
    """(token ids, labels) of a conversation; only the answer and its end token carry a label."""
    messages = [dict(message) for message in prompt]
    prefix = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prefix, add_special_tokens=False)["input_ids"]
    answer_ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return prompt_ids + answer_ids, [IGNORED] * len(prompt_ids) + answer_ids


def _supervised_loss(model: Any, rows: Sequence[tuple[list[int], list[int]]], pad_token_id: int) -> torch.Tensor:
    """Mean next-token loss over the labelled tokens of right-padded rows."""
    longest = max(len(ids) for ids, _ in rows)
    device = next(model.parameters()).device
    input_ids = torch.tensor([ids + [pad_token_id] * (longest - len(ids)) for ids, _ in rows], device=device)
    labels = torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in rows], device=device)
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows], device=device)
    model.train()
    logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=IGNORED)
