"""The options of a run: names, defaults and meanings, for ``evaluate``, ``generate`` and the
commands.

A line declares one: its name and type in Python, what ``vf-eval --help`` says of it, its flags and
its key in files where they are not those of the name, and why it may differ when a run resumes
(``free``). A line without help is for Python alone. What type checkers and editors know of it is
generated from it (``runs.keywords``), with the sampling arguments that a call may name beside the
options. ``parse`` reads the keywords of a call, older names included. ``run`` and ``runner``
implement the options.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from verifiers import compat
from verifiers.errors import ConfigError
from verifiers.runtime.notations import (
    Backend,
    FilePath,
    Names,
    RewardRange,
    Seconds,
    Workers,
)
from verifiers.runtime.suggest import check_keywords, close_match
from verifiers.runtime.values import (
    Also,
    Count,
    Form,
    Limit,
    MinusOne,
    Number,
    Range,
    checked,
    option,
    parts,
)

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

ENGINE_NAMES = SAMPLING_NAMES | frozenset(
    "allowed_token_ids bad_words cache_prompt chat_template chat_template_kwargs extra_headers"
    " grammar guided_choice guided_grammar guided_json guided_regex ignore_eos"
    " include_stop_str_in_output json_schema length_penalty n n_probs prompt_logprobs"
    " repeat_penalty return_token_ids return_tokens_as_token_ids stop_token_ids stream"
    " stream_options structured_outputs thinking top_a truncate_prompt_tokens typical_p".split()
)
"""Sampling arguments of common engines, beside those of the OpenAI API."""
MISSPELT = 0.85
"""Similarity ratio (0 to 1) from which an unknown sampling argument is a misspelling: top_k and
top_p have 0.8."""

COUNTS = ("num_examples", "rollouts_per_example", "n_samples")
"""Parameters of ``evaluate`` and ``generate`` that count rollouts; listed for their older names."""

NO_LONGER_NEEDED = ("save_every", "use_tqdm", "batch_size")
"""Options of older versions that are accepted and ignored."""

DEFAULT_CONCURRENCY = 1024

Tokens = Annotated[int, Range(ge=1, noun="a number above 0")] | Limit
Seed = Annotated[int, Range()]
Concurrency = Annotated[
    int,
    Range(ge=1),
    MinusOne("as many as possible"),
    Also("max_concurrent_requests"),
]

PLAN = "which rollouts there are; each has a key"
SPEED = "only how fast"
ENDING = "only when the run ends, and what is tried again"
SAVING = "only what is stored and shown"


class OrNone:
    """In ``Annotated``: a call may also say None, for the default."""


@dataclass(frozen=True)
class SharedOptions:
    """Options of a run that a call and ``vf-eval`` have."""

    shuffle_seed: Seed | None = option(None, "Seed of the shuffle, and asks for it [0].")
    """Seed of the shuffle before the first ``num_examples`` are taken; None = dataset order."""
    until_half_width: Limit | None = option(
        None,
        "Stop once the mean reward is known to X (95%); -n is then all rows, shuffled.",
        free=PLAN,
    )
    """Stop once the 95% interval of the mean reward, valid at any time, is at most this wide to
    each side; None = run every example. The examples must be in random order (``shuffle_seed``)."""
    until_decided: FilePath | None = option(
        None, "Stop once the difference to the saved run in this folder is decided.", free=PLAN
    )
    """Stop once the difference of the mean reward to the run in this directory is decided; as
    ``until_half_width``."""
    reward_range: RewardRange = option(
        (0.0, 1.0), "Lowest and highest reward, for the two options above.", free=ENDING
    )
    """Lowest and highest possible reward, which the two options above need."""
    seed: Seed | None = option(None, "Seed of the run's sampling.")
    """Derives the sampling seed of every turn from (seed, example, sibling, turn)."""
    max_concurrent: Concurrency = option(
        -1,
        "Rollouts in flight.",
        "-c --max-concurrent --max-concurrent-requests",
        free=SPEED,
    )
    """Rollouts in flight; -1 = as many as are pending, at most 1024."""
    max_concurrent_generation: Count | None = option(None, "Model calls in flight.", free=SPEED)
    """Model calls in flight; None = bounded by ``max_concurrent`` alone."""
    max_concurrent_scoring: Count | None = option(None, "Reward calls in flight.", free=SPEED)
    """Rollouts being scored; None = bounded by ``max_concurrent`` alone."""
    max_concurrent_tools: Count | None = option(None, "Tool calls in flight.", free=SPEED)
    """Tool calls in flight; None = bounded by ``max_concurrent`` alone."""
    num_workers: Workers = option(
        0, "Processes that run the rollouts; auto, 0 = this one.", "-w", free=SPEED
    )
    """Worker processes; 0 = run in this process. The environment must have been
    loaded by its id."""
    worker_backend: Backend = option(
        "process", "Where the workers run: this machine, or a Ray cluster.", free=SPEED
    )
    """Where workers run: "process" on this machine, "ray" on a Ray cluster (extra ``ray``)."""
    independent_scoring: bool = option(
        False, "Score each rollout alone.", "-i --independent-scoring/--no-independent-scoring"
    )
    """Score each rollout alone: no group functions, no advantages."""
    interleave_scoring: bool = option(
        True,
        "Score while other rollouts run; -N: after all are finished.",
        "--interleave-scoring/--no-interleave-scoring --interleave/-N",
        free=SPEED,
    )
    """False: score after all rollouts are generated; a rollout is durable only once
    it is scored."""
    max_retries: Number = option(0, "Retries of a rollout after a transient error.", free=ENDING)
    """Times a rollout is run again after a retryable error other than a ``ModelError``."""
    rollout_timeout_s: Seconds | None = option(
        3600.0, "Time limit of each rollout; none = unlimited.", key="timeout", free=ENDING
    )
    """Time limit of a rollout's generation, in seconds; None = no limit."""
    abort_after: Number = option(
        32, "Consecutive equal failures that end the run; 0 = never.", free=ENDING
    )
    """Consecutive failures of one cause that stop the run; 0 = never."""
    max_cost_usd: Limit | None = option(
        None,
        "The most US dollars that all runs may cost, judges included, over all sessions.",
        key="max_cost",
        free=ENDING,
    )
    """The most that the run may cost over all its sessions, judges included; it ends as
    ``BudgetExhausted``."""
    max_total_tokens: Tokens | None = option(
        None, "The most tokens, read and sampled, that all runs may take.", free=ENDING
    )
    """The most tokens, read and sampled, that the run may take; as ``max_cost_usd``. An image counts
    as 50,000 until the server has counted it."""
    cache_dir: FilePath | None = option(
        None,
        "Folder of replies: equal requests are answered from it, others stored there.",
        key="cache",
        free=SPEED,
    )
    """Answer requests that were answered before from this folder, and store the others there; None
    = no cache."""
    accept_changed_code: bool = option(
        False, "Resume although source files of the environment changed; recorded.", free=ENDING
    )
    """Resume a run whose environment's source files or functions have changed since; its metadata
    lists them."""
    retry_errors: bool = option(
        False,
        "Run rollouts with errors again.",
        "--retry-errors/--no-retry-errors",
        free=ENDING,
    )
    """On resume, run rollouts again that ended in an error."""
    state_columns: Annotated[Names, OrNone()] = option(
        (), "Further keys of the state to save.", "-C", free=SAVING
    )
    """State keys to save with every rollout."""
    push_to_hub: bool = option(
        False,
        "Publish the rows afterwards.",
        "-H --save-to-hf-hub/--no-save-to-hf-hub",
        key="save_to_hf_hub",
        free=SAVING,
    )
    """Publish the results as the dataset ``hub_name`` at the end."""
    hub_name: str | None = option(
        None, "Name to publish them under.", "-D", key="hf_hub_dataset_name", free=SAVING
    )
    """Name of the dataset, with ``push_to_hub``: "owner/name"."""


