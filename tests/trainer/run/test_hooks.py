"""Methods that a subclass writes: which batch, which rows of it, what a rollout is worth, how it is
evaluated."""

from __future__ import annotations

import math
import threading

import pytest

import verifiers as vf
from support.training import (
    StepLog,
    digits,
    first_batch,
    metrics_of,
    run,
    small_config,
    small_policy,
    small_trainer,
    toy_env,
    weights_hash,
)
from verifiers.errors import ConfigError, DatasetError, NoLearningSignal
from verifiers_trainer.pipeline import subclass_hooks
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.trainer import RLTrainer


def trainer_of(kind, folder, env=None, **settings):
    env = env if env is not None else toy_env()
    return kind(small_policy(), env, small_config(folder, **settings), build_tiny_tokenizer())


def questions(batch):
    return [group.rollouts[0].text["prompt"][-1]["content"] for group in batch.groups]


# --- calling --------------------------------------------------------------------------------------


def test_a_hook_gets_what_it_names_and_nothing_else():
    arguments = {"epoch": 1, "step": 2, "states": []}
    assert subclass_hooks.call(lambda: "none", arguments) == "none"
    assert subclass_hooks.call(lambda step: step, arguments) == 2
    assert subclass_hooks.call(lambda epoch, /, step=0: (epoch, step), arguments) == (1, 2)
    assert subclass_hooks.call(lambda epoch, **remaining: remaining, arguments) == {
        "step": 2,
        "states": [],
    }
    with pytest.raises(
        ConfigError, match="requires 'batch', which the trainer does not provide; it provides epoch"
    ):
        subclass_hooks.call(lambda batch: 0, arguments)


# --- rows -----------------------------------------------------------------------------------------


class OneLetterFirst(RLTrainer):
    """Two rows of its own for each step."""

    calls: list

    def get_batch(self, epoch, step):
        self.calls.append((epoch, step, threading.current_thread().name))
        return [{"question": f"e{epoch}s{step}a"}, {"question": f"e{epoch}s{step}b"}]


