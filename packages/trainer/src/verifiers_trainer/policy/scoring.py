"""Ask a server for answers to fixed prompts, and score the tokens of an answer with a model.

The canary of a run, ``vf-train --verify`` and ``vf-verify`` compare the two: a server that has the
weights of the model gives the log-probabilities of the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verifiers.errors import MalformedResponse
from verifiers.rollouts.turn import Turn
from verifiers.types import ModelRequest
from verifiers_trainer.algorithm.diagnostics import MIN_COMPARED, RatioMeter
from verifiers_trainer.algorithm.packing import forward_arguments, pack
from verifiers_trainer.algorithm.samples import rollout_samples
from verifiers_trainer.engines.role_adapters import roles_of

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from verifiers.clients.protocol import Client

COMMON = "In every step the server must answer with the weights that were trained. 1 + 1 = 2. "
NUM_PROMPT, NUM_ANSWER = 136, 8
"""Tokens of a prompt, more than the blocks of a prefix cache have, and of an answer."""


def fixed_prompts(tokenizer: PreTrainedTokenizerBase, limit: int) -> list[list[int]]:
    """A prompt of common tokens, and a prompt of tokens from the whole vocabulary; with its answer
    each has at most ``limit`` tokens; below ``NUM_ANSWER`` + 1 the answer is the shorter."""
    length = max(1, min(NUM_PROMPT, limit - NUM_ANSWER))
    common = list(tokenizer(COMMON * 12, add_special_tokens=False)["input_ids"])[:length]
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    plain = sorted(set(tokenizer.get_vocab().values()) - special) or common
    rare = [plain[index] for index in np.linspace(0, len(plain) - 1, length).astype(int)]
    return [common or rare, rare]


async def answers(
    client: Client,
    model: str,
    prompts: Sequence[Sequence[int]],
    *,
    sampling_args: Mapping[str, object] = MappingProxyType({}),
    num_tokens: int = NUM_ANSWER,
    version: int | None = None,
    role: str = "",
) -> list[Turn]:
    """A sampled answer to each prompt, with its log-probabilities and, unless a ``version`` is
    given, the policy version that the client reports; of ``role``, where roles have adapters of
    their own.

    Asks again, with other seeds and at most ``MIN_COMPARED`` answers, while they have together
    fewer than ``MIN_COMPARED`` tokens: a server whose answers end at once is compared, too.
    """

    async def answer(prompt: Sequence[int], number: int) -> Turn:
        sampling = {**sampling_args, "max_tokens": num_tokens, "return_weight_versions": True}
        ids: Any = list(prompt)
        request = ModelRequest(
            ids,
            model,
            "completion",
            sampling_args=sampling,
            seed=number,
            require_tokens=True,
            role=role or None,
        )
        tokens = (await client.complete(request)).tokens
        if tokens is None:
            raise MalformedResponse("the answer has no tokens", field="token_ids")
        sampled = tokens.completion_ids, tokens.completion_logprobs
        sampled_by = tokens.version if version is None else version
        return Turn(np.asarray(prompt, np.int32), *sampled, sampled_by, role=role)

    turns: list[Turn] = []
    while sum(map(len, (turn.completion_ids for turn in turns))) < MIN_COMPARED > len(turns):
        numbered = enumerate(prompts, len(turns))
        turns += await asyncio.gather(*(answer(prompt, n) for n, prompt in numbered))
    return turns


def scored(
    model: torch.nn.Module,
    conversations: Sequence[Sequence[Turn]],
    version: int,
    device: torch.device | str,
    temperature: float = 1.0,
) -> RatioMeter:
    """Compare the sampled tokens of ``version`` with the log-probabilities of ``model``, those of
    a role with its adapter where roles have their own, by one forward pass (``policy.logprobs``)
    for each sample."""
    samples = [
        sample
        for turns in conversations
        for sample in rollout_samples(
            turns, 1.0, temperature=temperature, adapter_roles=roles_of(model)
        ).samples
    ]
    meter = RatioMeter(version)
    if not samples:
        return meter
    longest = max(sample.num_tokens for sample in samples)
    for adapter in dict.fromkeys(sample.adapter for sample in samples):
        its = [sample for sample in samples if sample.adapter == adapter]
        weights = [sample.loss_mask.astype(np.float64) for sample in its]
        for packed in pack(its, weights, max_tokens=longest)[0]:
            row = packed.to_tensors(device)
            with torch.no_grad():
                logprobs = model(**forward_arguments(row)).logprobs
            meter.add(logprobs, row["sampler_logprobs"], None, row)
    return meter


def reply_logprobs(
    model: torch.nn.Module,
    replies: Sequence[tuple[np.ndarray, np.ndarray]],
    device: torch.device | str,
    temperature: float = 1.0,
) -> np.ndarray:
    """log π of whole replies, float64 [N] in nats, by one forward pass over all of them; each is
    (ids of its prompt, ids of the reply with its end), int32."""
    samples = [
        rollout_samples(
            [Turn(prompt, reply, np.zeros(len(reply)), 0)], 1.0, temperature=temperature
        ).samples[0]
        for prompt, reply in replies
    ]
    weights = [sample.loss_mask.astype(np.float64) for sample in samples]
    total = sum(sample.num_tokens for sample in samples)
    sums_N = np.zeros(len(samples))
    for packed in pack(samples, weights, max_tokens=total)[0]:
        row = packed.to_tensors(device)
        with torch.no_grad():
            logprobs = model(**forward_arguments(row)).logprobs.double()
        of_reply = torch.where(row["loss_mask"], logprobs, 0.0)
        sums = of_reply.new_zeros(len(packed.sample_indices)).index_add_(
            0, row["seq_ids"].long(), of_reply
        )
        sums_N[packed.sample_indices] = sums.cpu().numpy()
    return sums_N
