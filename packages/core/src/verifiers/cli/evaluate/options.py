"""The settings of ``vf-eval``: names, types, flags and defaults, for the command line and for TOML.

A line is a setting: its name is the TOML key, its annotation the allowed values, `option` its
default, its help, its flags, and why two runs may differ in it. Those that are options of a run are
declared there (``runs.options.SharedOptions``). ``toml_args`` reads files; ``command`` runs
evaluations.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from verifiers.cli.evaluate.exporting import FORMATS
from verifiers.environments.keywords import EnvironmentFlags
from verifiers.runs.options import ENDING, PLAN, SAVING, Concurrency, SharedOptions
from verifiers.runtime.notations import (
    ClientType,
    Headers,
    HeadersFromState,
    NotNegative,
    Price,
    Table,
    Text,
    Variable,
    listed,
    read_names,
)
from verifiers.runtime.values import Also, Count, Form, MinusOne, Range, option, parts, with_default

if TYPE_CHECKING:
    from verifiers.types import SamplingArgs

DEFAULT_ENV_DIR = "./environments"
ENDPOINT = "which server answers; a run compares the requests"


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


def _formats(value: object) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(read_names(value)))
    if wrong := [name for name in names if name not in FORMATS]:
        raise ValueError(f"must be of {', '.join(FORMATS)}, not {wrong[0]!r}")
    return names


RunPath = Annotated[
    str, Form("[PATH]", _path_or_newest, {"anyOf": [{"type": "string"}, {"const": True}]})
]
Ignored = Annotated[str, Form("TEXT", lambda value: value)]

Formats = Annotated[
    tuple[str, ...],
    Form("A,B", _formats, listed(f"({'|'.join(FORMATS)})"), words=tuple(FORMATS)),
]
ProgressKind = Literal["auto", "bar", "plain", "json", "none"]


# --- settings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSettings:
    """Which model answers, and where it is."""

    model: Text | None = option(
        None, "Model name or endpoint alias; 'local': the built-in one.", "-m"
    )
    api_base_url: Text | None = option(
        None, "Endpoint, e.g. http://127.0.0.1:8000/v1.", "-b", free=ENDPOINT
    )
    api_key_var: Variable | None = option(
        None, "Variable that holds the key, never the key.", "-k", free=ENDPOINT
    )
    endpoints_path: Text | None = option(None, "Registry of endpoint aliases.", "-e", free=ENDPOINT)
    api_client_type: ClientType | None = option(
        None, "The API of the endpoint.", "--client --api-client-type", free=ENDPOINT
    )
    price: Price | None = option(
        None,
        "US dollars per million tokens; known models of OpenAI and Anthropic have a price.",
        free=ENDPOINT,
    )
    header: Annotated[Headers, Also("headers")] = option(
        {}, "Extra request header; may be repeated.", free=ENDPOINT
    )
    header_from_state: HeadersFromState = option(
        {}, "Request header with the value of a state key; may be repeated.", free=ENDPOINT
    )


@dataclass(frozen=True)
class EnvironmentSettings(EnvironmentFlags):
    """How the environment is made; parameters of its constructor are declared there (``Flag``)."""

    env_args: Annotated[Table, Also("args")] = option(
        {}, "Arguments of the environment's loader.", "-a"
    )
    extra_env_kwargs: Table = option({}, "Settings for env.set_kwargs.", "-x")
    env_dir_path: Text = option(
        DEFAULT_ENV_DIR,
        "Folder of environments not installed.",
        "-p",
        free="where the code is; a run compares the code",
    )
    keep_rows: Text | None = option(
        None, "Run the training rows that this file of vf-audit --keep lists."
    )


@dataclass(frozen=True)
class RowSettings:
    """Which rows the model is asked, and how it is sampled."""

    num_examples: Annotated[int, Range(ge=1), MinusOne("all")] = option(
        5, "Rows to run; -1 = all.", "-n", free=PLAN
    )
    rollouts_per_example: Count = option(3, "Rollouts of each row.", "-r", free=PLAN)
    max_tokens: Count | None = option(None, "Tokens per response.", "-t")
    temperature: NotNegative | None = option(None, "Sampling temperature.", "-T")
    sampling_args: Table = option({}, "Sampling arguments; over -t and -T.", "-S")
    shuffle: bool | None = option(
        None, "Shuffle the rows before taking -n.", "--shuffle/--no-shuffle"
    )


@dataclass(frozen=True)
class OutputSettings:
    """What becomes of the results."""

    max_error_rate: Annotated[float, Range(ge=0.0, le=1.0)] = option(
        0.1, "Share of failed rollouts above which the exit code is 3.", free=ENDING
    )
    output_dir: Text | None = option(
        None, "Folder of the runs; default ./outputs.", "-o", free=SAVING
    )
    save_results: bool = option(
        True,
        "Runs are saved unless --no-save.",
        "-s --save-results/--no-save --save-dataset",
        free=SAVING,
    )
    export: Formats = option((), f"Formats besides JSON lines: {', '.join(FORMATS)}.", free=SAVING)
    save_every: Ignored | None = option(
        None, "Ignored; every rollout is saved immediately.", "-f", free=SAVING
    )
    resume: RunPath | None = option(
        None, "Run directory to resume; default: an unfinished one.", "-R", free=SAVING
    )
    fresh: bool = option(
        False,
        "Start a new run or set; never resume an old one.",
        "--fresh/--no-fresh --new",
        free=SAVING,
    )


@dataclass(frozen=True)
class EvalSettings(OutputSettings, SharedOptions, RowSettings, EnvironmentSettings, ModelSettings):
    """All settings of an evaluation, except its environment."""

    max_concurrent: Concurrency = with_default(SharedOptions, "max_concurrent", 32)

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

    progress: ProgressKind = option("auto", "How progress is shown (stderr).")
    set_id: Text | None = option(
        None, "Folder name of the set of runs: a new set, or one to continue.", "--set"
    )
    abbreviated_summary: bool = option(False, "Numbers only, no sample rollouts.", "-A")
    json: bool = option(False, "One JSON object on stdout instead of text.")
    check: bool = option(
        False, "Check each environment with scripted models first; its errors stop the command."
    )
    dump_config: bool = option(False, "Print the resolved settings as TOML and stop.")
    schema: bool = option(False, "Print the JSON schema of an eval file, for editors, and stop.")
    detect: NotNegative | None = option(
        None, "Say how many rows and rollouts show a difference of X between two runs, and stop."
    )
    replay: Text | None = option(
        None,
        "Run the saved replies of RUN:EXAMPLE[:ROLLOUT] through today's code, show the first"
        " difference, and stop (1: there is one).",
    )
    dry_run: bool = option(False, "Show plan, first prompt and scoring; send no request.")
    verbose: bool = option(False, "More messages; tracebacks of errors.", "-v")
    quiet: bool = option(False, "Errors only, and the results.", "-q")


SHARED = frozenset(("max_cost", "max_total_tokens"))
"""Limits that bound the sum over all runs, unless they are those of an ``[[eval]]``."""
_HINTS = typing.get_type_hints(EvalSettings, include_extras=True)
MERGED = frozenset(
    name
    for name, hint in _HINTS.items()
    if any(typing.get_origin(part) is Mapping for part in parts(hint))
)
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
    if settings.push_to_hub and not settings.hub_name:
        problems.append("--save-to-hf-hub needs a name: add -D OWNER/NAME")
    return problems
