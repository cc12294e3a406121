"""``make_state`` and ``run_rollout_sync``: what authors test reward functions and hooks with."""

import pytest

import verifiers as vf
from verifiers.errors import DatasetError
from verifiers.rubrics import Rubric
from verifiers.testing import ScriptedClient
from verifiers.testing.units import make_state, run_rollout_sync

ROWS = [{"question": "2 + 2?", "answer": "4"}, {"question": "3 + 3?", "answer": "6"}]


def exact(completion, answer):
    return float(completion[-1]["content"] == answer)


def test_text_becomes_messages_and_the_state_is_ready_to_be_scored():
    state = make_state("2 + 2?", "4", "4")

    assert state["prompt"] == [{"role": "user", "content": "2 + 2?"}]
    assert state["completion"] == [{"role": "assistant", "content": "4"}]
    assert state["is_completed"]
    assert state["reward"] is None
    assert Rubric(funcs=[exact]).score_rollout_sync(state)["reward"] == 1.0
    assert state["reward"] == 1.0


def test_a_conversation_gives_one_step_per_assistant_message():
    completion = [
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]
    state = make_state("2 + 2?", completion)

    assert state["turn"] == 2
    first, second = state["trajectory"]
    assert first["prompt"] == state["prompt"]
    assert second["prompt"] == [*state["prompt"], *completion[:2]]
    assert second["completion"] == completion[2:]
    assert second["response"].text == "yes"


def test_keys_are_columns_unless_they_are_the_states_own():
    def easy(difficulty, info):
        return float(difficulty == "easy" and info["level"] == 1)

    state = make_state(
        "q", "a", difficulty="easy", info={"level": 1}, task="sums", is_truncated=True
    )

    assert Rubric(funcs=[easy]).score_rollout_sync(state)["reward"] == 1.0
    assert state["input"]["difficulty"] == "easy"
    assert state["task"] == "sums"
    assert state["is_truncated"]
    assert "is_truncated" not in state["input"]


def test_completion_mode_keeps_text():
    state = make_state("2 + 2 =", " 4", message_type="completion")

    assert (state["prompt"], state["completion"], state["turn"]) == ("2 + 2 =", " 4", 1)


def test_one_rollout_is_played_and_scored_on_the_first_row_or_a_given_one():
    env = vf.SingleTurnEnv(dataset=ROWS, rubric=Rubric(funcs=[exact]))

    state = run_rollout_sync(env, ScriptedClient(["4"]))
    assert (state["reward"], state["stop_condition"], state["answer"]) == (
        1.0,
        "max_turns_reached",
        "4",
    )

    state = run_rollout_sync(env, ScriptedClient(["4"]), {"question": "9 - 4?", "answer": "5"})
    assert (state["reward"], state["prompt"][-1]["content"]) == (0.0, "9 - 4?")


async def test_it_blocks_under_a_running_loop_too():
    env = vf.SingleTurnEnv(eval_dataset=ROWS, rubric=Rubric(funcs=[exact]))

    assert run_rollout_sync(env, ScriptedClient(["4"]))["reward"] == 1.0


def test_a_failure_of_the_rollout_is_in_the_state():
    class Broken(vf.SingleTurnEnv):
        def setup_state(self, state):
            raise KeyError("board")

    state = run_rollout_sync(Broken(dataset=ROWS), ScriptedClient(["4"]))

    assert isinstance(state["error"], vf.EnvironmentFault)
    assert state["reward"] != state["reward"]  # unknown


def test_an_environment_without_rows_needs_one():
    with pytest.raises(DatasetError, match="row="):
        run_rollout_sync(vf.SingleTurnEnv(dataset=[]), ScriptedClient(["4"]))
