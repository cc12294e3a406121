"""JSON and TOML of others: what cannot be used is a ValueError, also by its nesting or its values."""

from __future__ import annotations

import json
import tomllib
import tracemalloc

import msgspec
import pytest

from verifiers.runtime.decoding import (
    MAX_DEPTH,
    MAX_VALUES,
    check_values,
    decode_json,
    decode_message,
    decode_toml,
    read_json,
    read_record,
    read_toml,
)
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


# --- what a peer sends

FOREIGN = {
    "empty objects": '{"a": [' + "{}," * MAX_VALUES + "1]}",
    "objects": "[" + '{"a":1},' * MAX_VALUES + "1]",
    "numbers": "[" + "999," * MAX_VALUES + "1]",
    "texts": "[" + '"ab",' * MAX_VALUES + "1]",
    "after a quote in a text": '["\\"",' + "{}," * MAX_VALUES + "1]",
    "after a backslash at the end of a text": '["\\\\",' + "{}," * MAX_VALUES + "1]",
}


@pytest.mark.parametrize("form", [str, str.encode], ids=["text", "bytes"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_values_are_bounded_before_they_are_made(kind, form):
    content = form(FOREIGN[kind])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="it has more than 500,000 values"):
            decode_message(content)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(content) + 4 * 2**20
    finally:
        tracemalloc.stop()


def test_negative_control_the_decoder_alone_makes_them_all():
    content = FOREIGN["empty objects"]
    tracemalloc.start()
    try:
        json.loads(content)
        assert tracemalloc.get_traced_memory()[1] > 15 * len(content)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text", ["{,[" * MAX_VALUES, 'a\\",{[' * MAX_VALUES, '\\\\",",' * 3, "é{,\u2028" * MAX_VALUES]
)
def test_marks_within_texts_are_no_values(text):
    value = ["\\", {text: text}, '"', text]
    for form in (json.dumps(value), json.dumps(value, ensure_ascii=False).encode()):
        assert decode_message(form) == value


@pytest.mark.parametrize("num_values", [999, 1000, 1001])
def test_the_bound_is_exact_also_over_the_pieces_that_are_looked_at(num_values):
    texts = ['","' * 30_000, "]"]
    content = json.dumps([texts[i % 2] for i in range(num_values)]).encode()  # a bracket, commas
    if num_values <= 1000:
        check_values(content, 1000)
    else:
        with pytest.raises(ValueError, match="more than 1,000 values"):
            check_values(content, 1000)


def test_bytes_and_depth_are_bounded_too():
    assert decode_message("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(ValueError, match="nested deeper than 100 levels"):
            decode_message("[" * depth + "]" * depth)
    with pytest.raises(ValueError, match="it is longer than 4 bytes"):
        decode_message("[1,2]", max_bytes=4)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_a_toml_file_of_windows_is_read(tmp_path, encoding):
    mark = "\ufeff" if encoding == "utf-16-le" else ""
    (tmp_path / "a.toml").write_bytes(f'{mark}name = "Zoë"\r\n'.encode(encoding))
    assert read_toml(tmp_path / "a.toml") == {"name": "Zoë"}


@pytest.mark.parametrize("line", ['path = "C:\\data\\new"', 'paths = ["D:\\Users\\me"]'])
def test_a_path_of_windows_in_double_quotes_names_the_backslash(line):
    with pytest.raises(ValueError, match="write a path of Windows in single quotes, or with /"):
        decode_toml(f"a = 1\n{line}\n")


class Shape(msgspec.Struct):
    name: str
    sizes: list[int] = []


def test_a_record_has_its_declared_fields_and_an_error_names_file_and_field(tmp_path):
    path = tmp_path / "shape.json"
    path.write_text('{"name": "a", "sizes": [1], "further": null}')
    assert read_record(path, Shape) == Shape("a", [1])
    for text, place in {
        '{"sizes": []}': "field `name`",
        '{"name": "a", "sizes": [1, "b"]}': r"sizes\[1\]",
    }.items():
        path.write_text(text)
        assert isinstance(read_json(path), dict)  # negative control: undeclared, it passes
        with pytest.raises(ValueError, match=f"{path}: .*{place}"):
            read_record(path, Shape)
