"""``RLTrainer``: reinforcement learning of a language model in an environment, on
``transformers.Trainer``.

``RLTrainer.step`` is one optimizer step; ``begin`` comes before the first, and each batch has one
or more of them. It is written in the verbs that a loop of one's own is written in: ``next_batch``
(or ``sample`` and ``batch_of``), ``forward_backward``, ``optim_step``, ``save_state`` and
``load_state``. The parts: ``TrainingRun`` (policy, settings, environments, processes),
``PolicyServer`` (engine and clients), ``StepRecorder`` (metrics and completions), ``Checkpoints``,
and a source of batches (``pipeline``). ``HFLoop`` has transformers' loop. The loss is defined in
``algorithm``.

A subclass may override ``get_batch``, ``sample_batch``, ``compute_rewards``, ``evaluate``,
``compute_loss`` and ``step_metrics``. Constructing a trainer starts nothing: the engine starts with
``train``, ``evaluate`` or a verb, and ends with ``close``, at the end of ``train``, or of the
``with`` block.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import TrainOutput, set_seed

from verifiers.data.examples import Example
from verifiers.data.sources import DatasetLike
from verifiers.environments.base import Environment
from verifiers.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteLoss,
    RunError,
    WeightSyncError,
)
from verifiers.runs.rollout import RunContext
from verifiers.runtime.values import Count, checked
from verifiers_trainer.algorithm import old_logprobs
from verifiers_trainer.algorithm.batch import Group, TrainBatch
from verifiers_trainer.algorithm.diagnostics import RatioMeter
from verifiers_trainer.algorithm.losses import LossInput, Objective, resolve_loss
from verifiers_trainer.algorithm.packing import PackedRow, forward_arguments
from verifiers_trainer.algorithm.state import load_state, state_of
from verifiers_trainer.distributed import batch_sharing, deepspeed, fsdp
from verifiers_trainer.engines.policy_client import PolicyClient
from verifiers_trainer.engines.processing import processing_of
from verifiers_trainer.engines.role_adapters import parameters_of
from verifiers_trainer.hf_loop import FORCED, HFLoop
from verifiers_trainer.pipeline import curriculum, custom_batches, rewards, subclass_hooks
from verifiers_trainer.pipeline.custom_batches import BatchSource
from verifiers_trainer.pipeline.pipeline import sample_groups
from verifiers_trainer.pipeline.schedule import PipelineState, amid_batch
from verifiers_trainer.policy import checkpoint_files, preparation
from verifiers_trainer.policy.compiled import compiled_layers
from verifiers_trainer.policy.exporting import exporting
from verifiers_trainer.policy.logprobs import install_logprob_forward, uninstall
from verifiers_trainer.policy.teacher import AnyTeacher, TaskTeachers, Teacher, members_of
from verifiers_trainer.run import context, evaluation, memory, sanity_checks
from verifiers_trainer.run.canary import Canary
from verifiers_trainer.run.context import TrainingRun
from verifiers_trainer.run.history import History
from verifiers_trainer.run.policy_server import PolicyServer
from verifiers_trainer.run.progress import ProgressLine
from verifiers_trainer.run.proof import write_proof
from verifiers_trainer.run.provenance import CALLBACK
from verifiers_trainer.run.recorder import StepRecorder
from verifiers_trainer.run.resume import Checkpoints
from verifiers_trainer.run.session import Session
from verifiers_trainer.run.sight import first_prompt, prompt_of_rows
from verifiers_trainer.run.signals import Interruption, exit_of
from verifiers_trainer.run.step import Step
from verifiers_trainer.run.trackers import installed
from verifiers_trainer.settings.config import RLConfig

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers.modeling_utils import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from verifiers.results import GenerateOutputs
    from verifiers_trainer.algorithm.advantages import AdvantageFunction

log = logging.getLogger(__name__)

SPENT_ON_A_BATCH = {"time/pack": 0.0, "time/wait_generation": 0.0}
"""Seconds that the first optimizer step of a batch has, and the others have not."""


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """What ``forward_backward`` computed, over all processes."""

    loss: float
    """Σ weight · loss over the tokens: the mean over them as a batch weighs them."""
    metrics: dict[str, float]
    """Metrics of the tokens under the names of ``metrics.jsonl``: ratios, entropy, those of the
    loss. Empty without a token that carries loss."""
    logprobs: list[Tensor] = field(default_factory=list, repr=False)
    """log π [T] of each row of this process, without a gradient."""


class RLTrainer(HFLoop):
    """Trains ``model`` in ``env``.

    Args:
        model: A causal language model, a PEFT model, or a name (hub id, folder, ``builtin:tiny``).
        env: An environment, its id, or a list of several.
        args: An ``RLConfig``, of which a private copy is used.
        config: The same as ``args``.
        processing_class: The tokenizer; default: the model's own.
        tokenizer: The same as ``processing_class``.
        callbacks: Callbacks of transformers.
        optimizers: Optimizer and scheduler in place of those of the settings, as in transformers.
        peft_config: A PEFT configuration, which overrides the LoRA settings.
        dataset: Rows that replace the environment's. A ``dataset`` of finished rollouts (a saved
            run, results, or columns of prompts, completions and rewards) is trained on without
            generating, and needs no environment (``offline``).
        eval_dataset: Rows that replace the environment's evaluation set.
        eval_env: Another environment to evaluate in.
        client: A vLLM server to sample on in place of the engine of the settings: its URL, or a
            client of it.
        loss: Overrides the setting of this name.
        advantage: Overrides the setting of this name.

    Raises ``ConfigError`` with every problem at once.

        config = vf.RLConfig(batch_size=64, rollouts_per_example=8)
        trainer = vf.RLTrainer("builtin:tiny", "reverse-text", config)
        trainer.train()
    """

    config_class: type[RLConfig] = RLConfig
    """Class of the default settings."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel | str,
        env: Environment | str | Sequence[Environment | str] | None = None,
        args: RLConfig | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[object, object] = (None, None),
        peft_config: PeftConfig | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: RLConfig | None = None,
        dataset: DatasetLike | GenerateOutputs | Sequence[str | Path] | None = None,
        eval_dataset: DatasetLike | None = None,
        eval_env: Environment | str | None = None,
        client: object = None,
        loss: str | Callable[[LossInput], Tensor] | None = None,
        advantage: str | AdvantageFunction | None = None,
    ):
        fsdp.require_launchable(optimizers)
        args = context.either("args", args, "config", config)
        server = context.server_of(client)
        settings = context.final_settings(
            args, self.config_class, inference=server, loss=loss, advantage=advantage
        )
        report_to = installed(settings.report_to)  # ours, on threads: that of transformers is off
        is_quiet = bool(settings.disable_tqdm)
        settings.set_fields(FORCED)
        # transformers seeds in its constructor; this one seeds in train()
        with checkpoint_files.untouched_rng():
            self.training_run = run = TrainingRun.open(
                model,
                env,
                settings,
                tokenizer=context.either(
                    "processing_class", processing_class, "tokenizer", tokenizer
                ),
                dataset=dataset,
                eval_env=eval_env,
                eval_rows=eval_dataset,
                peft_config=peft_config,
            )
            self.criterion = Objective.of(
                resolve_loss(settings.loss, **settings.loss_parameters()), settings
            )
            self.server = PolicyServer(run)
            self.recorder = StepRecorder(run, report_to)
            self.checkpoints = Checkpoints(run, self.recorder.file, self._hooks)
            self.batches: BatchSource | None = None
            """Source of each step's batch during training; on rank 0 alone."""
            self.checks_sampler = True
            """Whether every step compares the log-probabilities of sampler and trainer."""
            self.agreement = sanity_checks.Agreements(
                partial(sanity_checks.Agreement, settings, run.tokenizer), settings.adapter_roles
            )
            """What sampler and trainer may differ by."""
            self.canary = Canary(run)
            self.session = Session()
            """What is of the present ``train`` or ``open``, or of the last."""
            self._drawn_step = 0
            self.progress = ProgressLine(self, quiet=is_quiet or not run.ranks.is_main)
            super().__init__(
                ranks=run.ranks,
                model=run.model,
                args=settings,
                processing_class=run.tokenizer,
                train_dataset=None,
                eval_dataset=(
                    [] if settings.eval_strategy != "no" else None
                ),  # ``evaluate`` selects the rows
                callbacks=[self.recorder.trackers, self.progress, *(callbacks or [])],
                optimizers=optimizers,
            )
        # DeepSpeed steps within the backward pass, which may therefore not be left
        is_alone = run.ranks.world == 1 and not deepspeed.is_used(self.accelerator)
        self.interruption = Interruption(raises_anywhere=is_alone)
        """What a signal during ``train`` does."""
        self._exit_code = 0
        run.copy_policy(self.splits)

    # --- train ------------------------------------------------------------------------------------

    def train(  # type: ignore[override]
        self, resume_from_checkpoint: str | bool | None = None, **keywords: Any
    ) -> TrainOutput:
        """Train for ``max_steps`` optimizer steps; ``True`` resumes from the newest valid
        checkpoint, a path from it.

        ``"auto"`` resumes if there is a checkpoint, and starts otherwise.

        Ends earlier when the task is solved (``is_complete``). Without a checkpoint, an earlier run
        in the output folder is moved aside. Raises ``RunError`` and its subclasses when training
        cannot continue, after the last whole step is saved; ``RunMismatch`` when the checkpoint has
        another configuration. SIGTERM saves the last whole step and raises ``SystemExit(143)``,
        Ctrl-C raises ``KeyboardInterrupt`` after it.
        """
        self._exit_code = 0
        try:
            with self.ranks.together(), self.interruption:
                output = self._train(resume_from_checkpoint, keywords)
        except KeyboardInterrupt as error:
            if self.exit_code:
                raise exit_of(self.exit_code) from error
            raise
        if self.exit_code:
            raise exit_of(self.exit_code)
        return output

    @property
    def exit_code(self) -> int:
        """128 + the signal that ended ``train``, of this process or of rank 0; 0 without one."""
        signum = self.interruption.signum
        return self._exit_code if signum is None else 128 + signum

    def _train(
        self, resume_from_checkpoint: str | bool | None, keywords: Mapping[str, object]
    ) -> TrainOutput:
        folder, step = self._start_from(resume_from_checkpoint)
        if folder is not None and step >= self.args.max_steps:
            log.warning(
                "%s is of step %d and max_steps is %d: nothing to train",
                folder,
                step,
                self.args.max_steps,
            )
            preparation.load_weights(self.model, folder)
            self.training_run.renew()
            self.state.global_step = step
            return TrainOutput(step, math.nan, {})
        set_seed(self.args.seed)
        install_logprob_forward(self.model)
        try:
            with compiled_layers(self.model, self.args):
                output = super().train(
                    resume_from_checkpoint=str(folder) if folder else None, **keywords
                )
            if self.is_interrupted:
                self._exit_code = 128 + signal.SIGTERM
                raise KeyboardInterrupt
            self.ranks.share(self._raise_push_error, "the end of training")
            is_compared = self.checks_sampler and not self.args.load_best_model_at_end
            last = self.canary.check() if is_compared else {}
            # rank 0 holds the store: it leaves when all have read it
            self.ranks.gather([0.0], "the end of training")
            if self.args.load_best_model_at_end:
                self.training_run.renew()
            if self.ranks.is_main:
                write_proof(self.args.folder, last)
            self.progress.report(checkpoint_files.newest_valid(self.args.folder))
            return output
        except BaseException as error:
            is_memory = isinstance(error, torch.OutOfMemoryError)
            if is_memory:
                memory.release(self.model)
            if self.state.global_step > step:
                self._save_last_step(error)
            if self.ranks.is_main:
                write_proof(self.args.folder, {}, error)
                self.checkpoints.note_end(error)
            if is_memory:
                rows = self.newest.rows if self.newest is not None else ()
                raise memory.out_of_memory(error, self.model, self.args, rows) from error
            raise
        finally:
            self.progress.stop()
            uninstall(self.model)
            self.close()

    def _start_from(self, resume_from_checkpoint: str | bool | None) -> tuple[Path | None, int]:
        """(checkpoint to begin from, its step) of a new session of the run."""
        if self.is_open:  # by a verb
            self.close()
        folder, step, start = self.checkpoints.starting_point(resume_from_checkpoint)
        self.session = Session(start, folder)
        self.is_complete = self.is_interrupted = self.has_failed = False
        return folder, step

    def _hooks(self) -> dict[str, list[Any]]:
        """Objects, by role, whose code decides what is trained."""
        return {"trainer": [type(self)], CALLBACK: list(self.callback_handler.callbacks)}

    def _raise_push_error(self) -> None:
        if self.session.push_error is not None:
            raise self.session.push_error

    def _save_last_step(self, error: BaseException) -> None:
        """Save the last whole step of a run that ends with ``error``, unless that says that its
        weights are bad.

        Of several ranks, only when all of them have the error: a checkpoint is written by all
        together.
        """
        step, newest, reason = self.state.global_step, self.newest, None
        saved = self.args.folder / f"{checkpoint_files.PREFIX}{step}"
        if (saved / checkpoint_files.MANIFEST).is_file():
            return
        if isinstance(error, NonFiniteLoss) and error.key in sanity_checks.OF_THE_WEIGHTS:
            reason = "the error says that its weights are bad"
        elif newest is not None and not newest.is_whole:
            reason = f"the weights of step {step + 1} were being set"
        elif self.ranks.world > 1 and not self.session.ends_on_every_rank:
            reason = "the error is of one process, and all write a checkpoint together"
        elif isinstance(error, CheckpointError):
            return
        else:
            try:
                self.save_checkpoint(is_last=True)
            except Exception as failed:  # noqa: BLE001 - the error that ended training is raised
                reason = f"{type(failed).__name__}: {failed}"
        ended = f"step {step}, the last before training ended"
        if reason is None:
            log.warning("saved %s: %s", ended, error or type(error).__name__)
        else:
            log.warning("%s, could not be saved: %s", ended, reason)

    def begin(self) -> None:
        """Start the engine with the present weights; the pipeline too, unless the caller has a loop
        of its own, which starts it with ``next_batch``."""
        run = self.training_run
        run.model = self.model  # the wrapped model when the launcher splits it
        run.open_reference()
        if self.session.resumed_from is not None:
            if run.reference is not None:
                run.reference.load(self.session.resumed_from)
            self.checkpoints.restore_algorithm(self.session.resumed_from)
            if self.ranks.is_main:
                self.recorder.resume(self.state.global_step)
        sanity_checks.check_forward(self.model, self.args)
        for teacher in members_of(self.reference):
            if isinstance(teacher, Teacher):
                sanity_checks.check_forward(teacher.model, self.args)
        run.renew(trained_only=False)
        if processing_of(self.model) is not None and run.offline is None:
            prompt = first_prompt(run.model, run.examples, run.env) if run.ranks.is_main else None
            self.canary.look(prompt)
        self.recorder.begin()
        self.session.is_open = True
        if not self.ranks.is_main:
            return
        log.info("objective: %s", self.args.objective())
        if run.offline is None or self.args.eval_strategy != "no":
            self.start_engine()
            self.engine.check_shared()
            self.checkpoints.note_engine(self.engine)
            self.engine.set_version(self.policy_version)
            if self.checks_sampler:
                self.canary.ask(self.engine, self.policy_version)
        if not self._is_prepared_only:
            self._start_batches()

    def _start_batches(self) -> None:
        self.batches = self.training_run.offline or self._open_batches()
        self.batches.start(self.policy_version, self.session.start)

    def _open_batches(self) -> BatchSource:
        """The pipeline, or what a subclass's ``get_batch`` returns; with its ``compute_rewards``,
        if it has any."""
        run = self.training_run
        draws = self.args.difficulty_schedule or subclass_hooks.is_overridden(
            self, RLTrainer, *custom_batches.DRAWING_METHODS
        )
        start = self.session.start
        amid = start.in_training or self.state.global_step % self.args.steps_per_batch
        is_amid = bool(amid and start.ready)
        rewards_are_own = subclass_hooks.is_overridden(self, RLTrainer, "compute_rewards")
        return custom_batches.open_batches(
            run.env,
            run.examples,
            self.run_context(),
            self.args,
            run.num_steps_per_epoch,
            draw=self._draw if draws else None,
            first_step=self.first_draw,
            at_hand=is_amid and min(group.index for group in start.ready) >= start.base,
            turns_of=lambda completion, name: self.client.turns_of(completion, name),
            compute_rewards=self.compute_rewards if rewards_are_own else None,
            record_dropped=self.recorder.record_dropped,
            no_prompt_fits="" if draws else run.why_no_prompt_fits(),
        )

    def get_train_dataloader(self) -> Any:
        """The stream of optimizer steps, until the task is solved: ``num_iterations`` passes over
        each batch's.

        A step has the statistics of its own rollouts, and of the batch what is not about rollouts;
        the time that the batch took is the first step's.
        """
        while (batch := self._next_batch()) is not None:
            self.session.whole_batch = batch
            steps, per_batch = batch.steps, self.args.steps_per_batch
            if (
                num_taken := self.state.global_step % per_batch
            ) and self.session.resumed_from is not None:
                self.checkpoints.restore_fixed(self.session.resumed_from, self._rows_of(batch))
            for number in range(num_taken, per_batch):
                part, first_only = steps[number % len(steps)], SPENT_ON_A_BATCH if number else {}
                position = {"batch/step": number + 1, "batch/pass": number // len(steps) + 1}
                stats = {**batch.stats, **part.stats, **first_only, **position}
                yield replace(part, stats=stats, part_of=batch)
        self.recorder.record(self.state.global_step, {"solved": 1})

    def _next_batch(self) -> TrainBatch | None:
        if self.ranks.is_main and self.batches is None:
            self._start_batches()
        source: Any = self.batches  # of rank 0, which alone asks it

        def next_batch() -> TrainBatch | None:
            self.recorder.require_no_collapse()
            self.recorder.monitor.require_sound()
            batch: TrainBatch | None = source.next_batch()
            return batch

        try:
            with self._ending_together():
                return batch_sharing.next_batch(self.ranks, self._interruptible(next_batch))
        except Exception:  # the batch's error reaches every rank: records that, and raises it again
            self.session.ends_on_every_rank = True
            raise

    def _interruptible(self, work: Callable[[], object]) -> Callable[[], Any]:
        """``work`` of rank 0, for which the others wait, and which a signal ends; for
        ``_ending_together``."""

        def run() -> Any:
            try:
                with self.interruption.raising():
                    return work()
            except KeyboardInterrupt as error:
                if self.ranks.world == 1:
                    raise
                raise RunError("a signal ends the training", code=self.exit_code) from error

        return run

    @contextmanager
    def _ending_together(self) -> Iterator[None]:
        """Raise the signal of rank 0 on every rank, for all to save together."""
        try:
            yield
        except RunError as error:
            if type(error) is not RunError or not error.code:
                raise
            self._exit_code, self.session.ends_on_every_rank = int(error.code), True
            raise KeyboardInterrupt from error

    # --- the verbs of a step ----------------------------------------------------------------------

    def step(self, batch: TrainBatch) -> Tensor:
        """An optimizer step, from top to bottom::

            forward_backward
                fix log-probabilities    those of the batch under its old policy and the reference, once
                for row in rows:         a packed row of several samples
                    backward(loss(row))  the weights of tokens make the sum one mean over the step
            optim_step
                compare with the sampler     on tokens of the present weights
                clip the gradients
                with weight_update():        sampling pauses while the weights change
                    optimizer.step()         the embedded engine shares the weights, so none are sent
                step the schedule, drop the gradients, count the step
                finish_step()                set the pipeline's policy version; write the metrics

        Without a token that carries loss nothing is computed and the optimizer takes no step.
        """
        self.forward_backward(batch)
        self.optim_step()
        return self.session.step.local_loss

    def open(self, resume_from_checkpoint: str | bool | None = None) -> None:
        """Prepare model, optimizer and engine for a loop of one's own, as ``train`` does for its
        loop; the verbs call it, and it does nothing when that is done. ``close`` ends it.

        ``resume_from_checkpoint`` as in ``train``, which has the errors too.
        """
        if self.is_open:
            return
        with self.ranks.together():
            folder, _ = self._start_from(resume_from_checkpoint)
            self.session.is_own_loop = True
            set_seed(self.args.seed)
            install_logprob_forward(self.model)
            self.session.at_close.callback(lambda: uninstall(self.model))
            self.session.at_close.enter_context(compiled_layers(self.model, self.args))
            try:
                self.prepare(folder)
            except BaseException:  # an interrupt too: what was begun is closed; raised again
                self.close()
                raise

    def next_batch(self) -> TrainBatch | None:
        """The rows of the next optimizer step, when their rollouts are finished; None when the task
        is solved. Rollouts of the steps to come are generated meanwhile.

        Raises ``ConfigError`` for a second batch before ``optim_step``, and what ``train`` raises
        when there is none.
        """
        with self.ranks.together():
            self.open()
            if self.session.drawn_at == self.policy_version:
                raise ConfigError(
                    "next_batch was called twice without optim_step, and each of its batches is one"
                    " optimizer step: raise batch_size, or accumulate rows of sample and batch_of"
                )
            try:
                batch = next(self.stream, None)
            except BaseException:  # it has ended the generator: a new one is made; raised again
                self.stream = iter(self.get_train_dataloader())
                raise
            self.session.drawn_at, self.is_complete = self.policy_version, batch is None
            return batch

    def sample(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        rollouts_per_example: int | None = None,
        sampling_args: Mapping[str, Any] | None = None,
    ) -> list[Group]:
        """Scored rollouts by the present policy: of each row a group of ``rollouts_per_example``
        (default: that of the settings). ``generate`` gives completions without rollouts.

        Several processes call it together; rank 0 samples, and the others get an empty list. The
        rollouts follow from the seed, the policy version, and how many it sampled before.
        """
        with self.ranks.together():
            siblings = checked("rollouts_per_example", rollouts_per_example, Count | None)
            self.open()
            groups: list[Group] = []

            def work() -> None:
                context = self.run_context(sampling_args)
                seed = (context.seed or 0) + self.policy_version * 1_000_003
                groups[:] = sample_groups(
                    self.env,
                    rows,
                    self.session.num_sampled,
                    siblings or self.args.rollouts_per_example,
                    replace(context, seed=seed),
                    self.args.max_concurrent,
                )

            with self.ranks.alive():
                self.ranks.share(work, "the sampled rollouts", while_alive=True)
            self.session.num_sampled += len(rows)
            return groups

    def batch_of(self, groups: Sequence[Group]) -> TrainBatch:
        """The batch of finished rollouts, with the advantages, weights and rows of the settings.

        Several processes call it together, and ``groups`` are those of rank 0.
        """
        with self.ranks.together():
            self.open()
            build = partial(custom_batches.batch_of, groups, self.args)
            batch = batch_sharing.next_batch(self.ranks, build)
        assert batch is not None
        return batch

    def forward_backward(self, rows: TrainBatch | Sequence[PackedRow]) -> ForwardBackward:
        """Add the gradients of ``rows`` to those since the last ``optim_step``.

        ``rows``: a batch of ``next_batch`` or ``batch_of``, or packed rows, whose loss is the sum
        of their weighted tokens; every process gives as many. Raises ``NonFiniteLoss``, which drops
        the gradients, and ``ConfigError`` for unequal numbers of rows.
        """
        with self.ranks.together():
            self.open()
            batch = (
                rows
                if isinstance(rows, TrainBatch)
                else batch_sharing.batch_of_rows(self.ranks, rows)
            )
            earlier = self.session.open_step
            started = time.perf_counter()
            with self._dropping_gradients():
                loss = self.training_step(self.model_wrapped, batch)
                step = self.session.step
                if self.ranks.world > 1:
                    step.meter.merge(
                        lambda numbers: self.ranks.gather(numbers, "the ratios of the step")
                    )
                step.local_loss = loss
                step.loss = float(self.ranks.gather([float(loss)], "the loss of the step").mean())
            step.train_s = time.perf_counter() - started
            metrics = step.meter.summary() if step.is_update else {}
            output = ForwardBackward(step.loss, metrics, step.row_logprobs)
            if earlier is not None:
                earlier.extend(step)
                self.session.newest = earlier
            return output

    def optim_step(self) -> dict[str, Any]:
        """Clip the accumulated gradients, take one step of optimizer and schedule, and serve the
        new weights as the next policy version; return the step's metrics, as in ``metrics.jsonl``.

        First sampler and trainer are compared on the tokens of the present weights. Raises
        ``ConfigError`` without a ``forward_backward`` before, and where the two disagree;
        ``NonFiniteLoss`` for a gradient that is not finite. Such an error drops the gradients.
        """
        if (step := self.session.open_step) is None:
            raise ConfigError("optim_step has no gradients: call forward_backward before it")
        with self.ranks.together():
            with self._dropping_gradients():
                self._compare(step)
                self.take_step(is_update=step.is_update)
            self.finish_step()
            self.is_interrupted = self.interruption.signum is not None
            self.interruption.release()
            if self.session.is_own_loop:
                self.ranks.share(self._raise_push_error, "the end of the step")
        return step.metrics

    def save_state(self, folder: str | Path | None = None) -> None:
        """Write all that the run continues from to ``folder``: weights, optimizer, schedule, random
        generators, the state of the algorithm, and the position in the data with the rollouts not
        yet trained. The folder is a checkpoint; an earlier one there is replaced. Without a folder
        as in transformers: ``trainer_state.json`` in the output folder.

        Raises ``ConfigError`` between ``forward_backward`` and ``optim_step``, after the end of the
        session, and where ``folder`` has other content; ``CheckpointError`` when it cannot be
        written. Every process calls it.
        """
        if folder is None:
            super().save_state()
            return
        if not self.is_open and self.state.global_step:
            raise ConfigError(
                f"save_state came after the end of a training, whose checkpoints are in"
                f" {self.args.folder}: call it before close, or copy one of them"
            )
        with self.ranks.together():
            self.open()
            if self.session.open_step is not None:
                raise ConfigError(
                    "save_state came between forward_backward and optim_step: gradients are no part"
                    " of a state, so call optim_step before it"
                )
            self.save_checkpoint(folder=Path(folder))

    def load_state(self, folder: str | Path) -> None:
        """Go on from what ``save_state`` or a training wrote to ``folder``; gradients are dropped.
        The engine is started again. Raises as ``train(resume_from_checkpoint=folder)`` does; a
        folder that is refused changes nothing."""
        if self.is_open:
            with self.ranks.together():
                self.checkpoints.require(str(folder))
        self.close()
        self.open(str(folder))

    @contextmanager
    def _dropping_gradients(self) -> Iterator[None]:
        """An error in the block drops the gradients, the step that they are of, and what the loss
        has remembered of it."""
        if self.session.open_step is None:
            self.session.loss_before = state_of(self.args, ("loss",))
        try:
            yield
        except BaseException:  # an interrupt too: half a step leaves nothing; raised again
            self.session.open_step = None
            load_state(self.args, self.session.loss_before)
            self.model_wrapped.zero_grad()
            raise

    def training_step(  # type: ignore[override]
        self,
        model: torch.nn.Module,
        inputs: TrainBatch,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Forward and backward of every packed row of a batch; this process's summed loss."""
        self.session.newest = step = self._new_step(inputs)
        self.session.open_step = self.session.open_step or step
        if not step.is_update:
            return torch.zeros((), device=self.args.device)
        return self._backward(model, step)

    def _compare(self, step: Step) -> None:
        """Compare sampler and trainer, and note what the step has computed so far."""
        started = time.perf_counter()
        if self.checks_sampler:  # in every step: an environment may change how it samples
            step.numbers |= self.canary.check() | self._check_sampler(step.meter)
            if processing_of(self.model) is not None:
                step.numbers |= self.canary.look(prompt_of_rows(step.rows))
        step.numbers |= self.recorder.monitor.likely(self.policy_version)
        step.train_s += time.perf_counter() - started
        step.numbers |= {"loss": step.loss, **step.meter.summary(), "time/train": step.train_s}
        step.numbers |= step.of_roles(self.args.adapter_roles)
        step.numbers["throughput/train_tokens_per_s"] = (
            sum(row.num_computed for row in step.rows) / step.train_s
        )

    def _new_step(self, batch: TrainBatch) -> Step:
        """The step on ``batch``, whose rows have the log-probabilities that stay fixed during the
        whole batch. *Raises* ConfigError for a row of no role where each has an adapter."""
        rank, steps_per_batch = self.accelerator.process_index, self.args.steps_per_batch
        references = self.training_run.references
        for rows in self._rows_of(batch):
            if self.args.adapter_roles and any(
                row.adapter is None and row.loss_mask.any() for row in rows
            ):
                raise ConfigError(
                    "lora_per_role trains an adapter for each role, and a row is of none: make it"
                    " of rollouts by batch_of, or of samples of one Sample.adapter each"
                )
            needs_old = old_logprobs.needs_old(rows, steps_per_batch, self.args.anchor)
            # collective for a split model: all ranks run the forward pass, or none
            if steps_per_batch > 1:
                what = "whether rows need old log-probabilities"
                (needs_old,) = self.ranks.any([needs_old], what)
            old = self.model if needs_old else None
            old_logprobs.annotate(rows, self.args.device, old=old, references=references)
        bounds, cap = (self.args.mask_ratio_low, self.args.mask_ratio_high), self.args.ratio_cap
        meter = RatioMeter(
            self.policy_version,
            bounds,
            self.args.loss_parameters().get("ratio_cap", cap),
            sum(row.num_tokens for row in batch.rows_R[rank]),
            self.args.device,
        )
        keeps_tokens = self.session.is_own_loop or self.recorder.keeps_tokens
        return Step(batch, batch.rows_R[rank], meter, keeps_tokens)

    def clipped_apart(self) -> Mapping[str, Sequence[torch.nn.Parameter]]:
        """The adapter of each role, where roles have their own."""
        return parameters_of(self.model)

    def _rows_of(self, batch: TrainBatch) -> list[list[PackedRow]]:
        """This process's rows of each step of the whole batch."""
        return [part.rows_R[self.accelerator.process_index] for part in batch.whole_batch.steps]

    def _backward(self, model: torch.nn.Module, step: Step) -> Tensor:
        """Forward and backward of every packed row; the summed loss."""
        if not model.training:  # a walk over all modules, in every step
            model.train()
        if (problem := sanity_checks.not_a_number(step.batch, step.rows)) is not None:
            raise self._non_finite(*problem)
        total = torch.zeros((), device=self.args.device)
        finite: list[Tensor] = []
        for row in step.rows:
            with self.gradients_exchanged(model, row is step.rows[-1]):
                loss, out = self.compute_loss(model, row, return_outputs=True, meter=step.meter)
                # read once after all rows: reading waits for the device
                finite.append(
                    torch.stack([torch.isfinite(out.logprobs).all(), torch.isfinite(loss)])
                )
                self.backward(model, loss)
            total += loss.detach()
            step.count_loss(row, loss.detach())
            if step.keeps_tokens:
                step.row_logprobs.append(out.logprobs.detach())
        for row, (logprobs, loss_is_finite) in zip(
            step.rows, torch.stack(finite).tolist(), strict=True
        ):
            if not logprobs:
                raise self._non_finite(sanity_checks.POLICY_LOGPROB, [row])
            if not loss_is_finite:
                raise self._non_finite("loss", [row])
        return total

    def compute_loss(  # type: ignore[override]
        self,
        model: torch.nn.Module,
        inputs: PackedRow,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        meter: RatioMeter | None = None,
    ) -> Any:
        """Weighted loss of a packed row: Σ_t weight_t · loss_t, times the world size (ranks
        average gradients)."""
        row = inputs.to_tensors(self.args.device)
        options = {
            "teachers": self.training_run.teacher_states(inputs),
            "entropy_gradient": bool(self.args.entropy_coef),
        }
        out = model(**forward_arguments(row, inputs), **options)
        tokens = LossInput.of(
            row, out.logprobs, self.args.anchor, (out.reverse_kl, out.forward_kl), out.entropy
        )
        token_losses = self.criterion(tokens)
        loss = (row["weight"] * token_losses.losses).sum() * self.args.world_size
        if meter is not None:
            meter.add(
                out.logprobs.detach(),
                tokens.log_mu,
                out.entropy.detach(),
                row,
                token_losses.metrics,
                inputs,
            )
        return (loss, out) if return_outputs else loss

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Context around ``optimizer.step()``: check the gradient norm, pause the engine, push the
        weights."""
        step = self.session.step
        if not math.isfinite(self.grad_norm) and not self.scale_is_too_large():
            raise self._non_finite("gradient norm", step.rows)
        step.numbers |= {"grad_norm": self.grad_norm, "learning_rate": self.learning_rate}
        if step.is_update:
            step.numbers |= {f"grad_norm/{role}": norm for role, norm in self.grad_norms.items()}
        if self.batches is not None and self.args.deterministic:
            self.batches.settle()
        self._check_next_batch(step)
        times: dict[str, float] = {}
        self.interruption.hold()  # until the step is whole
        try:
            with self.server.weight_update(self.policy_version + 1) as times:
                step.is_whole = False
                yield
        except WeightSyncError as error:
            # the step itself is taken: it is finished and saved, then the error raised
            self.session.push_error, self.has_failed = self.session.push_error or error, True
        else:
            if self.checks_sampler:
                self.canary.ask(self.engine, self.policy_version + 1)
        step.numbers |= times | (self.canary.moved() if self.checks_sampler else {})

    def finish_step(self) -> None:
        """Set the pipeline's policy version, and write the step's metrics."""
        step = self.session.step
        step.is_whole = True
        if self.reference is not None:
            self.reference.after_step(self.state.global_step)
        if groups := step.batch.whole_batch.groups:  # rows of one's own are of no example
            self.state.epoch = (max(group.index for group in groups) + 1) / len(self.examples)
        self.session.num_sampled = 0
        if self.batches is not None:
            self.batches.set_version(self.policy_version, self.server.version)
        if self.ranks.is_main:
            step.log(self.step_metrics(step.batch))
            self.recorder.finish_step(self.state.global_step, step)
        self.session.open_step = None

    def _check_sampler(self, meter: RatioMeter) -> dict[str, float]:
        """Compare sampler and trainer log-probabilities, on the meter's tokens of the present
        weights, if any; the metrics."""
        if not meter.num_current:
            return {}
        return self.agreement.check(meter, partial(sanity_checks.noise_of_step, self.training_run))

    def _check_next_batch(self, step: Step) -> None:
        """Compare on a rollout of the next batch, on rank 0, if older weights sampled every token
        of this step's.

        Not for a split policy, whose ranks compute together.
        """
        if not self.checks_sampler or step.meter.num_current or self.batches is None or self.splits:
            return
        groups = list(self.batches.state.ready)  # no snapshot: that waits for the pipeline's loop
        meter = sanity_checks.compared_on(self.model, groups, self.policy_version, self.args)
        step.numbers |= self._check_sampler(meter)
        summary = meter.summary()
        step.numbers |= {
            name: summary[name] for name in ("sampler/log_ratio_abs", "sampler/mismatch_kl")
        }

    def _non_finite(self, key: str, rows: Sequence[PackedRow]) -> NonFiniteLoss:
        folder = (
            self.args.folder if self.ranks.is_main else self.args.folder / f"rank-{self.ranks.rank}"
        )
        return sanity_checks.non_finite(key, rows, self.state.global_step + 1, folder)

    # --- hooks for subclasses ---------------------------------------------------------------------

    def get_batch(self, epoch: int = 0, step: int = 0) -> Any:
        """Return the data of the ``step``-th step of a pass: rows to run rollouts of, or finished
        rollouts.

        Finished rollouts are ``Group`` objects, or (prompts, completions, rewards) with siblings
        adjacent.
        """
        return self.sample_batch(self.current_rows())

    def current_rows(self) -> list[Any]:
        """Candidate rows of the step being drawn: all, or those of its difficulty."""
        position = custom_batches.epoch_and_step(self._drawn_step, self.num_steps_per_epoch)
        difficulty = subclass_hooks.call(self.get_current_difficulty, position)
        return curriculum.rows_of(
            [example.row for example in self.examples], difficulty, self.args.difficulty_key
        )

    def get_current_difficulty(self, epoch: int = 0, step: int = 0) -> Any:
        """The difficulty of the rows to train on at a step of a pass; None = all rows
        (``difficulty_schedule``)."""
        return curriculum.difficulty_at(
            self.args.difficulty_schedule, epoch + step / self.num_steps_per_epoch
        )

    def sample_batch(self, rows: Iterable[object]) -> list[Any]:
        """Rows for a step, without repetition in a pass over ``rows``, shuffled by the seed."""
        return custom_batches.sample_rows(list(rows), self._drawn_step, self.args)

    def compute_rewards(
        self, completions: Sequence[object], prompts: Sequence[object], **kwargs: object
    ) -> Sequence[Any]:
        """The reward of each completion: its recorded scores under the rubric's present weights."""
        return rewards.recorded(self.env, completions, prompts)

    def step_metrics(self, batch: TrainBatch) -> Mapping[str, float]:
        """Further metrics of a step, by name, from the rollouts that it trained on
        (``batch.groups``); called on rank 0."""
        return {}

    def _draw(self, step: int) -> Any:
        """The batch of the ``step``-th step of the run, as ``get_batch`` returns it."""
        self._drawn_step = step
        return subclass_hooks.call(
            self.get_batch, custom_batches.epoch_and_step(step, self.num_steps_per_epoch)
        )

    @property
    def first_draw(self) -> int:
        """The number of the step whose batch is drawn first."""
        groups = self.args.batch_size // self.args.rollouts_per_example
        return min([self.session.start.next_index, *self.session.start.requeue]) // groups

    # --- the present policy -----------------------------------------------------------------------

    @property
    def client(self) -> PolicyClient:
        """The present policy as a client, for code that runs rollouts itself; starts the engine."""
        self.start_engine()
        return self.server.client

    def generate(self, prompts: Sequence[object]) -> list[Any]:
        """A completion by the present policy for each prompt (messages, text, or a row); blocks
        until all are in."""
        return evaluation.complete(self.client, self.env, prompts)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        *,
        num_examples: int | None = None,
    ) -> dict[str, float]:
        """Evaluate the present weights; return and log the metrics (``eval_reward``, …).

        ``eval_dataset``: rows that replace the evaluation set, one rollout each. ``ignore_keys`` is
        transformers' and has no effect. An override may return one number (the mean reward), or
        numbers by name.
        """
        count = num_examples if num_examples is not None else self.args.eval_num_examples

        def compute() -> dict[str, float]:
            context, version = self.run_context(self.args.eval_sampling_args), self.policy_version
            return evaluation.evaluate(
                self.training_run,
                context,
                version,
                count,
                version=self.server.version,
                facts=self.checkpoints.facts(),
                rows=eval_dataset,
                prefix=metric_key_prefix,
            )

        return self._record_evaluation(compute)

    def run_evaluation(self, ignore_keys: list[str] | None) -> dict[str, float]:
        """Run the evaluation of ``eval_strategy``; an override of ``evaluate`` runs on rank 0
        alone."""
        if not subclass_hooks.is_overridden(self, RLTrainer, "evaluate"):
            return self.evaluate(ignore_keys=ignore_keys)

        def compute() -> dict[str, float]:
            hook: Any = self.evaluate  # an override may take fewer arguments
            return evaluation.numbers_of(subclass_hooks.call(hook, {"ignore_keys": ignore_keys}))

        return self._record_evaluation(compute)

    def _record_evaluation(self, compute: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Evaluate on rank 0; write the metrics and notify the callbacks, unless already
        recorded."""
        with self._ending_together():
            metrics: dict[str, float] = self.ranks.share(
                self._interruptible(compute), "the evaluation"
            )
        if self.recorder.record_evaluation(self.state.global_step, metrics):
            self._notify(dict(metrics))
            self.control = self.callback_handler.on_evaluate(
                self.args, self.state, self.control, metrics
            )
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Record metrics of one's own, in ``metrics.jsonl`` and at the trackers.

        During a step they are metrics of that step, the mean of all calls; at other times they have
        a line of their own, as has what a callback adds to ``logs``. The loop logs each step here,
        with all its metrics. Raises ``ConfigError`` for a value that is not one number.
        """
        if self.session.open_step is not None:
            self.session.open_step.log(logs)
            return
        names, is_of_loop = {"epoch", "num_input_tokens_seen"}, "train_runtime" in logs
        if "loss" in logs:
            logs, is_of_loop = {n: v for n, v in self.last_step.items() if v == v} | logs, True
        names |= set(logs) if is_of_loop else set()
        self._notify(logs, start_time, is_of_loop)
        self.recorder.record(
            self.state.global_step, {name: logs[name] for name in logs if name not in names}
        )

    def _notify(
        self, logs: dict[str, float], start_time: float | None = None, is_of_loop: bool = False
    ) -> None:
        """Pass metrics to the callbacks, and with what these add to the trackers."""
        is_due = self.control.should_log and not is_of_loop
        super().log(logs, start_time)
        self.control.should_log |= is_due  # transformers takes any log for that of the step
        self.recorder.trackers.log(self.args, self.state, self.control, logs)

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False, *, merged: bool = False
    ) -> None:
        """Write model (for PEFT the adapter alone, unless ``merged``) and tokenizer to a folder."""
        self.training_run.save_model(
            Path(output_dir) if output_dir else self.args.folder, merged=merged
        )
        if self.args.push_to_hub and not _internal_call and not merged:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def export(self, folder: str | Path, *, merged: bool = False) -> None:
        """Write the present model for other programs to a new folder, as ``vf-train --export``
        does: the adapter with a base that can be loaded, or if ``merged`` one ordinary model.

        Raises ``ConfigError`` where ``folder`` has content.
        """
        if self.ranks.is_main:
            with exporting(Path(folder)) as new:
                self.training_run.save_model(new, merged=merged)

    def save_checkpoint(self, *, is_last: bool = False, folder: Path | None = None) -> None:
        """Write the checkpoint of the present step to ``folder``, by default ``checkpoint-<step>``;
        every rank calls it.

        ``is_last``: of a run that ends, which waits for no rollout.
        """
        started = time.perf_counter()

        source: Any = self.batches  # of rank 0, which alone asks it
        fixed, algorithm = None, state_of(self.args)
        if self.state.global_step % self.args.steps_per_batch and self.newest is not None:
            fixed = old_logprobs.to_bytes(self._rows_of(self.newest.batch))
            algorithm |= self.newest.batch.whole_batch.state_before  # it is built again
        whole_batch = None if source is None else self.session.whole_batch
        if whole_batch and amid_batch(source.state, self.state.global_step, self.args):
            algorithm |= whole_batch.state_before

        def snapshot() -> PipelineState:
            if source is None:  # ``next_batch`` was not called
                return self.session.start
            return source.last_state() if is_last else source.snapshot()

        with self.interruption.held():
            self.checkpoints.save(
                self.state,
                self.optimizer,
                self.lr_scheduler,
                self.accelerator.scaler,
                write_model=lambda folder: self.save_model(str(folder), _internal_call=True),
                snapshot=snapshot,
                fixed=fixed,
                algorithm=algorithm,
                folder=folder,
            )
        self.recorder.spent("time/checkpoint", time.perf_counter() - started)

    # --- engine -----------------------------------------------------------------------------------

    def start_engine(self) -> None:
        """Start the engine with the present weights, unless it runs. Raises ``ConfigError`` on any
        rank but 0."""
        self.server.start(self.policy_version)

    def run_context(self, sampling_args: Mapping[str, object] | None = None) -> RunContext:
        """Start the engine; return its client and the sampling arguments of rollouts."""
        self.start_engine()
        return self.server.run_context(sampling_args)

    def close(self) -> None:
        """Stop generation and the engine; idempotent."""
        batches, self.batches = self.batches, None
        try:
            if batches is not None:
                batches.close()
        finally:
            self.server.stop()
            self.recorder.trackers.close()
            self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- public attributes ------------------------------------------------------------------------

    @property
    def config(self) -> RLConfig:
        """The settings in force."""
        return self.args

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.processing_class

    @property
    def env(self) -> Any:
        """The training environment."""
        return self.training_run.env

    @env.setter
    def env(self, env: Environment) -> None:
        self.training_run.env = env

    @property
    def eval_env(self) -> Any:
        """The evaluation environment."""
        return self.training_run.eval_env

    @eval_env.setter
    def eval_env(self, env: Environment) -> None:
        self.training_run.eval_env = env

    @property
    def examples(self) -> Sequence[Example]:
        """The training examples; read on first use. Raises ``DatasetError`` when there are none."""
        return self.training_run.examples

    @property
    def eval_dataloader(self) -> list[dict[str, list[Any]]]:
        """The evaluation set in parts of ``per_device_eval_batch_size``: ``prompts answers infos
        examples``."""
        return evaluation.parts(self.training_run)

    @property
    def num_steps_per_epoch(self) -> int:
        """Batches of a pass over the examples."""
        return self.training_run.num_steps_per_epoch

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps of the present weights."""
        return self.state.global_step

    @property
    def engine(self) -> Any:
        """The inference engine; None while it is stopped."""
        return self.server.engine

    @property
    def is_open(self) -> bool:
        """Whether model, optimizer and engine are ready for a step."""
        return self.session.is_open

    @property
    def newest(self) -> Step | None:
        """The newest step."""
        return self.session.newest

    @property
    def batch(self) -> TrainBatch | None:
        """The batch of the newest step."""
        return self.newest.batch if self.newest else None

    @property
    def last_step(self) -> dict[str, Any]:
        """The metrics of the newest step, as in ``metrics.jsonl``."""
        return self.newest.metrics if self.newest else {}

    @property
    def history(self) -> History:
        """The metrics of all steps and evaluations: ``history.to_pandas()``, ``history.plot()``."""
        return History(self.args.output_dir or "")

    @property
    def reference(self) -> AnyTeacher | TaskTeachers | None:
        """The teacher, or those of the tasks, or the reference policy of the KL penalty ``beta``;
        None without any."""
        return self.training_run.reference

    @property
    def whole_model(self) -> Any:
        """The policy with whole parameters, for rank 0 alone: the model itself unless
        it is split."""
        return self.training_run.whole_model
