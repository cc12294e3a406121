"""The tokens of trained rollouts in ``completions/step-<n>.jsonl``: log-probabilities, ratios,
masks and weights."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import verifiers as vf
from support.small_envs import Talk
from support.training import digits, metrics_of, rows, run, small_trainer


def files(folder):
    paths = sorted(folder.glob("completions/step-*.jsonl"), key=lambda path: int(path.stem[5:]))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def spread(value, size):
    return np.broadcast_to(np.asarray(value, dtype=float), size)


def trained_tokens(rollouts):
    """(policy's log-probability, sampler's, weight, advantage) of every token with loss, over all
    turns."""
    columns_found = []
    for row in rollouts:
        for turn in row.get("turn_tokens", []):
            size = len(turn["completion_ids"])
            assert len(turn["texts"]) == len(turn["completion_logprobs"]) == size
            if not np.any(turn["mask"]):
                continue
            mask = spread(turn["mask"], size) > 0
            columns = ("policy_logprobs", "completion_logprobs", "weight", "advantage")
            columns_found.append(np.stack([spread(turn[name], size)[mask] for name in columns]))
    return np.concatenate(columns_found, axis=1)


def talk():
    return Talk(
        dataset=rows(), eval_dataset=rows(8, 1), rubric=vf.Rubric(funcs=[digits]), max_turns=2
    )


class Pair(vf.MultiAgentEnv):
    """Two roles, each shown its own letters."""

    def observe(self, state, role):
        return {"left": "lll", "right": "rrr"}[role]


def left(state):
    return float(len(state["views"]["left"][-1].content or "") % 3)


def pair():
    return Pair(("left", "right"), dataset=rows(), max_turns=3, rubric=vf.Rubric([left, digits]))


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"share_prompts": False},
        {"packing": False},
        {"updates_per_batch": 2},
        {"env": talk},
        {"env": pair},
    ],
    ids=["shared", "own-prompts", "unpacked", "updates", "turns", "roles"],
)
def test_ratios_and_weights_of_the_file_are_those_of_the_step(tmp_path, layout):
    """Oracle: the trainer's own sums over the tokens of the step, which never pass through the
    file."""
    layout = dict(layout)
    env = layout.pop("env", lambda: None)()
    settings = {
        "log_completions": True,
        "max_steps": 4,
        "num_iterations": 2,
        "learning_rate": 0.02,
        "loss": "ppo",
    }
    trainer = small_trainer(tmp_path, env, **settings, **layout)
    run(trainer)
    lines = [line for line in metrics_of(tmp_path) if "ratio/mean" in line]
    assert len(lines) == len(files(tmp_path)) == 4
    for line, rollouts in zip(lines, files(tmp_path), strict=True):
        log_pi, log_mu, weight, advantage = trained_tokens(rollouts)
        assert len(log_pi) == line["tokens/trained"]
        assert np.exp(log_pi - log_mu).mean() == pytest.approx(line["ratio/mean"], abs=2e-4)
        assert np.exp(log_pi - log_mu).max() == pytest.approx(line["ratio/max"], rel=1e-3)
        assert weight.sum() == pytest.approx(1, abs=2e-3)
        rewards = [row["reward"] for row in rollouts if row["reward"] is not None]
        assert np.mean(rewards) == pytest.approx(line["reward/mean"])
        assert len(rollouts) == line["rollouts/generated"]
        assert sum(row["trained"] for row in rollouts) == line["rollouts/trained"]
        assert np.any(advantage)
    # negative control: not all ratios are one
    assert any(abs(line["ratio/mean"] - 1) > 1e-3 for line in lines)


def test_the_texts_of_the_tokens_are_the_completion(tmp_path):
    run(small_trainer(tmp_path, log_completions=True))
    row = files(tmp_path)[0][0]
    text = row["completion"][-1]["content"]
    assert text
    assert "".join(row["turn_tokens"][0]["texts"]).startswith(text)
    assert row["sibling"] == 0


def test_groups_without_a_signal_are_kept_and_labelled(tmp_path):
    """Half of the questions give every answer the same reward."""

    def sometimes(completion, prompt, **_):
        return 0.5 if prompt[-1]["content"] < "m" else digits(completion)

    env = vf.SingleTurnEnv(
        dataset=rows(), eval_dataset=rows(8, 1), rubric=vf.Rubric(funcs=[sometimes])
    )
    run(small_trainer(tmp_path, env, log_completions=True, max_steps=3, max_tokens=8))
    lines = [line for line in metrics_of(tmp_path) if "reward/mean" in line]
    backfilled = 0
    for line, rollouts in zip(lines, files(tmp_path), strict=True):
        untrained = [row for row in rollouts if not row["trained"]]
        backfilled += len(untrained)
        assert len(untrained) == 4 * line["groups/backfilled"]
        assert {row["excluded"] for row in untrained} <= {"no_signal"}
        assert all(row["completion"] and "turn_tokens" not in row for row in untrained)
        assert np.mean([row["reward"] for row in rollouts]) == pytest.approx(line["reward/mean"])
    assert backfilled


def test_the_numbers_of_tokens_are_bounded(tmp_path):
    run(small_trainer(tmp_path / "few", log_completions=True, log_tokens=10, max_steps=1))
    rollouts = files(tmp_path / "few")[0]
    kept = [row for row in rollouts if "turn_tokens" in row]
    assert 0 < sum(row["completion_tokens"] for row in kept) <= 10
    assert len(kept) < len(rollouts)
    run(small_trainer(tmp_path / "none", log_completions=True, log_tokens=0, max_steps=1))
    assert not any("turn_tokens" in row for row in files(tmp_path / "none")[0])
    assert not math.isnan(metrics_of(tmp_path / "few")[-1]["loss"])
