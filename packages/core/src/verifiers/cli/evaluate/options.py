"""The settings of ``vf-eval``: names, types, flags and defaults, for the command line and for TOML.

A field of ``EvalSettings`` is a setting: its name is the TOML key, its annotation defines the allowed values, and its
`Flag` is the command-line option. ``toml_args`` reads files; ``command`` runs evaluations.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from verifiers.cli.common.reader import Bounds, Fields, Form

DEFAULT_ENV_DIR = "./environments"
CLIENT_TYPES = {  # as in clients.protocol, slow to import
    "chat": "openai_chat_completions",
    "completions": "openai_completions",
    "responses": "openai_responses",
    "messages": "anthropic_messages",
}
ExportFormat = Literal["parquet", "hf", "inspect"]  # as in exporting
EXPORT_FORMATS: tuple[str, ...] = typing.get_args(ExportFormat)


@dataclass(frozen=True, slots=True)
class Flag:
    """In ``Annotated``: the command-line options of a setting, and its ``--help`` text."""

    names: str
    help: str


# --- notations of values ----------------------------------------------------------------------------------------------


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a text that is not empty, not {value!r}")
    return value


def _seconds(value: object) -> float | None:
    if value is None or value == "none":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"must be a number of seconds above 0, or none for no bound, not {value!r}")
    return float(value)


def _workers(value: object) -> int:
    if value == "auto":
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f'must be a number of processes, 0 for this one, or "auto", not {value!r}')
    return value


def _client_type(value: object) -> str:
    name = str(value)
    if name in CLIENT_TYPES.values():
        return name
    if name not in CLIENT_TYPES:
        raise ValueError(f"must be {', '.join(CLIENT_TYPES)} or a full name ({', '.join(CLIENT_TYPES.values())})")
    return CLIENT_TYPES[name]


def json_table(value: object) -> dict[str, Any]:
    """A table, or a JSON object as text (JSON can express null, TOML cannot)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"is not JSON ({error}); write an object: '{{\"key\": 1}}'") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a JSON object like '{{\"key\": 1}}', not {value!r}")
    return dict(value)


def _by_header(value: object, separator: str, format_: str) -> dict[str, str]:
    """Texts in ``format_``, or a table, as header name -> the text after the separator."""
    pairs = list(value.items()) if isinstance(value, Mapping) else []
    for line in [] if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]:
        name, divider, content = str(line).partition(separator)
        if not divider:
            raise ValueError(f"must be {format_}, not {line!r}")
        pairs.append((name, content))
    headers = {str(name).strip(): str(content).strip() for name, content in pairs}
    if bad := [name for name in headers if not name or not name.isascii() or not name.isprintable() or " " in name]:
        raise ValueError(f"has a header name that cannot be sent: {bad[0]!r}")
    return headers


def _headers(value: object) -> dict[str, str]:
    headers = _by_header(value, ":", '"Name: value"')
    if bad := [name for name, content in headers.items() if not content.isprintable()]:
        raise ValueError(f"has a value for {bad[0]} with characters that cannot be sent")
    return headers


def _headers_from_state(value: object) -> dict[str, str]:
    headers = _by_header(value, "=", "NAME=key")
    if bad := [name for name, key in headers.items() if not key]:
        raise ValueError(f"names no key of the state for {bad[0]}; write {bad[0]}=key")
    return headers


def _path_or_newest(value: object) -> str:
    """A path; ``""`` (the flag without a value, or true) is the newest run."""
    if value is True:
        return ""
    if not isinstance(value, str):
        raise ValueError(
            f"must be a run directory, or have no value (in TOML: true) for the newest unfinished run, not {value!r}"
        )
    return value


