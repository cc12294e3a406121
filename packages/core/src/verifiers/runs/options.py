"""The options of a run: one table of names, defaults and meanings for ``evaluate``, ``generate`` and the commands.

``RunOptions`` is the table. ``EvaluateOptions`` and ``GenerateOptions`` say the same to type checkers and editors, with
the sampling arguments that may stand beside the options. ``parse`` reads the keywords of a call, older names included.
What an option does is done where it belongs (``run``, ``runner``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from verifiers import compat
from verifiers.errors import ConfigError
from verifiers.runtime.suggest import check_keywords

if TYPE_CHECKING:
    from verifiers.runs.runner import Progress


class SamplingOptions(TypedDict, total=False):
    """Sampling arguments that may be given by name beside the options; ``seed`` is the run's."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    stop: str | list[str] | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    min_tokens: int | None
    logprobs: bool | int | None
    top_logprobs: int | None
    reasoning_effort: str | None
    skip_special_tokens: bool | None
    extra_body: Mapping[str, Any] | None
    max_new_tokens: int | None
    max_completion_tokens: int | None


SAMPLING_NAMES = frozenset(SamplingOptions.__annotations__)

COUNTS = ("num_examples", "rollouts_per_example", "n_samples")
"""How much a call runs: parameters of ``evaluate`` and ``generate``, here only for their older names."""

NO_LONGER_NEEDED = ("save_every", "use_tqdm", "batch_size")
"""Options of older callers that are accepted and change nothing: what they tuned needs no tuning here."""

DEFAULT_CONCURRENCY = 1024


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run is played, scored and stored."""

    max_concurrent: int = -1
    """Rollouts in flight; -1 = as many as are pending, at most 1024."""
    max_concurrent_generation: int | None = None
    """Model calls in flight; None = bounded by ``max_concurrent`` alone."""
    max_concurrent_scoring: int | None = None
    """Rollouts being scored; None = bounded by ``max_concurrent`` alone."""
    max_concurrent_tools: int | None = None
    """Tool calls in flight; None = bounded by ``max_concurrent`` alone."""
    independent_scoring: bool = False
    """Score each rollout alone: no group functions, no advantages."""
    score_rollouts: bool | None = None
    """False leaves rewards unknown; None asks the environment."""
    interleave_scoring: bool = True
    """False: score only when all rollouts are played; none of them is durable before it is scored."""
    max_retries: int = 0
    """Times a rollout is played again after a retryable fault that is not the model's."""
    rollout_timeout_s: float | None = 3600.0
    """Bound of one rollout's generation, in seconds; None = unbounded."""
    abort_after: int = 32
    """Consecutive failures of one cause that stop the run; 0 = never."""
    seed: int | None = None
    """Derives the sampling seed of every turn from (seed, example, sibling, turn)."""
    results_path: str | Path | None = None
    """The run directory."""
    save_results: bool = False
    """Save under the default place when no ``results_path`` is given."""
    resume: bool = True
    """Go on with the run that the directory holds; False refuses one that holds rows."""
    retry_errors: bool = False
    """Rollouts that ended in an error are pending again on resume."""
    state_columns: Sequence[str] = ()
    """Further keys of the state to keep on every row."""
    keep_states: bool = True
    """Keep every rollout's state in memory for ``results["states"]``."""
    num_workers: int = 0
    """Processes that play the rollouts; 0 = this one. The environment must have been loaded by its id."""
    worker_backend: str = "process"
    """Where they are: "process" on this machine, "ray" on a Ray cluster (extra ``ray``)."""
    keep_raw_responses: bool = False
    """Keep the provider's own object on every ``Response.raw``."""
    shuffle_seed: int | None = None
    """Shuffle the examples by it before the first ``num_examples`` are taken."""
    preflight: bool = True
    """Ask the endpoint whether it is there before the first rollout."""
    progress: Progress | None = None
    """An object that shows how far the run is, for displays."""
    on_start: Callable[[int], Any] | None = None
    """Called once as ``on_start(num_pending)``, before the first rollout. Sync or async, like the other callbacks."""
    on_progress: Callable[..., Any] | None = None
    """Called as ``on_progress(outputs, metadata)`` with the rows that just became durable."""
    on_log: Callable[[str], Any] | None = None
    """Called as ``on_log(text)`` with what the run has to say: where it saves, what it found there, warnings."""
    push_to_hub: bool = False
    """Publish the rows as the dataset ``hub_name`` at the end."""
    hub_name: str | None = None


