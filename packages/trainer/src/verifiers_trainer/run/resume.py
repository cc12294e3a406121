"""``Checkpoints``: write the checkpoints of a training run, and resume from them.

File formats are in ``policy.checkpoint_files``, the pipeline's state in ``pipeline.saved_state``;
this module combines them, and compares the configuration of a checkpoint with the present
configuration.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from verifiers.errors import CheckpointError, RunMismatch, VerifiersError
from verifiers.runtime.bounded import MAX_ROW_BYTES, read_file
from verifiers.runtime.failpoints import failpoint
from verifiers.runtime.redaction import digested
from verifiers.storage.configurations import is_code_of_two_pythons
from verifiers.storage.described import CODE, describe
from verifiers.storage.identity import code_of
from verifiers.storage.provenance import provenance
from verifiers_trainer.algorithm import old_logprobs
from verifiers_trainer.algorithm.packing import PackedRow
from verifiers_trainer.distributed import fsdp
from verifiers_trainer.pipeline.saved_state import load_pipeline, save_pipeline
from verifiers_trainer.pipeline.schedule import PipelineState, digest
from verifiers_trainer.policy import checkpoint_files
from verifiers_trainer.policy.preparation import members
from verifiers_trainer.run.context import TrainingRun
from verifiers_trainer.run.metrics_files import COMPLETIONS, METRICS, MetricsFile
from verifiers_trainer.run.provenance import CALLBACK, base_weights, facts_of, users_code
from verifiers_trainer.settings.config import RLConfig

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers.trainer_callback import TrainerState

    from verifiers.environments.base import Environment

log = logging.getLogger(__name__)

BATCH = "batch_{}.safetensors"
"""The log-probabilities of a rank that stay fixed during a batch, in a checkpoint between its
steps."""
AUTO = "auto"
"""Value of ``resume_from_checkpoint``: resume if there is a checkpoint."""
SETTINGS = "settings.json"
"""In the folder of the run: its settings and where its numbers come from, from before the first
step."""
OWN_CODE, BASE = "own_code", "base_weights"
"""Sections of a configuration: what a user programmed beside the environment; the weights below an
adapter."""
WEIGHTS_ONLY, OBJECTIVE, CHANGED_CODE = "weights_only", "objective", "changed_code"
PROVENANCE = "provenance"


def configuration(
    run: TrainingRun, code: Mapping[str, Mapping[str, str]], weights: Mapping[str, str]
) -> dict[str, Any]:
    """The values that must be equal to resume from a checkpoint, as JSON values.

    code: of ``code_in_force``; weights: of ``base_weights``, which an adapter's checkpoint lacks.
    """
    table = run.examples
    return {
        **({BASE: dict(weights)} if weights and hasattr(run.model, "peft_config") else {}),
        "num_examples": len(table),
        "examples": digest(table),
        "chat_template": hashlib.sha256(str(run.tokenizer.chat_template).encode()).hexdigest()[:16],
        "vocabulary": len(run.tokenizer),
        **({} if run.offline is None else {"rollouts": run.offline.digest}),
        # the optimizer's state is saved by the number of a weight
        **({"roles": list(roles)} if (roles := run.settings.adapter_roles) else {}),
        **({} if (teacher := _teacher_identity(run)) is None else {"teacher": teacher}),
        **_without_model(run.env, run.settings, code),
    }


def _teacher_identity(run: TrainingRun) -> object:
    """What must be the same of the teachers; None without any, and for a server, whose model is not
    known."""
    if run.settings.teacher is None or run.reference is None:
        return None
    return run.reference.identity


def code_in_force(
    env: Environment, settings: RLConfig, hooks: Mapping[str, Iterable[object]] | None = None
) -> dict[str, dict[str, str]]:
    """Hashes of the environment's files, and of what a user programmed beside it."""
    return {CODE: code_of(env), OWN_CODE: users_code(env, settings, hooks)}


def _without_model(
    env: Environment, settings: RLConfig, code: Mapping[str, Mapping[str, str]]
) -> dict[str, object]:
    """The part of ``configuration`` that is known before the model and the rows are loaded."""
    return {
        "env_id": env.env_id,
        "env_args": {key: str(value) for key, value in digested(env.env_args).items()},
        "branching": [describe(member.branching) for member in members(env)],
        **code,
        **settings.resume_values(),
    }


def require_same_run(
    folder: Path, env: Environment, settings: RLConfig, forced: Collection[str]
) -> None:
    """Compare a checkpoint with a run that has nothing left to train, whose model is not loaded.

    forced: settings that the training loop replaces. Raises ``RunMismatch`` for values that differ,
    and ``CheckpointError``.
    """
    _, _, saved = load_pipeline(folder)
    present = _without_model(env, settings, code_in_force(env, settings))
    both = (saved.keys() & present.keys()) - set(forced)
    former, now = ({key: values[key] for key in both} for values in (saved, present))
    _require_same(former, now, folder, settings.accept_changed_code)


