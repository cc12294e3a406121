"""Results: every spelling of a column, the summary, files and datasets."""

import csv
import json
import math
import pickle
import runpy

import pyarrow
import pytest
from pyarrow import parquet

import verifiers as vf
from verifiers.errors import ConfigError, JournalError, ModelUnavailable, ScoringError, UsageError
from verifiers.results import (
    GenerateMetadata,
    GenerateOutputs,
    fill_advantages,
    load_results,
    make_dataset,
    print_prompt_completions_sample,
)
from verifiers.results.atif import to_trajectory
from verifiers.results.index import RowIndex
from verifiers.results.rows import row_for_disk, state_to_output
from verifiers.results.texts import cause_text, number_lines
from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rollouts.state import State, TrajectoryStep, TrajectoryStepTokens
from verifiers.runtime.json import encode_row
from verifiers.storage.journal import Journal
from verifiers.testing import ScriptedClient
from verifiers.types import AssistantMessage, UserMessage
from verifiers.view.rollout import page

NAN = math.nan
BOARD = """
import verifiers as vf

class Game(vf.MultiTurnEnv):
    async def env_response(self, messages, state):
        if int(messages[0].content) % 2:
            return state["board"]
        raise ValueError(f"no move {messages[0].content}")
"""


def state_of(example, reward, **more):
    error = more.pop("error", None)
    state = State(
        prompt=[UserMessage(f"question {example}")],
        completion=[AssistantMessage(f"answer {reward}")],
        answer=str(example),
        info={"level": example},
        example_id=example,
        reward=reward,
        metrics={"exact": reward},
        stop_condition="max_turns_reached",
        usage={"input_tokens": 10, "output_tokens": 2},
        timing={"total_ms": 100.0 * (example + 1)},
        **more,
    )
    state["error"] = error
    return state


def failed_reward(name):
    error = ScoringError("no", function=name)
    error.__cause__ = ConnectionError("refused")
    return error


def four_states():
    return [
        state_of(0, 1.0),
        state_of(0, 0.0),
        state_of(1, NAN, error=failed_reward("flaky")),
        state_of(1, NAN, error=ModelUnavailable("down")),
    ]


def results_of(states, columns=(), **facts):
    outputs = [state_to_output(state, columns) for state in states]
    fill_advantages(outputs)
    metadata = GenerateMetadata.of(outputs, state_columns=list(columns), **facts)
    return GenerateOutputs(outputs, metadata, states)


# --- columns


def test_a_column_reads_in_every_spelling():
    results = results_of(four_states())
    assert results["rewards"] is results["reward"] is results.rewards is results.reward
    assert results["rewards"][:2] == [1.0, 0.0]
    assert results["states"][0] is results.state[0]
    assert results["example_ids"] == [0, 0, 1, 1]
    assert results["metrics"]["exact"][:2] == [1.0, 0.0]
    assert results.get("completions")[1][0].content == "answer 0.0"
    assert [error and error.error for error in results.errors] == [
        None,
        None,
        "ScoringError",
        "ModelUnavailable",
    ]


def test_the_seeds_uses_work():
    results = results_of(four_states()[:2])
    assert sum(results["rewards"]) / len(results["rewards"]) == 0.5
    prompts, completions, rewards = results
    assert (prompts, completions, rewards) == (
        results["prompt"],
        results["completion"],
        results["reward"],
    )
    assert len(results) == 2


def test_results_behave_as_a_mapping_of_columns():
    results = results_of(four_states())
    assert "rewards" in results and "reward" in results and "nothing" not in results  # noqa: PT018
    assert dict(results).keys() == set(results.keys())
    assert results.get("nothing", 7) == 7
    with pytest.raises(KeyError, match="no column 'nothing'"):
        results["nothing"]
    with pytest.raises(AttributeError, match="no 'nothing'"):
        results.nothing


def test_metrics_a_rollout_does_not_have_are_unknown():
    states = four_states()[:2]
    states[1]["metrics"] = {"other": 0.5}
    assert str(results_of(states)["metrics"]) == str({"exact": [1.0, NAN], "other": [NAN, 0.5]})


def test_results_pickle():
    results = pickle.loads(pickle.dumps(results_of(four_states())))
    assert results["rewards"][:2] == [1.0, 0.0]


def test_state_columns_are_columns():
    states = [state_of(0, 1.0, board="x")]
    results = results_of(states, ["board"])
    assert results["board"] == ["x"]
    assert "board" in results


