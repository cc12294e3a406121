"""Prefill: what prompts have in common is computed once, and the head multiplies without copies of
its weight."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from support.embedded import ask, complete, forward_logprobs, sampled_logprobs, serving, small_model
from verifiers_trainer.engines.embedded.model_inputs import ForwardPass
from verifiers_trainer.engines.embedded.padded import _shared_prefix
from verifiers_trainer.policy.builtin_models import build_tiny_model


def counted_tokens(model) -> list[int]:
    """The number of tokens of each forward pass from now on."""
    tokens: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return tokens


@pytest.mark.parametrize("kv_heads", [4, 2])
async def test_the_tokens_with_which_all_prompts_begin_are_prefilled_once(kv_heads):
    model = build_tiny_model(layers=2, hidden=32, heads=4, kv_heads=kv_heads)
    shots = "one solved example and another one of them "
    texts = [shots + tail for tail in ("a", "bc", "some more", "d", "bc")]
    tokens = counted_tokens(model)
    with serving(model, concurrency=8) as engine:
        tokens.clear()
        with engine.pause():  # all but the first to arrive wait until it ends, and join together
            requests = [ask(text, max_tokens=6, seed=i) for i, text in enumerate(texts)]
            answering = asyncio.create_task(complete(engine, *requests))
            await asyncio.sleep(0.2)
        answers = await answering
        together = sum(tokens)
        tokens.clear()
        alone = [
            (await complete(engine, ask(text, max_tokens=6, seed=i)))[0]
            for i, text in enumerate(texts)
        ]
    assert sum(tokens) - together > 2 * len(shots)
    for answer in [*answers, *alone]:
        assert (sampled_logprobs(answer) - forward_logprobs(model, answer)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [
        ([[1] * 20], 0),
        ([[1] * 20, [1] * 20 + [2]], 19),
        ([[1] * 20 + [3], [1] * 20 + [2, 4]], 20),
        ([[1] * 18 + [3, 1, 1], [1] * 20 + [2, 4], [1] * 30], 18),
        ([[1] * 15 + [3], [1] * 15 + [2]], 0),
        ([[5], [1] * 20], 0),
    ],
)
def test_the_shared_prefix_leaves_a_token_in_each_prompt(prompts, shared):
    assert _shared_prefix([np.array(ids, np.int64) for ids in prompts]) == shared


def test_a_head_multiplies_a_slice_without_a_copy_of_its_weight_for_each_row():
    """Without the contiguous slice torch expands a frozen weight, as LoRA's base has: a `bmm` of
    eight copies."""
    model = small_model().requires_grad_(False)
    ids = torch.arange(5, 13)[:, None].repeat(1, 6)

    def products_of_the_head() -> set[str]:
        with torch.inference_mode():
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            with profile(activities=[ProfilerActivity.CPU]) as record:
                model.lm_head(hidden[:, -1:, :])
        return {event.key for event in record.key_averages()} & {"aten::mm", "aten::bmm"}

    assert products_of_the_head() == {"aten::bmm"}
    ForwardPass(model)
    assert products_of_the_head() == {"aten::mm"}
