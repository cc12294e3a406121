"""Sandboxes on a kernel of their own: gVisor (https://gvisor.dev), by its program ``runsc``, without an engine.

System calls of the code are served by gVisor and not by the host's kernel. It costs time at every system call and file,
and what all processes hold together is looked at ten times a second and not bounded by the kernel.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

from verifiers.sandbox.guest.launch import UID
from verifiers.sandbox.guest.supervisor import MAX_FILES
from verifiers.sandbox.host.container import (
    ROOT,
    SHARED,
    ContainerBackend,
    Launch,
    Root,
    environment,
    file_sizes,
    root_for,
)
from verifiers.sandbox.protocol import SandboxSpec

SAFE = ["nosuid", "nodev"]


class GVisor(ContainerBackend):
    """A ``SandboxBackend`` over the command ``runsc``; ``options`` go to it, such as ``--platform=kvm``."""

    name = "gvisor"
    program = "runsc"

    def __init__(self, options: tuple[str, ...] = ()):
        super().__init__()
        self._options = options

    async def launch(self, program: str, spec: SandboxSpec, keeper: list[str]) -> Launch:
        root = await asyncio.to_thread(root_for, tuple(spec.packages))
        name = f"sandbox-{secrets.token_hex(8)}"
        folder = Path(tempfile.mkdtemp(prefix="gvisor-"))
        try:
            (folder / "state").mkdir()
            (folder / "config.json").write_text(json.dumps(_bundle(root, spec, keeper)), encoding="utf-8")
        except BaseException:  # the folder goes, whatever it was; raised again
            shutil.rmtree(folder, ignore_errors=True)
            raise
        runsc = [program, f"--root={folder}/state", "--network=none", "--ignore-cgroups", *self._options]
        end = shlex.join([*runsc, "delete", "--force", name])
        return Launch([*runsc, "run", f"--bundle={folder}", name], after=f"{end}; rm -rf {shlex.quote(str(folder))}")


def _bundle(root: Root, spec: SandboxSpec, keeper: list[str]) -> dict[str, Any]:
    """An OCI runtime bundle's configuration."""
    files_mb, shared_mb = file_sizes(spec)
    told = {**environment(spec), "TMPDIR": spec.env.get("TMPDIR", f"{ROOT}/tmp")}  # runsc mounts a /tmp of its own
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": UID, "gid": UID},
            "args": keeper,
            "env": [f"{variable}={value}" for variable, value in told.items()],
            "cwd": "/",
            "capabilities": {kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")},
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": MAX_FILES, "soft": MAX_FILES}],
            "noNewPrivileges": True,
        },
        "root": {"path": str(root.folder), "readonly": True},
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            *(
                {"destination": place, "type": "bind", "source": path, "options": ["rbind", "ro", *SAFE]}
                for place, path in root.shown.items()
            ),
            *(
                {
                    "destination": place,
                    "type": "tmpfs",
                    "source": "tmpfs",
                    "options": [*SAFE, "mode=1777", f"size={size_mb}m"],
                }
                for place, size_mb in ((ROOT, max(1, files_mb - shared_mb)), (SHARED, shared_mb), ("/tmp", shared_mb))
            ),
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }
