"""``completions/step-<n>.jsonl`` as an input: forks, stored images, and token-exact trajectories."""

from __future__ import annotations

import json

import numpy as np
import pytest

import verifiers as vf
from support.tiny_vision import asked, length, picture, vision_folder
from support.training import run, small_config
from verifiers.data.images import image_bytes, image_parts
from verifiers.errors import ConfigError
from verifiers_integrations.offline import offline_groups
from verifiers_integrations.trajectories import read_trajectories, write_trajectories
from verifiers_trainer.algorithm.samples import rollout_samples
from verifiers_trainer.engines.processing import processing_of
from verifiers_trainer.trainer import RLTrainer


def key_of(rollout):
    """(all tokens, number of the sibling)."""
    return rollout.turns[-1].full_ids().tobytes(), rollout.fork["sibling"]


class Looks(vf.MultiTurnEnv):
    """Shows another picture after each answer."""

    async def env_response(self, messages, state, **_):
        return asked("next:", picture("green", len(state["trajectory"])))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A step of trees of two rollouts, two turns each, that see; the trainer and its folder."""
    folder = tmp_path_factory.mktemp("trained")
    env = Looks(
        dataset=[{"prompt": asked("look", picture("red", n), "well?")} for n in range(8)],
        max_turns=2,
        rubric=vf.Rubric([length]),
        branching=vf.Branching(at=1, branches=2),
    )
    config = small_config(
        folder,
        max_seq_len=256,
        max_steps=1,
        history="exact",
        log_completions=True,
        log_tokens=100_000,
    )
    trainer = RLTrainer(str(vision_folder("qwen2_5_vl", folder / "model")), env, config)
    run(trainer)
    return trainer, folder


def test_a_steps_rollouts_say_their_fork_and_store_each_image_once(trained):
    _, folder = trained
    file = folder / "completions/step-1.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["fork"]["parent"] is None for row in lines} == {True, False}
    assert all(row["fork"]["turn"] == 1 for row in lines if row["fork"]["parent"] is not None)
    assert "data:image" not in file.read_text()
    rollouts = vf.load_results(file).outputs
    seen = {
        image_bytes(part)
        for rollout in rollouts
        for part in image_parts([*rollout["prompt"], *rollout["completion"]])
    }
    assert picture("green", 1) in seen
    assert len(list((folder / "completions/images").iterdir())) == len(seen)


def test_a_steps_rollouts_are_exported_as_sampled_with_images_and_forks(trained, tmp_path):
    trainer, folder = trained
    results = vf.load_results(folder / "completions/step-1.jsonl")
    kept = results.filter(lambda rollout: rollout.get("turn_tokens"))
    count = write_trajectories(kept, tmp_path / "rows.jsonl")
    rows = read_trajectories(tmp_path / "rows.jsonl")
    groups = trainer.newest.batch.groups
    sampled = {key_of(rollout): rollout for group in groups for rollout in group.rollouts}
    assert count == len(rows) >= len(kept) > len(sampled) // 2
    by_rollout = {}
    for row in rows:
        by_rollout.setdefault(row.rollout, []).append(row)
    for branches in by_rollout.values():
        last = branches[-1]
        ids = np.concatenate([last.prompt_ids, last.completion_ids]).tobytes()
        rollout = sampled[ids, last.fork["sibling"]]
        logprobs = np.concatenate([turn.sampler_logprobs for turn in rollout.turns])
        exported = np.concatenate([row.logprobs[row.completion_mask] for row in branches])
        assert np.array_equal(exported, logprobs.astype(np.float32))
        assert (last.fork, last.reward) == (rollout.fork, rollout.reward)
        for row in branches:  # as many as the ids have placeholders of, of four tokens
            ids = np.concatenate([row.prompt_ids, row.completion_ids])
            assert 4 * len(row.images) == np.isin(ids, processing_of(trainer.model).never).sum()
    for group in offline_groups(tmp_path / "rows.jsonl"):
        for rollout in group.rollouts:
            original = sampled[key_of(rollout)]
            of_file, as_sampled = (
                [sample.images for sample in rollout_samples(each.turns, 1.0).samples]
                for each in (rollout, original)
            )
            assert of_file == as_sampled
            assert rollout.num_shared_turns == original.num_shared_turns


@pytest.mark.parametrize("bound", ["none", "some"])
def test_a_step_without_the_tokens_of_a_rollout_is_refused_with_the_setting(
    trained, tmp_path, bound
):
    _, folder = trained
    results = vf.load_results(folder / "completions/step-1.jsonl")
    for output in results.outputs[: 1 if bound == "some" else None]:
        output.pop("turn_tokens", None)
    with pytest.raises(ConfigError, match=r"rollout 0 of this step .* raise log_tokens"):
        vf.export_trajectories(results, tmp_path / "rows.jsonl")
    assert not (tmp_path / "rows.jsonl").exists()
