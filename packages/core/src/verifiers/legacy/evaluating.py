"""Older ``verifiers.utils.eval_utils``: evaluations of a file or a configuration, and their results
as text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from verifiers.clients.protocol import ClientConfig
from verifiers.errors import ConfigError, VerifiersError
from verifiers.results import GenerateOutputs
from verifiers.results.rows import RolloutOutput
from verifiers.results.statistics import known_values, mean


@dataclass
class EvalConfig:
    """An evaluation, for ``run_evaluation``; ``num_workers``, ``disable_env_server``,
    ``disable_tui``: no effect."""

    env_id: str
    env_args: dict[str, Any]
    env_dir_path: str
    model: str
    client_config: ClientConfig
    sampling_args: dict[str, object]
    num_examples: int
    rollouts_per_example: int
    max_concurrent: int
    endpoint_id: str | None = None
    num_workers: int | str = "auto"
    independent_scoring: bool = False
    extra_env_kwargs: dict[str, object] = field(default_factory=dict)
    max_retries: int = 0
    disable_env_server: bool = False
    verbose: bool = False
    disable_tui: bool = False
    output_dir: str | None = None
    state_columns: list[str] | None = None
    save_results: bool = False
    resume_path: Path | None = None
    save_to_hf_hub: bool = False
    hf_hub_dataset_name: str | None = None

    def model_dump(self, **_: object) -> dict[str, object]:
        """The fields as plain data."""
        return asdict(self)

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> EvalConfig:
        """A copy with the fields of ``update``."""
        return replace(self, **(update or {}))


@dataclass
class EvalRunConfig:
    """Several evaluations, in sequence. ``heartbeat_url`` must be None."""

    evals: list[EvalConfig]
    heartbeat_url: str | None = None


async def run_evaluation(
    config: EvalConfig,
    on_start: Callable[..., object] | None = None,
    on_log_file: Callable[[Path], None] | None = None,
    on_progress: Callable[..., object] | Sequence[Callable[..., object]] | None = None,
    on_log: Callable[[str], None] | None = None,
) -> GenerateOutputs:
    """Load the environment of a configuration and evaluate it; saved when it says so.

    ``on_log_file`` is not called, because no log file is written. Raises as ``load_environment``
    and ``evaluate``.
    """
    from verifiers.environments.registry import load
    from verifiers.legacy.paths import get_eval_results_path

    env = load(config.env_id, config.env_args, config.env_dir_path)
    env.set_kwargs(**config.extra_env_kwargs)
    path = config.resume_path or (get_eval_results_path(config) if config.save_results else None)
    callbacks: dict[str, Any] = {"on_start": on_start, "on_progress": on_progress, "on_log": on_log}
    return await env.a_evaluate(
        config.client_config,
        config.model,
        config.sampling_args,
        config.num_examples,
        config.rollouts_per_example,
        max_concurrent=config.max_concurrent,
        max_retries=config.max_retries,
        independent_scoring=config.independent_scoring,
        state_columns=config.state_columns or (),
        results_path=path,
        save_results=path is not None,
        push_to_hub=config.save_to_hf_hub,
        hub_name=config.hf_hub_dataset_name,
        **{name: call for name, call in callbacks.items() if call is not None},
    )


async def run_evaluations(config: EvalRunConfig) -> None:
    """``run_evaluation`` of each, and ``print_results``. *Raises* ConfigError for a
    ``heartbeat_url``."""
    if config.heartbeat_url:
        raise ConfigError(
            "nothing sends heartbeats to heartbeat_url; leave it out", key="heartbeat_url"
        )
    for evaluation in config.evals:
        print_results(await run_evaluation(evaluation))


def load_toml_config(
    path: str | Path, extra_valid_fields: set[str] | None = None
) -> list[dict[str, object]]:
    """The evaluations of a TOML file: its top-level settings updated with each ``[[eval]]`` or
    ``[[ablation]]``.

    A sweep gives one evaluation for every combination. *Raises* FileNotFoundError; ConfigError, a
    ValueError, that lists every unknown or wrong setting.
    """
    from verifiers.cli.common.reader import raise_together
    from verifiers.cli.evaluate.options import layered
    from verifiers.cli.evaluate.toml_args import read_files

    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    file = read_files([str(path)])
    problems: list[str | VerifiersError] = [*file.problems]
    if not file.entries and not problems:
        problems.append(f"{path} has neither [[eval]] nor [[ablation]]")
    raise_together(problems)
    return [
        {"env_id": entry.env_id, **layered(file.common, entry.settings)} for entry in file.entries
    ]


def resolve_endpoints_file(endpoints_path: str) -> Path | None:
    """The registry file that a path means: itself, or the ``endpoints.toml`` or ``.py`` in a
    folder; None without."""
    path = Path(endpoints_path)
    if not path.is_dir():
        return path
    files = (path / "endpoints.toml", path / "endpoints.py")
    return next((file for file in files if file.is_file()), None)


def filter_inputs(
    inputs: Sequence[Mapping[str, object]],
    outputs: Sequence[Mapping[str, object]],
    rollouts_per_example: int,
) -> list[Any]:
    """The inputs that still have to be run: of each example as many as ``outputs`` lacks of the
    wanted number."""
    missing = {row["example_id"]: rollouts_per_example for row in inputs}
    for output in outputs:
        if output["example_id"] in missing:
            missing[output["example_id"]] -= 1
    rows_left = []
    for row in inputs:
        if missing[row["example_id"]] > 0:
            missing[row["example_id"]] -= 1
            rows_left.append(row)
    return rows_left


def get_env_outputs(results: GenerateOutputs, env_id: str) -> GenerateOutputs:
    """The rollouts of an environment of a group, as results."""
    return results.filter(lambda output: output_env_id(output) == env_id)


def output_env_id(output: Mapping[str, object]) -> str:
    """The environment of a group that ran a rollout."""
    info = output.get("info")
    env_id = info.get("env_id") if isinstance(info, Mapping) else None
    return str(env_id or output.get("task") or "")


def get_log_level(verbose: bool) -> str:
    """The log level of an evaluation."""
    return "DEBUG" if verbose else "INFO"


@contextmanager
def quiet_datasets() -> Any:
    """No progress bars of ``datasets`` inside a ``with`` block."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    was_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_disabled:
            enable_progress_bars()


