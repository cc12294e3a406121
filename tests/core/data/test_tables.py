"""Tables of strangers: read up to a limit, and an error where they are damaged."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from verifiers.data import tables
from verifiers.data.tables import read_table
from verifiers.errors import DatasetError


def cells_of(path: Path, *names: str) -> list[object]:
    table = read_table(path)
    return [None if cells is None else list(cells) for cells in table.records(names)]


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        ("a,b\n1,2\n", ","),
        ("a;b\n1,5;2,5\n", ";"),
        ("a\tb\n1, 2\t3, 4\n", "\t"),
        ("a|b\n1;2|3\n", "|"),
        ('"a, b";b\n1;2\n', ";"),  # most commas of the header are quoted
        ("sep=;\r\na,b;b\r\n1;2\r\n", ";"),
        ("a\rb\r", ","),
    ],
)
def test_the_delimiter_is_that_of_regular_rows(tmp_path, text, delimiter):
    path = tmp_path / "t.csv"
    path.write_text(text, newline="")
    assert read_table(path).delimiter == delimiter


def test_quoted_cells_hold_delimiters_line_ends_and_quotes(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('a,b\r\n"1,\r\n2","say ""hi"""\r\n\r\n3\r\n4,5,,\r\n6,7,8\r\n', newline="")
    assert cells_of(path, "b", "a") == [
        ['say "hi"', "1,\r\n2"],
        ["", "3"],
        ["5", "4"],
        None,
    ]


def test_quotation_marks_mean_nothing_in_tabs_that_have_no_rule_for_them(tmp_path):
    path = tmp_path / "t.tsv"
    path.write_text('a\tb\n"Hello" he said\tx\ny\t"z"\n')
    assert cells_of(path, "a", "b") == [['"Hello" he said', "x"], ["y", '"z"']]
    path.write_text('a\tb\n"Hello\tyou"\tx\n')
    assert cells_of(path, "a", "b") == [["Hello\tyou", "x"]]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.csv", b'a,b\n1,"2\n3,4\n', "line 3: .*a quotation mark within a cell is written twice"),
        ("t.csv", b"a,b\n1,\x00\n", "it is no text in UTF-8, UTF-16 or Windows-1252"),
        ("t.csv", b"a,b\n1,\x81\n", "it is no text in UTF-8, UTF-16 or Windows-1252"),
        ("t.csv", "a,b\n1,2\n".encode("utf-16-le"), "it is no text in"),
        ("t.csv", b"\xef\xbb\xbfa,b\n1,\xff\n", "it is no text in"),
        ("t.jsonl", b'{"a": 1\n', "t.jsonl:1 is not JSON"),
        ("t.jsonl", b"[1]\n", "t.jsonl:1 is not a JSON object"),
        ("t.xlsx", b"PK", "it is no readable workbook"),
        ("t.parquet", b"PAR1PAR1", "it is no readable Parquet file"),
        ("t.pkl", b"", "the file type is not one of"),
    ],
)
def test_a_damaged_table_is_an_error_that_names_it(tmp_path, name, content, said):
    if name == "t.xlsx":
        pytest.importorskip("openpyxl", reason="the extra excel is not installed")
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=said) as refused:
        list(read_table(path).records(["a", "b"]))
    assert name in str(refused.value)


def test_a_long_file_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n")
    monkeypatch.setattr(tables, "MAX_FILE_BYTES", 8)
    assert cells_of(path, "a") == [["1"]]
    path.write_text("a,b\n1,22\n")
    with pytest.raises(DatasetError, match="it is longer than 8 bytes"):
        read_table(path)


def test_what_unpacks_to_much_more_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("openpyxl", reason="the extra excel is not installed")
    import pyarrow
    import pyarrow.parquet

    with zipfile.ZipFile(tmp_path / "t.xlsx", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/worksheets/sheet1.xml", b" " * 200_000)
    column = pyarrow.array([f"{n:06} " + "x" * 400 for n in range(1000)])
    pyarrow.parquet.write_table(
        pyarrow.table({"a": column}),
        tmp_path / "t.parquet",
        compression="zstd",
        use_dictionary=False,
    )
    monkeypatch.setattr(tables, "MAX_FILE_BYTES", 40_000)
    for name in ("t.xlsx", "t.parquet"):
        assert (tmp_path / name).stat().st_size < 40_000
        with pytest.raises(DatasetError, match="it unpacks to more than 160000 bytes"):
            read_table(tmp_path / name)


def test_a_value_that_is_stored_once_for_every_row_is_no_way_around_the_limit(
    tmp_path, monkeypatch
):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "t.parquet"
    column = pyarrow.array(["x" * 10_000] * 1000)
    pyarrow.parquet.write_table(pyarrow.table({"a": column}), path, row_group_size=1000)
    assert path.stat().st_size < 40_000
    assert len(cells_of(path, "a")) == 1000
    monkeypatch.setattr(tables, "MAX_FILE_BYTES", 40_000)
    with pytest.raises(
        DatasetError, match=r"^cannot read the table '[^']+': it unpacks to more than 160000"
    ):
        cells_of(path, "a")


def test_a_cell_far_out_makes_no_large_sheet(tmp_path):
    openpyxl = pytest.importorskip("openpyxl", reason="the extra excel is not installed")
    book = openpyxl.Workbook()
    book.active.append(["a", "b"])
    book.active.append([1, None])
    book.active["XFD1048576"] = "far"
    book.save(tmp_path / "t.xlsx")
    assert cells_of(tmp_path / "t.xlsx", "a", "b") == [[1, None]]


def test_too_many_columns_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(",".join(f"c{n}" for n in range(tables.MAX_COLUMNS + 1)) + "\n")
    with pytest.raises(DatasetError, match="more than 1000 columns"):
        read_table(path)


def test_without_the_extra_a_workbook_names_it(tmp_path, monkeypatch):
    (tmp_path / "t.xlsx").write_bytes(b"PK")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(DatasetError, match=r"a workbook is read with .*excel"):
        read_table(tmp_path / "t.xlsx")
