"""The settings of ``vf-eval``: names, types, flags and defaults, for the command line and for TOML.

A field of ``EvalSettings`` is a setting: its name is the TOML key, its annotation the allowed
values, `flag` its default and its command-line options. ``toml_args`` reads files; ``command`` runs
evaluations.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from verifiers.errors import ConfigError
from verifiers.runtime.values import FINITE, Also, Count, Form, MinusOne, Number, Range
from verifiers.types import SamplingArgs

DEFAULT_ENV_DIR = "./environments"
CLIENT_TYPES = {  # as in clients.protocol, slow to import
    "chat": "openai_chat_completions",
    "completions": "openai_completions",
    "responses": "openai_responses",
    "messages": "anthropic_messages",
}
ExportFormat = Literal["parquet", "hf", "atif", "inspect"]  # as in exporting
EXPORT_FORMATS: tuple[str, ...] = typing.get_args(ExportFormat)


@dataclass(frozen=True, slots=True)
class Flag:
    """The command-line options of a setting, and its ``--help`` text."""

    names: str
    help: str


def flag(default: object, help_: str, names: str = "") -> Any:
    """A setting with its default, which is a new table for each object, and its flags.

    Without a long flag in ``names`` it has the flag of its name: ``max_tokens`` is
    ``--max-tokens``.
    """
    metadata = {"flag": Flag(names, help_)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


# --- notations of values --------------------------------------------------------------------------


def _seconds(value: object) -> float | None:
    if value is None or value == "none":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(
            f"must be a number of seconds above 0, or none for no bound, not {value!r}"
        )
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
        raise ValueError(
            f"must be {', '.join(CLIENT_TYPES)} or a full name ({', '.join(CLIENT_TYPES.values())})"
        )
    return CLIENT_TYPES[name]


def json_table(value: object) -> dict[str, object]:
    """A table, a JSON object as text (JSON can express null, TOML cannot), ``name=value,…``, or
    several of them.

    >>> json_table("unit=word,max_chars=4,seed=null")
    {'unit': 'word', 'max_chars': 4, 'seed': None}
    """
    if isinstance(value, list | tuple):
        return {name: v for text in value for name, v in json_table(text).items()}
    if isinstance(value, str) and re.match(r"\w+=", value):
        _, *words = re.split(r"(?:^|,)(\w+)=", value)
        return dict(zip(words[::2], map(_json_or_text, words[1::2]), strict=True))
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(
                f"is not JSON ({error}); write an object, '{{\"key\": 1}}', or key=1"
            ) from None
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a JSON object like '{{\"key\": 1}}', not {value!r}")
    return dict(value)


def env_args_of(text: str | None) -> dict[str, Any]:
    """The value of ``--env-args``. *Raises* ConfigError."""
    try:
        return json_table(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--env-args {error}", key="env_args") from None


def _json_or_text(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _by_header(value: object, separator: str, format_: str) -> dict[str, str]:
    """Texts in ``format_``, or a table, as header name -> the text after the separator."""
    excerpt = _begin if separator == ":" else str  # the other has names alone
    pairs: Iterable[Iterable[object]] = value.items() if isinstance(value, Mapping) else ()
    if not isinstance(value, Mapping):
        lines = value if isinstance(value, list | tuple) else [value]
        for line in lines:
            if separator not in str(line):
                raise ValueError(f"must be {format_}, not {excerpt(line)!r}")
        pairs = [str(line).split(separator, 1) for line in lines]
    headers = {str(name).strip(): str(content).strip() for name, content in pairs}
    for name in headers:
        if not name or not name.isascii() or not name.isprintable() or " " in name:
            raise ValueError(f"has a header name that cannot be sent: {excerpt(name)!r}")
    return headers


def _begin(line: object) -> str:
    """The first word of a header that cannot be read: what follows may be a key."""
    name, *content = re.split(r"[\s=:]+", str(line).strip(), maxsplit=1)
    return f"{name} …" if content else name


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
            "must be a run directory, or have no value (in TOML: true) for the newest unfinished"
            f" run, not {value!r}"
        )
    return value


def _two_numbers(meaning: str) -> Callable[[object], tuple[float, float]]:
    """The reader of ``0,1``, or of a list of two numbers."""

    def read(value: object) -> tuple[float, float]:
        parts = value.split(",") if isinstance(value, str) else value
        try:
            first, second = map(float, parts if isinstance(parts, list) else ())
        except (TypeError, ValueError):
            raise ValueError(f"must be two numbers, {meaning}; not {value!r}") from None
        return first, second

    return read


def _names(value: object) -> tuple[str, ...]:
    """A list of names, or names in one text."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if isinstance(names, list | tuple) and all(isinstance(n, str) and n for n in names):
        return tuple(names)
    raise ValueError(f"must be names separated by commas, not {names!r}")


