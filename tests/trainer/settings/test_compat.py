"""Older and other names of settings: every row of the tables, as a keyword and as an attribute,
written and read."""

from __future__ import annotations

import importlib
import logging

import pytest

from support.training import small_trainer
from verifiers.errors import ConfigError
from verifiers_trainer.grpo import GRPOConfig, grpo_defaults, lora_defaults
from verifiers_trainer.pipeline.pipeline import Pipeline
from verifiers_trainer.settings import compat
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.settings.fields import field_names
from verifiers_trainer.trainer import RLTrainer

ROWS = [
    ("num_generations", 4, {"rollouts_per_example": 4}),
    ("group_size", 4, {"rollouts_per_example": 4}),
    ("kl_coef", 0.04, {"beta": 0.04}),
    ("kl_loss_coef", 0.04, {"beta": 0.04}),
    ("entropy_coeff", 0.01, {"entropy_coef": 0.01}),
    ("lr", 3e-4, {"learning_rate": 3e-4}),
    ("epochs", 3, {"num_train_epochs": 3}),
    ("per_device_train_batch_size", 2, {"micro_batch_size": 2}),
    ("max_prompt_length", 100, {"max_prompt_len": 100, "prompt_overflow": "truncate_left"}),
    ("max_completion_length", 200, {"max_completion_len": 200}),
    ("max_new_tokens", 50, {"max_tokens": 50}),
    ("num_epochs", 3, {"num_train_epochs": 3}),
    ("warmup_ratio", 0.1, {"warmup_steps": 0.1}),
    ("num_batches_ahead", 0, {"max_off_policy_steps": 0}),
    ("async_generation_timeout", 300.0, {"generation_timeout": 300.0}),
    ("generation_batch_size", 64, {"max_concurrent": 64}),
    ("generation_batch_size", 4096, {"max_concurrent": 1024}),
    ("generation_batch_size", None, {}),
    ("ppo_mini_batch_size", 8, {}),
    ("steps_per_generation", 4, {"updates_per_batch": 4}),
    ("steps_per_generation", None, {}),
    ("vllm_guided_decoding_regex", "a+", {"guided_regex": "a+"}),
    ("wandb_log_unique_prompts", True, {"log_unique_prompts": True}),
    ("use_liger_kernel", False, {"use_liger": False}),
    ("activation_checkpointing", True, {"gradient_checkpointing": True}),
    ("reward_weights", [1.0, 2.0], {"reward_weights_schedule": {"default": [1.0, 2.0]}}),
    ("reward_weights", None, {}),
    ("scale_rewards", True, {"advantage": "mean_std"}),
    ("scale_rewards", "group", {"advantage": "mean_std"}),
    ("scale_rewards", "batch", {"advantage": "batch_reward_std"}),
    ("scale_rewards", False, {"advantage": "mean"}),
    ("loss_type", "sapo", {"loss": "sapo"}),
    ("gae_lambda", 0.95, {}),
    ("embedded_num_blocks", 64, {}),
    ("embedded_page_size", 16, {}),
    ("ds3_gather_for_generation", False, {}),
    ("cast_lm_head_to_fp32", True, {}),
    ("log_multimodal", True, {}),
    ("max_data_workers", 4, {}),
    ("async_max_queue_size", 9, {}),
    ("embedded_num_blocks", 64, {}),
    ("embedded_page_size", 16, {}),
]


@pytest.mark.parametrize(
    ("name", "value", "means"), ROWS, ids=[f"{name}={value}" for name, value, _ in ROWS]
)
@pytest.mark.parametrize("kind", [RLConfig, GRPOConfig])
def test_a_name_means_the_same_as_keyword_and_as_attribute(kind, name, value, means):
    constructed = kind(**{name: value})
    assigned = kind()
    setattr(assigned, name, value)
    for config in (constructed, assigned):
        assert {field: getattr(config, field) for field in means} == means
        assert all(config.is_given(field) for field in means)
        assert getattr(config, name) == value


