"""``HFLoop``: transformers' trainer with a loop over optimizer steps, and abstract methods for what
reinforcement learning changes.

This module holds every private name of transformers and accelerate that the trainer uses; it does
not depend on rollouts. transformers prepares model, optimizer, schedule and checkpoint, and ends a
training; what lies between, ``_run_epoch``, is here. A subclass defines ``begin``, ``step``,
``weight_update``, ``run_evaluation`` and ``save_checkpoint``, and overrides some of transformers'
public methods (``get_train_dataloader``, ``training_step``, ``compute_loss``, ``evaluate``,
``save_model``, ``log``). ``prepare`` is ``train`` without the loop, for a loop of the caller's own.

One "batch" of the loop is one optimizer step, which ``take_step`` takes: nothing else clips
gradients or calls an optimizer. The loop has no epochs, because the stream of batches has no
length; "epoch" in ``eval_strategy`` and ``save_strategy`` means a pass over the examples, which
``step`` counts in ``state.epoch``.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import accelerate.optimizer as accelerate_optimizer
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers.optimization import GreedyLR, get_scheduler
from transformers.trainer import Trainer
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from verifiers.errors import ConfigError, VerifiersError
from verifiers_trainer.distributed import deepspeed, fsdp
from verifiers_trainer.distributed.ranks import Ranks
from verifiers_trainer.policy import checkpoint_files, preparation
from verifiers_trainer.settings.config import RLConfig

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from transformers.trainer_callback import TrainerControl, TrainerState
    from transformers.training_args import TrainingArguments

log = logging.getLogger(__name__)

accelerate_optimizer.is_lomo_available = functools.cache(accelerate_optimizer.is_lomo_available)
# accelerate searches the path for that package in every step, which takes 5 ms

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
"""Values of transformers' settings that the loop requires, set on the private copy."""

TRAINER_STATE = "trainer_state.json"
DECISIONS = (
    "should_training_stop",
    "should_epoch_stop",
    "should_save",
    "should_evaluate",
    "should_log",
)
"""Control flags that a callback may set; all ranks must agree on them."""


class Steps(TrainerCallback):
    """Begins the loop's first step, and triggers "epoch" strategies at the end of a pass."""

    def __init__(self, loop: HFLoop):
        self.loop = loop
        self._passes = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self._passes = int(state.epoch or 0)
        # a resumed state holds the intervals of the earlier run
        state.compute_steps(args, state.max_steps)
        self.loop.begin()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> TrainerControl:
        if int(state.epoch) > self._passes:
            self._passes = int(state.epoch)
            control.should_evaluate |= (
                args.eval_strategy == "epoch" and args.eval_delay <= state.epoch
            )
            control.should_save |= args.save_strategy == "epoch"
        if self.loop.has_failed:
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False
        return control