def test_states_that_were_not_kept_are_refused_with_the_way_to_keep_them():
    results = GenerateOutputs([state_to_output(state) for state in four_states()])
    assert "states" not in results
    assert "state" not in results
    with pytest.raises(UsageError, match="keep_states=True"):
        results["states"]


# --- statistics


def test_metadata_counts_failures_and_unknown_rewards_apart():
    metadata = results_of(four_states(), env_id="sums").metadata
    assert (metadata.num_rollouts, metadata.num_errors, metadata.num_unscored) == (4, 1, 1)
    assert (metadata.avg_reward, metadata.avg_error, metadata["avg_metrics"]) == (
        0.5,
        0.25,
        {"exact": 0.5},
    )
    assert (metadata.num_examples, metadata.rollouts_per_example) == (2, 2)
    assert metadata.pass_at_k == {"1": 0.5, "2": 1.0}
    assert metadata.pass_all_k == {"1": 0.5, "2": 0.0}
    # a mean; the summary has the sums
    assert metadata.usage == {"input_tokens": 10.0, "output_tokens": 2.0}
    assert results_of(four_states()).summary()["usage"] == {"input_tokens": 40, "output_tokens": 8}
    assert metadata.stop_conditions == {"max_turns_reached": 4}


def test_the_summary_says_how_many_examples_are_behind_each_k_and_what_unknown_ones_leave_open():
    states = [state_of(example, reward) for example in range(3) for reward in (1.0, 0.0)]
    states[0] = state_of(0, NAN)
    facts = results_of(states, rollouts_per_example=2).summary()
    assert facts["pass_at_k_examples"] == {"1": 3, "2": 2}
    assert (facts["pass_at_k_unknown"], facts["pass_at_k"]["1"]) == (1, pytest.approx(1 / 3))
    lines = dict(number_lines(facts))
    assert lines["pass@k"].endswith("(2 of 3 examples)")
    assert lines["unknown"] == (
        "1 of 6 rollouts, in no pass@k: 1: 0.333 to 0.500  2: 0.667 to 1.000 were they all"
        " unsolved, or all solved"
    )
    # negative control
    complete = results_of(states[2:], rollouts_per_example=2).summary()
    lines = dict(number_lines(complete))
    assert "examples" not in lines["pass@k"]
    assert "unknown" not in lines


def test_counts_of_tokens_that_are_all_unknown_have_a_mean_of_nothing():
    outputs = results_of(four_states()).outputs
    for output in outputs:
        output["token_usage"] = {"input_tokens": None}
    assert GenerateMetadata.of(outputs).usage == {"input_tokens": 0.0}


def test_a_graded_reward_is_no_success_and_has_no_pass_at_k():
    states = [state_of(number, 0.7) for number in range(3)] * 2
    metadata = results_of(states, rollouts_per_example=2).metadata
    assert metadata.pass_at_k == metadata.pass_at_k_interval == {}
    assert math.isnan(metadata.avg_success)
    assert results_of(states).summary()["avg_success"] is None
    # negative control
    explicit = results_of(states, rollouts_per_example=2, pass_threshold=0.5).metadata
    assert (explicit.pass_at_k["1"], explicit.avg_success) == (1.0, 1.0)


def test_the_success_metric_counts_and_not_the_reward():
    states = [state_of(number, 0.9) for number in range(4)]
    for number, state in enumerate(states):
        state["metrics"]["success"] = float(number == 0)
    metadata = results_of(states, success_metric="exact", pass_threshold=0.5).metadata
    assert (metadata.avg_success, metadata.success_metric, metadata.avg_reward) == (
        0.25,
        "exact",
        0.9,
    )


def test_a_reward_failing_on_a_tenth_is_in_no_mean():
    states = [state_of(n, 1.0) for n in range(9)] + [state_of(9, NAN, error=failed_reward("flaky"))]
    summary = results_of(states).summary()
    assert summary["avg_reward"] == 1.0
    assert (summary["num_unscored"], summary["num_errors"]) == (1, 0)
    assert summary["unscored"] == {"ConnectionError in flaky": 1}


def test_without_a_known_reward_the_mean_is_unknown():
    metadata = results_of([state_of(0, NAN)]).metadata
    assert math.isnan(metadata.avg_reward)
    assert results_of([state_of(0, NAN)]).summary()["avg_reward"] is None


