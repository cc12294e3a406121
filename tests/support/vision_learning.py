"""A tiny model that sees learns the colours of pictures by rewards alone; the same training with
the pictures of other rows is its control."""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import verifiers as vf
from support.tiny_vision import colour_rows, first_letter, vision_folder
from support.training import small_config
from verifiers_trainer.trainer import RLTrainer

LEARNT = 0.9
WINDOW = 4
"""Steps over which the reward is averaged."""
_SETTINGS = {
    "batch_size": 96,
    "rollouts_per_example": 8,
    "max_concurrent": 96,
    "max_tokens": 1,
    "max_seq_len": 128,
    "learning_rate": 2e-3,
    "entropy_coef": 0.05,
}


@dataclass
class Curve(TrainerCallback):
    """The mean reward after each step, and this process's CPU seconds since training began. Ends
    the training once it is learnt."""

    rewards: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    is_shown: bool = False
    """Whether each step is a line on stderr: the curve of a training that does not end."""
    held_out: float = 0.0
    """Mean reward for pictures that were not trained on."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._begun_s = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.rewards.append(self.trainer.last_step["reward/mean"])
        self.cpu_s.append(time.process_time() - self._begun_s)
        if self.is_shown:
            line = f"step {len(self.rewards)}: reward {self.last:.2f}, {self.cpu_s[-1]:.0f} CPU s"
            print(line, file=sys.stderr, flush=True)
        control.should_training_stop |= len(self.rewards) >= WINDOW and self.last > LEARNT

    def watch(self, trainer: RLTrainer) -> RLTrainer:
        self.trainer = trainer
        trainer.add_callback(self)
        return trainer

    @property
    def last(self) -> float:
        return statistics.fmean(self.rewards[-WINDOW:])


def colours(is_shuffled: bool, count: int = 256) -> vf.SingleTurnEnv:
    """Four colours, whose first letters are the right answers: a constant one earns a quarter."""
    rows = colour_rows(count)
    if is_shuffled:  # the question of a row, with its answer, is asked about another row's picture
        prompts = [row["prompt"] for row in rows]
        random.Random(0).shuffle(prompts)
        rows = [row | {"prompt": prompt} for row, prompt in zip(rows, prompts, strict=True)]
    return vf.SingleTurnEnv(
        dataset=rows,
        eval_dataset=colour_rows(64, seed=1),
        rubric=vf.Rubric([first_letter]),
    )


def learn_colours(
    kind: str,
    seed: int,
    steps: int,
    folder: Path,
    is_shuffled: bool = False,
    is_shown: bool = False,
    **settings: Any,
) -> Curve:
    """Train a random model of this kind for at most ``steps`` steps."""
    model = vision_folder(kind, folder / "model", seed=seed)
    config = small_config(
        folder / "run", seed=seed, max_steps=steps, eval_num_examples=64, **_SETTINGS | settings
    )
    curve = Curve(is_shown=is_shown)
    with RLTrainer(str(model), colours(is_shuffled), config) as trainer:
        curve.watch(trainer).train()
        curve.held_out = trainer.evaluate()["eval_reward"]
    return curve
