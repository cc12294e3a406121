"""A folder of runs is read as one result."""

import pytest

import verifiers as vf
from support.small_envs import add_one, single_turn
from verifiers.storage.directory import evaluations_below
from verifiers.testing import ScriptedClient


@pytest.fixture
def folder_of_runs(tmp_path):
    for env_id, model, count in (("sums", "m", 3), ("sums", "n", 3), ("words", "m", 2)):
        env = single_turn(count, env_id=env_id)
        env.env_args = {"count": count}
        reply = add_one if model == "m" else (lambda _: "?")
        folder = tmp_path / "runs" / "evals" / f"{env_id}--{model}" / "1f00"
        env.evaluate(
            ScriptedClient(reply),
            model,
            num_examples=-1,
            rollouts_per_example=2,
            results_path=folder,
            state_columns=["trajectory"],
        )
    return tmp_path / "runs"


def test_rollouts_of_a_folder_of_runs_say_environment_arguments_and_model(folder_of_runs):
    results = vf.load_results(folder_of_runs)
    assert len(results) == 16
    assert results["run_path"][::6] == [
        "evals/sums--m/1f00",
        "evals/sums--n/1f00",
        "evals/words--m/1f00",
    ]
    assert results["env_id"] == ["sums"] * 12 + ["words"] * 4
    assert results["env_args"][0] == {"count": 3}
    frame = results.to_pandas()
    means = frame.groupby(["env_id", "env_args", "model"])["reward"].mean().to_dict()
    assert means == {
        ("sums", '{"count": 3}', "m"): 1.0,
        ("sums", '{"count": 3}', "n"): 0.0,
        ("words", '{"count": 2}', "m"): 1.0,
    }


def test_siblings_are_of_one_run_though_two_runs_have_the_same_examples(folder_of_runs):
    facts = vf.load_results(folder_of_runs).metadata
    assert (facts.num_examples, facts.rollouts_per_example, facts.num_rollouts) == (8, 2, 16)
    assert facts.pass_at_k["1"] == facts.avg_reward == pytest.approx(10 / 16)
    assert (facts.env_id, facts.status) == ("", "complete")
    assert {"run_path", "env_id", "env_args", "model", "trajectory"} <= {*facts.state_columns}


def test_settings_in_which_the_runs_agree_are_those_of_the_results(folder_of_runs):
    facts = vf.load_results(folder_of_runs / "evals" / "sums--m").metadata
    assert (facts.env_id, facts.model, facts.env_args) == ("sums", "m", {"count": 3})


@pytest.mark.parametrize("name", ["copy", "copy.jsonl", "copy.parquet"])
def test_results_of_several_runs_are_saved_and_read_again(folder_of_runs, tmp_path, name):
    results = vf.load_results(folder_of_runs)
    results.save(tmp_path / name)
    again = vf.load_results(tmp_path / name)
    for column in ("run_path", "model", "env_args"):
        pairs = zip(results["example_ids"], results["rewards"], results[column], strict=True)
        read = zip(again["example_ids"], again["rewards"], again[column], strict=True)
        assert sorted(map(str, read)) == sorted(map(str, pairs))
    assert again.metadata.pass_at_k == results.metadata.pass_at_k


def test_a_run_and_a_folder_of_trajectories_are_read_as_before(folder_of_runs, tmp_path):
    run = vf.load_results(folder_of_runs / "evals" / "sums--m" / "1f00")
    assert "run_path" not in run
    run.to_atif(tmp_path / "trajectories")
    read = vf.load_results(tmp_path / "trajectories")
    assert (len(read), "run_path" in read) == (6, False)


def test_a_folder_without_runs_says_what_may_be_read(tmp_path):
    with pytest.raises(vf.ConfigError, match="a folder of them"):
        vf.load_results(tmp_path)


def test_runs_are_searched_where_runs_may_be(tmp_path):
    for name in ("b/1", "a/2", "a/2/inner", ".hidden/1", "checkpoint-5/1", "node_modules/1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "results.jsonl").touch()
    assert evaluations_below(tmp_path) == [tmp_path / "a/2", tmp_path / "b/1"]
    assert evaluations_below(tmp_path / "missing") == []
