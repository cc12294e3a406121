"""Convert rows to a ``datasets.Dataset`` without loss.

Arrow gives every value of a column one type and every dict the same keys, which silently changes
dicts with different keys, mixed types and 1 beside 1.5. Each column is therefore stored as Arrow if
that is exact, else as ``datasets.Json`` (decoded on reading); ``info`` falls back to JSON text,
which every reader of a row accepts.

Outside ``info``, neither Arrow nor ``datasets.Json`` stores these exactly: lone surrogates (stored as
their escapes), floats in a column of mixed types beyond about 15 digits, and integers beyond 64 bits
(their column becomes JSON text).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.runtime.json import canonical_json, in_utf8

if TYPE_CHECKING:
    from datasets import Dataset

INPUT_COLUMNS = ("prompt", "answer", "info", "task", "example_id")


def to_dataset(rows: Sequence[Mapping[str, object]]) -> Dataset:
    """Build a ``datasets.Dataset`` with the union of the columns; absent cells are None."""
    import datasets

    names = tuple(dict.fromkeys(name for row in rows for name in row)) or INPUT_COLUMNS
    columns: dict[str, list[object]] = {}
    features: dict[str, object] = {}
    for name in names:
        columns[name], features[name] = _column(name, [row.get(name) for row in rows])
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def _column(name: str, values: list[object]) -> tuple[list[Any], object]:
    """Return the values to store, and their feature."""
    import datasets

    values = values if name == "info" else in_utf8(values)
    if (feature := _exact_feature(name, values)) is not None:
        return values, feature
    texts = [None if value is None else json.dumps(value) for value in values]
    as_json = datasets.Json()
    try:
        decoded = [None if text is None else as_json.decode_example(text) for text in texts]
    except ValueError:  # integers beyond 64 bits
        return texts, datasets.Value("string")
    if name == "info" and canonical_json(decoded) != canonical_json(values):
        return texts, datasets.Value("string")
    return texts, as_json


def _exact_feature(name: str, values: Sequence[object]) -> object:
    """Return the Arrow feature that stores the values exactly; None when there is none."""
    import datasets
    import pyarrow

    try:
        array = pyarrow.array(values)
        if "struct<>" in str(array.type):  # dicts that are all empty; Parquet cannot hold them
            return None
        if canonical_json(array.to_pylist()) != canonical_json(values):
            return None
        return datasets.Features.from_arrow_schema(pyarrow.schema([(name, array.type)]))[name]
    except (pyarrow.ArrowException, UnicodeError, OverflowError):
        return None
