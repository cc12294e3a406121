"""Seeds against seeds: a difference counts if it is more than a seed changes.
Source: results/trainings.py."""

from __future__ import annotations

import json
import math
import random
from statistics import fmean, stdev

import pytest

from verifiers.errors import ConfigError
from verifiers.results.distributions import t_cdf
from verifiers.results.loading import load_results
from verifiers.results.trainings import (
    Seeds,
    Training,
    by_settings,
    compare_seeds,
    welch,
)
from verifiers.storage.directory import trainings_below


def training(folder, name, reward, steps=20, max_steps=20, evaluated=None, **settings):
    path = folder / name
    path.mkdir(parents=True)
    configuration = {"learning_rate": 1e-4, "seed": 0, **settings}
    (path / "settings.json").write_text(
        json.dumps({"model": "m", "max_steps": max_steps, "configuration": configuration})
    )
    lines = [{"step": step, "reward/mean": reward} for step in range(1, steps + 1)]
    if evaluated is not None:
        lines.append({"step": steps, "eval_reward": evaluated})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_welch_is_the_formula_of_the_paper():
    """Written down again, with the standard errors of the means and Satterthwaite's degrees."""
    rng = random.Random(0)
    for _ in range(50):
        a = [rng.gauss(0, 1) for _ in range(rng.randint(2, 6))]
        b = [rng.gauss(0.5, 3) for _ in range(rng.randint(2, 6))]
        se_a, se_b = stdev(a) / len(a) ** 0.5, stdev(b) / len(b) ** 0.5
        df = (se_a**2 + se_b**2) ** 2 / (se_a**4 / (len(a) - 1) + se_b**4 / (len(b) - 1))
        t = (fmean(b) - fmean(a)) / math.hypot(se_a, se_b)
        difference, low, high, p = welch(a, b)
        assert difference == pytest.approx(fmean(b) - fmean(a))
        assert p == pytest.approx(2 * (1 - t_cdf(abs(t), df)), abs=1e-12)
        # the interval ends where a hypothesis would be refused
        for end in (low, high):
            shifted = [value - end for value in b]
            assert welch(a, shifted)[3] == pytest.approx(0.05, abs=1e-9)
    # a published example: R's t.test(extra ~ group, data = sleep)
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    _, low, high, p = welch(first, second)
    assert (round(p, 5), round(low, 4), round(high, 4)) == (0.07939, -0.2055, 3.3655)


def test_equal_settings_are_rarely_called_different_and_unequal_ones_are_seen():
    rng = random.Random(1)

    def share(shift: float) -> float:
        worse_or_better = 0
        for _ in range(400):
            groups = [
                Seeds(name, tuple(rng.gauss(mean, 0.03) for _ in range(3)))
                for name, mean in (("a", 0.5), ("b", 0.5 + shift))
            ]
            (difference,) = compare_seeds(groups)
            worse_or_better += difference.verdict in ("better", "worse")
        return worse_or_better / 400

    assert share(0.0) < 0.08
    assert share(0.15) > 0.85


def test_what_one_seed_or_equal_seeds_show_is_unknown():
    one, twin, pair = Seeds("a", (0.2,)), Seeds("b", (0.5, 0.5)), Seeds("c", (0.4, 0.4))
    (few,) = compare_seeds([one, twin])
    assert (few.verdict, few.to_dict()["p"]) == ("unknown", None)
    assert "two seeds of each" in str(few)
    (equal,) = compare_seeds([pair, twin])
    assert "the seeds of each are equal" in str(equal)
    assert math.isnan(compare_seeds([Seeds("a", ()), twin])[0].difference)


def test_p_counts_the_comparisons():
    low, high = Seeds("a", (0.1, 0.12, 0.14)), Seeds("b", (0.2, 0.22, 0.24))
    (alone,) = compare_seeds([low, high])
    first, _ = compare_seeds([low, high, Seeds("c", (0.1, 0.13, 0.15))])
    assert first.p == pytest.approx(2 * alone.p)


def test_groups_are_the_settings_without_the_seed(tmp_path):
    for rate, rewards in ((1e-4, (0.2, 0.3)), (3e-4, (0.6, 0.7))):
        for seed, reward in enumerate(rewards):
            training(tmp_path, f"{rate}-{seed}", reward, learning_rate=rate, seed=seed)
    training(tmp_path, "checkpoint-3/inner", 0.0)  # what a checkpoint holds is no training
    folders = trainings_below(tmp_path)
    assert len(folders) == 4
    metric, groups = by_settings([Training.read(folder) for folder in folders])
    assert metric == "reward"
    assert groups == [
        Seeds("learning_rate=0.0001", (0.2, 0.3)),
        Seeds("learning_rate=0.0003", (0.6, 0.7)),
    ]


