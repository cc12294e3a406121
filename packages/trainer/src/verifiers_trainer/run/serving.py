"""The policy in training as something that can be asked: engine, client, completions, evaluation, saved weights.

The engine starts when it is first needed and ends with ``close``. When it is paused, and what is trained, is
``trainer``'s; what an engine is, ``engines``'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from verifiers.errors import ConfigError
from verifiers.runs.runner import RunContext
from verifiers_trainer.engines.inference import open_engine, training_client
from verifiers_trainer.engines.policy_client import PolicyClient
from verifiers_trainer.hf_loop import LoopTrainer
from verifiers_trainer.policy import preparation
from verifiers_trainer.run import arguments, evaluation
from verifiers_trainer.run.trackers import Sinks
from verifiers_trainer.settings.config import RLConfig


class ServingTrainer(LoopTrainer):
    """A ``LoopTrainer`` whose policy answers; ``RLTrainer`` is the whole of it."""

    env: Any
    eval_env: Any
    eval_rows: Any
    """Rows to evaluate on in place of the environment's; None = the environment's."""
    engine: Any = None
    sinks: Sinks
    orchestrator: Any = None
    _client: PolicyClient | None = None
    _pause: Any = None
    _taken: dict[str, float] | None = None
    """The newest evaluation, as it was written."""

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

    @property
    def eval_dataloader(self) -> list[dict[str, list[Any]]]:
        """The evaluation set in parts of ``per_device_eval_batch_size``: ``prompts answers infos examples``."""
        return evaluation.parts(self)

    @property
    def client(self) -> PolicyClient:
        """The present policy as a client, for hooks that play rollouts themselves; starts the engine."""
        self.start_engine()
        if self._client is None:
            sampling = {"return_weight_versions": True, **self.args.sampling()}
            client = training_client(self.engine, self.tokenizer, self.args)
            self._client = PolicyClient(self.engine, client, sampling, self.args.seed)
        return self._client

    def generate(self, prompts: Sequence[Any]) -> list[Any]:
        """One completion by the present policy for each prompt (messages, text, or a row); blocks until all are in."""
        return evaluation.complete(self, prompts)

    # --- evaluation and saving ----------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        *,
        num_examples: int | None = None,
    ) -> dict[str, float]:
        """Play the evaluation set with the present weights; returns ``eval_reward`` and its like, and logs them.

        ``eval_dataset`` may be rows to play instead, once each. ``ignore_keys`` is transformers' and has no meaning.
        An override may return one number, or numbers by name.
        """
        count = num_examples if num_examples is not None else self.args.eval_num_examples
        metrics = self.ranks.share(
            lambda: evaluation.evaluate(self, count, rows=eval_dataset, prefix=metric_key_prefix), "the evaluation"
        )
        return self.take_evaluation(metrics)

    def take_evaluation(self, metrics: dict[str, float]) -> dict[str, float]:
        """Write an evaluation's numbers where those of the steps go, and tell the callbacks; the same ones once."""
        if metrics is self._taken:
            return metrics
        self._taken = metrics
        self._between["time/eval"] = metrics.get("eval_runtime", 0.0)
        if self.ranks.is_main:
            self.metrics_file.write(self.state.global_step, self.policy_version, metrics)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False, *, merged: bool = False) -> None:
        """Write model (of an adapter: the adapter alone, unless ``merged``) and tokenizer to a folder."""
        if not merged:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir) if output_dir else self.args.folder
        if not self.ranks.is_main:
            return
        preparation.save_merged(self.whole_model, folder)
        self.processing_class.save_pretrained(folder)

    # --- the engine ---------------------------------------------------------------------------------------------

    def run_context(self, sampling_args: Mapping[str, Any] | None = None) -> RunContext:
        """How rollouts reach the engine: its client, and what every request asks for."""
        return RunContext(
            client=training_client(self.engine, self.tokenizer, self.args),
            model=self.engine.served_model,
            sampling_args={"return_weight_versions": True, **self.args.sampling(), **(sampling_args or {})},
            require_tokens=True,
            seed=self.args.seed,
            rollout_timeout_s=self.args.rollout_timeout or self.args.generation_timeout,
            scoring_slot=arguments.slot(self.args.max_concurrent_scoring),
            tool_slot=arguments.slot(self.args.max_concurrent_tools),
        )

    def start_engine(self) -> None:
        """Serve the present weights, if they are not served yet. Raises ``ConfigError`` on any rank but 0."""
        if not self.ranks.is_main:
            raise ConfigError(f"rank 0 generates, and this is rank {self.ranks.rank}: ask there")
        model = self.whole_model  # asked for each time, which brings it up to the policy
        if self.engine is None:
            self.engine = open_engine(model, self.tokenizer, self.args, self.env)
            self.engine.start(deadline_s=max(120.0, self.args.vllm_server_timeout))
            self.engine.set_version(self.policy_version)

    def close(self) -> None:
        """Stop generating and the engine; calling it again does nothing."""
        pause, self._pause = self._pause, None
        orchestrator, self.orchestrator = self.orchestrator, None
        engine, self.engine = self.engine, None
        self._client = None
        try:
            if pause is not None:
                pause.__exit__(None, None, None)
            if orchestrator is not None:
                orchestrator.close()
        finally:
            if engine is not None:
                engine.stop()
            self.sinks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
