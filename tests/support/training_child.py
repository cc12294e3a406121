"""Training runs in processes of their own, to be killed. The imports are paid once, by a fork
server."""

from __future__ import annotations

import multiprocessing
import os
import sys
from contextlib import nullcontext
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

SAVED = (
    "model.safetensors",
    "optimizer.safetensors",
    "optimizer.json",
    "rng.safetensors",
    "scheduler.json",
)
"""What must be identical, bit for bit, in two checkpoints of one run."""

TESTS = Path(__file__).parents[1]


def child_context() -> Any:
    """A fork server that has imported torch and the trainer, and has used neither."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.training_zygote"])
    # it is told the test's sys.path after it has preloaded
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
        forkserver.ensure_running()
    return context


def train_in_child(context: Any, folder: Path, failpoint: str = "", **settings: Any) -> int:
    """Train (or resume, when the folder holds a checkpoint); the exit code, -9 after SIGKILL at the
    failpoint.

    ``settings`` may have ``environment``, the name of a function of ``support.training`` that makes
    it.
    """
    process = context.Process(target=_train, args=(str(folder), failpoint, settings))
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the child hangs"
    return process.exitcode


def _train(folder: str, failpoint: str, settings: dict[str, Any]) -> None:
    import torch

    from support import training
    from verifiers.runtime import failpoints
    from verifiers_trainer.policy import checkpoint_files

    torch.set_num_threads(1)
    env = getattr(training, settings.pop("environment", "toy_env"))()
    resume = checkpoint_files.newest_valid(Path(folder)) is not None
    with failpoints.armed(failpoint) if failpoint else nullcontext():
        training.small_trainer(Path(folder), env, **settings).train(resume_from_checkpoint=resume)
    sys.stdout.flush()
