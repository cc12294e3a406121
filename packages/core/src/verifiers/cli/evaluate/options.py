"""The settings of ``vf-eval``: one table of names, flags, forms and defaults for the command line and for TOML.

A field of ``EvalSettings`` is a setting: its name is the TOML key, ``flags`` spell it on the command line. Nothing here
reads a file (``toml_args``) or runs anything (``eval``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verifiers.cli.common.kinds import (
    ANYTHING,
    FLAG,
    HEADERS,
    HEADERS_FROM_STATE,
    NAMES,
    RUN,
    SECONDS,
    TABLE,
    TEXT,
    VARIABLE,
    WORKERS,
    Kind,
    choice,
    integer,
    number,
    several,
)

CLIENT_TYPES = ("openai_chat_completions", "openai_completions")  # as in clients.base, which is slow to import
DEFAULT_ENV_DIR = "./environments"
EXPORT_FORMATS = ("parquet", "hf", "inspect")  # as in exporting


def _setting(flags: str, kind: Kind, default: Any, meaning: str) -> Any:
    metadata = {"flags": tuple(flags.split()), "kind": kind, "help": meaning}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """Everything about one evaluation except which environment."""

    model: str | None = _setting("-m --model", TEXT, None, "Model name or endpoint alias; 'local': the built-in one.")
    api_base_url: str | None = _setting("-b --api-base-url", TEXT, None, "Endpoint, e.g. http://127.0.0.1:8000/v1.")
    api_key_var: str | None = _setting(
        "-k --api-key-var", VARIABLE, None, "Variable that holds the key, never the key."
    )
    endpoints_path: str | None = _setting("-e --endpoints-path", TEXT, None, "Registry of endpoint aliases.")
    api_client_type: str | None = _setting(
        "--api-client-type", choice(*CLIENT_TYPES), None, "How to call the endpoint."
    )
    header: Mapping[str, str] = _setting("--header", HEADERS, {}, "Extra request header; may be repeated.")
    header_from_state: Mapping[str, str] = _setting(
        "--header-from-state", HEADERS_FROM_STATE, {}, "Request header with the value of a state key; may be repeated."
    )
    env_args: Mapping[str, Any] = _setting("-a --env-args", TABLE, {}, "Arguments of the environment's loader.")
    extra_env_kwargs: Mapping[str, Any] = _setting("-x --extra-env-kwargs", TABLE, {}, "Settings for env.set_kwargs.")
    env_dir_path: str = _setting("-p --env-dir-path", TEXT, DEFAULT_ENV_DIR, "Folder of environments not installed.")
    num_examples: int = _setting("-n --num-examples", integer(1, or_minus_one="all"), 5, "Rows to run; -1 = all.")
    rollouts_per_example: int = _setting("-r --rollouts-per-example", integer(1), 3, "Rollouts of each row.")
    shuffle: bool = _setting("--shuffle/--no-shuffle", FLAG, False, "Shuffle the rows before taking -n.")
    shuffle_seed: int = _setting("--shuffle-seed", integer(), 0, "Seed of --shuffle.")
    seed: int | None = _setting("--seed", integer(), None, "Seed of the run's sampling.")
    max_tokens: int | None = _setting("-t --max-tokens", integer(1), None, "Tokens per response.")
    temperature: float | None = _setting("-T --temperature", number(0.0), None, "Sampling temperature.")
    sampling_args: Mapping[str, Any] = _setting("-S --sampling-args", TABLE, {}, "Sampling arguments; over -t and -T.")
    max_concurrent: int = _setting(
        "-c --max-concurrent --max-concurrent-requests", integer(1, or_minus_one="as many as possible"), 32,
        "Rollouts in flight.",
    )  # fmt: skip
    max_concurrent_generation: int | None = _setting(
        "--max-concurrent-generation", integer(1), None, "Model calls in flight."
    )
    max_concurrent_scoring: int | None = _setting(
        "--max-concurrent-scoring", integer(1), None, "Reward calls in flight."
    )
    max_concurrent_tools: int | None = _setting("--max-concurrent-tools", integer(1), None, "Tool calls in flight.")
    num_workers: int = _setting("-w --num-workers", WORKERS, 0, "Processes that play the rollouts; auto, 0 = this one.")
    worker_backend: str = _setting(
        "--worker-backend", choice("process", "ray"), "process", "Where they are: this machine, or a Ray cluster."
    )
    independent_scoring: bool = _setting(
        "-i --independent-scoring/--no-independent-scoring", FLAG, False, "Score each rollout alone."
    )
    interleave_scoring: bool = _setting(
        "--interleave-scoring/--no-interleave-scoring --interleave/-N", FLAG, True,
        "Score while others play; -N: after all have played.",
    )  # fmt: skip
    max_retries: int = _setting("--max-retries", integer(0), 0, "Times a rollout is run again after a passing fault.")
    timeout: float | None = _setting("--timeout", SECONDS, 3600.0, "Bound on each rollout; none = unbounded.")
    abort_after: int = _setting("--abort-after", integer(0), 32, "Equal failures in a row that end the run; 0 = never.")
    max_error_rate: float = _setting(
        "--max-error-rate", number(0.0, 1.0), 1.0, "Share of errors above which exit is 3."
    )
    output_dir: str | None = _setting("-o --output-dir", TEXT, None, "Folder of the runs; default ./outputs.")
    save_results: bool = _setting(
        "-s --save-results/--no-save --save-dataset", FLAG, True, "Runs are saved unless --no-save."
    )
    export: tuple[str, ...] = _setting(
        "--export", several(*EXPORT_FORMATS), (), f"Formats besides JSON lines: {', '.join(EXPORT_FORMATS)}."
    )
    save_every: str | None = _setting("-f --save-every", ANYTHING, None, "Accepted; every rollout is saved at once.")
    resume: str | None = _setting("-R --resume", RUN, None, "Run directory to go on with; default: found by itself.")
    fresh: bool = _setting("--fresh/--no-fresh", FLAG, False, "Start a new run; never go on with an old one.")
    retry_errors: bool = _setting("--retry-errors/--no-retry-errors", FLAG, False, "Run rollouts with errors again.")
    state_columns: tuple[str, ...] = _setting("-C --state-columns", NAMES, (), "Further keys of the state to save.")
    save_to_hf_hub: bool = _setting(
        "-H --save-to-hf-hub/--no-save-to-hf-hub", FLAG, False, "Publish the rows afterwards."
    )
    hf_hub_dataset_name: str | None = _setting("-D --hf-hub-dataset-name", TEXT, None, "Name to publish them under.")

    def sampling(self) -> dict[str, Any]:
        """The sampling arguments of the run; None is left to the server."""
        named = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return {**{name: value for name, value in named.items() if value is not None}, **self.sampling_args}


@dataclass(frozen=True, slots=True)
class CommandSettings:
    """How the command itself behaves; not part of what is evaluated, and no TOML key."""

    progress: str = _setting(
        "--progress", choice("auto", "bar", "plain", "json", "none"), "auto", "How progress is shown (stderr)."
    )
    abbreviated_summary: bool = _setting("-A --abbreviated-summary", FLAG, False, "Numbers only, no sample rollouts.")
    json: bool = _setting("--json", FLAG, False, "One JSON object on stdout instead of text.")
    check: bool = _setting(
        "--check", FLAG, False, "Check each environment with scripted models first; its errors stop the command."
    )
    dump_config: bool = _setting("--dump-config", FLAG, False, "Print the resolved settings as TOML and stop.")
    dry_run: bool = _setting("--dry-run", FLAG, False, "Show plan, first prompt and scoring; contact nobody.")
    verbose: bool = _setting("-v --verbose", FLAG, False, "More messages; tracebacks of errors.")
    quiet: bool = _setting("-q --quiet", FLAG, False, "Errors only, and the results.")


SETTINGS: dict[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(EvalSettings)}
COMMAND_SETTINGS: dict[str, dataclasses.Field[Any]] = {
    field.name: field for field in dataclasses.fields(CommandSettings)
}

MERGED = frozenset(("env_args", "extra_env_kwargs", "sampling_args", "header", "header_from_state"))
"""Tables that a layer of higher precedence adds to, key by key, instead of replacing them."""

REPLACED = {
    "-d": "environments have no endpoint of their own here; name a run folder with --output-dir",
    "-u": "-c is the number of rollouts in flight; nothing is unbounded",
    "--tui": "run `vf-tui`, or `vf-view`, beside or after the run",
    "--disable-env-server": "environments run in this process already",
    "--disable-tui": "use --progress plain",
    "--fullscreen": "use --progress bar",
    "--heartbeat-url": "use --progress json and watch its events",
    "--provider": "use -b URL -k VARIABLE, or an alias of the endpoint registry",
}
"""Options of older versions, with what took their place."""


def layered(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of two layers; those of ``above`` win, tables key by key.

    A ``max_tokens`` or ``temperature`` above also beats a ``sampling_args`` below that names it.

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


def contradictions(settings: EvalSettings) -> list[str]:
    """What cannot be asked for together, one sentence each."""
    found = []
    if settings.fresh and settings.resume is not None:
        found.append("--fresh starts a new run and --resume goes on with an old one; give one of them")
    if not settings.save_results and settings.resume is not None:
        found.append("--no-save keeps nothing on disk, so there is nothing to --resume; give one of them")
    if settings.resume and settings.output_dir:
        found.append("--resume PATH already names the run directory; leave out --output-dir")
    if not settings.save_results and settings.export:
        found.append("--no-save keeps nothing on disk, and --export writes beside what is kept; give one of them")
    if settings.save_to_hf_hub and not settings.hf_hub_dataset_name:
        found.append("--save-to-hf-hub needs a name: add -D OWNER/NAME")
    return found
