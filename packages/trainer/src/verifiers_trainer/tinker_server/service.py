"""Sessions, models, sampling clients and their requests: what the server does, without HTTP.

Requests of a model are numbered by its client and computed in this order, one at a time; whose
session was computed for the shortest time is next. What a request gave is kept until it was
fetched. An optimizer step is written to the run folder before it is answered, and so is every
request before it is accepted: after a kill the last step is read, the requests since are computed
again, and the clients, which repeat what was not answered, notice nothing but the time.

A failed request leaves the gradient incomplete, and the next optimizer step of its model is refused:
half a batch would train another gradient. After weights are saved for sampling, the sampler is asked
for the log-probabilities of fixed tokens (the canary): a model whose trainer and sampler do not
agree takes no more requests.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from verifiers.errors import ConfigError, ModelRefused, RunError, VerifiersError
from verifiers_trainer.engines.embedded.threads import threads_for
from verifiers_trainer.engines.lora import LoraWeights
from verifiers_trainer.policy.adapter_files import read_adapter
from verifiers_trainer.policy.adapter_set import (
    ABOUT,
    AdamSettings,
    Adapter,
    AdapterSet,
    LoraOptions,
)
from verifiers_trainer.policy.scoring import fixed_prompts
from verifiers_trainer.tinker_server.messages import (
    AdamBody,
    CreateModel,
    CreateSampler,
    Failed,
    LoadWeights,
    OptimStep,
    Plain,
    Result,
    Sample,
    Saved,
    SaveWeights,
    Trained,
    TrainingPass,
    read_json,
    read_pass,
    read_pass_json,
)
from verifiers_trainer.tinker_server.queues import FairQueue
from verifiers_trainer.tinker_server.sampler import LoadedWeights, Sampler
from verifiers_trainer.tinker_server.store import (
    About,
    ModelRecord,
    SamplerRecord,
    SessionRecord,
    Store,
    checked_name,
    expiry,
    link_weights,
    now,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
MAX_REQUESTS = 256
"""Requests of one session that may wait to be computed, and of one model that may come early."""
MAX_RESULTS = 8192
"""Results that are kept for their clients; of more the oldest are forgotten."""
MAX_FETCHED = 64
"""Results that are kept although their client has them."""
CANARY_TOKENS = 40
CANARY_NATS, CANARY_NATS_HALF = 1e-3, 0.1
"""Mean difference between trainer and sampler that is allowed, in float32 and in half precision."""
KINDS: dict[str, Callable[[bytes], TrainingPass | OptimStep | SaveWeights | LoadWeights]] = {
    "pass": read_pass,
    "pass-json": read_pass_json,
    "step": lambda body: read_json(body, OptimStep),
    "save": lambda body: read_json(body, SaveWeights),
    "save-sampler": lambda body: read_json(body, SaveWeights),
    "save-external": lambda body: read_json(body, SaveWeights),
    "load": lambda body: read_json(body, LoadWeights),
}
"""Kind of a request to a model -> what reads its body."""


_COMMITTED = ("create", "step", "load")
"""Kinds of requests after which a model is written."""


class Live(About, kw_only=True):
    """``adapter.json`` of a model's last step."""

    sequence: int
    """The last request that it contains."""
    results: dict[str, Saved] = {}
    """Of the requests since the step before, which their client may not have yet."""


@dataclass
class Model:
    """A model of a client: an adapter and the requests to it."""

    record: ModelRecord
    adapter: Adapter | None = None
    next_sequence: int = 1
    early: dict[int, _Job] = field(default_factory=dict)
    """Requests that came before those they follow."""
    since_step: dict[str, Saved] = field(default_factory=dict)
    corrupted: str | None = None
    """Why it takes no more requests."""
    last_request: float = field(default_factory=time.time)


