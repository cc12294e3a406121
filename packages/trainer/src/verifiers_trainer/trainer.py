"""``RLTrainer``: reinforcement learning of a language model in an environment, on ``transformers.Trainer``.

One "batch" of the underlying loop is one optimizer step::

    batch = orchestrator.next_batch()            rollouts -> groups -> advantages -> samples -> rows
    for row in batch.rows: backward(loss(row))   log-probs now against log-probs when sampled
    with engine.pause(): optimizer.step()        the engine shares the parameters: nothing is sent
    engine and orchestrator learn the new policy version; metrics are written; checkpoints, evaluations

What a rollout, a group, an advantage, a loss or a checkpoint is stands in the modules of those names; this one only
joins them. Constructing a trainer starts nothing: the engine starts with ``train`` or ``evaluate`` and ends with
``close``, at the end of ``train``, or of the ``with`` block.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback

from verifiers.environments.base import Environment
from verifiers.errors import CheckpointError, ConfigError, NonFiniteLoss, RunMismatch
from verifiers.registry import load_environment
from verifiers.runner import RunContext
from verifiers_trainer import checkpoint, preparation
from verifiers_trainer.batch import StepBatch
from verifiers_trainer.config import RLConfig
from verifiers_trainer.evaluation import evaluate
from verifiers_trainer.inference import open_engine, policy_client
from verifiers_trainer.loggers import MetricsFile, write_completions
from verifiers_trainer.logprobs import check_head, check_packing, find_causal_lm, install_logprob_forward, uninstall
from verifiers_trainer.losses import LossInput, anchor_unsampled, loss_parameters, resolve_loss
from verifiers_trainer.meters import RatioMeter
from verifiers_trainer.orchestrator import Orchestrator, PipelineState
from verifiers_trainer.packing import Row
from verifiers_trainer.samples import NOT_SAMPLED

log = logging.getLogger(__name__)


class RLTrainer(Trainer):
    """Trains ``model`` in ``env``.

    ``model`` is a causal language model, a PEFT model, or a name (hub id, folder, ``builtin:tiny``); ``env`` an
    environment or its id; ``processing_class`` (or ``tokenizer``) defaults to the model's own. ``args`` (or
    ``config``) is an ``RLConfig``, of which a private copy is used. ``peft_config`` overrides the LoRA fields.

    Raises ``ConfigError`` with every problem at once.

        trainer = vf.RLTrainer("builtin:tiny", "reverse-text", vf.RLConfig(batch_size=64, rollouts_per_example=8))
        trainer.train()
    """

    def __init__(
        self,
        model: Any,
        env: Environment | str,
        args: RLConfig | None = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        *,
        tokenizer: Any = None,
        config: RLConfig | None = None,
        eval_env: Environment | str | None = None,
    ):
        settings = _private(_one_of("args", args, "config", config) or RLConfig())
        settings.resolve(settings.world_size)
        self.env = load_environment(env) if isinstance(env, str) else env
        self.eval_env = load_environment(eval_env) if isinstance(eval_env, str) else (eval_env or self.env)
        _check_environment(self.env)
        given = _one_of("processing_class", processing_class, "tokenizer", tokenizer)
        model, tokenizer = preparation.load(model, given, settings.model_init_kwargs)
        preparation.require_chat_template(tokenizer, self.env)
        model = preparation.prepare(model, settings, peft_config)
        self.loss = resolve_loss(settings.loss, **_parameters(settings))
        self.metrics_file = MetricsFile(Path(settings.output_dir))
        self.engine: Any = None
        self.orchestrator: Orchestrator | None = None
        self._pipeline = PipelineState()
        self._saved_configuration: dict[str, Any] | None = None
        self._pause: Any = None
        self._step: dict[str, Any] = {}
        self._batch: StepBatch | None = None
        self._self_tested = False
        super().__init__(
            model=model,
            args=settings,
            processing_class=tokenizer,
            train_dataset=None,
            eval_dataset=[] if settings.eval_strategy != "no" else None,
            callbacks=[*(callbacks or []), _Loop(self)],
            optimizers=optimizers,
        )
        self.remove_callback(PrinterCallback)

    # --- what users call ----------------------------------------------------------------------------------------

    @property
    def config(self) -> RLConfig:
        """The settings in force."""
        return self.args

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.processing_class

    @property
    def policy_version(self) -> int:
        """How many optimizer steps the served weights have had."""
        return self.state.global_step

    def train(self, resume_from_checkpoint: str | bool | None = None, **keywords: Any) -> Any:
        """Train for ``max_steps`` optimizer steps; ``True`` resumes from the newest valid checkpoint, a path from it.

        Raises ``RunError`` and its kinds when training cannot go on, ``RunMismatch`` when the checkpoint belongs to
        another configuration.
        """
        folder = self._resolve_checkpoint(resume_from_checkpoint)
        install_logprob_forward(self.model)
        try:
            if folder is not None:
                self._pipeline, _, saved = checkpoint.load_pipeline(folder)
                _require_same(saved, self._configuration(), folder)
            return super().train(resume_from_checkpoint=str(folder) if folder else None, **keywords)
        finally:
            uninstall(self.model)
            self.close()

    def evaluate(self, eval_dataset: Any = None, num_examples: int | None = None, **_: Any) -> dict[str, float]:
        """Play the evaluation set with the present weights; returns ``eval_reward`` and its like, and logs them."""
        metrics = evaluate(self, num_examples if num_examples is not None else self.args.eval_num_examples)
        self.metrics_file.write(self.state.global_step, self.policy_version, metrics)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def close(self) -> None:
        """Stop generating and the engine; calling it again does nothing."""
        if self._pause is not None:
            self._pause.__exit__(None, None, None)
            self._pause = None
        if self.orchestrator is not None:
            self.orchestrator.close()
            self.orchestrator = None
        if self.engine is not None:
            self.engine.stop()
            self.engine = None

    def __enter__(self) -> RLTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- generation ---------------------------------------------------------------------------------------------

    def run_context(self, sampling_args: Mapping[str, Any] | None = None) -> RunContext:
        """How rollouts reach the engine: its client, and what every request asks for."""
        return RunContext(
            client=policy_client(self.engine),
            model=self.engine.served_model,
            sampling_args={"return_weight_versions": True, **self.args.sampling(), **(sampling_args or {})},
            require_tokens=True,
            seed=self.args.seed,
            rollout_timeout_s=self.args.rollout_timeout or self.args.generation_timeout,
        )

    def start_engine(self) -> None:
        """Serve the present weights, if they are not served yet."""
        if self.engine is None:
            self.engine = open_engine(self.model, self.tokenizer, self.args, self.env)
            self.engine.start(deadline_s=120.0)
            self.engine.set_version(self.policy_version)

    def begin(self) -> None:
        """Start the engine and the pipeline with the weights as they are now."""
        self._check_forward()
        self.start_engine()
        self.engine.set_version(self.policy_version)
        self.orchestrator = Orchestrator(self.env, self.run_context(), self.args, self.args.world_size)
        self.orchestrator.start(self.policy_version, self._pipeline)

    def _check_forward(self) -> None:
        """Compare our forward with the stock one; fall back, with a warning, where an architecture does not fit."""
        head = check_head(self.model)
        if not head.ok:
            log.warning("the chunked head differs from the stock one by %.2g: the full head is used", head.difference)
            install_logprob_forward(self.model, full_head=True)
        if self.args.packing and not (packed := check_packing(self.model)).ok:
            log.warning("packed samples see each other (difference %.2g): packing is switched off", packed.difference)
            self.args.packing = False

    # --- one optimizer step -------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Blocks for the next batch of the pipeline, for ever."""
        return _Batches(self)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: Any) -> tuple[list, None]:
        return [next(epoch_iterator)], None

    def training_step(self, model: Any, inputs: StepBatch, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of every row; the weights of the tokens already make it one mean over the step."""
        started = time.perf_counter()
        model.train()
        self._batch, meter = inputs, RatioMeter(self.policy_version)
        total = torch.zeros((), device=self.args.device)
        for row in inputs.rows_R[self.accelerator.process_index]:
            loss = self.compute_loss(model, row, meter=meter)
            if not torch.isfinite(loss):
                raise self._non_finite("loss", row)
            self.accelerator.backward(loss)
            total += loss.detach()
        if not self._self_tested:
            self._test_ratio(meter)
        self._step = {"loss": float(total), **meter.summary(), "time/train": time.perf_counter() - started}
        return total

    def compute_loss(  # type: ignore[override]
        self,
        model: Any,
        inputs: Row,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        meter: RatioMeter | None = None,
    ) -> Any:
        """Weighted loss of one row: Σ_t weight_t · loss_t, times the number of ranks (which average gradients)."""
        row = inputs.to_tensors(self.args.device)
        out = model(
            input_ids=row["token_ids"].unsqueeze(0),
            position_ids=row["position_ids"].unsqueeze(0),
            inv_temperature=row["inv_temperature"],
            loss_mask=row["loss_mask"],
        )
        log_mu = anchor_unsampled(row["mu"], out.logprobs, row["version"] != NOT_SAMPLED)
        tokens = LossInput(out.logprobs, log_mu, row["advantage"], row["loss_mask"], row["seq_ids"])
        loss = (row["weight"] * self.loss(tokens)).sum() * self.args.world_size
        if meter is not None:
            meter.add(out.logprobs.detach(), log_mu, out.entropy, row)
        return (loss, out) if return_outputs else loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        value = float(norm) if norm is not None else math.nan
        if not math.isfinite(value):
            raise self._non_finite("gradient norm", None)
        self._step["grad_norm"] = value
        return norm

    def _test_ratio(self, meter: RatioMeter) -> None:
        """Before the first step the weights are those that sampled: log-probs must agree, or training is wrong."""
        self._self_tested = True
        settings = self.args.sampling().keys() & {"top_p", "top_k", "min_p", "repetition_penalty"}
        if settings or meter.num_current == 0:
            return
        dtype = find_causal_lm(self.model).get_output_embeddings().weight.dtype
        allowed = 1e-4 if dtype == torch.float32 else 2e-2
        if meter.mean_abs > allowed:
            raise ConfigError(
                f"with identical weights, sampler and trainer disagree by {meter.mean_abs:.2g} nats per token "
                f"({meter.max_abs:.2g} at most; {allowed:g} allowed): check that both use the same tokenizer, chat "
                f"template, dtype ({dtype}) and temperature ({self.args.temperature:g}), and that the "
                "server returns processed log-probabilities"
            )

    def _non_finite(self, key: str, row: Row | None) -> NonFiniteLoss:
        dump = Path(self.args.output_dir) / f"non-finite-step-{self.state.global_step}.json"
        rows = [row] if row is not None else (self._batch.rows_R[self.accelerator.process_index] if self._batch else [])
        dump.parent.mkdir(parents=True, exist_ok=True)
        fields = ("token_ids", "mu", "advantage", "weight", "version")
        checkpoint.write_json(dump, [{n: [repr(v) for v in getattr(r, n).tolist()] for n in fields} for r in rows])
        return NonFiniteLoss(
            f"the {key} of step {self.state.global_step + 1} is not finite; no step was taken, and the tokens are in "
            f"{dump}. Lower the learning rate, or look for rewards and log-probs that are not numbers",
            key=key,
            dump=str(dump),
        )

    def before_step(self) -> None:
        """The optimizer is about to change the weights: nobody may be computing with them."""
        assert self.orchestrator is not None
        if self.args.deterministic:
            self.orchestrator.settle()
        self._paused_at = time.perf_counter()
        self._pause = self.engine.pause()
        self._pause.__enter__()

    def after_step(self) -> None:
        """The weights are those of the next policy version."""
        self.engine.set_version(self.policy_version + 1)
        self._pause.__exit__(None, None, None)
        self._pause = None
        self._step["time/pause"] = time.perf_counter() - self._paused_at

    def finish_step(self) -> None:
        """Tell the pipeline, and write the step's numbers."""
        assert self.orchestrator is not None and self._batch is not None
        self.orchestrator.set_version(self.policy_version)
        self.state.epoch = self._batch.groups[-1].index / len(self.orchestrator.schedule.examples)
        values = {**self._batch.stats, **self._step, "learning_rate": self._get_learning_rate()}
        self.metrics_file.write(self.state.global_step, self.policy_version, values)
        if self.args.log_completions:
            write_completions(Path(self.args.output_dir), self.state.global_step, self._batch)

    @property
    def last_step(self) -> dict[str, Any]:
        """The numbers of the newest step, as in ``metrics.jsonl``."""
        return {**(self._batch.stats if self._batch else {}), **self._step}

    def floating_point_ops(self, inputs: Any) -> int:
        return 0

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _configuration(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be continued."""
        names = (
            "rollouts_per_example batch_size max_seq_len temperature top_p top_k min_p repetition_penalty max_tokens loss "
            "advantage aggregation max_off_policy_steps seed shuffle_dataset use_lora lora_rank learning_rate"
        ).split()
        return {
            "env_id": self.env.env_id,
            "env_args": {key: str(value) for key, value in self.env.env_args.items()},
            **{name: _describe(getattr(self.args, name)) for name in names},
        }

    def _resolve_checkpoint(self, wanted: str | bool | None) -> Path | None:
        if not wanted:
            return None
        if wanted is True:
            newest = checkpoint.newest_valid(Path(self.args.output_dir))
            if newest is None:
                raise CheckpointError(f"{self.args.output_dir} holds no valid checkpoint to resume from")
            return newest
        folder = Path(wanted)
        checkpoint.verify(folder)
        return folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        assert self.orchestrator is not None
        output = Path(self.args.output_dir)
        with checkpoint.writing(output / f"{checkpoint.PREFIX}{self.state.global_step}") as folder:
            self.save_model(str(folder), _internal_call=True)
            if not self.args.save_only_model:
                checkpoint.save_optimizer(folder, self.optimizer)
                checkpoint.save_scheduler(folder, self.lr_scheduler)
                checkpoint.save_rng(folder)
            state = self.orchestrator.snapshot()
            checkpoint.save_pipeline(folder, state, self.policy_version, self._configuration())
            self.state.save_to_json(os.path.join(folder, "trainer_state.json"))
        checkpoint.prune(output, self.args.save_total_limit)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Weights and tokenizer; the pickled arguments that transformers would add are left out."""
        folder = output_dir or self.args.output_dir
        os.makedirs(folder, exist_ok=True)
        self.model.save_pretrained(folder, state_dict=state_dict)
        self.processing_class.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        preparation.load_weights(self.model, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is not None:
            checkpoint.load_optimizer(Path(checkpoint_folder), self.optimizer)
            checkpoint.load_scheduler(Path(checkpoint_folder), self.lr_scheduler)
            self.metrics_file.resume(self.state.global_step)

    def _load_rng_state(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is not None:
            checkpoint.load_rng(Path(checkpoint_folder))


class _Batches:
    """The pipeline as a loader without length."""

    def __init__(self, trainer: RLTrainer):
        self.trainer = trainer

    def __iter__(self) -> Iterator[StepBatch]:
        while True:
            assert self.trainer.orchestrator is not None
            yield self.trainer.orchestrator.next_batch()


class _Loop(TrainerCallback):
    """Where the loop of transformers calls ours."""

    def __init__(self, trainer: RLTrainer):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.begin()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.before_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.after_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.finish_step()


FORCED = {
    "gradient_accumulation_steps": 1,
    "ignore_data_skip": True,
    "remove_unused_columns": False,
    "logging_nan_inf_filter": False,
    "ddp_find_unused_parameters": False,
    "disable_tqdm": True,
    "label_names": [],
    "report_to": [],
}
"""What the loop needs of transformers' own settings, set on the private copy."""


def _private(given: RLConfig) -> RLConfig:
    settings = copy.copy(given)
    for name, value in FORCED.items():
        setattr(settings, name, value)
    return settings


def _one_of(first: str, a: Any, second: str, b: Any) -> Any:
    if a is not None and b is not None and a is not b:
        raise ConfigError(f"{second} is another name of {first}; give one of them")
    return a if a is not None else b


def _check_environment(env: Environment) -> None:
    if not env.get_reward_funcs():
        raise ConfigError(f"the environment {env.env_id or type(env).__name__} has no reward function: nothing to train on")


def _parameters(settings: RLConfig) -> dict[str, Any]:
    """The parameters that the chosen loss takes, explicit ``loss_kwargs`` last."""
    taken = loss_parameters(settings.loss)
    named = settings.loss_parameters()
    return {name: value for name, value in named.items() if taken is not None and name in taken} | settings.loss_kwargs


def _describe(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, type(None))) else getattr(value, "__name__", str(value))


def _require_same(saved: Mapping[str, Any], current: Mapping[str, Any], folder: Path) -> None:
    differences = {k: (saved.get(k), current.get(k)) for k in {*saved, *current} if saved.get(k) != current.get(k)}
    if differences:
        listed = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in sorted(differences.items()))
        raise RunMismatch(
            f"{folder} belongs to another configuration: {listed}. Use those values, or start afresh in another folder",
            differences=differences,
        )
