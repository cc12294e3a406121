"""Results of a large file: equal to those in memory, without holding its texts."""

from __future__ import annotations

import json
import math
import pickle
import tracemalloc
from functools import partial

import pytest

import verifiers as vf
from core.results.test_results import disk_row, failed_reward, write_journal
from verifiers.errors import ConfigError, JournalError, ModelUnavailable
from verifiers.results import GenerateOutputs, export, load_results, loading
from verifiers.results.labels import completion_hash, write_label
from verifiers.results.rows import row_for_disk, row_from_disk, state_to_output
from verifiers.results.stored import StoredOutputs
from verifiers.runtime import bounded
from verifiers.storage import journal

NAN = math.nan


@pytest.fixture
def load(monkeypatch):
    """Load a folder twice: (in memory, on disk)."""

    def twice(path, **settings):
        in_memory = load_results(path, **settings)
        with monkeypatch.context() as patch:
            patch.setattr(loading, "LARGE_BYTES", 0)
            on_disk = load_results(path, **settings)
        assert type(in_memory) is GenerateOutputs
        assert type(on_disk) is StoredOutputs
        return in_memory, on_disk

    return twice


def mixed_run(folder):
    """Siblings out of order, one run again, one failed, one unscored, one with a
    column of its own."""
    rows = [
        disk_row(example, reward, sibling)
        for example, sibling, reward in [(1, 1, 0.5), (0, 1, 1.0), (1, 0, 0.25)]
    ]
    rows.append(disk_row(2, NAN, 0, error=ModelUnavailable("down")))
    rows.append(disk_row(0, NAN, 0, error=ModelUnavailable("down")))
    rows.append(disk_row(2, NAN, 1, error=failed_reward("flaky")))
    rows.append(disk_row(0, 0.0, 0))
    rows[0]["board"] = "x"
    write_journal(folder, rows)
    return rows


def test_columns_statistics_and_rollouts_are_those_of_results_in_memory(tmp_path, load):
    rows = mixed_run(tmp_path)
    write_label(tmp_path, rows[1], True)
    assert completion_hash(rows[1]["completion"])
    in_memory, on_disk = load(tmp_path)
    for name in [*in_memory.keys(), "label", "board"]:
        if name != "states":
            assert str(on_disk[name]) == str(in_memory[name]), name
    assert str(on_disk.metadata) == str(in_memory.metadata)
    assert str(on_disk.summary()) == str(in_memory.summary())
    assert [str(row) for row in on_disk.rollouts()] == [str(row) for row in in_memory.outputs]
    assert "outputs" not in vars(on_disk), "something read all rollouts"
    assert [str(row) for row in on_disk.outputs] == [str(row) for row in in_memory.outputs]
    assert on_disk.outputs is on_disk.outputs
    assert str(on_disk["completions"]) == str(in_memory["completions"])
    assert len(pickle.loads(pickle.dumps(on_disk))) == len(in_memory) == 6


def test_state_columns_and_rollouts_outside_the_plan_are_left_out(tmp_path, load):
    rows = mixed_run(tmp_path)
    (tmp_path / "metadata.json").write_text(json.dumps({"outside_plan": [rows[0]["rollout_key"]]}))
    in_memory, on_disk = load(tmp_path, state_columns=["nothing"])
    assert len(on_disk) == len(in_memory) == 5
    assert [row.keys() for row in on_disk.rollouts()] == [row.keys() for row in in_memory.outputs]
    with pytest.raises(KeyError, match="board"):
        on_disk["board"]


def test_independent_scoring_leaves_advantages_unknown(tmp_path, load):
    mixed_run(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"fingerprint": "f", "config": {"independent_scoring": true}, "noted": {}}'
    )
    in_memory, on_disk = load(tmp_path)
    assert on_disk["advantages"] == in_memory["advantages"] == [None] * 6


def test_a_damaged_line_is_refused_when_the_file_is_loaded(tmp_path, monkeypatch):
    mixed_run(tmp_path)
    file = tmp_path / "results.jsonl"
    file.write_bytes(file.read_bytes().replace(b"question 1", b"question 9", 1))
    for size in (0, 10**9):
        monkeypatch.setattr(loading, "LARGE_BYTES", size)
        with pytest.raises(JournalError, match=r"results.jsonl:1"):
            load_results(file)


