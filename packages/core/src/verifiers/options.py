"""The options of a run: one table of names, defaults and meanings for ``evaluate``, ``generate`` and the commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from verifiers import compat
from verifiers.errors import ConfigError
from verifiers.runner import Progress
from verifiers.suggest import check_keywords

SAMPLING_NAMES = frozenset(
    "max_tokens temperature top_p top_k min_p stop seed presence_penalty frequency_penalty repetition_penalty logprobs "
    "top_logprobs reasoning_effort extra_body max_new_tokens max_completion_tokens".split()
) - {"seed"}
"""Sampling arguments that may be given by name beside the options; ``seed`` is the run's."""

DEFAULT_CONCURRENCY = 1024


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run is played, scored and stored."""

    max_concurrent: int = -1
    """Rollouts in flight; -1 = as many as are owed, at most 1024."""
    max_concurrent_generation: int | None = None
    max_concurrent_scoring: int | None = None
    independent_scoring: bool = False
    """Score each rollout alone: no group functions, no advantages."""
    score_rollouts: bool | None = None
    """False leaves rewards unknown; None asks the environment."""
    max_retries: int = 0
    """Times a rollout is played again after a retryable fault that is not the model's."""
    rollout_timeout_s: float | None = 3600.0
    abort_after: int = 32
    """Consecutive failures of one cause that stop the run; 0 = never."""
    seed: int | None = None
    """Derives the sampling seed of every turn from (seed, example, sibling, turn)."""
    results_path: str | Path | None = None
    """The run directory."""
    save_results: bool = False
    """Save under the default place when no ``results_path`` is given."""
    resume: bool = True
    retry_errors: bool = False
    """Rollouts that ended in an error are owed again on resume."""
    state_columns: Sequence[str] = ()
    """Further keys of the state to keep on every row."""
    keep_states: bool = True
    """Keep every rollout's state in memory for ``results["states"]``."""
    shuffle_seed: int | None = None
    """Shuffle the examples by it before the first ``num_examples`` are taken."""
    preflight: bool = True
    """Ask the endpoint whether it is there before the first rollout."""
    progress: Progress | None = None
    """An object that shows how far the run is, for displays."""
    on_progress: Callable[..., Any] | None = None
    """Called as ``on_progress(outputs, metadata)`` with the rows that just became durable."""
    push_to_hub: bool = False
    hub_name: str | None = None


def parse(env: Any, given: Mapping[str, Any]) -> tuple[RunOptions, dict[str, Any]]:
    """(options, sampling arguments) out of the keywords of a call; the environment gives defaults.

    Raises ``ConfigError`` for unknown keywords, with the nearest known ones.
    """
    named = compat.rename(given, compat.RUN_OPTIONS, "evaluate/generate")
    sampling = compat.rename(
        {name: named.pop(name) for name in list(named) if name in SAMPLING_NAMES}, compat.SAMPLING_ARGS, "sampling"
    )
    for accepted in ("save_every", "use_tqdm", "batch_size"):  # of older callers; what they tuned needs no tuning here
        named.pop(accepted, None)
    allowed = tuple(field.name for field in fields(RunOptions))
    check_keywords(named, (*allowed, "num_examples", "rollouts_per_example", "n_samples"), "evaluate/generate")
    if "max_concurrent" not in named and getattr(env, "max_concurrent", None):
        named["max_concurrent"] = env.max_concurrent
    options = RunOptions(**named)
    _check(options)
    return options, sampling


def _check(options: RunOptions) -> None:
    if options.max_concurrent == 0 or options.max_concurrent < -1:
        raise ConfigError(f"max_concurrent is {options.max_concurrent}; it must be at least 1, or -1 for the default")
    for name in ("max_concurrent_generation", "max_concurrent_scoring"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1, or None")
    if options.rollout_timeout_s is not None and options.rollout_timeout_s <= 0:
        raise ConfigError(
            f"rollout_timeout_s is {options.rollout_timeout_s}; it must be positive, or None for no bound"
        )
    if options.push_to_hub and not options.hub_name:
        raise ConfigError("push_to_hub needs hub_name, the name of the dataset to publish")
