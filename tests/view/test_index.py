"""The index of rows: right, incremental, tolerant of runs that go on, and honest about damage."""

from __future__ import annotations

import json
import math
import os
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import example as case
from hypothesis import given
from hypothesis import strategies as st

from support import view_runs
from verifiers.results import load_results
from verifiers.results.columns import Column, NameColumn, Selection
from verifiers.results.index import RowIndex
from verifiers.results.index_file import INDEX_NAME, IndexFile, open_index
from verifiers.storage.journal import Journal
from verifiers.view.catalog import Catalog
from verifiers.view.library import Library


def journal(path, rows):
    with Journal.open(path) as opened:
        for row in rows:
            opened.append_sync(row)


def rows(*numbers):
    chance = random.Random(7)
    return [view_runs.plain_row(n, chance) for n in numbers]


def test_the_columns_are_those_of_the_loaded_results(runs):
    path = runs / "evals/times-table--careful-7b/3fa9c1d2"
    index = RowIndex(path / "results.jsonl")
    index.read()
    loaded = {(o["example_id"], o["sibling"]): o for o in load_results(path).outputs}
    assert len(index) == len(loaded) == 36
    for number, (example, sibling) in enumerate(
        zip(index.columns["example"], index.columns["sibling"], strict=True)
    ):
        output = loaded[example, sibling]
        assert index.columns["reward"][number] == output["reward"]
        assert index.columns["output_tokens"][number] == output["token_usage"]["output_tokens"]
        assert index.columns["turns"][number] == output["metrics"]["num_turns"]
        assert {name: values[number] for name, values in index.metrics.items()} == output["metrics"]
        row = index.row(number)
        assert row["completion"] == output["completion"]
        assert (
            row["trajectory"][-1]["tokens"]["completion_ids"]
            == output["trajectory"][-1]["tokens"]["completion_ids"]
        )


def test_only_what_is_new_is_read(tmp_path, monkeypatch):
    file, read, add = tmp_path / "results.jsonl", [], RowIndex._add
    monkeypatch.setattr(
        RowIndex, "_add", lambda index, body, end: (read.append(body), add(index, body, end))
    )
    journal(file, rows(0, 1))
    index = RowIndex(file)
    index.read()
    journal(file, rows(2))
    index.read()
    assert list(index.columns["example"]) == [0, 1, 2]
    assert len(read) == 3
    assert index.row(2)["example_id"] == 2


@pytest.mark.parametrize("max_rows", [3, 20])
def test_what_is_read_in_parts_and_restored_is_what_is_read_at_once(tmp_path, max_rows):
    """Also a metric and a name that come late, and lines between which others are empty."""
    made = [
        *rows(*range(10)),
        *(row | {"metrics": {"late": 0.5}, "task": "late"} for row in rows(*range(10, 20))),
    ]
    for name, write in (("journal", journal), ("plain", plain_lines)):
        file = tmp_path / name / "results.jsonl"
        file.parent.mkdir()
        write(file, made)
        at_once, parts = RowIndex(file), RowIndex(file)
        at_once.read()
        kept = IndexFile(parts)
        while not parts.is_complete or not len(parts):
            parts.read(max_rows=max_rows)
            kept.append()
        restored = RowIndex(file)
        IndexFile(restored).restore()
        assert len(restored) == (20 if name == "journal" else 0)
        restored.read()
        for index in (parts, restored):
            for column in ("columns", "metrics", "usage"):
                assert {n: str(list(values)) for n, values in getattr(index, column).items()} == {
                    n: str(list(values)) for n, values in getattr(at_once, column).items()
                }
            assert [str(index.row(n)) for n in range(20)] == [
                str(at_once.row(n)) for n in range(20)
            ]
        assert [str(parts.row(n)["answer"]) for n in range(20)] == [
            str(row["answer"]) for row in made
        ]