class EvaluateOptions(SamplingOptions, total=False):
    """The keywords of ``evaluate``: the fields of ``RunOptions``, and sampling arguments by name."""

    max_concurrent: int
    max_concurrent_generation: int | None
    max_concurrent_scoring: int | None
    max_concurrent_tools: int | None
    independent_scoring: bool
    score_rollouts: bool | None
    interleave_scoring: bool
    max_retries: int
    rollout_timeout_s: float | None
    abort_after: int
    seed: int | None
    results_path: str | Path | None
    save_results: bool
    resume: bool
    retry_errors: bool
    state_columns: Sequence[str] | None
    keep_states: bool
    num_workers: int
    worker_backend: str
    keep_raw_responses: bool
    shuffle_seed: int | None
    preflight: bool
    progress: Progress | None
    on_start: Callable[[int], Any] | None
    on_progress: Callable[..., Any] | None
    on_log: Callable[[str], Any] | None
    push_to_hub: bool
    hub_name: str | None


class GenerateOptions(EvaluateOptions, total=False):
    """The keywords of ``generate``: those of ``evaluate``, and how often each input is run."""

    rollouts_per_example: int | None


def parse(env: Any, given: Mapping[str, Any], counts: Sequence[str] = COUNTS) -> tuple[RunOptions, dict[str, Any]]:
    """(options, sampling arguments) out of the keywords of a call; the environment gives defaults.

    ``counts`` are those of ``COUNTS`` that the call has; ``count`` reads them. Raises ``ConfigError`` for unknown
    keywords, with the nearest known ones, and for values that cannot be used.
    """
    named = compat.rename(given, compat.RUN_OPTIONS, "evaluate/generate")
    sampling = compat.rename(
        {name: named.pop(name) for name in list(named) if name in SAMPLING_NAMES}, compat.SAMPLING_ARGS, "sampling"
    )
    for accepted in (*NO_LONGER_NEEDED, *counts):
        named.pop(accepted, None)
    known = (*(field.name for field in fields(RunOptions)), *counts, *SAMPLING_NAMES)
    check_keywords(named, known, "evaluate/generate")
    if "max_concurrent" not in named and getattr(env, "max_concurrent", None):
        named["max_concurrent"] = env.max_concurrent
    if named.get("state_columns") is None:
        named.pop("state_columns", None)
    options = RunOptions(**named)
    _check(options)
    return options, sampling


def count(given: Mapping[str, Any], name: str, value: int | None) -> int | None:
    """How many of ``name`` (one of ``COUNTS``) a call asks for: ``value``, or what an older keyword says.

    Raises ``ConfigError`` when both are given, and for what is no positive whole number.
    """
    older = compat.rename({key: given[key] for key in given if compat.RUN_OPTIONS.get(key) == name}, compat.RUN_OPTIONS)
    if older and value is not None:
        raise ConfigError(f"{name} is given twice, once by an older name; give one of them", key=name)
    asked = older.get(name, value)
    if asked is not None and (not _is_int(asked) or asked < 1):
        raise ConfigError(f"{name} is {asked!r}; it must be a whole number, at least 1", key=name)
    return asked


WORKER_BACKENDS = ("process", "ray")

_AT_LEAST = {"max_retries": 0, "abort_after": 0, "num_workers": 0} | dict.fromkeys(
    ("max_concurrent_generation", "max_concurrent_scoring", "max_concurrent_tools"), 1
)


def _check(options: RunOptions) -> None:
    concurrency = options.max_concurrent
    if not _is_int(concurrency) or concurrency == 0 or concurrency < -1:
        raise _refused("max_concurrent", concurrency, "at least 1, or -1 for the default")
    for name, least in _AT_LEAST.items():
        value = getattr(options, name)
        if value is None and least == 1:
            continue
        if not _is_int(value) or value < least:
            raise _refused(name, value, f"at least {least}" + (", or None" if least == 1 else ""))
    limit_s = options.rollout_timeout_s
    if limit_s is not None and (not isinstance(limit_s, int | float) or not limit_s > 0):
        raise _refused("rollout_timeout_s", limit_s, "a positive number of seconds, or None for no bound")
    for name in ("seed", "shuffle_seed"):
        if getattr(options, name) is not None and not _is_int(getattr(options, name)):
            raise _refused(name, getattr(options, name), "a whole number, or None")
    if options.worker_backend not in WORKER_BACKENDS:
        raise _refused("worker_backend", options.worker_backend, " or ".join(map(repr, WORKER_BACKENDS)))
    if isinstance(options.state_columns, str):
        raise _refused("state_columns", options.state_columns, f"a list of names: [{options.state_columns!r}]")
    if options.push_to_hub and not options.hub_name:
        raise ConfigError("push_to_hub needs hub_name, the name of the dataset to publish", key="hub_name")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refused(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}; it must be {wanted}", key=name)
