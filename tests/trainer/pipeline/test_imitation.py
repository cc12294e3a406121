"""The loss "sft": which finished rollouts it imitates, on which tokens, and what a resumed run
does."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import verifiers as vf
from support.training import (
    evaluated_by_the_policy,
    metrics_of,
    run,
    small_config,
    small_policy,
    toy_env,
)
from verifiers.errors import ConfigError, DatasetError, RunMismatch
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.status import Status
from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.samples import NOT_SAMPLED
from verifiers_trainer.pipeline.offline import imitated, read_groups
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.run.metrics_files import reward_name
from verifiers_trainer.run.progress import closing_rows
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.trainer import RLTrainer


def config_of(folder="x", **settings):
    return small_config(folder, **{"loss": "sft", "rollouts_per_example": 1} | settings)


def trainer_of(folder, dataset=None, env=None, **settings):
    return RLTrainer(
        small_policy(), env, config_of(folder, **settings), build_tiny_tokenizer(), dataset=dataset
    )


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """An evaluation by the tiny policy itself: 8 examples x 4 rollouts with their tokens."""
    return evaluated_by_the_policy(tmp_path_factory.mktemp("saved"))


def trajectory(answer):
    """Another author's, without token ids and reward."""
    steps = [
        {"source": "user", "message": "Say a digit."},
        {"source": "agent", "message": "I look.", "observation": {"results": [{"content": "5"}]}},
        {"source": "agent", "message": answer},
    ]
    return {
        "schema_version": "ATIF-v1.7",
        "agent": {"name": "theirs", "version": "1"},
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
    }


def test_trajectories_of_another_author_are_imitated_on_what_their_agent_wrote(tmp_path):
    folder, tokenizer = tmp_path / "theirs", build_tiny_tokenizer()
    folder.mkdir()
    for number, answer in enumerate(["12", "34"]):
        (folder / f"{number}.json").write_text(json.dumps(trajectory(answer)))
    groups = read_groups(str(folder), tokenizer, config_of())
    texts = [
        "".join(tokenizer.decode(turn.completion_ids) for turn in group.rollouts[0].turns)
        for group in groups
    ]
    assert len(texts) == 2
    for text, answer in zip(texts, ["12", "34"], strict=True):
        assert "I look." in text
        assert answer in text
        assert "Say a digit." not in text
    trainer = trainer_of(
        tmp_path / "run", str(folder), max_steps=2, batch_size=2, micro_batch_size=1
    )
    run(trainer)
    assert len(metrics_of(tmp_path / "run")) == 2


# --- which rollouts -------------------------------------------------------------------------------


def rollout(ids, reward, error=None, cut=False):
    turn = Turn(
        np.array([1, 2, 3]), np.array(ids), np.zeros(len(ids), np.float32), NOT_SAMPLED, cut
    )
    return Rollout((turn,), reward, status=Status(error=error, is_truncated=cut))


ONE = [
    rollout([5, 6], 0.2),
    rollout([7], 1.0),
    rollout([7], 1.0),
    rollout([8], 1.0),
    rollout([9], math.nan),
]
TWO = [
    rollout([5], 0.5, "ModelError: gone"),
    rollout([5] * 90, 1.0),
    rollout([4], 0.9, cut=True),
    rollout([], 1.0),
]


def kept(**settings):
    return [
        rollout.turns[0].completion_ids.tolist()
        for rollout in imitated([ONE, TWO], config_of(**settings))
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [[7], [8], [5, 6], [9], [4]]),
        ({"drop_duplicates": False}, [[7], [7], [8], [5, 6], [9], [4]]),
        ({"min_reward": 0.5}, [[7], [8], [4]]),
        ({"min_reward": 0.5, "max_per_example": 1}, [[7], [4]]),
        ({"max_per_example": 2, "mask_truncated_completions": True}, [[7], [8]]),
        ({"max_seq_len": 128}, [[7], [8], [5, 6], [9], [5] * 90, [4]]),
        ({"max_completion_len": 1}, [[7], [8], [9], [4]]),
    ],
    ids=str,
)
def test_rollouts_are_selected_by_reward_length_duplicates_and_number(settings, expected):
    assert kept(**settings) == expected


def test_what_is_left_out_is_counted(caplog):
    caplog.set_level("INFO")
    kept(min_reward=0.5, max_per_example=1)
    assert (
        "imitates 2 of 9 rollouts: 2 below min_reward, or of unknown reward, 1 duplicates"
        in caplog.text
    )
    with pytest.raises(
        DatasetError, match="no rollout to imitate is left of 9: 8 below min_reward"
    ):
        kept(min_reward=2)


@pytest.mark.parametrize(
    ("rollouts", "settings", "says"),
    [
        (ONE, {"min_reward": 2}, "the highest reward is 1: set min_reward no higher"),
        (ONE[4:], {"min_reward": 0}, "no reward is known: set min_reward no higher"),
        ([TWO[1], rollout([5] * 70, 1.0)], {"max_seq_len": 64},
         "2 longer than max_seq_len; max_seq_len is 64, and they have 73 to 93 tokens: set"
         " max_seq_len=93"),
        (TWO[1:2], {"max_completion_len": 80, "max_seq_len": 128},
         "1 longer than max_completion_len; max_completion_len is 80, and they have 90 to 90 tokens:"
         " set max_completion_len=90"),
        (TWO[2:3], {"mask_truncated_completions": True}, "set mask_truncated_completions=False"),
        (TWO[:1], {}, "1 failed; generate them again"),
        (TWO[3:], {}, "1 without tokens; their completions are empty"),
    ],
)  # fmt: skip
def test_where_nothing_is_left_to_imitate_the_setting_that_decides_is_named(
    rollouts, settings, says
):
    with pytest.raises(DatasetError) as caught:
        imitated([rollouts], config_of(**settings))
    assert says in str(caught.value)


