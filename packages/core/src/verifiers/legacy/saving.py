"""Older utility functions: collect, write and find saved rollouts.

Runs save rollouts durably, one by one (``results_path``). These functions are for code that manages its own files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError, RunMismatch
from verifiers.results import GenerateMetadata, GenerateOutputs, load_results
from verifiers.results.rows import RolloutOutput, json_ready, state_to_output
from verifiers.rollouts.state import State
from verifiers.runtime.json import encode_row
from verifiers.storage.directory import METADATA_NAME, RESULTS_NAME, is_complete, read_metadata
from verifiers.storage.files import atomic_write

MUST_AGREE = ("env_id", "model", "rollouts_per_example")
"""Metadata that must be equal for two runs to share a results file."""


def states_to_outputs(states: Iterable[State], state_columns: Sequence[str] | None = None) -> list[RolloutOutput]:
    """Finished states as saved rollouts."""
    return [state_to_output(state, state_columns) for state in states]


def load_outputs(results_path: str | Path) -> list[RolloutOutput]:
    """The saved rollouts of a run directory or a results file."""
    return load_results(results_path).outputs


def save_outputs(outputs: Sequence[Mapping[str, Any]], results_path: str | Path, mode: str = "w") -> None:
    """Write rollouts to ``results.jsonl`` in the folder ``results_path``; mode ``"a"`` appends."""
    if mode not in ("w", "a"):
        raise ConfigError(f'mode is {mode!r}; it must be "w" or "a"', key="mode")
    folder = Path(results_path)
    folder.mkdir(parents=True, exist_ok=True)
    lines = b"".join(encode_row(output) + b"\n" for output in outputs)
    if mode == "w":
        atomic_write(folder / RESULTS_NAME, lines)
        return
    with open(folder / RESULTS_NAME, "ab") as file:
        file.write(lines)


def save_new_outputs(outputs: Sequence[Mapping[str, Any]], results_path: str | Path) -> None:
    """Append rollouts to ``results.jsonl`` in the folder ``results_path``."""
    save_outputs(outputs, results_path, mode="a")


def save_metadata(metadata: Mapping[str, Any], results_path: str | Path) -> None:
    """Write ``metadata.json`` in the folder ``results_path``."""
    folder = Path(results_path)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / METADATA_NAME, json.dumps(json_ready(dict(metadata)), indent=2).encode() + b"\n")


def validate_resume_metadata(results_path: str | Path, **facts: object) -> None:
    """Compare the metadata in a folder with ``env_id=…, model=…, rollouts_per_example=…``.

    *Raises* RunMismatch naming the differences, ConfigError when the folder has no metadata file.
    """
    stored = read_metadata(results_path)
    if stored is None:
        raise ConfigError(f"{results_path} has no {METADATA_NAME}; pass the directory of a run", path=str(results_path))
    pairs = {name: (stored.get(name), facts[name]) for name in MUST_AGREE if name in facts}
    if differences := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
        text = "; ".join(
            f"{name} is {stored_value!r} there, not {value!r}" for name, (stored_value, value) in differences.items()
        )
        raise RunMismatch(f"{results_path} contains another run: {text}", differences=differences)


class GenerateOutputsBuilder:
    """Collects saved rollouts into ``GenerateOutputs``; ``facts`` are fields of its metadata."""

    def __init__(self, **facts: Any):
        self.facts = facts
        self.outputs: list[RolloutOutput] = []

    def add_outputs(self, outputs: Iterable[RolloutOutput]) -> None:
        """Add finished rollouts."""
        self.outputs += outputs

    def build_metadata(self) -> GenerateMetadata:
        """The metadata of the rollouts so far."""
        return GenerateMetadata.of(self.outputs, **self.facts)

    def build(self, sort_by_example_id: bool = False) -> GenerateOutputs:
        """The rollouts so far, in order of arrival or by example."""
        outputs = sorted(self.outputs, key=lambda output: output["example_id"]) if sort_by_example_id else self.outputs
        return GenerateOutputs(outputs, self.build_metadata())


def is_valid_eval_results_path(path: str | Path) -> bool:
    """Whether a folder contains results and metadata of a run."""
    folder = Path(path)
    return (folder / RESULTS_NAME).is_file() and read_metadata(folder) is not None


def find_latest_incomplete_eval_results_path(
    env_id: str,
    model: str,
    num_examples: int | None = None,
    rollouts_per_example: int | None = None,
    env_dir_path: str | Path | None = None,
) -> Path | None:
    """The most recently written incomplete run of this environment and model; None without one."""
    module = env_id.rsplit("/", 1)[-1].replace("-", "_")
    own = Path("environments", module)
    root = (own if own.is_dir() else Path()) if env_dir_path is None else Path(env_dir_path, module)
    criteria = {"env_id": env_id, "model": model, "num_examples": num_examples}
    criteria["rollouts_per_example"] = rollouts_per_example
    matches = []
    for folder in root.glob("outputs/evals/*/*"):
        if not is_valid_eval_results_path(folder) or is_complete(folder):
            continue
        stored = read_metadata(folder) or {}
        if all(value is None or stored.get(name) == value for name, value in criteria.items()):
            matches.append(folder)
    return max(matches, key=lambda folder: (folder / RESULTS_NAME).stat().st_mtime, default=None)
