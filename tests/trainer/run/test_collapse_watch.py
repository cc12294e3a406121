"""The end of a run whose policy collapses while it follows a teacher."""

import random

import pytest

from support.training import run, small_trainer, toy_env
from verifiers.errors import RunError
from verifiers_trainer.run import collapse_watch
from verifiers_trainer.run.collapse_watch import WINDOW, CollapseWatch


def sentences(*phases, seed=0, noise=0.05):
    """What is said in a run of phases (reward, entropy, length), 40 steps each."""
    rng, watch, number, said = random.Random(seed), CollapseWatch(), 0, []
    for before, after in zip(phases, [*phases[1:], phases[-1]], strict=True):
        for step in range(40):
            share = step / 40
            reward, entropy, length = (
                a + (b - a) * share for a, b in zip(before, after, strict=True)
            )
            number += 1
            numbers = {
                "reward/mean": reward + rng.gauss(0, noise),
                "entropy": entropy,
                "tokens/completion": 8 * length,
                "rollouts/generated": 8,
            }
            if text := watch.sentence(number, numbers):
                said.append(text)
    return said


COLLAPSES = {
    "short": [(0.2, 1.0, 20), (0.6, 0.7, 20), (0.1, 0.6, 3)],
    "long": [(0.2, 1.0, 20), (0.6, 0.7, 20), (0.1, 0.7, 60)],
    "always the same": [(0.5, 1.0, 20), (0.1, 0.05, 20)],
    "noise": [(0.5, 1.0, 20), (0.0, 4.0, 20)],
}
HEALTHY = {
    "learns and becomes sure": [(0.1, 1.0, 20), (0.9, 0.01, 20)],
    "learns to be brief": [(0.1, 1.0, 60), (0.9, 0.5, 5)],
    "harder data": [(0.7, 1.0, 20), (0.3, 0.9, 24)],
    "nothing happens": [(0.3, 1.0, 20), (0.3, 1.0, 20)],
    "surer at the same reward": [(0.3, 1.0, 20), (0.3, 0.1, 20)],
}


@pytest.mark.parametrize("phases", COLLAPSES.values(), ids=COLLAPSES)
def test_a_collapse_is_said_with_its_numbers(phases):
    said = sentences(*phases)
    assert said
    assert "the policy has collapsed: its reward was" in said[0]


@pytest.mark.parametrize("phases", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_run_is_not_ended(phases):
    assert not any(sentences(*phases, seed=seed) for seed in range(40))


def test_a_training_ends_with_the_sentence_and_keeps_its_last_step(tmp_path, monkeypatch):
    """A reward that falls by itself, at a length that is taken for changed."""
    monkeypatch.setattr(collapse_watch, "WINDOW", 2)
    monkeypatch.setattr(collapse_watch, "FACTOR", 1e-9)
    monkeypatch.setattr(collapse_watch, "STANDARD_ERRORS", 0.0)
    rewards = iter(range(1000, 0, -1))

    def trainer(name, **settings):
        watch = CollapseWatch()
        watch._steps = collapse_watch.deque(maxlen=2)
        watch._recent = collapse_watch.deque(maxlen=2)
        trainer = small_trainer(
            tmp_path / name,
            env=toy_env(reward=lambda **_: float(next(rewards))),
            loss="gkd",
            teacher="self",
            teacher_context=lambda row: "9",
            max_steps=8,
            save_strategy="steps",
            save_steps=100,
            **settings,
        )
        trainer.recorder.collapse = watch
        return trainer

    with pytest.raises(RunError, match="the policy has collapsed"):
        run(trainer("stop"))
    assert list((tmp_path / "stop").glob("checkpoint-*"))
    steps = (tmp_path / "stop/metrics.jsonl").read_text()
    with pytest.raises(RunError, match="the policy has collapsed"):  # and takes no further step
        run(trainer("stop"), resume_from_checkpoint=True)
    assert (tmp_path / "stop/metrics.jsonl").read_text() == steps
    warned = run(trainer("warn", collapse="warn"))
    assert len(warned.steps) == 8
    assert warned.steps[-1]["alarm/collapse"] == 1
    assert WINDOW == 10
