"""``RLTrainer``: reinforcement learning of a language model in an environment, on ``transformers.Trainer``.

One "batch" of the underlying loop is one optimizer step::

    batch = orchestrator.next_batch()            rollouts -> groups -> advantages -> samples -> rows
    for row in batch.rows: backward(loss(row))   log-probs now against log-probs when sampled
    with engine.pause(): optimizer.step()        the engine shares the parameters: nothing is sent
    engine and orchestrator learn the new policy version; metrics are written; checkpoints, evaluations

What a rollout, a group, an advantage, a loss or a checkpoint is stands in the modules of those names; this one only
joins them. A subclass may write ``get_batch``, ``sample_batch``, ``compute_rewards``, ``evaluate`` and ``compute_loss``
(``hooks``). Constructing a trainer starts nothing: the engine starts with ``train`` or ``evaluate`` and ends with
``close``, at the end of ``train``, or of the ``with`` block.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback, set_seed
from transformers.trainer_utils import TrainOutput

from verifiers.data.examples import Example
from verifiers.environments.base import Environment
from verifiers.environments.registry import load_environment
from verifiers.errors import NonFiniteLoss
from verifiers_trainer.algorithm import old_logprobs
from verifiers_trainer.algorithm.batch import TrainBatch
from verifiers_trainer.algorithm.losses import LossInput, Objective, resolve_loss
from verifiers_trainer.algorithm.packing import PackedRow, forward_arguments
from verifiers_trainer.distributed import fsdp
from verifiers_trainer.distributed.ranks import Ranks
from verifiers_trainer.engines.policy_client import PolicyClient
from verifiers_trainer.hf_loop import FORCED, Loop
from verifiers_trainer.pipeline import curriculum, custom_batches, rewards
from verifiers_trainer.pipeline.custom_batches import ChosenRollouts, sample_rows
from verifiers_trainer.pipeline.offline import OfflineRollouts, holds_rollouts, read_groups, rows_of, stand_in
from verifiers_trainer.pipeline.orchestrator import Orchestrator
from verifiers_trainer.pipeline.schedule import PipelineState
from verifiers_trainer.policy import checkpoint_files, preparation
from verifiers_trainer.policy.logprobs import find_causal_lm, install_logprob_forward, uninstall
from verifiers_trainer.run import arguments, resume, sanity_checks
from verifiers_trainer.run.meters import RatioMeter, alarms, device_numbers
from verifiers_trainer.run.metrics_files import MetricsFile, print_completions, write_completions
from verifiers_trainer.run.serving import ServingTrainer
from verifiers_trainer.run.trackers import Sinks
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.settings.cross_field_rules import trackers

log = logging.getLogger(__name__)


class RLTrainer(ServingTrainer):
    """Trains ``model`` in ``env``.

    ``model`` is a causal language model, a PEFT model, or a name (hub id, folder, ``builtin:tiny``); ``env`` an
    environment, its id, or a list of several; ``processing_class`` (or ``tokenizer``) defaults to the model's own.
    ``args`` (or ``config``) is an ``RLConfig``, of which a private copy is used. ``peft_config`` overrides the LoRA
    fields, ``loss`` and ``advantage`` the fields of these names; ``dataset`` and ``eval_dataset`` are rows to use in
    place of the environment's own; a ``dataset`` of finished
    rollouts (a saved run, results, or columns of prompts, completions and rewards) is trained on as it is, and needs no
    environment (``offline``).

    Raises ``ConfigError`` with every problem at once.

        trainer = vf.RLTrainer("builtin:tiny", "reverse-text", vf.RLConfig(batch_size=64, rollouts_per_example=8))
        trainer.train()
    """

    config_class: type[RLConfig] = RLConfig
    """What the settings are when none are given."""

    def __init__(
        self,
        model: Any,
        env: Environment | str | Sequence[Environment | str] | None = None,
        args: RLConfig | None = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        *,
        tokenizer: Any = None,
        config: RLConfig | None = None,
        dataset: Any = None,
        eval_dataset: Any = None,
        eval_env: Environment | str | None = None,
        client: Any = None,
        loss: Any = None,
        advantage: Any = None,
    ):
        fsdp.require_launchable(optimizers)
        given_args = arguments.either("args", args, "config", config)
        settings = arguments.settled(
            given_args, self.config_class, inference=arguments.server_of(client), loss=loss, advantage=advantage
        )
        self.env = arguments.environment_of(env)
        self.eval_env = load_environment(eval_env) if isinstance(eval_env, str) else (eval_env or self.env)
        self._offline: OfflineRollouts | None = None
        if not (is_offline := holds_rollouts(dataset)):
            arguments.check_environment(self.env, settings.num_env_workers)
        given = arguments.either("processing_class", processing_class, "tokenizer", tokenizer)
        self._dataset, self.eval_rows = dataset, eval_dataset
        self._examples: Sequence[Example] | None = None
        self.metrics_file = MetricsFile(settings.folder)
        self.engine: Any = None
        self.orchestrator: Orchestrator | ChosenRollouts | OfflineRollouts | None = None
        self._client: PolicyClient | None = None
        self._drawn = 0
        self.ranks = Ranks.of(settings)
        self.sinks = Sinks(trackers(settings.report_to) if self.ranks.is_main else ())
        self._pipeline = PipelineState()
        self._pause: Any = None
        self._paused_at = self._step_began = 0.0
        self._step: dict[str, Any] = {}
        self._between: dict[str, float] = {}
        self._batch: TrainBatch | None = None
        self._self_tested = False
        self._alarmed: set[str] = set()
        settings.__dict__.update(FORCED)
        with checkpoint_files.untouched_rng():  # transformers seeds in its constructor; this one seeds in train()
            model, tokenizer = preparation.load(model, given, settings)
            if is_offline:
                self._use_rollouts(dataset, tokenizer, settings)
            preparation.require_chat_template(tokenizer, self.env)
            preparation.probe_template(tokenizer, self.env, settings)
            model = preparation.prepare(model, settings, peft_config)
            if settings.micro_batch_tokens is None and preparation.has_packed_kernel(model):
                settings.micro_batch_tokens = settings.micro_batch_size * settings.max_seq_len
            if settings.max_steps < 0 or settings.is_given("num_train_epochs"):
                examples = len(self._read_examples(tokenizer, settings))
                batches = None if self._offline is None else self._offline.num_batches
                settings.max_steps = settings.steps_for(examples, batches)
            loss = resolve_loss(settings.loss, **arguments.loss_parameters_of(settings))
            self.criterion = Objective.of(loss, settings)
            super().__init__(
                model=model,
                args=settings,
                processing_class=tokenizer,
                train_dataset=None,
                eval_dataset=[] if settings.eval_strategy != "no" else None,  # what is played, evaluate() decides
                callbacks=[Loop(self), self.sinks, *(callbacks or [])],
                optimizers=optimizers,
            )
        self.remove_callback(PrinterCallback)
        if self.splits:
            fsdp.untie_originals(self.model)
            self.whole = fsdp.WholeCopy(self.model, keep=self.ranks.is_main, device=self._device_of_copy())
        else:
            self.open_reference()

    def _device_of_copy(self) -> torch.device:
        """Where rank 0 keeps the whole policy: where it is computed with or sent from, else in the host's memory."""
        read_as_files = self.args.server_url is not None and self.args.weight_sync not in ("nccl", "ipc")
        return torch.device("cpu") if read_as_files else self.args.device

    def _use_rollouts(self, dataset: Any, tokenizer: Any, settings: RLConfig) -> None:
        """Train on finished rollouts; without an environment a stand-in holds their prompts."""
        groups = read_groups(dataset, tokenizer, settings)
        self._offline, self._dataset = OfflineRollouts(groups, settings), rows_of(groups)
        if self.env is None:
            self.env = self.eval_env = stand_in(self._dataset)

    # --- what users call ----------------------------------------------------------------------------------------

    @property
    def examples(self) -> Sequence[Example]:
        """The examples that are trained on; read on first use. Raises ``DatasetError`` when there are none."""
        return self._read_examples(self.processing_class, self.args)

    def _read_examples(self, tokenizer: Any, settings: RLConfig) -> Sequence[Example]:
        if self._examples is None:
            read = arguments.examples_of(self.env, self._dataset)
            self._examples = preparation.within_prompt_limit(read, tokenizer, self.env, settings)
        return self._examples

    @property
    def first_draw(self) -> int:
        """The number of the step whose batch is to be chosen first."""
        pipeline, groups = self._pipeline, self.args.batch_size // self.args.rollouts_per_example
        return min([pipeline.next_index, *pipeline.requeue]) // groups

    @property
    def num_steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the examples."""
        return math.ceil(len(self.examples) * self.args.rollouts_per_example / self.args.batch_size)

    def train(  # type: ignore[override]
        self, resume_from_checkpoint: str | bool | None = None, **keywords: Any
    ) -> TrainOutput:
        """Train for ``max_steps`` optimizer steps; ``True`` resumes from the newest valid checkpoint, a path from it.

        Starting afresh in a folder that holds an earlier run moves that run aside. Raises ``RunError`` and its kinds
        when training cannot go on, ``RunMismatch`` when the checkpoint belongs to another configuration.
        """
        with self.ranks.together():
            return self._train(resume_from_checkpoint, keywords)

    def _train(self, resume_from_checkpoint: str | bool | None, keywords: dict[str, Any]) -> TrainOutput:
        self._pipeline, self._self_tested = PipelineState(), False
        folder, step = resume.starting_point(self, resume_from_checkpoint)
        if folder is not None and step >= self.args.max_steps:
            log.warning("%s is of step %d, and max_steps is %d: nothing to train", folder, step, self.args.max_steps)
            preparation.load_weights(self.model, folder)
            self.renew()
            self.state.global_step = step
            return TrainOutput(step, math.nan, {})
        set_seed(self.args.seed)
        install_logprob_forward(self.model)
        try:
            return super().train(resume_from_checkpoint=str(folder) if folder else None, **keywords)
        finally:
            uninstall(self.model)
            self.close()

    # --- what a subclass may decide -----------------------------------------------------------------------------

    def get_batch(self, epoch: int = 0, step: int = 0) -> Any:
        """What the ``step``-th step of a pass trains on: rows to play, or rollouts that were played here.

        Rollouts are (prompts, completions, rewards), the completions of one prompt together, or ``Group`` objects.
        """
        return self.sample_batch(self.current_rows())

    def current_rows(self) -> list[Any]:
        """The rows that the step whose batch is being chosen may take: all, or those of the present difficulty."""
        return custom_batches.current_rows(self)

    def get_current_difficulty(self, epoch: int = 0, step: int = 0) -> Any:
        """The difficulty of the rows to train on at a step of a pass; None = all rows (``difficulty_schedule``)."""
        return curriculum.difficulty_at(self.args.difficulty_schedule, epoch + step / self.num_steps_per_epoch)

    def sample_batch(self, rows: Iterable[Any]) -> list[Any]:
        """Rows for one step, without repetition in a pass over ``rows``, shuffled by the seed."""
        return sample_rows(list(rows), self._drawn, self.args)

    def compute_rewards(self, completions: Sequence[Any], prompts: Sequence[Any], **known: Any) -> Sequence[Any]:
        """The reward of each completion: its recorded scores under the weights that the rubric has now."""
        return rewards.recorded(self.env, completions, prompts)

    def begin(self) -> None:
        """Start the engine and the pipeline with the weights as they are now."""
        self.state.compute_steps(self.args, self.state.max_steps)  # a resumed state has the intervals of its time
        self.open_reference()
        sanity_checks.check_forward(self.model, self.args)
        self.renew(trained_only=False)
        self._step_began = time.perf_counter()
        if not self.ranks.is_main:
            return
        if self._offline is None or self.args.eval_strategy != "no":
            self.start_engine()
            self.engine.check_shared()
            self.engine.set_version(self.policy_version)
        self.orchestrator = self._offline or custom_batches.open_pipeline(self, RLTrainer)
        self.orchestrator.start(self.policy_version, self._pipeline)

    # --- one optimizer step -------------------------------------------------------------------------------------

    def training_step(  # type: ignore[override]
        self, model: Any, inputs: TrainBatch, num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward of every row; the weights of the tokens already make it one mean over the step."""
        started = time.perf_counter()
        self._batch = inputs
        rows = inputs.rows_R[self.accelerator.process_index]
        needs_old = old_logprobs.needs_old(rows, self.args.num_iterations, self.args.anchor)
        if self.args.num_iterations > 1:  # of a model that is split, every rank runs the forward pass or none does
            needs_old = self.ranks.any([needs_old], "whose rows need the policy of the batch")[0]
        old = self.model if needs_old else None
        old_logprobs.annotate(rows, self.args.device, old=old, reference=self.reference)
        model.train()
        if (found := sanity_checks.not_a_number(inputs, rows)) is not None:
            raise self._non_finite(*found)
        meter = RatioMeter(
            self.policy_version, (self.args.mask_ratio_low, self.args.mask_ratio_high), self.args.ratio_cap
        )
        total = torch.zeros((), device=self.args.device)
        for row in rows:
            with self.gradients_exchanged(model, row is rows[-1]):
                loss, out = self.compute_loss(model, row, return_outputs=True, meter=meter)
                if not (torch.isfinite(loss) & torch.isfinite(out.logprobs).all()):
                    raise self._non_finite("log-probability of the policy" if torch.isfinite(loss) else "loss", [row])
                self.accelerator.backward(loss)
            total += loss.detach()
        if self.ranks.world > 1:
            meter.merge(lambda numbers: self.ranks.gather(numbers, "the ratios of the step"))
        if not self._self_tested and meter.num_current:
            own = find_causal_lm(self.model).get_output_embeddings().weight.dtype
            on_server = self.args.server_url is not None or not getattr(self.engine, "shares_weights", True)
            sanity_checks.test_ratio(meter, self.args, own, on_server)
            self._self_tested = True
        spent = time.perf_counter() - started
        self._step = {
            "loss": self.mean_loss(total),
            **meter.summary(),
            "time/train": spent,
            "throughput/train_tokens_per_s": sum(row.num_tokens for row in rows) / spent,
        }
        return total

    def compute_loss(  # type: ignore[override]
        self,
        model: Any,
        inputs: PackedRow,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        meter: RatioMeter | None = None,
    ) -> Any:
        """Weighted loss of one row: Σ_t weight_t · loss_t, times the number of ranks (which average gradients)."""
        row = inputs.to_tensors(self.args.device)
        out = model(**forward_arguments(row))
        tokens = LossInput.of(row, out.logprobs, self.args.anchor)
        made = self.criterion(tokens, row.get("reference_logprobs"))
        loss = (row["weight"] * made.losses).sum() * self.args.world_size
        if meter is not None:
            meter.add(out.logprobs.detach(), tokens.log_mu, out.entropy, row, made.metrics)
        return (loss, out) if return_outputs else loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        value = float(norm) if norm is not None else math.nan
        if not math.isfinite(value) and not self.scale_is_too_large():
            assert self._batch is not None
            raise self._non_finite("gradient norm", self._batch.rows_R[self.accelerator.process_index])
        self._step["grad_norm"] = value
        return norm

    def _non_finite(self, key: str, rows: Sequence[PackedRow]) -> NonFiniteLoss:
        folder = self.args.folder if self.ranks.is_main else self.args.folder / f"rank-{self.ranks.rank}"
        return sanity_checks.non_finite(key, rows, self.state.global_step + 1, folder)

    def before_step(self) -> None:
        """The optimizer is about to change the weights: nobody may be computing with them."""
        self._step["learning_rate"] = self._get_learning_rate()
        if not self.ranks.is_main:
            return
        assert self.orchestrator is not None
        if self.args.deterministic:
            self.orchestrator.settle()
        self._paused_at = time.perf_counter()
        self._pause = nullcontext() if self.engine is None else self.engine.pause()
        self._pause.__enter__()

    def after_step(self) -> None:
        """The weights are those of the next policy version."""
        started = time.perf_counter()
        self.renew()
        if not self.ranks.is_main:
            return
        if self.engine is not None:
            self.engine.set_version(self.policy_version + 1)
        self._step["time/sync"] = time.perf_counter() - started
        pause, self._pause = self._pause, None
        pause.__exit__(None, None, None)
        self._step["time/pause"] = time.perf_counter() - self._paused_at

    def finish_step(self) -> None:
        """Tell the pipeline, and write the step's numbers."""
        assert self._batch is not None
        if self.reference is not None:
            self.reference.after_step(self.state.global_step)
        self.state.epoch = (max(group.index for group in self._batch.groups) + 1) / len(self.examples)
        if not self.ranks.is_main:
            return
        assert self.orchestrator is not None
        self.orchestrator.set_version(self.policy_version, getattr(self.engine, "version", None))
        now = time.perf_counter()
        self._step |= {"time/step": now - self._step_began, **self._between}
        self._step["throughput/generated_tokens_per_s"] = (
            self._batch.stats["tokens/completion"] / self._step["time/step"]
        )
        self._step |= device_numbers(self.model, self._step["throughput/train_tokens_per_s"])
        self._step_began, self._between = now, {}
        self._raise_alarms()
        self.metrics_file.write(self.state.global_step, self.policy_version, self.last_step)
        if self.args.log_completions:
            step, first_only = self.state.global_step, self.args.log_unique_prompts
            write_completions(self.args.folder, step, self._batch, first_only)
            if self.args.num_completions_to_print and step % self.args.logging_steps == 0:
                print_completions(self._batch, step, self.args.num_completions_to_print, first_only)

    def _raise_alarms(self) -> None:
        """Say what is out of order, once for as long as it is."""
        found = alarms(self.last_step)
        for name in found.keys() - self._alarmed:
            log.warning("step %d: %s", self.state.global_step, found[name])
        self._alarmed = set(found)
        self._step |= {f"alarm/{name}": 1 for name in found}