@dataclass(frozen=True)
class RunOptions(SharedOptions):
    """How a run generates, scores and stores rollouts."""

    score_rollouts: bool | None = option(None)
    """False leaves rewards unknown; None uses the environment's setting."""
    results_path: str | Path | None = option(None, free=SAVING)
    """The run directory."""
    save_results: bool = option(False, free=SAVING)
    """Save in the default directory when ``results_path`` is None."""
    resume: bool = option(True, free=SAVING)
    """Resume the run in the directory; False refuses a directory that holds a run."""
    keep_states: bool = option(True, free=SAVING)
    """Keep every rollout's state in memory for ``results["states"]``. Without, results of a saved
    run of 20,000 rollouts or more are read from its folder."""
    keep_raw_responses: bool = option(False, free=SAVING)
    """Keep the provider's response object in ``Response.raw``."""
    prices: Mapping[str, Sequence[float]] | None = option(None, free=ENDING)
    """Model -> US dollars per million tokens read and sampled, for clients (of judges) without
    prices of their own."""
    spent_elsewhere: tuple[float, int] = option((0.0, 0), free=ENDING)
    """US dollars and tokens that other runs have spent of ``max_cost_usd`` and
    ``max_total_tokens``."""
    model_name: str | None = option(None, free="the run compares the name that results have")
    """Name of the model in the results; None = that of the requests."""
    provenance: Mapping[str, Any] | None = option(None, free=SAVING)
    """Further facts of where the numbers come from, for ``metadata.json``; they replace those of
    the run."""
    preflight: bool = option(True, free=SPEED)
    """Check the endpoint before the first rollout."""
    progress: Progress | None = option(None, free=SAVING)
    """Counters that the run updates, for displays."""
    on_start: Callable[..., object] | None = option(None, free=SAVING)
    """Called once as ``on_start(num_pending)``, before the first rollout; a callback of two
    parameters as ``on_start(inputs, pending_inputs)``, with the rows of the plan. Sync or async,
    like the other callbacks."""
    on_progress: Callable[..., object] | Sequence[Callable[..., object]] | None = option(
        None, free=SAVING
    )
    """Called as ``on_progress(outputs, metadata)`` with the rollouts that just became durable; a
    callback of three parameters as ``on_progress(all_outputs, outputs, metadata)``. May be a list
    of callbacks."""
    on_log: Callable[[str], object] | None = option(None, free=SAVING)
    """Called as ``on_log(text)`` with log lines: the run directory, resumed rollouts, warnings."""
    on_results: Callable[[GenerateOutputs], object] | None = option(None, free=SAVING)
    """Called with the results, in a worker thread unless it is async, to write copies of them. A run
    is complete when it has returned: after an error, a signal or a kill the same call asks the model
    nothing and only writes the copies."""

    @property
    def limits_spending(self) -> bool:
        """Whether the run may not spend more than a limit."""
        return self.max_cost_usd is not None or self.max_total_tokens is not None

    def identity(self) -> dict[str, Any]:
        """The options that make two runs differ; most are left out at their default, so that runs
        of versions without them are the same."""
        return {
            line.name: getattr(self, line.name)
            for line in fields(self)
            if not line.metadata["option"].free
            if getattr(self, line.name) != line.default or line.name in _ALWAYS_STORED
        }

    def described(self) -> dict[str, Any]:
        """Every option as a JSON value, but those that are objects of this process."""
        from verifiers.storage.described import describe_members  # late: `--help` reads this module

        names = [field.name for field in fields(self) if field.name not in _OF_THIS_PROCESS]
        return describe_members({name: getattr(self, name) for name in names})