def _reward_range(value: object) -> tuple[float, float]:
    """``0,1`` or a list of two numbers."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        low, high = map(float, parts if isinstance(parts, list) else ())
    except (TypeError, ValueError):
        raise ValueError(f"must be two numbers, the lowest and the highest reward: 0,1; not {value!r}") from None
    return low, high


def _variable(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("must be the NAME of an environment variable; put the key into a variable, never here")
    return value


Text = Annotated[str, Form("TEXT", _text)]
ClientType = Annotated[str, Form("|".join(CLIENT_TYPES), _client_type)]
Variable = Annotated[str, Form("NAME", _variable)]
RunPath = Annotated[str, Form("[PATH]", _path_or_newest)]
Seconds = Annotated[float, Form("SECONDS", _seconds)]
Workers = Annotated[int, Form("N|auto", _workers)]
Table = Annotated[Mapping[str, Any], Form("JSON", json_table)]
Headers = Annotated[Mapping[str, str], Form('"Name: value"', _headers, repeats=True)]
HeadersFromState = Annotated[Mapping[str, str], Form("NAME=key", _headers_from_state, repeats=True)]
RewardRange = Annotated[Sequence[float], Form("LOW,HIGH", _reward_range)]
Ignored = Annotated[str, Form("TEXT", lambda value: value)]
Names = tuple[str, ...]
Count = Annotated[int, Bounds(1)]
Number = Annotated[int, Bounds(0)]
Integer = Annotated[int, Bounds()]
Backend = Literal["process", "ray"]
ProgressKind = Literal["auto", "bar", "plain", "json", "none"]


# --- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """All settings of one evaluation, except its environment."""

    model: Annotated[Text | None, Flag("-m --model", "Model name or endpoint alias; 'local': the built-in one.")] = None
    api_base_url: Annotated[Text | None, Flag("-b --api-base-url", "Endpoint, e.g. http://127.0.0.1:8000/v1.")] = None
    api_key_var: Annotated[Variable | None, Flag("-k --api-key-var", "Variable that holds the key, never the key.")] = (
        None
    )
    endpoints_path: Annotated[Text | None, Flag("-e --endpoints-path", "Registry of endpoint aliases.")] = None
    api_client_type: Annotated[ClientType | None, Flag("--client --api-client-type", "The API of the endpoint.")] = None
    header: Annotated[Headers, Flag("--header", "Extra request header; may be repeated.")] = dataclasses.field(
        default_factory=dict
    )
    header_from_state: Annotated[
        HeadersFromState, Flag("--header-from-state", "Request header with the value of a state key; may be repeated.")
    ] = dataclasses.field(default_factory=dict)
    env_args: Annotated[Table, Flag("-a --env-args", "Arguments of the environment's loader.")] = dataclasses.field(
        default_factory=dict
    )
    extra_env_kwargs: Annotated[Table, Flag("-x --extra-env-kwargs", "Settings for env.set_kwargs.")] = (
        dataclasses.field(default_factory=dict)
    )
    env_dir_path: Annotated[Text, Flag("-p --env-dir-path", "Folder of environments not installed.")] = DEFAULT_ENV_DIR
    num_examples: Annotated[
        Annotated[int, Bounds(1, minus_one="all")], Flag("-n --num-examples", "Rows to run; -1 = all.")
    ] = 5
    keep_rows: Annotated[
        Text | None, Flag("--keep-rows", "Run the training rows that this file of vf-audit --keep lists.")
    ] = None
    rollouts_per_example: Annotated[Count, Flag("-r --rollouts-per-example", "Rollouts of each row.")] = 3
    shuffle: Annotated[bool, Flag("--shuffle/--no-shuffle", "Shuffle the rows before taking -n.")] = False
    shuffle_seed: Annotated[Integer, Flag("--shuffle-seed", "Seed of --shuffle.")] = 0
    until_half_width: Annotated[
        Annotated[float, Bounds(0.0)] | None,
        Flag("--until-half-width", "Stop once the mean reward is known to X (95%); -n is then all rows, shuffled."),
    ] = None
    until_decided: Annotated[
        Text | None, Flag("--until-decided", "Stop once the difference to the saved run in this folder is decided.")
    ] = None
    reward_range: Annotated[
        RewardRange, Flag("--reward-range", "Lowest and highest reward, for the two options above.")
    ] = (0.0, 1.0)
    seed: Annotated[Integer | None, Flag("--seed", "Seed of the run's sampling.")] = None
    max_tokens: Annotated[Count | None, Flag("-t --max-tokens", "Tokens per response.")] = None
    temperature: Annotated[Annotated[float, Bounds(0.0)] | None, Flag("-T --temperature", "Sampling temperature.")] = (
        None
    )
    sampling_args: Annotated[Table, Flag("-S --sampling-args", "Sampling arguments; over -t and -T.")] = (
        dataclasses.field(default_factory=dict)
    )
    max_concurrent: Annotated[
        Annotated[int, Bounds(1, minus_one="as many as possible")],
        Flag("-c --max-concurrent --max-concurrent-requests", "Rollouts in flight."),
    ] = 32
    max_concurrent_generation: Annotated[
        Count | None, Flag("--max-concurrent-generation", "Model calls in flight.")
    ] = None
    max_concurrent_scoring: Annotated[Count | None, Flag("--max-concurrent-scoring", "Reward calls in flight.")] = None
    max_concurrent_tools: Annotated[Count | None, Flag("--max-concurrent-tools", "Tool calls in flight.")] = None
    num_workers: Annotated[
        Workers, Flag("-w --num-workers", "Processes that run the rollouts; auto, 0 = this one.")
    ] = 0
    worker_backend: Annotated[
        Backend, Flag("--worker-backend", "Where the workers run: this machine, or a Ray cluster.")
    ] = "process"
    independent_scoring: Annotated[
        bool, Flag("-i --independent-scoring/--no-independent-scoring", "Score each rollout alone.")
    ] = False
    interleave_scoring: Annotated[
        bool,
        Flag(
            "--interleave-scoring/--no-interleave-scoring --interleave/-N",
            "Score while other rollouts run; -N: after all are finished.",
        ),
    ] = True
    max_retries: Annotated[Number, Flag("--max-retries", "Retries of a rollout after a transient error.")] = 0
    timeout: Annotated[Seconds | None, Flag("--timeout", "Time limit of each rollout; none = unlimited.")] = 3600.0
    abort_after: Annotated[Number, Flag("--abort-after", "Consecutive equal failures that end the run; 0 = never.")] = (
        32
    )
    max_error_rate: Annotated[
        Annotated[float, Bounds(0.0, 1.0)],
        Flag("--max-error-rate", "Share of failed rollouts above which the exit code is 3."),
    ] = 0.1
    max_cost: Annotated[
        Annotated[float, Bounds(0.0)] | None,
        Flag("--max-cost", "The most US dollars that each run may cost, judges included, over all its sessions."),
    ] = None
    max_total_tokens: Annotated[
        Count | None, Flag("--max-total-tokens", "The most tokens, read and sampled, that each run may take.")
    ] = None
    cache: Annotated[
        Text | None, Flag("--cache", "Folder of replies: equal requests are answered from it, others stored there.")
    ] = None
    output_dir: Annotated[Text | None, Flag("-o --output-dir", "Folder of the runs; default ./outputs.")] = None
    save_results: Annotated[
        bool, Flag("-s --save-results/--no-save --save-dataset", "Runs are saved unless --no-save.")
    ] = True
    export: Annotated[
        tuple[ExportFormat, ...], Flag("--export", f"Formats besides JSON lines: {', '.join(EXPORT_FORMATS)}.")
    ] = ()
    save_every: Annotated[Ignored | None, Flag("-f --save-every", "Ignored; every rollout is saved immediately.")] = (
        None
    )
    resume: Annotated[RunPath | None, Flag("-R --resume", "Run directory to resume; default: an unfinished one.")] = (
        None
    )
    fresh: Annotated[bool, Flag("--fresh/--no-fresh", "Start a new run; never resume an old one.")] = False
    accept_changed_code: Annotated[
        bool, Flag("--accept-changed-code", "Resume although source files of the environment changed; recorded.")
    ] = False
    retry_errors: Annotated[bool, Flag("--retry-errors/--no-retry-errors", "Run rollouts with errors again.")] = False
    state_columns: Annotated[Names, Flag("-C --state-columns", "Further keys of the state to save.")] = ()
    save_to_hf_hub: Annotated[bool, Flag("-H --save-to-hf-hub/--no-save-to-hf-hub", "Publish the rows afterwards.")] = (
        False
    )
    hf_hub_dataset_name: Annotated[Text | None, Flag("-D --hf-hub-dataset-name", "Name to publish them under.")] = None

    @property
    def order_seed(self) -> int | None:
        """The seed of the shuffled rows; None for their own order."""
        stops_early = self.until_half_width is not None or self.until_decided is not None
        return self.shuffle_seed if self.shuffle or stops_early else None

    def sampling(self) -> dict[str, Any]:
        """The sampling arguments of the run; a setting of None is omitted, so the server's default applies."""
        explicit = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return {**{name: value for name, value in explicit.items() if value is not None}, **self.sampling_args}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation with all its settings. ``combination``: key varied by an ablation -> its value here."""

    env_id: str
    settings: EvalSettings
    combination: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CommandSettings:
    """Behaviour of the command itself; not part of the evaluation, and not settable in TOML."""

    progress: Annotated[ProgressKind, Flag("--progress", "How progress is shown (stderr).")] = "auto"
    abbreviated_summary: Annotated[bool, Flag("-A --abbreviated-summary", "Numbers only, no sample rollouts.")] = False
    json: Annotated[bool, Flag("--json", "One JSON object on stdout instead of text.")] = False
    check: Annotated[
        bool, Flag("--check", "Check each environment with scripted models first; its errors stop the command.")
    ] = False
    dump_config: Annotated[bool, Flag("--dump-config", "Print the resolved settings as TOML and stop.")] = False
    detect: Annotated[
        Annotated[float, Bounds(0.0)] | None,
        Flag("--detect", "Say how many rows and rollouts show a difference of X between two runs, and stop."),
    ] = None
    dry_run: Annotated[bool, Flag("--dry-run", "Show plan, first prompt and scoring; send no request.")] = False
    verbose: Annotated[bool, Flag("-v --verbose", "More messages; tracebacks of errors.")] = False
    quiet: Annotated[bool, Flag("-q --quiet", "Errors only, and the results.")] = False


ALIASES = {"args": "env_args", "headers": "header", "max_concurrent_requests": "max_concurrent"}
"""Other spellings of settings as TOML keys."""


@functools.cache
def fields_of(owner: type) -> Fields:
    """The settings of ``EvalSettings`` or of ``CommandSettings``."""
    return Fields.of(owner, ALIASES if owner is EvalSettings else None)


@functools.cache
def flags_of(owner: type) -> dict[str, Flag]:
    """Setting -> its command-line options."""
    marks = {name: typing.get_args(hint)[1:] for name, hint in fields_of(owner).hints.items()}
    return {name: next(mark for mark in all_marks if isinstance(mark, Flag)) for name, all_marks in marks.items()}


MERGED = frozenset(("env_args", "extra_env_kwargs", "sampling_args", "header", "header_from_state"))
"""Tables that a layer of higher precedence merges key by key instead of replacing."""

REPLACED = {
    "-d": "environments have no separate endpoint here; name a run folder with --output-dir",
    "-u": "-c is the number of rollouts in flight; it is always bounded",
    "--tui": "run `vf-tui`, or `vf-view`, beside or after the run",
    "--disable-env-server": "environments run in this process already",
    "--disable-tui": "use --progress plain",
    "--fullscreen": "use --progress bar",
    "--heartbeat-url": "use --progress json and watch its events",
    "--provider": "use -b URL -k VARIABLE, or an alias of the endpoint registry",
}
"""Option of an older version -> its replacement."""


def layered(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two layers of settings; ``above`` takes precedence, tables are merged key by key.

    A ``max_tokens`` or ``temperature`` in ``above`` also overrides the same key of ``sampling_args`` in ``below``.

    >>> layered({"sampling_args": {"temperature": 1, "top_p": 0.5}}, {"temperature": 0})
    {'sampling_args': {'top_p': 0.5}, 'temperature': 0}
    """
    merged = {name: dict(value) if name in MERGED else value for name, value in below.items()}
    for name in ("max_tokens", "temperature"):
        if name in above:
            merged.get("sampling_args", {}).pop(name, None)
    for name, value in above.items():
        merged[name] = {**merged.get(name, {}), **value} if name in MERGED else value
    return merged


def _is_below(path: str, folder: str) -> bool:
    return Path(path).expanduser().resolve().is_relative_to(Path(folder).expanduser().resolve())


def contradictions(settings: EvalSettings) -> list[str]:
    """One sentence for each pair of conflicting settings."""
    problems = []
    if settings.fresh and settings.resume is not None:
        problems.append("--fresh starts a new run and --resume continues an old one; give one of them")
    if not settings.save_results and settings.resume is not None:
        problems.append("--no-save keeps nothing on disk, so there is nothing to --resume; give one of them")
    if settings.resume and settings.output_dir and not _is_below(settings.resume, settings.output_dir):
        problems.append(
            f"--resume {settings.resume} already names the run directory, which is not in {settings.output_dir}; leave "
            "out --output-dir"
        )
    if not settings.save_results and settings.export:
        problems.append("--no-save keeps nothing on disk, and --export writes beside the saved run; give one of them")
    if settings.save_to_hf_hub and not settings.hf_hub_dataset_name:
        problems.append("--save-to-hf-hub needs a name: add -D OWNER/NAME")
    return problems
