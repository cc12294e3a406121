"""The rows that decode together in the padded loop; used by one thread, without locks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from verifiers_trainer.engines.embedded.kv_cache import BatchCache
from verifiers_trainer.engines.embedded.sampling import SamplingTable, TokenCounts, draw
from verifiers_trainer.engines.embedded.transcript import Decode, Transcript
from verifiers_trainer.engines.requests import Generation, GenerationRequest, PromptLogprobs


class Batch:
    """Rows that decode together: their cache, sampling parameters and sampled tokens."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        cache: BatchCache,
        starts: torch.Tensor,
        decode: Decode,
        prompt_logprobs: Sequence[PromptLogprobs | None] | None = None,
    ):
        self.cache = cache
        self.starts = starts
        """int64 [B], first column of each row that is not padding."""
        self.deltas: torch.Tensor | None = None
        """int64 [B], how far the position of a row's next token is from its column, as images have
        fewer positions than tokens in some models; None where it is not in any row."""
        self.transcript = Transcript(requests, decode, prompt_logprobs)
        self.last = starts.new_zeros(len(requests), 1)
        """int64 [B, 1], the token each row sampled last; not yet in the cache."""
        self._counts: TokenCounts | None = None
        self._refresh()

    @property
    def rows(self) -> int:
        return len(self.transcript.requests)

    @property
    def living(self) -> int:
        return int(self.transcript.alive.sum())

    @property
    def longest(self) -> int:
        """Maximum number of columns that a living row may need."""
        return max((request.max_length for request in self.transcript.living_requests()), default=0)

    def sample(self, logits_BV: torch.Tensor, version: int) -> list[Generation]:
        """Sample the next token of every row; return the finished completions."""
        if self.table.penalties is not None and self._counts is None:
            prompts = [request.prompt_ids for request in self.transcript.requests]
            self._counts = TokenCounts(
                prompts, self.transcript.outputs(), logits_BV.shape[1], logits_BV.device
            )
        counters_B = torch.from_numpy(self.transcript.counts).to(logits_BV.device)
        drawn = draw(logits_BV, self.table, counters_B, self._counts)
        if self._counts is not None:
            self._counts.add(drawn.tokens)
        self.last = drawn.tokens.unsqueeze(1)
        return self.transcript.append(drawn, version)

    def compact(self) -> None:
        """Drop finished rows, and the columns that only they used."""
        rows = np.flatnonzero(self.transcript.alive)
        rows_on_device = torch.from_numpy(rows).to(self.starts.device)
        starts = self.starts[rows_on_device]
        cut = int(starts.min())
        self.cache.select(rows_on_device, cut)
        self.starts, self.last = starts - cut, self.last[rows_on_device]
        if self.deltas is not None:
            self.deltas = self.deltas[rows_on_device]
        self.transcript.select(rows)
        self._refresh()

    def join(self, other: Batch) -> None:
        """Add the rows of ``other``."""
        columns = max(self.cache.length, other.cache.length)
        mine, theirs = columns - self.cache.length, columns - other.cache.length
        if self.deltas is not None or other.deltas is not None:
            pairs = ((self.deltas, self.starts), (other.deltas, other.starts))
            self.deltas = torch.cat([torch.zeros_like(s) if d is None else d for d, s in pairs])
        self.starts = torch.cat([self.starts + mine, other.starts + theirs])
        self.last = torch.cat([self.last, other.last])
        self.cache.append_rows(other.cache)
        self.transcript.extend(other.transcript)
        self._refresh()

    def _refresh(self) -> None:
        self.padded = bool(self.starts.any())
        self.table = SamplingTable.build(
            [r.params for r in self.transcript.requests], self.starts.device
        )
        self._counts = None
