"""Names of the record belong to the library: a metric or a state column of such a name collides
with nothing, or is refused before the first request."""

import pytest

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.results import make_dataset
from verifiers.results.index import RowIndex
from verifiers.results.rows import COLUMNS_OF_RUNS, OWN_NAMES, row_for_disk
from verifiers.rollouts.rollout import SAVED
from verifiers.runs.rescoring import rescore
from verifiers.storage.journal import Journal
from verifiers.testing import ScriptedClient

KEPT_WITH_IT = ("example_id", "prompt", "reward", "sibling", "attempts", "rollout_key")


def env_with_metric(name):
    def named(completion):
        return 0.25

    def other(completion):
        return 0.5

    named.__name__ = name
    rows = [{"question": f"{n}", "answer": "a"} for n in range(2)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[named, other]))


@pytest.mark.parametrize("name", sorted(OWN_NAMES))
def test_a_metric_of_such_a_name_is_saved_and_read_as_it_was(name, tmp_path):
    env, client = env_with_metric(name), ScriptedClient("x")
    run = env.evaluate(client, "m", rollouts_per_example=2, results_path=tmp_path / "run")
    read = vf.load_results(tmp_path / "run")
    expected = {name: 0.25, "other": 0.5, "num_turns": 1.0}
    assert [dict(row.metrics) for row in read.outputs] == [expected] * 4
    assert read["rewards"] == run["rewards"] == [0.75] * 4
    assert [row["sibling"] for row in read.outputs] == [0, 1, 0, 1]
    assert len({row["rollout_key"] for row in read.outputs}) == 4
    index = RowIndex(tmp_path / "run" / "results.jsonl")
    index.read()
    assert index.metrics[name][:] == [0.25] * 4
    read.save(tmp_path / "x.parquet")
    again = vf.load_results(tmp_path / "x.parquet")
    for key in KEPT_WITH_IT:
        assert [row[key] for row in again.outputs] == [row[key] for row in read.outputs]
    env.evaluate(client, "m", rollouts_per_example=2, results_path=tmp_path / "run")
    assert len(client.requests) == 4


def test_a_data_set_has_the_metric_of_such_a_name():
    results = env_with_metric("sibling").evaluate(ScriptedClient("x"), "m")
    assert make_dataset(results)["sibling"][:] == [0.25, 0.25]


@pytest.mark.parametrize("name", sorted(COLUMNS_OF_RUNS))
def test_a_state_column_of_what_a_run_writes_is_refused_before_the_first_request(name, tmp_path):
    client = ScriptedClient("x")
    with pytest.raises(ConfigError, match=f"state_columns names '{name}'"):
        env_with_metric("exact").evaluate(
            client, "m", state_columns=[name], results_path=tmp_path / "run"
        )
    assert client.requests == []
    assert not (tmp_path / "run").exists()


def test_a_state_column_and_a_metric_of_one_name_are_both_read(tmp_path):
    class Env(vf.SingleTurnEnv):
        async def setup_state(self, state, **kwargs):
            state["exact"] = "by hand"
            return state

    env = Env(dataset=[{"question": "q", "answer": "a"}], rubric=env_with_metric("exact").rubric)
    env.evaluate(ScriptedClient("x"), "m", state_columns=["exact"], results_path=tmp_path)
    (row,) = vf.load_results(tmp_path).outputs
    assert (row["exact"], row.metrics["exact"]) == ("by hand", 0.25)


async def test_a_run_whose_server_changed_the_models_name_is_scored_again(tmp_path):
    env = env_with_metric("exact")
    results = env.evaluate_sync(ScriptedClient("x"), "m", results_path=tmp_path / "first")
    rows = [{**row, "served_models": ["m-2"]} for row in results.outputs]
    (tmp_path / "run").mkdir()
    with Journal.open(tmp_path / "run" / "results.jsonl") as journal:
        journal.append_sync([row_for_disk(row, f"{n:064x}", 0) for n, row in enumerate(rows)])
    again = await rescore(env, tmp_path / "run")
    assert [row["served_models"] for row in again.outputs] == [["m-2"]] * 2


def test_every_field_of_the_record_is_such_a_name():
    assert SAVED.keys() < OWN_NAMES
