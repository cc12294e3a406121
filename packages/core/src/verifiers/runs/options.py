"""The options of a run: names, defaults and meanings, for ``evaluate``, ``generate`` and the
commands.

A field of ``RunOptions`` declares one. What type checkers and editors know of it is generated from
its line (``runs.keywords``), with the sampling arguments that a call may name beside the options.
``parse`` reads the keywords of a call, older names included. ``run`` and ``runner`` implement the
options.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from verifiers import compat
from verifiers.clients.payload import OPENAI_ARGUMENTS
from verifiers.errors import ConfigError
from verifiers.runtime.suggest import check_keywords, close_match
from verifiers.runtime.values import FINITE, Count, MinusOne, Number, Range, checked, fits, parts
from verifiers.storage.described import describe_members

if TYPE_CHECKING:
    from verifiers.results import GenerateOutputs
    from verifiers.runs.rollout import Progress


class SamplingOptions(TypedDict, total=False):
    """Sampling arguments that may be given by name beside the options; ``seed`` is an option of the
    run."""

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
    extra_body: Mapping[str, object] | None
    max_new_tokens: int | None
    max_completion_tokens: int | None


SAMPLING_NAMES = frozenset(SamplingOptions.__annotations__)

ENGINE_NAMES = (
    SAMPLING_NAMES
    | OPENAI_ARGUMENTS
    | frozenset(
        "allowed_token_ids bad_words cache_prompt chat_template chat_template_kwargs extra_headers"
        " grammar guided_choice guided_grammar guided_json guided_regex ignore_eos"
        " include_stop_str_in_output json_schema length_penalty n n_probs prompt_logprobs"
        " repeat_penalty return_token_ids return_tokens_as_token_ids stop_token_ids stream"
        " stream_options structured_outputs thinking top_a truncate_prompt_tokens typical_p".split()
    )
)
"""Sampling arguments of the OpenAI API and of common engines."""
MISSPELT = 0.85
"""Similarity ratio (0 to 1) from which an unknown sampling argument is a misspelling: top_k and
top_p have 0.8."""

COUNTS = ("num_examples", "rollouts_per_example", "n_samples")
"""Parameters of ``evaluate`` and ``generate`` that count rollouts; listed for their older names."""

NO_LONGER_NEEDED = ("save_every", "use_tqdm", "batch_size")
"""Options of older versions that are accepted and ignored."""

DEFAULT_CONCURRENCY = 1024
WORKER_BACKENDS = ("process", "ray")

Limit = Annotated[float, Range(gt=0.0, le=FINITE, noun="a number above 0")]
Finite = Annotated[float, Range(ge=-FINITE, le=FINITE)]
Seconds = Annotated[float, Range(gt=0.0, noun="a positive number of seconds")]


class OrNone:
    """In ``Annotated``: a call may also say None, for the default."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run generates, scores and stores rollouts."""

    max_concurrent: Annotated[int, Range(ge=1, noun="at least 1"), MinusOne("the default")] = -1
    """Rollouts in flight; -1 = as many as are pending, at most 1024."""
    max_concurrent_generation: Count | None = None
    """Model calls in flight; None = bounded by ``max_concurrent`` alone."""
    max_concurrent_scoring: Count | None = None
    """Rollouts being scored; None = bounded by ``max_concurrent`` alone."""
    max_concurrent_tools: Count | None = None
    """Tool calls in flight; None = bounded by ``max_concurrent`` alone."""
    independent_scoring: bool = False
    """Score each rollout alone: no group functions, no advantages."""
    score_rollouts: bool | None = None
    """False leaves rewards unknown; None uses the environment's setting."""
    interleave_scoring: bool = True
    """False: score after all rollouts are generated; a rollout is durable only once
    it is scored."""
    max_retries: Number = 0
    """Times a rollout is run again after a retryable error other than a ``ModelError``."""
    rollout_timeout_s: Seconds | None = 3600.0
    """Time limit of a rollout's generation, in seconds; None = no limit."""
    abort_after: Number = 32
    """Consecutive failures of one cause that stop the run; 0 = never."""
    seed: Annotated[int, Range()] | None = None
    """Derives the sampling seed of every turn from (seed, example, sibling, turn)."""
    results_path: str | Path | None = None
    """The run directory."""
    save_results: bool = False
    """Save in the default directory when ``results_path`` is None."""
    resume: bool = True
    """Resume the run in the directory; False refuses a directory that holds a run."""
    accept_changed_code: bool = False
    """Resume a run whose environment's source files or functions have changed since; its metadata
    lists them."""
    retry_errors: bool = False
    """On resume, run rollouts again that ended in an error."""
    state_columns: Annotated[Sequence[str], OrNone()] = ()
    """State keys to save with every rollout."""
    keep_states: bool = True
    """Keep every rollout's state in memory for ``results["states"]``. Without, results of a saved
    run of 20,000 rollouts or more are read from its folder."""
    num_workers: Number = 0
    """Worker processes; 0 = run in this process. The environment must have been
    loaded by its id."""
    worker_backend: str = "process"
    """Where workers run: "process" on this machine, "ray" on a Ray cluster (extra ``ray``)."""
    keep_raw_responses: bool = False
    """Keep the provider's response object in ``Response.raw``."""
    shuffle_seed: Annotated[int, Range()] | None = None
    """Seed of the shuffle before the first ``num_examples`` are taken; None = dataset order."""
    until_half_width: Limit | None = None
    """Stop once the 95% interval of the mean reward, valid at any time, is at most this wide to
    each side; None = run every example. The examples must be in random order (``shuffle_seed``)."""
    until_decided: str | Path | None = None
    """Stop once the difference of the mean reward to the run in this directory is decided; as
    ``until_half_width``."""
    reward_range: Sequence[float] = (0.0, 1.0)
    """Lowest and highest possible reward, which the two options above need."""
    cache_dir: str | Path | None = None
    """Answer requests that were answered before from this folder, and store the others there; None
    = no cache."""
    max_cost_usd: Limit | None = None
    """The most that the run may cost over all its sessions, judges included; it ends as
    ``BudgetExhausted``."""
    max_total_tokens: Limit | None = None
    """The most tokens, read and sampled, that the run may take; as ``max_cost_usd``. An image counts
    as 50,000 until the server has counted it."""
    prices: Mapping[str, Sequence[float]] | None = None
    """Model -> US dollars per million tokens read and sampled, for clients (of judges) without
    prices of their own."""
    model_name: str | None = None
    """Name of the model in the results; None = that of the requests."""
    provenance: Mapping[str, Any] | None = None
    """Further facts of where the numbers come from, for ``metadata.json``; they replace those of
    the run."""
    preflight: bool = True
    """Check the endpoint before the first rollout."""
    progress: Progress | None = None
    """Counters that the run updates, for displays."""
    on_start: Callable[..., object] | None = None
    """Called once as ``on_start(num_pending)``, before the first rollout; a callback of two
    parameters as ``on_start(inputs, pending_inputs)``, with the rows of the plan. Sync or async,
    like the other callbacks."""
    on_progress: Callable[..., object] | Sequence[Callable[..., object]] | None = None
    """Called as ``on_progress(outputs, metadata)`` with the rollouts that just became durable; a
    callback of three parameters as ``on_progress(all_outputs, outputs, metadata)``. May be a list
    of callbacks."""
    on_log: Callable[[str], object] | None = None
    """Called as ``on_log(text)`` with log lines: the run directory, resumed rollouts, warnings."""
    on_results: Callable[[GenerateOutputs], object] | None = None
    """Called with the results, in a worker thread unless it is async, to write copies of them. A run
    is complete when it has returned: after an error, a signal or a kill the same call asks the model
    nothing and only writes the copies."""
    push_to_hub: bool = False
    """Publish the results as the dataset ``hub_name`` at the end."""
    hub_name: str | None = None
    """Name of the dataset, with ``push_to_hub``: "owner/name"."""

    @property
    def limits_spending(self) -> bool:
        """Whether the run may not spend more than a limit."""
        return self.max_cost_usd is not None or self.max_total_tokens is not None

    def described(self) -> dict[str, Any]:
        """Every option as a JSON value, but those that are objects of this process."""
        names = [field.name for field in fields(self) if field.name not in _OF_THIS_PROCESS]
        return describe_members({name: getattr(self, name) for name in names})