_ALWAYS_STORED = ("seed", "independent_scoring")
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
    if isinstance(columns := settings.get("state_columns"), str):
        raise ConfigError(
            f"state_columns must be a list of names: [{columns!r}], not {columns!r}",
            key="state_columns",
        )
    for name in settings.keys() & CHECKED.keys():
        settings[name] = checked(name, settings[name], CHECKED[name])
    options = RunOptions(**settings)
    _check(options)
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
    from verifiers.clients.payload import OPENAI_ARGUMENTS  # late: loads numpy

    names = ENGINE_NAMES | OPENAI_ARGUMENTS
    for name in sampling_args:
        if name not in names and (near := close_match(name, names, MISSPELT)):
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
CHECKED = {
    name: hint
    for name, hint in _HINTS.items()
    if any(
        isinstance(part, Range | Form) or typing.get_origin(part) is Literal for part in parts(hint)
    )
}
"""Option -> its annotation, of the options with a range, choices or a notation."""
OR_NONE = frozenset(
    name for name, hint in _HINTS.items() if any(isinstance(part, OrNone) for part in parts(hint))
)
"""Options that a call may also give as None, for the default."""


def _check(options: RunOptions) -> None:
    """*Raises* ConfigError for options that contradict each other."""
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
    if options.push_to_hub and not options.hub_name:
        raise ConfigError(
            "push_to_hub needs hub_name, the name of the dataset to publish", key="hub_name"
        )
