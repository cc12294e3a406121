"""What leaves a run is the run: every format that can be read gives the rollouts back as they were."""

import json
import math
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import verifiers as vf
from support.any_rollouts import on_disk, rollouts
from support.atif_rollouts import KINDS, played
from verifiers.errors import ConfigError
from verifiers.results import GenerateOutputs, export, rows
from verifiers.results.rows import fill_advantages
from verifiers.runtime.failpoints import armed
from verifiers.testing import ScriptedClient
from verifiers.utils.save_utils import load_outputs, save_outputs

FORMATS = ("run", "x.jsonl", "x.parquet", "atif")


def saved_and_read(results, folder, name):
    if name == "atif":
        results.to_atif(folder / name)
    else:
        results.save(folder / name)
    return vf.load_results(folder / name)


def as_journal(outputs):
    """The rollouts as a journal gives them back."""
    read = [rows.saved_row(row, "x") for row in rows.journal_rows(outputs)]
    read.sort(key=lambda output: output["example_id"])
    fill_advantages(read)
    return [on_disk(output) for output in read]


def text_of(row):
    return json.dumps(row, sort_keys=True)


def read_back(results, folder, name):
    return [on_disk(output) for output in saved_and_read(results, folder, name).outputs]


@settings(max_examples=int(os.environ.get("VF_EXAMPLES", "25")), deadline=None)
@given(st.lists(rollouts(), min_size=1, max_size=4))
def test_every_rollout_comes_back_from_every_format_as_it_was(outputs):
    results = GenerateOutputs(outputs)
    expected = sorted(map(text_of, as_journal(outputs)))
    for name in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            read = read_back(results, Path(folder), name)
        assert sorted(map(text_of, read)) == expected, name


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_rollouts_of_environments_come_back_with_their_turns(kind, name, tmp_path):
    results = played(kind)
    read = saved_and_read(results, tmp_path, name)
    assert [on_disk(output) for output in read.outputs] == as_journal(results.outputs)
    assert as_journal(results.outputs) == list(map(on_disk, results.outputs))
    for before, after in zip(results.outputs, read.outputs, strict=True):
        turns = zip(before["trajectory"].turns, after["trajectory"].turns, strict=True)
        for played_turn, read_turn in turns:
            assert read_turn.full_ids().tolist() == played_turn.full_ids().tolist()
            assert read_turn.version == played_turn.version
            logprobs = (turn.sampler_logprobs.tolist() for turn in (played_turn, read_turn))
            assert next(logprobs) == pytest.approx(next(logprobs), abs=1e-7)


class Odd(vf.SingleTurnEnv):
    """State columns of several types, one of them long."""

    async def setup_state(self, state, **kwargs):
        state["log"] = [list(range(600_000)), "none", None][state["example_id"]]
        return state


@pytest.mark.parametrize("name", FORMATS)
def test_a_cell_of_many_values_is_read_and_no_key_of_info_appears(name, tmp_path):
    infos = [{"level": 1}, {"weight": 0.5, "tags": {"x": 1}}, {"tags": {"y": 2}, "none": None}]
    data = [{"question": f"{n}", "answer": "a", "info": info} for n, info in enumerate(infos)]
    env = Odd(dataset=data, rubric=vf.Rubric())
    results = env.evaluate(ScriptedClient("x"), "m", num_examples=-1, state_columns=["log"])
    read = saved_and_read(results, tmp_path, name)
    assert read["info"] == infos
    assert [len(read["log"][0]), *read["log"][1:]] == [600_000, "none", None]


def test_negative_control_the_columns_of_a_table_alone_add_keys(tmp_path):
    outputs = [rows.row_from_disk({"prompt": "q", "info": info}) for info in ({"a": 1}, {"b": 2})]
    GenerateOutputs(outputs).save(tmp_path / "x.parquet")
    table = parquet.read_table(tmp_path / "x.parquet")
    assert table["info"].to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": 2}]
    assert [row["info"] for row in export.read_parquet(tmp_path / "x.parquet")] == [
        {"a": 1},
        {"b": 2},
    ]


