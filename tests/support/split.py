"""What the ranks of a test do with a model that is split over them, as ``configs/fsdp2.yaml`` has
it split."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.distributed.tensor import DTensor

from support.ranks_work import group
from support.training import metrics_of, run, small_trainer
from verifiers_trainer.algorithm.batch import build
from verifiers_trainer.distributed import fsdp
from verifiers_trainer.policy import checkpoint_files
from verifiers_trainer.policy.logprobs import install_logprob_forward

ROOT = Path(__file__).parents[2]


def as_launched(name: str = "fsdp2", **changed: Any) -> None:
    """Set what ``accelerate launch --config_file configs/NAME.yaml`` sets for each process."""
    described = (
        yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["fsdp_config"] | changed
    )
    values = {
        key.upper(): str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in described.items()
    }
    os.environ.update({"ACCELERATE_USE_FSDP": "true", **values})


def share_of(model: Any) -> float:
    """The part of all parameters that this process holds."""
    held = sum(
        p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters()
    )
    return held / sum(p.numel() for p in model.parameters())


def train(
    folder: str,
    resume: bool = False,
    spoil: str = "",
    split: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train; the whole weights as every rank gathers them, and on rank 0 what was logged."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        as_launched(**(split or {}))
    resume = resume and checkpoint_files.newest_valid(Path(folder)) is not None
    trainer = small_trainer(Path(folder), **settings)
    trainer.args.ddp_timeout = 60
    if spoil == "copy never renewed":
        trainer.training_run.renew = lambda **_: None
        trainer.checks_sampler = False  # it would find it, too
    if spoil == "norm of the own part":
        trainer._clip_grad_norm = lambda model: _clip_own(model, trainer.args.max_grad_norm)
    run(trainer, resume_from_checkpoint=resume)
    weights = {
        name: tensor for name, tensor in fsdp.whole_tensors(trainer.model, trained_only=True)
    }
    lines = (
        [row for row in metrics_of(Path(folder)) if "loss" in row] if trainer.ranks.is_main else []
    )
    evaluated = trainer.evaluate(num_examples=2)["eval_reward"]
    trainer.save_model(f"{folder}/saved")
    trainer.close()
    trainer.ranks.gather([0.0], "the end")  # the store ends with rank 0's process
    return {**told(weights, lines, evaluated), "share": share_of(trainer.model)}


def told(
    weights: dict[str, torch.Tensor], lines: list[dict[str, Any]], evaluated: float
) -> dict[str, Any]:
    """What a rank tells of a run: its whole weights, the lines of its steps (rank 0 alone has
    them), its evaluation."""
    return {
        "weights": digest(weights),
        "values": torch.cat([tensor.flatten() for tensor in weights.values()])[::50].tolist(),
        "losses": [row["loss"] for row in lines],
        "norms": [row["grad_norm"] for row in lines],
        "canaries": [row.get("canary/version") for row in lines],
        "apart": [row.get("sampler/log_ratio_abs") or 0.0 for row in lines],
        "penalty": [row.get("kl_ref", 0.0) for row in lines],
        "evaluated": evaluated,
    }


def require_as_one(
    first: dict[str, Any], second: dict[str, Any], unsplit: dict[str, Any], *, has_penalty: bool
) -> None:
    """What two ranks ``told`` is what one process told, within rounding."""
    assert first["weights"] == second["weights"], "the ranks gathered different weights"
    np.testing.assert_allclose(first["losses"], unsplit["losses"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(first["norms"], unsplit["norms"], rtol=1e-4)
    np.testing.assert_allclose(first["values"], unsplit["values"], rtol=1e-3, atol=2e-6)
    np.testing.assert_allclose(first["penalty"], unsplit["penalty"], rtol=1e-3, atol=1e-7)
    assert max(first["apart"]) < 1e-5, "what is sampled from is not what is trained"
    assert first["evaluated"] == second["evaluated"] == pytest.approx(unsplit["evaluated"])
    assert max(first["penalty"]) > 0 or not has_penalty, "the penalty is never felt"


def gradient(folder: str, lengths: list[list[int]], chunk_tokens: int) -> dict[str, Any]:
    """Loss and whole gradient of a batch with a group for each list of lengths."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        as_launched()
    trainer = small_trainer(Path(folder), micro_batch_size=1, batch_size=12)
    trainer.checks_sampler = False
    install_logprob_forward(trainer.model, chunk_tokens=chunk_tokens)
    trainer.create_optimizer()
    trainer.model, _ = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    batch = build(
        [group(n, sizes) for n, sizes in enumerate(lengths)],
        [],
        trainer.args,
        trainer.args.world_size,
    )
    loss = trainer.training_step(trainer.model, batch)
    gradients = torch.cat([fsdp.full_tensor(p.grad).flatten() for p in trainer.model.parameters()])
    tokens = [int(row.loss_mask.sum()) for row in batch.rows_R[trainer.ranks.rank]]
    loss = float(trainer.ranks.gather([float(loss)], "the end").mean())
    return {
        "loss": loss,
        "gradient": gradients[::7].tolist(),
        "norm": float(gradients.norm()),
        "chunks": sum(-(-count // chunk_tokens) for count in tokens),
    }


def digest(weights: dict[str, torch.Tensor]) -> str:
    """sha256 of whole tensors, bit for bit."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(
            name.encode() + weights[name].cpu().contiguous().view(torch.uint8).numpy().tobytes()
        )
    return total.hexdigest()


def _clip_own(model: Any, max_norm: float) -> torch.Tensor:
    parts = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(parts)
    for part in parts:
        part.mul_(min(1.0, max_norm / float(norm)))
    return norm