def test_the_summary_is_json_with_the_promised_fields():
    summary = results_of(four_states(), model="m", time=2.0, path_to_save="/runs/1").summary()
    json.dumps(summary, allow_nan=False)
    promised = (
        "env_id model base_url path num_examples rollouts_per_example num_rollouts num_errors"
        " num_unscored avg_reward reward_stderr avg_metrics pass_at_k pass_all_k stop_conditions"
        " errors usage latency seconds resumed env_args sampling_args"
    )
    assert set(promised.split()) <= summary.keys()
    assert summary["errors"] == {"ModelUnavailable": 1}
    assert (summary["path"], summary["seconds"]) == ("/runs/1", 2.0)
    assert summary["latency"] == {
        "median_ms": 150.0,
        "p95_ms": 200.0,
        "p99_ms": 200.0,
        "max_ms": 200.0,
    }


def test_errors_are_counted_by_message_and_line_of_the_authors_code(tmp_path):
    (tmp_path / "sums.py").write_text(BOARD)
    rows = [{"question": str(n)} for n in range(6)]
    game = runpy.run_path(str(tmp_path / "sums.py"))["Game"]
    env = game(dataset=rows, max_turns=2, rubric=vf.Rubric([lambda state: 1.0]))
    summary = env.evaluate(ScriptedClient("x"), "m", rollouts_per_example=1).summary()
    assert summary["errors"] == {"EnvironmentFault": 6}
    assert summary["error_causes"] == {
        "EnvironmentFault: env_response raised KeyError: 'board' (sums.py:7)": 3,
        "EnvironmentFault (sums.py:8)": 3,  # three messages
    }
    assert (
        "3 × EnvironmentFault: env_response raised KeyError"
        in dict(number_lines(summary))["errors"]
    )


def test_few_causes_are_listed_and_the_rest_is_counted():
    text = cause_text({f"Fault{n}": 10 - n for n in range(8)})
    assert text.endswith("6 × Fault4; 12 × others")
    assert "others" not in cause_text({"Fault": 3})


def test_a_frame_of_a_library_is_not_the_authors_line():
    with pytest.raises(ValueError) as caught:  # the deepest frames are those of json
        json.loads("{")
    assert ErrorInfo.of(caught.value).author_line.startswith("test_results.py:")
    assert ErrorInfo.of(ValueError("never raised")).author_line is None


def test_an_unknown_fact_is_a_programming_error():
    with pytest.raises(TypeError, match="'env_idd'"):
        GenerateMetadata.of([], env_idd="x")


def test_advantages_given_by_an_author_stay():
    outputs = [state_to_output(state_of(0, 1.0, advantage=9.0)), state_to_output(state_of(0, NAN))]
    outputs += [state_to_output(state_of(1, 1.0)), state_to_output(state_of(1, 0.0))]
    fill_advantages(outputs)
    assert [o["advantage"] for o in outputs[2:]] == [0.5, -0.5]
    assert outputs[0]["advantage"] == 9.0
    assert math.isnan(outputs[1]["advantage"])


# --- files


@pytest.mark.parametrize("name", ["run", "rows.jsonl"])
def test_saved_results_are_read_again(tmp_path, name):
    results = results_of(four_states(), ["board"], env_id="sums", model="m")
    results.save(tmp_path / name)
    back = load_results(tmp_path / name)
    assert str(back["rewards"]) == str(results["rewards"])
    assert str(back["advantages"]) == str(results["advantages"])
    assert back["prompts"] == results["prompts"]
    assert back["metrics"].keys() == {"exact"}
    assert back.metadata.num_errors == 1
    if name == "run":
        assert (back.metadata.env_id, back.metadata.model) == ("sums", "m")
        json.loads((tmp_path / name / "metadata.json").read_text())


def test_a_directory_with_results_is_not_overwritten(tmp_path):
    results = results_of(four_states())
    results.save(tmp_path)
    with pytest.raises(ConfigError, match="already exists"):
        results.save(tmp_path)


def write_journal(folder, rows):
    folder.mkdir(exist_ok=True)
    with Journal.open(folder / "results.jsonl") as journal:
        for row in rows:
            journal.append_sync(row)


def disk_row(example, reward, sibling, **more):
    return row_for_disk(
        state_to_output(state_of(example, reward, **more)), f"hash{example}", sibling
    )


def test_rows_come_in_the_order_of_examples_and_siblings(tmp_path):
    write_journal(
        tmp_path,
        [disk_row(1, 0.5, 1), disk_row(0, 1.0, 1), disk_row(1, 0.25, 0), disk_row(0, 0.0, 0)],
    )
    assert load_results(tmp_path)["rewards"] == [0.0, 1.0, 0.25, 0.5]


