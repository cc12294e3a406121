"""Generation by transformers' continuous batching: paged cache, prefill and decoding mixed in one forward pass.

transformers schedules and computes; drawing the token is ours, so that seeds, filters, penalties, log-probs and
version labels mean exactly what they mean in the padded loop. Two methods of the manager's own runner are replaced
for it: ``_sample``, a private name, in ``_install_sampler``, and ``compute_batch`` in ``_install_interruptions``.

Four settings are not free: block sharing stays off (a shared prefix computed by older weights would be reused, an
error of 1.6 to 2.5 nats), the number of blocks is always given (the default takes most of the machine's memory),
graphs are off (our sampler is no part of one), and attention is not switched behind the model's back.

A pause does not wait for a long step: it is given up between two layers and done again afterwards. Each token's keys
have a place of their own in the cache, so that the second time writes over the first. A cache with a window reads what
its step writes over; there a pause waits for the whole step.

A long prompt is prefilled over several steps. One that an update finds half done is begun anew: all of a prompt is
computed by the weights that its first token is labelled with.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.model_runner import ModelRunner

from verifiers.errors import ConfigError, EndpointUnreachable, ModelUnavailable
from verifiers_trainer.engines.embedded.model_inputs import (
    Interrupted,
    attends_to_everything,
    interruptible_parts,
)
from verifiers_trainer.engines.embedded.sampling import SamplingTable, TokenCounts, draw
from verifiers_trainer.engines.embedded.transcript import NOT_FINITE, Decode, alternatives, completed_stop_text
from verifiers_trainer.engines.requests import (
    Alternatives,
    Generation,
    GenerationRequest,
    OnFinished,
    SamplingParams,
    Unsupported,
)

_MAX_INTERRUPTIONS = 3
"""How often one step is given up."""
_STOP_S = 30.0
"""How long a stop waits for a step to end; a loop that is held by a pause never does, and its thread is a daemon."""


def bytes_per_block(model: Any, page_size: int, max_batch_tokens: int) -> int:
    """Memory one block costs: keys and values of every layer, and its columns of the attention mask.

    Attention other than flash works with a dense mask of one row per token of a step.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    states = 2 * config.num_hidden_layers * heads * width
    mask = 0 if "flash" in config._attn_implementation else max_batch_tokens
    return page_size * (states + mask) * model.dtype.itemsize


def step_tokens(max_rows: int) -> int:
    """Tokens one forward pass takes when nobody says: one per decoding row, and room for prefill."""
    return max(256, max_rows)


