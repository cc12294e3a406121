"""Training runs in processes of their own, to be killed. The imports are paid once, by a fork
server."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
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

    ``settings`` may have ``environment``, the function that makes it (a name of
    ``support.training``, or ``module:name``), and ``model``, a folder.
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
    module, _, name = settings.pop("environment", "toy_env").rpartition(":")
    env = getattr(importlib.import_module(f"support.{module or 'training'}"), name)()
    model = settings.pop("model", None)
    resume = checkpoint_files.newest_valid(Path(folder)) is not None
    with failpoints.armed(failpoint) if failpoint else nullcontext():
        trainer = training.small_trainer(Path(folder), env, model, **settings)
        trainer.train(resume_from_checkpoint=resume)
    sys.stdout.flush()


class ForkedScript:
    """The source of a script that runs with these words in a process of ``child_context``; used as
    a ``subprocess.Popen`` whose streams are one pipe."""

    def __init__(self, source: str, folder: Path, *words: str) -> None:
        self._said = folder / "said"
        arguments = (source, str(self._said), [str(folder), *words])
        self._process = child_context().Process(target=_run_script, args=arguments)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def first_line(self, start: str, timeout: float = 60.0) -> str:
        """The first whole line that begins so, as soon as it is there."""
        deadline, text = time.monotonic() + timeout, ""
        while time.monotonic() < deadline and self.returncode is None:
            text = self._said.read_text() if self._said.exists() else ""
            for line in text.splitlines(keepends=True):
                if line.startswith(start) and line.endswith("\n"):
                    return line
            time.sleep(0.02)
        raise AssertionError(f"no line begins with {start!r} (exit code {self.returncode}): {text}")

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it said, after its end."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, "the script hangs"
        return self._said.read_text(), None


def _run_script(source: str, said: str, words: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    with open(said, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w", 1)  # noqa: SIM115
    sys.argv = ["script.py", *words]
    try:
        exec(compile(source, "script.py", "exec"), {"__name__": "__main__"})
    finally:
        sys.stdout.flush()
