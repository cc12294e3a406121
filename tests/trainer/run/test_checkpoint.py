"""A checkpoint is whole or absent: damage is found, planted files are not opened, the last good one
is never lost."""

import hashlib
import importlib
import json
import logging
import pickle
import random
import shutil
import sys

import numpy as np
import pytest
import torch

from support.training import run, small_trainer, toy_env, weights_hash
from verifiers.errors import CheckpointError, RunMismatch
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.status import Status
from verifiers.rollouts.turn import Turn
from verifiers.runtime import failpoints
from verifiers_trainer.algorithm.batch import Group
from verifiers_trainer.pipeline.saved_state import load_pipeline, save_pipeline
from verifiers_trainer.pipeline.schedule import PipelineState
from verifiers_trainer.policy import checkpoint_files

STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "deterministic": True}
"""Deterministic, so that a checkpoint always has finished rollouts that wait to be trained."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run with checkpoints at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    run(small_trainer(folder, **STEPS))
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of it that a test may damage."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_a_checkpoint_holds_safetensors_and_json_alone_and_verifies(trained):
    made = trained / "checkpoint-4"
    checkpoint_files.verify(made)
    assert {path.suffix for path in made.iterdir()} <= {".safetensors", ".json", ".jsonl", ".jinja"}
    listed = json.loads((made / "MANIFEST.json").read_text())["files"]
    assert set(listed) == {path.name for path in made.iterdir()} - {"MANIFEST.json"}
    assert checkpoint_files.newest_valid(trained) == made
    assert not list(trained.glob(".tmp-*"))


def modes(folder):
    return {path.stat().st_mode for path in folder.iterdir()}


def test_weights_have_the_mode_of_the_other_files(trained, tmp_path):
    assert modes(trained / "checkpoint-4") == {(trained / "metrics.jsonl").stat().st_mode}
    (tmp_path / "private").write_bytes(b"")
    (tmp_path / "private").chmod(0o600)
    small_trainer(tmp_path / "run").save_model(str(tmp_path))
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600  # not of the model
    (tmp_path / "private").unlink()
    assert len({path.stat().st_mode for path in tmp_path.iterdir() if path.is_file()}) == 1


# --- damage ---------------------------------------------------------------------------------------


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [flip_a_byte, truncate, remove])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "rl_state.json", "pending.jsonl"]
)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(
    folder, damage, name, caplog
):
    damage(folder / "checkpoint-4" / name)

    with pytest.raises(CheckpointError, match=f"{name} is missing or damaged") as raised:
        checkpoint_files.verify(folder / "checkpoint-4")
    assert raised.value.file == name
    assert checkpoint_files.newest_valid(folder) == folder / "checkpoint-2"
    assert f"{name} is missing or damaged" in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"files": {}}',
        '{"files": 3}',
        '{"files": {"../x": {}}}',
        '{"files": {"/etc/passwd": {}}}',
    ],
)
def test_a_manifest_that_cannot_be_one_is_refused(folder, content):
    (folder / "checkpoint-4" / "MANIFEST.json").write_text(content)
    with pytest.raises(CheckpointError):
        checkpoint_files.verify(folder / "checkpoint-4")
    assert checkpoint_files.newest_valid(folder) == folder / "checkpoint-2"


def test_a_checkpoint_of_earlier_versions_verifies_by_its_own_checksums(folder):
    made = folder / "checkpoint-4"
    files = {
        file.name: file.read_bytes() for file in made.iterdir() if file.name != "MANIFEST.json"
    }
    listed = {
        name: {"size": len(b), "sha256": hashlib.sha256(b).hexdigest()} for name, b in files.items()
    }
    checkpoint_files.write_json(made / "MANIFEST.json", {"schema": 2, "files": listed})
    checkpoint_files.verify(made)
    flip_a_byte(made / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing or damaged"):
        checkpoint_files.verify(made)


def test_a_file_without_a_known_checksum_does_not_verify(folder):
    manifest = folder / "checkpoint-4" / "MANIFEST.json"
    listed = json.loads(manifest.read_text())
    listed["files"]["model.safetensors"] = {"size": listed["files"]["model.safetensors"]["size"]}
    checkpoint_files.write_json(manifest, listed)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing or damaged"):
        checkpoint_files.verify(folder / "checkpoint-4")


def test_training_resumes_from_the_last_whole_checkpoint(folder, caplog):
    flip_a_byte(folder / "checkpoint-4" / "model.safetensors")
    trainer = small_trainer(folder, **STEPS)
    assert len(run(trainer, resume_from_checkpoint=True).steps) == 2
    checkpoint_files.verify(folder / "checkpoint-4")  # written anew


def test_a_damaged_checkpoint_that_was_asked_for_by_name_is_an_error(folder):
    truncate(folder / "checkpoint-4" / "optimizer.safetensors")
    trainer = small_trainer(folder, **STEPS | {"max_steps": 6})
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing or damaged"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))


def test_with_nothing_whole_left_resuming_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="holds no valid checkpoint"):
        small_trainer(tmp_path).train(resume_from_checkpoint=True)


# --- what is planted is not executed --------------------------------------------------------------


class Bomb:
    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return open, (self.canary, "w")


PLANTED = (
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "rng_state.pth",
    "rng_state_0.pth",
    "training_args.bin",
)


def test_a_planted_pickle_is_never_opened(folder, tmp_path):
    canary = tmp_path / "canary"
    for name in (*PLANTED, "pytorch_model.bin", "adapter_model.bin"):
        (folder / "checkpoint-4" / name).write_bytes(pickle.dumps(Bomb(canary)))
    pickle.loads((folder / "checkpoint-4" / "optimizer.pt").read_bytes()).close()
    assert canary.exists()  # the bomb works
    canary.unlink()

    run(small_trainer(folder, **STEPS | {"max_steps": 5}), resume_from_checkpoint=True)

    assert not canary.exists()


def test_a_pickle_in_the_place_of_the_weights_is_refused(folder, tmp_path):
    canary = tmp_path / "canary"
    made = folder / "checkpoint-4"
    (made / "model.safetensors").write_bytes(pickle.dumps(Bomb(canary)))
    files = {
        p.name: checkpoint_files._describe(p) for p in made.iterdir() if p.name != "MANIFEST.json"
    }
    # even with a forged manifest
    checkpoint_files.write_json(made / "MANIFEST.json", {"schema": 1, "files": files})

    with pytest.raises(CheckpointError, match="cannot be resumed from: SafetensorError"):
        run(small_trainer(folder, **STEPS | {"max_steps": 5}), resume_from_checkpoint=True)
    assert not canary.exists()


# --- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("failpoint", ["before_manifest", "before_rename"])
def test_a_write_that_fails_leaves_nothing_and_says_where(tmp_path, failpoint):
    with failpoints.armed(f"checkpoint.{failpoint}:1:ENOSPC"):
        with pytest.raises(
            CheckpointError, match=r"checkpoint-2 could not be written: .*No space left"
        ):
            run(small_trainer(tmp_path, **STEPS))
    assert not list(tmp_path.glob("*checkpoint*"))


def test_older_checkpoints_go_only_when_a_newer_one_is_whole(tmp_path, monkeypatch):
    def make(step):
        with checkpoint_files.writing(tmp_path / f"checkpoint-{step}") as temporary:
            (temporary / "x.json").write_text(str(step))
        return tmp_path / f"checkpoint-{step}"

    make(1), make(2)
    three = make(3)
    (three / "x.json").write_text("4")
    with pytest.raises(CheckpointError, match="missing or damaged"):
        checkpoint_files.prune(three, 1)
    assert len(checkpoint_files.steps_in(tmp_path)) == 3

    checkpoint_files.prune(make(3), 2)
    assert [step for step, _ in checkpoint_files.steps_in(tmp_path)] == [3, 2]
    checkpoint_files.prune(make(4), 1, protected=tmp_path / "checkpoint-2")
    assert [step for step, _ in checkpoint_files.steps_in(tmp_path)] == [4, 2]


def test_save_total_limit_keeps_the_newest(tmp_path):
    run(small_trainer(tmp_path, **STEPS | {"save_steps": 1}, save_total_limit=2))
    assert [step for step, _ in checkpoint_files.steps_in(tmp_path)] == [4, 3]


def test_what_a_killed_process_left_is_cleared_away(tmp_path):
    (tmp_path / ".tmp-checkpoint-9").mkdir()
    with checkpoint_files.writing(tmp_path / "checkpoint-10") as temporary:
        (temporary / "x").write_text("y")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-10"]


# --- only the same run goes on --------------------------------------------------------------------


def test_another_configuration_is_refused_with_every_difference(folder):
    trainer = small_trainer(folder, **STEPS | {"max_steps": 6}, temperature=0.9, learning_rate=5e-4)
    before = weights_hash(trainer.model)
    with pytest.raises(RunMismatch) as raised:
        trainer.train(resume_from_checkpoint=True)
    assert raised.value.differences == {"temperature": (1.0, 0.9), "learning_rate": (1e-3, 5e-4)}
    assert "temperature was 1.0, is 0.9" in str(raised.value)
    way_out = f"a new run with its weights: model = '{folder / 'checkpoint-4'}', in another folder"
    assert way_out in str(raised.value)
    assert weights_hash(trainer.model) == before


def test_other_examples_are_another_run(folder):
    with pytest.raises(RunMismatch, match="examples was"):
        small_trainer(folder, toy_env(count=41), **STEPS | {"max_steps": 6}).train(
            resume_from_checkpoint=True
        )


def test_edited_source_of_the_environment_is_another_run_unless_accepted_and_then_recorded(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "edited_reward.py"
    code = (
        "def share(completion):\n    return float(sum(c.isdigit() for c in"
        " completion[-1]['content']))\n"
    )
    source.write_text(code)
    settings = STEPS | {"max_steps": 2}

    def trainer(**more):
        monkeypatch.delitem(sys.modules, "edited_reward", raising=False)
        reward = importlib.import_module("edited_reward").share
        return small_trainer(
            tmp_path / "run", toy_env(reward), **settings | {"max_steps": 4} | more
        )

    run(trainer(max_steps=2))
    source.write_text(f"{code}# edited\n")
    with pytest.raises(
        RunMismatch, match=r"other code: edited_reward\.py changed since.*accept_changed_code"
    ) as raised:
        trainer().train(resume_from_checkpoint=True)
    assert set(raised.value.differences) == {"code"}
    with pytest.raises(
        RunMismatch, match=r"temperature was 1\.0, is 0\.9; edited_reward\.py changed"
    ):
        trainer(temperature=0.9, accept_changed_code=True).train(resume_from_checkpoint=True)

    run(trainer(accept_changed_code=True), resume_from_checkpoint=True)
    assert "continuing although edited_reward.py changed" in caplog.text
    saved = json.loads((tmp_path / "run" / "checkpoint-4" / "rl_state.json").read_text())[
        "configuration"
    ]
    assert saved["changed_code"] == ["edited_reward.py"]
    again = trainer(max_steps=6)
    again.checkpoints.starting_point(True)  # the accepted code is the run's now
    assert again.checkpoints.changed_code == ["edited_reward.py"]


def test_a_run_says_its_whole_objective_and_every_checkpoint_has_it(tmp_path, caplog):
    settings = {**STEPS, "loss_type": "grpo", "epsilon_high": 0.28, "beta": 0.01, "max_steps": 2}
    trainer = small_trainer(tmp_path, **settings)
    with caplog.at_level("INFO", "verifiers_trainer"):
        run(trainer)
    said = (
        "loss grpo = ppo (epsilon_low 0.2, epsilon_high 0.28); aggregation sequence_mean; advantage"
        " mean_std; KL 0.01 x k3 to the first policy; anchor sampler"
    )
    assert caplog.text.count(f"objective: {said}") == 1
    saved = json.loads((tmp_path / "checkpoint-2" / "rl_state.json").read_text())
    assert saved["configuration"]["objective"] == said
    run(small_trainer(tmp_path, **settings | {"max_steps": 4}), resume_from_checkpoint=True)


def test_what_does_not_change_the_objective_may_change(folder):
    settings = STEPS | {
        "max_steps": 5,
        "save_steps": 1,
        "eval_num_examples": 3,
        "micro_batch_size": 2,
    }
    run(small_trainer(folder, **settings), resume_from_checkpoint=True)
    assert (folder / "checkpoint-5").is_dir()


def test_weights_alone_cannot_be_resumed_and_say_so(tmp_path):
    run(small_trainer(tmp_path, **STEPS, save_only_model=True))
    assert not (tmp_path / "checkpoint-4" / "optimizer.safetensors").exists()
    with pytest.raises(CheckpointError, match=r"holds weights only \(save_only_model=True\)"):
        small_trainer(tmp_path, **STEPS).train(resume_from_checkpoint=True)


def test_weights_of_another_model_are_refused(folder, tmp_path):
    from verifiers_trainer.policy.builtin_models import build_tiny_model

    model = build_tiny_model(layers=2, hidden=32, heads=2)
    with pytest.raises(CheckpointError, match="do not fit this model: missing"):
        small_trainer(folder, model=model, **STEPS | {"max_steps": 6}).train(
            resume_from_checkpoint=True
        )


def test_a_fresh_run_moves_an_earlier_one_aside_and_mixes_nothing(folder, caplog):
    run(small_trainer(folder, **STEPS | {"max_steps": 2}))

    assert [step for step, _ in checkpoint_files.steps_in(folder)] == [2]
    assert [step for step, _ in checkpoint_files.steps_in(folder / "earlier-1")] == [4, 2]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert len((folder / "earlier-1" / "metrics.jsonl").read_text().splitlines()) == 4
    assert "holds an earlier run" in caplog.text


# --- the parts ------------------------------------------------------------------------------------


def test_the_generators_continue_exactly_where_they_were(tmp_path):
    def draw():
        return random.random(), float(np.random.rand()), np.random.randn(), float(torch.rand(()))

    draw()
    checkpoint_files.save_rng(tmp_path)
    expected = [draw() for _ in range(3)]
    checkpoint_files.load_rng(tmp_path)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop]
)
def test_an_optimizer_continues_bit_for_bit(tmp_path, kind):
    def make():
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2)
        return layer, kind(
            layer.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {})
        )

    def step(layer, optimizer, seed):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        layer(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()

    first, one_optimizer = make()
    for seed in range(3):
        step(first, one_optimizer, seed)
    checkpoint_files.save_optimizer(tmp_path, one_optimizer)
    second, other_optimizer = make()
    second.load_state_dict(first.state_dict())
    checkpoint_files.load_optimizer(tmp_path, other_optimizer)
    for seed in range(3, 6):
        step(first, one_optimizer, seed)
        step(second, other_optimizer, seed)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    layer = torch.nn.Linear(2, 2)
    checkpoint_files.save_optimizer(
        tmp_path, torch.optim.AdamW([{"params": [layer.weight]}, {"params": [layer.bias]}])
    )
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        checkpoint_files.load_optimizer(tmp_path, torch.optim.AdamW(layer.parameters()))


def test_pending_rollouts_come_back_as_they_were(tmp_path):
    turn = Turn([1, 2], [3, 4, 5], np.float32([-0.1, -1e-7, -30.25]), version=np.int32([3, 3, 4]))
    row = {"prompt": [{"role": "user", "content": "\ud800\u2028 0"}], "answer": object()}
    unknown = Rollout(
        (turn,),
        float("nan"),
        {"f": float("nan")},
        Status(error="ModelError: x"),
        row,
        [],
    )
    scored = Rollout(
        (Turn([1], [2], [-0.5], 7),),
        0.1 + 0.2,
        {"f": 1e-300},
        Status("stop", is_truncated=True),
    )
    ready, discarded = [Group(6, 11, (unknown, scored))], [Group(5, 10, (scored,))]
    state = PipelineState(9, 4, 8, ready=ready, discarded=discarded, requeue=[7, 8])
    save_pipeline(tmp_path, state, 4, {"loss": "cispo"})

    loaded, version, configuration = load_pipeline(tmp_path)

    assert (version, configuration) == (4, {"loss": "cispo"})
    assert (loaded.next_index, loaded.delivered, loaded.base, loaded.requeue) == (9, 4, 8, [7, 8])
    assert [group.index for group in loaded.ready + loaded.discarded] == [6, 5]
    first, second = loaded.ready[0].rollouts
    assert np.isnan([first.reward, first.metrics["f"]]).all()
    assert second.reward == 0.1 + 0.2
    assert second.metrics == {"f": 1e-300}
    (branch,), (as_sampled,) = first.transcript.branches(), unknown.transcript.branches()
    assert branch.sampler_logprobs.tobytes() == as_sampled.sampler_logprobs.tobytes()
    assert first.turns[0].sampler_logprobs.tolist() == turn.sampler_logprobs.tolist()
    assert first.turns[0].version.tolist() == [3, 3, 4]
    assert (second.turns[0].version, second.is_truncated, first.error.text) == (
        7,
        True,
        "ModelError: x",
    )


def test_another_format_is_refused_by_its_number(tmp_path):
    save_pipeline(tmp_path, PipelineState(), 0, {})
    saved = checkpoint_files.read_json(tmp_path / "rl_state.json")
    checkpoint_files.write_json(tmp_path / "rl_state.json", saved | {"schema": 99})
    with pytest.raises(CheckpointError, match="its format is number 99"):
        load_pipeline(tmp_path)


@pytest.fixture(autouse=True)
def _warnings(caplog):
    caplog.set_level(logging.WARNING)