def test_a_rollout_run_again_counts_once_with_its_newest_row(tmp_path):
    write_journal(
        tmp_path, [disk_row(0, NAN, 0, error=ModelUnavailable("down")), disk_row(0, 1.0, 0)]
    )
    results = load_results(tmp_path / "results.jsonl")
    assert results["rewards"] == [1.0]
    assert results.metadata.num_errors == 0


def test_advantages_that_were_not_stored_are_computed_from_the_group(tmp_path):
    write_journal(tmp_path, [disk_row(0, 1.0, 0), disk_row(0, 0.0, 1), disk_row(0, NAN, 2)])
    advantages = load_results(tmp_path)["advantages"]
    assert advantages[:2] == [0.5, -0.5]
    assert math.isnan(advantages[2])


def test_an_independently_scored_run_has_no_advantages(tmp_path):
    write_journal(tmp_path, [disk_row(0, 1.0, 0), disk_row(0, 0.0, 1)])
    config = {"fingerprint": "f", "config": {"independent_scoring": True}, "noted": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_results(tmp_path)["advantages"] == [None, None]


def test_only_the_asked_state_columns_are_kept(tmp_path):
    results_of([state_of(0, 1.0, board="x", notes="y")], ["board", "notes"]).save(tmp_path / "run")
    output = load_results(tmp_path / "run", state_columns=["board"]).outputs[0]
    assert "board" in output
    assert "notes" not in output


def test_states_are_made_from_rows_with_a_trajectory(tmp_path):
    tokens = TrajectoryStepTokens([1, 2], [3], [-0.5])
    state = state_of(
        0, 1.0, trajectory=[TrajectoryStep(completion=[AssistantMessage("4")], tokens=tokens)]
    )
    results_of([state], ["trajectory"]).save(tmp_path / "run")
    loaded = load_results(tmp_path / "run")
    assert loaded["states"][0]["trajectory"][0]["tokens"]["completion_ids"] == [3]
    assert loaded["states"][0]["answer"] == "0"


def test_a_damaged_plain_file_is_refused_with_its_line(tmp_path):
    file = tmp_path / "results.jsonl"
    good = encode_row(state_to_output(state_of(0, 1.0))) + b"\n"
    file.write_bytes(good + b"{broken\n" + good)
    with pytest.raises(JournalError, match=r"results.jsonl:2"):
        load_results(file)
    file.write_bytes(good + b'{"cut')
    assert len(load_results(file)) == 1


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match="nowhere"):
        load_results("nowhere")


def test_a_run_of_an_older_version_is_read(tmp_path):
    row = {
        "example_id": 0,
        "prompt": "2+2",
        "completion": "4",
        "reward": 1.0,
        "correct_answer_reward_func": 1.0,
    }
    (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "metadata.json").write_text(
        json.dumps(
            {
                "env_id": "old",
                "model": "m",
                "avg_metrics": {"correct_answer_reward_func": 1.0},
                "surprise": 1,
            }
        )
    )
    results = load_results(tmp_path)
    assert results["metrics"] == {"correct_answer": [1.0]}
    assert results.metadata.env_id == "old"


# --- datasets


def test_a_dataset_of_results_has_the_promised_columns():
    dataset = make_dataset(results_of(four_states(), ["board"]), state_columns=["board"])
    assert dataset.column_names == [
        *"example_id prompt completion answer task info reward average_reward metrics error".split(),
        "exact",
        "board",
    ]
    assert dataset["reward"][:] == [1.0, 0.0, None, None]
    assert dataset["average_reward"][:] == [0.5, 0.5, None, None]
    assert dataset[0]["prompt"] == [{"role": "user", "content": "question 0"}]


def test_publication_needs_a_name():
    with pytest.raises(ConfigError, match="hub_name"):
        make_dataset(results_of(four_states()), push_to_hub=True)


def test_a_column_the_rows_do_not_have_is_named():
    with pytest.raises(ConfigError, match="'board'"):
        make_dataset(results_of(four_states()), state_columns=["board"])


def test_columns_arrow_has_no_type_for_become_json_text(tmp_path):
    states = four_states()[:2]
    states[0]["answer"], states[1]["answer"] = 1, {"x": "y"}
    states[0]["info"] = states[1]["info"] = {}
    results = results_of(states)
    assert results.to_dataset()["answer"][:] == ["1", '{"x": "y"}']
    results.save(tmp_path / "rows.parquet")
    assert (tmp_path / "rows.parquet").stat().st_size > 0
    assert make_dataset(results)["info"][:] == ["{}", "{}"]