def test_an_index_is_not_written_through_a_link(tmp_path):
    """A run folder of somebody else may link it to any file of the reader's."""
    file, victim = tmp_path / "results.jsonl", tmp_path / "victim"
    journal(file, rows(*range(10)))
    victim.write_text("mine")
    (tmp_path / INDEX_NAME).symlink_to(victim)
    kept = IndexFile(open_index(file))
    with pytest.raises(OSError, match="symbolic link"):
        kept.append()
    assert victim.read_text() == "mine"
    (tmp_path / INDEX_NAME).unlink()
    os.mkfifo(tmp_path / INDEX_NAME)
    with pytest.raises(OSError, match=r"no regular file|No such device"):
        kept.append()
    (tmp_path / INDEX_NAME).unlink()
    kept.append()  # negative control
    assert (tmp_path / INDEX_NAME).stat().st_size > 0


def plain_lines(path, rows):
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")


@pytest.mark.parametrize("seed", range(20))
def test_a_column_is_a_list_whatever_the_types_of_its_blocks(seed):
    chance = random.Random(seed)
    kind = chance.choice(["f8", "i8", "i4"])
    high = chance.choice([0, 1, 100, 30_000, {"f8": 2**40, "i8": 2**62, "i4": 2**31 - 1}[kind]])
    special = [math.nan, math.inf, -math.inf, 1e-300, 0.1, -0.0] if kind == "f8" else []
    column, expected = Column(kind, block_rows=7), []
    while len(expected) < 60:
        values = [
            (
                chance.choice(special)
                if special and chance.random() < 0.3
                else chance.randint(-high, high)
            )
            for _ in range(chance.choice([0, 1, 5, 20]))
        ]
        column.extend(values)
        expected += [float(value) if kind == "f8" else value for value in values]
    last, rows = len(expected), [chance.randrange(60) for _ in range(30)]
    assert len(column) == last
    assert str(list(column)) == str(column[:]) == str(np.asarray(column).tolist()) == str(expected)
    assert str([column[n] for n in range(-last, last)]) == str(
        [expected[n] for n in range(-last, last)]
    )
    assert str(column[7:-3:2]) == str(expected[7:-3:2])
    assert str(list(Selection(column, np.array(rows)))) == str([expected[n] for n in rows])
    with pytest.raises(IndexError):
        column[last]


def test_an_integer_that_a_column_cannot_hold_is_refused():
    with pytest.raises(OverflowError):
        Column("i8", [2**63])
    assert Column("i8", [2**63 - 1])[:] == [2**63 - 1]  # negative control


@given(st.lists(st.none() | st.text("ab", min_size=1, max_size=3), max_size=20), st.integers(0, 20))
def test_columns_of_texts_are_lists_of_texts(texts, split):
    names, short = NameColumn(texts[:split]), Column("S", block_rows=4)
    names.codes.extend(names.encode(texts[split:]))
    for some in (texts[:split], texts[split:]):
        short.extend([(text or "").encode() for text in some])
    for column in (names, short):
        assert column[:] == list(column) == [column[n] for n in range(len(texts))] == texts
        assert list(Selection(column, np.arange(len(texts))[::-1])) == texts[::-1]


@given(st.lists(st.floats() | st.sampled_from([0.0, -0.0, 1.0, 0.5]), min_size=1, max_size=20))
@case([-0.0])
@case([-0.0, -0.0])
@case([0.0, -0.0, 1.0])
def test_a_number_is_what_was_added_to_the_sign_of_zero(values):
    assert list(map(repr, Column("f8", values))) == list(map(repr, values))


def test_a_reward_of_minus_zero_is_read_from_a_kept_index(tmp_path):
    file = tmp_path / "results.jsonl"
    journal(file, [row | {"reward": [-0.0, 0.0][n % 2]} for n, row in enumerate(rows(*range(10)))])
    index = open_index(file)
    IndexFile(index).append()
    for reading in (index, open_index(file)):
        assert str(list(reading.columns["reward"])) == str([-0.0, 0.0] * 5)


