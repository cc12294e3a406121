"""The lines of the settings: they name the fields of transformers, and their choices are those of
the tables."""

from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import Any, Literal, get_args, get_origin

import pytest
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from verifiers.runtime.values import fits
from verifiers_trainer.algorithm.aggregation import AGGREGATIONS
from verifiers_trainer.algorithm.losses import KL_TYPES
from verifiers_trainer.settings import fields
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.settings.fields import (
    DECLARED,
    PARTS,
    Inherited,
    Settings,
    field_names,
    problem_of,
)
from verifiers_trainer.settings.recipes import RECIPES

OF_TRANSFORMERS = {field.name: field for field in dataclasses.fields(TrainingArguments)}


def choices(name):
    return [
        choice for part in PARTS[name] if get_origin(part) is Literal for choice in get_args(part)
    ]


def test_the_listed_fields_of_transformers_are_those_of_the_listed_version():
    assert metadata.version("transformers").startswith(f"{fields.TRANSFORMERS}.")
    assert (
        set(Inherited.__annotations__) == OF_TRANSFORMERS.keys() - Settings.__annotations__.keys()
    )
    assert field_names() == {field.name for field in dataclasses.fields(RLConfig)}


@pytest.mark.parametrize("name", Inherited.__annotations__)
def test_a_default_of_transformers_has_the_type_and_the_range_of_its_line(name):
    field = OF_TRANSFORMERS[name]
    default = (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )
    default = getattr(default, "value", default)
    assert fits(default, DECLARED[name])
    assert problem_of(name, default) is None


def test_a_default_of_ours_is_in_the_range_of_its_line():
    for name, value in dataclasses.asdict(Settings()).items():
        assert problem_of(name, value) is None


def test_the_fields_of_a_newer_transformers_are_settings_too(monkeypatch):
    monkeypatch.setattr(fields, "TRANSFORMERS", "5.0")
    monkeypatch.delitem(DECLARED, "weight_decay")
    monkeypatch.delitem(PARTS, "weight_decay")
    field_names.cache_clear()
    try:
        assert "weight_decay" in field_names()
        assert problem_of("weight_decay", "anything") is None
    finally:
        monkeypatch.undo()
        field_names.cache_clear()


def test_the_choices_of_a_line_are_those_of_its_table():
    assert choices("aggregation") == list(AGGREGATIONS)
    assert choices("kl_type") == list(KL_TYPES)
    assert choices("recipe") == list(RECIPES)
    assert choices("save_strategy") == [choice.value for choice in SaveStrategy]
    assert choices("eval_strategy") == [choice.value for choice in IntervalStrategy]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", float("nan"), "temperature must be a number from 1e-06 to 2, not nan"),
        ("ratio_cap", -1, "ratio_cap must be a number of at least 0, not -1"),
        ("min_reward", float("nan"), "min_reward must be a number, or None, not nan"),
        ("batch_size", 64.0, "batch_size must be a whole number from 1 to 1000000000, not 64.0"),
        (
            "max_steps",
            0,
            "max_steps must be a whole number from 1 to 1000000000000, or -1 for passes alone, not 0",
        ),
        (
            "overlong",
            "msak",
            "overlong must be one of mask, drop, not 'msak', did you mean \"mask\"?",
        ),
        ("save_strategy", 3, "save_strategy must be one of no, steps, epoch, best, not 3"),
    ],
)
def test_a_value_outside_its_line_is_refused_with_what_is_allowed(name, value, said):
    assert problem_of(name, value) == said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("ratio_cap", float("inf")),
            ("min_reward", float("-inf")),
            ("max_steps", -1),
            ("max_tokens", None),
        ),
        *(
            ("save_strategy", SaveStrategy.BEST),
            ("recipe", None),
            ("gradient_accumulation_steps", 1),
        ),
    ],
)
def test_a_value_at_the_end_of_its_line_is_allowed(name, value: Any):
    assert problem_of(name, value) is None