@dataclass(eq=False)
class _Job:
    """A request to a model, with its number."""

    model: Model
    sequence: int
    kind: str
    body: bytes
    is_replayed: bool = False

    @property
    def request_id(self) -> str:
        return f"{self.model.record.model_id}:{self.sequence}"


class Service:
    """``start`` it, then call from one thread; ``stop`` it.

    model: the base, named ``model_name`` for clients; ``base_name`` is what saved adapters name as
    their base, which peft loads.
    max_rows: see `Sampler`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        *,
        model_name: str,
        base_name: str,
        max_seq_len: int,
        max_rows: int = 32,
    ):
        self.model_name, self.base_name, self.max_seq_len = model_name, base_name, max_seq_len
        self.store = Store(folder, base_name)
        self._model = model
        self._adapters = AdapterSet(model, max_seq_len=max_seq_len)
        self.sampler = Sampler(model, tokenizer, max_seq_len=max_seq_len, max_rows=max_rows)
        self._canary = fixed_prompts(tokenizer, min(CANARY_TOKENS, max_seq_len - 8))[-1]
        is_half = next(model.parameters()).dtype != torch.float32
        self._max_nats = CANARY_NATS_HALF if is_half else CANARY_NATS
        self._weights = LoadedWeights(self._load_for_sampling)
        self._queue: FairQueue[_Job] = FairQueue(MAX_REQUESTS)
        self._results: OrderedDict[str, Future[Result]] = OrderedDict()
        self._fetched: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._cancels: dict[str, Callable[[], None]] = {}
        self.sessions: dict[str, SessionRecord] = {}
        self.samplers: dict[str, SamplerRecord] = {}
        self.models: dict[str, Model] = {}
        self._clones: dict[str, itertools.count[int]] = {}
        self._worker = threading.Thread(target=self._work, name="vf-train-adapters", daemon=True)

    def start(self, deadline_s: float = 60.0) -> None:
        """Begin to sample and to train, with what the run folder has. *Raises* ``ConfigError``."""
        self.sampler.start(deadline_s)
        self.sessions = {each.session_id: each for each in self.store.sessions()}
        self.samplers = {each.sampler_id: each for each in self.store.samplers()}
        for record in self.store.models():
            self._resume(record)
        self._worker.start()

    def stop(self) -> None:
        """End after the request that is being computed; what waits is in the run folder."""
        self._queue.close()
        if self._worker.is_alive():
            self._worker.join()
        self.sampler.stop()
        self.store.close()

    @property
    def is_alive(self) -> bool:
        """Whether requests are being served."""
        return self.sampler.is_alive and self._worker.is_alive()

    # --- sessions ---------------------------------------------------------------------------------

    def create_session(self, record: SessionRecord) -> None:
        """Keep a new session."""
        self.store.add_session(record)
        self.sessions[record.session_id] = record

    def session(self, session_id: str) -> SessionRecord:
        """*Raises* ModelRefused."""
        if (record := self.sessions.get(session_id)) is None:
            raise ModelRefused(f"there is no session {session_id!r}", status=404)
        return record

    def model(self, model_id: str) -> Model:
        """*Raises* ModelRefused."""
        if (model := self.models.get(model_id)) is None:
            raise ModelRefused(f"there is no model {model_id!r}", status=404)
        return model

    def check_base(self, name: str | None) -> None:
        """*Raises* ModelRefused for a base that is not served."""
        if name not in (None, self.model_name):
            raise ModelRefused(
                f"there is no model {name!r}: this server has {self.model_name}", status=404
            )

    def finish_session(self, session_id: str) -> None:
        """A client has ended: free the memory of its models, which stay in the run folder."""
        self.session(session_id)
        for model in self.models.values():
            if model.record.session_id == session_id:
                self.unload(model)

    def unload(self, model: Model) -> None:
        """Free the memory of a model after its requests so far, unless it then has a gradient that
        no step has taken; its next request loads it again."""
        self._queue.put(model.record.session_id, [_Job(model, 0, "unload", b"")])

    # --- models -----------------------------------------------------------------------------------

    def create_model(self, body: CreateModel) -> str:
        """The id of the request for a new adapter. *Raises* ModelRefused."""
        self.check_base(body.base_model)
        _check_optimizer(body.optimizer_config)
        lora = body.lora_config
        if lora is None:
            raise ModelRefused("lora_config is missing: adapters alone are trained here")
        return self._begin(
            ModelRecord(
                model_id=f"{self.session(body.session_id).session_id}:train:{body.model_seq_id}",
                session_id=body.session_id,
                base_model=self.model_name,
                created=now(),
                rank=lora.rank,
                seed=secrets.randbits(31) if lora.seed is None else lora.seed,
                attention=lora.train_attn,
                mlp=lora.train_mlp,
                head=lora.train_unembed,
                user_metadata=body.user_metadata,
            )
        )

    def load_weights(self, body: LoadWeights, content: bytes) -> str:
        """The id of the request for weights in a model. *Raises* ModelRefused."""
        self.check_base(body.base_model)
        _check_optimizer(body.optimizer_config)
        self.store.existing(body.path)
        if body.model_id is not None:
            return self.submit(body.model_id, body.seq_id, "load", content)
        if body.session_id is None or body.model_seq_id is None:
            raise ModelRefused("load_weights needs model_id, or session_id with model_seq_id")
        return self._begin(
            ModelRecord(
                model_id=f"{self.session(body.session_id).session_id}:train:{body.model_seq_id}",
                session_id=body.session_id,
                base_model=self.model_name,
                created=now(),
                rank=0,
                loaded_from=body.path,
                with_optimizer=body.optimizer,
                user_metadata=body.user_metadata,
            )
        )

    def _begin(self, record: ModelRecord) -> str:
        request_id = f"{record.model_id}:0"
        if record.model_id in self.models:  # sent again
            return request_id
        self._queue.check_room(record.session_id, 1)
        self.store.add_model(record)
        model = self.models[record.model_id] = Model(record)
        self._enqueue(_Job(model, 0, "create", b""))
        return request_id

    def _resume(self, record: ModelRecord) -> None:
        """Continue with a model where the run folder has it."""
        model = self.models[record.model_id] = Model(record)
        done = -1
        live = self.store.model_folder(record.model_id) / "live"
        if (live / ABOUT).is_file():
            state = self.store.read(live / ABOUT, Live)
            model.adapter, _ = self._adapters.load(live, with_optimizer=True)
            model.since_step, done = state.results, state.sequence
            for request_id, result in state.results.items():
                self._future(request_id).set_result(result)
        else:
            self._enqueue(_Job(model, 0, "create", b"", is_replayed=True))
        model.next_sequence = max(done, 0) + 1
        for sequence, kind, body in self.store.requests(record.model_id):
            if sequence > done:
                self._arrange(_Job(model, sequence, kind, body, is_replayed=True))

    def submit(self, model_id: str, sequence: int | None, kind: str, body: bytes) -> str:
        """Accept a request to a model, durably; return its id. One that was accepted before is not
        computed again. *Raises* ModelRefused."""
        model = self.model(model_id)
        if model.corrupted is not None:
            raise ModelRefused(model.corrupted, status=400)
        model.last_request = time.time()
        sequence = model.next_sequence if sequence is None else sequence
        job = _Job(model, sequence, kind, body)
        if sequence < model.next_sequence or sequence in model.early:
            if job.request_id not in self._results:
                raise ModelRefused(
                    f"request {sequence} of {model_id} was answered, and its result fetched",
                    status=410,
                )
            return job.request_id
        if len(model.early) >= MAX_REQUESTS:
            raise ModelRefused(
                f"request {model.next_sequence} of {model_id} is missing", status=429
            )
        self._queue.check_room(model.record.session_id, 1 + len(model.early))
        self.store.keep_request(model_id, sequence, kind, body)
        self._arrange(job)
        return job.request_id

    def _arrange(self, job: _Job) -> None:
        """Enqueue a request after those that it follows."""
        model = job.model
        model.early[job.sequence] = job
        self._future(job.request_id)
        while (ready := model.early.pop(model.next_sequence, None)) is not None:
            model.next_sequence += 1
            self._enqueue(ready)

    def _enqueue(self, job: _Job) -> None:
        self._future(job.request_id)
        self._queue.put(job.model.record.session_id, [job])

    # --- results ----------------------------------------------------------------------------------

    def _future(self, request_id: str) -> Future[Result]:
        with self._lock:
            future = self._results.setdefault(request_id, Future())
            while len(self._results) > MAX_RESULTS:
                self._results.popitem(last=False)
            return future

    def result(self, request_id: str) -> Future[Result]:
        """Of a request that was accepted. *Raises* ModelRefused for one that is not known: the
        client sends it again."""
        if (future := self._results.get(request_id)) is None:
            raise ModelRefused(f"request {request_id!r} is not known any more", status=410)
        return future

    def fetched(self, request_id: str) -> None:
        """A result has reached its client; the last are kept, as an answer can be lost."""
        self._fetched[request_id] = None
        while len(self._fetched) > MAX_FETCHED:
            self._results.pop(self._fetched.popitem(last=False)[0], None)

    def cancel(self, request_id: str) -> None:
        """Stop to sample for a request."""
        if (cancel := self._cancels.pop(request_id, None)) is not None:
            cancel()

    # --- sampling ---------------------------------------------------------------------------------

    def create_sampler(self, body: CreateSampler) -> str:
        """The id of a sampling client. *Raises* ModelRefused for weights that are not there."""
        self.session(body.session_id)
        self.check_base(body.base_model)
        sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        weights = None
        if body.model_path is not None:
            folder = self.store.existing(body.model_path, ("sampler_weights", "weights"))
            weights = self.store.path_of(folder).removeprefix("tinker://")
        self._add_sampler(
            SamplerRecord(
                sampler_id=sampler_id,
                session_id=body.session_id,
                weights=weights,
                model_path=body.model_path,
            )
        )
        return sampler_id

    def _add_sampler(self, record: SamplerRecord) -> None:
        self.store.add_sampler(record)
        self.samplers[record.sampler_id] = record

    def sampler_record(self, sampler_id: str) -> SamplerRecord:
        """*Raises* ModelRefused."""
        if (record := self.samplers.get(sampler_id)) is None:
            raise ModelRefused(f"there is no sampling client {sampler_id!r}", status=404)
        return record

    def join_sampler(self, sampler_id: str) -> int:
        """A number for one more client of a sampling client."""
        self.sampler_record(sampler_id)
        return next(self._clones.setdefault(sampler_id, itertools.count(1)))

    def sample(self, body: Sample) -> str:
        """The id of a sampling request. *Raises* ModelRefused."""
        if body.sampling_session_id is not None:
            record = self.sampler_record(body.sampling_session_id)
        else:
            self.check_base(body.base_model)
            weights = None
            if body.model_path is not None:
                folder = self.store.existing(body.model_path, ("sampler_weights", "weights"))
                weights = self.store.path_of(folder).removeprefix("tinker://")
            record = SamplerRecord(
                sampler_id=f"anonymous:{secrets.token_hex(8)}", session_id="", weights=weights
            )
        number = secrets.token_hex(8) if body.seq_id is None else body.seq_id
        request_id = f"{record.sampler_id}:{number}"
        if request_id in self._results:  # sent again
            return request_id
        adapter = None
        if record.weights is not None:
            adapter = self._weights.get(self.store.folder / "models" / record.weights)
        sampled, cancel = self.sampler.sample(record.session_id, adapter, body)
        future = self._future(request_id)
        self._cancels[request_id] = cancel

        def ended(samples: Future[Result]) -> None:
            self._cancels.pop(request_id, None)
            if (error := samples.exception()) is None:
                future.set_result(samples.result())
            else:
                future.set_result(_failed(error))

        sampled.add_done_callback(ended)  # type: ignore[arg-type]
        return request_id

    def _load_for_sampling(self, folder: Path) -> LoraWeights:
        """The weights of a folder, which sample as they did when they were saved. *Raises*
        ModelRefused."""
        try:
            adapter, _ = self._adapters.load(folder, with_optimizer=False)
            weights = adapter.snapshot()
            if (canary := self.store.about(folder).canary) is not None:
                self._check_canary(weights, np.array(canary), str(folder))
        except (ConfigError, RunError) as error:
            status = 400 if folder.exists() else 410
            raise ModelRefused(f"the weights cannot be sampled: {error}", status=status) from error
        return weights

    def _check_canary(self, weights: LoraWeights, expected: np.ndarray, where: str) -> None:
        """*Raises* ``RunError`` if the sampler gives other log-probabilities."""
        nats = float(np.abs(self.sampler.score(weights, self._canary) - expected).mean())
        if not nats <= self._max_nats:
            raise RunError(
                f"the canary of {where} differs by {nats:.3g} nats per token from the trainer, and"
                f" {self._max_nats:g} are allowed: the sampler has other weights"
            )

    # --- checkpoints ------------------------------------------------------------------------------

    @property
    def architecture(self) -> str:
        """Of the base."""
        return str(self._model.config.model_type)

    def delete(self, path: str) -> None:
        """Remove a checkpoint. *Raises* ModelRefused."""
        folder = self.store.existing(path)
        self._weights.forget(folder)
        shutil.rmtree(folder)

    def set_expiry(self, path: str, expires_at: datetime | None) -> None:
        """When a checkpoint is removed; None for never. *Raises* ModelRefused."""
        self.store.set_expiry(self.store.existing(path), expires_at)

    def described_adapter(self, folder: Path) -> dict[str, object]:
        """Rank and kinds of layers of a saved adapter. *Raises* ``ConfigError``."""
        described = read_adapter(folder)
        names = described.get("target_modules") or []
        kinds = {self._adapters.kind(str(name)) for name in names if isinstance(names, list)}
        return {
            "lora_rank": described.get("r"),
            "train_unembed": "head" in kinds,
            "train_mlp": "mlp" in kinds,
            "train_attn": "attention" in kinds,
        }

    # --- the worker -------------------------------------------------------------------------------

    def _work(self) -> None:
        with threads_for(self._model):
            while (entry := self._queue.take(is_waiting=True)) is not None:
                owner, job = entry
                if job.kind == "unload":
                    if job.model.adapter is not None and not job.model.adapter.has_gradient:
                        job.model.adapter = None
                    continue
                began = time.monotonic()
                result = self._computed(job)
                job.model.since_step[job.request_id] = result
                if job.kind in _COMMITTED and not isinstance(result, Failed):
                    try:
                        self._commit(job)
                    except Exception as error:
                        why = f"the step of {job.model.record.model_id} was not written: {error}"
                        job.model.corrupted, result = why, _failed(error)
                        log.exception("a step was not written")
                self._queue.charge(owner, time.monotonic() - began)
                self._future(job.request_id).set_result(result)

    def _computed(self, job: _Job) -> Saved:
        model = job.model
        body: TrainingPass | OptimStep | SaveWeights | LoadWeights | None = None
        if model.corrupted is not None:
            return Failed(error=model.corrupted, category="server")
        try:
            if job.kind == "create":
                return self._create(job)
            body = KINDS[job.kind](job.body)
            if model.adapter is None:
                model.adapter = self._loaded(model.record)
            match body:
                case TrainingPass():
                    return self._pass(model.adapter, body)
                case OptimStep():
                    return self._step(model.adapter, body.adam_params)
                case LoadWeights():
                    return self._load(model, body)
                case SaveWeights():
                    return self._save(job, model.adapter, body)
        except Exception as error:  # noqa: BLE001  the client is told, others are served
            has_no_gradient = isinstance(body, TrainingPass) and body.forward_only
            if model.adapter is not None and job.kind.startswith("pass") and not has_no_gradient:
                model.adapter.drop_gradient(f"request {job.sequence} failed")
            return _failed(error)

    def _create(self, job: _Job) -> Plain:
        record = job.model.record
        kind: dict[str, object] = {"type": "create_model"}
        if record.loaded_from is not None:
            folder = self.store.existing(record.loaded_from)
            adapter, _ = self._adapters.load(folder, with_optimizer=record.with_optimizer)
            record.rank = adapter.rank
            self.store.add_model(record)
            kind = {"type": "load_weights", "path": record.loaded_from}
        else:
            adapter = self._create_adapter(record)
        job.model.adapter = adapter
        return Plain(content={**kind, "model_id": record.model_id})

    def _create_adapter(self, record: ModelRecord) -> Adapter:
        options = LoraOptions(record.rank, record.seed, record.attention, record.mlp, record.head)
        return self._adapters.create(options)

    def _loaded(self, record: ModelRecord) -> Adapter:
        """A model that was unloaded, as it was after its last step."""
        live = self.store.model_folder(record.model_id) / "live"
        if (live / ABOUT).is_file():
            return self._adapters.load(live, with_optimizer=True)[0]
        if record.loaded_from is not None:
            raise ConfigError("the model was not created: its first request failed")
        return self._create_adapter(record)

    def _pass(self, adapter: Adapter, body: TrainingPass) -> Trained:
        if not body.data:
            raise ConfigError("the request has no data")
        result = self._adapters.forward_backward(
            adapter, body.data, body.loss, body.config, forward_only=body.forward_only
        )
        logprobs = [array.astype("<f4").tobytes() for array in result.logprobs]
        return Trained(loss=result.loss, logprobs=logprobs)

    def _step(self, adapter: Adapter, params: AdamBody) -> Plain:
        values = msgspec.structs.asdict(params)
        del values["type"]
        metrics = adapter.optim_step(AdamSettings(**values))
        return Plain(content={"metrics": metrics | {"version": float(adapter.step)}})

    def _load(self, model: Model, body: LoadWeights) -> Plain:
        folder = self.store.existing(body.path)
        model.adapter, _ = self._adapters.load(folder, with_optimizer=body.optimizer)
        return Plain(content={"type": "load_weights", "path": body.path})

    def _save(self, job: _Job, adapter: Adapter, body: SaveWeights) -> Plain:
        record = job.model.record
        if body.age_encryption_recipients:
            raise ConfigError("age_encryption_recipients: files are not encrypted here")
        kind, folder_kind = {
            "save": ("save_weights", "weights"),
            "save-sampler": ("save_weights_for_sampler", "sampler_weights"),
            "save-external": ("save_weights_external", "external_weights"),
        }[job.kind]
        if job.kind == "save-sampler" and body.path is None:
            return self._save_snapshot(job, adapter, body)
        name = checked_name(body.path or f"{job.sequence:06d}")
        folder = self.store.model_folder(record.model_id) / folder_kind / name
        path = self.store.path_of(folder)
        is_written = (folder / ABOUT).is_file() and self.store.about(folder).step == adapter.step
        if job.is_replayed and is_written:
            return Plain(content={"type": kind, "path": path})
        if folder.exists() and not body.overwrite and not job.is_replayed:
            raise ConfigError(f"{path} is there already: give another name, or overwrite=True")
        self._weights.forget(folder)
        self._write(job.model, adapter, folder, job.kind == "save", body)
        if job.kind == "save-sampler":
            self._weights.put(folder, self._proven(job.model, adapter, folder))
        return Plain(content={"type": kind, "path": path})

    def _save_snapshot(self, job: _Job, adapter: Adapter, body: SaveWeights) -> Plain:
        """Weights for a new sampling client, which are no checkpoint."""
        record = job.model.record
        if body.sampling_session_seq_id is None:
            raise ConfigError("save_weights_for_sampler needs path or sampling_session_seq_id")
        models = self.store.folder / "models"
        if body.kind == "inflight":  # one for all such clients, which changes under them
            folder = self.store.model_folder(record.model_id) / "snapshots/inflight"
            shutil.rmtree(folder, ignore_errors=True)
        else:
            folder = self.store.new_snapshot(record.model_id)
        self._write(job.model, adapter, folder, False, body)
        self._weights.put(folder, self._proven(job.model, adapter, folder))
        sampler_id = f"{record.session_id}:sample:{body.sampling_session_seq_id}"
        self._add_sampler(
            SamplerRecord(
                sampler_id=sampler_id,
                session_id=record.session_id,
                weights=str(folder.relative_to(models)),
            )
        )
        return Plain(
            content={"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}
        )

    def _write(
        self, model: Model, adapter: Adapter, folder: Path, is_whole: bool, body: SaveWeights
    ) -> None:
        live = self.store.model_folder(model.record.model_id) / "live"
        is_snapshot = folder.parent.name == "snapshots"
        if is_snapshot and (live / ABOUT).is_file() and self.store.about(live).step == adapter.step:
            link_weights(live, folder)
            return
        about = About(
            created=now(),
            expires_at=expiry(body.ttl_seconds),
            user_metadata=body.user_metadata,
            canary=self._expected(adapter),
        )
        adapter.save(folder, self.base_name, is_whole=is_whole, **_described(about))

    def _expected(self, adapter: Adapter) -> list[float]:
        return [float(x) for x in self._adapters.logprobs(adapter.trained, self._canary)]

    def _proven(self, model: Model, adapter: Adapter, folder: Path) -> LoraWeights:
        """The weights of the adapter, with which the sampler gives what the trainer does; else the
        model takes no more requests. *Raises* ``RunError``."""
        weights = adapter.snapshot()
        expected = self._adapters.logprobs(adapter.trained, self._canary)
        try:
            self._check_canary(weights, expected, f"{model.record.model_id} ({folder.name})")
        except RunError as error:
            model.corrupted = str(error)
            raise
        return weights

    def _commit(self, job: _Job) -> None:
        """Write the model after a step, and forget the requests that it contains."""
        model, adapter = job.model, job.model.adapter
        assert adapter is not None
        if job.kind == "create" and model.record.loaded_from is None:
            return  # made again by its seed
        model_id = model.record.model_id
        state = Live(
            created=now(),
            sequence=job.sequence,
            results=model.since_step,
            canary=self._expected(adapter),
        )
        folder = self.store.model_folder(model_id) / "live"
        adapter.save(folder, self.base_name, is_whole=True, **_described(state))
        self.store.forget_requests(model_id, job.sequence)
        model.since_step = {}


def _described(about: About) -> dict[str, object]:
    """As JSON; the step is the adapter's own."""
    described: dict[str, object] = msgspec.to_builtins(about)
    del described["step"]
    return described


def _check_optimizer(config: msgspec.Struct | None) -> None:
    kind = getattr(config, "type", "adamw")
    if kind != "adamw":
        raise ModelRefused(f"there is no optimizer {kind!r} here: use adamw", status=400)


def _failed(error: BaseException) -> Failed:
    """What a client is told of an error."""
    if isinstance(error, ConfigError | ModelRefused):
        return Failed(error=str(error), category="user")
    if not isinstance(error, VerifiersError):
        log.error("a request failed", exc_info=error)
        return Failed(error=f"{type(error).__name__}: {error}", category="server")
    return Failed(error=str(error), category="server")