_OF_THIS_PROCESS = frozenset("progress on_start on_progress on_log provenance results_path".split())


def parse(
    env: object, keywords: Mapping[str, object], counts: Sequence[str] = COUNTS
) -> tuple[RunOptions, dict[str, object]]:
    """Split the keywords of a call into (options, sampling arguments), with the environment's
    defaults.

    ``counts``: the names of ``COUNTS`` that the call accepts; ``count`` reads their values.

    *Raises* ConfigError for unknown keywords, with suggestions, and for invalid values.
    """
    settings = compat.rename(keywords, compat.RUN_OPTIONS, "evaluate/generate")
    sampling = compat.rename(
        {name: settings.pop(name) for name in list(settings) if name in SAMPLING_NAMES},
        compat.SAMPLING_ARGS,
        "sampling",
    )
    for name in (*NO_LONGER_NEEDED, *counts):
        settings.pop(name, None)
    valid_names = (*(field.name for field in fields(RunOptions)), *counts, *SAMPLING_NAMES)
    check_keywords(settings, valid_names, "evaluate/generate")
    if "max_concurrent" not in settings and (limit := getattr(env, "max_concurrent", None)):
        settings["max_concurrent"] = limit
    for name in [name for name, value in settings.items() if value is None and name in OR_NONE]:
        del settings[name]
    options = RunOptions(**settings)
    _check(options, settings)
    return options, sampling


