"""Training on finished rollouts: recorded tokens are trained as recorded, text is anchored on the
policy itself."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import verifiers as vf
from support.training import (
    digits,
    evaluated_by_the_policy,
    metrics_of,
    rows,
    run,
    small_config,
    small_policy,
    toy_env,
)
from verifiers.environments.integrations.gym import sum_step_rewards
from verifiers.errors import ConfigError, DatasetError, NoLearningSignal
from verifiers.testing import ScriptedClient
from verifiers_trainer.algorithm.batch import Group, build
from verifiers_trainer.algorithm.samples import NOT_SAMPLED
from verifiers_trainer.pipeline.offline import OfflineRollouts, holds_rollouts, read_groups
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.trainer import RLTrainer


def columns(count=6, siblings=2):
    """Of each prompt one answer of digits, worth 1, and others of letters, worth 0."""
    prompts = [
        [{"role": "user", "content": row["question"]}]
        for row in rows(count)
        for _ in range(siblings)
    ]
    good = [n % siblings == 0 for n in range(len(prompts))]
    answers = [[{"role": "assistant", "content": "12" if right else "ab"}] for right in good]
    return {"prompts": prompts, "completions": answers, "rewards": [float(right) for right in good]}


def trainer_of(folder, dataset, env=None, model=None, **settings):
    settings = {
        "batch_size": 4,
        "rollouts_per_example": 2,
        "micro_batch_size": 2,
        "max_steps": 3,
    } | settings
    config = small_config(folder, **settings)
    return RLTrainer(model or small_policy(), env, config, build_tiny_tokenizer(), dataset=dataset)


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """The folder of an evaluation by the tiny policy itself, with its trajectories."""
    return evaluated_by_the_policy(tmp_path_factory.mktemp("saved"))


# --- what is read ---------------------------------------------------------------------------------


def test_what_counts_as_finished_rollouts(tmp_path):
    assert holds_rollouts(columns())
    assert holds_rollouts(str(tmp_path))
    assert not holds_rollouts(None)
    assert not holds_rollouts(rows())


def test_equal_prompts_are_siblings_and_their_text_is_tokenised_once():
    tokenizer = build_tiny_tokenizer()
    groups = read_groups(columns(), tokenizer, small_config("x"))
    assert [len(group.rollouts) for group in groups] == [2] * 6
    (turn,) = groups[0].rollouts[0].turns
    assert tokenizer.decode(turn.completion_ids) == "12" + tokenizer.eos_token
    assert tokenizer.decode(turn.prompt_ids).endswith("assistant\n")
    assert turn.version == NOT_SAMPLED


def test_columns_that_do_not_fit_are_refused():
    data = columns()
    data["rewards"].pop()
    with pytest.raises(ConfigError, match="the dataset has 12 prompts, 12 completions, 11 rewards"):
        read_groups(data, build_tiny_tokenizer(), small_config("x"))
    with pytest.raises(DatasetError, match="is empty"):
        read_groups(
            {"prompts": [], "completions": [], "rewards": []},
            build_tiny_tokenizer(),
            small_config("x"),
        )


def test_recorded_tokens_are_read_as_they_were_sampled(saved_run):
    results = vf.load_results(saved_run)
    groups = read_groups(saved_run, build_tiny_tokenizer(), small_config("x"))
    steps = [step for state in results["states"] for step in state["trajectory"]]
    turns = [turn for group in groups for record in group.rollouts for turn in record.turns]
    assert len(turns) == len(steps) == 32
    recorded = {
        (tuple(s["tokens"]["completion_ids"]), tuple(s["tokens"]["completion_logprobs"]))
        for s in steps
    }
    assert {
        (tuple(t.completion_ids.tolist()), tuple(t.sampler_logprobs.tolist())) for t in turns
    } == recorded
    # the number of another run's policy means nothing here
    assert {turn.version for turn in turns} == {-1}


def test_recorded_tokens_that_the_model_has_not_are_refused_before_any_work(saved_run, tmp_path):
    settings = small_config(tmp_path)
    with pytest.raises(DatasetError, match=r"is no token id \(0 to 9\); give rollouts that this"):
        read_groups(saved_run, build_tiny_tokenizer(), settings, vocabulary=10)


# --- training -------------------------------------------------------------------------------------


def test_text_is_trained_without_engine_or_environment_at_ratio_one(tmp_path, caplog):
    caplog.set_level("INFO")
    trainer = trainer_of(tmp_path, columns(), learning_rate=1e-2)
    log = run(trainer)
    assert trainer.engine is None
    assert [step["ratio/mean"] for step in log.steps] == pytest.approx([1, 1, 1])
    assert log.steps[0]["offline/recorded"] == 0
    assert log.steps[0]["reward/mean"] == 0.5
    assert "offline/anchor = recomputed: 0 of" in caplog.text


def test_groups_of_equal_rewards_stay_where_they_are_to_be_kept():
    """As with every other source: in the batch, with advantages of 0."""
    data = columns()
    data["rewards"] = [1.0] * 4 + data["rewards"][4:]
    kept, dropped = (
        OfflineRollouts(read_groups(data, build_tiny_tokenizer(), config), config)
        for config in (
            small_config("x", batch_size=4, rollouts_per_example=2, zero_variance=value)
            for value in ("keep", "drop")
        )
    )
    assert (kept.num_batches, dropped.num_batches) == (3, 2)
    batches = [kept.next_batch() for _ in range(3)]
    assert sum(batch.stats["groups/dead"] for batch in batches) == 2
    equal = {
        float(value)
        for batch in batches
        for group, values in zip(batch.groups, batch.advantages_G, strict=True)
        if len(set(group.rewards)) == 1
        for value in values
    }
    assert equal == {0.0}


def test_a_policy_learns_from_text(tmp_path):
    trainer = trainer_of(
        tmp_path,
        columns(),
        toy_env(),
        learning_rate=1e-2,
        num_train_epochs=20,
        max_steps=-1,
        inference="embedded",
    )
    before = trainer.evaluate()["eval_reward"]
    run(trainer)
    assert trainer.state.global_step == 60
    assert trainer.evaluate()["eval_reward"] > before + 0.4
    trainer.close()


def test_a_saved_run_is_anchored_on_its_recorded_log_probabilities(saved_run, tmp_path):
    """By the policy that sampled it ρ is 1; by another it is not, and the numbers say so."""
    same = run(
        trainer_of(tmp_path / "same", str(saved_run), rollouts_per_example=4, learning_rate=0.0)
    ).steps[0]
    assert same["offline/recorded"] == 1
    assert same["ratio/mean"] == pytest.approx(1, abs=1e-4)
    assert same["ratio/max"] == pytest.approx(1, abs=1e-3)
    assert math.isnan(same["staleness/max"])  # nobody knows how old they are
    another = small_policy(seed=3)
    off = run(
        trainer_of(tmp_path / "other", str(saved_run), model=another, rollouts_per_example=4)
    ).steps[0]
    assert abs(off["ratio/mean"] - 1) > 1e-3
    as_text = {
        name: vf.load_results(saved_run)[name] for name in ("prompts", "completions", "rewards")
    }
    text_step = run(
        trainer_of(tmp_path / "text", as_text, model=small_policy(seed=3), rollouts_per_example=4)
    ).steps[0]
    assert text_step["ratio/mean"] == pytest.approx(1)  # text hides who wrote it
    assert text_step["offline/recorded"] == 0


def test_results_in_memory_and_a_dataset_are_taken_too(saved_run, tmp_path):
    results = vf.load_results(saved_run)
    run(trainer_of(tmp_path / "results", results, rollouts_per_example=4, max_steps=1))
    from datasets import Dataset

    run(trainer_of(tmp_path / "dataset", Dataset.from_dict(columns()), max_steps=1))


def test_another_temperature_than_the_recorded_one_is_said(saved_run, tmp_path, caplog):
    trainer_of(tmp_path, str(saved_run), rollouts_per_example=4, temperature=0.5)
    assert "were sampled at temperature 1 and are trained at 0.5" in caplog.text


def test_single_answers_are_compared_with_the_mean_of_the_dataset(tmp_path, caplog):
    data = columns(count=8, siblings=1)
    data["rewards"] = [float(n % 2) for n in range(8)]
    trainer = trainer_of(tmp_path, data, max_steps=2)
    assert (
        "0 of 8 prompts have two rollouts with known rewards: the baseline is the mean of the"
        " dataset" in caplog.text
    )
    log = run(trainer)
    assert [step["reward/mean"] for step in log.steps] == [
        trainer_mean(trainer, n) for n in range(2)
    ]
    assert {float(a) for advantages in trainer.batch.advantages_G for a in advantages} <= {
        0.5,
        -0.5,
    }


def trainer_mean(trainer, number):
    groups = trainer.training_run.offline._pass(0)[number]
    return float(np.mean([group.rewards for group in groups]))


def test_the_best_of_single_answers_is_refused(tmp_path):
    """Against the mean of the dataset half of them would be trained with a negative advantage."""
    with pytest.raises(
        ConfigError, match=r"advantage='best' trains the best of siblings, and 0 of 8 prompts"
    ):
        trainer_of(tmp_path, columns(count=8, siblings=1), advantage="best", loss="reinforce")
    trainer_of(tmp_path, columns(count=8, siblings=2), advantage="best", loss="reinforce")


@pytest.mark.parametrize("overlong", ["mask", "drop"])
def test_the_length_rules_hold_for_columns(tmp_path, overlong):
    """The reward of an answer that is too long leaves the baseline of its siblings with
    overlong="drop"."""
    prompts = [[{"role": "user", "content": "q"}]] * 4
    answers = [[{"role": "assistant", "content": "ab" if n else "ab" * 40}] for n in range(4)]
    data = {"prompts": prompts, "completions": answers, "rewards": [9.0, 0.0, 1.0, 2.0]}
    trainer = trainer_of(
        tmp_path, data, rollouts_per_example=4, max_seq_len=48, overlong=overlong, max_steps=1
    )
    run(trainer)
    mean = 1.0 if overlong == "drop" else 3.0
    np.testing.assert_allclose(
        trainer.batch.advantages_G[0][1:], [0.0 - mean, 1.0 - mean, 2.0 - mean]
    )


def test_a_pass_uses_every_group_once_in_an_order_of_the_seed():
    groups = read_groups(columns(), build_tiny_tokenizer(), small_config("x"))
    config = small_config("x", batch_size=4, rollouts_per_example=2)
    pipeline = OfflineRollouts(groups, config)
    passes = [
        [group.index for group_batch in pipeline._pass(n) for group in group_batch] for n in (0, 1)
    ]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(6))
    assert passes[0] != passes[1]
    assert pipeline.num_batches == 3
    assert passes[0] == [
        group.index
        for group_batch in OfflineRollouts(groups, config)._pass(0)
        for group in group_batch
    ]


def test_a_resumed_run_goes_on_with_the_batch_that_follows(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "seed": 3}
    uninterrupted = run(trainer_of(tmp_path / "whole", columns(), max_steps=5, **settings))
    run(trainer_of(tmp_path / "parts", columns(), max_steps=2, **settings))
    resumed = run(
        trainer_of(tmp_path / "parts", columns(), max_steps=5, **settings),
        resume_from_checkpoint=True,
    )
    assert resumed.losses == uninterrupted.losses[2:]
    assert [row["step"] for row in metrics_of(tmp_path / "parts")] == [1, 2, 3, 4, 5]


def test_equal_and_unknown_rewards_teach_nothing_and_end_the_run(tmp_path):
    data = columns()
    data["rewards"] = [None if n % 2 else 1.0 for n in range(12)]
    with pytest.raises(
        NoLearningSignal, match="no group of the finished rollouts has two different rewards"
    ):
        trainer_of(tmp_path / "unknown", data, advantage="mean").train()
    data["rewards"] = [1.0] * 12
    with pytest.raises(NoLearningSignal):
        trainer_of(tmp_path / "equal", data).train()


def test_several_turns_of_text_are_each_trained(tmp_path):
    talk = [
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "22"},
    ]
    data = {"prompts": ["a", "a"], "completions": [talk, talk[:1]], "rewards": [1.0, 0.0]}
    groups = read_groups(data, build_tiny_tokenizer(), small_config("x"))
    assert [len(record.turns) for record in groups[0].rollouts] == [2, 1]
    assert digits(talk) == 1
    run(trainer_of(tmp_path, data, batch_size=2, max_steps=1))


# --- as if they were trained live -----------------------------------------------------------------


class Steps(vf.MultiTurnEnv):
    """Three turns, worth what their lengths say; the reward is half of their sum and a bonus."""

    async def env_response(self, messages, state):
        return [{"role": "user", "content": "on"}]

    @vf.cleanup
    async def rewards(self, state):
        for number, step in enumerate(state["trajectory"]):
            step["reward"] = number * len(step["completion"][-1].content) / 3


class Longer(vf.TwoPlayerEnv):
    """The longer reply wins, by as much as it is longer."""

    def new_game(self, row):
        return []

    def to_move(self, game):
        return len(game) if len(game) < 2 else None

    def observation(self, game, player):
        return "a word?"

    def move(self, game, player, text):
        return [*game, len(text)]

    def payoff(self, game):
        return (game[0] - game[1]) / 7


def bonus(completion):
    return len(completion[-1].content) / 7


def steps(weights=(0.5, 0.3)):
    rubric = vf.Rubric([sum_step_rewards, bonus], list(weights))
    return Steps(dataset=rows(2), rubric=rubric, max_turns=3)


def played(env, folder=None, **options):
    """Four siblings of two examples; replies of different lengths."""
    texts = itertools.cycle(["a", "bcd", "ef", "ghij", "k", "l", "mno"])
    options = {"results_path": folder, "keep_states": True} | options
    return env.evaluate(
        ScriptedClient(lambda request: next(texts), tokens=True),
        "m",
        num_examples=2,
        rollouts_per_example=4,
        max_concurrent=1,
        **options,
    )


def batch_of(groups, config):
    """What is trained of some groups, to the bit, but the version of the policy that sampled."""
    row_arrays = []
    for row in build(groups, [], config).rows_R[0]:
        values = {
            name: getattr(row, name) for name in row.__dataclass_fields__ if name != "version"
        }
        row_arrays.append(
            {n: v.tobytes() if isinstance(v, np.ndarray) else v for n, v in values.items()}
        )
    return row_arrays


@pytest.mark.parametrize(
    ("make", "num_different"),
    [(steps, 7), (lambda: Longer(dataset=rows(2)), 5)],
    ids=["steps", "roles"],
)
@pytest.mark.parametrize("where", ["file", "file read again", "memory"])
def test_a_saved_group_gives_the_samples_of_the_live_group(make, num_different, where, tmp_path):
    env = make()
    results = played(env, tmp_path / "run", state_columns=["trajectory"])
    records = [state.rollout() for state in results["states"]]
    weights = dict(env.rubric.plan().weights)
    if where == "file read again":  # the second session takes all from the first
        results = played(env, tmp_path / "run", state_columns=["trajectory"])
    source = tmp_path / "run" if where == "file" else results
    differs = set()
    for credit, advantage, gamma in itertools.product(
        ("turn", "rollout"), ("mean", "none", "mean_std", "best"), (0.0, 0.9, 1.0)
    ):
        if credit == "turn" and advantage == "mean_std":  # has no form for turns
            continue
        settings = {"credit": credit, "gamma": gamma} if credit == "turn" else {"credit": credit}
        config = small_config(tmp_path, advantage=advantage, max_seq_len=512, **settings)
        live = [Group(n, n, tuple(records[4 * n : 4 * n + 4]), weights=weights) for n in range(2)]
        saved = read_groups(source, build_tiny_tokenizer(), config)
        trained = batch_of(live, config)
        assert batch_of(saved, config) == trained, (credit, advantage, gamma)
        differs.add(repr(trained))
    assert len(differs) >= num_different  # negative control: the settings matter


def test_a_weight_that_is_not_known_is_refused(tmp_path):
    results = played(steps())
    records = [state.rollout() for state in results["states"]]
    for record in records:
        record.turn_sum_weight = None
    config = small_config(tmp_path, credit="turn", advantage="mean", max_seq_len=512)
    with pytest.raises(ConfigError, match=r"'sum_step_rewards' weighs .* that weight is not known"):
        build([Group(0, 0, tuple(records[:4]))], [], config)


def test_credit_per_turn_of_a_run_without_its_turns_is_refused(tmp_path):
    played(steps(), tmp_path / "run")
    config = small_config(tmp_path, credit="turn", advantage="mean", max_seq_len=512)
    with pytest.raises(DatasetError, match="-C trajectory"):
        read_groups(tmp_path / "run", build_tiny_tokenizer(), config)
    whole = small_config(tmp_path, advantage="mean", max_seq_len=512)
    assert len(read_groups(tmp_path / "run", build_tiny_tokenizer(), whole)) == 2
