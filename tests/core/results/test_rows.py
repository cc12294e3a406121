"""Rows: from a finished state to memory, to disk and back."""

import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest

from verifiers.errors import EnvironmentFault, RateLimited, ScoringError
from verifiers.results.rows import output_to_state, row_for_disk, row_from_disk, state_to_output
from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rollouts.state import State, TrajectoryStep, TrajectoryStepTokens
from verifiers.runtime.json import decode_row, encode_row
from verifiers.runtime.redaction import redacted_text
from verifiers.types import AssistantMessage, Response, UserMessage

NAN = math.nan


def state_of(**more):
    fields = {
        "prompt": [UserMessage("2+2")],
        "completion": [AssistantMessage("4")],
        "answer": "4",
        "example_id": 3,
        "reward": 1.0,
        "metrics": {"exact": 1.0},
    }
    return State(fields | more)


def conversation(turns):
    """A trajectory whose every prompt continues the turn before: 10 new prompt and 5 sampled tokens
    a turn."""
    steps, step, tokens, ids = [], None, None, np.empty(0, np.int32)
    messages = []
    for turn in range(turns):
        messages = [*messages, UserMessage(f"question {turn}")]
        ids = np.concatenate([ids, np.arange(10, dtype=np.int32) + turn])
        tokens = TrajectoryStepTokens(ids, [7] * 5, [-0.5] * 5, version=turn, previous=tokens)
        answer = [AssistantMessage(f"answer {turn}")]
        response = Response(answer[0])
        step = TrajectoryStep(
            prompt=messages, completion=answer, response=response, tokens=tokens, previous=step
        )
        steps.append(step)
        messages, ids = step.conversation(), tokens.full_ids()
    return steps


def through_disk(output):
    return row_from_disk(decode_row(encode_row(row_for_disk(output, "abc", 2, attempts=3))))


def test_a_row_has_the_fields_and_each_metric_at_the_top():
    output = state_to_output(state_of(usage={"input_tokens": 5}))
    assert (output.reward, output["exact"], output.metrics, output.example_id) == (
        1.0,
        1.0,
        {"exact": 1.0},
        3,
    )
    assert output.token_usage == {"input_tokens": 5}
    assert output.error is None


def test_a_metric_does_not_hide_a_field():
    output = state_to_output(state_of(metrics={"task": 0.5}))
    assert output["task"] == "default"
    assert output["metrics"]["task"] == 0.5


@pytest.mark.parametrize("reward", [None, NAN])
def test_unknown_is_nan_in_memory_null_on_disk_and_nan_again(reward):
    output = state_to_output(state_of(reward=reward, metrics={"exact": NAN}))
    assert math.isnan(output["reward"])
    on_disk = decode_row(encode_row(row_for_disk(output, "abc", 0)))
    assert (on_disk["reward"], on_disk["metrics"], on_disk["exact"]) == (
        None,
        {"exact": None},
        None,
    )
    back = row_from_disk(on_disk)
    assert all(map(math.isnan, (back["reward"], back["metrics"]["exact"], back["exact"])))


def test_a_row_comes_back_from_disk_as_it_was():
    text = "\u0085\u2028\x00\ud800 end"
    state = state_of(completion=[AssistantMessage(text)], extra_key={"deep": (1, 2)})
    output = state_to_output(state, ["extra_key"])
    back = through_disk(output)
    assert {name: back[name] for name in output} == dict(output)
    assert back["completion"][0].content == text
    assert (back["sibling"], back["attempts"], back["example_hash"], len(back["rollout_key"])) == (
        2,
        3,
        "abc",
        32,
    )


def test_a_state_column_that_is_no_data_becomes_a_marker_and_the_row_stays():
    output = state_to_output(state_of(game=object(), odd={1: {NAN}}), ["game", "odd", "absent"])
    assert output["game"] == {"__unserializable__": "object"}
    assert decode_row(encode_row({"path": Path("a", "b")})) == {"path": "a/b"}
    assert output["absent"] is None
    pickle.loads(pickle.dumps(output))
    json.dumps(output, allow_nan=True)


