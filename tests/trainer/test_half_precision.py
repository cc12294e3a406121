"""fp16: the loss is scaled, steps whose gradients overflow are skipped, and the scale is part of a checkpoint."""

import pytest
import torch

from support.training import run, small_trainer
from verifiers.errors import CheckpointError
from verifiers_trainer import checkpoint


def used_scaler():
    """A scaler that has skipped a step, on the CPU, where the trainer itself has none."""
    layer = torch.nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(layer.parameters()), torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(layer(torch.full((1, 2), float("inf"))).sum()).backward()
    before = layer.weight.clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
    return scaler


def test_the_scale_goes_on_where_it_was(tmp_path):
    checkpoint.save_scaler(tmp_path, used_scaler())
    fresh = torch.amp.GradScaler("cpu", init_scale=64.0)
    checkpoint.load_scaler(tmp_path, fresh)
    assert fresh.get_scale() == 32.0
    assert fresh.state_dict() == used_scaler().state_dict()


def test_without_a_scaler_nothing_is_written_and_a_damaged_one_is_named(tmp_path):
    checkpoint.save_scaler(tmp_path, None)
    checkpoint.save_scaler(tmp_path, torch.amp.GradScaler("cpu", enabled=False))
    assert not list(tmp_path.iterdir())
    checkpoint.load_scaler(tmp_path, torch.amp.GradScaler("cpu"))
    (tmp_path / "scaler.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be continued from"):
        checkpoint.load_scaler(tmp_path, torch.amp.GradScaler("cpu"))


def test_an_overflow_is_the_scales_doing_until_the_scale_is_one(tmp_path):
    trainer = small_trainer(tmp_path)
    assert not trainer.scale_is_too_large()  # float32: a gradient that is no number ends the run
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trainer.accelerator.scaler.scale(torch.ones(1))
    assert trainer.scale_is_too_large()
    trainer.accelerator.scaler.update(1.0)
    assert not trainer.scale_is_too_large()


def test_on_a_cpu_fp16_is_float32_and_that_is_said(tmp_path, caplog):
    trainer = small_trainer(tmp_path, fp16=True, max_steps=1)
    assert "computes in float32, not in bf16 or fp16" in caplog.text
    assert trainer.accelerator.scaler is None
    run(trainer)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fp16_on_a_gpu_trains_and_resumes(tmp_path):
    settings = {"fp16": True, "save_strategy": "steps", "save_steps": 2}
    log = run(small_trainer(tmp_path, **settings, max_steps=2))
    assert all(step["loss"] == step["loss"] for step in log.steps)
    assert (tmp_path / "checkpoint-2" / "scaler.json").is_file()
    assert len(run(small_trainer(tmp_path, **settings, max_steps=4), resume_from_checkpoint=True).steps) == 2
