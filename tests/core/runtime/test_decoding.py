"""JSON and TOML of others: what cannot be used is a ValueError, also by its nesting."""

from __future__ import annotations

import json
import tomllib

import msgspec
import pytest

from verifiers.runtime.decoding import MAX_DEPTH, decode_json, decode_toml, read_json, read_toml
from verifiers.runtime.json import UNSERIALIZABLE, decode_row, encode_row


def nested(depth: int) -> str:
    return "[" * depth + "1" + "]" * depth


NESTED = {
    "json": (decode_json, nested),
    "row": (lambda text: decode_row(text.encode()), lambda depth: f'{{"a": {nested(depth - 1)}}}'),
    "toml": (decode_toml, lambda depth: f"a = {nested(depth - 1)}"),
}


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 100_000])
def test_deep_nesting_is_a_value_error(kind, depth):
    decode, text = NESTED[kind]
    assert decode(text(MAX_DEPTH))
    with pytest.raises(ValueError, match=f"nested deeper than {MAX_DEPTH} levels"):
        decode(text(depth))


@pytest.mark.parametrize(
    "decode", [json.loads, msgspec.json.decode, lambda text: tomllib.loads(f"a = {text}")]
)
def test_the_decoders_themselves_raise_another_error(decode):
    """Negative control."""
    with pytest.raises(RecursionError):
        decode(nested(100_000))


def test_a_row_is_written_so_that_it_can_be_read_again():
    deep: list = []
    for _ in range(MAX_DEPTH - 2):
        deep = [deep]
    assert decode_row(encode_row({"a": deep, "b": 1}))["a"] == deep
    for value in ([deep], [{"é": deep}], [[[deep]] * 2]):
        assert decode_row(encode_row({"a": value, "b": "é"})) == {
            "a": {UNSERIALIZABLE: "list"},
            "b": "é",
        }


def test_brackets_in_texts_and_many_containers_are_not_nesting():
    row = {"a": "[" * 5000, "b": [{"c": [1]}] * 5000}
    assert decode_row(encode_row(row)) == row


def test_files_are_read_with_the_same_limits(tmp_path):
    path = tmp_path / "file"
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
    path.write_text("a = 1\r\n")
    assert read_toml(path) == {"a": 1}
    for read in (read_json, read_toml):
        path.write_text("a = " * (read is read_toml) + nested(5000))
        with pytest.raises(ValueError, match="nested deeper"):
            read(path)