def test_every_row_is_a_case():
    duplicates = {duplicate for _, duplicate in compat.DUPLICATES}
    assert {name for name, _, _ in ROWS} == compat.SPELLINGS | duplicates


def test_every_row_leads_to_a_field_and_hides_none():
    targets = {*compat.RENAMED.values(), *(field for field, _ in compat.TRANSLATED.values())}
    assert targets <= field_names()
    assert not compat.SPELLINGS & field_names()
    assert {name for pair in compat.DUPLICATES for name in pair} <= field_names()


def test_a_name_that_was_not_set_reads_as_the_setting_it_bears_on():
    config = RLConfig(rollouts_per_example=32, max_prompt_len=9)
    config.micro_batch_size = 16
    assert (config.num_generations, config.max_prompt_length, config.scale_rewards) == (
        32,
        9,
        "mean",
    )
    assert (config.per_device_train_batch_size, config.gae_lambda) == (16, None)


@pytest.mark.parametrize(
    ("name", "aggregation", "advantage"),
    [
        ("grpo", "sequence_mean", "mean_std"),
        ("bnpo", "token_mean", "mean_std"),
        ("dapo", "token_mean", "mean_std"),
        ("dr_grpo", "constant_length", "mean"),
        ("gspo", "sequence_mean", "mean_std"),
        ("cispo", "token_mean", "mean"),
        ("sapo", "sequence_mean", "mean_std"),
        ("vespo", "token_mean", "mean"),
    ],
)
@pytest.mark.parametrize("kind", [RLConfig, GRPOConfig])
def test_a_loss_type_reads_back_and_is_the_aggregation_and_the_advantage_of_its_source(
    kind, name, aggregation, advantage
):
    assigned = kind(num_generations=8)
    assigned.loss_type = name
    for config in (kind(loss_type=name), assigned, kind(loss=name), assigned.private_copy()):
        for _ in range(2):
            assert (config.loss, config.loss_type) == (name, name)
            assert (config.aggregation, config.advantage) == (aggregation, advantage)
            config.resolve()
    settings_made = kind(loss_type=name, aggregation="prompt_mean", scale_rewards="batch")
    settings_made.resolve()
    assert (settings_made.loss_type, settings_made.aggregation, settings_made.scale_rewards) == (
        name,
        "prompt_mean",
        "batch",
    )


def test_another_loss_takes_the_aggregation_of_the_first_one_away():
    config = GRPOConfig(loss_type="grpo")
    config.loss_type = "dr_grpo"
    assert (config.aggregation, config.advantage) == ("constant_length", "mean")
    config.loss = lambda row: row.log_pi
    assert (config.aggregation, config.advantage) == ("token_mean", "mean")


def test_a_loss_type_reads_back_from_the_trainers_settings(tmp_path):
    trainer = small_trainer(tmp_path, loss_type="dr_grpo", max_completion_length=5)
    assert (trainer.args.loss_type, trainer.args.loss, trainer.args.aggregation) == (
        *("dr_grpo", "dr_grpo"),
        "constant_length",
    )


def test_the_defaults_of_grpo_scripts_are_dr_grpo():
    assert grpo_defaults().loss_type == GRPOConfig().loss_type == "dr_grpo"
    assert (GRPOConfig().aggregation, GRPOConfig().advantage) == ("constant_length", "mean")


def test_two_names_of_one_setting_must_agree():
    assert RLConfig(group_size=4, num_generations=4).rollouts_per_example == 4
    with pytest.raises(
        ConfigError, match="num_generations is another name of group_size, and their values differ"
    ):
        RLConfig(group_size=4, num_generations=8)
    with pytest.raises(ConfigError, match="another name of micro_batch_size"):
        RLConfig(micro_batch_size=4, per_device_train_batch_size=8)


