"""``TinkerTrainer``: a training run with forward, backward and optimizer step on a Tinker service.

One step::

    batch = batches.next_batch()                      rollouts -> groups -> advantages -> samples
    training.forward_backward(data, loss); optim_step(adam)             sent together, then awaited
    sampler = training.save_weights_and_get_sampling_client()           new requests are sampled by it
    batches.set_version(n)                                              and start as the lag allows

Pipeline, advantages, aggregation and staleness bound are those of ``RLTrainer``. A killed run
resumes from its newest checkpoint: the state saved at the service, that of an advantage that has
one, local counters, and rollouts not yet trained. torch is not used. One service, one adapter, no
evaluation during the run (call ``env.evaluate(trainer.client, ...)`` between two calls of
``train``).
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.environments.base import Environment
from verifiers.errors import CheckpointError, NonFiniteLoss, RunError, RunMismatch
from verifiers.runs.rollout import RunContext
from verifiers_integrations.tinker.client import TINKER, TinkerClient
from verifiers_integrations.tinker.data import datum, ratio_stats
from verifiers_integrations.tinker.settings import TinkerConfig
from verifiers_trainer.algorithm.advantages import ADVANTAGES
from verifiers_trainer.algorithm.batch import TrainBatch
from verifiers_trainer.algorithm.state import object_of, state_of
from verifiers_trainer.pipeline.pipeline import Pipeline
from verifiers_trainer.pipeline.saved_state import load_pipeline, save_pipeline
from verifiers_trainer.pipeline.schedule import PipelineState, digest
from verifiers_trainer.pipeline.thread import PipelineThread
from verifiers_trainer.policy import checkpoint_files
from verifiers_trainer.run.context import (
    check_advantage,
    check_environment,
    environment_of,
    examples_of,
)
from verifiers_trainer.run.metrics_files import COMPLETIONS, METRICS, MetricsFile, write_completions

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

SAVED = "tinker.json"
"""File of a checkpoint with the path of the state at the service."""


class TinkerTrainer:
    """Trains ``config.model`` in ``env`` (an environment, its id, or a list of several).

    service: a ``tinker.ServiceClient``; None creates a client with ``config.base_url`` and
    TINKER_API_KEY.
    tokenizer: None takes ``config.tokenizer``, else that of the service.
    """

    def __init__(
        self,
        env: Environment | str | list[object],
        config: TinkerConfig,
        *,
        service: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.env: Environment = environment_of(env)
        check_environment(self.env)
        check_advantage(self.env, config.advantage)
        self.config = replace(config, advantage=object_of(ADVANTAGES, config.advantage))
        self.examples = examples_of(self.env)
        self.step = 0
        """Optimizer steps taken; also the policy version."""
        self.metrics_file = MetricsFile(config.folder)
        self._service, self._tokenizer = service, tokenizer
        self.training: Any = None
        """The training client of the service, after the run started."""
        self.client: TinkerClient | None = None
        """The client that samples the current policy."""
        self._batches: PipelineThread | None = None
        self._began = 0.0

    def train(self, resume_from_checkpoint: bool | str | Path = False) -> dict[str, Any]:
        """Train to ``max_steps``; return the numbers of the last step. ``True`` resumes from the
        newest checkpoint.

        *Raises* ``CheckpointError``, ``RunMismatch`` and the kinds of ``RunError``.
        """
        self.sdk = TINKER.load()
        folder = self._checkpoint_of(resume_from_checkpoint)
        numbers: dict[str, object] = {}
        pipeline = self._start_new() if folder is None else self._load(folder)
        if self.step >= self.config.max_steps:
            log.warning("step %d of %d: nothing to train", self.step, self.config.max_steps)
            return numbers
        self._open(folder, pipeline)
        try:
            while self.step < self.config.max_steps and (batch := self._next_batch()) is not None:
                numbers = self._one_step(batch)
                if self.step % self.config.save_steps == 0 or self.step == self.config.max_steps:
                    self.save()
        finally:
            self.close()
        return numbers

    def close(self) -> None:
        """Stop the pipeline; calling it again does nothing. The client stays usable."""
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()

    # --- the service ------------------------------------------------------------------------------

    def _open(self, folder: Path | None, pipeline: PipelineState) -> None:
        service = self._service or self.sdk.ServiceClient(
            **({"base_url": self.config.base_url} if self.config.base_url else {})
        )
        if folder is None:
            rank = {} if self.config.lora_rank is None else {"rank": self.config.lora_rank}
            self.training = service.create_lora_training_client(
                base_model=self.config.model, seed=self.config.seed, **rank
            )
        else:
            state = checkpoint_files.read_json(folder / SAVED)["path"]
            try:
                self.training = service.create_training_client_from_state_with_optimizer(state)
            except Exception as error:
                raise CheckpointError(
                    f"the service cannot load {state} ({folder}): {error}", path=str(folder)
                ) from error
        self.client = TinkerClient(
            self.training.save_weights_and_get_sampling_client(), self._resolve_tokenizer(), version=self.step,
            max_seq_len=self.config.max_seq_len, history=self.config.history,
            tool_call_parser=self.config.tool_call_parser, model=self.config.model,
        )  # fmt: skip
        pipeline_of_run = Pipeline(self.env, self.examples, self._context(), self.config)  # type: ignore[arg-type]
        self._batches = PipelineThread(pipeline_of_run)
        self._batches.start(self.step, pipeline)

    def _resolve_tokenizer(self) -> Any:
        if self._tokenizer is None and self.config.tokenizer is not None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(
                self.config.tokenizer, trust_remote_code=False
            )
        return self._tokenizer or self.training.get_tokenizer()

    def _context(self) -> RunContext:
        return RunContext(
            client=self.client,
            model=self.config.model,
            sampling_args=self.config.sampling(),
            require_tokens=True,
            seed=self.config.seed,
            rollout_timeout_s=self.config.rollout_timeout or self.config.generation_timeout,
        )

    def _next_batch(self) -> TrainBatch | None:
        """The next batch; None when the task is solved. Saves the last step where none comes."""
        assert self._batches is not None
        self._began = time.monotonic()
        try:
            batch = self._batches.next_batch()
        except RunError as error:
            try:
                self._save_unsaved()
            except Exception as failed:  # noqa: BLE001 - the error that ended training is raised
                log.warning("step %d could not be saved: %s", self.step, failed)
            raise error
        if batch is None:
            self._save_unsaved()
        return batch

    def _save_unsaved(self) -> None:
        if (
            self.step
            and not (self.config.folder / f"{checkpoint_files.PREFIX}{self.step}").is_dir()
        ):
            self.save()

    def _one_step(self, batch: TrainBatch) -> dict[str, object]:
        assert self._batches is not None
        assert self.client is not None
        numbers = {**batch.stats, **self._train_on(batch)}
        self.step += 1
        sampler = self.training.save_weights_and_get_sampling_client()
        self.client.set_sampling_client(sampler, self.step)
        self._batches.set_version(self.step)
        numbers["time/step"] = time.monotonic() - self._began
        self.metrics_file.write(self.step, self.step, numbers)
        if self.config.log_completions:
            write_completions(self.config.folder, self.step, batch)
        log.info(
            "step %d of %d: reward %.3f, %d tokens trained, %.1f s",
            self.step, self.config.max_steps, numbers["reward/mean"], batch.num_tokens, numbers["time/step"],
        )  # fmt: skip
        return numbers

    def _train_on(self, batch: TrainBatch) -> dict[str, object]:
        """Run forward, backward and the optimizer step at the service."""
        start = time.monotonic()
        rows = [row for row in batch.rows_R[0] if not row.is_filler]
        config = {"loss_fn_config": self.config.loss_config} if self.config.loss_config else {}
        rate = {"learning_rate": self.config.learning_rate} if self.config.learning_rate else {}
        computed = self.training.forward_backward(
            [datum(self.sdk, row) for row in rows], self.config.loss, **config
        )
        stepped = self.training.optim_step(self.sdk.AdamParams(**rate, **self.config.adam))
        try:
            outputs, update = computed.result(), stepped.result()
        except Exception as error:
            raise RunError(
                f"the service failed in step {self.step + 1}: {type(error).__name__}: {error}"
            ) from error
        metrics = {
            f"service/{name}": value
            for result in (outputs, update)
            for name, value in (result.metrics or {}).items()
        }
        if not_finite := [name for name, value in metrics.items() if value != value]:
            raise NonFiniteLoss(
                f"the service's {not_finite[0]} of step {self.step + 1} is not a number",
                step=self.step + 1,
            )
        return (
            metrics
            | ratio_stats(rows, outputs.loss_fn_outputs, self.step)
            | {"time/train": time.monotonic() - start}
        )

    # --- checkpoints ------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write ``checkpoint-<step>``: the state at the service first, then the local files,
        atomically."""
        assert self._batches is not None
        pipeline = self._batches.last_state()
        path = self.training.save_state(f"step-{self.step}").result().path
        folder = self.config.folder / f"{checkpoint_files.PREFIX}{self.step}"
        with checkpoint_files.writing(folder) as temporary:
            save_pipeline(temporary, pipeline, self.step, self._configuration())
            checkpoint_files.save_algorithm(temporary, state_of(self.config, ("advantage",)))
            checkpoint_files.write_json(
                temporary / SAVED, {"path": path, "model": self.config.model}
            )
        checkpoint_files.prune(folder, self.config.save_total_limit)
        log.info("saved %s (%s)", folder, path)
        return folder

    def _configuration(self) -> dict[str, object]:
        """Return what must match when a checkpoint is resumed."""
        return {
            "env_id": self.env.env_id,
            "env_args": {key: str(value) for key, value in self.env.env_args.items()},
            "examples": digest(self.examples),
            **self.config.decisive(),
        }

    def _checkpoint_of(self, checkpoint: bool | str | Path) -> Path | None:
        if checkpoint is False:
            return None
        if checkpoint is True:
            folder = checkpoint_files.newest_valid(self.config.folder)
        else:
            folder = Path(checkpoint)
        if folder is None:
            raise CheckpointError(
                f"{self.config.folder} holds no valid checkpoint", path=str(self.config.folder)
            )
        checkpoint_files.verify(folder)
        return folder

    def _start_new(self) -> PipelineState:
        if earlier := bool(
            checkpoint_files.steps_in(self.config.folder) or self.metrics_file.holds_earlier
        ):
            aside = checkpoint_files.set_aside(self.config.folder, (METRICS, COMPLETIONS))
            log.warning("%s had an earlier run, moved to %s", self.config.folder, aside)
        self.metrics_file.start(anew=earlier)
        self.step = 0
        return PipelineState()

    def _load(self, folder: Path) -> PipelineState:
        """Load the pipeline of a checkpoint. *Raises* ``RunMismatch`` with every setting that
        differs."""
        pipeline, self.step, saved = load_pipeline(folder)
        current = self._configuration()
        names = sorted({*saved, *current})
        differences = {
            name: (saved.get(name), current.get(name))
            for name in names
            if saved.get(name) != current.get(name)
        }
        if differences:
            listed = "; ".join(
                f"{name} was {old!r}, is {new!r}" for name, (old, new) in differences.items()
            )
            raise RunMismatch(
                f"{folder} belongs to another configuration: {listed}. Use those values, or another"
                " output_dir",
                differences=differences,
                path=str(folder),
            )
        self.metrics_file.resume(self.step)
        checkpoint_files.load_algorithm(folder, self.config)
        return pipeline