def test_state_columns_are_copies():
    state = state_of(board=[[0]])
    output = state_to_output(state, ["board"])
    state["board"][0][0] = 1
    assert output["board"] == [[0]]


def test_keys_in_saved_columns_are_hidden():
    sampling = {"extra_headers": {"Authorization": "Bearer abc"}, "temperature": 1.0}
    output = state_to_output(state_of(sampling_args=sampling), ["sampling_args"])
    assert output["sampling_args"] == {
        "extra_headers": {"Authorization": "***"},
        "temperature": 1.0,
    }


# --- trajectories


def test_the_trajectory_column_is_whole_in_memory_and_on_reading():
    output = state_to_output(state_of(trajectory=conversation(4)), ["trajectory"])
    saved = through_disk(output)["trajectory"]
    assert [step["response"] for step in saved] == [None] * 4
    for row in (output, pickle.loads(pickle.dumps(output))):
        assert [step["response"].message for step in row["trajectory"]] == [
            step["completion"][0] for step in saved
        ]
    for steps in (output["trajectory"], saved):
        for message_pair, step in zip(conversation(4), steps, strict=True):
            assert step["prompt"] == message_pair["prompt"]
            assert step["completion"] == message_pair["completion"]
            assert step["tokens"].items() == message_pair["tokens"].items()


def test_on_disk_each_message_and_token_is_stored_once():
    def size(turns):
        output = state_to_output(state_of(trajectory=conversation(turns)), ["trajectory"])
        return len(encode_row(row_for_disk(output, "abc", 0)))

    assert size(64) - size(32) < 1.1 * (size(32) - size(1)) * 32 / 31
    full = len(json.dumps([dict(step) | {"response": None} for step in conversation(64)]))
    assert size(64) < full / 10  # what storing every prompt whole would take


def test_provider_objects_are_not_kept_through_the_links_of_steps():
    steps = state_to_output(state_of(trajectory=conversation(3)), ["trajectory"])["trajectory"]
    assert steps[-1].message_parent is steps[1]
    assert conversation(1)[0]["response"] is not None


def test_a_branching_trajectory_keeps_its_pointers():
    first, second = conversation(2)
    forked = TrajectoryStep(
        prompt=[*first["prompt"], UserMessage("again")], completion=[], previous=first
    )
    alone = TrajectoryStep(prompt=[UserMessage("new")], completion=[AssistantMessage("ok")])
    output = state_to_output(state_of(trajectory=[first, second, forked, alone]), ["trajectory"])
    packed = row_for_disk(output, "abc", 0)["trajectory"]
    assert [(step["parent"], step["shared"]) for step in packed] == [
        (None, 0),
        (0, 2),
        (0, 1),
        (None, 0),
    ]
    back = through_disk(output)["trajectory"]
    assert [step["prompt"] for step in back] == [
        step["prompt"] for step in (first, second, forked, alone)
    ]


def test_a_step_whose_parent_was_removed_keeps_its_whole_prompt():
    _, second = conversation(2)
    back = through_disk(state_to_output(state_of(trajectory=[second]), ["trajectory"]))[
        "trajectory"
    ]
    assert back[0]["prompt"] == second["prompt"]
    assert back[0]["tokens"]["prompt_ids"] == second["tokens"]["prompt_ids"]


def test_steps_in_another_order_than_they_were_sampled_are_whole():
    first, second = conversation(2)
    back = through_disk(state_to_output(state_of(trajectory=[second, first]), ["trajectory"]))[
        "trajectory"
    ]
    assert [step["prompt"] for step in back] == [second["prompt"], first["prompt"]]
    assert [step["tokens"]["prompt_ids"] for step in back] == [
        step["tokens"]["prompt_ids"] for step in (second, first)
    ]


