"""``torch_compile``: layers that are compiled in place, in training alone."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import TrainerCallback

from support.training import run, small_trainer
from verifiers.errors import ConfigError
from verifiers_trainer.policy.forward_checks import layer_dtype
from verifiers_trainer.settings.config import RLConfig

SETTINGS = {"bf16": False, "deterministic": True, "max_steps": 2, "learning_rate": 1e-3}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(folder, backend=None, half=False, monkeypatch=None, **settings):
    """(log, weights) of a run, with the layers compiled where there is a ``backend``."""
    trainer = small_trainer(folder, **SETTINGS | settings, torch_compile=backend is not None)
    if backend is not None:
        trainer.args.__dict__["torch_compile_backend"] = backend
    if half:  # as on a GPU
        trainer.args.__dict__["bf16"] = True
        trainer.accelerator.native_amp = True
        monkeypatch.setattr(trainer.accelerator.state, "_mixed_precision", "bf16")
    log = run(trainer)
    assert all(part._compiled_call_impl is None for part in trainer.model.modules())
    return log, [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("backend", "half", "options"),
    [
        ("eager", False, {}),
        ("eager", True, {"use_lora": True}),
        ("aot_eager", True, {"gradient_checkpointing": True}),
    ],
)
def test_losses_and_gradients_are_those_of_layers_as_they_are_written(
    tmp_path, monkeypatch, backend, half, options
):
    counter = CompileCounterWithBackend(backend)
    plain, expected = trained(tmp_path / "a", None, half, monkeypatch, **options)
    compiled, weights = trained(tmp_path / "b", counter, half, monkeypatch, **options)
    assert counter.frame_count
    assert len(compiled.steps) == 2
    rel = 2e-2 if half else 1e-4
    for ours, theirs in zip(compiled.steps, plain.steps, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=rel)
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=rel)
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-3 if half else 1e-5, rtol=0)


class FramesOfSteps(TrainerCallback):
    """How many frames were compiled by the end of each step."""

    def __init__(self, counter):
        self.counter, self.counts = counter, []

    def on_step_end(self, *arguments, **_):
        self.counts.append(self.counter.frame_count)


def test_rows_of_other_lengths_are_no_reason_to_compile_again(tmp_path):
    counter = CompileCounterWithBackend("eager")
    frames = FramesOfSteps(counter)
    trained(tmp_path, counter, max_steps=6, packing=False, callbacks=[frames])
    assert frames.counts[1] == frames.counts[5] < 8, "more forms than torch compiles a function for"


def test_hooks_inside_the_layers_are_called_in_checks(tmp_path):
    """The precision that is measured, and the noise that is added, are in the layers."""
    trainer = small_trainer(tmp_path)
    layer = trainer.model.model.layers[0]
    layer.compile(backend="eager")
    assert layer_dtype(trainer.model) == torch.float32
    assert layer._compiled_call_impl is not None


def test_what_cannot_be_compiled_is_said(tmp_path, caplog):
    with pytest.raises(ConfigError, match=r"torch_compile_mode is 'reduce-overhead'.*CUDA graphs"):
        small_trainer(tmp_path, torch_compile=True, torch_compile_mode="reduce-overhead")
    assert RLConfig(output_dir=str(tmp_path), torch_compile=True).tf32 is False
    assert RLConfig(output_dir=str(tmp_path)).tf32 is None


@pytest.mark.slow
def test_inductor_trains(tmp_path, caplog):
    caplog.set_level("INFO")
    compiled, _ = trained(tmp_path / "a", "inductor")
    plain, _ = trained(tmp_path / "b")
    for ours, theirs in zip(compiled.steps, plain.steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    assert "layers are compiled by inductor in the first steps" in caplog.text