def to_col_order(list_of_dicts: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Rows as columns, with the names of the first row.

    >>> to_col_order([{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    {'a': [1, 3], 'b': [2, 4]}
    """
    if list_of_dicts:
        return {name: [row[name] for row in list_of_dicts] for name in list_of_dicts[0]}
    return {}


# --- results as text


def print_results(results: GenerateOutputs, num_samples: int = 1) -> None:
    """Print the summary of a run, with its best and worst rollout unless ``num_samples`` is 0."""
    from verifiers.cli.evaluate.summary import print_summary, run_facts

    print_summary(results, run_facts(results), samples=num_samples > 0, notes=(), stream=sys.stdout)


def print_rewards(results: GenerateOutputs) -> None:
    """Print mean, spread and values of the reward and of each metric, one line for each sibling."""
    _say("Rewards:")
    facts = results.metadata
    _print_values("reward", results["rewards"], results.outputs)
    for name in ("pass_at_k", "pass_all_k"):
        if rates := facts[name]:
            by_k = ", ".join(f"{k}={rate:.3f}" for k, rate in rates.items())
            _say(f"{'pass@k' if name == 'pass_at_k' else 'pass^k'}: {by_k}")
    for name, values in results["metrics"].items():
        _print_values(name, values, results.outputs)


def print_info(results: GenerateOutputs) -> None:
    """Print the share of truncated rollouts, of every stop condition and of every error."""
    _say("Info:")
    outputs = results.outputs
    _say(f"is_truncated: {_spread([float(bool(output['is_truncated'])) for output in outputs])}")
    _say(
        "stop_conditions:"
        f" {_shares([str(output['stop_condition']) for output in outputs], len(outputs))}"
    )
    if errors := [
        str(output["error"]["error_chain_str"]) for output in outputs if output["error"] is not None
    ]:
        _say(f"errors: {_shares(errors, len(outputs))}")


def print_timing(results: GenerateOutputs) -> None:
    """Print the times of the rollouts in seconds: least, mean and most."""
    _say("Timing:")
    for name in ("generation_ms", "scoring_ms", "total_ms"):
        times = [
            output["timing"][name] / 1000
            for output in results.outputs
            if name in (output["timing"] or {})
        ]
        if times:
            spread = f"min - {min(times):.2f}s, mean - {mean(times):.2f}s, max - {max(times):.2f}s"
            _say(f"{name.removesuffix('_ms')}: {spread}")


def print_usage(results: GenerateOutputs) -> None:
    """Print the mean tokens of a rollout."""
    if usage := results.metadata["usage"]:
        _say("Usage:")
        for name in ("input_tokens", "output_tokens", "final_input_tokens", "final_output_tokens"):
            if name in usage:
                _say(f"{name} (avg): {usage[name]:.3f}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _print_values(name: str, values: Sequence[float], outputs: Sequence[RolloutOutput]) -> None:
    _say(f"{name}: {_spread(values)}")
    seen: dict[object, int] = {}
    rows: dict[int, list[float]] = {}
    for value, output in zip(values, outputs, strict=True):
        sibling = seen[output["example_id"]] = seen.get(output["example_id"], 0) + 1
        rows.setdefault(sibling, []).append(round(value, 3))
    for sibling, members in sorted(rows.items()):
        _say(f"r{sibling}: {members}")


def _spread(values: Sequence[float]) -> str:
    numbers = known_values(values)
    average = mean(numbers)
    deviation = mean([(number - average) ** 2 for number in numbers]) ** 0.5
    return f"avg - {average:.3f}, std - {deviation:.3f}"


def _shares(values: Sequence[str], total: int) -> str:
    counts = {value: values.count(value) / total for value in dict.fromkeys(values)}
    return ", ".join(
        f"{value}: {share:.3f}"
        for value, share in sorted(counts.items(), key=lambda pair: -pair[1])
    )
