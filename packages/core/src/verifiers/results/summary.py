"""The numbers of a run as JSON values: what ``GenerateOutputs.summary`` returns, and what texts,
pages and commands read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from verifiers.storage.directory import LocalModelFacts


class Latency(TypedDict):
    """Percentiles of the rollouts' total time in milliseconds; None if unknown."""

    median_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None


class Throughput(TypedDict):
    """Of a call; None when it ran no rollout."""

    rollouts_per_s: float | None
    output_tokens_per_s: float | None


class Spent(TypedDict):
    """What a run with a limit has spent over all its sessions."""

    usd: float
    tokens: int
    requests: int
    lost: int
    max_cost_usd: float | None
    max_total_tokens: int | None


class SummaryFields(TypedDict):
    """The fields are those of ``GenerateMetadata``, unless a line says what else; unknown numbers
    are None."""

    env_id: str
    model: str
    base_url: str
    num_examples: int
    rollouts_per_example: int
    num_rollouts: int
    num_errors: int
    num_unscored: int
    avg_reward: float | None
    reward_stderr: float | None
    success_metric: str | None
    avg_success: float | None
    success_stderr: float | None
    avg_metrics: dict[str, float | None]
    metric_counts: dict[str, int]
    avg_error: float
    pass_at_k: dict[str, float | None]
    pass_at_k_interval: dict[str, tuple[float, float]]
    pass_at_k_examples: dict[str, int]
    pass_at_k_unknown: int
    pass_at_k_bounds: dict[str, tuple[float | None, float | None]]
    pass_all_k: dict[str, float | None]
    pass_threshold: float | None
    stop_conditions: dict[str, int]
    usage: dict[str, int]
    """The sums over the rollouts."""
    cost_usd: float | None
    resumed: int
    env_args: dict[str, object]
    sampling_args: dict[str, object]
    status: str
    stopped: dict[str, object] | None
    spent: Spent | None
    coverage: dict[str, int | None] | None
    path: str | None
    """Where the run is saved."""
    seconds: float | None
    errors: dict[str, int]
    """Class of an error of a rollout -> count."""
    error_causes: dict[str, int]
    """Class, message and line -> count."""
    unscored: dict[str, int]
    """``"cause in function"`` of an unknown reward -> count."""
    latency: Latency


class RunSummary(SummaryFields, total=False):
    """The numbers of a run, and what only the command that ran it knows."""

    throughput: Throughput
    exported: Mapping[str, str] | None
    """Name of a format -> path."""
    left_to_server: list[str]
    """Sampling parameters that requests left to the server's defaults."""
    local_model: LocalModelFacts
    """Of a model in the process of the run."""