@pytest.mark.parametrize("steps", [0, 0.0, 5])
def test_a_warm_up_of_0_beside_the_other_spelling_is_unset(steps):
    settings = {"warmup_steps": steps, "warmup_ratio": 0.1}
    if steps:  # negative control: two lengths contradict each other
        with pytest.raises(ConfigError, match="another name of warmup_steps"):
            GRPOConfig(**settings)
        return
    assert GRPOConfig(**settings).warmup_steps == 0.1
    assert grpo_defaults("x", **settings).warmup_steps == 0.1
    assert RLConfig(warmup_ratio=0.0, warmup_steps=7).warmup_steps == 7
    assert grpo_defaults("x", warmup_steps=0, warmup_ratio=0.0).warmup_steps == 0


def test_the_end_of_a_prompt_is_kept_unless_said_otherwise():
    assert RLConfig(max_prompt_length=9, prompt_overflow="skip").prompt_overflow == "skip"
    assert RLConfig(max_prompt_len=9).prompt_overflow is None


def test_a_name_without_effect_says_so_once_and_as_a_warning(caplog):
    compat.warn_without_effect.cache_clear()
    for _ in range(2):
        config = GRPOConfig(gae_lambda=0.95)
        config.ds3_gather_for_generation = False
    said = [record for record in caplog.records if "has no effect" in record.message]
    assert [record.levelno for record in said] == [logging.WARNING] * 2
    assert said[0].message.startswith("gae_lambda has no effect: there is no critic")
    assert said[1].message.startswith("ds3_gather_for_generation has no effect")


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("trainer", "RLTrainer", RLTrainer),
        ("config", "RLConfig", RLConfig),
        ("orchestrator", "Orchestrator", Pipeline),
    ],
)
def test_the_modules_of_the_trainer_of_older_versions(module, name, value):
    assert getattr(importlib.import_module(f"verifiers.rl.trainer.{module}"), name) is value


def test_scale_rewards_refuses_what_it_does_not_know():
    with pytest.raises(ConfigError, match="scale_rewards is 'sometimes'"):
        RLConfig(scale_rewards="sometimes")


def test_a_misspelt_name_is_refused_as_keyword_and_said_as_attribute(caplog):
    with pytest.raises(ConfigError, match="'num_generation' \\(did you mean 'num_generations'"):
        GRPOConfig(num_generation=4)
    config = GRPOConfig()
    config.max_completion_lenght = 3
    config.my_own_note = "anything"
    assert "did you mean 'max_completion_length'" in caplog.text
    assert "my_own_note" not in caplog.text


# --- GRPOConfig -----------------------------------------------------------------------------------


def rollouts_per_step(world=1, **settings):
    config = GRPOConfig(**settings)
    config.resolve(world)
    config.resolve(world)  # settling what is settled changes nothing
    return config.batch_size, config.micro_batch_size


def test_rollouts_of_a_step_are_what_grpo_scripts_multiply():
    assert rollouts_per_step() == (8, 8)
    assert rollouts_per_step(
        per_device_train_batch_size=4, gradient_accumulation_steps=4, num_generations=8
    ) == (16, 4)
    assert rollouts_per_step(2, per_device_train_batch_size=4, gradient_accumulation_steps=4) == (
        32,
        4,
    )


def test_a_given_batch_size_is_multiplied_by_the_steps_of_accumulation():
    assert rollouts_per_step(batch_size=32, gradient_accumulation_steps=4, group_size=4) == (128, 8)
    assert rollouts_per_step(batch_size=36, group_size=4) == (36, 6)
    assert rollouts_per_step(batch_size=64, micro_batch_size=4) == (64, 4)


def test_what_is_assigned_later_is_multiplied_too():
    config = grpo_defaults("x")
    config.per_device_train_batch_size = 8
    config.num_generations = 16
    config.gradient_accumulation_steps = 4
    config.resolve()
    assert (config.batch_size, config.micro_batch_size, config.gradient_accumulation_steps) == (
        32,
        8,
        1,
    )


def test_a_group_that_does_not_divide_the_product_is_explained_in_the_users_terms():
    with pytest.raises(
        ConfigError,
        match=(
            r"batch_size 32 \(per_device_train_batch_size 8 x processes 1 x"
            r" gradient_accumulation_steps 4\) is not "
            "divisible by rollouts_per_example = 12; the nearest that are: 24 or 48"
        ),
    ):
        grpo_defaults(num_generations=12).resolve()


