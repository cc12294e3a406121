"""Generation in one left-padded batch: rows leave when they finish and new ones join between two steps.

All rows end in the same cache column, so a decoding step is one forward pass of one column. Equal prompts that join
together are prefilled once. With ``max_rows=1`` this is the deterministic mode: one request at a time, in a cache of
its own, so that nothing but weights, prompt, rules and seed reaches the arithmetic.

A cache belongs to one row and dies with it: no later request reads keys computed under older weights. A row that
lives through a weight update keeps its old keys and continues under the new weights.

Not done here: speculative decoding, sharing of prefixes between batches, models with recurrent state.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from verifiers.errors import ModelUnavailable
from verifiers_trainer.engines.batch import Batch
from verifiers_trainer.engines.gate import GateClosed, StepGate
from verifiers_trainer.engines.inbox import Inbox
from verifiers_trainer.engines.kv_cache import BatchCache
from verifiers_trainer.engines.model_inputs import ForwardPass
from verifiers_trainer.engines.requests import Generation, GenerationRequest, OnFinished
from verifiers_trainer.engines.transcript import Decode

logger = logging.getLogger(__name__)

STOPPED = "the engine was stopped"


class PaddedGenerator:
    """The generation loop over one ``Batch``.

    ``version`` answers the policy version now; ``max_rows`` bounds the rows that decode together and ``kv_bytes``
    the memory their caches may come to take (a single request is always admitted); ``max_prefill_tokens`` bounds
    the tokens of one prefill and with it the longest a pause has to wait.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        decode: Decode,
        version: Callable[[], int],
        max_rows: int,
        kv_bytes: int,
        max_prefill_tokens: int,
        autocast_dtype: torch.dtype | None = None,
    ):
        self._forward = ForwardPass(model, autocast_dtype)
        self._device = next(model.parameters()).device
        self._decode_text = decode
        self._version = version
        self._max_rows = max_rows
        self._kv_bytes = kv_bytes
        self._max_prefill_tokens = max_prefill_tokens
        self._gate = StepGate()
        self._inbox = Inbox(gather=max_rows > 1)
        self._batch: Batch | None = None
        self._thread: threading.Thread | None = None

    def start(self, on_finished: OnFinished, deadline_s: float) -> None:
        """Measure the cache of one token with a forward pass, then serve."""
        self._on_finished = on_finished
        with torch.inference_mode():
            cache = BatchCache()
            self._forward(torch.zeros(1, 1, dtype=torch.int64, device=self._device), cache, None)
        self._token_bytes = max(1, cache.bytes_per_token)
        self._thread = threading.Thread(target=self._run, name="vf-generate", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._gate.close()
        waiting = self._inbox.close()
        if self._thread is not None:
            self._thread.join()
        self._report([Generation(request, error=STOPPED) for request in waiting])

    def submit(self, request: GenerationRequest) -> None:
        if not self.alive or not self._inbox.put(request):
            raise ModelUnavailable("the embedded engine is not running")

    def abort(self, request_id: str) -> None:
        self._inbox.abort(request_id)

    def pause(self) -> AbstractContextManager[None]:
        return self._gate.pause()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        with torch.inference_mode():
            try:
                while (joining := self._inbox.take(self._living, self._admission())) is not None:
                    self._drop_aborted()
                    if joining:
                        with self._step(joining):
                            self._prefill(joining)
                    if self._batch is not None:
                        with self._step([]):
                            self._decode(self._batch)
            except GateClosed:
                pass  # the loop's regular end while a pause holds it
            finally:
                self._fail([], STOPPED)

    @property
    def _living(self) -> int:
        return self._batch.living if self._batch is not None else 0

    def _admission(self) -> Callable[[GenerationRequest], bool]:
        """A function that says, request by request, whether one more may join now."""
        rows = self._living
        longest = self._batch.longest if self._batch is not None else 0
        prompts: set[bytes] = set()
        width = 0

        def admit(request: GenerationRequest) -> bool:
            nonlocal rows, longest, width
            new_longest = max(longest, request.max_length)
            new_width = max(width, len(request.prompt_ids))
            new_prompts = prompts | {request.prompt_ids.tobytes()}
            if rows and (rows + 1) * new_longest * self._token_bytes > self._kv_bytes:
                return False
            if prompts and len(new_prompts) * new_width > self._max_prefill_tokens:
                return False
            if rows >= self._max_rows:
                return False
            rows, longest, width = rows + 1, new_longest, new_width
            prompts.add(request.prompt_ids.tobytes())
            return True

        return admit

    @contextmanager
    def _step(self, joining: list[GenerationRequest]) -> Iterator[None]:
        """One step under the gate. A failure (out of memory, a bug in a model) fails ``joining`` and everything in
        flight, whose caches can no longer be trusted; the loop goes on with what comes next."""
        with self._gate.step():
            try:
                yield
            except Exception as error:  # whatever it is, it is logged and reported to every request it belongs to
                logger.exception("a generation step failed")
                self._fail(joining, f"{type(error).__name__}: {error}")

    def _fail(self, joining: list[GenerationRequest], error: str) -> None:
        batch, self._batch = self._batch, None
        running = batch.transcript.living_requests() if batch is not None else []
        self._report([Generation(request, error=error) for request in dict.fromkeys([*joining, *running])])

    def _prefill(self, requests: list[GenerationRequest]) -> None:
        """Compute the prompts, sample each row's first token and join the running batch."""
        unique = {request.prompt_ids.tobytes(): request.prompt_ids for request in requests}
        index = {key: row for row, key in enumerate(unique)}
        width = max(len(ids) for ids in unique.values())
        ids_NT = np.zeros((len(unique), width), np.int64)
        for row, ids in enumerate(unique.values()):
            ids_NT[row, width - len(ids) :] = ids
        starts_N = torch.tensor([width - len(ids) for ids in unique.values()], device=self._device)
        cache = BatchCache()
        ragged = min(len(ids) for ids in unique.values()) < width
        logits_NV = self._forward(torch.from_numpy(ids_NT).to(self._device), cache, starts_N if ragged else None)
        rows_B = torch.tensor([index[request.prompt_ids.tobytes()] for request in requests], device=self._device)
        if len(unique) < len(requests):
            cache.select(rows_B)
        joining = Batch(requests, cache, starts_N[rows_B], self._decode_text)
        finished = joining.sample(logits_NV[rows_B], self._version())
        self._merge(joining)
        self._report(finished)

    def _merge(self, joining: Batch) -> None:
        if joining.living == 0:
            return
        if joining.living < joining.rows:
            joining.compact()
        if self._batch is None:
            self._batch = joining
            return
        if self._batch.living < self._batch.rows:
            self._batch.compact()
        self._batch.join(joining)

    def _decode(self, batch: Batch) -> None:
        """One more token for every row."""
        logits_BV = self._forward(batch.last, batch.cache, batch.starts if batch.padded else None)
        finished = batch.sample(logits_BV, self._version())
        self._settle()
        self._report(finished)

    def _settle(self) -> None:
        batch = self._batch
        if batch is None:
            return
        if batch.living == 0:
            self._batch = None
        elif batch.worth_compacting():
            batch.compact()

    def _report(self, finished: list[Generation]) -> None:
        if finished:
            self._on_finished(finished)

    def _drop_aborted(self) -> None:
        aborted = self._inbox.take_aborted()
        if not aborted or self._batch is None:
            return
        transcript = self._batch.transcript
        rows = [row for row, r in enumerate(transcript.requests) if transcript.alive[row] and r.request_id in aborted]
        self._report([transcript.finish(row, "abort") for row in rows])
        self._settle()
