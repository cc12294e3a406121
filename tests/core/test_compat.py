"""Every row of the tables of older spellings leads to the canonical one."""

import json
import logging

import pytest

import verifiers as vf
from support.small_envs import exact, row, single_turn
from verifiers import compat
from verifiers.options import COUNTS, SAMPLING_NAMES, RunOptions
from verifiers.testing import ByteTokenizer, ScriptedClient


@pytest.mark.parametrize(("old", "new"), compat.NAMES.items())
def test_older_names_of_the_package(old, new):
    assert getattr(vf, old) is getattr(vf, new)
    assert old not in vf.__all__


@pytest.mark.parametrize(("old", "new"), compat.RUN_OPTIONS.items())
def test_older_options(old, new):
    assert new in COUNTS or hasattr(RunOptions(), new)
    assert compat.rename({old: 3}, compat.RUN_OPTIONS) == {new: 3}


@pytest.mark.parametrize(("old", "new"), compat.SAMPLING_ARGS.items())
def test_older_sampling_arguments(old, new):
    assert {old, new} <= SAMPLING_NAMES
    assert compat.rename({old: 3}, compat.SAMPLING_ARGS) == {new: 3}


def test_tools_by_their_older_name():
    tool = vf.Tool("add")
    env = single_turn(oai_tools=[tool])
    assert env.oai_tools is env.tool_defs
    env.oai_tools = [tool, tool]
    assert len(env.tool_defs) == 2
    assert vf.State(row(), oai_tools=[tool])["tool_defs"] == [tool]


@pytest.mark.parametrize(
    ("given", "table"),
    [
        ({"max_tokens": 1, "max_new_tokens": 1}, compat.SAMPLING_ARGS),
        ({"group_size": 1, "num_generations": 1}, compat.RUN_OPTIONS),
    ],
)
def test_both_spellings_of_one_thing_are_refused(given, table):
    with pytest.raises(vf.ConfigError, match="older name"):
        compat.rename(given, table, "here")


def test_an_older_spelling_is_noted_once_per_process(caplog):
    compat.note.cache_clear()
    with caplog.at_level(logging.DEBUG, "verifiers.compat"):
        for _ in range(3):
            compat.rename({"group_size": 1}, compat.RUN_OPTIONS)
    assert [r.getMessage() for r in caplog.records] == ["group_size is the older spelling of rollouts_per_example"]


def test_constructor_parameters_of_a_class_and_its_bases():
    class Mine(vf.MultiTurnEnv):
        def __init__(self, board_size=3, **kwargs):
            super().__init__(**kwargs)

    names = compat.parameters_of(Mine)
    assert {"board_size", "max_turns", "dataset", "rubric"} <= set(names)
    assert "kwargs" not in names


@pytest.mark.parametrize(("old", "new"), compat.JUDGE_PARAMETERS.items())
def test_older_parameters_of_a_judge(old, new):
    value = ScriptedClient("x") if old == "client" else "{response}"
    given = {"template": "{response}", old: value}
    assert getattr(vf.JudgeRubric(**given), new) is value
    with pytest.raises(vf.ConfigError, match="older name"):
        vf.JudgeRubric(**{old: value, new: value})


def test_older_names_of_a_rubrics_methods():
    rubric = vf.Rubric(funcs=[exact], weights=[0.5])
    assert rubric._get_reward_func_names() == ["exact"]
    assert rubric._get_reward_funcs() == [exact]
    assert rubric._get_reward_weights() == [0.5]


def test_the_size_of_a_thread_pool_is_accepted():
    assert single_turn(max_workers=8).max_workers == 8


def test_the_tokenizer_by_its_older_name_and_by_both():
    env, client = single_turn(1), ScriptedClient("1")
    results = env.evaluate(client, "m")
    columns = {"prompts": results.prompt, "completions": results.completion, "states": results.state}
    columns["rewards"] = results.reward
    for method in (env.process_env_results, env.process_env_results_vllm):
        processed = method(**columns, processing_class=ByteTokenizer(), max_seq_len=-1)
        assert processed.source == ["retokenised"]


def test_keys_of_the_state_that_are_computed():
    state = single_turn(1).rollout(row(), ScriptedClient("1"), "m")
    assert (state["id"], state["turn"], len(state["responses"])) == (0, 1, 1)


def test_seconds_and_milliseconds_are_both_written():
    metadata = single_turn(1).evaluate(ScriptedClient("1"), "m").metadata
    assert metadata["time_ms"] == metadata["time"] * 1000 > 0


def test_a_metric_of_older_files_has_its_present_name(tmp_path):
    older = {"example_id": 0, "prompt": [], "completion": [], "reward": 1.0, "correct_answer_reward_func": 1.0}
    (tmp_path / "results.jsonl").write_text(json.dumps(older) + "\n")
    (tmp_path / "metadata.json").write_text(json.dumps({"avg_metrics": {"correct_answer_reward_func": 1.0}}))
    results = vf.load_results(tmp_path)
    assert results["metrics"] == {"correct_answer": [1.0]}
    assert "correct_answer_reward_func" not in results.outputs[0]
