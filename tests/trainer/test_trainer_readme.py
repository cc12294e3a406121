"""Every block of the trainer's README runs, with runs cut to a step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import verifiers as vf
from support.training import digits, small_config, small_policy
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.trainer import RLTrainer

README = Path(__file__).parents[2] / "packages" / "trainer" / "README.md"
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
SCRIPTS = [code for code in BLOCKS if "trainer.train()" in code]
SUBCLASSES = [code for code in BLOCKS if "(vf.RLTrainer):" in code]


def test_every_block_is_one_of_the_two_kinds():
    assert len(SCRIPTS) + len(SUBCLASSES) == len(BLOCKS) == 5


@pytest.mark.parametrize("code", SCRIPTS, ids=range(len(SCRIPTS)))
def test_scripts_construct_a_trainer(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code.replace("trainer.train()", ""), README.name, "exec"), names)
    assert isinstance(names["trainer"], RLTrainer)


def length(completion, **_):
    return float(len(completion[-1]["content"] or ""))


@pytest.mark.parametrize("code", SUBCLASSES, ids=range(len(SUBCLASSES)))
def test_subclasses_train(code, tmp_path):
    names = {}
    exec(compile(code, README.name, "exec"), names)
    (kind,) = [
        value
        for value in names.values()
        if isinstance(value, type) and issubclass(value, RLTrainer)
    ]
    rubric = vf.RubricGroup([vf.Rubric(funcs=[digits]), vf.Rubric(funcs=[length])])
    env = vf.SingleTurnEnv(dataset=[{"question": "ab", "answer": "ab"}] * 8, rubric=rubric)
    trainer = kind(
        small_policy(), env, small_config(tmp_path, zero_variance="keep"), build_tiny_tokenizer()
    )
    trainer.train()
    assert trainer.policy_version == 2
