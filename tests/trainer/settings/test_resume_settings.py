"""Which settings a resumed training may change: every field, inherited ones included, must match
unless marked."""

import dataclasses
import enum
import json
import logging
import shutil
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import torch
from msgspec import Meta
from peft import LoraConfig

from support.training import losses_of, run, small_trainer
from verifiers.errors import RunMismatch
from verifiers.storage.identity import Free
from verifiers_trainer.algorithm.losses import BOUNDS, OBJECTIVES
from verifiers_trainer.pipeline.saved_state import load_pipeline
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.settings.fields import PARTS, FreeKeys, OnceSet, mark, problem_of

SAVED = Path(__file__).parents[2] / "data" / "saved_0_2_0"
STEPS = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_off_policy_steps": 0}
SILENT_IN_0_2_0 = {
    "optim": "sgd",
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "warmup_steps": 5,
    "lora_dropout": 0.1,
    "disable_dropout": False,
    "master_weights": "model",
    "stale_policy": "drop",
    "tool_call_parser": "hermes",
}
FIELDS = [field for field in dataclasses.fields(RLConfig) if field.init]
MUST_MATCH = [
    field.name for field in FIELDS if not mark(field.name, Free) and not mark(field.name, FreeKeys)
]
UNREAD = BOUNDS.keys() - OBJECTIVES["cispo"].reads.keys()
MAY_CHANGE = [field.name for field in FIELDS if mark(field.name, Free)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two steps with its checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    run(small_trainer(folder, **STEPS))
    return folder


@pytest.fixture(scope="module")
def resumed(folder):
    """Loads the checkpoint into a trainer with another value of one setting; returns the step."""
    trainer = small_trainer(folder, **STEPS | {"max_steps": 4})

    def load(name):
        same = getattr(trainer.args, name)
        trainer.args.derive(**{name: other_value(name, same)})
        try:
            return trainer.checkpoints.starting_point(str(folder / "checkpoint-2")).step
        finally:
            trainer.args.derive(**{name: same})

    return load


OTHER_NAMES = {"loss": "dr_grpo", "advantage": "none", "teacher_context": "answer"}
"""Settings whose other value must be one that exists: its code is compared, too."""


def other_value(name, value):
    """A value that the setting may have by its own line, other than ``value``."""
    choices = [
        choice for part in PARTS[name] if get_origin(part) is Literal for choice in get_args(part)
    ]
    span = mark(name, Meta)
    if name in OTHER_NAMES:
        changed = OTHER_NAMES[name]
    elif choices:
        changed = next(choice for choice in choices if choice != getattr(value, "value", value))
    elif isinstance(value, bool):
        return not value
    elif isinstance(value, enum.Enum):
        changed = next(member for member in type(value) if member is not value)
    elif span:
        candidates = [number for number in (span.ge, span.le, 1, 2, 0.5) if number is not None]
        changed = next(
            number for number in candidates if number != value and problem_of(name, number) is None
        )
    elif isinstance(value, int | float):
        changed = value + 1
    else:
        changed = (
            {"other": 1}
            if isinstance(value, dict)
            else ["other"]
            if isinstance(value, list)
            else f"{value} other"  # a folder's stays absolute
        )
    assert changed != value
    return changed


@pytest.mark.parametrize(("name", "value"), SILENT_IN_0_2_0.items())
def test_a_setting_that_version_0_2_0_let_pass_is_refused(folder, name, value):
    trainer = small_trainer(folder, **STEPS | {"max_steps": 4, name: value})
    with pytest.raises(
        RunMismatch, match=rf"belongs to another configuration: {name} was .*, is {value!r}"
    ) as raised:
        trainer.train(resume_from_checkpoint=True)
    assert set(raised.value.differences) == {name}


def test_every_field_is_classified_one_way_or_the_other():
    tables = [field.name for field in FIELDS if mark(field.name, FreeKeys)]
    assert tables == ["model_init_kwargs", "lora_config"]
    assert {*MUST_MATCH, *MAY_CHANGE, *tables} == {field.name for field in FIELDS}
    assert all(mark(name, Free).reason for name in MAY_CHANGE)


@pytest.mark.parametrize(
    "name",
    [name for name in [*MUST_MATCH, "model_init_kwargs", "lora_config"] if name not in UNREAD],
)
def test_a_setting_without_a_mark_must_match(resumed, caplog, name):
    if mark(name, OnceSet):
        resumed(name)  # None in the checkpoint
        assert name in caplog.text
        return
    with pytest.raises(RunMismatch, match=rf"{name} was ") as raised:
        resumed(name)
    assert set(raised.value.differences) == {name}


@pytest.mark.parametrize("name", sorted(UNREAD))
def test_a_bound_must_match_where_the_loss_reads_it(resumed, name):
    assert resumed(name) == 2
    value = {"epsilon": 0.1, "delta": 9.0, "dual_clip": 3.0}[name]
    assert (
        RLConfig(loss="ppo").resume_values()[name]
        != RLConfig(loss="ppo", **{name: value}).resume_values()[name]
    )
    assert RLConfig(loss="grpo").resume_values()["loss"] == "ppo"  # as version 0.2.0 recorded it


@pytest.mark.parametrize("name", MAY_CHANGE)
def test_a_setting_marked_so_may_change(resumed, name):
    assert resumed(name) == 2


def test_a_field_that_nobody_classified_must_match():
    @dataclasses.dataclass(init=False)
    class Extended(RLConfig):
        brand_new: int = 1

    config = Extended()
    assert config.resume_values()["brand_new"] == 1
    assert set(config.resume_values()) == {*RLConfig().resume_values(), "brand_new"}


def test_what_follows_from_a_setting_being_given_counts(tmp_path, folder):
    """With "gspo", epsilon = 0.2 given is another bound than epsilon = 0.2 by default."""
    run(small_trainer(tmp_path, **STEPS, loss="gspo"))
    with pytest.raises(RunMismatch, match="loss_defaults was"):
        small_trainer(tmp_path, **STEPS | {"max_steps": 4}, loss="gspo", epsilon=0.2).train(
            resume_from_checkpoint=True
        )


def test_a_metric_for_the_best_model_may_be_set_later_and_not_changed(tmp_path):
    settings = STEPS | {"eval_strategy": "steps", "eval_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward"}
    run(small_trainer(tmp_path, **settings))
    run(small_trainer(tmp_path, **settings | best | {"max_steps": 4}), resume_from_checkpoint=True)
    with pytest.raises(
        RunMismatch, match="metric_for_best_model was 'eval_reward', is 'eval_tokens'"
    ):
        small_trainer(
            tmp_path, **settings | best | {"max_steps": 6, "metric_for_best_model": "eval_tokens"}
        ).train(resume_from_checkpoint=True)


def test_how_a_model_is_read_may_change_and_its_token_is_not_written():
    def values(**kwargs):
        return RLConfig(model_init_kwargs=kwargs).resume_values()["model_init_kwargs"]

    assert values(revision="a", token="secret", attn_implementation="sdpa") == values(
        revision="a", device_map="cpu"
    )
    assert values(revision="a") != values(revision="b")
    assert "secret" not in json.dumps(values(token="secret"))


def test_a_lora_config_is_compared_by_what_it_sets():
    def values(modules, **options):
        config = LoraConfig(
            r=7, lora_dropout=0.1, target_modules=modules, base_model_name_or_path="here", **options
        )
        return RLConfig(lora_config=config).resume_values()["lora_config"]

    # a set in the LoraConfig, whose order differs from process to process
    modules = ["k_proj", "q_proj", "v_proj"]
    assert values(modules) == {
        "lora_dropout": 0.1,
        "peft_type": "LORA",
        "r": 7,
        "target_modules": modules,
    }
    assert values(modules[::-1]) == values(modules)
    assert values(modules, use_rslora=True) != values(modules)


def test_a_function_is_its_name_and_an_object_its_class():
    class OwnAdvantage:
        def __call__(self, rewards):
            return rewards

    values = RLConfig(loss=len, advantage=OwnAdvantage()).resume_values()
    assert values["loss"] == "len"
    assert values["advantage"].endswith("OwnAdvantage")


# --- checkpoints of version 0.2.0 -----------------------------------------------------------------


@pytest.fixture
def saved_by_0_2_0(tmp_path):
    return Path(shutil.copytree(SAVED / "training", tmp_path / "run"))


OLD_RUN = {
    **{"deterministic": True, "save_strategy": "steps", "save_steps": 2, "max_off_policy_steps": 1},
    **{"log_completions": True, "max_steps": 4},
}


def numbers(losses):
    return [float.fromhex(loss) for loss in losses]


def test_a_checkpoint_of_0_2_0_resumes_to_the_same_losses(saved_by_0_2_0, caplog):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with caplog.at_level(logging.WARNING):
            log = run(small_trainer(saved_by_0_2_0, **OLD_RUN), resume_from_checkpoint=True)
    finally:
        torch.set_num_threads(threads)
    # last digits are of that processor
    before = numbers(json.loads((SAVED / "training-losses.json").read_text()))
    assert numbers(log.losses) == pytest.approx(before[2:], rel=1e-5)
    assert numbers([loss for _, loss in losses_of(saved_by_0_2_0)]) == pytest.approx(
        before, rel=1e-5
    )
    assert "adam_beta2" in caplog.text  # it cannot be compared
    _, _, configuration = load_pipeline(saved_by_0_2_0 / "checkpoint-4")
    assert configuration["adam_beta2"] == 0.999


def test_a_checkpoint_of_0_2_0_is_compared_in_what_it_records(saved_by_0_2_0):
    with pytest.raises(RunMismatch) as raised:
        small_trainer(saved_by_0_2_0, **OLD_RUN, weight_decay=0.1, optim="sgd").train(
            resume_from_checkpoint=True
        )
    assert raised.value.differences == {"weight_decay": (0.0, 0.1)}
