"""transformers' training loop, fitted to ours: every private name of it that we depend on is in this module.

One of its "batches" is one optimizer step. It has no epochs here, because the pipeline has no length; "epoch" in
``eval_strategy`` and ``save_strategy`` means a pass over the examples. What a step does is ``trainer``'s, what a
checkpoint holds is ``resuming``'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import Trainer, TrainerCallback

from verifiers.errors import VerifiersError
from verifiers_trainer.algorithm.batch import TrainBatch
from verifiers_trainer.distributed import batch_sharing, deepspeed, fsdp
from verifiers_trainer.distributed.ranks import Ranks
from verifiers_trainer.pipeline import subclass_hooks
from verifiers_trainer.policy import checkpoint_files, preparation
from verifiers_trainer.policy.reference import Reference
from verifiers_trainer.run import resume
from verifiers_trainer.run.evaluation import numbers_of
from verifiers_trainer.run.metrics_files import MetricsFile
from verifiers_trainer.settings.config import RLConfig

if TYPE_CHECKING:
    from verifiers_trainer.trainer import RLTrainer

log = logging.getLogger(__name__)

FORCED = {
    "gradient_accumulation_steps": 1,
    "ignore_data_skip": True,
    "remove_unused_columns": False,
    "logging_nan_inf_filter": False,
    "ddp_find_unused_parameters": False,
    "use_liger_kernel": False,
    "disable_tqdm": True,
    "label_names": [],
    "report_to": [],
}
"""What the loop needs of transformers' own settings, set on the private copy."""


DECISIONS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
"""What a callback may ask for, and all ranks must do together."""


class Batches:
    """The pipeline as a loader without length."""

    def __init__(self, trainer: RLTrainer):
        self.trainer = trainer

    def __iter__(self) -> Iterator[TrainBatch]:
        while True:
            trainer = self.trainer
            bound_s = trainer.args.generation_timeout + trainer.ranks.timeout_s
            batch = batch_sharing.next_batch(trainer.ranks, self._make, bound_s)
            for _ in range(self.trainer.args.num_iterations):
                yield batch

    def _make(self) -> TrainBatch:
        assert self.trainer.orchestrator is not None
        return self.trainer.orchestrator.next_batch()


class Loop(TrainerCallback):
    """Calls the trainer's steps in their order."""

    def __init__(self, trainer: RLTrainer):
        self.trainer = trainer
        self._passes = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._passes = int(state.epoch or 0)
        self.trainer.begin()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.before_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.after_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self.trainer.finish_step()
        if int(state.epoch) > self._passes:
            self._passes = int(state.epoch)
            control.should_evaluate |= args.eval_strategy == "epoch" and args.eval_delay <= state.epoch
            control.should_save |= args.save_strategy == "epoch"
        return control


