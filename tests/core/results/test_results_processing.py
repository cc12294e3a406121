"""From results to token rows."""

import json
import math

import numpy as np
import pytest

from verifiers.errors import ConfigError, ScoringError
from verifiers.results import (
    GenerateOutputs,
    export_trajectories,
    process_env_results,
    process_env_results_vllm,
)
from verifiers.results.rows import state_to_output
from verifiers.rollouts.state import State, TrajectoryStep, TrajectoryStepTokens
from verifiers.testing.tokenizer import ByteTokenizer
from verifiers.types import AssistantMessage, UserMessage

NAN = math.nan


def turns(*pairs, linked=True):
    """Steps of (prompt ids, completion ids); log-probability -i/10 and version i for turn i."""
    steps, tokens = [], None
    for i, (prompt, completion) in enumerate(pairs):
        tokens = TrajectoryStepTokens(
            prompt,
            completion,
            [-i / 10] * len(completion),
            version=i,
            previous=tokens if linked else None,
        )
        steps.append(TrajectoryStep(tokens=tokens))
    return steps


TWO_TURNS = (([1, 5], [7, 2]), ([1, 5, 7, 2, 9], [8, 2]))
FORKED = (*TWO_TURNS, ([1, 5, 9], [4]))


def process(*trajectories, rewards=None, states=None, **options):
    states = states or [State(trajectory=trajectory) for trajectory in trajectories]
    rewards = rewards or [1.0] * len(states)
    texts = [""] * len(states)
    return process_env_results(texts, texts, states, rewards, **options)


@pytest.mark.parametrize("linked", [True, False])
def test_turns_that_continue_each_other_are_one_row(linked):
    (row,) = process(turns(*TWO_TURNS, linked=linked))
    assert (row["prompt_ids"], row["completion_ids"]) == ([1, 5], [7, 2, 9, 8, 2])
    assert (row["prompt_mask"], row["completion_mask"]) == ([0, 0], [1, 1, 0, 1, 1])
    assert row["completion_logprobs"] == pytest.approx([0, 0, 0, -0.1, -0.1])
    assert (row["source"], row["rollout_index"], row["rewards"]) == ("sampled", 0, 1.0)


def test_environment_tokens_can_be_learned_from():
    assert process(turns(*TWO_TURNS), mask_env_responses=False).completion_mask == [[1] * 5]


def test_turns_that_do_not_continue_fork_and_the_last_branch_is_kept():
    kept = process(turns(*FORKED))
    assert (kept.prompt_ids, kept.completion_ids) == ([[1, 5, 9]], [[4]])
    both = process(turns(*FORKED), turns(*TWO_TURNS), allow_forks=True)
    assert both["rollout_index"] == [0, 0, 1]
    assert both["completion_ids"] == [[7, 2, 9, 8, 2], [4], [7, 2, 9, 8, 2]]


def test_a_long_row_loses_its_tail_and_never_its_prompt():
    cut = process(turns(*TWO_TURNS), max_seq_len=5)
    assert (cut.completion_ids, cut.completion_logprobs, cut.is_truncated) == (
        [[7, 2, 9]],
        [[0, 0, 0]],
        [True],
    )
    assert process(turns(*TWO_TURNS), max_seq_len=1).completion_ids == [[]]
    assert process(turns(*TWO_TURNS), max_seq_len=1).prompt_ids == [[1, 5]]


def test_truncated_rows_can_be_masked_or_zeroed():
    states = [State(trajectory=turns(*TWO_TURNS), is_truncated=True)]
    masked = process(states=states, mask_truncated_completions=True)
    assert (masked.completion_mask, masked.rewards) == ([[0] * 5], [1.0])
    assert process(states=states, zero_truncated_completions=True).rewards == [0.0]


def test_an_unknown_reward_teaches_nothing_is_dropped_or_is_an_error():
    both = (turns(*TWO_TURNS), turns(*TWO_TURNS))
    row = list(process(*both, rewards=[1.0, NAN]))[1]
    assert math.isnan(row["rewards"])
    assert row["completion_mask"] == [0] * 5
    assert process(*both, rewards=[NAN, 1.0], unknown_reward="drop").rollout_index == [1]
    with pytest.raises(ScoringError, match="rollout 1"):
        process(*both, rewards=[1.0, NAN], unknown_reward="raise")


