"""Generation in one left-padded batch: rows leave when they finish and new rows join between two
steps.

All rows end in the same cache column, so a decoding step is one forward pass of one column. Of
prompts that join together, equal prompts are prefilled once, and so are the tokens with which all
of a pass begin (solved examples). With ``max_rows=1`` this is the deterministic mode: one request
at a time with a separate cache, so that the result depends on weights, prompt, sampling parameters
and seed alone.

A row's cache is freed with the row: no later request reads keys computed under older weights. A row
that is running during a weight update keeps its old keys and continues under the new weights.

A pause does not wait for a long forward pass: the pass is aborted between two layers and repeated
afterwards, at most ``_MAX_INTERRUPTIONS`` times in a row to guarantee progress. Sampling tokens
needs no weights and no pause.

Rows of a model with states (linear attention, Mamba, convolutions) carry a copy of the state, which
siblings get from their prompt. What its class does wrong with padding is measured at the start, and
such rows are computed by length.

Not supported: speculative decoding, prefixes kept from one prefill to the next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from verifiers.clients.serving import STOP_S
from verifiers.errors import ModelUnavailable
from verifiers_trainer.engines.embedded.batch import Batch
from verifiers_trainer.engines.embedded.cache_checks import CacheAbilities, measured
from verifiers_trainer.engines.embedded.gate import GateClosed, StepGate
from verifiers_trainer.engines.embedded.inbox import Inbox
from verifiers_trainer.engines.embedded.kv_cache import BatchCache
from verifiers_trainer.engines.embedded.model_inputs import NOTHING, ForwardPass, Interrupted
from verifiers_trainer.engines.embedded.transcript import Decode
from verifiers_trainer.engines.requests import (
    Alternatives,
    Generation,
    GenerationRequest,
    OnFinished,
    PromptKey,
    PromptLogprobs,
)

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel

logger = logging.getLogger(__name__)

STOPPED = "the engine was stopped"
_COMPACT_BELOW = 0.75
_MAX_INTERRUPTIONS = 3
_PASSES_TO_JOIN = 4
_SHORTEST_PREFIX = 16
_PROMPT_TOKENS_SCORED = 256
"""Tokens of a prompt whose log-probs are computed at once: it bounds the memory of the logits."""
Computed = TypeVar("Computed")


class PaddedGenerator:
    """The generation loop over one ``Batch``.

    ``version`` returns the present policy version; ``max_rows`` bounds the rows that decode
    together and ``kv_bytes`` the memory of their caches (a single request is always admitted);
    ``max_batch_tokens`` bounds the tokens of a prefill pass, unless a single prompt is longer.
    Running rows wait for ``_PASSES_TO_JOIN`` such passes at most.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        decode: Decode,
        version: Callable[[], int],
        max_rows: int,
        kv_bytes: int,
        max_batch_tokens: int,
        autocast_dtype: torch.dtype | None = None,
    ):
        self._gate = StepGate()
        self._forward = ForwardPass(model, autocast_dtype, self._gives_up)
        self._abilities, self._has_states = CacheAbilities(), self._forward.has_states
        self._new_cache = self._forward.new_cache
        self._with_adapters = self._forward.with_adapters
        self._vocabulary: int = model.config.get_text_config().vocab_size
        self._device = next(model.parameters()).device
        self._decode_text = decode
        self._version = version
        self._max_rows = max_rows
        self._kv_bytes = kv_bytes
        self._max_batch_tokens = max_batch_tokens
        self._interruptions = 0
        self._inbox = Inbox(gather=max_rows > 1)
        self._batch: Batch | None = None
        self._thread: threading.Thread | None = None

    def start(self, on_finished: OnFinished, deadline_s: float) -> None:
        """Measure what the model's cache can do, and the memory of a token, then serve.

        Raises ConfigError for a model that computes something else with a cache than without.
        """
        self._on_finished = on_finished
        with torch.inference_mode():
            if not self._forward.takes_ready_mask:
                self._abilities = measured(self._forward, self._vocabulary, self._device)
                if missing := self._abilities.missing:
                    logger.info("%s: %s", self._forward.name, missing)
            cache = self._new_cache()
            self._forward(torch.zeros(1, 1, dtype=torch.int64, device=self._device), cache, None)
            self._prepare(cache)
        self._thread = threading.Thread(target=self._run, name="vf-generate", daemon=True)
        self._thread.start()

    def _prepare(self, cache: BatchCache) -> None:
        """Plan the memory by the ``cache`` of a token."""
        self._token_bytes, self._row_bytes = max(1, cache.bytes_per_token), cache.bytes_per_row

    def stop(self) -> None:
        self._gate.close()
        waiting = self._inbox.close()
        if self._thread is not None:
            self._thread.join(STOP_S)
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
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread's streams and events
        with torch.inference_mode():
            try:
                while (joining := self._inbox.take(self._living, self._admission())) is not None:
                    self._drop_aborted()
                    if joining:
                        self._step(joining)
                    if self._batch is not None:
                        self._step([])
            except GateClosed:
                pass  # ``stop`` during a pause: the regular end of the loop
            finally:
                self._fail([], STOPPED)

    @property
    def _living(self) -> int:
        return self._batch.living if self._batch is not None else 0

    def _admission(self) -> Callable[[GenerationRequest], bool]:
        """A function that decides for each request whether it may join now."""
        rows = self._living
        longest = self._batch.longest if self._batch is not None else 0
        is_running = self._batch is not None
        prompts: set[PromptKey] = set()
        width = 0

        def admit(request: GenerationRequest) -> bool:
            nonlocal rows, longest, width
            new_longest = max(longest, request.max_length)
            new_width = max(width, len(request.prompt_ids))
            new_prompts = prompts | {request.prompt_key}
            row_bytes = new_longest * self._token_bytes + self._row_bytes
            if rows and (rows + 1) * row_bytes > self._kv_bytes:
                return False
            if not self._abilities.joins and (
                is_running or width not in (0, len(request.prompt_ids))
            ):
                return False
            if prompts and len(new_prompts) * new_width > _PASSES_TO_JOIN * self._max_batch_tokens:
                return False
            if rows >= self._max_rows:
                return False
            rows, longest, width = rows + 1, new_longest, new_width
            prompts.add(request.prompt_key)
            return True

        return admit

    def _step(self, joining: list[GenerationRequest]) -> None:
        """Prefill ``joining``, or decode one step when it is empty. A failure (out of memory, a bug
        in a model) fails ``joining`` and all requests in flight, whose caches may be inconsistent;
        the loop continues.
        """
        try:
            if joining:
                self._join(joining)
            elif self._batch is not None:
                self._decode(self._batch)
        except GateClosed:
            self._fail(joining, STOPPED)
            raise
        except Exception as error:  # logged, and reported to every affected request
            logger.exception("a generation step failed")
            less = ""
            if isinstance(error, torch.OutOfMemoryError):
                less = "; lower embedded_concurrency (rows) or embedded_max_batch_tokens (prompts)"
            self._fail(joining, f"{type(error).__name__}: {error}{less}")

    def _compute(self, passes: Callable[[], Computed]) -> tuple[Computed, int]:
        """Run ``passes`` outside of pauses, under one policy version; return the result and that
        version.

        When a pause interrupts it, it is repeated after the pause.
        """
        self._interruptions = 0
        while True:
            with self._gate.step():
                try:
                    return passes(), self._version()
                except Interrupted:
                    self._interruptions += 1

    def _gives_up(self) -> bool:
        return self._gate.is_pause_pending and self._interruptions < _MAX_INTERRUPTIONS

    def _fail(self, joining: list[GenerationRequest], error: str) -> None:
        batch, self._batch = self._batch, None
        running = batch.transcript.living_requests() if batch is not None else []
        self._report(
            [Generation(request, error=error) for request in dict.fromkeys([*joining, *running])]
        )

    def _join(self, requests: list[GenerationRequest]) -> None:
        """Prefill ``requests`` in passes of similar length; rows that continue join the batch."""
        joined: Batch | None = None
        for part in self._passes(requests):
            joining = self._prefill(part)
            if joining.living == 0:
                continue
            if joining.living < joining.rows:
                joining.compact()
            if joined is None:
                joined = joining
            else:
                joined.join(joining)
        if joined is None:
            return
        self._drain()
        if self._batch is None or self._batch.living == 0:
            self._batch = self._opened(joined)
            return
        if self._batch.living < self._batch.rows:
            self._batch.compact()
        self._batch.join(joined)

    def _passes(self, requests: list[GenerationRequest]) -> Iterator[list[GenerationRequest]]:
        """``requests`` by length, ``max_batch_tokens`` padded tokens at a time; equal prompts stay
        together, and a prompt with images is alone: its pixels have a shape of their own."""
        siblings: dict[PromptKey, list[GenerationRequest]] = {}
        for request in sorted(requests, key=lambda request: len(request.prompt_ids)):
            siblings.setdefault(request.prompt_key, []).append(request)
        part: list[GenerationRequest] = []
        prompts = 0
        for group in siblings.values():
            width = len(group[0].prompt_ids)
            is_full = (prompts + 1) * width > self._max_batch_tokens
            if not self._abilities.pads and part:
                is_full |= len(part[0].prompt_ids) != width
            is_full |= bool(group[0].images or (part and part[0].images))
            if part and is_full:
                yield part
                part, prompts = [], 0
            part, prompts = part + group, prompts + 1
        yield part

    def _prefill(self, requests: list[GenerationRequest]) -> Batch:
        """Compute the prompts in one pass and sample each row's first token."""
        unique = {request.prompt_key: request.prompt_ids for request in requests}
        index = {key: row for row, key in enumerate(unique)}
        width = max(len(ids) for ids in unique.values())
        ids_NT = np.zeros((len(unique), width), np.int64)
        for row, ids in enumerate(unique.values()):
            ids_NT[row, width - len(ids) :] = ids
        starts = [width - len(ids) for ids in unique.values()]
        starts_N = torch.tensor(starts, device=self._device)
        ids_NT_on_device = torch.from_numpy(ids_NT).to(self._device)
        # a state cannot go back to where a longer prompt still shares its beginning
        adapters = [adapter for _, _, adapter in unique]
        is_shareable = self._abilities.continues and not self._has_states
        is_shareable &= len(set(adapters)) == 1  # keys are of the adapter that computed them
        shared = _shared_prefix(list(unique.values())) if is_shareable else 0
        prefix_1P = torch.from_numpy(ids_NT[:1, starts[0] :][:, :shared]).to(self._device)
        arguments, delta = NOTHING, 0
        if images := requests[0].images:
            arguments, delta = self._forward.of_images(ids_NT_on_device, images)

        def passes() -> tuple[torch.Tensor, BatchCache, list[PromptLogprobs | None]]:
            cache = self._new_cache()
            if shared:
                with self._with_adapters(adapters[:1]):
                    self._forward(prefix_1P, cache, None)
                cache.repeat_shifted(starts)
            rest_NT = ids_NT_on_device[:, shared:]
            padding = starts_N if any(starts) else None
            with self._with_adapters(adapters):
                logits_NV = self._forward(rest_NT, cache, padding, arguments=arguments)
            piece = _PROMPT_TOKENS_SCORED if self._abilities.continues else width
            scored = [
                score_prompt(self._forward, request, self._device, piece) for request in requests
            ]
            return logits_NV, cache, scored

        (logits_NV, cache, prompt_logprobs), version = self._compute(passes)
        rows_B = torch.tensor(
            [index[request.prompt_key] for request in requests], device=self._device
        )
        if len(unique) < len(requests):
            cache.select(rows_B)
        joining = Batch(requests, cache, starts_N[rows_B], self._decode_text, prompt_logprobs)
        if delta:
            joining.deltas = torch.full_like(joining.starts, delta)
        self._report(joining.sample(logits_NV[rows_B], version))
        return joining

    def _decode(self, batch: Batch) -> None:
        """One more token for every row."""
        starts_B = batch.starts if batch.padded else None
        adapters = [request.adapter for request in batch.transcript.requests]
        with self._with_adapters(adapters):
            logits_BV, version = self._compute(
                lambda: self._forward(batch.last, batch.cache, starts_B, batch.deltas)
            )
        finished = batch.sample(logits_BV, version)
        self._settle()
        self._report(finished)

    def _opened(self, joined: Batch) -> Batch:
        """The batch that begins with the rows of ``joined``."""
        return joined

    def _drain(self) -> None:
        """Take what was computed ahead, before rows move: nothing here."""

    def _settle(self) -> None:
        batch = self._batch
        if batch is None:
            return
        if 0 < batch.living <= _COMPACT_BELOW * batch.rows:
            self._drain()
            if batch.living:
                batch.compact()
        if batch.living == 0:
            self._batch = None

    def _report(self, finished: list[Generation]) -> None:
        if finished:
            self._on_finished(finished)

    def _drop_aborted(self) -> None:
        aborted = self._inbox.take_aborted()
        if not aborted or self._batch is None:
            return
        transcript = self._batch.transcript
        rows = [
            row
            for row, r in enumerate(transcript.requests)
            if transcript.alive[row] and r.request_id in aborted
        ]
        self._report([transcript.finish(row, "abort") for row in rows])
        self._settle()


