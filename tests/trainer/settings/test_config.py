"""Settings: everything wrong is said at once, what is changed later counts, and every field does
something."""

import ast
from pathlib import Path

import pytest
import torch

import verifiers_trainer
from verifiers.errors import ConfigError
from verifiers.runtime.suggest import SIMILAR, close_match
from verifiers_trainer.algorithm.advantages import ADVANTAGES
from verifiers_trainer.algorithm.losses import BOUNDS
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.settings.cross_field_rules import trackers
from verifiers_trainer.settings.fields import Settings, Unsupported, field_names, mark
from verifiers_trainer.settings.sampling import reshaping_arguments, unreshaped


def problems(**settings):
    with pytest.raises(ConfigError) as raised:
        RLConfig(**settings).resolve()
    return str(raised.value)


def test_the_defaults_are_accepted():
    RLConfig().resolve()


def test_every_problem_is_in_one_error():
    said = problems(
        batch_size=100,
        temperature=0.0,
        loss="cisop",
        aggregation="mean",
        zero_variance="skip",
        top_k=-2,
        max_tokens=4096,
    )
    assert said.startswith("7 setting(s) of the training cannot be used:")
    for part in (
        (
            "batch_size 100 is not divisible by rollouts_per_example = 16 and micro_batch_size x"
            " processes = 8; the nearest that are: 96 or 112"
        ),
        "temperature must be a number from 1e-06 to 2, not 0.0",
        "cisop",
        "did you mean 'cispo'",
        "not 'mean'",
        "zero_variance must be one of drop, keep, not 'skip'",
        "not -2",
        "max_tokens 4096 leaves no room",
    ):
        assert part in said


@pytest.mark.parametrize("spelling", ["GRPO", "dr-grpo", "dapo"])
def test_a_loss_given_as_the_advantage_is_said(spelling):
    """Negative control: the advantage spelled most like GRPO is gdpo, another method."""
    assert close_match(spelling, ADVANTAGES, SIMILAR) in (None, "gdpo")
    said = problems(advantage=spelling)
    name = spelling.lower().replace("-", "_")
    assert f"is a loss: set loss = '{name}', whose advantage is" in said
    assert "gdpo" not in said


@pytest.mark.parametrize(
    ("settings", "near"),
    [
        ({"batch_size": 20, "rollouts_per_example": 6, "micro_batch_size": 4}, "12 or 24"),
        ({"batch_size": 3, "rollouts_per_example": 4, "micro_batch_size": 2}, "4"),
        ({"batch_size": 30, "rollouts_per_example": 10, "micro_batch_size": 4}, "20 or 40"),
    ],
)
def test_the_nearest_batch_sizes_that_are_named_are_accepted(settings, near):
    assert problems(**settings).endswith(f"the nearest that are: {near}")
    for size in near.split(" or "):
        RLConfig(**settings | {"batch_size": int(size)}).resolve()


def test_the_number_of_processes_counts_in_the_divisibility():
    config = RLConfig(batch_size=16, rollouts_per_example=4, micro_batch_size=8)
    config.resolve(2)
    with pytest.raises(
        ConfigError, match="micro_batch_size x processes = 24; the nearest that are: 24"
    ):
        config.resolve(3)


def test_unknown_keywords_are_refused_with_the_nearest_name():
    with pytest.raises(
        ConfigError, match=r"'temprature' \(did you mean 'temperature'\?\).*'batchsize'"
    ):
        RLConfig(temprature=0.7, batchsize=3)


