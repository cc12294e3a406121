"""Convert results to a dataset or to files.

A column whose values do not fit one Arrow type is written as JSON text, never dropped. ``loading`` reads results.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.results.rows import RolloutOutput, example_key, json_ready, row_for_disk
from verifiers.results.statistics import mean
from verifiers.runtime.json import canonical_json, encode_row
from verifiers.storage.directory import METADATA_NAME, RESULTS_NAME
from verifiers.storage.files import atomic_write
from verifiers.storage.journal import Journal


def rows_to_dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A ``datasets.Dataset`` with the union of the columns of all rollouts; unknown numbers are null."""
    from datasets import Dataset

    plain = [json_ready(row) for row in rows]
    names = dict.fromkeys(name for row in plain for name in row)
    return Dataset.from_dict({name: _arrow_column([row.get(name) for row in plain]) for name in names})


def save(outputs: Sequence[RolloutOutput], metadata: Mapping[str, Any], path: str | Path) -> None:
    """Write the results of a run to ``path``: one ``.parquet`` or ``.jsonl`` file, else a run directory.

    *Raises* ConfigError when the directory already holds results.
    """
    target = Path(path)
    if target.suffix == ".parquet":
        target.parent.mkdir(parents=True, exist_ok=True)
        rows_to_dataset(outputs).to_parquet(str(target))
        return
    rows = _disk_rows(outputs)
    if target.suffix == ".jsonl":
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, b"".join(encode_row(row) + b"\n" for row in rows))
        return
    if (target / RESULTS_NAME).exists():
        raise ConfigError(f"{target / RESULTS_NAME} already exists; save into another directory", path=str(target))
    target.mkdir(parents=True, exist_ok=True)
    with Journal.open(target / RESULTS_NAME) as journal:
        journal.append_sync(rows)
    content = json.dumps(json_ready({**metadata, "path_to_save": str(target)}), indent=2)
    atomic_write(target / METADATA_NAME, content.encode() + b"\n")


def _disk_rows(outputs: Sequence[RolloutOutput]) -> list[dict[str, Any]]:
    counts: dict[str, int] = {}
    rows = []
    for output in outputs:
        example_hash = output.get("example_hash") or content_hash(output)
        sibling = output.get("sibling", counts.get(example_hash, 0))
        counts[example_hash] = sibling + 1
        rows.append(row_for_disk(output, example_hash, sibling, output.get("attempts") or 1))
    return rows


def content_hash(output: Mapping[str, Any]) -> str:
    """A substitute for the hash of the dataset row, from the columns that the output has."""
    columns = json_ready({name: output[name] for name in ("prompt", "answer", "task", "info")})
    return hashlib.sha256(canonical_json(columns)).hexdigest()


def average_rewards(outputs: Sequence[RolloutOutput], siblings: int | None) -> list[float]:
    """Mean known reward of each rollout's group: one example, or ``siblings`` consecutive rollouts."""
    keys = [index // siblings if siblings else example_key(output) for index, output in enumerate(outputs)]
    groups: dict[Any, list[float]] = {}
    for key, output in zip(keys, outputs, strict=True):
        groups.setdefault(key, []).append(output["reward"])
    averages = {key: mean(rewards) for key, rewards in groups.items()}
    return [averages[key] if not math.isnan(averages[key]) else math.nan for key in keys]


def _arrow_column(values: list[Any]) -> list[Any]:
    """The values, or their JSON texts when no single Arrow type that Parquet supports fits them."""
    import pyarrow as pa

    try:
        if not _has_empty_struct(pa.array(values).type):
            return values
    except (pa.ArrowException, OverflowError):  # mixed types become JSON texts
        pass
    return [None if value is None else json.dumps(value) for value in values]


def _has_empty_struct(arrow_type: Any) -> bool:
    if str(arrow_type).startswith("struct") and not arrow_type.num_fields:
        return True
    return any(_has_empty_struct(arrow_type.field(i).type) for i in range(arrow_type.num_fields))