class _Row:
    """What one request has sampled so far; written by the generation thread alone."""

    __slots__ = ("alternatives", "broken", "logprobs", "name", "request", "stop_text", "tokens", "versions")

    def __init__(self, request: GenerationRequest):
        self.request = request
        self.name = request.request_id
        """What the manager calls it; another one after it was begun anew."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.alternatives: list[Alternatives] = []
        self.stop_text: str | None = None
        self.broken = False

    @property
    def is_complete(self) -> bool:
        """Whether the last token ends it, by what it is or by how many there are."""
        params = self.request.params
        return len(self.tokens) >= params.max_tokens or self.tokens[-1] in params.stop_token_ids

    def generation(self, error: str | None) -> Generation:
        ended = self.stop_text is not None or (self.tokens and self.tokens[-1] in self.request.params.stop_token_ids)
        return Generation(
            request=self.request,
            token_ids=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            alternatives=self.alternatives,
            finish_reason="abort" if error else "stop" if ended else "length",
            stop_text=self.stop_text,
            error=NOT_FINITE if self.broken else error,
        )


_ABORTED = _Row(GenerationRequest("", np.zeros(1, np.int32), SamplingParams(max_tokens=1)))
"""Stands in for a row that was aborted while its step was computed."""


class ContinuousGenerator:
    """The generation loop over transformers' manager.

    ``num_blocks`` is the size of the cache in blocks of ``page_size`` tokens; ``max_batch_tokens`` bounds the tokens
    of one forward pass, those of prompts and of rows that decode together. Raises ConfigError when it cannot
    hold one sequence of ``max_seq_len``.
    """

    def __init__(
        self,
        model: Any,
        *,
        decode: Decode,
        version: Callable[[], int],
        max_rows: int,
        max_seq_len: int,
        num_blocks: int,
        page_size: int,
        max_batch_tokens: int,
    ):
        if num_blocks * page_size < max_seq_len:
            needed = math.ceil(max_seq_len / page_size)
            raise ConfigError(
                f"num_blocks={num_blocks} blocks of {page_size} tokens cannot hold one sequence of "
                f"max_seq_len={max_seq_len}; give num_blocks of at least {needed}, or a shorter max_seq_len"
            )
        for name in ("_sample", "compute_batch"):
            if not hasattr(ModelRunner, name):  # our replacement would never be called
                raise ConfigError(f"this transformers has no ModelRunner.{name}; use mode='padded'", field="mode")
        self._model = model
        self._decode_text = decode
        self._version = version
        self._settings = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=num_blocks,
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=max_rows,
            allow_block_sharing=False,
            use_cuda_graph=False,
            use_async_batching=False,
            auto_switch_to_flash=False,
            return_logprobs=True,
        )
        self._lock = threading.Lock()
        self._rows: dict[str, _Row] = {}
        self._by_request: dict[str, _Row] = {}
        self._composition: list[str] = []
        self._manager: Any = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._may_give_up = False
        self._half_done: set[str] = set()
        """Requests with a part of their prompt computed by earlier steps."""
        if attends_to_everything(model):
            for part in interruptible_parts(model):
                part.register_forward_pre_hook(self._check)

    def start(self, on_finished: OnFinished, deadline_s: float) -> None:
        self._on_finished = on_finished
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="vf-collect", daemon=True)
        self._thread.start()
        if not ready.wait(deadline_s) or not self.alive:
            error = self._manager.background_thread_status.fatal_error if self._manager else None
            raise EndpointUnreachable(f"continuous batching did not start within {deadline_s:g} s: {error}") from error

    def stop(self) -> None:
        self._closing = True
        if self._thread is not None:
            self._thread.join()

    def submit(self, request: GenerationRequest) -> None:
        if request.params.prompt_logprobs is not None:
            raise Unsupported("prompt_logprobs is not supported in the mode 'continuous'; use embedded_mode='padded'")
        row = _Row(request)
        with self._lock:
            self._rows[row.name] = self._by_request[request.request_id] = row
        if not (self.alive and self._add(row)):
            with self._lock:
                self._rows.pop(row.name, None)
                self._by_request.pop(request.request_id, None)
            raise ModelUnavailable("the embedded engine is not running")

    def abort(self, request_id: str) -> None:
        with self._lock:
            row = self._by_request.get(request_id)
        if row is not None:
            self._finish(row.name, "aborted")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing to hold while the loop does not run: the manager would raise."""
        if not self.alive:
            yield
            return
        with self._manager.pause():
            try:
                yield
            finally:
                self._begin_prompts_anew()

    def _add(self, row: _Row) -> bool:
        """Hand a row to the manager, which refuses by answering None."""
        params = row.request.params
        accepted = self._manager.add_request(
            row.request.prompt_ids.tolist(),
            request_id=row.name,
            max_new_tokens=params.max_tokens,
            eos_token_id=list(params.stop_token_ids) or -1,
        )
        return accepted is not None

    def _begin_prompts_anew(self) -> None:
        """Drop what is computed of prompts that are half done, and queue them again; called in a pause.

        Not those of rows that were evicted when they had tokens already: these go on where they were, as rows that
        are being decoded do.
        """
        begun, self._half_done = self._half_done, set()
        with self._lock:
            rows = [row for name in begun if (row := self._rows.get(name)) is not None and not row.tokens]
            for row in rows:
                self._manager.cancel_request(row.name)
                del self._rows[row.name]
                row.name += "'"
                self._rows[row.name] = row
        for row in rows:
            if not self._add(row):
                self._finish(row.name, "the engine was stopped", cancel=False)

    @property
    def alive(self) -> bool:
        manager = self._manager
        return manager is not None and manager.is_running() and manager.background_thread_status.fatal_error is None

    def _run(self, ready: threading.Event) -> None:
        """Starts the manager, hands out what it finishes and stops it.

        The manager's thread is started from this one because it inherits being a daemon: a process that forgets to
        stop its engine still ends.
        """
        config = GenerationConfig(do_sample=True, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
        self._manager = manager = self._model.init_continuous_batching(config, self._settings)
        manager.start()
        while manager.batch_processor is None and manager.is_running():
            time.sleep(0.002)
        if manager.batch_processor is not None:
            self._install_sampler(manager.batch_processor)
            self._install_interruptions(manager.batch_processor)
        ready.set()
        while not self._closing and self.alive:
            output = manager.get_result(timeout=0.1)
            if output is not None and output.is_finished():
                self._finish(output.request_id, output.error, cancel=False)
        cause = manager.background_thread_status.fatal_error
        manager.stop(block=True, timeout=_STOP_S, hard_stop=True)
        for name in list(self._rows):
            self._finish(name, f"the engine was stopped{f' by {cause!r}' if cause else ''}", cancel=False)

    def _finish(self, name: str, error: str | None, *, cancel: bool = True) -> None:
        with self._lock:
            row = self._rows.pop(name, None)
            if row is None:
                return
            del self._by_request[row.request.request_id]
        if cancel:
            self._manager.cancel_request(name)
        self._on_finished([row.generation(error)])

    def _install_sampler(self, processor: Any) -> None:
        """Draw tokens with ``sampling.draw`` in place of the runner's own multinomial."""
        runner = processor.model_runner
        inputs = runner.inputs_and_outputs

        def sample(scores: torch.Tensor, output_ids: torch.Tensor) -> None:
            names = [future.state.request_id for future in inputs.requests_in_batch if future.has_new_token]
            if not names:  # every request of this step is still being prefilled
                return
            tokens_B, logprobs_B = self._draw(names, scores[0, : len(names)])
            output_ids[0, : len(names)].copy_(tokens_B)
            output_ids[1, : len(names)].copy_(logprobs_B.view(torch.int32))

        runner._sample = sample

    def _install_interruptions(self, processor: Any) -> None:
        """Let a pause in between two layers and compute the step anew after it; note the prompts that are half done."""
        compute, status = processor.model_runner.compute_batch, self._manager.background_thread_status
        inputs = processor.inputs_and_outputs

        def compute_batch(model: Any, batch_data: dict[str, Any]) -> None:
            for interruptions in range(_MAX_INTERRUPTIONS + 1):
                self._may_give_up = interruptions < _MAX_INTERRUPTIONS
                try:
                    compute(model, batch_data)
                    break
                except Interrupted:
                    status.pause_and_wait()
            for future in inputs.requests_in_batch:
                keep = self._half_done.discard if future.has_new_token else self._half_done.add
                keep(future.state.request_id)

        processor.model_runner.compute_batch = compute_batch

    def _check(self, module: torch.nn.Module, arguments: Any) -> None:
        if self._may_give_up and self._manager.background_thread_status.is_pause_requested():
            raise Interrupted

    def _draw(self, names: list[str], logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw, record and end what a stop text or a broken distribution ends."""
        with self._lock:
            rows = [self._rows.get(name) for name in names]
        kept = [row or _ABORTED for row in rows]
        if names != self._composition or any(row is None for row in rows):
            self._composition = names
            self._table = SamplingTable.build([row.request.params for row in kept], logits_BV.device)
        counts = None
        if self._table.penalties is not None:
            prompts = [row.request.prompt_ids for row in kept]
            outputs = [np.array(row.tokens, np.int64) for row in kept]
            counts = TokenCounts(prompts, outputs, logits_BV.shape[1], logits_BV.device)
        counters_B = np.array([len(row.tokens) for row in kept], np.int64)
        drawn = draw(logits_BV, self._table, counters_B, counts)
        version = self._version()
        for index, (token, logprob) in enumerate(zip(drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True)):
            row = rows[index]
            if row is None:
                continue
            if wanted := row.request.params.top_logprobs:
                row.alternatives.append(alternatives(drawn, index, wanted))
            self._record(row, token, logprob, version)
        return drawn.tokens, drawn.logprobs

    def _record(self, row: _Row, token: int, logprob: float, version: int) -> None:
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.versions.append(version)
        params = row.request.params
        row.broken = not math.isfinite(logprob)
        if params.stop and len(row.tokens) >= params.min_tokens:
            row.stop_text = completed_stop_text(np.array(row.tokens), params.stop, self._decode_text)
        if row.broken or row.stop_text is not None:
            self._finish(row.name, None)
        elif (told := row.request.on_token) is not None and not row.is_complete:
            told(token, logprob, row.alternatives[-1] if row.alternatives else None)