def test_a_lone_surrogate_is_in_every_table_as_its_escape(tmp_path):
    states, half = four_states()[:2], "a\ud800b"
    for state in states:
        state["answer"], state["info"] = half, {"k": [half], half: 1}
        state["completion"] = [{"role": "assistant", "content": half}]
    results, shown = results_of(states), r"a\ud800b"
    with pytest.raises(UnicodeEncodeError):  # negative control
        pyarrow.array([half])
    assert results.to_dataset()["answer"][:] == [shown] * 2
    assert make_dataset(results)[0]["completion"][0]["content"] == shown
    assert results.to_pandas()["info"][0] == {"k": [shown], shown: 1}
    assert results.to_arrow().column("answer").to_pylist() == [shown] * 2
    results.save(tmp_path / "rows.parquet")
    assert parquet.read_table(tmp_path / "rows.parquet")["answer"].to_pylist() == [shown] * 2
    results.save(tmp_path / "rows.csv")
    assert shown in (tmp_path / "rows.csv").read_text()
    results.to_dataset().save_to_disk(tmp_path / "disk")
    results.save(tmp_path / "run")
    assert vf.load_results(tmp_path / "run")["answer"] == [half] * 2  # a journal is exact


def test_a_lone_surrogate_of_a_setting_or_a_row_is_saved(tmp_path):
    half = "a\ud800b"
    rows = [{"question": half, "answer": half, "info": {half: half}}]
    env = vf.SingleTurnEnv(
        dataset=rows,
        eval_dataset=rows,
        system_prompt=half,
        rubric=vf.Rubric([lambda completion: 1]),
    )
    for _ in range(2):  # the second resumes
        results = env.evaluate(vf.testing.ScriptedClient(half), "m", results_path=tmp_path / "run")
    assert results["prompt"][0][0]["content"] == half
    row = env.get_dataset()[0]
    assert (row["answer"], json.loads(row["info"])) == (r"a\ud800b", {half: half})


# --- the printed sample


def test_a_sample_is_printed_with_control_characters_spelled_out(capsys):
    print_prompt_completions_sample(
        prompts=["q"],
        completions=[[AssistantMessage("\x1b[2Jok [bold]x[/bold]")]],
        errors=[{"error": "ToolError", "message": "bad"}],
        rewards=[NAN],
        step=3,
    )
    printed = capsys.readouterr().out
    assert "\x1b[2J" not in printed
    assert "[bold]x" in printed
    for part in ("Step 3", "ToolError", "unknown"):
        assert part in printed


def test_results_are_saved_as_csv_and_other_files_are_refused(tmp_path):
    results = results_of(four_states())
    results.save(tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    texts = [json.loads(row["completion"])[0]["content"] for row in rows]
    assert texts == [output["completion"][0]["content"] for output in results.outputs]
    with pytest.raises(ConfigError, match=r"not as \.json"):
        results.save(tmp_path / "rows.json")
    with pytest.raises(ConfigError, match=r"pandas\.read_csv"):
        load_results(tmp_path / "rows.csv")


@pytest.mark.parametrize("usage", [vf.Usage(0, 0), vf.Usage(7, 0)])
def test_tokens_that_no_server_reported_are_unknown_to_every_reader(tmp_path, usage):
    """And the control: what is counted stays, a reply of no token too."""
    env = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}])
    reply = vf.Response(vf.AssistantMessage("2"), usage=usage)
    path = tmp_path / "run"
    results = env.evaluate(ScriptedClient([reply]), "m", results_path=path)
    is_known = usage.prompt_tokens > 0
    counts = {"input_tokens": 7, "output_tokens": 0}
    counts |= {f"final_{name}": count for name, count in counts.items()}
    expected = counts if is_known else {}
    loaded = vf.load_results(path)
    assert results.metadata["usage"] == loaded.metadata["usage"] == expected
    index = RowIndex(path / "results.jsonl", ["num_turns"])
    index.read()
    assert [math.isnan(index.columns[f"{name}_tokens"][0]) for name in ("input", "output")] == [
        not is_known
    ] * 2
    assert page(loaded.outputs[0], {})["usage"] == expected
    totals = to_trajectory(loaded.outputs[0])["final_metrics"]
    assert ("total_prompt_tokens" in totals, "total_completion_tokens" in totals) == (
        is_known,
        is_known,
    )
