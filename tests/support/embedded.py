"""Helpers around the embedded engine: real HTTP calls, and the log-probs its answers must have."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp
import torch

from verifiers_trainer.engines.embedded.engine import EmbeddedEngine
from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer


def small_model(seed: int = 0) -> Any:
    """One layer of 64: a decoding step takes well under a millisecond."""
    model = build_tiny_model(seed=seed, layers=1, hidden=64, heads=2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)  # away from uniform, so that a wrong distribution shows
    return model


def fine_tuned(model: Any, examples: Sequence[tuple[list[int], list[int]]]) -> Any:
    """``model`` after it has learnt, from (ids of the prompt, ids of all), to go on from each
    prompt; in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):
        losses = []
        for prompt, ids in examples:
            inputs = torch.tensor([ids], device=model.device)
            labels = inputs.clone()
            labels[:, : len(prompt)] = -100
            losses.append(model(inputs, labels=labels).loss)
        loss = torch.stack(losses).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.02:
            break
    return model


@contextmanager
def serving(model: Any = None, **options: Any) -> Iterator[EmbeddedEngine]:
    """A started engine over ``model`` (default ``small_model()``)."""
    options = {"mode": "padded", "max_seq_len": 256, "concurrency": 16, **options}
    engine = EmbeddedEngine(
        model if model is not None else small_model(), build_tiny_tokenizer(), **options
    )
    engine.start(30)
    try:
        yield engine
    finally:
        engine.stop()


async def post(
    engine: EmbeddedEngine, bodies: Sequence[dict], route: str = "chat/completions", **session: Any
) -> list:
    """Send all ``bodies`` at once; (status, parsed JSON) of each, in order."""
    headers = session.pop("headers", {"Authorization": f"Bearer {engine.api_key}"})
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector, **session) as http:

        async def post_body(body: dict) -> tuple[int, Any]:
            async with http.post(f"{engine.base_url}/{route}", json=body) as response:
                return response.status, await response.json()

        return await asyncio.gather(*map(post_body, bodies))


def ask(text: str = "reverse: abc", **fields: Any) -> dict:
    """A chat body that asks for everything the trainer reads."""
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 12,
        "logprobs": True,
        "return_token_ids": True,
        "return_weight_versions": True,
        **fields,
    }


async def complete(engine: EmbeddedEngine, *bodies: dict) -> list[dict]:
    """The responses to ``bodies``, all of which must succeed."""
    answers = await post(engine, bodies)
    assert all(status == 200 for status, _ in answers), answers
    return [answer for _, answer in answers]


def sampled_logprobs(response: dict) -> torch.Tensor:
    return torch.tensor(
        [entry["logprob"] for entry in response["choices"][0]["logprobs"]["content"]]
    )


def forward_logprobs(model: Any, response: dict, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of the answered tokens by one plain forward pass of ``model`` where it is, float32
    [T] on the CPU."""
    prompt, tokens = response["prompt_token_ids"], response["choices"][0]["token_ids"]
    with torch.no_grad():
        ids = torch.tensor([prompt + tokens], device=model.device)
        logits = model(ids, use_cache=False).logits[0].float().cpu()
    logp = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
    return logp.gather(1, torch.tensor(tokens)[:, None])[:, 0]
