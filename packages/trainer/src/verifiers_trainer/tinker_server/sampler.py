"""Samples with the adapters of all clients in one generation loop, fairly.

The loop decodes at most ``max_rows`` rows together, whatever adapters they have. The rows of a
session wait in its own queue; the session with the fewest sampled tokens is next. Of the weights on disk
those that were used last are in memory.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verifiers.errors import ModelRefused, ModelUnavailable, RunError
from verifiers_trainer.engines.embedded.engine import (
    default_kv_bytes,
    eos_token_ids,
    share_parameters,
)
from verifiers_trainer.engines.embedded.padded import PaddedGenerator
from verifiers_trainer.engines.lora import LoraWeights
from verifiers_trainer.engines.requests import (
    Alternatives,
    Generation,
    GenerationRequest,
    SamplingParams,
)
from verifiers_trainer.tinker_server.messages import (
    NO_LOGPROB,
    Sample,
    Sampled,
    SampledSequence,
    TopTokens,
)
from verifiers_trainer.tinker_server.queues import FairQueue

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

MAX_WAITING = 4096
"""Rows of one session that may wait."""
MAX_SAMPLES = 1024
MAX_TOP = 20
PREFILL_TOKENS = 1024
CACHE_BYTES = 2 * 2**30
"""Of the weights in memory that no request in flight needs."""
SCORE_S = 120.0
_SEEDS = random.SystemRandom()


@dataclass(eq=False)
class _Waiting:
    """A row with whom it is for."""

    request: GenerationRequest
    done: Future[Generation] = field(default_factory=Future)


class Sampler:
    """The generation loop over ``model``; ``start`` begins it.

    max_rows: most rows that decode together; 1 makes every sample depend on weights, prompt,
    parameters and seed alone, bit for bit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_seq_len: int,
        max_rows: int,
    ):
        replica = share_parameters(model)
        self._max_seq_len, self._max_rows = max_seq_len, max_rows
        self._vocabulary: int = replica.config.get_text_config().vocab_size
        self._eos = eos_token_ids(replica, tokenizer)
        self._loop = PaddedGenerator(
            replica,
            decode=lambda ids: str(tokenizer.decode(ids)),
            version=lambda: 0,
            max_rows=max_rows,
            kv_bytes=default_kv_bytes(replica.device, 0),
            max_batch_tokens=PREFILL_TOKENS,
        )
        self._queue: FairQueue[_Waiting] = FairQueue(MAX_WAITING)
        self._lock = threading.Lock()
        self._running: dict[str, tuple[str, _Waiting]] = {}
        self._ids = itertools.count()
        self.most_adapters = 0
        """Most different adapters whose rows were in the loop at a time."""

    def start(self, deadline_s: float) -> None:
        """Begin to sample. *Raises* ``ConfigError`` for a model that cannot be sampled here."""
        self._loop.start(self._on_finished, deadline_s)

    def stop(self) -> None:
        """End; what waits gets an error."""
        for waiting in self._queue.close():
            waiting.done.set_exception(ModelUnavailable("the server was stopped"))
        self._loop.stop()

    @property
    def is_alive(self) -> bool:
        """Whether samples are being drawn."""
        return self._loop.alive

    # --- requests ---------------------------------------------------------------------------------

    def sample(
        self, owner: str, weights: LoraWeights | None, body: Sample
    ) -> tuple[Future[Sampled], Callable[[], None]]:
        """(the samples, what cancels them). *Raises* ModelRefused."""
        prompt_ids = body.prompt.token_ids()
        params = self._params(body, len(prompt_ids))
        if prompt_ids.min() < 0 or prompt_ids.max() >= self._vocabulary:
            raise ModelRefused("the prompt has a token id that the model has not", status=400)
        rows = [
            _Waiting(GenerationRequest(f"{next(self._ids)}", prompt_ids, each, adapter=weights))
            for each in params
        ]
        result: Future[Sampled] = Future()
        self._queue.check_room(owner, len(rows))
        self._submit(owner, rows)
        _when_all(rows, result, lambda done: self._finish(owner, body, weights, done, result))
        return result, lambda: self._cancel(owner, rows)

    def score(self, weights: LoraWeights | None, ids: Sequence[int]) -> np.ndarray:
        """float32 [T-1]: the log-probability of each token of ``ids`` but the first. Waits for it.

        *Raises* ``RunError`` when it does not come.
        """
        row = _Waiting(self._scoring(weights, np.asarray(ids, np.int32)))
        self._submit("", [row])
        try:
            generation = row.done.result(SCORE_S)
        except TimeoutError:
            raise RunError(f"the sampler scored nothing within {SCORE_S:g} s") from None
        assert generation.prompt_logprobs is not None
        return generation.prompt_logprobs.logprobs

    def _scoring(self, weights: LoraWeights | None, ids: np.ndarray) -> GenerationRequest:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        return GenerationRequest(f"{next(self._ids)}", ids, params, adapter=weights)

    def _params(self, body: Sample, prompt_length: int) -> list[SamplingParams]:
        """Of each sample. *Raises* ModelRefused for what is not served."""
        sampling = body.sampling_params
        room = self._max_seq_len - prompt_length
        within = {
            "num_samples": 1 <= body.num_samples <= MAX_SAMPLES,
            "temperature": 0 <= sampling.temperature < float("inf"),
            "top_p": 0 < sampling.top_p <= 1,
            "top_k": sampling.top_k >= -1,
            "max_tokens": sampling.max_tokens is None or sampling.max_tokens >= 1,
            "topk_prompt_logprobs": 0 <= body.topk_prompt_logprobs <= MAX_TOP,
            "topk_sample_logprobs": 0 <= body.topk_sample_logprobs <= MAX_TOP,
            "seed": sampling.seed is None or 0 <= sampling.seed < 2**64,
        }
        for name, is_within in within.items():
            if not is_within:
                value = getattr(body, name, getattr(sampling, name, None))
                raise ModelRefused(f"{name}={value!r} is out of range", status=400, field=name)
        unserved = {
            "target_prompt_logprobs": body.target_prompt_logprobs,
            "prompt_alt_tokens_k": body.prompt_alt_tokens_k,
            "record_stability_info": body.record_stability_info,
        }
        for name, value in unserved.items():
            if value:
                raise ModelRefused(f"{name} is not served here: leave it out", field=name)
        if prompt_length < 1 or room < 1:
            raise ModelRefused(
                f"the prompt has {prompt_length} tokens: it must have from 1 to"
                f" {self._max_seq_len - 1}",
                status=400,
                code="context_length_exceeded",
            )
        texts, ids = self._stops(sampling.stop)
        wants_prompt = bool(body.prompt_logprobs or body.topk_prompt_logprobs)
        top = body.topk_sample_logprobs
        seed = _SEEDS.getrandbits(63) if sampling.seed is None else sampling.seed % 2**63
        first = SamplingParams(
            max_tokens=min(sampling.max_tokens or room, room),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            seed=seed,
            stop=texts,
            stop_token_ids=ids,
            top_logprobs=top,
            prompt_logprobs=body.topk_prompt_logprobs if wants_prompt else None,
        )
        siblings = [
            replace(first, seed=(seed + index) % 2**63, prompt_logprobs=None)
            for index in range(1, body.num_samples)
        ]
        return [first, *siblings]

    def _stops(self, stop: str | list[str | int] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """(texts, token ids); without any of its own a sample stops at the end of a turn."""
        if stop is None:
            return (), self._eos
        texts = [stop] if isinstance(stop, str) else [s for s in stop if isinstance(s, str)]
        if not all(texts):
            raise ModelRefused("stop has an empty text", status=400, field="stop")
        ids = [] if isinstance(stop, str) else [s for s in stop if isinstance(s, int)]
        return tuple(texts), tuple(dict.fromkeys(ids))

    # --- the loop ---------------------------------------------------------------------------------

    def _submit(self, owner: str, rows: list[_Waiting]) -> None:
        self._queue.put(owner, rows)
        self._fill()

    def _fill(self) -> None:
        """Give the loop rows while it has room."""
        refused = []
        with self._lock:
            while len(self._running) < self._max_rows:
                if (entry := self._queue.take(is_waiting=False)) is None:
                    break
                owner, row = entry
                self._running[row.request.request_id] = entry
                # at once, so that a session with many rows does not take all the room
                self._queue.charge(owner, row.request.max_length)
                try:
                    self._loop.submit(row.request)
                except ModelUnavailable as error:
                    del self._running[row.request.request_id]
                    refused.append((row, error))
            adapters = {row.request.adapter for _, row in self._running.values()}
            self.most_adapters = max(self.most_adapters, len(adapters))
        for row, reason in refused:
            row.done.set_exception(reason)

    def _on_finished(self, generations: list[Generation]) -> None:
        ended = []
        with self._lock:
            for generation in generations:
                if (entry := self._running.pop(generation.request.request_id, None)) is None:
                    continue  # it was cancelled
                owner, row = entry
                unused = row.request.params.max_tokens - len(generation.token_ids)
                self._queue.charge(owner, -unused)
                ended.append((row, generation))
        self._fill()
        for row, generation in ended:
            if generation.error is not None:
                row.done.set_exception(RunError(generation.error))
            else:
                row.done.set_result(generation)

    def _cancel(self, owner: str, rows: list[_Waiting]) -> None:
        cancelled = self._queue.remove(owner, set(rows))
        with self._lock:
            for row in rows:
                # the loop says nothing of a row that it has not begun
                if self._running.pop(row.request.request_id, None) is not None:
                    self._loop.abort(row.request.request_id)
                    cancelled.add(row)
        for row in cancelled:
            row.done.set_exception(ModelRefused("the request was cancelled", status=499))
        self._fill()

    # --- results ----------------------------------------------------------------------------------

    def _finish(
        self,
        owner: str,
        body: Sample,
        weights: LoraWeights | None,
        done: list[Generation],
        result: Future[Sampled],
    ) -> None:
        """Set the result; log-probabilities are those of the model as it is, whatever reshapes the
        distribution that is sampled from."""
        sampling = body.sampling_params
        is_reshaped = sampling.temperature != 1 or sampling.top_p != 1 or sampling.top_k > 0
        if not is_reshaped:
            result.set_result(_sampled(body, done, [each.logprobs for each in done]))
            return
        rows = [
            _Waiting(
                self._scoring(weights, np.concatenate([each.request.prompt_ids, each.token_ids]))
            )
            for each in done
        ]
        self._submit(owner, rows)

        def scored(generations: list[Generation]) -> None:
            logprobs = []
            for each, generation in zip(done, generations, strict=True):
                assert generation.prompt_logprobs is not None
                of_all = generation.prompt_logprobs.logprobs
                logprobs.append(of_all[len(of_all) - len(each.token_ids) :])
            result.set_result(_sampled(body, done, logprobs))

        _when_all(rows, result, scored)


def _when_all(
    rows: list[_Waiting], result: Future[Sampled], then: Callable[[list[Generation]], None]
) -> None:
    """Call ``then`` with what the rows gave, or give ``result`` the first error."""
    num_running, lock = [len(rows)], threading.Lock()

    def ended(_: Future[Generation]) -> None:
        with lock:
            num_running[0] -= 1
            if num_running[0]:
                return
        try:
            then([row.done.result() for row in rows])
        except Exception as error:  # noqa: BLE001  raised where the result is read
            result.set_exception(error)

    for row in rows:
        row.done.add_done_callback(ended)


def _sampled(body: Sample, done: list[Generation], logprobs: list[np.ndarray]) -> Sampled:
    sequences = [
        SampledSequence(
            token_ids=each.token_ids,
            logprobs=its_logprobs,
            is_stopped=each.finish_reason == "stop",
            top=_top(each.alternatives, body.topk_sample_logprobs),
        )
        for each, its_logprobs in zip(done, logprobs, strict=True)
    ]
    of_prompt = done[0].prompt_logprobs
    if of_prompt is None:
        return Sampled(sequences=sequences)
    padded = np.concatenate([[np.nan], of_prompt.logprobs]).astype(np.float32)
    first_scored = 1
    if body.prompt_logprobs_last_n is not None:
        first_scored = max(1, len(padded) - body.prompt_logprobs_last_n)
        padded[:first_scored] = np.nan
    top = _top(of_prompt.alternatives, body.topk_prompt_logprobs)
    if top is not None:
        k = top.token_ids.shape[1]
        top.token_ids = np.concatenate([np.zeros((1, k), np.int32), top.token_ids])
        top.logprobs = np.concatenate([np.zeros((1, k), np.float32), top.logprobs])
        top.token_ids[:first_scored], top.logprobs[:first_scored] = 0, NO_LOGPROB
    return Sampled(
        sequences=sequences,
        prompt_logprobs=padded if body.prompt_logprobs else None,
        top_of_prompt=top,
    )


def _top(alternatives: list[Alternatives], k: int) -> TopTokens | None:
    if not k or not alternatives:
        return None
    return TopTokens(
        np.stack([each.token_ids for each in alternatives]),
        np.stack([each.logprobs for each in alternatives]),
    )


class LoadedWeights:
    """The weights of folders, those that were used last in memory."""

    def __init__(self, load: Callable[[Path], LoraWeights], max_bytes: int = CACHE_BYTES):
        self._load, self._max_bytes = load, max_bytes
        self._lock = threading.Lock()
        self._weights: OrderedDict[Path, LoraWeights] = OrderedDict()

    def get(self, folder: Path) -> LoraWeights:
        """The weights of a folder. *Raises* as ``load``."""
        with self._lock:
            if (weights := self._weights.get(folder)) is not None:
                self._weights.move_to_end(folder)
                return weights
        weights = self._load(folder)
        self.put(folder, weights)
        return weights

    def put(self, folder: Path, weights: LoraWeights) -> None:
        """Keep the weights of a folder, in the place of those before."""
        with self._lock:
            self._weights[folder] = weights
            self._weights.move_to_end(folder)
            num_bytes = sum(each.num_bytes for each in self._weights.values())
            while num_bytes > self._max_bytes and len(self._weights) > 1:
                num_bytes -= self._weights.popitem(last=False)[1].num_bytes

    def forget(self, folder: Path) -> None:
        """Of a folder that is removed or written anew."""
        with self._lock:
            self._weights.pop(folder, None)