class LoopTrainer(Trainer):
    """A ``Trainer`` whose batches, evaluations and checkpoints are ours; ``RLTrainer`` is the whole of it."""

    args: RLConfig
    model: Any
    processing_class: Any
    optimizer: Any
    lr_scheduler: Any
    metrics_file: MetricsFile
    ranks: Ranks
    reference: Reference | None = None
    """What ``beta`` holds the policy near; None without a penalty."""
    splits: bool = False
    """Whether the model is split over the processes once training begins."""
    whole: fsdp.WholeCopy | None = None
    """The whole policy on rank 0, where it is split."""
    _batch: TrainBatch | None
    _held_back = (False, False)
    _withheld: Any = None
    """DeepSpeed's engine of an earlier ``train``, until the next one begins."""
    _step: dict[str, Any]
    _between: dict[str, float]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.splits = fsdp.adopt(self.accelerator, self.args)
        self.is_deepspeed_enabled = deepspeed.is_used(self.accelerator)  # so the model is not placed whole
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def train(self, *args: Any, **keywords: Any) -> Any:
        self.is_deepspeed_enabled = False  # transformers would read and write DeepSpeed's own checkpoints
        if deepspeed.is_used(self.accelerator):
            self._withheld = deepspeed.detach_engine(self.accelerator)
        return super().train(*args, **keywords)

    def _prepare_for_training(self, *args: Any, **keywords: Any) -> Any:
        if deepspeed.is_used(self.accelerator):
            deepspeed.in_one_precision(self.model, self.args)
        with fsdp.preserved_ties(self.model):
            prepared = super()._prepare_for_training(*args, **keywords)
        if self._withheld is not None:
            self.accelerator.deepspeed_engine_wrapped, self._withheld = self._withheld, None
        return prepared

    @property
    def whole_model(self) -> Any:
        """The policy with whole parameters, for rank 0 alone: the model itself unless it is split."""
        if self.whole is None:
            return self.model
        if not fsdp.is_managed(self.model):  # not yet: a warm-up may have changed the weights, which no step renews
            self.whole.refresh(self.model, trained_only=False)
        return self.whole.model

    def renew(self, *, trained_only: bool = True) -> None:
        """Bring ``whole_model`` up to the policy; every rank calls it. Nothing to do unless the model is split."""
        if self.whole is not None:
            self.whole.refresh(self.model, trained_only=trained_only)

    def open_reference(self) -> None:
        """Keep the policy's present weights as the reference, if the settings ask for one; the first call counts."""
        if self.reference is None:
            self.reference = Reference.of(self.model, self.args)

    @property
    def last_step(self) -> dict[str, Any]:
        """The numbers of the newest step, as in ``metrics.jsonl``."""
        return {**(self._batch.stats if self._batch else {}), **self._step}

    def get_train_dataloader(self) -> Any:
        """Blocks for the next batch of the pipeline, for ever."""
        return Batches(self)  # type: ignore[arg-type]

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: Any) -> tuple[list, None]:
        return [next(epoch_iterator)], None

    def gradients_exchanged(self, model: Any, exchanged: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward of a row: ranks exchange gradients once in a step, with the last row's.

        Of a model that is split, with every row: what is not exchanged would be held whole.
        """
        if deepspeed.is_used(
            self.accelerator
        ):  # it exchanges with every row by itself, and steps when told it is the last
            self.accelerator.gradient_state._set_sync_gradients(exchanged)
            return nullcontext()
        exchanged = exchanged or self.splits
        self.accelerator.gradient_state._set_sync_gradients(exchanged)
        return nullcontext() if exchanged else self.accelerator.no_sync(model=model)

    def mean_loss(self, total: Tensor) -> float:
        """The loss of the step, of which ``total`` is this rank's part times the number of ranks."""
        if self.ranks.world == 1:
            return float(total)
        return float(self.ranks.gather([float(total)], "the loss of the step").mean())

    def floating_point_ops(self, inputs: Any) -> int:
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As transformers does; the line of a step has all the numbers of ``metrics.jsonl``."""
        if "loss" in logs:
            logs = {name: value for name, value in self.last_step.items() if value == value} | logs
        super().log(logs, start_time)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        from verifiers_trainer.run.serving import ServingTrainer

        try:
            if subclass_hooks.is_overridden(self, ServingTrainer, "evaluate"):
                own: Any = self
                found = self.ranks.share(
                    lambda: numbers_of(subclass_hooks.call(own.evaluate, {"ignore_keys": ignore_keys_for_eval})),
                    "the evaluation",
                )
                return own.take_evaluation(found)
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        except VerifiersError as error:
            if self.args.eval_required:
                raise
            log.warning("the evaluation at step %d failed, and training goes on: %s", self.state.global_step, error)
            self.control.should_evaluate = False
            return {}

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        return bool(metrics) and super()._determine_best_metric(metrics, trial)

    def _maybe_log_save_evaluate(self, *args: Any, **keywords: Any) -> None:
        """In the midst of a batch that is used several times, saving and stopping wait for its end."""
        control, held = self.control, self._held_back
        if self.ranks.world > 1:  # a callback may have decided on one rank alone
            flags = self.ranks.any([getattr(control, name) for name in DECISIONS], "the end of the step")
            control.__dict__.update(zip(DECISIONS, flags, strict=True))
        asked = (control.should_save or held[0], control.should_training_stop or held[1])
        within = bool(self.state.global_step % self.args.num_iterations)
        self._held_back = asked if within else (False, False)
        control.should_save, control.should_training_stop = (False, False) if within else asked
        super()._maybe_log_save_evaluate(*args, **keywords)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        started = time.perf_counter()
        resume.save(self)  # type: ignore[arg-type]
        self._between["time/checkpoint"] = time.perf_counter() - started

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.whole is None:
            super().save_model(output_dir, _internal_call)
        else:  # transformers would write the parts of each process
            self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Weights and tokenizer; the pickled arguments that transformers would add are left out."""
        if not self.ranks.is_main:
            return
        folder = Path(output_dir) if output_dir else self.args.folder
        folder.mkdir(parents=True, exist_ok=True)
        preparation.save_weights(self.whole_model, folder, state_dict)
        self.processing_class.save_pretrained(folder)

    def create_optimizer(self, model: Any = None) -> Any:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new:
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
            deepspeed.remember(optimizer)
        return optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if deepspeed.is_used(self.accelerator) and not any(map(deepspeed.holds, self.model.parameters())):
            return  # transformers is too early: DeepSpeed may round what it takes over
        preparation.load_weights(self.model if model is None else model, Path(resume_from_checkpoint))
        self.open_reference()
        if self.reference is not None:
            self.reference.load(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        preparation.load_weights(self.model, Path(self.state.best_model_checkpoint or ""))
        self.renew()

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is not None:
            if deepspeed.is_used(self.accelerator):
                self._load_from_checkpoint(checkpoint_folder)
            checkpoint_files.load_optimizer(Path(checkpoint_folder), self.optimizer)
            checkpoint_files.load_scheduler(Path(checkpoint_folder), self.lr_scheduler)
            if self.ranks.is_main:
                self.metrics_file.resume(self.state.global_step)

    def _load_rng_state(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is not None:
            checkpoint_files.load_rng(Path(checkpoint_folder), self.ranks.rank)

    def _load_scaler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is not None:
            checkpoint_files.load_scaler(Path(checkpoint_folder), self.accelerator.scaler)

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        return fsdp.whole(norm) if isinstance(norm, Tensor) else norm

    def scale_is_too_large(self) -> bool:
        """Whether gradients that are no numbers may be fp16's scale alone: its scaler skips the step and halves it."""
        scaler = self.accelerator.scaler
        return scaler is not None and scaler.is_enabled() and scaler.get_scale() > 1