def test_the_index_of_many_rollouts_is_small(tmp_path, monkeypatch):
    file = tmp_path / "results.jsonl"
    with Journal.open(file) as opened:
        for start in range(0, 40_000, 1_000):
            keys = [
                f"{n * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128:032x}"
                for n in range(start, start + 1_000)
            ]
            opened.append_sync(
                [{"example_id": n, "rollout_key": key, "example_hash": key, "sibling": 0, "prompt": "q",
                  "completion": "a", "reward": n % 7 / 7, "metrics": {"exact": n % 2}, "timing": {"total_ms": n / 3},
                  "token_usage": {"input_tokens": n % 100, "output_tokens": n % 90}}
                 for n, key in enumerate(keys, start)]
            )  # fmt: skip

    def bytes_per_row():
        tracemalloc.start()
        index = RowIndex(file)
        index.read()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return held / len(index)

    assert bytes_per_row() < 100
    monkeypatch.setattr("verifiers.results.columns.smallest", lambda values, kind: values)
    assert bytes_per_row() > 180  # the negative control holds 64 bits of each number


def test_a_file_is_read_in_pieces(tmp_path):
    file = tmp_path / "results.jsonl"
    journal(file, rows(*range(20)))
    index = RowIndex(file)
    index.read(budget_s=0)
    assert len(index) == 1
    assert 0 < index.progress < 1
    while not index.is_complete:
        index.read(budget_s=0)
    assert list(index.columns["example"]) == list(range(20))


def test_an_unfinished_write_does_not_count_until_it_is_whole(tmp_path):
    file = tmp_path / "results.jsonl"
    journal(file, rows(0, 1))
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    index = RowIndex(file)
    index.read()
    assert len(index) == 1
    assert index.is_complete
    file.write_bytes(content)
    index.read()
    assert len(index) == 2


def test_rows_written_together_count_together(tmp_path):
    file = tmp_path / "results.jsonl"
    with Journal.open(file) as opened:
        opened.append_sync(rows(0, 1, 2))
    content = file.read_bytes()
    file.write_bytes(b"".join(content.splitlines(keepends=True)[:2]))
    index = RowIndex(file)
    index.read()
    assert len(index) == 0
    file.write_bytes(content)
    index.read()
    assert [index.row(n)["example_id"] for n in range(3)] == [0, 1, 2]
    assert "write_part" not in index.row(0)


def test_of_a_rollout_run_again_the_newest_row_counts(tmp_path):
    file = tmp_path / "results.jsonl"
    journal(file, [*rows(0, 1), *rows(0)])
    index = RowIndex(file)
    index.read()
    assert index.replaced == [0]


@pytest.mark.parametrize("first_s", [0.0, 9.0])  # the second: the negative control
def test_the_first_rows_of_a_file_are_answered_sooner_than_the_others(
    tmp_path, monkeypatch, first_s
):
    monkeypatch.setattr("verifiers.view.library.FIRST_READ_S", first_s)
    folder = tmp_path / "outputs/evals/gsm8k--m/0a1b"
    folder.mkdir(parents=True)
    journal(folder / "results.jsonl", rows(*range(20)))
    (folder / "metadata.json").write_text(
        json.dumps({"env_id": "gsm8k", "model": "m", "avg_reward": 1.0})
    )
    library = Library(Catalog([tmp_path]))
    (run,) = library.runs()["runs"]
    first = library.columns(run["id"])
    assert (first["total"], first["complete"]) == ((1, False) if first_s == 0 else (20, True))
    then = library.columns(run["id"], first=first["total"], generation=first["generation"])
    assert (then["total"], then["complete"]) == (20, True)
    assert [*first["columns"]["example"], *then["columns"]["example"]] == list(range(20))


def test_a_file_written_anew_is_read_anew(tmp_path):
    file = tmp_path / "results.jsonl"
    journal(file, rows(0, 1))
    index = RowIndex(file)
    index.read()
    before = index.generation
    file.unlink()
    journal(file, rows(5))
    index.read()
    assert list(index.columns["example"]) == [5]
    assert index.generation != before