class StartingPoint(NamedTuple):
    """Where training begins: at a checkpoint, or at step 0 with ``folder`` None."""

    folder: Path | None
    step: int
    pipeline: PipelineState
    """Loaded on rank 0; empty on the others."""


class Checkpoints:
    """Writes the checkpoints of ``run``, removes old checkpoints, and finds the checkpoint to
    resume from."""

    def __init__(
        self,
        run: TrainingRun,
        metrics_file: MetricsFile,
        hooks: Callable[[], Mapping[str, Iterable[object]]] = dict,
    ):
        """hooks: objects, by role, whose code decides what is trained."""
        self.run, self.metrics_file, self._hooks = run, metrics_file, hooks
        self.changed_code: list[str] = []
        """Source files and functions that changed between two sessions of the run, and were
        accepted."""
        self.provenance: dict[str, Any] = {}
        """Where the numbers of the present process come from; rank 0 alone."""
        self._code: dict[str, dict[str, str]] = {}
        """As of the beginning: files may be edited during the run."""
        self._weights: dict[str, str] = {}

    # --- save -------------------------------------------------------------------------------------

    def save(
        self,
        state: TrainerState,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        scaler: GradScaler | None,
        write_model: Callable[[Path], None],
        snapshot: Callable[[], PipelineState],
        fixed: bytes | None = None,
        algorithm: Mapping[str, object] = MappingProxyType({}),
        folder: Path | None = None,
    ) -> None:
        """Write ``checkpoint-<step>``, then remove those beyond ``save_total_limit``; or write
        ``folder``.

        A collective; rank 0 writes, including the RNG states of every rank. state: transformers'
        ``TrainerState``, whose ``best_model_checkpoint`` is set; scaler: fp16's, or None; snapshot:
        returns the pipeline's state; fixed: between the steps of a batch, this rank's
        log-probabilities that stay fixed during it; algorithm: ``algorithm.state.state_of`` the
        settings. Raises ``CheckpointError`` on every rank when
        writing fails, and ``ConfigError`` where ``folder`` has content that is no checkpoint.
        """
        run, ranks = self.run, self.run.ranks
        failpoint("checkpoint.before_sending")
        rngs = ranks.collect(checkpoint_files.rng_to_bytes(), "the states of the random generators")
        if fixed is None:
            fixed_R = []
        else:
            fixed_R = ranks.collect(fixed, "the fixed log-probabilities of the batch")

        optimizer_state = reference_state = None
        if not run.settings.save_only_model:
            optimizer_state = fsdp.whole_state(optimizer, keep=ranks.is_main)
            reference_state = (
                None if run.reference is None else run.reference.state(keep=ranks.is_main)
            )

        def write() -> str | None:
            target = run.folder / f"{checkpoint_files.PREFIX}{state.global_step}"
            if folder is not None:
                target = checkpoint_files.replaceable(folder)
            best = (
                run.folder / f"{checkpoint_files.PREFIX}{state.best_global_step}"
                if state.best_global_step
                else None
            )
            if (
                best is not None
                and run.settings.load_best_model_at_end
                and (best == target or best.is_dir())
            ):
                state.best_model_checkpoint = str(best)
            pipeline = snapshot()
            settings = self._described()
            settings |= {WEIGHTS_ONLY: True} if run.settings.save_only_model else {}
            settings |= {CHANGED_CODE: self.changed_code} if self.changed_code else {}
            with checkpoint_files.writing(target) as temporary:
                write_model(temporary)
                if not run.settings.save_only_model:
                    checkpoint_files.save_optimizer(temporary, optimizer, optimizer_state)
                    checkpoint_files.save_scheduler(temporary, scheduler)
                    checkpoint_files.save_scaler(temporary, scaler)
                    for rank, rng in enumerate(rngs):
                        checkpoint_files.save_rng(temporary, rng, rank)
                    for rank, logprobs in enumerate(fixed_R):
                        (temporary / BATCH.format(rank)).write_bytes(logprobs)
                    if run.reference is not None:
                        run.reference.save(temporary, reference_state)
                name = _model_name(run)
                save_pipeline(temporary, pipeline, state.global_step, settings, name)
                state.save_to_json(str(temporary / "trainer_state.json"))
                checkpoint_files.save_algorithm(temporary, algorithm)
            if folder is None:
                checkpoint_files.prune(
                    target,
                    run.settings.save_total_limit,
                    protected=best,
                    keep_every=run.settings.keep_every,
                )
            return state.best_model_checkpoint

        state.best_model_checkpoint = ranks.share(write, "the checkpoint to be written")

    def restore_fixed(self, folder: Path, rows_S: Sequence[list[PackedRow]]) -> None:
        """Store in this rank's rows what ``save`` was given as ``fixed``; a checkpoint of version
        0.2.0 has none."""
        path = folder / BATCH.format(self.run.ranks.rank)
        if path.exists():
            with checkpoint_files.reading(folder):
                old_logprobs.restore(rows_S, read_file(path, MAX_ROW_BYTES))

    def restore_algorithm(self, folder: Path) -> None:
        """Load what ``save`` was given as ``algorithm`` into the objects of the settings."""
        checkpoint_files.load_algorithm(folder, self.run.settings)

    # --- resume -----------------------------------------------------------------------------------

    def starting_point(self, requested: str | bool | None) -> StartingPoint:
        """Find the checkpoint to resume from: a path, or for True the newest valid checkpoint,
        for "auto" if there is any; otherwise start at step 0.

        Starting at step 0 moves an earlier run in the output folder aside. Rank 0 decides for all
        ranks. Raises, on every rank, ``RunMismatch`` listing every difference for a checkpoint of
        another configuration, and ``CheckpointError`` for a checkpoint that is damaged, missing, or
        holds only weights.
        """
        pipeline = PipelineState()

        def decide() -> list[Any]:
            nonlocal pipeline
            folder, step = self._requested(requested), 0
            self._code = code_in_force(self.run.env, self.run.settings, self._hooks())
            self._weights = base_weights(self.run.model)
            former = None if folder is None else self._written().get(PROVENANCE)
            if folder is None:
                self._start_afresh()
            else:
                pipeline, step = self._load(folder)
            merged = {**self._code[CODE], **self._code[OWN_CODE]}
            self.provenance = provenance(former, **facts_of(self.run, merged, self._weights))
            self._write_settings()
            return [str(folder) if folder else None, step]

        folder, step = self.run.ranks.share(decide, "the checkpoint to begin from")
        return StartingPoint(Path(folder) if folder else None, step, pipeline)

    def require(self, folder: str) -> None:
        """Raise on every rank what ``starting_point`` would, of a session that has begun."""

        def read() -> None:
            if (checkpoint := self._requested(folder)) is not None:
                self._load(checkpoint)

        self.run.ranks.share(read, "the state to go on from")

    def _write_settings(self) -> None:
        """What the first checkpoint will say of the run, for readers until then."""
        facts = {
            "model": _model_name(self.run),
            "max_steps": self.run.settings.max_steps,
            "configuration": self._described(),
            PROVENANCE: self.provenance,
        }
        self.run.folder.mkdir(parents=True, exist_ok=True)
        checkpoint_files.write_json(self.run.folder / SETTINGS, facts)

    def facts(self) -> dict[str, Any]:
        """What ``provenance`` records of the training, for its evaluations."""
        if not self.provenance:  # an evaluation before ``train``
            code = code_in_force(self.run.env, self.run.settings, self._hooks())
            merged = {**code[CODE], **code[OWN_CODE]}
            return facts_of(self.run, merged, base_weights(self.run.model))
        of_session = ("date", "earlier")
        return {name: v for name, v in self.provenance.items() if name not in of_session}

    def note_engine(self, engine: object) -> None:
        """Keep for readers what samples; rank 0 alone."""
        name, server = type(engine).__name__, getattr(engine, "server_version", None)
        self.provenance["engine"] = name if server is None else f"{name}, vLLM {server}"
        self._note({PROVENANCE: self.provenance}, "what samples")

    def note_end(self, error: BaseException) -> None:
        """Keep for readers, until the run is resumed, why it ended; rank 0 alone."""
        if isinstance(error, Exception):  # Ctrl-C is no failure
            self._note({"ended": str(error) or repr(error)}, "why the run ended")

    def _note(self, facts: Mapping[str, object], what: str) -> None:
        """Add to ``settings.json``; a failure is logged, and hides nothing else."""
        path = self.run.folder / SETTINGS
        if path.is_file():
            try:
                written = checkpoint_files.read_json(path)
                checkpoint_files.write_json(path, {**written, **facts})
            except (OSError, TypeError, ValueError, VerifiersError) as failed:
                log.warning("%s does not say %s: %s", path, what, failed)

    def _written(self) -> dict[str, object]:
        """The content of ``settings.json``; empty when it is missing or damaged."""
        try:
            written = checkpoint_files.read_json(self.run.folder / SETTINGS)
        except (OSError, ValueError, VerifiersError):
            return {}
        return written if isinstance(written, dict) else {}

    def _described(self) -> dict[str, object]:
        values = configuration(self.run, self._code, self._weights)
        return values | {OBJECTIVE: self.run.settings.objective()}

    def _requested(self, requested: str | bool | None) -> Path | None:
        requested = self.run.settings.resume_from_checkpoint if requested is None else requested
        if not requested:
            return None
        is_newest = requested is True or requested == AUTO
        folder = (
            checkpoint_files.newest_valid(self.run.folder) if is_newest else Path(str(requested))
        )
        if folder is None and requested == AUTO and not checkpoint_files.steps_in(self.run.folder):
            return None
        if folder is None:
            raise CheckpointError(
                f"{self.run.folder} holds no valid checkpoint to resume from",
                path=str(self.run.folder),
            )
        checkpoint_files.verify(folder)
        return folder

    def _load(self, folder: Path) -> tuple[PipelineState, int]:
        """(pipeline, step) of a checkpoint of this run's configuration."""
        pipeline, version, saved = load_pipeline(folder)
        if saved.pop(WEIGHTS_ONLY, False):
            raise CheckpointError(
                f"{folder} holds weights only (save_only_model=True), so training cannot be resumed"
                f" from it; begin a new run with these weights: model = {str(folder)!r}",
                path=str(folder),
            )
        saved.pop(OBJECTIVE, None)  # for readers: the settings behind it are compared in turn
        accepted = saved.pop(CHANGED_CODE, [])
        changed = _require_same(
            saved,
            configuration(self.run, self._code, self._weights),
            folder,
            self.run.settings.accept_changed_code,
        )
        self.changed_code = sorted({*accepted, *changed})
        return pipeline, version

    def _start_afresh(self) -> None:
        """Move the files of an earlier run in the output folder aside, so that two runs are never
        mixed."""
        output = self.run.folder
        if earlier := bool(checkpoint_files.steps_in(output) or self.metrics_file.holds_earlier):
            aside = checkpoint_files.set_aside(output, (METRICS, COMPLETIONS, SETTINGS))
            log.warning(
                "%s holds an earlier run, now in %s; train(resume_from_checkpoint=True) would have"
                " continued it",
                output,
                aside,
            )
        self.metrics_file.start(anew=earlier)


