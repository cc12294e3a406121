"""What a run is: the configuration that makes its rows comparable, and its metadata at any moment.

Nothing of it is a secret: both are written to disk. This module writes nothing itself (``run_directory``).
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata as packages
from typing import Any

import verifiers
from verifiers.clients.prices import prices_of
from verifiers.errors import ConfigError
from verifiers.results import GenerateMetadata
from verifiers.results.rows import RolloutOutput
from verifiers.runs.options import RunOptions
from verifiers.runs.plan import Plan
from verifiers.runs.runner import RunEnvironment, groups_are_units
from verifiers.runtime.redaction import redacted
from verifiers.storage.identity import describe, fingerprint


def identity_of(env: RunEnvironment) -> dict[str, Any]:
    """What an environment is to a run: two that agree in this generate and score alike. Secrets are taken out.

    The first entries are those that every version has stored; ``environment``, ``parser`` and ``rubric`` hold every
    constructor parameter that they do not show.
    """
    rubric, described = env.rubric, env.identity()
    shown = {
        "env_id": env.env_id,
        "env_class": f"{type(env).__module__}.{type(env).__qualname__}",
        "env_version": env.env_version,
        "env_args": redacted(env.env_args),
        "message_type": env.message_type,
        "system_prompt": env.system_prompt,
        "reward_functions": rubric.get_reward_func_names(),
        "reward_weights": rubric.get_reward_weights(),
        "group_weights": rubric.get_group_weights(),
        "max_turns": env.max_turns,
        "max_seq_len": env.max_seq_len,
        "max_total_completion_tokens": env.max_total_completion_tokens,
        "timeout_seconds": env.timeout_seconds,
    }
    parts = {name: described.pop(name) for name in ("parser", "rubric") if name in described}
    of_the_run = ("class", "sampling_args", "score_rollouts")  # the class is env_class, the others a run may overrule
    further = {name: value for name, value in described.items() if name not in shown and name not in of_the_run}
    return shown | {"environment": further} | parts


@dataclass(slots=True)
class RunDescription:
    """The identity of a run, and its metadata at any moment."""

    env: RunEnvironment
    plan: Plan
    client: Any
    model: str
    sampling_args: Mapping[str, Any]
    options: RunOptions
    started: float
    path: Any = None
    resumed: int = 0
    """Rollouts that were durable before this run began."""
    outside_plan: list[str] = field(default_factory=list)
    """Keys of rows of earlier runs that the directory holds and this plan does not: kept, and not counted."""
    stored_fingerprint: str | None = None
    """Of the run that the directory held already; an older version may have made it of less."""
    _config: dict[str, Any] | None = None
    _fingerprint: str | None = None

    @property
    def scored(self) -> bool:
        """Whether rewards are computed."""
        asked = self.options.score_rollouts
        return self.env.score_rollouts if asked is None else asked

    @property
    def scores_groups(self) -> bool:
        """Whether siblings are scored together, so that a group is stored, and owed, whole."""
        return groups_are_units(self.env.rubric) and self.scored and not self.options.independent_scoring

    def config(self) -> dict[str, Any]:
        """What must be equal for two rows to belong to one run; made once. Secrets are taken out."""
        if self._config is None:
            self._config = identity_of(self.env) | {
                "model": self.model,
                "sampling_args": redacted({**self.env.sampling_args, **self.sampling_args}),
                "seed": self.options.seed,
                "score_rollouts": self.scored,
                "independent_scoring": self.options.independent_scoring,
            }
            if hasattr(self.client, "identity"):
                self._config["client"] = describe(self.client)
        return self._config

    def fingerprint(self) -> str | None:
        """The configuration's fingerprint; None for one that could not be kept on disk, and is not."""
        if self.stored_fingerprint is not None:
            return self.stored_fingerprint
        if self._fingerprint is None:
            try:
                self._fingerprint = fingerprint(self.config())
            except ConfigError:
                if self.path is not None:
                    raise
        return self._fingerprint

    def noted(self) -> dict[str, Any]:
        """What a reader may want to know beside it; a change is noted and stops nothing."""
        return {
            "num_examples": len(self.plan.examples),
            "rollouts_per_example": max(self.plan.siblings),
            "base_url": self.base_url,
            "verifiers_version": verifiers.__version__,
        }

    @property
    def base_url(self) -> str:
        return str(getattr(self.client, "base_url", "") or "")

    @property
    def local_model(self) -> dict[str, str] | None:
        """``name file sha256 quantisation`` of the model in this process; None when a server answers."""
        model = getattr(self.client, "local_model", None)
        return None if model is None else model.describe()

    def metadata(self, rows: Sequence[RolloutOutput], status: str) -> GenerateMetadata:
        """Statistics of ``rows`` with what the run is; ``status`` is running, complete, interrupted or failed."""
        spent = time.time() - self.started
        return GenerateMetadata.of(
            rows,
            env_id=self.env.env_id,
            env_args=redacted(self.env.env_args),
            env_version=self.env.env_version,
            model=self.model,
            base_url=self.base_url,
            num_examples=len(self.plan.examples),
            rollouts_per_example=max(self.plan.siblings),
            sampling_args=redacted(dict(self.sampling_args)),
            date=datetime.datetime.fromtimestamp(self.started, datetime.UTC).isoformat(timespec="seconds"),
            time=spent,
            pass_threshold=self.env.pass_threshold,
            state_columns=list(self.options.state_columns),
            path_to_save=str(self.path) if self.path is not None else None,
            tools=list(self.env.tool_defs),
            version_info=self.versions(),
            fingerprint=self.fingerprint(),
            status=status,
            seed=self.options.seed,
            resumed=self.resumed,
            outside_plan=self.outside_plan,
            local_model=self.local_model,
            prices=prices_of(self.client),
        )

    def versions(self) -> dict[str, Any]:
        try:
            installed = packages.version("verifiers")
        except packages.PackageNotFoundError:
            installed = verifiers.__version__
        return {"vf_version": installed, "vf_commit": None, "env_version": self.env.env_version, "env_commit": None}