def _formats(value: object) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(_names(value)))
    if wrong := [name for name in names if name not in EXPORT_FORMATS]:
        raise ValueError(f"must be of {', '.join(EXPORT_FORMATS)}, not {wrong[0]!r}")
    return names


def _variable(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError(
            "must be the NAME of an environment variable; put the key into a variable, never here"
        )
    return value


Text = Annotated[str, Range(min_length=1)]
_NUMBER = r"\s*[-+]?\d+(\.\d*)?\s*"
_PAIR = {
    "anyOf": [
        {"type": "string", "pattern": f"^{_NUMBER},{_NUMBER}$"},
        {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
    ]
}


def _several(*forms: Mapping[str, object]) -> dict[str, object]:
    """The JSON schema of a value that may be listed."""
    return {"anyOf": [*forms, {"type": "array", "items": {"anyOf": list(forms)}}]}


def _listed(name: str) -> dict[str, object]:
    """The JSON schema of names of a pattern, in a list or in one text with commas."""
    text = rf"^\s*{name}\s*(,\s*{name}\s*)*$"
    allowed = {"type": "string", "pattern": f"^{name}$"}
    return {"anyOf": [{"type": "string", "pattern": text}, {"type": "array", "items": allowed}]}


ClientType = Annotated[
    str,
    Form("|".join(CLIENT_TYPES), _client_type, {"enum": [*CLIENT_TYPES, *CLIENT_TYPES.values()]}),
]
Variable = Annotated[
    str, Form("NAME", _variable, {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"})
]
RunPath = Annotated[
    str, Form("[PATH]", _path_or_newest, {"anyOf": [{"type": "string"}, {"const": True}]})
]
Seconds = Annotated[
    float,
    Form(
        "SECONDS",
        _seconds,
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "none"}]},
    ),
]
Workers = Annotated[
    int,
    Form("N|auto", _workers, {"anyOf": [{"type": "integer", "minimum": 0}, {"const": "auto"}]}),
]
Table = Annotated[
    Mapping[str, Any],
    Form(
        "JSON|name=value",
        json_table,
        _several({"type": "object"}, {"type": "string", "pattern": r"^(\w+=|\s*\{)"}),
        repeats=True,
    ),
]
Headers = Annotated[
    Mapping[str, str],
    Form(
        '"Name: value"',
        _headers,
        {"anyOf": [{"type": "object"}, _several({"type": "string", "pattern": ":"})]},
        repeats=True,
    ),
]
HeadersFromState = Annotated[
    Mapping[str, str],
    Form(
        "NAME=key",
        _headers_from_state,
        {"anyOf": [{"type": "object"}, _several({"type": "string", "pattern": "=."})]},
        repeats=True,
    ),
]
RewardRange = Annotated[
    Sequence[float],
    Form("LOW,HIGH", _two_numbers("the lowest and the highest reward: 0,1"), _PAIR),
]
Price = Annotated[Sequence[float], Form("READ,SAMPLED", _two_numbers("the prices: 0.4,1.6"), _PAIR)]
Ignored = Annotated[str, Form("TEXT", lambda value: value)]
Names = Annotated[tuple[str, ...], Form("A,B", _names, _listed(r"[^,\s][^,]*"))]
Formats = Annotated[
    tuple[ExportFormat, ...], Form("A,B", _formats, _listed(f"({'|'.join(EXPORT_FORMATS)})"))
]
NotNegative = Annotated[float, Range(ge=0.0, le=FINITE, noun="a number of at least 0")]
Backend = Literal["process", "ray"]
ProgressKind = Literal["auto", "bar", "plain", "json", "none"]


# --- settings -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """All settings of an evaluation, except its environment."""

    model: Text | None = flag(
        None, "Model name or endpoint alias; 'local': the built-in one.", "-m"
    )
    api_base_url: Text | None = flag(None, "Endpoint, e.g. http://127.0.0.1:8000/v1.", "-b")
    api_key_var: Variable | None = flag(None, "Variable that holds the key, never the key.", "-k")
    endpoints_path: Text | None = flag(None, "Registry of endpoint aliases.", "-e")
    api_client_type: ClientType | None = flag(
        None, "The API of the endpoint.", "--client --api-client-type"
    )
    price: Price | None = flag(
        None, "US dollars per million tokens; known models of OpenAI and Anthropic have a price."
    )
    header: Annotated[Headers, Also("headers")] = flag({}, "Extra request header; may be repeated.")
    header_from_state: HeadersFromState = flag(
        {}, "Request header with the value of a state key; may be repeated."
    )
    env_args: Annotated[Table, Also("args")] = flag(
        {}, "Arguments of the environment's loader.", "-a"
    )
    extra_env_kwargs: Table = flag({}, "Settings for env.set_kwargs.", "-x")
    env_dir_path: Text = flag(DEFAULT_ENV_DIR, "Folder of environments not installed.", "-p")
    num_examples: Annotated[int, Range(ge=1), MinusOne("all")] = flag(
        5, "Rows to run; -1 = all.", "-n"
    )
    keep_rows: Text | None = flag(
        None, "Run the training rows that this file of vf-audit --keep lists."
    )
    rollouts_per_example: Count = flag(3, "Rollouts of each row.", "-r")
    shuffle: bool | None = flag(
        None, "Shuffle the rows before taking -n.", "--shuffle/--no-shuffle"
    )
    shuffle_seed: int | None = flag(None, "Seed of the shuffle, and asks for it [0].")
    until_half_width: NotNegative | None = flag(
        None, "Stop once the mean reward is known to X (95%); -n is then all rows, shuffled."
    )
    until_decided: Text | None = flag(
        None, "Stop once the difference to the saved run in this folder is decided."
    )
    reward_range: RewardRange = flag(
        (0.0, 1.0), "Lowest and highest reward, for the two options above."
    )
    seed: int | None = flag(None, "Seed of the run's sampling.")
    max_tokens: Count | None = flag(None, "Tokens per response.", "-t")
    temperature: NotNegative | None = flag(None, "Sampling temperature.", "-T")
    sampling_args: Table = flag({}, "Sampling arguments; over -t and -T.", "-S")
    max_concurrent: Annotated[
        int, Range(ge=1), MinusOne("as many as possible"), Also("max_concurrent_requests")
    ] = flag(32, "Rollouts in flight.", "-c --max-concurrent --max-concurrent-requests")
    max_concurrent_generation: Count | None = flag(None, "Model calls in flight.")
    max_concurrent_scoring: Count | None = flag(None, "Reward calls in flight.")
    max_concurrent_tools: Count | None = flag(None, "Tool calls in flight.")
    num_workers: Workers = flag(0, "Processes that run the rollouts; auto, 0 = this one.", "-w")
    worker_backend: Backend = flag(
        "process", "Where the workers run: this machine, or a Ray cluster."
    )
    independent_scoring: bool = flag(
        False, "Score each rollout alone.", "-i --independent-scoring/--no-independent-scoring"
    )
    interleave_scoring: bool = flag(
        True,
        "Score while other rollouts run; -N: after all are finished.",
        "--interleave-scoring/--no-interleave-scoring --interleave/-N",
    )
    max_retries: Number = flag(0, "Retries of a rollout after a transient error.")
    timeout: Seconds | None = flag(3600.0, "Time limit of each rollout; none = unlimited.")
    abort_after: Number = flag(32, "Consecutive equal failures that end the run; 0 = never.")
    max_error_rate: Annotated[float, Range(ge=0.0, le=1.0)] = flag(
        0.1, "Share of failed rollouts above which the exit code is 3."
    )
    max_cost: NotNegative | None = flag(
        None, "The most US dollars that all runs may cost, judges included, over all sessions."
    )
    max_total_tokens: Count | None = flag(
        None, "The most tokens, read and sampled, that all runs may take."
    )
    cache: Text | None = flag(
        None, "Folder of replies: equal requests are answered from it, others stored there."
    )
    output_dir: Text | None = flag(None, "Folder of the runs; default ./outputs.", "-o")
    save_results: bool = flag(
        True, "Runs are saved unless --no-save.", "-s --save-results/--no-save --save-dataset"
    )
    export: Formats = flag((), f"Formats besides JSON lines: {', '.join(EXPORT_FORMATS)}.")
    save_every: Ignored | None = flag(None, "Ignored; every rollout is saved immediately.", "-f")
    resume: RunPath | None = flag(
        None, "Run directory to resume; default: an unfinished one.", "-R"
    )
    fresh: bool = flag(
        False, "Start a new run or set; never resume an old one.", "--fresh/--no-fresh --new"
    )
    accept_changed_code: bool = flag(
        False, "Resume although source files of the environment changed; recorded."
    )
    retry_errors: bool = flag(
        False, "Run rollouts with errors again.", "--retry-errors/--no-retry-errors"
    )
    state_columns: Names = flag((), "Further keys of the state to save.", "-C")
    save_to_hf_hub: bool = flag(
        False, "Publish the rows afterwards.", "-H --save-to-hf-hub/--no-save-to-hf-hub"
    )
    hf_hub_dataset_name: Text | None = flag(None, "Name to publish them under.", "-D")

    @property
    def order_seed(self) -> int | None:
        """The seed of the shuffled rows; None for their own order."""
        stops_early = self.until_half_width is not None or self.until_decided is not None
        asks = self.shuffle_seed is not None if self.shuffle is None else self.shuffle
        return self.shuffle_seed or 0 if asks or stops_early else None

    def sampling(self) -> SamplingArgs:
        """The sampling arguments of the run; None is left out, so the server's default applies."""
        explicit = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return {
            **{name: value for name, value in explicit.items() if value is not None},
            **self.sampling_args,
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation with its settings. ``combination``: key that an ablation varies -> value."""

    env_id: str
    settings: EvalSettings
    combination: Mapping[str, object] = dataclasses.field(default_factory=dict)
    shared: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    """``SHARED`` settings that the command gives all its evaluations together."""


@dataclass(frozen=True, slots=True)
class CommandSettings:
    """Behaviour of the command itself; not part of the evaluation, and not settable in TOML."""

    progress: ProgressKind = flag("auto", "How progress is shown (stderr).")
    set_id: Text | None = flag(
        None, "Folder name of the set of runs: a new set, or one to continue.", "--set"
    )
    abbreviated_summary: bool = flag(False, "Numbers only, no sample rollouts.", "-A")
    json: bool = flag(False, "One JSON object on stdout instead of text.")
    check: bool = flag(
        False, "Check each environment with scripted models first; its errors stop the command."
    )
    dump_config: bool = flag(False, "Print the resolved settings as TOML and stop.")
    schema: bool = flag(False, "Print the JSON schema of an eval file, for editors, and stop.")
    detect: NotNegative | None = flag(
        None, "Say how many rows and rollouts show a difference of X between two runs, and stop."
    )
    replay: Text | None = flag(
        None,
        "Run the saved replies of RUN:EXAMPLE[:ROLLOUT] through today's code, show the first"
        " difference, and stop (1: there is one).",
    )
    dry_run: bool = flag(False, "Show plan, first prompt and scoring; send no request.")
    verbose: bool = flag(False, "More messages; tracebacks of errors.", "-v")
    quiet: bool = flag(False, "Errors only, and the results.", "-q")


@functools.cache
def flags_of(owner: type) -> dict[str, Flag]:
    """Setting -> its command-line options."""
    flags = {field.name: field.metadata["flag"] for field in dataclasses.fields(owner)}
    for name, mark in flags.items():
        if "--" not in mark.names:
            flags[name] = Flag(f"{mark.names} --{name.replace('_', '-')}".strip(), mark.help)
    return flags


SHARED = frozenset(("max_cost", "max_total_tokens"))
"""Limits that bound the sum over all runs, unless they are those of an ``[[eval]]``."""
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

    A ``max_tokens`` or ``temperature`` in ``above`` also overrides the same key of
    ``sampling_args`` in ``below``.

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
    """A sentence for each pair of conflicting settings."""
    resume, folder, one_of = settings.resume, settings.output_dir, "give one of them"
    no_save = "--no-save keeps nothing on disk"
    problems = []
    if settings.fresh and resume is not None:
        problems.append(f"--fresh starts a new run and --resume continues an old one; {one_of}")
    if not settings.save_results and resume is not None:
        problems.append(f"{no_save}, so there is nothing to --resume; {one_of}")
    if resume and folder and not _is_below(resume, folder):
        where = f"already names the run directory, which is not in {folder}"
        problems.append(f"--resume {resume} {where}; leave out --output-dir")
    if not settings.save_results and settings.export:
        problems.append(f"{no_save}, and --export writes beside the saved run; {one_of}")
    if settings.save_to_hf_hub and not settings.hf_hub_dataset_name:
        problems.append("--save-to-hf-hub needs a name: add -D OWNER/NAME")
    return problems