def test_plain_dicts_as_steps_are_taken():
    steps = [dict(step) | {"tokens": dict(step["tokens"])} for step in conversation(3)]
    back = through_disk(state_to_output(state_of(trajectory=steps), ["trajectory"]))["trajectory"]
    assert [step["tokens"]["prompt_ids"] for step in back] == [
        step["tokens"]["prompt_ids"] for step in steps
    ]
    assert back[2].shared == 4


def test_a_state_can_be_made_from_a_row():
    output = through_disk(
        state_to_output(state_of(trajectory=conversation(2), board=[1]), ["trajectory", "board"])
    )
    state = output_to_state(output)
    assert (state["answer"], state["turn"], state["reward"], state["board"]) == ("4", 2, 1.0, [1])
    assert state["input"]["example_id"] == 3


# --- errors


def raised(error, cause=None):
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def test_an_error_becomes_data_with_its_chain_and_place():
    error = raised(ScoringError("failed", function="flaky"), ConnectionError("refused"))
    info = ErrorInfo.of(error)
    assert (info.error, info.message, info.where, info.cause) == (
        "ScoringError",
        "failed",
        "flaky",
        "ConnectionError",
    )
    assert info.error_chain_str == "ScoringError -> ConnectionError"
    assert "raise error from cause" in info.traceback
    assert info.is_scoring_error
    assert not info.retryable


def test_where_falls_back_to_the_line_that_raised():
    info = ErrorInfo.of(raised(RateLimited("slow down", attempts=4)))
    assert "test_rows.py" in info.where
    assert (info.retryable, info.attempts) == (True, 4)


def test_an_endless_message_is_cut_in_the_middle():
    info = ErrorInfo.of(EnvironmentFault("a" * 1_000_000 + "z", hook="env_response"))
    assert len(info.message) < 5_000
    assert info.message.endswith("z")


def test_a_cycle_of_causes_ends():
    first, two = ValueError("1"), ValueError("2")
    first.__cause__, two.__cause__ = two, first
    assert ErrorInfo.of(first).error_chain_str == "ValueError -> ValueError"


def test_text_of_older_versions_is_read():
    info = ErrorInfo.of("ModelError('no answer')")
    assert (info.error, info.message, info.retryable) == (
        "ModelError",
        "ModelError('no answer')",
        False,
    )


def test_secrets_are_in_no_error(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "canary-12345678")
    monkeypatch.setenv("HARMLESS_SETTING", "plain-12345678")
    error = raised(
        EnvironmentFault("canary-12345678 plain-12345678 {'authorization': 'Bearer canary2'}"),
        ValueError("x-api-key: canary3"),
    )
    text = json.dumps(ErrorInfo.of(error))
    assert "canary" not in text.replace("test_rows", "")
    assert "plain-12345678" in text


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer canary",
        "'Authorization': 'Basic canary'",
        '{"proxy-authorization":"canary"}',
        "api_key=canary",
        "sk-proj-canary0123456789",
        "curl -H 'Bearer canary123456'",
    ],
)
def test_what_looks_like_a_key_is_hidden(text):
    assert "canary" not in redacted_text(text)


def test_short_values_of_secret_variables_stay(monkeypatch):
    monkeypatch.setenv("USE_TOKEN", "1")
    assert redacted_text("turn 1 of 1") == "turn 1 of 1"


# --- older versions


def test_rows_of_older_versions_are_read():
    row = {
        "example_id": 0,
        "prompt": [{"role": "user", "content": "2+2"}],
        "completion": [{"role": "assistant", "content": "4"}],
        "task": "default",
        "reward": 1.0,
        "generation_ms": 10.0,
        "total_ms": 12.0,
        "info": {},
        "correct_answer_reward_func": 1.0,
    }
    output = row_from_disk(row, ["correct_answer_reward_func"])
    assert output["metrics"] == {"correct_answer": 1.0}
    assert output["correct_answer"] == 1.0
    assert output["timing"]["total_ms"] == 12.0
    assert output["advantage"] is None
