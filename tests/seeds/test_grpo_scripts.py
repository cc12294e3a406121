"""Scripts as the guides of the ``GRPOTrainer`` write them, on a tiny local model: they run, and
settings count."""

from __future__ import annotations

from pathlib import Path

import pytest

import verifiers as vf
from support.training import metrics_of
from verifiers_trainer.settings.compat import known_names
from verifiers_trainer.settings.cross_field_rules import trackers

MODEL = "builtin:tiny"


def share_of_letters(completion, **_):
    text = completion[-1]["content"] or ""
    return sum(c.islower() for c in text) / max(1, len(text))


@pytest.fixture
def vf_env():
    env = vf.load_environment(
        "reverse-text", unit="word", num_train_examples=24, num_eval_examples=4
    )
    # something that an untrained model gets now and then
    env.add_rubric(vf.Rubric(funcs=[share_of_letters]))
    return env


def a_few_short_steps(args, steps=1):
    """What makes a documented configuration fit a test: its shape stays, its size shrinks."""
    args.max_steps, args.max_completion_length, args.zero_variance = steps, 6, "keep"
    args.per_device_train_batch_size = 4
    args.num_generations = 4
    args.gradient_accumulation_steps = 2
    # this model seldom ends by itself
    args.num_completions_to_print, args.mask_truncated_completions = 0, False
    return args


def test_the_shortest_script(vf_env):
    model, tokenizer = vf.get_model_and_tokenizer(MODEL)
    args = a_few_short_steps(vf.grpo_defaults(run_name="my-experiment"))
    trainer = vf.GRPOTrainer(model=model, processing_class=tokenizer, env=vf_env, args=args)
    trainer.train()

    (line,) = metrics_of(Path("outputs/my-experiment"))
    assert line["rollouts/trained"] + line["reward/unscored"] + line["rollouts/truncated"] >= 0
    assert line["rollouts/generated"] >= 8
    assert trainer.config.batch_size == 8
    assert trainer.policy_version == 1


def test_the_names_are_where_every_age_looked_for_them():
    from verifiers.rl.trainer import RLConfig as ThirdAge
    from verifiers.trainers import GRPOConfig, GRPOTrainer

    assert (GRPOConfig, GRPOTrainer, ThirdAge) == (vf.GRPOConfig, vf.GRPOTrainer, vf.RLConfig)
    assert issubclass(vf.GRPOTrainer, vf.RLTrainer)
    assert issubclass(vf.GRPOConfig, vf.RLConfig)
    assert vf.get_model(MODEL).name_or_path == MODEL
    assert vf.get_tokenizer(MODEL).chat_template


def test_the_key_parameters_say_what_a_step_is():
    args = vf.grpo_defaults(run_name="descriptive-name")
    args.per_device_train_batch_size = 8
    args.num_generations = 16
    args.gradient_accumulation_steps = 4
    args.max_prompt_length = 1024
    args.max_completion_length = 2048
    args.max_steps = 500
    args.learning_rate = 1e-6
    args.temperature = 1.0
    args.top_p = 1.0
    args.resolve(world_size=2)
    assert args.batch_size == 64
    assert (args.max_prompt_len, args.prompt_overflow, args.max_turn_tokens) == (
        1024,
        "truncate_left",
        2048,
    )
    assert args.sampling()["truncate_prompt_tokens"] == 1024


