"""fp16: the loss is scaled, steps whose gradients overflow are skipped, and the scale is part of a
checkpoint."""

import json

import pytest
import torch

from support.embedded import small_model as model_of_size
from support.training import StepLog, run, small_trainer, toy_env, weights_hash
from verifiers.errors import CheckpointError, ConfigError
from verifiers_trainer.algorithm.diagnostics import RatioMeter
from verifiers_trainer.policy import checkpoint_files, logprobs
from verifiers_trainer.policy.logprobs import install_logprob_forward
from verifiers_trainer.run import sanity_checks


def used_scaler():
    """A scaler that has skipped a step, on the CPU, where the trainer itself has none."""
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(layer(torch.full((1, 2), float("inf"))).sum()).backward()
    before = layer.weight.clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
    return scaler


def test_the_scale_goes_on_where_it_was(tmp_path):
    checkpoint_files.save_scaler(tmp_path, used_scaler())
    fresh = torch.amp.GradScaler("cpu", init_scale=64.0)
    checkpoint_files.load_scaler(tmp_path, fresh)
    assert fresh.get_scale() == 32.0
    assert fresh.state_dict() == used_scaler().state_dict()


def test_without_a_scaler_nothing_is_written_and_a_damaged_one_is_named(tmp_path):
    checkpoint_files.save_scaler(tmp_path, None)
    checkpoint_files.save_scaler(tmp_path, torch.amp.GradScaler("cpu", enabled=False))
    assert not list(tmp_path.iterdir())
    checkpoint_files.load_scaler(tmp_path, torch.amp.GradScaler("cpu"))
    (tmp_path / "scaler.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        checkpoint_files.load_scaler(tmp_path, torch.amp.GradScaler("cpu"))


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


def in_half(trainer, precision, monkeypatch):
    """The trainer as it is with bf16 or fp16 on a GPU, on the CPU: its forward pass in that."""
    trainer.args.__dict__[precision] = True
    trainer.accelerator.native_amp = True
    monkeypatch.setattr(trainer.accelerator.state, "_mixed_precision", precision)
    return trainer


def in_fp16(trainer, scale, monkeypatch):
    """The same with its loss scaled."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return in_half(trainer, "fp16", monkeypatch)


def dtype_in_training(trainer):
    """The dtype inside the layers in the last training step of a run."""
    dtypes = []

    def record(layer, arguments, output):
        if torch.is_grad_enabled():
            dtypes.append(output.dtype)

    hook = trainer.model.model.layers[0].mlp.down_proj.register_forward_hook(record)
    run(trainer)
    hook.remove()
    return dtypes[-1]


def test_bf16_is_computed_in_every_training_of_a_model(tmp_path, monkeypatch):
    """Whatever wraps the forward pass, as accelerate's autocast does, is kept from run to run."""
    # negative control
    assert dtype_in_training(small_trainer(tmp_path / "f32", max_steps=1)) == torch.float32
    trainer = in_half(small_trainer(tmp_path / "a", max_steps=1), "bf16", monkeypatch)
    assert dtype_in_training(trainer) == torch.bfloat16
    assert dtype_in_training(trainer) == torch.bfloat16
    again = in_half(
        small_trainer(tmp_path / "b", model=trainer.model, max_steps=1), "bf16", monkeypatch
    )
    assert dtype_in_training(again) == torch.bfloat16


def test_bf16_is_computed_with_the_full_head_too(tmp_path, monkeypatch, caplog):
    trainer = in_half(small_trainer(tmp_path, max_steps=1), "bf16", monkeypatch)
    monkeypatch.setattr(
        logprobs.LogitTransform, "of", lambda config: logprobs.LogitTransform(scale=1.5)
    )
    assert dtype_in_training(trainer) == torch.bfloat16
    assert "the full head is used" in caplog.text


def test_a_run_says_the_precision_it_computes_in(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    run(in_half(small_trainer(tmp_path / "half", max_steps=1), "bf16", monkeypatch))
    assert "the layers compute in bfloat16" in caplog.text
    assert "optimizer: AdamW, fused" in caplog.text
    assert "attention of a sample: scaled_dot_product" in caplog.text
    run(small_trainer(tmp_path / "whole", max_steps=1))
    assert "the layers compute in float32" in caplog.text


def test_a_precision_that_is_set_and_not_computed_in_is_a_warning(tmp_path, caplog):
    trainer = small_trainer(tmp_path)
    trainer.args.derive(bf16=True)
    sanity_checks.check_forward(trainer.model, trainer.args)
    assert "bf16 is set, and the layers compute in float32" in caplog.text


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_embedded_engine_samples_in_the_precision_of_the_training(
    tmp_path, monkeypatch, precision
):
    trainer = small_trainer(tmp_path, max_steps=1)
    if precision == "fp16":
        in_fp16(trainer, 2.0**10, monkeypatch)
    else:
        in_half(trainer, precision, monkeypatch)
    sampled = set()

    def record(layer, arguments, output):
        sampled.add(output.dtype)

    before = trainer.server.start

    def start(version):
        before(version)
        replica = trainer.engine._replica
        replica.model.layers[0].mlp.down_proj.register_forward_hook(record)

    monkeypatch.setattr(trainer.server, "start", start)
    run(trainer)
    assert sampled == {torch.bfloat16 if precision == "bf16" else torch.float16}


class Warm(type(toy_env())):
    """Samples at another temperature than is trained."""

    async def get_model_response(self, state, prompt, **options):
        return await super().get_model_response(
            state, prompt, **options, sampling_args={"temperature": 0.9}
        )


@pytest.mark.parametrize("fixed", [None, 0.1])
def test_another_temperature_is_refused_in_bf16_too(tmp_path, monkeypatch, fixed):
    """With a fixed bound on the mean in place of what is measured it is not."""
    settings = {"max_steps": 1, "max_tokens": 24, "batch_size": 16}
    run(
        in_half(
            small_trainer(tmp_path / "right", model=model_of_size(), **settings),
            "bf16",
            monkeypatch,
        )
    )
    env = Warm(dataset=[{"question": c} for c in "abcdefgh"], rubric=toy_env().rubric)
    trainer = in_half(
        small_trainer(tmp_path / "wrong", env, model=model_of_size(), **settings),
        "bf16",
        monkeypatch,
    )
    if fixed is None:
        with pytest.raises(ConfigError, match="sampler and trainer disagree by"):
            run(trainer)
    else:
        monkeypatch.setattr(RatioMeter, "disagreement", lambda self, noise: self.mean_abs / fixed)
        assert run(trainer).steps[0]["sampler/log_ratio_abs"] > 0.02


def test_in_fp16_a_run_is_that_of_float32_within_rounding(tmp_path, monkeypatch, caplog):
    settings = {"deterministic": True, "max_steps": 1}
    plain = run(small_trainer(tmp_path / "plain", **settings)).steps[0]
    trainer = in_fp16(small_trainer(tmp_path / "half", **settings), 2.0**10, monkeypatch)
    half = run(trainer).steps[0]
    assert "full head" not in caplog.text
    assert half["loss"] == pytest.approx(plain["loss"], rel=0.05)
    assert half["loss"] != plain["loss"]
    assert half["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.05), (
        "unscaled before it is clipped"
    )
    assert trainer.accelerator.scaler.get_scale() == 2.0**10


@pytest.mark.parametrize("scale", [1.0, 1.01])
def test_half_precision_is_no_reason_to_give_up_the_chunked_head(
    tmp_path, monkeypatch, caplog, scale
):
    """Both heads see the same rounded states: a difference of a hundredth of the
    logits is found."""
    trainer = small_trainer(tmp_path)
    trainer.args.derive(bf16=True)
    monkeypatch.setattr(
        logprobs.LogitTransform, "of", lambda config: logprobs.LogitTransform(scale)
    )
    install_logprob_forward(trainer.model)
    with torch.autocast("cpu", torch.bfloat16):
        sanity_checks.check_forward(trainer.model, trainer.args)
    assert ("the full head is used" in caplog.text) is (scale != 1.0)


def test_a_step_that_overflows_is_skipped_with_a_smaller_scale_and_training_goes_on(
    tmp_path, monkeypatch
):
    settings = {"deterministic": True, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    trainer = in_fp16(small_trainer(tmp_path, **settings), 2.0**12, monkeypatch)
    scaler, parameter = trainer.accelerator.scaler, next(trainer.model.parameters())
    parameter.register_hook(
        lambda grad: grad * float("inf") if scaler.get_scale() > 2.0**10 else grad
    )
    hashes = [weights_hash(trainer.model)]
    log = StepLog()
    log.on_step_end = lambda *_, **__: hashes.append(weights_hash(trainer.model))
    trainer.add_callback(log)
    trainer.train()
    assert scaler.get_scale() == 2.0**10
    assert hashes[0] == hashes[1] == hashes[2], "two steps were skipped"
    assert len(set(hashes[2:])) == 3
    saved = [
        json.loads((tmp_path / f"checkpoint-{n}" / "scaler.json").read_text())["scale"]
        for n in (1, 2, 3, 4)
    ]
    assert saved == [2.0**11, 2.0**10, 2.0**10, 2.0**10]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fp16_on_a_gpu_trains_and_resumes(tmp_path):
    settings = {"fp16": True, "save_strategy": "steps", "save_steps": 2}
    log = run(small_trainer(tmp_path, **settings, max_steps=2))
    assert all(step["loss"] == step["loss"] for step in log.steps)
    assert (tmp_path / "checkpoint-2" / "scaler.json").is_file()
    assert (
        len(
            run(small_trainer(tmp_path, **settings, max_steps=4), resume_from_checkpoint=True).steps
        )
        == 2
    )