class HFLoop(Trainer):
    """A ``transformers.Trainer`` whose batches, evaluations and checkpoints a subclass defines."""

    args: RLConfig
    model: Any
    processing_class: Any
    optimizer: Any
    lr_scheduler: Any
    splits: bool = False
    """Whether the model is split over the processes during training."""
    stream: Iterator[Any]
    """The batches to come, from ``begin`` on."""
    grad_norm: float = 0.0
    """Gradient norm of the newest step, before clipping."""
    grad_norms: Mapping[str, float] = MappingProxyType({})
    """That of each part of ``clipped_apart``, by its name."""
    is_complete: bool = False
    """Whether the batches ended before ``max_steps``, because the task is solved."""
    is_interrupted: bool = False
    """Whether a signal ends the training after the present step, on every rank."""
    has_failed: bool = False
    """Whether an error ends the training after the present step, which is whole."""
    _is_prepared_only = False
    """Whether the loop is the caller's own."""
    _rate_of_step: float = math.nan
    """The learning rate of the newest step."""
    _pending_decisions = (False, False)
    _earlier_engine: object = None
    """DeepSpeed's engine of an earlier ``train``, until the next ``train`` begins."""

    def __init__(self, ranks: Ranks, callbacks: list[TrainerCallback], **keywords: Any):
        self.ranks = ranks
        self._steps = Steps(self)
        super().__init__(callbacks=[self._steps, *callbacks], **keywords)
        self.remove_callback(PrinterCallback)

    # --- abstract methods -------------------------------------------------------------------------

    def begin(self) -> None:
        """Prepare the first batch; called after model, optimizer and checkpoint are loaded."""
        raise NotImplementedError

    def step(self, batch: Any) -> Tensor:
        """An optimizer step on a batch; its loss on this process. Calls ``take_step`` once."""
        raise NotImplementedError

    def weight_update(self) -> AbstractContextManager[object]:
        """Context in which the weights change, after the gradients are clipped."""
        raise NotImplementedError

    def run_evaluation(self, ignore_keys: list[str] | None) -> dict[str, float]:
        """Evaluate the present weights and return the metrics by name."""
        raise NotImplementedError

    def save_checkpoint(self) -> None:
        """Write the checkpoint of the present step."""
        raise NotImplementedError

    # --- for a subclass ---------------------------------------------------------------------------

    def clipped_apart(self) -> Mapping[str, Sequence[torch.nn.Parameter]]:
        """Parts of the trained weights whose gradients are each clipped by their own norm; empty:
        all are clipped together."""
        return {}

    @property
    def learning_rate(self) -> float:
        """The learning rate of the present step."""
        return float(self._get_learning_rate())

    def backward(self, model: torch.nn.Module, loss: Tensor) -> None:
        """Add the gradients of a packed row; within ``gradients_exchanged``."""
        if deepspeed.is_used(self.accelerator):
            deepspeed.backward(self.accelerator, loss)
        else:
            self.accelerator.backward(loss)

    def gradients_exchanged(
        self, model: torch.nn.Module, exchanged: bool
    ) -> AbstractContextManager[object]:
        """Context around forward and backward of a packed row: ranks exchange gradients with the
        last row alone.

        A split model exchanges with every row: gradients that are not exchanged would be held
        whole.
        """
        if deepspeed.is_used(self.accelerator):
            deepspeed.mark(self.accelerator, is_last=exchanged)
            return nullcontext()
        exchanged = exchanged or self.splits
        self.accelerator.gradient_state._set_sync_gradients(exchanged)
        return nullcontext() if exchanged else self.accelerator.no_sync(model=model)

    def take_step(self, *, is_update: bool) -> None:
        """Clip the accumulated gradients, step the optimizer within ``weight_update``, step the
        schedule, drop the gradients, and count the step in ``state.global_step``.

        The one place where weights change. Without ``is_update`` there are no gradients, and the
        optimizer takes no step: momentum alone would move the weights; the schedule continues.
        """
        model = self.model_wrapped
        self.grad_norm = self._clipped(model) if is_update else 0.0
        with self.weight_update():
            self.control = self.callback_handler.on_pre_optimizer_step(
                self.args, self.state, self.control
            )
            if is_update:
                self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        self._rate_of_step = self._get_learning_rate()
        if not self.accelerator.optimizer_step_was_skipped and not isinstance(
            self.lr_scheduler, ReduceLROnPlateau | GreedyLR
        ):
            self.lr_scheduler.step()
        model.zero_grad()
        self.state.global_step += 1

    def _clipped(self, model: torch.nn.Module) -> float:
        """Clip the gradients; their norm before. DeepSpeed clips and steps in one call: this one.
        Where the norm is not finite, it leaves the weights unchanged."""
        if parts := self.clipped_apart():
            self.accelerator.unscale_gradients()
            limit = self.args.max_grad_norm or math.inf
            self.grad_norms = {
                name: float(torch.nn.utils.clip_grad_norm_(weights, limit))
                for name, weights in parts.items()
            }
            return math.hypot(*self.grad_norms.values())
        if deepspeed.is_used(self.accelerator):
            deepspeed.step(self.accelerator)
        norm = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        norm = self._get_grad_norm(model, grad_norm=norm)
        return math.nan if norm is None else float(norm)

    def scale_is_too_large(self) -> bool:
        """Whether fp16's loss scale alone may explain non-finite gradients: the scaler skips the
        step and halves it."""
        scaler = self.accelerator.scaler
        return scaler is not None and scaler.is_enabled() and scaler.get_scale() > 1

    # --- the model and the optimizer --------------------------------------------------------------

    def _build_accelerator_args(self, **keywords: object) -> dict[str, object]:
        """Without accelerate's compilation of the whole model: the layers are compiled in place."""
        arguments: dict[str, object] = super()._build_accelerator_args(**keywords)
        arguments.pop("dynamo_plugin", None)
        return arguments

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.splits = fsdp.adopt(self.accelerator, self.args)
        # prevents moving the whole model to the device
        self.is_deepspeed_enabled = deepspeed.is_used(self.accelerator)
        if self.args.torch_compile and (self.splits or self.is_deepspeed_enabled):
            raise ConfigError(
                "torch_compile is for a model that is whole on each process: leave it out, or train"
                " without FSDP and DeepSpeed"
            )
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def train(self, *args: Any, **keywords: Any) -> Any:
        self.is_deepspeed_enabled = (
            False  # transformers would read and write DeepSpeed's own checkpoints
        )
        if deepspeed.is_used(self.accelerator):
            self._earlier_engine = deepspeed.detach_engine(self.accelerator)
        return super().train(*args, **keywords)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> Optimizer:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new:
            optimizer.param_groups[:] = [
                group for group in optimizer.param_groups if group["params"]
            ]
            deepspeed.remember(optimizer)
            is_fused = optimizer.param_groups[0].get("fused")
            log.info("optimizer: %s%s", type(optimizer).__name__, ", fused" if is_fused else "")
        return optimizer

    def _prepare_for_training(self, *args: object, **keywords: object) -> object:
        if deepspeed.is_used(self.accelerator):
            deepspeed.in_one_precision(self.model, self.args)
        with fsdp.preserved_ties(self.model):
            prepared = super()._prepare_for_training(*args, **keywords)
        if self._earlier_engine is not None:
            self.accelerator.deepspeed_engine_wrapped = self._earlier_engine
            self._earlier_engine = None
        return prepared

    def _clip_grad_norm(self, model: torch.nn.Module) -> object:
        norm = super()._clip_grad_norm(model)
        return fsdp.full_tensor(norm) if isinstance(norm, Tensor) else norm

    # --- the loop ---------------------------------------------------------------------------------

    def prepare(self, checkpoint_folder: Path | None) -> None:
        """Prepare model, optimizer, schedule and checkpoint, and ``begin``, as ``train`` does; the
        steps are the caller's."""
        self._is_prepared_only = True
        try:
            HFLoop.train(self, str(checkpoint_folder) if checkpoint_folder else None)
        finally:
            self._is_prepared_only = False

    def _run_epoch(  # type: ignore[override]
        self,
        *,
        epoch: int,
        epochs_trained: int,
        train_dataloader: Any,
        trial: object,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        resume_from_checkpoint: str | None,
        **_: object,
    ) -> None:
        """The optimizer steps of a training, as transformers' method of this name takes them."""
        if epoch == epochs_trained:
            self._load_rng_state(resume_from_checkpoint)
        self.stream = iter(train_dataloader)
        if self._is_prepared_only:
            self.control.should_training_stop = True
            return
        rate: object = None
        norm: float | None = None

        def log_save_evaluate() -> None:
            self._maybe_log_save_evaluate(
                self._tr_loss,
                norm,
                self.model_wrapped,
                trial,
                epoch,
                ignore_keys_for_eval,
                start_time,
                learning_rate=rate,
            )

        while True:
            if (batch := next(self.stream, None)) is None:
                self.is_complete = self.control.should_training_stop = True
                self.control.should_save = self.state.global_step > 0
                break
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            self._tr_loss += self.step(batch)
            norm, rate = self.grad_norm, self._rate_of_step
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            log_save_evaluate()
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        log_save_evaluate()

    def _finalize_training(self, *args: object, **keywords: object) -> object:
        if self._is_prepared_only:
            self.control.should_training_stop = False
            return None
        return super()._finalize_training(*args, **keywords)

    def _evaluate(
        self, trial: object, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        try:
            metrics = self.run_evaluation(ignore_keys_for_eval)
        except VerifiersError as error:
            if self.args.eval_required:
                raise
            log.warning(
                "the evaluation at step %d failed; training continues: %s",
                self.state.global_step,
                error,
            )
            self.control.should_evaluate = False
            return {}
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if isinstance(self.lr_scheduler, ReduceLROnPlateau | GreedyLR) and not skip_scheduler:
            metric = self.args.metric_for_best_model or "loss"
            metric = metric if metric.startswith("eval_") else f"eval_{metric}"
            if metric not in metrics:
                raise ConfigError(
                    f"metric_for_best_model is {metric!r}, and the evaluation has"
                    f" {', '.join(metrics) or 'no metrics'}"
                )
            self.lr_scheduler.step(metrics[metric])
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: object) -> bool:
        return bool(metrics) and super()._determine_best_metric(metrics, trial)

    def _maybe_log_save_evaluate(self, *args: Any, **keywords: Any) -> None:
        """Postpone saving and stopping to the last of the steps of a batch."""
        control, pending = self.control, self._pending_decisions
        if self.ranks.world > 1:  # a callback may set a flag on one rank alone
            flags = [*(getattr(control, name) for name in DECISIONS), self.is_interrupted]
            *decided, self.is_interrupted = self.ranks.any(flags, "the end of the step")
            control.__dict__.update(zip(DECISIONS, decided, strict=True))
        if self.is_interrupted:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
        decisions = (control.should_save or pending[0], control.should_training_stop or pending[1])
        within = bool(self.state.global_step % self.args.steps_per_batch)
        within = within and not self.is_complete and not self.is_interrupted
        self._pending_decisions = decisions if within else (False, False)
        control.should_save, control.should_training_stop = (False, False) if within else decisions
        super()._maybe_log_save_evaluate(*args, **keywords)

    # --- checkpoints ------------------------------------------------------------------------------

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        self.save_checkpoint()

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        if deepspeed.is_used(self.accelerator) and not any(
            map(deepspeed.holds, self.model.parameters())
        ):
            return  # too early: DeepSpeed may round the parameters it takes over
        preparation.load_weights(
            self.model if model is None else model, Path(resume_from_checkpoint)
        )

    def _load_best_model(self) -> None:
        preparation.load_weights(self.model, Path(self.state.best_model_checkpoint or ""))

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is not None:
            if deepspeed.is_used(self.accelerator):
                self._load_from_checkpoint(checkpoint_folder)
            checkpoint_files.load_optimizer(Path(checkpoint_folder), self.optimizer)
            checkpoint_files.load_scheduler(Path(checkpoint_folder), self.lr_scheduler)
            state = checkpoint_files.read_json(Path(checkpoint_folder) / TRAINER_STATE)
            if state["max_steps"] != self.args.max_steps:
                self._change_length(state["max_steps"])

    def _change_length(self, earlier: int) -> None:
        """Follow the schedule of this run's ``max_steps`` from the next step on, and log what that
        changes."""
        steps = self.args.max_steps
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        length = f"max_steps was {earlier} and is {steps}"
        is_ours = isinstance(schedule, LambdaLR) and self._created_lr_scheduler
        next_step = schedule.last_epoch if is_ours else 0
        before, now = (
            self._factors(total, max(earlier, steps))[next_step:] if is_ours else []
            for total in (earlier, steps)
        )
        if before == now:
            log.info("%s; the learning rate does not depend on it", length)
            return
        rates = [base * now[0] for base in schedule.base_lrs]
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule._last_lr = rates
        log.warning(
            "%s: from here on the schedule %r is that of %d steps; the learning rate of step %d is"
            " %.3g, and not %.3g",
            length,
            getattr(self.args.lr_scheduler_type, "value", self.args.lr_scheduler_type),
            steps,
            next_step + 1,
            schedule.base_lrs[0] * now[0],
            schedule.base_lrs[0] * before[0],
        )

    def _factors(self, max_steps: int, count: int) -> list[float]:
        """The schedule's factor of the learning rate in each of ``count`` steps, in a run of
        ``max_steps``."""
        unused, options = torch.optim.SGD([torch.zeros(1)], lr=1.0), self.args.lr_scheduler_kwargs
        warmup = self.args.get_warmup_steps(max_steps)
        scheduler: Any = get_scheduler  # the type of its options is narrower than the arguments'
        schedule = scheduler(self.args.lr_scheduler_type, unused, warmup, max_steps, options)
        return [schedule.lr_lambdas[0](step) for step in range(count + 1)]

    def _load_rng_state(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is not None:
            checkpoint_files.load_rng(Path(checkpoint_folder), self.ranks.rank)

    def _load_scaler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is not None:
            checkpoint_files.load_scaler(Path(checkpoint_folder), self.accelerator.scaler)
