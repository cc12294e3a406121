"""Rows -> ``datasets.Dataset``, exactly: what the dataset gives back is what went in.

Arrow gives every value of a column one type and every dict the same keys, which silently changes dicts with different
keys, mixed types and 1 beside 1.5. Each column is therefore tried: as Arrow, then as ``datasets.Json`` (decoded on
reading), and ``info`` at last as JSON text, which every reader of a row accepts. Reading is ``dataset_sources``'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.encoding import canonical_json

INPUT_COLUMNS = ("prompt", "answer", "info", "task", "example_id")


def to_dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The rows as a ``datasets.Dataset`` with the union of their columns; a cell that a row lacks is None."""
    import datasets

    names = tuple(dict.fromkeys(name for row in rows for name in row)) or INPUT_COLUMNS
    columns: dict[str, list[Any]] = {}
    features: dict[str, Any] = {}
    for name in names:
        columns[name], features[name] = _column(name, [row.get(name) for row in rows])
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def _column(name: str, values: list[Any]) -> tuple[list[Any], Any]:
    """The values as they are stored, and their feature."""
    import datasets

    if (feature := _exact_feature(name, values)) is not None:
        return values, feature
    texts = [None if value is None else json.dumps(value) for value in values]
    as_json = datasets.Json()
    if name == "info" and not all(_decodes_to(as_json, text, value) for text, value in zip(texts, values, strict=True)):
        return texts, datasets.Value("string")
    return texts, as_json


def _decodes_to(feature: Any, text: str | None, value: Any) -> bool:
    return text is None or canonical_json(feature.decode_example(text)) == canonical_json(value)


def _exact_feature(name: str, values: list[Any]) -> Any:
    """The Arrow type that keeps the values as they are; None when there is none."""
    import datasets
    import pyarrow

    try:
        array = pyarrow.array(values)
        if canonical_json(array.to_pylist()) != canonical_json(values):
            return None
        return datasets.Features.from_arrow_schema(pyarrow.schema([(name, array.type)]))[name]
    except (pyarrow.ArrowException, UnicodeError, OverflowError):
        return None