def test_text_without_ids_is_tokenised_again_and_says_so():
    tokenizer = ByteTokenizer()
    prompt = [UserMessage("2+2")]
    completion = [AssistantMessage("4"), UserMessage("sure?"), AssistantMessage("yes")]
    made = process_env_results_vllm(
        prompts=[prompt],
        completions=[completion],
        states=[State()],
        rewards=[1.0],
        processing_class=tokenizer,
        max_seq_len=-1,
        mask_env_responses=True,
    )
    assert (made.source, made.completion_logprobs) == (["retokenised"], [None])
    all_ids = tokenizer.apply_chat_template([*prompt, *completion])
    assert made.prompt_ids[0] + made.completion_ids[0] == all_ids
    learned = [i for i, m in zip(made.completion_ids[0], made.completion_mask[0], strict=True) if m]
    assert tokenizer.decode(learned, skip_special_tokens=True) == "4yes"


def test_completion_mode_text_is_tokenised_as_text():
    made = process_env_results(["ab"], ["cd"], [{}], [1.0], ByteTokenizer())
    assert (made.prompt_ids, made.completion_ids, made.completion_mask) == (
        [[97, 98]],
        [[99, 100]],
        [[1, 1]],
    )


def test_one_turn_without_ids_makes_the_whole_rollout_text():
    steps = turns(*TWO_TURNS)
    steps[1]["tokens"] = None
    with pytest.raises(ConfigError, match="pass tokenizer="):
        process(steps)


@pytest.mark.parametrize(
    "options", [{"unknown_reward": "zero"}, {"rewards": [1.0, 1.0]}, {"max_len": 3}]
)
def test_calls_that_cannot_be_meant_are_refused(options):
    with pytest.raises(ConfigError):
        process(turns(*TWO_TURNS), **options)


def test_both_names_of_the_tokenizer_are_one_parameter():
    made = process_env_results(
        [""], [""], [State(trajectory=turns(*TWO_TURNS))], [1.0], processing_class=None
    )
    assert len(made) == 1


def test_merging_is_linear_in_tokens(monkeypatch):
    pairs, ids = [], []
    for _ in range(200):
        pairs.append(([*ids, 1], [2, 3]))
        ids = [*ids, 1, 2, 3]
    steps = turns(*pairs)
    compared = 0
    original = np.array_equal

    def counting(left, right, *args):
        nonlocal compared
        compared += len(left)
        return original(left, right, *args)

    monkeypatch.setattr(np, "array_equal", counting)
    (row,) = process(steps)
    assert compared == 0
    assert row["completion_ids"] == ids[1:]


def test_tensors_are_padded_left_and_right():
    torch = pytest.importorskip("torch")
    made = process(turns(*TWO_TURNS), turns(([1], [2])), rewards=[1.0, NAN])
    tensors = made.tensors(pad_token_id=0)
    assert tensors["prompt_ids"].tolist() == [[1, 5], [0, 1]]
    assert tensors["completion_ids"].tolist() == [[7, 2, 9, 8, 2], [2, 0, 0, 0, 0]]
    assert tensors["completion_attention_mask"].tolist() == [[1] * 5, [1, 0, 0, 0, 0]]
    assert tensors["completion_mask"].tolist() == [[1, 1, 0, 1, 1], [0] * 5]
    assert tensors["completion_logprobs"].dtype == torch.float32
    assert torch.isnan(tensors["rewards"]).tolist() == [False, True]


def test_exported_rows_carry_versions_and_unknowns_are_null(tmp_path):
    states = [State(trajectory=turns(*FORKED), reward=NAN, example_id=4)]
    results = GenerateOutputs([state_to_output(state) for state in states], states=states)
    assert export_trajectories(results, tmp_path / "rows.jsonl") == 2
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows[0]["versions"] == [0, 0, -1, 1, 1]
    assert rows[0]["completion_mask"] == [1, 1, 0, 1, 1]
    assert (rows[0]["reward"], rows[1]["example_id"], rows[1]["completion_ids"]) == (None, 4, [4])


def test_export_refuses_rollouts_without_ids(tmp_path):
    states = [State(trajectory=[TrajectoryStep()])]
    with pytest.raises(ConfigError, match="rollout 0"):
        export_trajectories(
            GenerateOutputs([state_to_output(states[0])], states=states), tmp_path / "rows.jsonl"
        )