def test_the_defaults_of_grpo():
    config = GRPOConfig()
    assert (config.loss, config.aggregation, config.use_lora) == (
        "dr_grpo",
        "constant_length",
        False,
    )
    assert (config.mask_truncated_completions, config.max_grad_norm, config.save_steps) == (
        True,
        0.01,
        500,
    )
    assert (config.mask_ratio_low, config.mask_ratio_high) == (0.0, float("inf"))
    assert config.report_to == ["wandb"]
    assert not config.is_given("loss")
    assert GRPOConfig(use_lora=True).learning_rate == 1e-6
    assert RLConfig().learning_rate == 1e-5


def test_grpo_defaults_are_exactly_the_documented_ones():
    config = grpo_defaults(run_name="my-experiment")
    assert isinstance(config, GRPOConfig)
    expected = {
        "output_dir": "outputs/my-experiment",
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10,
        "max_steps": 500,
        "max_grad_norm": 0.01,
        "max_seq_len": 4096,
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "save_steps": 500,
        "logging_steps": 1,
        "log_completions": True,
        "report_to": ["wandb"],
    }
    assert {name: getattr(config, name) for name in expected} == expected
    config.resolve()
    assert config.batch_size == 32


def test_overrides_of_grpo_defaults_win_under_any_name_and_the_rest_stays_a_default():
    config = grpo_defaults("x", num_generations=4, per_device_train_batch_size=2, num_epochs=2)
    assert (config.rollouts_per_example, config.micro_batch_size) == (4, 2)
    config.resolve()
    assert config.batch_size == 8
    # two passes of ten examples, four rollouts each, eight a step
    assert config.steps_for(10) == 10
    assert grpo_defaults("x", batch_size=64).batch_size == 64


def test_lora_defaults_are_over_the_attention_projections():
    config = lora_defaults(r=4, lora_dropout=0.1)
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 16, 0.1)
    assert config.target_modules == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert str(config.task_type) == "CAUSAL_LM" or config.task_type.value == "CAUSAL_LM"


# --- updates of a batch ---------------------------------------------------------------------------


def test_examples_of_an_update_become_updates_of_a_batch_when_the_batch_is_known():
    config = RLConfig(ppo_mini_batch_size=4, rollouts_per_example=8)
    config.batch_size = 128  # set later: 16 examples
    for _ in range(2):
        config.resolve()
        assert (config.updates_per_batch, config.ppo_mini_batch_size) == (4, 4)
    with pytest.raises(ConfigError, match=r"ppo_mini_batch_size is 5, .* must divide the 16"):
        RLConfig(ppo_mini_batch_size=5, rollouts_per_example=8, batch_size=128).resolve()
    with pytest.raises(ConfigError, match="ppo_mini_batch_size 4 means 4 updates of a batch"):
        RLConfig(
            ppo_mini_batch_size=4, rollouts_per_example=8, batch_size=128, updates_per_batch=2
        ).resolve()


def test_steps_per_generation_counts_micro_batches_as_grpo_scripts_do():
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_generations": 8,
    }
    config = GRPOConfig(**settings, steps_per_generation=8)
    for _ in range(2):
        config.resolve(2)
        assert (config.updates_per_batch, config.batch_size) == (2, 4 * 2 * 8)
    # negative control: an update is what a step was
    assert rollouts_per_step(2, **settings) == (32, 4)
    assert rollouts_per_step(batch_size=64, updates_per_batch=4, num_generations=8) == (64, 8)
    with pytest.raises(
        ConfigError,
        match="steps_per_generation 6 is not a multiple of gradient_accumulation_steps 4",
    ):
        GRPOConfig(**settings, steps_per_generation=6).resolve()


def test_more_updates_than_rollouts_are_refused():
    with pytest.raises(ConfigError, match="updates_per_batch 17 divides a batch of 16 rollouts"):
        RLConfig(batch_size=16, updates_per_batch=17, max_steps=17).resolve()
