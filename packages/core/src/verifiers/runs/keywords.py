"""The keywords of ``evaluate`` and ``generate``, for type checkers and editors: generated from
their declaration, ``runs.options.RunOptions``, by ``python docs/reference_pages.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verifiers.runs.options import SamplingOptions

if TYPE_CHECKING:
    from verifiers.results import GenerateOutputs
    from verifiers.runs.rollout import Progress


class EvaluateOptions(SamplingOptions, total=False):
    """The keywords of ``evaluate``: the fields of ``RunOptions``, and sampling
    arguments by name."""

    shuffle_seed: int | None
    until_half_width: float | None
    until_decided: str | Path | None
    reward_range: Sequence[float]
    seed: int | None
    max_concurrent: int
    max_concurrent_generation: int | None
    max_concurrent_scoring: int | None
    max_concurrent_tools: int | None
    num_workers: int
    worker_backend: Literal["process", "ray"]
    independent_scoring: bool
    interleave_scoring: bool
    max_retries: int
    rollout_timeout_s: float | None
    abort_after: int
    max_cost_usd: float | None
    max_total_tokens: int | float | None
    cache_dir: str | Path | None
    accept_changed_code: bool
    retry_errors: bool
    state_columns: Sequence[str] | None
    push_to_hub: bool
    hub_name: str | None
    score_rollouts: bool | None
    results_path: str | Path | None
    save_results: bool
    resume: bool
    keep_states: bool
    keep_raw_responses: bool
    prices: Mapping[str, Sequence[float]] | None
    spent_elsewhere: tuple[float, int]
    model_name: str | None
    provenance: Mapping[str, Any] | None
    preflight: bool
    progress: Progress | None
    on_start: Callable[..., object] | None
    on_progress: Callable[..., object] | Sequence[Callable[..., object]] | None
    on_log: Callable[[str], object] | None
    on_results: Callable[[GenerateOutputs], object] | None


class GenerateOptions(EvaluateOptions, total=False):
    """The keywords of ``generate``: those of ``evaluate``, and the rollouts per input."""

    rollouts_per_example: int | None
