"""Sample one token per row from a batch of logits, each row with its own parameters, vectorised
over rows.

The returned log-prob is of the sampled distribution: penalties, temperature and filters applied, in
float32. Greedy rows (temperature 0) report their token's log-prob at temperature 1. The order is
vLLM's: biases, ends excluded by ``min_tokens``, penalties, temperature, min_p, top_k, top_p.

Randomness is counter based: the uniform number of token ``n`` of a request is a hash of (request
seed, n). A draw depends on the row's logits, parameters and seed alone, not on other rows or
earlier draws; there is no generator state, and a whole batch is hashed at once.

Everything stays on the device, and nothing on the host depends on what is drawn: a CUDA graph can
hold a draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from verifiers_trainer.engines.requests import SamplingParams

_MASK64 = (1 << 64) - 1


def _signed(value: int) -> int:
    """64 bits as a signed integer: torch has no unsigned arithmetic, and its int64 wraps around."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


_GAMMA, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def uniforms(streams_B: torch.Tensor, counters_B: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64 [B], one per (stream, counter), both int64; on the
    CPU where the device has no float64 (MPS).

    Source: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014), used as a function of the counter.
    """
    mixed = _mix(streams_B + (counters_B + 1) * _GAMMA)
    if mixed.device.type == "mps":
        mixed = mixed.cpu()
    return _shifted_right(mixed, 11).double() * 2.0**-53


def streams(seeds: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """The stream of each seed, int64 [B]; hashed, so that neighbouring seeds share no numbers."""
    seeds_B = torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device)
    return _mix(_mix(seeds_B ^ _GAMMA) + _GAMMA)


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shifted_right(z, 30)) * _FIRST
    z = (z ^ _shifted_right(z, 27)) * _SECOND
    return z ^ _shifted_right(z, 31)


def _shifted_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """As of an unsigned number: zeros come in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


Entries = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows and columns of single logits, int64 [N], and a number for each, [N]."""


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """The parameters of a batch as columns; a column that no row uses is None and costs nothing."""

    streams: torch.Tensor
    """int64 [B]."""
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
    bias: Entries | None
    """With addends, float32."""
    early: Entries | None
    """Ids that would end a row, with its min_tokens, int64."""
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
            streams=streams([p.seed for p in params], device),
            temperature=column([p.temperature or 1.0 for p in params], 1.0),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_k=column([p.top_k or 2**40 for p in params], 2**40, torch.int64),
            top_p=column([p.top_p for p in params], 1.0),
            min_p=column([p.min_p for p in params], 0.0),
            penalties=torch.tensor(penalties, device=device).T.unsqueeze(2) if penalised else None,
            bias=_entries(
                [(row, *entry) for row, p in enumerate(params) for entry in p.logit_bias],
                torch.float32,
                device,
            ),
            early=_entries(
                [
                    (row, token, p.min_tokens)
                    for row, p in enumerate(params)
                    if p.min_tokens
                    for token in p.stop_token_ids
                ],
                torch.int64,
                device,
            ),
            top=max((p.top_logprobs for p in params), default=0),
        )

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """The columns that depend on the parameters, in order."""
        columns = (self.streams, self.temperature, self.greedy, self.top_k, self.top_p, self.min_p)
        return [*columns, self.penalties, *(self.bias or [None]), *(self.early or [None])]

    @property
    def form(self) -> tuple[Any, ...]:
        """What two tables must have in common for ``copy_from``."""
        return (self.top, *(None if c is None else tuple(c.shape) for c in self.tensors))

    def copy_from(self, other: SamplingTable) -> None:
        """Take the values of a table of the same ``form``, in place."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)


def _entries(
    entries: list[tuple[int, int, object]], dtype: torch.dtype, device: torch.device
) -> Entries | None:
    """``entries`` as columns, filled up to a power of two with zeros, which change nothing: so that
    few forms occur."""
    if not entries:
        return None
    filled = entries + [(0, 0, 0)] * ((1 << (len(entries) - 1).bit_length()) - len(entries))
    rows, tokens, values = zip(*filled, strict=True)
    return (
        torch.tensor(rows, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(values, dtype=dtype, device=device),
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

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Drawn:
        """``change`` of every tensor."""
        top = [None if part is None else change(part) for part in self[2:]]
        return Drawn(change(self.tokens), change(self.logprobs), *top)


class TokenCounts:
    """Token occurrences of each row, for penalties: a prompt's as a set, sampled tokens counted."""

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

    def copy_from(self, other: TokenCounts) -> None:
        """Take the counts of as many rows, in place."""
        self.prompt_BV.copy_(other.prompt_BV)
        self.output_BV.copy_(other.output_BV)

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
    counters_B: torch.Tensor,
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


def pick(probs_BV: torch.Tensor, u_B: torch.Tensor) -> torch.Tensor:
    """The token whose interval of the cumulative distribution contains ``u_B`` (float64 [B] in [0,
    1)); int64 [B].

    The sums are in float64, so that tokens below float32 resolution keep their probability; on the
    CPU where the device has no float64 (MPS).
    """
    if probs_BV.device.type == "mps":
        probs_BV = probs_BV.cpu()
    cumulative_BV = torch.cumsum(probs_BV, dim=-1, dtype=torch.float64)
    total_B1 = cumulative_BV[:, -1:]
    u_B1 = u_B.unsqueeze(1)
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


def _shifted(
    logits_BV: torch.Tensor, table: SamplingTable, counters_B: torch.Tensor
) -> torch.Tensor:
    """``logits_BV`` with biases added, and -inf for stop tokens of rows below ``min_tokens``."""
    if table.bias is not None:
        rows, columns, values = table.bias
        logits_BV = logits_BV.index_put((rows, columns), values, accumulate=True)
    if table.early is not None:
        rows, columns, least = table.early
        ends = torch.zeros_like(logits_BV).index_put(
            (rows, columns), (counters_B[rows] < least).to(logits_BV.dtype), accumulate=True
        )
        logits_BV = logits_BV.masked_fill(ends > 0, -torch.inf)
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
