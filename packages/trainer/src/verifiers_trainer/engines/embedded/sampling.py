"""Sample one token per row from a batch of logits, each row with its own parameters, vectorised
over rows.

The returned log-prob is of the sampled distribution: penalties, temperature and filters applied, in
float32. Greedy rows (temperature 0) report their token's log-prob at temperature 1. The order is
vLLM's: biases, ends excluded by ``min_tokens``, penalties, temperature, min_p, top_k, top_p.

Randomness is counter based: the uniform number of token ``n`` of a request is a hash of (request
seed, n). A draw depends on the row's logits, parameters and seed alone, not on other rows or
earlier draws; there is no generator state, and a whole batch is hashed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from verifiers_trainer.engines.requests import SamplingParams

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = (1 << 64) - 1


def uniforms(streams_B: np.ndarray, counters_B: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), float64 [B], one per (stream, counter).

    Source: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014), used as a function of the counter.
    """
    mixed = _mix(streams_B + (counters_B.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def streams(seeds: Sequence[int]) -> np.ndarray:
    """The stream of each seed, uint64 [B]; hashed, so that neighbouring seeds share no run of
    numbers."""
    seeds_B = np.array([seed & _MASK64 for seed in seeds], np.uint64)
    return _mix(_mix(seeds_B ^ _GAMMA) + _GAMMA)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """The sampling parameters of a batch as columns; a column that no row uses is None and costs
    nothing."""

    streams: np.ndarray
    """uint64 [B]."""
    temperature: torch.Tensor | None
    """float32 [B, 1]; 1 for greedy rows."""
    greedy: torch.Tensor | None
    """bool [B]."""
    top_k: torch.Tensor | None
    """int64 [B, 1]; above the vocabulary size where disabled."""
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None
    penalties: torch.Tensor | None
    """float32 [3, B, 1]: repetition, presence, frequency."""
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """Rows and columns, int64 [N], and addends, float32 [N]."""
    early: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(row, its min_tokens, the ids that would end it before)."""
    top: int
    """Maximum number of alternatives that a row reports."""

    @classmethod
    def build(cls, params: Sequence[SamplingParams], device: torch.device) -> SamplingTable:
        def column(
            values: list, neutral: float, dtype: torch.dtype = torch.float32
        ) -> torch.Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        greedy = [p.temperature == 0.0 for p in params]
        penalties = [
            [p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params
        ]
        penalised = any(p.penalised for p in params)
        return cls(
            streams=streams([p.seed for p in params]),
            temperature=column([p.temperature or 1.0 for p in params], 1.0),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_k=column([p.top_k or 2**40 for p in params], 2**40, torch.int64),
            top_p=column([p.top_p for p in params], 1.0),
            min_p=column([p.min_p for p in params], 0.0),
            penalties=torch.tensor(penalties, device=device).T.unsqueeze(2) if penalised else None,
            bias=_bias(params, device),
            early=tuple(
                (row, p.min_tokens, p.stop_token_ids)
                for row, p in enumerate(params)
                if p.min_tokens
            ),
            top=max((p.top_logprobs for p in params), default=0),
        )


def _bias(params: Sequence[SamplingParams], device: torch.device) -> Any:
    entries = [(row, token, value) for row, p in enumerate(params) for token, value in p.logit_bias]
    if not entries:
        return None
    rows, tokens, values = zip(*entries, strict=True)
    return (
        torch.tensor(rows, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


class Drawn(NamedTuple):
    """A token for each row."""

    tokens: torch.Tensor
    """int64 [B]."""
    logprobs: torch.Tensor
    """float32 [B]."""
    top_tokens: torch.Tensor | None = None
    """int64 [B, K], most likely first, where a row asks for alternatives."""
    top_logprobs: torch.Tensor | None = None
    """float32 [B, K]."""


class TokenCounts:
    """Token occurrences of each row, for penalties: prompt tokens as a set, sampled
    tokens counted."""

    def __init__(
        self, prompts: Sequence[np.ndarray], outputs: Sequence[np.ndarray], vocabulary: int, device
    ):
        prompt_BV = np.zeros((len(prompts), vocabulary), bool)
        output_BV = np.zeros((len(prompts), vocabulary), np.float32)
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            prompt_BV[row, prompt] = True
            np.add.at(output_BV[row], output, 1.0)
        self.prompt_BV = torch.from_numpy(prompt_BV).to(device)
        self.output_BV = torch.from_numpy(output_BV).to(device)

    def add(self, tokens_B: torch.Tensor) -> None:
        self.output_BV.scatter_add_(
            1, tokens_B.unsqueeze(1), self.output_BV.new_ones(len(tokens_B), 1)
        )

    def penalise(self, logits_BV: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
        """Repetition divides positive and multiplies negative logits of every token seen (CTRL,
        arXiv 1909.05858); presence and frequency subtract for sampled tokens only, as OpenAI
        defines them."""
        repetition, presence, frequency = penalties
        seen_BV = self.prompt_BV | (self.output_BV > 0)
        scaled_BV = torch.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
        logits_BV = torch.where(seen_BV, scaled_BV, logits_BV)
        return logits_BV - presence * (self.output_BV > 0) - frequency * self.output_BV


def draw(
    logits_BV: torch.Tensor,
    table: SamplingTable,
    counters_B: np.ndarray,
    counts: TokenCounts | None = None,
) -> Drawn:
    """Sample the next token of every row.

    ``counters_B`` int64 [B] counts the tokens each row has sampled; ``counts`` is needed where the
    table has penalties. A row whose logits are not finite gets a log-prob that is not finite: the
    caller must check.
    """
    logits_BV = _shifted(logits_BV.float(), table, counters_B)
    if table.penalties is not None and counts is not None:
        logits_BV = counts.penalise(logits_BV, table.penalties)
    if table.temperature is not None:
        logits_BV = logits_BV / table.temperature
    logp_BV = torch.log_softmax(_filtered(logits_BV, table), dim=-1)
    tokens_B = pick(logp_BV.exp(), uniforms(table.streams, counters_B)).to(logp_BV.device)
    if table.greedy is not None:
        tokens_B = torch.where(table.greedy, logits_BV.argmax(dim=-1), tokens_B)
        logp_BV = torch.where(
            table.greedy.unsqueeze(1), torch.log_softmax(logits_BV, dim=-1), logp_BV
        )
    logprobs_B = logp_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
    if not table.top:
        return Drawn(tokens_B, logprobs_B)
    top_logprobs, top_tokens = logp_BV.topk(min(table.top, logp_BV.shape[1]), dim=-1)
    return Drawn(tokens_B, logprobs_B, top_tokens, top_logprobs)


def pick(probs_BV: torch.Tensor, u_B: np.ndarray) -> torch.Tensor:
    """The token whose interval of the cumulative distribution contains ``u_B`` (float64 [B] in [0,
    1)); int64 [B].

    The sums are in float64, so that tokens below float32 resolution keep their probability; on the
    CPU where the device has no float64 (MPS).
    """
    if probs_BV.device.type == "mps":
        probs_BV = probs_BV.cpu()
    cumulative_BV = torch.cumsum(probs_BV, dim=-1, dtype=torch.float64)
    total_B1 = cumulative_BV[:, -1:]
    u_B1 = torch.from_numpy(u_B).to(probs_BV.device).unsqueeze(1)
    # Strictly below the total, and the first entry strictly above: a token of probability 0 is
    # never sampled.
    target_B1 = torch.minimum(
        u_B1 * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1))
    )
    return (
        torch.searchsorted(cumulative_BV, target_B1, right=True)
        .squeeze(1)
        .clamp_(max=probs_BV.shape[1] - 1)
    )


def _shifted(logits_BV: torch.Tensor, table: SamplingTable, counters_B: np.ndarray) -> torch.Tensor:
    """``logits_BV`` with biases added, and -inf for stop tokens of rows below ``min_tokens``."""
    if table.bias is not None:
        rows, columns, values = table.bias
        logits_BV = logits_BV.index_put((rows, columns), values, accumulate=True)
    early = [
        (row, token)
        for row, least, ends in table.early
        if counters_B[row] < least
        for token in ends
    ]
    if early:
        rows, columns = torch.tensor(early, device=logits_BV.device).T
        logits_BV = logits_BV.index_put((rows, columns), logits_BV.new_tensor(-torch.inf))
    return logits_BV


def _filtered(logits_BV: torch.Tensor, table: SamplingTable) -> torch.Tensor:
    """``logits_BV`` with -inf where min_p, top_k or top_p exclude a token."""
    if table.min_p is not None:
        probs_BV = logits_BV.softmax(dim=-1)
        below_BV = probs_BV < table.min_p * probs_BV.amax(dim=-1, keepdim=True)
        logits_BV = logits_BV.masked_fill(below_BV, -torch.inf)
    if table.top_k is None and table.top_p is None:
        return logits_BV
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    drop_BV = torch.zeros_like(sorted_BV, dtype=torch.bool)
    if table.top_k is not None:
        drop_BV |= torch.arange(sorted_BV.shape[1], device=sorted_BV.device) >= table.top_k
        sorted_BV = sorted_BV.masked_fill(drop_BV, -torch.inf)
    if table.top_p is not None:
        probs_BV = sorted_BV.softmax(dim=-1)
        # A token stays while the mass before it is below top_p, so at least one token always stays.
        drop_BV |= (probs_BV.cumsum(dim=-1) - probs_BV) >= table.top_p.clamp(min=1e-9)
    return logits_BV.masked_fill(drop_BV.scatter(1, order_BV, drop_BV), -torch.inf)