def _shared_prefix(prompts: list[np.ndarray]) -> int:
    """Number of tokens with which all ``prompts`` begin, less than any has; 0 if not worth it."""
    if len(prompts) == 1:
        return 0
    shortest = min(len(ids) for ids in prompts) - 1
    differs_T = np.any([ids[:shortest] != prompts[0][:shortest] for ids in prompts[1:]], axis=0)
    shared = int(differs_T.argmax()) if differs_T.any() else shortest
    return shared if shared >= _SHORTEST_PREFIX else 0


def score_prompt(
    forward: ForwardPass, request: GenerationRequest, device: torch.device, piece: int
) -> PromptLogprobs | None:
    """Log-probs of prompt tokens given the tokens before them, in separate passes of ``piece``
    tokens; None when ``request`` wants none.

    Raw, as in vLLM: temperature 1, no filters.
    """
    count = request.params.prompt_logprobs
    if count is None:
        return None
    ids_P = torch.from_numpy(request.prompt_ids.astype(np.int64)).to(device)
    cache = forward.new_cache()
    pieces = []
    for begin in range(0, len(ids_P) - 1, piece):
        inputs_T = ids_P[begin : min(begin + piece, len(ids_P) - 1)]
        targets_T1 = ids_P[begin + 1 : begin + 1 + len(inputs_T)].unsqueeze(1)
        with forward.with_adapters([request.adapter]):
            logits_TV = forward.every_position(inputs_T.unsqueeze(0), cache)[0]
        logp_TV = torch.log_softmax(logits_TV.float(), dim=-1)
        logp_T1 = logp_TV.gather(1, targets_T1)
        ranks_T = 1 + (logp_TV > logp_T1).sum(dim=1)
        top_logprobs, top_ids = logp_TV.topk(min(count, logp_TV.shape[1]), dim=-1)
        pieces.append(
            [part.cpu().numpy() for part in (logp_T1.squeeze(1), ranks_T, top_ids, top_logprobs)]
        )
    if not pieces:
        return PromptLogprobs(np.empty(0, np.float32), np.empty(0, np.int32), [])
    logprobs, ranks, top_ids_PK, top_logprobs_PK = (
        np.concatenate(column) for column in zip(*pieces, strict=True)
    )
    best = [
        Alternatives(*pair)
        for pair in zip(top_ids_PK.astype(np.int32), top_logprobs_PK, strict=True)
    ]
    return PromptLogprobs(logprobs, ranks.astype(np.int32), best if count else [])