def test_rows_that_a_subclass_returns_are_what_is_played(tmp_path):
    trainer = trainer_of(
        OneLetterFirst, tmp_path, toy_env(count=4), max_steps=4, zero_variance="keep"
    )
    trainer.calls, played = [], []
    log = StepLog()
    log.on_step_end = lambda *_, **__: played.extend(questions(trainer.batch))
    trainer.add_callback(log)
    trainer.train()
    assert played == [
        f"e{epoch}s{step}{row}" for epoch in (0, 1) for step in (0, 1) for row in "ab"
    ]
    assert [row_call[:2] for row_call in trainer.calls[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert trainer.calls[0][2] == "MainThread"  # the first tells which kind of batch it is
    assert trainer.num_steps_per_epoch == 2


def test_without_a_hook_the_schedule_of_the_trainer_is_used(tmp_path):
    played = questions(first_batch(trainer := small_trainer(tmp_path)))
    trainer.close()
    assert not any(question.startswith("e0") for question in played)


def test_rows_may_be_sampled_from_a_part_of_the_data(tmp_path):
    class Short(RLTrainer):
        def get_batch(self):
            return self.sample_batch([row for row in self.env.dataset if len(row["question"]) == 2])

    trainer = trainer_of(Short, tmp_path, max_steps=3, zero_variance="keep")
    log = run(trainer)
    assert len(log.steps) == 3
    assert {len(question) for question in questions(trainer.batch)} == {2}


def test_sampling_takes_each_row_once_in_a_pass_in_an_order_of_the_seed(tmp_path):
    rows = list(range(6))

    def order(seed):
        trainer = small_trainer(tmp_path, seed=seed)
        rows_taken = []
        for trainer._drawn_step in range(6):
            rows_taken += trainer.sample_batch(rows)
        return rows_taken

    rows_taken = order(1)
    assert sorted(rows_taken[:6]) == sorted(rows_taken[6:]) == rows
    assert rows_taken == order(1) != order(2)
    assert small_trainer(tmp_path).sample_batch([7]) == [7, 7]
    with pytest.raises(DatasetError, match="no rows to sample"):
        small_trainer(tmp_path).sample_batch([])


def test_fewer_rows_than_a_step_takes_are_played_several_times_and_it_is_said(tmp_path, caplog):
    class OneRow(RLTrainer):
        def get_batch(self):
            return [{"question": "only"}]

    trainer = trainer_of(OneRow, tmp_path, zero_variance="keep")
    batch = first_batch(trainer)
    trainer.close()
    assert questions(batch) == ["only", "only"]
    texts = [
        [record.text["completion"][-1]["content"] for record in group.rollouts]
        for group in batch.groups
    ]
    assert texts[0] != texts[1]  # the same example twice in a step is sampled twice, not copied
    assert "get_batch returned 1 rows, and a step takes 2" in caplog.text


def test_what_a_hook_raises_on_the_pipelines_thread_is_raised_by_train(tmp_path):
    class Breaks(RLTrainer):
        def get_batch(self, step):
            if step:
                raise LookupError("no more rows")
            return [{"question": "a"}, {"question": "b"}]

    with pytest.raises(LookupError, match="no more rows"):
        trainer_of(Breaks, tmp_path, max_steps=4).train()


def test_chosen_rows_resume_where_they_were(tmp_path):
    settings = {"max_steps": 4, "deterministic": True, "zero_variance": "keep"}
    uninterrupted = trainer_of(OneLetterFirst, tmp_path / "whole", **settings)
    uninterrupted.calls = []
    losses = run(uninterrupted).losses
    first = trainer_of(
        OneLetterFirst, tmp_path / "two", **settings | {"save_strategy": "steps", "save_steps": 2}
    )
    first.calls = []
    run(first)
    (tmp_path / "two" / "checkpoint-4").rename(tmp_path / "gone")
    again = trainer_of(OneLetterFirst, tmp_path / "two", **settings)
    again.calls = []
    assert run(again, resume_from_checkpoint=True).losses == losses[2:]
    assert weights_hash(again.model) == weights_hash(uninterrupted.model)


# --- rollouts -------------------------------------------------------------------------------------


class PlaysItself(RLTrainer):
    """Rolls out by itself, and rewards by the share of digits."""

    def get_batch(self):
        prompts, completions, rewards = self.env.sample_prompts(2), [], []
        for prompt in prompts:
            for _ in range(3):
                completion, _state = self.env.rollout(
                    client=self.client,
                    model=self.model,
                    prompt=prompt["prompt"],
                    answer=prompt["answer"],
                    temperature=self.config.temperature,
                )
                completions.append(completion)
                rewards.append(digits(completion))
        return prompts, completions, rewards


def test_rollouts_that_a_subclass_played_are_trained_on_the_tokens_that_were_sampled(tmp_path):
    trainer = trainer_of(PlaysItself, tmp_path, max_steps=2)
    before = weights_hash(trainer.model)
    log = run(trainer)
    assert weights_hash(trainer.model) != before
    assert [step["rollouts/generated"] for step in log.steps] == [6, 6]
    # else the tokens were others
    assert all(step["sampler/log_ratio_abs"] < 1e-4 for step in log.steps)
    assert [step["staleness/max"] for step in log.steps] == [0, 0]
    assert {line["policy_version"] for line in metrics_of(tmp_path)} == {1, 2}
    group = trainer.batch.groups[0]
    assert {record.oldest_version for record in group.rollouts} == {1}
    assert trainer.state.epoch == 4 / 40


def test_a_resumed_run_asks_for_the_step_that_follows(tmp_path):
    class Notes(PlaysItself):
        def get_batch(self, epoch, step):
            self.__dict__.setdefault("asked", []).append((epoch, step))
            return super().get_batch()

    settings = {"save_strategy": "steps", "save_steps": 2, "zero_variance": "keep"}
    first = trainer_of(Notes, tmp_path, max_steps=2, **settings)
    first.train()
    again = trainer_of(Notes, tmp_path, max_steps=3, **settings)
    again.train(resume_from_checkpoint=True)
    assert first.asked[0] == (0, 0)
    assert again.asked[0] == (0, len(first.asked))


class TwoTurns(vf.MultiTurnEnv):
    def __init__(self):
        super().__init__(
            dataset=[{"question": "ab"}] * 4, rubric=vf.Rubric(funcs=[digits]), max_turns=2
        )

    def env_response(self, messages, state):
        return [{"role": "user", "content": "again"}]


def test_several_turns_of_a_rollout_keep_their_tokens(tmp_path):
    trainer = trainer_of(PlaysItself, tmp_path, TwoTurns(), max_steps=1)
    log = run(trainer)
    assert {len(record.turns) for group in trainer.batch.groups for record in group.rollouts} == {2}
    assert log.steps[0]["sampler/log_ratio_abs"] < 1e-4


def test_text_that_the_policy_did_not_sample_is_refused(tmp_path):
    class Invents(RLTrainer):
        def get_batch(self):
            answer = [{"role": "assistant", "content": "12"}]
            return [{"question": "a"}], [answer, answer], [1.0, 0.0]

    with pytest.raises(
        ConfigError, match=r"message 0 of completion 0 was not sampled through trainer\.client"
    ):
        trainer_of(Invents, tmp_path).train()


def test_numbers_that_do_not_fit_are_refused(tmp_path):
    class Wrong(RLTrainer):
        def get_batch(self):
            return [{"question": "a"}, {"question": "b"}], [[], [], []], [1.0, 0.0, 0.0]

    with pytest.raises(ConfigError, match="2 prompts, 3 completions and 3 rewards"):
        trainer_of(Wrong, tmp_path).train()


def test_groups_may_be_returned_and_equal_rewards_end_the_run(tmp_path):
    class Again(RLTrainer):
        def get_batch(self, step):
            return kept

    kept = first_batch(source := small_trainer(tmp_path / "source")).groups
    source.close()
    trainer = trainer_of(Again, tmp_path / "again", max_steps=1)
    assert run(trainer).steps[0]["rollouts/trained"] == sum(len(group.rollouts) for group in kept)

    class Equal(PlaysItself):
        def get_batch(self):
            prompts, completions, rewards = super().get_batch()
            return prompts, completions, [1.0 for _ in rewards]

    with pytest.raises(
        NoLearningSignal, match=r"in 2 batches .* no group had two different rewards"
    ):
        trainer_of(Equal, tmp_path / "equal", no_signal_steps=2).train()


def test_the_length_rules_hold_for_groups_that_a_hook_returns(tmp_path):
    """An answer of four tokens is cut by max_tokens; its reward becomes 0, as for rollouts of the
    pipeline."""

    class Cut(PlaysItself):
        def get_batch(self):
            prompts, completions, _ = super().get_batch()
            return prompts, completions, [1.0 + n for n in range(len(completions))]

    plain, zeroed = (
        trainer_of(Cut, tmp_path / str(zero), max_steps=1, zero_truncated_completions=zero)
        for zero in (False, True)
    )
    for trainer in (plain, zeroed):
        run(trainer)
    cut = [rollout.is_truncated for group in zeroed.batch.groups for rollout in group.rollouts]
    rewards = [rollout.reward for group in zeroed.batch.groups for rollout in group.rollouts]
    assert any(cut)
    assert rewards == [0.0 if is_cut else 1.0 + n for n, is_cut in enumerate(cut)]
    assert [rollout.reward for group in plain.batch.groups for rollout in group.rollouts] == [
        1.0 + n for n in range(6)
    ]


# --- rewards --------------------------------------------------------------------------------------


def length(completion, **_):
    return len(completion[-1]["content"])


def two_rubrics(calls=None):
    def counted(completion, **_):
        if calls is not None:
            calls.append(1)
        return digits(completion)

    rubric = vf.RubricGroup(
        [vf.Rubric(funcs=[counted]), vf.Rubric(funcs=[length])], names=["right", "long"]
    )
    return vf.SingleTurnEnv(dataset=[{"question": "ab"}] * 8, rubric=rubric)


class Weighs(RLTrainer):
    """In the first pass only what is right counts, then only what is long."""

    def compute_rewards(self, completions, prompts, epoch):
        before = self.env.rubric.get_group_weights()
        self.env.rubric.set_group_weights([1.0, 0.0] if epoch == 0 else [0.0, 1.0])
        rewards = super().compute_rewards(completions, prompts)
        self.env.rubric.set_group_weights(before)
        return rewards


def test_weights_that_change_in_a_hook_change_rewards_and_score_nothing_again(tmp_path):
    calls, records = [], []
    trainer = trainer_of(Weighs, tmp_path, two_rubrics(calls), max_steps=6, zero_variance="keep")
    log = StepLog()
    log.on_step_end = lambda *_, **__: records.extend(
        (g.index, r) for g in trainer.batch.groups for r in g.rollouts
    )
    trainer.add_callback(log)
    trainer.train()
    assert {index // 8 for index, _ in records} == {0, 1}
    for index, record in records:
        assert record.reward == record.metrics["counted" if index < 8 else "length"]
    assert trainer.env.rubric.get_group_weights() == [1.0, 1.0]
    played = len(records)
    # each rollout once; at most two batches were begun ahead
    assert played <= len(calls) <= played + 2 * 8


def test_without_the_hook_the_rubric_decides(tmp_path):
    trainer = trainer_of(RLTrainer, tmp_path, two_rubrics(), zero_variance="keep")
    batch = first_batch(trainer)
    trainer.close()
    for record in (record for group in batch.groups for record in group.rollouts):
        assert record.reward == pytest.approx(record.metrics["counted"] + record.metrics["length"])


def test_a_hook_decides_by_what_it_asks_for_and_may_leave_a_reward_unknown(tmp_path):
    class OwnRewards(RLTrainer):
        async def compute_rewards(self, completions, states, answers):
            assert len(completions) == len(states) == len(answers)
            return [None] + [float(number) for number in range(1, len(completions))]

    trainer = trainer_of(OwnRewards, tmp_path, min_group_fraction=0.5)
    batch = first_batch(trainer)
    trainer.close()
    for group in batch.groups:
        assert math.isnan(group.rewards[0])
        assert group.rewards[1:].tolist() == [1.0, 2.0, 3.0]


def test_another_number_of_rewards_is_refused(tmp_path):
    class Few(RLTrainer):
        def compute_rewards(self, completions):
            return [1.0]

    with pytest.raises(ConfigError, match="compute_rewards returned 1 rewards for 4 completions"):
        trainer_of(Few, tmp_path).train()


def test_completions_that_were_never_scored_are_scored(tmp_path):
    trainer = small_trainer(tmp_path)
    answers = [[{"role": "assistant", "content": "12ab"}], [{"role": "assistant", "content": "9"}]]
    assert list(trainer.compute_rewards(answers, [{"prompt": "q"}, {"prompt": "q"}])) == [0.5, 1.0]


# --- evaluation and generation --------------------------------------------------------------------


def test_an_evaluation_of_ones_own_may_take_nothing_and_return_a_number(tmp_path):
    class Evaluates(RLTrainer):
        def evaluate(self):
            total, count = 0.0, 0
            for batch in self.eval_dataloader:
                completions = self.generate(batch["prompts"])
                scores = self.env.rubric.score_rollouts(
                    prompts=batch["prompts"],
                    completions=completions,
                    answers=batch["answers"],
                    states=[{} for _ in batch["prompts"]],
                )
                total += sum(scores["reward"])
                count += len(completions)
            self.count = count
            return total / count

    trainer = trainer_of(Evaluates, tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert trainer.count == 8
    lines = [line for line in metrics_of(tmp_path) if "eval_reward" in line]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(0 <= line["eval_reward"] <= 1 for line in lines)
    assert [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    with trainer:
        assert isinstance(trainer.evaluate(), float)


def test_an_evaluation_that_extends_the_trainers_is_written_once(tmp_path):
    class Adds(RLTrainer):
        def evaluate(self, *args, **keywords):
            return super().evaluate(*args, **keywords)

    run(trainer_of(Adds, tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1))
    assert len([line for line in metrics_of(tmp_path) if "eval_reward" in line]) == 1


def test_the_evaluation_set_comes_in_parts(tmp_path):
    trainer = small_trainer(tmp_path, per_device_eval_batch_size=3, eval_num_examples=7)
    parts = trainer.eval_dataloader
    assert [len(part["prompts"]) for part in parts] == [3, 3, 1]
    assert parts[0].keys() == {"prompts", "answers", "infos", "examples"}
    assert parts[0]["prompts"][0] == trainer.env.eval_dataset[0]["prompt"]


def test_the_policy_answers_texts_messages_and_rows_and_as_an_openai_client(tmp_path):
    import openai

    with small_trainer(tmp_path) as trainer:
        rows = [{"prompt": "ef"}, {"question": "gh"}, trainer.env.dataset[0]]
        completions = trainer.generate(["ab", [{"role": "user", "content": "cd"}], *rows])
        assert [completion[0]["role"] for completion in completions] == ["assistant"] * 5
        with pytest.raises(DatasetError, match="neither 'prompt' nor 'question'"):
            trainer.generate([{"text": "ij"}])
        assert all(len(trainer.client.turns_of(completion)) == 1 for completion in completions)
        answer = trainer.client.chat.completions.create(
            model=trainer.model.name_or_path or trainer.engine.served_model,
            messages=[{"role": "user", "content": "ab"}],
            max_tokens=3,
        )
        assert isinstance(answer, openai.types.chat.ChatCompletion)
        assert trainer.client.completions.create(
            model=trainer.client.model, prompt="ab", max_tokens=2
        ).choices


async def test_under_a_running_loop_the_openai_client_is_awaited(tmp_path):
    with small_trainer(tmp_path) as trainer:
        answer = await trainer.client.chat.completions.create(
            model=trainer.client.model, messages=[{"role": "user", "content": "ab"}], max_tokens=3
        )
        assert answer.choices


def test_completions_differ_although_they_have_one_prompt(tmp_path):
    with small_trainer(tmp_path, max_tokens=16) as trainer:
        texts = {completion[0]["content"] for completion in trainer.generate(["ab"] * 8)}
    assert len(texts) > 4