GROUPS = {
    "batch": {
        "per_device_train_batch_size": 8,
        "num_generations": 16,
        "gradient_accumulation_steps": 4,
    },
    "generation": {
        "max_tokens": 1024,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "max_prompt_length": 1024,
        "max_completion_length": 2048,
        "max_seq_len": 4096,
    },
    "schedule": {
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10,
        "max_steps": 500,
        "num_iterations": 1,
        "max_grad_norm": 0.01,
    },
    "objective": {
        "beta": 0.001,
        "sync_ref_model": True,
        "ref_model_sync_steps": 100,
        "ref_model_mixup_alpha": 0.5,
        "loss_type": "dr_grpo",
        "epsilon": 0.2,
        "delta": None,
    },
    "asynchrony": {
        "num_batches_ahead": 1,
        "async_generation_timeout": 300.0,
        "max_concurrent": 1024,
    },
    "evaluation": {"eval_strategy": "steps", "eval_steps": 100, "per_device_eval_batch_size": 16},
    "custom sampling": {"repetition_penalty": 1.1, "top_k": 50, "min_p": 0.05},
    "resources": {
        "gradient_checkpointing": True,
        "ds3_gather_for_generation": False,
        "generation_batch_size": 16,
    },
    "logging": {
        "logging_steps": 1,
        "log_completions": True,
        "report_to": "wandb",
        "num_completions_to_print": 5,
    },
    "saving": {"save_strategy": "steps", "save_steps": 500},
    "second age": {
        "learning_rate": 1e-5,
        "batch_size": 32,
        "group_size": 4,
        "gradient_accumulation_steps": 4,
        "temperature": 0.7,
        "max_new_tokens": 512,
        "top_p": 0.9,
        "kl_coef": 0.1,
        "gamma": 1.0,
        "gae_lambda": 0.95,
        "num_epochs": 3,
        "warmup_ratio": 0.1,
        "weight_decay": 0.01,
        "fp16": True,
        "gradient_checkpointing": True,
        "logging_steps": 10,
        "eval_steps": 100,
        "save_steps": 500,
        "output_dir": "./checkpoints",
        "report_to": "wandb",
    },
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("how", ["keywords", "attributes"])
def test_every_documented_setting_is_taken_either_way(group, how):
    settings = GROUPS[group]
    if missing := settings.keys() - known_names():
        pytest.skip(f"settings that are still to come: {', '.join(sorted(missing))}")
    args = vf.GRPOConfig(**settings) if how == "keywords" else vf.grpo_defaults("x")
    if how == "attributes":
        for name, value in settings.items():
            setattr(args, name, value)
    args.num_generations = 4 if group == "second age" else 8
    args.resolve()
    if group == "second age":
        assert (args.batch_size, args.rollouts_per_example, args.max_tokens) == (128, 4, 512)
        assert args.warmup_steps == 0.1
    if group == "logging":
        assert trackers(args.report_to) == ["wandb"]


def test_no_tracker_when_none_is_asked_for():
    for nothing in (None, "none"):
        args = vf.grpo_defaults("x")
        args.report_to = nothing
        args.resolve()
        assert trackers(args.report_to) == []


def test_an_adapter_from_the_defaults(vf_env):
    model, tokenizer = vf.get_model_and_tokenizer(MODEL)
    trainer = vf.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        env=vf_env,
        args=a_few_short_steps(vf.grpo_defaults(run_name="lora")),
        peft_config=vf.lora_defaults(r=8, alpha=16),
    )
    trainer.train()
    trained = [
        name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad
    ]
    assert trained
    assert all("lora_" in name for name in trained)
    trainer.save_model("adapter")
    trainer.save_model("whole", merged=True)
    assert Path("adapter/adapter_model.safetensors").is_file()
    assert Path("whole/model.safetensors").is_file()
    assert not Path("whole/adapter_config.json").exists()


def test_evaluation_and_saving_while_training(vf_env):
    model, tokenizer = vf.get_model_and_tokenizer(MODEL)
    args = a_few_short_steps(vf.grpo_defaults(run_name="watched"), steps=2)
    args.eval_strategy = "steps"
    args.eval_steps = 1
    args.per_device_eval_batch_size = 16
    args.save_strategy = "steps"
    args.save_steps = 2
    trainer = vf.GRPOTrainer(model=model, processing_class=tokenizer, env=vf_env, args=args)
    trainer.train()
    lines = metrics_of(Path("outputs/watched"))
    assert [line["step"] for line in lines if "eval_reward" in line] == [1, 2]
    assert Path("outputs/watched/checkpoint-2/model.safetensors").is_file()


class Calculator(vf.ToolEnv):
    """Sums, with a tool that adds."""

    def __init__(self):
        def add(a: int, b: int) -> int:
            """Add two numbers.

            Args:
                a: one number
                b: another
            """
            return a + b

        def has_a_five(completion, **_):
            return float("5" in (completion[-1].get("content") or ""))

        rows = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(8)]
        super().__init__(
            tools=[add], dataset=rows, rubric=vf.Rubric(funcs=[has_a_five]), max_turns=2
        )


def test_training_with_tools():
    model, tokenizer = vf.get_model_and_tokenizer(MODEL)
    args = a_few_short_steps(vf.grpo_defaults(run_name="tool-training"))
    args.max_steps, args.max_completion_length = 1, 24
    trainer = vf.GRPOTrainer(model=model, processing_class=tokenizer, env=Calculator(), args=args)
    trainer.train()
    assert trainer.policy_version == 1


def test_a_wrong_batch_is_explained_in_the_words_of_the_script(vf_env):
    args = vf.grpo_defaults(run_name="wrong")
    args.per_device_train_batch_size = 8
    args.num_generations = 12
    args.gradient_accumulation_steps = 1
    with pytest.raises(
        vf.ConfigError, match=r"per_device_train_batch_size 8 x processes 1 x gradient_accumulation"
    ):
        vf.GRPOTrainer(model=MODEL, env=vf_env, args=args)