@pytest.mark.parametrize(
    "settings",
    [
        {"rollouts_per_example": 1, "batch_size": 8},
        {"rollouts_per_example": 0, "advantage": "none"},
        {"batch_size": 64.0},
        {"batch_size": True},
        {"temperature": "hot"},
        {"mask_ratio_low": "low"},
        {"mask_ratio_low": 2.0},
        {"ratio_cap": 0.5},
        {"delta": 1.1},
        {"delta": "x"},
        {"dual_clip": 0.5},
        {"max_concurrent": 8},
        {"deterministic": True, "embedded_mode": "padded"},
        {"eval_num_examples": 0},
        {"max_steps": 0},
        {"report_to": "wnadb"},
        {"loss_kwargs": {"ratio_cp": 3}},
        {"sampling_args": {"temperature": 0.5}},
        {"eval_strategy": "stepz"},
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(settings):
    name, *_ = settings
    assert name in problems(**{"batch_size": 512} | settings)


def test_settings_of_transformers_that_cannot_be_honoured_are_refused_with_the_way_to_do_it():
    said = problems(
        gradient_accumulation_steps=4, torch_compile_mode="reduce-overhead", neftune_noise_alpha=5.0
    )
    assert (
        "gradient_accumulation_steps is 4, which this trainer does not support: batch_size"
        " counts all" in said
    )
    assert said.startswith("3 setting(s)")
    unsupported = {
        name: unsupported_mark
        for name in field_names()
        if (unsupported_mark := mark(name, Unsupported))
    }
    assert len(unsupported) == 8
    for name, unsupported_mark in unsupported.items():
        assert getattr(RLConfig(), name) in unsupported_mark.off


# --- what follows from other settings -------------------------------------------------------------


def test_what_is_changed_after_construction_is_honoured_with_what_follows_from_it():
    config = RLConfig()
    assert config.learning_rate == 1e-5
    config.use_lora = False
    config.run_name = "mine"
    config.bf16 = not torch.cuda.is_available()
    config.gradient_checkpointing = True
    config.temperature = 0.7
    config.resolve()
    assert config.learning_rate == 1e-6
    assert Path(config.output_dir) == Path("outputs/mine")
    assert (config.bf16, config.mixed_precision) == (False, "no") or torch.cuda.is_available()
    assert config.activation_checkpointing is True
    assert config.sampling()["temperature"] == 0.7

    config.batch_size = 100
    with pytest.raises(ConfigError, match="batch_size 100"):
        config.resolve()


def test_what_was_given_is_not_derived_again():
    config = RLConfig(learning_rate=3e-4, output_dir="here", run_name="mine")
    config.use_lora = False
    config.resolve()
    assert (config.learning_rate, config.output_dir) == (3e-4, "here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("asked", [{"bf16": True}, {"fp16": True}])
def test_half_precision_without_an_accelerator_becomes_float32_with_a_warning(asked, caplog):
    config = RLConfig(**asked)
    config.resolve()
    assert (config.bf16, config.fp16, config.use_cpu) == (False, False, True)
    assert "computes in float32" in caplog.text


def test_report_to_none_means_none():
    for nothing in (None, "none", []):
        config = RLConfig(report_to=nothing)
        config.resolve()
        assert trackers(config.report_to) == []


def test_auto_reports_to_wandb_only_where_it_is_installed_and_configured(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = RLConfig(report_to="auto")
    config.resolve()
    assert trackers(config.report_to) == []
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(
        "verifiers_trainer.settings.cross_field_rules.find_spec", lambda name: object()
    )
    assert trackers(config.report_to) == ["wandb"]


def test_a_private_copy_does_not_change_the_original():
    config = RLConfig()
    copied = config.private_copy()
    copied.learning_rate, copied.packing = 1.0, False
    assert (config.packing, config.is_given("learning_rate")) == (True, False)


def test_steps_follow_from_passes_when_only_those_are_given():
    shape = {"batch_size": 32, "rollouts_per_example": 8, "micro_batch_size": 8}
    assert RLConfig(**shape, num_train_epochs=2).steps_for(10) == 5
    # three passes are transformers' default
    assert RLConfig(**shape, max_steps=-1).steps_for(10) == 8
    assert RLConfig(**shape, num_train_epochs=2, max_steps=7).steps_for(10) == 7
    assert RLConfig(**shape).steps_for(10) == 500


NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
NEUTRAL |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}


def test_sampling_leaves_nothing_to_the_defaults_of_a_server():
    assert RLConfig().sampling() == {"temperature": 1.0, **NEUTRAL}
    assert RLConfig(top_k=0, top_p=1).sampling() == {"temperature": 1.0, **NEUTRAL}
    assert RLConfig(
        top_p=0.9, top_k=20, min_p=0.1, max_tokens=8, sampling_args={"ignore_eos": True, "x": None}
    ).sampling() == {
        "temperature": 1.0,
        **NEUTRAL,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "max_tokens": 8,
        "ignore_eos": True,
    }


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"logit_bias": {"5": 1.0}}, ["logit_bias"]),
        ({"min_tokens": 4}, ["min_tokens"]),
        ({"guided_json": {"type": "object"}}, ["guided_json"]),
        ({"structured_outputs": {"regex": "a+"}}, ["structured_outputs"]),
        ({"extra_body": {"bad_words": ["no"]}}, ["bad_words"]),
        ({"response_format": {"type": "json_object"}}, ["response_format"]),
        ({"tool_choice": "required"}, ["tool_choice"]),
        ({"min_tokens": 0, "logit_bias": {}, "tool_choice": "auto", "ignore_eos": True}, []),
        ({"response_format": {"type": "text"}}, []),
    ],
)
def test_what_excludes_or_favours_tokens_counts_as_reshaping(arguments, names):
    config = RLConfig(sampling_args=arguments)
    assert config.reshaping == names
    refused = RLConfig(sampling_args=arguments, truncated_sampling="refuse").problems()
    assert any("truncated_sampling='refuse'" in problem for problem in refused) == bool(names)
    assert reshaping_arguments(unreshaped(config.sampling())) == []


