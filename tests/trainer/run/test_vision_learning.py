"""A model that sees learns colours from rewards alone, and does not when the pictures are other
ones: minutes."""

from __future__ import annotations

import random

import pytest

import verifiers as vf
from support.tiny_vision import KINDS, colour_rows, first_letter, vision_folder
from support.training import run, small_config
from verifiers_trainer.trainer import RLTrainer

pytestmark = pytest.mark.slow

LEARNING = {
    "batch_size": 96,
    "rollouts_per_example": 8,
    "max_concurrent": 96,
    "max_tokens": 1,
    "max_seq_len": 128,
    "learning_rate": 2e-3,
    "entropy_coef": 0.05,
}


def rewards_of(kind, seed, folder, steps, is_shuffled=False):
    """The mean reward of each step."""
    rows = colour_rows(256)
    if is_shuffled:  # the question of a row is asked about another row's picture
        prompts = [row["prompt"] for row in rows]
        random.Random(0).shuffle(prompts)
        rows = [row | {"prompt": prompt} for row, prompt in zip(rows, prompts, strict=True)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([first_letter]))
    model = vision_folder(kind, folder / "model", seed=seed)
    config = small_config(folder / "run", seed=seed, max_steps=steps, **LEARNING)
    return [step["reward/mean"] for step in run(RLTrainer(str(model), env, config)).steps]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("kind", "steps"), [("idefics3", 40), ("qwen2_5_vl", 60)])
def test_colours_are_learnt(kind, steps, seed, tmp_path):
    assert kind in KINDS
    rewards = rewards_of(kind, seed, tmp_path, steps)
    assert sum(rewards[:2]) / 2 < 0.3
    assert sum(rewards[-4:]) / 4 > 0.9


def test_colours_of_other_pictures_are_not_learnt(tmp_path):
    rewards = rewards_of("idefics3", 0, tmp_path, 40, is_shuffled=True)
    assert max(rewards[10:]) < 0.6
    assert sum(rewards[-8:]) / 8 < 0.45