def test_a_parquet_file_of_an_older_version_is_read(tmp_path):
    row = {"example_id": 0, "prompt": [{"role": "user", "content": "q", "name": None}]}
    row |= {"completion": "a", "reward": 1.0, "info": '{"level": 1}', "metrics": {"exact": 1.0}}
    import pyarrow as pa

    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    (output,) = vf.load_results(tmp_path / "x.parquet").outputs
    assert (output.info, output.metrics, output.reward) == ({"level": 1}, {"exact": 1.0}, 1.0)


def test_a_remainder_of_another_shape_is_refused_by_name(tmp_path):
    import pyarrow as pa

    for remainder in ("5", '{"fields": [1]}', '{"absent": 5}', "{"):
        columns = {"prompt": ["q"], "reward": [1.0], export.REMAINDER: [remainder]}
        schema = pa.schema(
            pa.field(name, pa.array(values).type, metadata=export.JSON_TEXT)
            if name == export.REMAINDER
            else pa.field(name, pa.array(values).type)
            for name, values in columns.items()
        )
        parquet.write_table(pa.table(columns, schema=schema), tmp_path / "x.parquet")
        with pytest.raises(ConfigError, match=r"x\.parquet cannot be read as saved rollouts"):
            vf.load_results(tmp_path / "x.parquet")


def test_objects_whose_keys_are_data_do_not_become_columns(tmp_path):
    outputs = [
        rows.row_from_disk({"example_id": n, "prompt": "q", "reward": 1.0, "info": {f"k{n}": n}})
        for n in range(1200)
    ]
    GenerateOutputs(outputs).save(tmp_path / "x.parquet")
    assert str(parquet.read_schema(tmp_path / "x.parquet").field("info").type) == "string"
    assert vf.load_results(tmp_path / "x.parquet")["info"] == [{f"k{n}": n} for n in range(1200)]


def test_two_rollouts_with_one_key_are_both_saved(tmp_path):
    (output,) = played("single").outputs
    double = [rows.RolloutOutput(output, example_hash="h", sibling=0) for _ in range(2)]
    for name in FORMATS:
        assert len(saved_and_read(GenerateOutputs(double), tmp_path, name)) == 2


def test_older_functions_save_the_turns_too(tmp_path):
    results = played("tools")
    save_outputs(results.outputs, tmp_path)
    (output,) = load_outputs(tmp_path)
    assert on_disk(output)["trajectory"] == on_disk(results.outputs[0])["trajectory"]


@pytest.mark.parametrize("name", [*FORMATS[:-1], "x.csv"])
def test_a_full_disk_leaves_the_old_file(name, tmp_path):
    results = played("single")
    target = tmp_path / name
    if name == "run":
        with pytest.raises(OSError, match="No space"), armed("replacing.before_rename:1:ENOSPC"):
            results.save(target)
        assert list(target.iterdir()) == []
        results.save(target)
        return
    target.write_bytes(b"old")
    with pytest.raises(OSError, match="No space"), armed("replacing.before_rename:1:ENOSPC"):
        results.save(target)
    assert (target.read_bytes(), os.listdir(tmp_path)) == (b"old", [name])


@pytest.mark.parametrize("name", ["x.parquet", "x.csv", "x.jsonl"])
def test_no_file_is_written_through_a_link(name, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for link in (name, f".{name}.tmp", f".{name}.{os.getpid()}.tmp"):
        (tmp_path / link).symlink_to(victim)
    played("single").save(tmp_path / name)
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / name).is_symlink()


def test_unknown_numbers_are_empty_cells_and_turns_are_json_in_csv(tmp_path):
    results = played("unscored")
    results.save(tmp_path / "x.csv")
    import pandas

    frame = pandas.read_csv(tmp_path / "x.csv")
    assert math.isnan(frame["reward"][0])
    (turn,) = json.loads(frame["trajectory"][0])
    assert turn["tokens"]["completion_ids"]