def test_what_follows_from_a_setting_names_a_group_only_where_nothing_else_does(tmp_path):
    def names(*settings):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        runs = [training(folder, str(i), 0.5, **values) for i, values in enumerate(settings)]
        return [seeds.name for seeds in by_settings([Training.read(run) for run in runs])[1]]

    mean = {"advantage": "mean", "objective": "advantage mean", "own_code": {"loss L": "1"}}
    running = {"advantage": "Mine", "objective": "advantage Mine", "own_code": {"loss L": "1"}}
    edited = {**running, "own_code": {"loss L": "2"}}
    assert names(mean, running) == ["advantage=mean", "advantage=Mine"]
    # negative control: the code alone tells two functions of one name apart
    assert len(set(names(running, edited))) == 2


def test_the_folder_of_a_training_says_which_files_have_its_rollouts(tmp_path):
    folder = training(tmp_path, "rev", 0.5)
    (folder / "completions").mkdir()
    step = folder / "completions/step-1.jsonl"
    step.write_text(
        json.dumps({"example_id": 0, "prompt": [], "completion": [], "reward": 0.5}) + "\n"
    )
    with pytest.raises(ConfigError, match=r"completions/step-N\.jsonl"):
        load_results(folder)
    assert load_results(step).rewards == [0.5]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="does not exist"):
        load_results(tmp_path / "empty")


def test_the_last_evaluation_counts_if_all_have_one(tmp_path):
    folders = [
        training(tmp_path, "a", 0.1, evaluated=0.5),
        training(tmp_path, "b", 0.2, evaluated=0.6, beta=0.1),
    ]
    metric, groups = by_settings([Training.read(folder) for folder in folders])
    assert (metric, [seeds.values for seeds in groups]) == ("eval_reward", [(0.5,), (0.6,)])
    folders.append(training(tmp_path, "c", 0.3, beta=0.1, seed=1))
    metric, groups = by_settings([Training.read(folder) for folder in folders])
    assert (metric, [seeds.values for seeds in groups]) == ("reward", [(0.1,), (0.2, 0.3)])


def test_a_training_is_not_two_seeds(tmp_path):
    folders = [
        training(tmp_path, "a", 0.1),
        training(tmp_path, "copy", 0.1),
        training(tmp_path, "b", 0.2, beta=0.1),
    ]
    with pytest.raises(ConfigError, match=r"a and .*copy are one training twice, .* seed 0 and"):
        by_settings([Training.read(folder) for folder in folders])
    # a GPU need not repeat a seed exactly, and two seeds may end with one reward
    folders[1] = training(tmp_path, "repeated", 0.125)
    folders.append(training(tmp_path, "other", 0.2, seed=1, beta=0.1))
    _, groups = by_settings([Training.read(folder) for folder in folders])
    assert [seeds.values for seeds in groups] == [(0.1, 0.125), (0.2, 0.2)]


def test_a_training_of_a_solved_task_has_ended(tmp_path):
    folder = training(tmp_path, "a", 1.0, steps=5)
    assert (Training.read(folder).step, Training.read(folder).max_steps) == (5, 20)
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(lines + '{"step": 5, "solved": 1}\n')
    assert Training.read(folder).max_steps is None
    # gone on with in harder rows
    (folder / "metrics.jsonl").write_text(
        lines + '{"step": 5, "solved": 1}\n{"step": 6, "reward/mean": 0.5}\n'
    )
    assert Training.read(folder).max_steps == 20


def test_what_is_no_training_is_named(tmp_path):
    folder = training(tmp_path, "a", 0.1)
    (folder / "settings.json").write_text("{")
    with pytest.raises(ConfigError, match="no training that can be read"):
        Training.read(folder)
    (folder / "settings.json").write_text('{"model": 5, "configuration": {"lr": 1}}')
    with pytest.raises(
        ConfigError, match=r"settings\.json: Expected `str \| null`, got `int`.*model"
    ):
        Training.read(folder)
    (folder / "settings.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"settings\.json has no configuration"):
        Training.read(folder)
    empty = training(tmp_path, "b", 0.1, steps=0)
    with pytest.raises(ConfigError, match="no step with a reward yet"):
        Training.read(empty)