def test_a_setting_is_no_further_argument_in_the_extra_body_either():
    (problem,) = RLConfig(sampling_args={"extra_body": {"top_k": 20}}).problems()
    assert "sampling_args has 'top_k', which is a setting" in problem


def own(rewards_G, lengths_G=None):
    return rewards_G


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {},
            (
                "loss cispo (ratio_cap 5.0, ratio_floor 0.0, mask_ratio_low 0.125, mask_ratio_high"
                " 8.0); aggregation token_mean; advantage mean; no KL; anchor sampler"
            ),
        ),
        (
            {
                "loss": "gspo",
                "anchor": "recomputed",
                "tis_cap": 2.0,
                "geo_mask": (0.9, 1.1),
                "credit": "turn",
            },
            (
                "loss gspo (epsilon_low 0.0003, epsilon_high 0.0004); aggregation sequence_mean;"
                " advantage mean per turn, gamma 1; no KL; anchor recomputed, tis_cap 2.0, geo_mask"
                " (0.9, 1.1)"
            ),
        ),
        (
            {
                "loss": "dr_grpo",
                "max_completion_len": 99,
                "beta": 0.1,
                "kl_type": "k2",
                "sync_ref_model": True,
            },
            (
                "loss dr_grpo = ppo (epsilon_low 0.2, epsilon_high 0.2); aggregation"
                " constant_length 99; advantage mean; KL 0.1 x k2 to one updated every 100 steps;"
                " anchor sampler"
            ),
        ),
        (
            {"loss": "math:sqrt", "advantage": own},
            "loss math:sqrt; aggregation token_mean; advantage own; no KL; anchor sampler",
        ),
    ],
)
def test_the_objective_is_one_line(settings, said):
    config = RLConfig(**{"advantage": "mean", **settings})
    config.resolve()
    assert config.objective() == said


def test_every_field_of_ours_is_read_somewhere():
    package = Path(verifiers_trainer.__file__).parent
    read = set()
    for path in package.rglob("*.py"):
        if path.parent.name != "cli":
            tree = ast.parse(path.read_text())
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    own_fields = set(Settings.__annotations__)
    of_transformers = {
        "eval_steps",
        "logging_steps",
        "lr_scheduler_type",
        "max_grad_norm",
        "save_steps",
    }
    # test_objective reads each bound through its loss
    assert own_fields - read - of_transformers - BOUNDS.keys() == set()
