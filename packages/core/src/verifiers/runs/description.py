"""``RunDescription``: what a run is: its configuration, its directory, where its numbers come from, its
metadata.

Two runs with equal configurations are one run, which resumes. Nothing here is read from rollouts
but their statistics, and no secret is in it.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import verifiers
from verifiers.clients.cache import CompletionCache
from verifiers.clients.protocol import prices_of
from verifiers.clients.spending import Budget
from verifiers.errors import ConfigError
from verifiers.results import GenerateMetadata
from verifiers.results.comparison import Measured
from verifiers.results.run_metadata import Measurements
from verifiers.results.statistics import equal_groups
from verifiers.runs.options import RunOptions
from verifiers.runs.plan import Plan
from verifiers.runs.rollout import RunEnvironment
from verifiers.runs.stopping import StoppingRule
from verifiers.runs.store import RunStore
from verifiers.runtime.redaction import digested, redacted, redacted_text
from verifiers.storage.configurations import fingerprint
from verifiers.storage.described import CODE, describe
from verifiers.storage.directory import (
    RunDirectory,
    default_root,
    read_config,
    read_metadata,
    run_path,
)
from verifiers.storage.identity import code_of, identity_of
from verifiers.storage.provenance import environment_facts, provenance

if TYPE_CHECKING:
    from verifiers.clients.protocol import Client


class RunDescription:
    """The facts of a run, from its arguments and from what it has become.

    The arguments are not changed; ``client`` must be resolved (``clients.resolve.client_for``).
    """

    def __init__(
        self,
        env: RunEnvironment,
        plan: Plan,
        client: Client,
        model: str,
        sampling_args: Mapping[str, object],
        options: RunOptions,
    ):
        self.env, self.plan, self.client, self.model = env, plan, client, model
        self.sampling_args, self.options = sampling_args, options
        self.sampling = {**env.sampling_args, **sampling_args}
        # the second: the first may go backwards
        self.started, self._clock = time.time(), time.monotonic()
        self.path: Path | None = None
        """The run directory, once it is open."""
        self.num_resumed = 0
        """Rollouts that were durable before this run began."""
        self.outside_plan: list[str] = []
        """Keys of saved rollouts outside this plan: left in the directory and not counted."""
        self.changed_code: list[str] = []
        """Files and functions that were changed between two sessions of the run, and accepted."""
        self.cache: CompletionCache | None = None
        self.budget: Budget | None = None
        """What the run has spent, where that is limited."""
        self.stopping: StoppingRule | None = None
        """Ends the run before its plan does, once it is decided."""
        self._config: dict[str, Any] | None = None
        self._provenance: dict[str, object] | None = None
        self._fingerprint: str | None = None

    @property
    def is_scored(self) -> bool:
        """Whether rewards are computed."""
        setting = self.options.score_rollouts
        return self.env.score_rollouts if setting is None else setting

    def config(self) -> dict[str, Any]:
        """The configuration that all rollouts of a run share, without secrets; computed once."""
        if self._config is None:
            self._config = identity_of(self.env) | {
                "model": self.name,
                "sampling_args": digested(self.sampling),
                **self.options.identity(),
                "score_rollouts": self.is_scored,
            }
            if code := code_of(self.env):
                self._config[CODE] = code
            if hasattr(self.client, "identity"):  # a client without identity() is not compared
                self._config["client"] = describe(self.client)
        return self._config

    def fingerprint(self) -> str | None:
        """Hash of the configuration; None when it has no JSON representation and the run is not
        saved."""
        if self._fingerprint is None:
            try:
                self._fingerprint = fingerprint(self.config())
            except ConfigError:
                if self.path is not None:
                    raise
        return self._fingerprint

    def for_comparison(self) -> Measured:
        """Itself for a comparison with another run, without rewards."""
        return Measured("this run", self.env.env_id, {}, self.name, self.config())

    def metadata(self, store: RunStore, measured: Measurements, status: str) -> GenerateMetadata:
        """Statistics of rollouts and facts of the run; ``status`` is running, complete, interrupted
        or failed."""
        env, local_model = self.env, getattr(self.client, "local_model", None)
        record = self.provenance()
        decision = None if self.stopping is None else self.stopping.decision()
        ended = self.stopping is not None and status == "complete"
        return GenerateMetadata.of(
            measured,
            env_id=env.env_id,
            env_args=redacted(env.env_args),
            env_version=env.env_version,
            model=self.name,
            base_url=self.base_url,
            num_examples=len(set(measured.examples)) if ended else len(self.plan.examples),
            rollouts_per_example=max(self.plan.siblings),
            sampling_args=redacted(dict(self.sampling_args)),
            date=datetime.datetime.fromtimestamp(self.started, datetime.UTC).isoformat(
                timespec="seconds"
            ),
            time=time.monotonic() - self._clock,
            success_metric=env.rubric.success_metric,
            pass_threshold=env.pass_threshold,
            state_columns=list(self.options.state_columns),
            path_to_save=str(self.path) if self.path is not None else None,
            tools=list(env.tool_defs),
            version_info={
                "vf_version": record["packages"]["verifiers"],
                "vf_commit": _sha(record["commit"]),
                "env_version": env.env_version,
                "env_commit": _sha(record["environment"]["commit"]),
            },
            provenance=record,
            fingerprint=self.fingerprint(),
            status=status,
            seed=self.options.seed,
            resumed=self.num_resumed,
            outside_plan=self.outside_plan,
            changed_code=self.changed_code,
            served_models=store.served_models(self.model),
            local_model=None if local_model is None else local_model.describe(),
            prices=prices_of(self.client),
            cached=None if self.cache is None else self.cache.summary(),
            spent=None if self.budget is None else self.budget.summary(),
            stopped=None if decision is None else dataclasses.asdict(decision),
            coverage=store.coverage.counts() | equal_groups(measured.rewards, measured.examples),
        )

    def open_directory(self, stack: ExitStack) -> RunDirectory | None:
        """The run directory, new or to be resumed; None for a run that is not saved. *Raises*
        RunMismatch, RunBusy, ConfigError."""
        options = self.options
        if options.results_path is None and not options.save_results:
            return None
        self.path = self._path()
        notes = {
            "num_examples": len(self.plan.examples),
            "rollouts_per_example": max(self.plan.siblings),
            "base_url": self.base_url,
            "verifiers_version": verifiers.__version__,
        }
        directory = stack.enter_context(
            RunDirectory.create_or_resume(
                self.path, self.config(), notes, accept_changed_code=options.accept_changed_code
            )
        )
        self.changed_code = directory.changed_code
        # the stored run's: an older version hashed fewer fields
        self._fingerprint = directory.fingerprint
        return directory

    def _path(self) -> Path:
        """Where the options say, else where runs of this configuration are."""
        options, config = self.options, self.config()
        if options.results_path is None:
            name = self.env.env_id or type(self.env).__name__
            return run_path(
                default_root(name),
                name,
                self.name,
                fingerprint(config),
                resume=options.resume,
                config=config,
                accept_changed_code=options.accept_changed_code,
            )
        path = Path(options.results_path)
        if not options.resume and read_config(path) is not None:
            raise ConfigError(
                f"{path} already holds a run and resume=False; choose another directory",
                path=str(path),
            )
        return path

    def provenance(self) -> dict[str, Any]:
        """Where the run's numbers come from, see ``storage.provenance``; made once."""
        if self._provenance is None:
            saved = (read_metadata(self.path) or {}) if self.path is not None else {}
            local_model = getattr(self.client, "local_model", None)
            facts = {
                "environment": environment_facts(self.env),
                "code": self.config().get(CODE),
                "engine": type(self.client).__name__,
                "processes": max(1, self.options.num_workers),
                "settings": self.options.described(),
                "weights": None if local_model is None else local_model.weights(),
            }
            facts |= self.options.provenance or {}
            self._provenance = provenance(saved.get("provenance"), **facts)
        return self._provenance

    @property
    def name(self) -> str:
        """The model's name in results."""
        return self.options.model_name or self.model

    @property
    def base_url(self) -> str:
        """Where the model is served. A local server has none before it runs."""
        return redacted_text(str(getattr(self.client, "base_url", "") or ""))


def _sha(commit: Mapping[str, object] | None) -> str | None:
    return None if commit is None else str(commit["sha"])
