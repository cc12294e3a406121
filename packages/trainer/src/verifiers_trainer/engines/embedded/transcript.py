"""Sampled tokens of a batch as arrays: ids, log-probs, versions, and which rows are finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from verifiers_trainer.engines.embedded.sampling import Drawn
from verifiers_trainer.engines.requests import (
    Alternatives,
    FinishReason,
    Generation,
    GenerationRequest,
    PromptLogprobs,
)

Decode = Callable[[list[int]], str]

NOT_FINITE = (
    "the policy gave log-probabilities that are not finite numbers; its weights have diverged"
)


class Transcript:
    """Rows of a batch; ``alive`` bool [B] is False for a finished row until ``select`` drops it."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        decode: Decode,
        prompt_logprobs: Sequence[PromptLogprobs | None] | None = None,
    ):
        rows = len(requests)
        self._decode = decode
        self.requests = list(requests)
        self.alive = np.ones(rows, bool)
        self.counts = np.zeros(rows, np.int64)
        self._tokens = np.zeros((rows, 64), np.int32)
        self._logprobs = np.zeros((rows, 64), np.float32)
        self._versions = np.zeros((rows, 64), np.int32)
        self._prompts = list(prompt_logprobs or [None] * rows)
        self._alternatives: list[list[Alternatives]] = [[] for _ in requests]
        self._index_rules()

    def _index_rules(self) -> None:
        params = [request.params for request in self.requests]
        self._least = np.array([p.min_tokens for p in params], np.int64)
        self._limits = np.array([p.max_tokens for p in params], np.int64)
        width = max((len(p.stop_token_ids) for p in params), default=0)
        self._stop_ids = np.full((len(params), width), -1, np.int64)
        for row, p in enumerate(params):
            self._stop_ids[row, : len(p.stop_token_ids)] = p.stop_token_ids
        self._text_rows = [row for row, p in enumerate(params) if p.stop]
        self._top_rows = [row for row, p in enumerate(params) if p.top_logprobs]

    def append(self, drawn: Drawn, version: int) -> list[Generation]:
        """Record one token per living row; return the finished completions."""
        if self.counts.max(initial=0) >= self._tokens.shape[1]:
            self._widen(2 * self._tokens.shape[1])
        tokens_B, logprobs_B = drawn.tokens.cpu().numpy(), drawn.logprobs.cpu().numpy()
        for row in self._top_rows:
            if self.alive[row]:
                top = self.requests[row].params.top_logprobs
                self._alternatives[row].append(alternatives(drawn, row, top))
        rows = np.flatnonzero(self.alive)
        columns = self.counts[rows]
        self._tokens[rows, columns] = tokens_B[rows]
        self._logprobs[rows, columns] = logprobs_B[rows]
        self._versions[rows, columns] = version
        self.counts[rows] += 1
        stopped_B = (self._stop_ids == tokens_B[:, None]).any(axis=1)
        full_B = self.counts >= self._limits
        broken_B = ~np.isfinite(logprobs_B)
        texts = {row: self._stop_text(row) for row in self._text_rows if self.alive[row]}
        text_B = np.zeros(len(self.requests), bool)
        text_B[[row for row, text in texts.items() if text is not None]] = True
        done = np.flatnonzero(self.alive & (stopped_B | full_B | broken_B | text_B))
        finished = []
        for row in done.tolist():
            reason: FinishReason = "stop" if stopped_B[row] or text_B[row] else "length"
            error = NOT_FINITE if broken_B[row] else None
            finished.append(self.finish(row, reason, stop_text=texts.get(row), error=error))
        for row in np.flatnonzero(self.alive).tolist():
            if (on_token := self.requests[row].on_token) is not None:
                best = self._alternatives[row][-1] if self._alternatives[row] else None
                on_token(int(tokens_B[row]), float(logprobs_B[row]), best)
        return finished

    def finish(
        self,
        row: int,
        reason: FinishReason,
        *,
        stop_text: str | None = None,
        error: str | None = None,
    ) -> Generation:
        """Mark a row finished and return its completion."""
        self.alive[row] = False
        count, request = self.counts[row], self.requests[row]
        versions = self._versions[row, :count].copy()
        if request.adapter is not None and request.adapter.version is not None:
            versions[:] = request.adapter.version
        return Generation(
            request=request,
            token_ids=self._tokens[row, :count].copy(),
            logprobs=self._logprobs[row, :count].copy(),
            versions=versions,
            finish_reason=reason,
            alternatives=self._alternatives[row],
            prompt_logprobs=self._prompts[row],
            stop_text=stop_text,
            error=error,
        )

    def living_requests(self) -> list[GenerationRequest]:
        return [request for request, alive in zip(self.requests, self.alive, strict=True) if alive]

    def outputs(self) -> list[np.ndarray]:
        """Tokens of every row so far, int32 [T] each."""
        return [self._tokens[row, :count] for row, count in enumerate(self.counts)]

    def select(self, rows: np.ndarray) -> None:
        """Keep ``rows`` only."""
        for name in ("requests", "_prompts", "_alternatives"):
            setattr(self, name, [getattr(self, name)[row] for row in rows])
        for name in ("alive", "counts", "_tokens", "_logprobs", "_versions"):
            setattr(self, name, getattr(self, name)[rows])
        self._index_rules()

    def extend(self, other: Transcript) -> None:
        """Append the rows of ``other``."""
        width = max(self._tokens.shape[1], other._tokens.shape[1])
        for part in (self, other):
            part._widen(width)
        for name in ("requests", "_prompts", "_alternatives"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("alive", "counts", "_tokens", "_logprobs", "_versions"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))
        self._index_rules()

    def _widen(self, width: int) -> None:
        missing = width - self._tokens.shape[1]
        if missing > 0:
            for name in ("_tokens", "_logprobs", "_versions"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, missing))))

    def _stop_text(self, row: int) -> str | None:
        count = self.counts[row]
        if count < self._least[row]:
            return None
        return completed_stop_text(
            self._tokens[row, :count], self.requests[row].params.stop, self._decode
        )


def alternatives(drawn: Drawn, row: int, count: int) -> Alternatives:
    """The ``count`` most likely tokens of a row; the sampling table must report alternatives."""
    assert drawn.top_tokens is not None
    assert drawn.top_logprobs is not None
    return Alternatives(
        drawn.top_tokens[row, :count].cpu().numpy().astype(np.int32),
        drawn.top_logprobs[row, :count].cpu().numpy(),
    )


def completed_stop_text(tokens_T: np.ndarray, stops: tuple[str, ...], decode: Decode) -> str | None:
    """The stop text that the last token completed (the text that begins first), or None.

    Only the tail is decoded: a text token has at least one byte, so a stop text of n bytes is
    within the last n tokens, plus the token it begins inside and a few tokens without text.
    """
    window = max(len(stop.encode()) for stop in stops) + 4
    tail = decode(tokens_T[-window:].tolist())
    candidates = [stop for stop in stops if stop in tail]
    if not candidates:
        return None
    before = decode(tokens_T[-window:-1].tolist())
    completed = [
        (tail.rfind(stop), stop) for stop in candidates if tail.count(stop) > before.count(stop)
    ]
    return min(completed)[1] if completed else None
