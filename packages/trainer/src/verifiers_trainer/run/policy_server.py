"""``PolicyServer``: serves the policy in training to rollouts.

Owns the engine: starts it, creates its clients, and pauses it during weight updates.
``engines.inference`` selects the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from verifiers.errors import ConfigError
from verifiers.runs.rollout import RunContext, slots
from verifiers_trainer.engines.inference import open_engine, training_client
from verifiers_trainer.engines.policy_client import PolicyClient
from verifiers_trainer.run.context import TrainingRun


class PolicyServer:
    """Serves the policy of ``run`` from rank 0. Constructing it starts nothing; it may be
    restarted."""

    def __init__(self, run: TrainingRun):
        self.run = run
        self.engine: Any = None
        """None until ``start``, and after ``stop``."""
        self._client: PolicyClient | None = None

    def start(self, version: int) -> None:
        """Serve the present weights as policy ``version``; a no-op when the engine runs.

        Raises ``ConfigError`` on any rank but 0, and the engine's error when it cannot start.
        """
        run = self.run
        if not run.ranks.is_main:
            raise ConfigError(f"the engine runs on rank 0, and this is rank {run.ranks.rank}")
        model = run.whole_model  # reading it copies the present weights when the model is split
        if self.engine is None:
            self.engine = open_engine(model, run.tokenizer, run.settings, run.env)
            self.engine.start(deadline_s=max(120.0, run.settings.vllm_server_timeout))
            self.engine.set_version(version)

    def stop(self) -> None:
        """Stop the engine; calling it again does nothing."""
        engine, self.engine, self._client = self.engine, None, None
        if engine is not None:
            engine.stop()

    @property
    def version(self) -> int | None:
        """The policy version being served; None without an engine."""
        return None if self.engine is None else self.engine.version

    @property
    def client(self) -> PolicyClient:
        """A client of the running engine, for code that runs rollouts itself."""
        if self._client is None:
            settings = self.run.settings
            client = training_client(self.engine, self.run.tokenizer, settings)
            sampling_args = {"return_weight_versions": True, **settings.sampling()}
            self._client = PolicyClient(self.engine, client, sampling_args, settings.seed)
        return self._client

    def run_context(self, sampling_args: Mapping[str, object] | None = None) -> RunContext:
        """Client, sampling arguments and limits of rollouts on the running engine."""
        settings = self.run.settings
        return RunContext(
            client=training_client(self.engine, self.run.tokenizer, settings),
            model=self.engine.served_model,
            sampling_args={
                "return_weight_versions": True,
                **settings.sampling(),
                **(sampling_args or {}),
            },
            require_tokens=True,
            seed=settings.seed,
            rollout_timeout_s=settings.rollout_timeout or settings.generation_timeout,
            scoring_slot=slots(settings.max_concurrent_scoring),
            tool_slot=slots(settings.max_concurrent_tools),
        )

    @contextmanager
    def weight_update(self, version: int) -> Iterator[dict[str, float]]:
        """Context around the weight update to policy ``version``: sampling is paused inside, and no
        token is lost.

        A collective. Yields a dict that holds ``time/sync`` and ``time/pause`` (seconds)
        afterwards.
        """
        times: dict[str, float] = {}
        began = time.perf_counter()
        with nullcontext() if self.engine is None else self.engine.pause():
            yield times
            changed = time.perf_counter()
            self.run.renew()
            if self.engine is not None:
                self.engine.set_version(version)
                times["server/restarts"] = self.engine.num_restarts
            times["time/sync"] = time.perf_counter() - changed
        times["time/pause"] = time.perf_counter() - began
