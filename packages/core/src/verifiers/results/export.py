"""Results as datasets and files: ``make_dataset``, ``save``.

A column whose values do not fit one Arrow type is written as JSON text, never dropped. This module reads nothing back
(``loading``).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers import compat
from verifiers.errors import ConfigError
from verifiers.results.metadata import example_key
from verifiers.results.outputs import GenerateOutputs
from verifiers.results.rows import RolloutOutput, json_ready, row_for_disk
from verifiers.results.statistics import mean
from verifiers.runtime.json import canonical_json, encode_row
from verifiers.runtime.suggest import check_keywords
from verifiers.storage.directory import METADATA_NAME, RESULTS_NAME
from verifiers.storage.files import atomic_write
from verifiers.storage.journal import Journal

DATASET_COLUMNS = "example_id prompt completion answer task info reward average_reward metrics error".split()


def make_dataset(
    results: GenerateOutputs,
    rollouts_per_example: int | None = None,
    push_to_hub: bool = False,
    hub_name: str | None = None,
    state_columns: Sequence[str] | None = None,
    **older: Any,
) -> Any:
    """The results as a ``datasets.Dataset`` with the columns of ``DATASET_COLUMNS`` and those asked for.

    ``average_reward`` is the mean of the known rewards of the example's rollouts: of those with one example id, or of
    each run of ``rollouts_per_example`` rows when that is given. Unknown rewards are null. ``push_to_hub`` publishes
    it as ``hub_name``. *Raises* ConfigError for a publication without a name, or a column the rows do not have.

    >>> from verifiers.testing import ScriptedClient
    >>> results = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}]).evaluate(ScriptedClient("2"), "m")
    >>> vf.make_dataset(results)["average_reward"][:]
    [0.0]
    """
    given = {"push_to_hub": True} if push_to_hub else {}
    named = compat.rename(older | given | ({"hub_name": hub_name} if hub_name else {}), compat.PUBLICATION)
    check_keywords(named, ("push_to_hub", "hub_name"), "make_dataset")
    push_to_hub, hub_name = named.get("push_to_hub", False), named.get("hub_name")
    if push_to_hub and not hub_name:
        raise ConfigError('push_to_hub needs a name: hub_name="owner/dataset"')
    columns = [*DATASET_COLUMNS, *(name for name in state_columns or () if name not in DATASET_COLUMNS)]
    averages = _average_rewards(results.outputs, rollouts_per_example)
    rows = []
    for output, average in zip(results.outputs, averages, strict=True):
        if absent := [name for name in columns if name not in output and name != "average_reward"]:
            raise ConfigError(f"the rows have no column {absent[0]!r}; run with state_columns={absent!r}")
        rows.append({name: average if name == "average_reward" else output[name] for name in columns})
    dataset = rows_to_dataset(rows)
    if push_to_hub:
        dataset.push_to_hub(hub_name)
    return dataset


def rows_to_dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A ``datasets.Dataset`` of rows with the union of their columns; unknown numbers are null."""
    from datasets import Dataset

    plain = [json_ready(row) for row in rows]
    names = dict.fromkeys(name for row in plain for name in row)
    return Dataset.from_dict({name: _arrow_column([row.get(name) for row in plain]) for name in names})


def save(results: GenerateOutputs, path: str | Path) -> None:
    """Write ``path``: one ``.parquet`` or ``.jsonl`` file, else a run directory with its journal and metadata.

    *Raises* ConfigError when the directory already holds results.
    """
    target = Path(path)
    if target.suffix == ".parquet":
        target.parent.mkdir(parents=True, exist_ok=True)
        results.to_dataset().to_parquet(str(target))
        return
    rows = _disk_rows(results.outputs)
    if target.suffix == ".jsonl":
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, b"".join(encode_row(row) + b"\n" for row in rows))
        return
    if (target / RESULTS_NAME).exists():
        raise ConfigError(f"{target / RESULTS_NAME} already exists; save into another directory", path=str(target))
    target.mkdir(parents=True, exist_ok=True)
    with Journal.open(target / RESULTS_NAME) as journal:
        journal.append_sync(rows)
    content = json.dumps(json_ready(results.metadata | {"path_to_save": str(target)}), indent=2)
    atomic_write(target / METADATA_NAME, content.encode() + b"\n")


def _disk_rows(outputs: Sequence[RolloutOutput]) -> list[dict[str, Any]]:
    seen: dict[str, int] = {}
    rows = []
    for output in outputs:
        example_hash = output.get("example_hash") or _hash_of(output)
        sibling = output.get("sibling", seen.get(example_hash, 0))
        seen[example_hash] = sibling + 1
        rows.append(row_for_disk(output, example_hash, sibling, output.get("attempts") or 1))
    return rows


def _hash_of(output: Mapping[str, Any]) -> str:
    """A stand-in for the hash of the dataset row, from what of it the output holds."""
    known = json_ready({name: output[name] for name in ("prompt", "answer", "task", "info")})
    return hashlib.sha256(canonical_json(known)).hexdigest()


def _average_rewards(outputs: Sequence[RolloutOutput], siblings: int | None) -> list[float]:
    keys = [index // siblings if siblings else example_key(output) for index, output in enumerate(outputs)]
    groups: dict[Any, list[float]] = {}
    for key, output in zip(keys, outputs, strict=True):
        groups.setdefault(key, []).append(output["reward"])
    averages = {key: mean(rewards) for key, rewards in groups.items()}
    return [averages[key] if not math.isnan(averages[key]) else math.nan for key in keys]


def _arrow_column(values: list[Any]) -> list[Any]:
    """The values, or their JSON texts when Arrow has no one type for them that Parquet can hold."""
    import pyarrow as pa

    try:
        if not _has_empty_struct(pa.array(values).type):
            return values
    except (pa.ArrowException, OverflowError):  # mixed types: the JSON text keeps them all
        pass
    return [None if value is None else json.dumps(value) for value in values]


def _has_empty_struct(arrow_type: Any) -> bool:
    if str(arrow_type).startswith("struct") and not arrow_type.num_fields:
        return True
    return any(_has_empty_struct(arrow_type.field(i).type) for i in range(arrow_type.num_fields))