def test_damage_is_said_and_what_stands_before_it_is_shown(tmp_path):
    file = tmp_path / "results.jsonl"
    journal(file, rows(0, 1, 2))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1].replace(b"tower", b"power", 1) + lines[2])
    index = RowIndex(file)
    index.read()
    assert len(index) == 1
    assert f"{file}:2" in index.damage
    assert index.is_complete


def test_a_whole_journal_has_no_damage(tmp_path):
    """Negative control."""
    file = tmp_path / "results.jsonl"
    journal(file, rows(0, 1, 2))
    index = RowIndex(file)
    index.read()
    assert index.damage is None
    assert len(index) == 3


def test_rows_of_older_versions_are_read(tmp_path):
    folder = tmp_path / "outputs" / "evals" / "gsm8k--m" / "0a1b"
    folder.mkdir(parents=True)
    row = {"example_id": 3, "prompt": "2+2", "completion": "4", "answer": "4", "reward": 1, "correct_answer": 1.0,
           "total_ms": 12.0, "error": "ModelError('no')"}  # fmt: skip
    (folder / "results.jsonl").write_text(
        json.dumps(row) + "\n\n" + json.dumps(row | {"reward": None}) + "\n"
    )
    (folder / "metadata.json").write_text(
        json.dumps(
            {
                "env_id": "gsm8k",
                "model": "m",
                "avg_reward": 1.0,
                "avg_metrics": {"correct_answer": 1.0},
            }
        )
    )
    library = Library(Catalog([tmp_path]))
    (run,) = library.runs()["runs"]
    assert (run["env"], run["reward"], run["status"]) == ("gsm8k", 1.0, "finished")
    answer = library.columns(run["id"])
    assert answer["metrics"] == {"correct_answer": [1.0, 1.0]}
    assert answer["columns"]["total_ms"] == [12.0, 12.0]
    assert answer["columns"]["error"]["names"] == ["ModelError"]
    assert math.isnan(answer["columns"]["reward"][1])
    assert [m["role"] for m in library.rollout(run["id"], 1)["messages"]] == ["text", "assistant"]


def test_text_is_searched_however_json_spells_it(tmp_path):
    file = tmp_path / "results.jsonl"
    made = rows(0, 1, 2)
    made[1]["completion"] = [{"role": "assistant", "content": 'She said "Grüße"\nand left'}]
    journal(file, made)
    index = RowIndex(file)
    index.read()
    for text in ("grüße", 'said "gr', "SHE SAID", '"\nand'):
        assert index.search(text) == ([1], 3)
    assert index.search("total_ms") == ([], 3)  # a key, not a text
    assert index.search("question")[0] == [0, 1, 2]


def test_a_search_goes_on_where_it_stopped(tmp_path):
    file = tmp_path / "results.jsonl"
    journal(file, rows(*range(5)))
    index = RowIndex(file)
    index.read()
    matches, first = [], 0
    while first < len(index):
        some, first = index.search("question", first, budget_s=0)
        matches += some
    assert matches == [0, 1, 2, 3, 4]


def test_a_row_that_is_not_there_is_a_lookup_error(tmp_path):
    file = tmp_path / "results.jsonl"
    journal(file, rows(0))
    index = RowIndex(file)
    index.read()
    for number in (-1, 1):
        with pytest.raises(LookupError):
            index.row(number)


def test_keys_of_info_are_columns_on_demand(tmp_path):
    file = tmp_path / "results.jsonl"
    infos = [
        {"level": 1, "kind": "a", "deep": {"x": 1}},
        {"level": 2.5, "deep": [1]},
        {},
        '{"level": 4}',
    ]
    journal(file, [row | {"info": info} for row, info in zip(rows(0, 1, 2, 3), infos, strict=True)])
    index = RowIndex(file)
    index.read()
    assert index.info_names() == ["info.level", "info.kind"]
    assert index.info_values("info.level") == ([1, 2.5, None, 4], 4)
    assert index.info_values("info.deep", first=1)[0] == ["[1]", None, None]
    assert index.info_values("info.level", budget_s=0) == ([1], 1)
    with pytest.raises(ValueError, match=r"write info\.KEY"):
        index.info_values("level")