def check_sampling(sampling_args: Mapping[str, object]) -> None:
    """*Raises* ConfigError for ``n``, and for a name that is almost a sampling argument, which a
    server would ignore.

    Other names that are not known here are arguments of the engine, and are sent.
    """
    if sampling_args.get("n", 1) != 1:
        raise ConfigError(
            "sampling_args['n'] must be 1: ask for siblings with rollouts_per_example", key="n"
        )
    for name in sampling_args:
        if name not in ENGINE_NAMES and (near := close_match(name, ENGINE_NAMES, MISSPELT)):
            raise ConfigError(f"sampling_args has no {name!r}, did you mean {near!r}?", key=name)


def count(keywords: Mapping[str, object], name: str, value: int | None) -> int | None:
    """The value of ``name`` (a name of ``COUNTS``): ``value``, or that of an older keyword.

    *Raises* ConfigError when both are given, or the value is not a positive integer.
    """
    if older := {key: keywords[key] for key in keywords if compat.RUN_OPTIONS.get(key) == name}:
        if value is not None:
            raise ConfigError(
                f"{name} is given twice, once by an older name; give one of them", key=name
            )
        value = compat.rename(older, compat.RUN_OPTIONS)[name]
    return None if value is None else checked(name, value, Count)


_HINTS = typing.get_type_hints(
    RunOptions, localns={"Progress": Any, "GenerateOutputs": Any}, include_extras=True
)
RANGES = {
    name: hint
    for name, hint in _HINTS.items()
    if any(isinstance(part, Range) for part in parts(hint))
}
"""Option -> its annotation, of the options that have a range."""
OR_NONE = frozenset(
    name for name, hint in _HINTS.items() if any(isinstance(part, OrNone) for part in parts(hint))
)
"""Options that a call may also give as None, for the default."""


def _check(options: RunOptions, settings: Mapping[str, object]) -> None:
    """Check the options of a call; their defaults are in their ranges."""
    for name, hint in ((name, RANGES[name]) for name in settings if name in RANGES):
        checked(name, settings[name], hint)
    stops = options.until_half_width is not None or options.until_decided is not None
    if options.until_half_width is not None and options.until_decided is not None:
        raise ConfigError("until_half_width and until_decided both stop the run; give one of them")
    if stops and not options.interleave_scoring:
        raise ConfigError(
            "interleave_scoring=False scores at the end, so that no reward can stop the run before"
        )
    for name in ("max_cost_usd", "max_total_tokens"):
        if getattr(options, name) is not None and options.num_workers:
            raise ConfigError(
                f"{name} limits the requests of this process alone; run with num_workers=0",
                key=name,
            )
    if options.cache_dir is not None and options.num_workers:
        raise ConfigError(
            "cache_dir serves the requests of this process alone; run with num_workers=0"
        )
    ends = options.reward_range
    if "reward_range" in settings and (
        len(ends) != 2 or not all(fits(end, Finite) for end in ends) or not ends[0] < ends[1]
    ):
        raise _invalid("reward_range", ends, "two numbers, the lowest and the highest reward")
    if options.worker_backend not in WORKER_BACKENDS:
        raise _invalid(
            "worker_backend", options.worker_backend, " or ".join(map(repr, WORKER_BACKENDS))
        )
    if isinstance(options.state_columns, str):
        raise _invalid(
            "state_columns", options.state_columns, f"a list of names: [{options.state_columns!r}]"
        )
    if options.push_to_hub and not options.hub_name:
        raise ConfigError(
            "push_to_hub needs hub_name, the name of the dataset to publish", key="hub_name"
        )


def _invalid(name: str, value: object, requirement: str) -> ConfigError:
    return ConfigError(f"{name} must be {requirement}, not {value!r}", key=name)
