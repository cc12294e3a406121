"""What a batch has sampled so far, as arrays: tokens, log-probs, versions, and which rows are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from verifiers_trainer.engines.requests import FinishReason, Generation, GenerationRequest

Decode = Callable[[list[int]], str]

NOT_FINITE = "the policy gave log-probabilities that are not finite numbers; its weights have diverged"


class Transcript:
    """Rows of a batch; ``alive`` bool [B] is False for a finished row until it is selected away."""

    def __init__(self, requests: Sequence[GenerationRequest], decode: Decode):
        rows = len(requests)
        self._decode = decode
        self.requests = list(requests)
        self.alive = np.ones(rows, bool)
        self.counts = np.zeros(rows, np.int64)
        self._tokens = np.zeros((rows, 64), np.int32)
        self._logprobs = np.zeros((rows, 64), np.float32)
        self._versions = np.zeros((rows, 64), np.int32)
        self._index_rules()

    def _index_rules(self) -> None:
        params = [request.params for request in self.requests]
        self._limits = np.array([p.max_tokens for p in params], np.int64)
        width = max((len(p.stop_token_ids) for p in params), default=0)
        self._stop_ids = np.full((len(params), width), -1, np.int64)
        for row, p in enumerate(params):
            self._stop_ids[row, : len(p.stop_token_ids)] = p.stop_token_ids
        self._text_rows = [row for row, p in enumerate(params) if p.stop]

    def append(self, tokens_B: np.ndarray, logprobs_B: np.ndarray, version: int) -> list[Generation]:
        """Record one token per living row; returns the completions this finished."""
        self._reserve()
        rows = np.flatnonzero(self.alive)
        columns = self.counts[rows]
        self._tokens[rows, columns] = tokens_B[rows]
        self._logprobs[rows, columns] = logprobs_B[rows]
        self._versions[rows, columns] = version
        self.counts[rows] += 1
        stopped_B = (self._stop_ids == tokens_B[:, None]).any(axis=1)
        full_B = self.counts >= self._limits
        broken_B = ~np.isfinite(logprobs_B)
        text_B = np.zeros(len(self.requests), bool)
        for row in self._text_rows:
            text_B[row] = self.alive[row] and self._ends_with_stop_text(row)
        done = np.flatnonzero(self.alive & (stopped_B | full_B | broken_B | text_B))
        finished = []
        for row in done.tolist():
            reason: FinishReason = "stop" if stopped_B[row] or text_B[row] else "length"
            error = NOT_FINITE if broken_B[row] else None
            finished.append(self.finish(row, reason, stopped_by_text=bool(text_B[row]), error=error))
        return finished

    def finish(
        self, row: int, reason: FinishReason, *, stopped_by_text: bool = False, error: str | None = None
    ) -> Generation:
        """Close a row and return what it holds."""
        self.alive[row] = False
        count = self.counts[row]
        return Generation(
            request=self.requests[row],
            token_ids=self._tokens[row, :count].copy(),
            logprobs=self._logprobs[row, :count].copy(),
            versions=self._versions[row, :count].copy(),
            finish_reason=reason,
            stopped_by_text=stopped_by_text,
            error=error,
        )

    def living_requests(self) -> list[GenerationRequest]:
        return [request for request, alive in zip(self.requests, self.alive, strict=True) if alive]

    def outputs(self) -> list[np.ndarray]:
        """Tokens of every row so far, int32 [T] each."""
        return [self._tokens[row, :count] for row, count in enumerate(self.counts)]

    def select(self, rows: np.ndarray) -> None:
        """Keep ``rows`` only."""
        self.requests = [self.requests[row] for row in rows]
        for name in ("alive", "counts", "_tokens", "_logprobs", "_versions"):
            setattr(self, name, getattr(self, name)[rows])
        self._index_rules()

    def extend(self, other: Transcript) -> None:
        """Add the rows of ``other`` after mine."""
        width = max(self._tokens.shape[1], other._tokens.shape[1])
        self._widen(width)
        other._widen(width)
        self.requests += other.requests
        for name in ("alive", "counts", "_tokens", "_logprobs", "_versions"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))
        self._index_rules()

    def _reserve(self) -> None:
        if self.counts.max(initial=0) >= self._tokens.shape[1]:
            self._widen(2 * self._tokens.shape[1])

    def _widen(self, width: int) -> None:
        missing = width - self._tokens.shape[1]
        if missing > 0:
            for name in ("_tokens", "_logprobs", "_versions"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, missing))))

    def _ends_with_stop_text(self, row: int) -> bool:
        stops = self.requests[row].params.stop
        return ends_with_stop_text(self._tokens[row, : self.counts[row]], stops, self._decode)


def ends_with_stop_text(tokens_T: np.ndarray, stops: tuple[str, ...], decode: Decode) -> bool:
    """Whether the last token completed one of ``stops``.

    Only the tail is decoded: every token of text spells at least one byte, so a stop text of n bytes is spelt by
    the last n tokens, plus the one it begins inside and a few that spell nothing.
    """
    window = max(len(stop.encode()) for stop in stops) + 4
    tail = decode(tokens_T[-window:].tolist())
    return any(stop in tail for stop in stops)