def _model_name(run: TrainingRun) -> str:
    return str(getattr(run.model, "name_or_path", "") or "")


def _require_same(
    saved: Mapping[str, Any], current: Mapping[str, Any], folder: Path, accept_changed_code: bool
) -> list[str]:
    """The source files and functions that changed, and were accepted.

    Raises ``RunMismatch`` for values that differ; warns of keys on one side alone (a checkpoint of
    an older version).
    """
    if apart := sorted(saved.keys() ^ current.keys()):
        log.warning(
            "%s cannot be compared in what it or this version does not record: %s",
            folder,
            ", ".join(apart),
        )
    differences = {
        k: (saved[k], current[k]) for k in saved.keys() & current.keys() if saved[k] != current[k]
    }
    before, now = differences.get(CODE, ({}, {}))
    changed = sorted(
        name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
    )
    functions = _changed_own_code(*differences.get(OWN_CODE, ({}, {})))
    if not functions:
        differences.pop(OWN_CODE, None)
    if not differences:
        return []
    # the functions first: they say more than the files that they are in
    changed = [*functions, *changed]
    reasons = [
        f"{key} was {old!r}, is {new!r}"
        for key, (old, new) in sorted(differences.items())
        if key not in (CODE, OWN_CODE)
    ]
    new_run = f"begin a new run with its weights: model = {str(folder)!r}, in another folder"
    if reasons:
        listed = "; ".join([*reasons, f"{', '.join(changed)} changed"] if changed else reasons)
        raise RunMismatch(
            f"{folder} belongs to another configuration: {listed}. Use those values, or {new_run}",
            differences=differences,
            path=str(folder),
        )
    if not accept_changed_code:
        raise RunMismatch(
            f"{folder} was trained with other code: {', '.join(changed)} changed since. Undo the"
            " change, continue with the present code (--accept-changed-code,"
            f" accept_changed_code=True), which its checkpoints record, or {new_run}",
            differences=differences,
            path=str(folder),
        )
    log.warning(
        "%s was trained with other code; continuing although %s changed", folder, ", ".join(changed)
    )
    return changed


def _changed_own_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The functions and files that differ, functions first; a callback or a file that one session
    alone has is no difference."""
    changed = []
    for name in before.keys() | now.keys():
        is_function = " " in name and not name.startswith(CALLBACK)
        if name in before and name in now:
            differs = before[name] != now[name]
            if differs and not is_code_of_two_pythons(before[name], now[name]):
                changed.append(name)
        elif is_function:
            changed.append(name)
    return sorted(changed, key=lambda name: (" " not in name, name))
