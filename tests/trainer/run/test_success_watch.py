"""The alarm for a reward that rises while fewer tasks are solved."""

import json
import random

import pytest

from verifiers_trainer.run.plot import draw_learning_curve
from verifiers_trainer.run.success_watch import WINDOW, SuccessWatch


def alarmed(rewards, successes):
    watch = SuccessWatch()
    steps = zip(rewards, successes, strict=True)
    return [watch.parts({"reward/mean": r, "reward/success": s}) for r, s in steps]


def noisy(start, end, steps=4 * WINDOW, seed=0):
    rng = random.Random(seed)
    return [start + (end - start) * step / steps + rng.gauss(0, 0.05) for step in range(steps)]


def test_a_rising_reward_with_a_falling_success_is_an_alarm():
    assert any(alarmed(noisy(0.2, 0.9), noisy(0.6, 0.1, seed=1)))


@pytest.mark.parametrize(
    ("reward", "success"),
    [((0.2, 0.9), (0.1, 0.6)), ((0.5, 0.5), (0.5, 0.5)), ((0.9, 0.2), (0.6, 0.1))],
)
def test_reward_and_success_that_move_together_are_none(reward, success):
    assert not any(
        any(alarmed(noisy(*reward, seed=seed), noisy(*success, seed=seed + 50)))
        for seed in range(20)
    )


def test_steps_without_a_success_metric_are_not_watched():
    watch = SuccessWatch()
    assert not any(watch.parts({"reward/mean": step / 100}) for step in range(100))
    assert not any(watch.parts({"reward/mean": 0.5, "reward/success": None}) for _ in range(100))


def test_the_learning_curve_is_drawn_with_success_and_the_non_solution_line(tmp_path):
    lines = [
        {"step": n, "reward/mean": n / 9, "reward/success": n / 18, "reward/non_solution": 0.3}
        for n in range(10)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_learning_curve(tmp_path / "metrics.jsonl", tmp_path / "with.svg", "run")
    picture = (tmp_path / "with.svg").read_text()
    assert "best non-solution" in picture
    assert "reward/success" in picture
    plain = [{"step": n, "reward/mean": n / 9} for n in range(10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in plain))
    draw_learning_curve(tmp_path / "metrics.jsonl", tmp_path / "without.svg", "run")
    assert "best non-solution" not in (tmp_path / "without.svg").read_text()
