"""The trainers that the second guide derives, as it writes them, with a tiny model and local data
in their place."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from support.training import metrics_of, small_policy
from verifiers.envs import SingleTurnEnv
from verifiers.parsers import XMLParser
from verifiers.rubrics import Rubric, RubricGroup
from verifiers.trainers import GRPOConfig, GRPOTrainer
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer

SIZE = {
    "max_seq_len": 96,
    "max_new_tokens": 4,
    "max_steps": 2,
    "report_to": "none",
    "num_completions_to_print": 0,
    "zero_variance": "keep",
    "mask_truncated_completions": False,  # this model seldom ends by itself
}


def share_of_digits(completion, **_):
    text = completion[-1]["content"] or ""
    return sum(c.isdigit() for c in text) / max(1, len(text))


def shortness(completion, **_):
    return 1 / (1 + len(completion[-1]["content"] or ""))


def data(count=12):
    levels = ("easy", "medium", "hard")
    return [{"question": f"q{n}", "answer": "1", "difficulty": levels[n % 3]} for n in range(count)]


@pytest.fixture
def env():
    return SingleTurnEnv(
        dataset=data(), eval_dataset=data(6), rubric=Rubric(funcs=[share_of_digits])
    )


@pytest.fixture
def model():
    return small_policy()


@pytest.fixture
def tokenizer():
    return build_tiny_tokenizer()


def config(**settings):
    return GRPOConfig(
        **{"learning_rate": 1e-4, "batch_size": 8, "group_size": 4, **SIZE, **settings}
    )


def test_the_basic_setup(model, tokenizer):
    env = SingleTurnEnv(
        dataset=data(),
        parser=XMLParser(["reasoning", "answer"]),
        rubric=Rubric(funcs=[share_of_digits]),
    )
    settings = GRPOConfig(
        learning_rate=1e-5,
        batch_size=8,
        group_size=4,  # compare four answers to a prompt
        num_epochs=1,
        gradient_accumulation_steps=2,
        temperature=0.7,
        **{name: value for name, value in SIZE.items() if name != "max_steps"},
    )
    trainer = GRPOTrainer(model=model, tokenizer=tokenizer, env=env, config=settings)
    trainer.train()
    assert trainer.config.batch_size == 16
    assert trainer.policy_version == 3  # one pass over 12 prompts, four in a step


class OnlineGRPOTrainer(GRPOTrainer):
    def get_batch(self):
        """Generate a fresh batch."""
        prompts = self.env.sample_prompts(self.config.batch_size)
        all_completions = []
        all_rewards = []
        for prompt in prompts:
            completions = []
            for _ in range(self.config.group_size):
                completion, _ = self.env.rollout(
                    client=self.client,
                    model=self.model,
                    prompt=prompt["prompt"],
                    answer=prompt["answer"],
                    temperature=self.config.temperature,
                )
                completions.append(completion)
            rewards = []
            for completion in completions:
                score = self.env.rubric.score_rollout_sync(
                    prompt=prompt["prompt"],
                    completion=completion,
                    answer=prompt["answer"],
                    state={},
                )
                rewards.append(score["reward"])
            all_completions.extend(completions)
            all_rewards.extend(rewards)
        return prompts, all_completions, all_rewards


def test_a_trainer_that_generates_its_batches_itself(model, env, tokenizer):
    trainer = OnlineGRPOTrainer(
        model=model,
        tokenizer=tokenizer,
        env=env,
        config=config(batch_size=4, group_size=2, temperature=0.7),
    )
    trainer.train()
    first, second = metrics_of(Path(trainer.config.output_dir))
    assert first["rollouts/generated"] == second["rollouts/generated"] == 8
    assert first["sampler/log_ratio_abs"] < 1e-4


class CurriculumGRPOTrainer(GRPOTrainer):
    def __init__(self, *args, difficulty_schedule, **kwargs):
        super().__init__(*args, **kwargs)
        self.difficulty_schedule = difficulty_schedule
        self.seen = []

    def get_current_difficulty(self, epoch, step):
        """The level of the moment."""
        progress = epoch + step / self.num_steps_per_epoch
        for threshold, difficulty in self.difficulty_schedule:
            if progress < threshold:
                return difficulty
        return self.difficulty_schedule[-1][1]

    def get_batch(self, epoch, step):
        """Sample from the rows of the present level."""
        difficulty = self.get_current_difficulty(epoch, step)
        filtered_data = [d for d in self.env.dataset if d.get("difficulty", "easy") == difficulty]
        return self.sample_batch(filtered_data)

    def finish_step(self):
        super().finish_step()
        prompts = [group.records[0].text["prompt"][-1]["content"] for group in self.batch.groups]
        self.seen.append({data()[int(prompt[1:])]["difficulty"] for prompt in prompts})


def test_a_curriculum_by_subclass(model, env):
    trainer = CurriculumGRPOTrainer(
        model=model,
        env=env,
        tokenizer=build_tiny_tokenizer(),
        difficulty_schedule=[(1.0, "easy"), (2.0, "medium"), (3.0, "hard")],
        config=config(batch_size=24, group_size=4, max_steps=6),
    )
    assert trainer.num_steps_per_epoch == 2
    trainer.train()
    assert trainer.seen == [{"easy"}, {"easy"}, {"medium"}, {"medium"}, {"hard"}, {"hard"}]


class AdaptiveGRPOTrainer(GRPOTrainer):
    def __init__(self, *args, rubric_weights_schedule, **kwargs):
        super().__init__(*args, **kwargs)
        self.rubric_weights_schedule = rubric_weights_schedule
        self.asked = []

    def compute_rewards(self, completions, prompts, epoch):
        """Weights by the pass."""
        weights = self.rubric_weights_schedule.get(epoch, self.rubric_weights_schedule["default"])
        original_weights = self.env.rubric.get_group_weights()
        self.env.rubric.set_group_weights(weights)
        rewards = super().compute_rewards(completions, prompts)
        self.env.rubric.set_group_weights(original_weights)
        self.asked.append((epoch, rewards))
        return rewards


def test_weights_that_change_by_subclass(model, tokenizer):
    rubric = RubricGroup(
        [Rubric(funcs=[share_of_digits], weights=[1.0]), Rubric(funcs=[shortness], weights=[0.5])]
    )
    env = SingleTurnEnv(dataset=data(4), rubric=rubric)
    trainer = AdaptiveGRPOTrainer(
        model=model,
        tokenizer=tokenizer,
        env=env,
        rubric_weights_schedule={0: [0.0, 0.0], "default": [0.0, 2.0]},
        config=config(max_steps=4),
    )
    trainer.train()
    assert {reward for epoch, rewards in trainer.asked if epoch == 0 for reward in rewards} == {0.0}
    later = [reward for epoch, rewards in trainer.asked if epoch > 0 for reward in rewards]
    assert later
    assert all(0 < reward <= 1 for reward in later)
    assert rubric.get_group_weights() == [1.0, 1.0]


class EvaluatingGRPOTrainer(GRPOTrainer):
    def evaluate(self):
        """Evaluate on the validation set."""
        self.model.eval()
        total_reward = 0
        num_samples = 0
        with torch.no_grad():
            for batch in self.eval_dataloader:
                prompts = batch["prompts"]
                answers = batch["answers"]
                completions = self.generate(prompts)
                rewards = self.env.rubric.score_rollouts(
                    prompts=prompts,
                    completions=completions,
                    answers=answers,
                    states=[{} for _ in prompts],
                )
                total_reward += sum(rewards["reward"])
                num_samples += len(prompts)
        avg_reward = total_reward / num_samples
        self.model.train()
        return avg_reward


def test_an_evaluation_by_subclass(model, env, tokenizer):
    trainer = EvaluatingGRPOTrainer(
        model=model,
        tokenizer=tokenizer,
        env=env,
        config=config(eval_strategy="steps", eval_steps=1),
    )
    trainer.train()
    lines = [line for line in metrics_of(Path(trainer.config.output_dir)) if "eval_reward" in line]
    assert [line["step"] for line in lines] == [1, 2]
    trainer.close()


def test_several_measures_of_a_trained_model(model, env, tokenizer):
    with GRPOTrainer(model=model, tokenizer=tokenizer, env=env, config=config()) as trainer:
        metrics = {"reward": [], "response_length": [], "inference_time": []}
        for sample in env.eval_dataset:
            start_time = time.time()
            completion, _ = env.rollout(
                client=trainer.client,
                model=trainer.model,
                prompt=sample["prompt"],
                answer=sample["answer"],
            )
            scores = env.rubric.score_rollout_sync(
                prompt=sample["prompt"], completion=completion, answer=sample["answer"], state={}
            )
            metrics["reward"].append(scores["reward"])
            metrics["response_length"].append(len(completion))
            metrics["inference_time"].append(time.time() - start_time)
    means = {metric: np.mean(values) for metric, values in metrics.items()}
    assert means["response_length"] == 1
    assert 0 <= means["reward"] <= 1


def test_the_complete_script(model, tokenizer, caplog):
    parser = XMLParser(["reasoning", "answer"])
    rubric = Rubric(funcs=[share_of_digits, parser.get_format_reward_func()], weights=[1.0, 0.2])
    env = SingleTurnEnv(
        dataset=data(), parser=parser, rubric=rubric, system_prompt="Answer in tags."
    )
    settings = GRPOConfig(
        output_dir="./checkpoints",
        learning_rate=1e-5,
        batch_size=8,
        group_size=4,
        num_epochs=3,
        eval_steps=100,
        save_steps=2,
        logging_steps=10,
        warmup_ratio=0.1,
        gradient_checkpointing=True,
        **SIZE | {"report_to": "wandb"},
    )
    trainer = GRPOTrainer(
        model=model, tokenizer=tokenizer, env=env, config=settings, eval_dataset=data(3)
    )
    trainer.train()
    trainer.save_model("./final_model")
    eval_results = trainer.evaluate()
    trainer.close()
    assert Path("final_model/model.safetensors").is_file()
    assert Path("final_model/tokenizer_config.json").is_file()
    assert Path("checkpoints/checkpoint-2").is_dir()
    assert 0 <= eval_results["eval_reward"] <= 1.2
    rows = [
        line
        for line in Path("checkpoints/eval/step-2/results.jsonl").read_text().split("\n")
        if line
    ]
    assert len(rows) == 3


def test_memory_saving_as_written(model, env, tokenizer):
    from peft import LoraConfig, get_peft_model

    lora_config = LoraConfig(
        r=8, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]
    )
    model = get_peft_model(model, lora_config)
    model.gradient_checkpointing_enable()
    trainer = GRPOTrainer(model=model, tokenizer=tokenizer, env=env, config=config())
    trainer.train()
    assert trainer.policy_version == 2


def test_an_accelerator_of_ones_own(model, env, tokenizer):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)

    class DistributedGRPOTrainer(GRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.accelerator = accelerator
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    trainer = DistributedGRPOTrainer(model=model, tokenizer=tokenizer, env=env, config=config())
    trainer.train()
    assert trainer.policy_version == 2