def test_a_parquet_file_is_the_same_from_both_and_has_a_type_for_every_column(
    tmp_path, load, monkeypatch
):
    from pyarrow import parquet

    rows = mixed_run(tmp_path / "run")
    rows[0] |= {"answer": 7}
    write_journal(tmp_path / "mixed", rows)  # the answer is a number once, else a text
    monkeypatch.setattr(export, "BATCH_SIZE", 2)
    for name in ("run", "mixed"):
        in_memory, on_disk = load(tmp_path / name)
        in_memory.save(tmp_path / "memory.parquet")
        on_disk.save(tmp_path / "disk.parquet")
        table = parquet.read_table(tmp_path / "disk.parquet")
        assert table.equals(parquet.read_table(tmp_path / "memory.parquet"))
        assert str(table["reward"].type) == "double"
        assert table["reward"].to_pylist() == [0.0, 1.0, 0.25, 0.5, None, None]
        assert table["completion"][0].as_py()[0]["content"] == "answer 0.0"
        assert table["board"].to_pylist() == [None, None, None, "x", None, None]
        again = load_results(tmp_path / "disk.parquet")
        for before, after in zip(in_memory.outputs, again.outputs, strict=True):
            assert {n: str(v) for n, v in before.items() if v is not None and v == v} == {
                n: str(v) for n, v in after.items() if v is not None and v == v
            }
    assert table["answer"].to_pylist() == ['"0"', '"0"', '"1"', "7", '"2"', '"2"']
    assert not list(tmp_path.glob(".*"))


def test_another_parquet_file_is_refused_by_name(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match=r"rows.parquet cannot be read as saved rollouts"):
        load_results(tmp_path / "rows.parquet")


@pytest.mark.parametrize(("late", "num_reads"), [({}, 1), ({"board": "x"}, 2), ({"answer": 7}, 2)])
def test_a_parquet_file_is_written_in_one_reading_unless_later_rollouts_have_other_types(
    tmp_path, monkeypatch, late, num_reads
):
    from pyarrow import parquet

    monkeypatch.setattr(export, "BATCH_SIZE", 2)
    made, reads = [row_from_disk(disk_row(number, 0.5, 0)) for number in range(6)], []
    made[4] |= late
    export.save(lambda: reads.append(1) or iter(made), {}, tmp_path / "rows.parquet")
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert (len(reads), len(table)) == (num_reads, 6)
    for name, value in late.items():
        assert table[name][4].as_py() == str(value)
        assert table[name][0].as_py() != str(value)


def test_the_numbers_of_a_file_of_long_texts_take_little_memory(tmp_path, load):
    long = [disk_row(example, 0.5, 0) for example in range(300)]
    for row in long:
        row["completion"][0]["content"] = "x" * 20_000
    write_journal(tmp_path, long)

    def growth(size):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loading, "LARGE_BYTES", size)
            tracemalloc.start()
            results = load_results(tmp_path)
            assert results.reward == [0.5] * 300
            assert results.metadata.avg_reward == 0.5
            assert len(results) == 300
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            return held

    assert growth(0) < 1_000_000 < 6_000_000 < growth(10**9)  # the negative control holds the texts


def test_a_trajectory_gives_states(tmp_path, load):
    from core.results.test_results import state_of
    from verifiers.rollouts.state import TrajectoryStep
    from verifiers.types import AssistantMessage

    state = state_of(0, 1.0, trajectory=[TrajectoryStep(completion=[AssistantMessage("4")])])
    write_journal(tmp_path, [row_for_disk(state_to_output(state, ["trajectory"]), "hash0", 0)])
    in_memory, on_disk = load(tmp_path)
    assert "states" in on_disk
    assert on_disk["states"][0]["answer"] == in_memory["states"][0]["answer"] == "0"


def test_a_line_without_end_is_damage_and_not_an_unfinished_write(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "lines_of", partial(bounded.lines_of, max_bytes=2**20))
    with open(tmp_path / "results.jsonl", "wb") as file:
        file.truncate(loading.LARGE_BYTES)  # a hole: it takes no space on the disk
    with pytest.raises(JournalError, match=r"a line of .*results.jsonl is longer than 1 MiB"):
        vf.load_results(tmp_path)
    with open(tmp_path / "results.jsonl", "wb") as file:  # negative control
        file.write(b'{"example_id": 0')
    assert len(vf.load_results(tmp_path)) == 0
