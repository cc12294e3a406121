"""What a trainer writes into a checkpoint, and when a checkpoint may be continued.

Files and folders are ``checkpoint``'s, the pipeline's part is ``pending``'s; this module knows what of a trainer goes
into them, and compares the configuration a checkpoint was made under with the present one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.errors import CheckpointError, RunMismatch
from verifiers.runtime.failpoints import failpoint
from verifiers_trainer.distributed import fsdp
from verifiers_trainer.pipeline.saved_state import load_pipeline, save_pipeline
from verifiers_trainer.pipeline.schedule import PipelineState, digest
from verifiers_trainer.policy import checkpoint_files
from verifiers_trainer.run.metrics_files import COMPLETIONS, METRICS

if TYPE_CHECKING:
    from verifiers_trainer.trainer import RLTrainer

log = logging.getLogger(__name__)

WEIGHTS_ONLY = "weights_only"


def configuration(trainer: RLTrainer) -> dict[str, Any]:
    """What must be the same when a checkpoint is resumed, in values that JSON keeps."""
    env, table = trainer.env, trainer.examples
    return {
        "env_id": env.env_id,
        "env_args": {key: str(value) for key, value in env.env_args.items()},
        "num_examples": len(table),
        "examples": digest(table),
        "chat_template": hashlib.sha256(str(trainer.processing_class.chat_template).encode()).hexdigest()[:16],
        "vocabulary": len(trainer.processing_class),
        **trainer.args.resume_values(),
    }


def save(trainer: RLTrainer) -> None:
    """Write the checkpoint of the present step, then remove those that ``save_total_limit`` no longer covers.

    Rank 0 writes, with the random generators of every rank. Raises ``CheckpointError``, on every rank, when it cannot.
    """
    ranks = trainer.ranks
    failpoint("checkpoint.before_sending")
    rngs = ranks.collect(checkpoint_files.rng_to_bytes(), "the states of the random generators")

    optimizer = reference = None
    if not trainer.args.save_only_model:
        optimizer = fsdp.whole_state(trainer.optimizer, keep=ranks.is_main)
        reference = None if trainer.reference is None else trainer.reference.state(keep=ranks.is_main)

    def write() -> str | None:
        _write(trainer, rngs, optimizer, reference)
        return trainer.state.best_model_checkpoint

    trainer.state.best_model_checkpoint = ranks.share(write, "the checkpoint to be written")


def _write(
    trainer: RLTrainer, rngs: Sequence[bytes], optimizer: dict[str, Any] | None, reference: dict[str, Any] | None
) -> None:
    assert trainer.orchestrator is not None
    args, state, output = trainer.args, trainer.state, trainer.args.folder
    folder = output / f"{checkpoint_files.PREFIX}{state.global_step}"
    best = output / f"{checkpoint_files.PREFIX}{state.best_global_step}" if state.best_global_step else None
    if best is not None and args.load_best_model_at_end and (best == folder or best.is_dir()):
        state.best_model_checkpoint = str(best)
    pipeline = trainer.orchestrator.snapshot()
    settings = configuration(trainer) | ({WEIGHTS_ONLY: True} if args.save_only_model else {})
    with checkpoint_files.writing(folder) as temporary:
        trainer.save_model(str(temporary), _internal_call=True)
        if not args.save_only_model:
            checkpoint_files.save_optimizer(temporary, trainer.optimizer, optimizer)
            checkpoint_files.save_scheduler(temporary, trainer.lr_scheduler)
            checkpoint_files.save_scaler(temporary, trainer.accelerator.scaler)
            for rank, rng in enumerate(rngs):
                checkpoint_files.save_rng(temporary, rng, rank)
            if trainer.reference is not None:
                trainer.reference.save(temporary, reference)
        save_pipeline(temporary, pipeline, trainer.policy_version, settings)
        state.save_to_json(str(temporary / "trainer_state.json"))
    checkpoint_files.prune(folder, args.save_total_limit, protected=best, keep_every=args.keep_every)


def starting_point(trainer: RLTrainer, wanted: str | bool | None) -> tuple[Path | None, int]:
    """(checkpoint to continue, its step), (None, 0) to start afresh; the pipeline is set, what is in the way moved.

    Rank 0 decides for all. Raises what ``resolve`` and ``load`` raise, on every rank.
    """

    def decide() -> list[Any]:
        folder, step = resolve(trainer, wanted), 0
        if folder is None:
            start_afresh(trainer)
        else:
            trainer._pipeline, step = load(trainer, folder)
        return [str(folder) if folder else None, step]

    folder, step = trainer.ranks.share(decide, "the checkpoint to begin from")
    return (Path(folder) if folder else None), step


def resolve(trainer: RLTrainer, wanted: str | bool | None) -> Path | None:
    """The checkpoint to continue: a path, or the newest valid one for True; None to start afresh.

    Raises ``CheckpointError`` when it is damaged or there is none.
    """
    if wanted is None:
        wanted = trainer.args.resume_from_checkpoint
    if not wanted:
        return None
    output = trainer.args.folder
    folder = checkpoint_files.newest_valid(output) if wanted is True else Path(wanted)
    if folder is None:
        raise CheckpointError(f"{output} holds no valid checkpoint to resume from", path=str(output))
    checkpoint_files.verify(folder)
    return folder


def load(trainer: RLTrainer, folder: Path) -> tuple[PipelineState, int]:
    """(pipeline, step) of a checkpoint of this run's configuration.

    Raises ``RunMismatch`` listing every difference, ``CheckpointError`` for one that holds only weights.
    """
    pipeline, version, saved = load_pipeline(folder)
    if saved.pop(WEIGHTS_ONLY, False):
        raise CheckpointError(
            f"{folder} holds weights only (save_only_model=True), so training cannot be resumed from it; give the "
            "folder as the model to start afresh with these weights",
            path=str(folder),
        )
    _require_same(saved, configuration(trainer), folder)
    return pipeline, version


def start_afresh(trainer: RLTrainer) -> None:
    """Move what an earlier run left in the output folder aside: two runs are never mixed, and nothing is lost."""
    output = trainer.args.folder
    if earlier := bool(checkpoint_files.steps_in(output) or trainer.metrics_file.holds_earlier):
        aside = checkpoint_files.set_aside(output, (METRICS, COMPLETIONS))
        log.warning(
            "%s holds an earlier run, now in %s; train(resume_from_checkpoint=True) would have continued it",
            output,
            aside,
        )
    trainer.metrics_file.start(anew=earlier)


def _require_same(saved: Mapping[str, Any], current: Mapping[str, Any], folder: Path) -> None:
    """Refuse settings that differ; warn of those that only one side has, such as in a checkpoint of version 0.2.0."""
    if apart := sorted(saved.keys() ^ current.keys()):
        log.warning("%s cannot be compared in what it or this version does not record: %s", folder, ", ".join(apart))
    differences = {k: (saved[k], current[k]) for k in saved.keys() & current.keys() if saved[k] != current[k]}
    if differences:
        listed = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in sorted(differences.items()))
        raise RunMismatch(
            f"{folder} belongs to another configuration: {listed}. Use those values, or start afresh in another folder",
            differences=differences,
            path=str(folder),
        )