def test_the_reward_of_demonstrations_is_called_theirs(tmp_path):
    columns = {"prompts": ["1", "2"], "completions": ["a", "b"], "rewards": [1.0, 0.5]}
    settings = {"max_steps": 2, "batch_size": 2, "micro_batch_size": 1}
    trainer = trainer_of(tmp_path / "run", columns, **settings)
    run(trainer)
    assert "demonstrations' reward 0.750 -> 0.750" in repr(trainer.history)
    rows = dict(closing_rows(tmp_path / "run", None, None, []))
    assert "0.750 over the first step" in rows["demonstrations' reward"]
    assert reward_name([metrics_of(tmp_path / "run")[0]]) == "demonstrations' reward"
    # negative control: rewards of what the policy wrote
    other = {"loss": "grpo", "beta": 0.0, "rollouts_per_example": 2} | settings
    online = trainer_of(tmp_path / "online", env=toy_env(), **other)
    run(online)
    assert "steps, reward" in repr(online.history)


def test_the_settings_that_select_need_the_loss_that_reads_them():
    with pytest.raises(
        ConfigError,
        match=r"min_reward selects rollouts to imitate: leave it out, or set loss='sft'",
    ):
        RLConfig(min_reward=0.5).resolve()
    with pytest.raises(ConfigError, match="credit is of losses that read rewards"):
        RLConfig(loss="sft", credit="turn").resolve()


# --- which tokens ---------------------------------------------------------------------------------


def test_saved_tokens_are_imitated_as_they_were_sampled_and_text_by_the_template(saved_run):
    tokenizer = build_tiny_tokenizer()
    results = vf.load_results(saved_run)
    sampled = {
        tuple(step["tokens"]["completion_ids"])
        for state in results["states"]
        for step in state["trajectory"]
    }
    groups = read_groups([saved_run], tokenizer, config_of(drop_duplicates=False))
    assert [len(group.rollouts) for group in groups] == [1] * 32
    turns = [group.rollouts[0].turns[0] for group in groups]
    assert {tuple(turn.completion_ids.tolist()) for turn in turns} == sampled
    # no ratio to the policy that sampled them
    assert {turn.version for turn in turns} == {NOT_SAMPLED}

    as_text = {name: results[name] for name in ("prompts", "completions", "rewards")}
    texts = [
        group.rollouts[0].turns[0]
        for group in read_groups(as_text, tokenizer, config_of(drop_duplicates=False))
    ]
    assert {tokenizer.decode(turn.completion_ids[-1:]) for turn in texts} == {tokenizer.eos_token}
    assert sum(map(len, (turn.completion_ids for turn in turns))) != sum(
        map(len, (t.completion_ids for t in texts))
    )


# --- training -------------------------------------------------------------------------------------


def test_saved_runs_are_imitated_without_an_engine(saved_run, tmp_path, caplog):
    settings = {"saved_runs": str(saved_run), "learning_rate": 1e-2, "max_steps": 12}
    trainer = trainer_of(tmp_path, **settings)
    log = run(trainer)
    assert trainer.engine is None
    assert log.steps[-1]["loss"] < 0.9 * log.steps[0]["loss"]
    assert log.steps[0]["ratio/mean"] == pytest.approx(1)
    assert log.steps[0]["groups/dead"] == 0
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_resumed_imitation_is_bit_for_bit_the_one_without_a_break(saved_run, tmp_path):
    settings = {
        "saved_runs": [str(saved_run)],
        "save_strategy": "steps",
        "save_steps": 2,
        "seed": 3,
    }
    uninterrupted = trainer_of(tmp_path / "whole", max_steps=5, **settings)
    losses = run(uninterrupted).losses
    run(trainer_of(tmp_path / "parts", max_steps=2, **settings))
    parts = trainer_of(tmp_path / "parts", max_steps=5, **settings)
    assert run(parts, resume_from_checkpoint=True).losses == losses[2:]
    assert [row["step"] for row in metrics_of(tmp_path / "parts")] == [1, 2, 3, 4, 5]
    for parameter, resumed_parameter in zip(
        uninterrupted.model.parameters(), parts.model.parameters(), strict=True
    ):
        assert torch.equal(parameter, resumed_parameter)
    with pytest.raises(RunMismatch, match="rollouts was"):  # other rollouts, whatever the folder
        run(
            trainer_of(tmp_path / "parts", max_steps=6, min_reward=0.01, **settings),
            resume_from_checkpoint=True,
        )


def test_nothing_to_imitate_is_named(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"the loss 'sft' imitates finished rollouts, and there are none: set saved_",
    ):
        trainer_of(tmp_path, env=toy_env())
    with pytest.raises(ConfigError, match=r"saved_runs is '/nowhere', and there is no such folder"):
        trainer_of(tmp_path, env=toy_env(), saved_runs="/nowhere")
