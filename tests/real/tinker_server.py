"""A Tinker server on this machine's CPU: SkyRL's, over JAX, with a tiny model. It has a virtual
environment of its own.

On Python 3.11 its types need ``typing_extensions``' TypedDict, and it starts its engine by the
words of a parent ``uv run``; both are arranged here.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from real.peers import TORCH, Tier, environment_of
from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer

SERVERS = {
    "0.24.1": Tier(("skyrl[tinker,jax]==0.3.0", "tinker==0.24.1", TORCH), (), editable=()),
    "0.25.0": Tier(
        (
            "skyrl[tinker,jax]==0.4.0",
            "tinker==0.25.0",
            "aiohttp",
            "orjson",
            "pybase64",
            "loguru",
            TORCH,
        ),
        (),
        editable=(),
        python="3.12",
    ),
}
"""Version of the SDK -> the server that speaks its protocol."""
START_S = 180.0
PATCH = (
    "import typing\n\nimport typing_extensions\n\ntyping.TypedDict = typing_extensions.TypedDict\n"
)
BACKEND = {"max_lora_adapters": 16, "max_lora_rank": 8, "sample_max_num_sequences": 16}


def tiny_checkpoint(folder: Path) -> Path:
    """A random model of 90,000 parameters and its tokenizer, as files."""
    model = build_tiny_model(layers=2, hidden=64, heads=4)
    model.save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def serving(folder: Path, model: Path) -> Iterator[str]:
    """The URL of a started server; its files and its log are in ``folder``."""
    python = environment_of(SERVERS[metadata.version("tinker")])
    patch = folder / "patch"
    patch.mkdir(parents=True)
    (patch / "sitecustomize.py").write_text(PATCH, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *("uv", "run", "--no-project", "--active", "--", "python", "-m", "skyrl.tinker.api"),
        *("--base-model", str(model), "--backend", "jax", "--backend-config", json.dumps(BACKEND)),
        *(
            "--checkpoints-base",
            str(folder / "checkpoints"),
            "--database-url",
            f"sqlite:///{folder / 'tinker.db'}",
        ),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    variables = {
        "VIRTUAL_ENV": str(python.parents[1]),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }
    variables |= {"PYTHONPATH": str(patch), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **variables},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}", folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        # it ended by itself; the error that says why is on its way
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")
