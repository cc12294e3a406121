"""Sandboxes on a user-space kernel: gVisor (https://gvisor.dev), run by its program ``runsc``
without an engine.

gVisor serves the system calls of the code instead of the host's kernel. System calls and file
accesses are slower, and the total memory of all processes is polled ten times a second instead of
being bounded by the kernel.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import shutil
import tempfile
from pathlib import Path

from verifiers.sandbox.guest.launch import UID
from verifiers.sandbox.guest.supervisor import MAX_FILES
from verifiers.sandbox.protocol import SandboxSpec
from verifiers_sandboxes.container import (
    ROOT,
    SHARED,
    ContainerBackend,
    Launch,
    Root,
    environment,
    file_sizes,
    root_for,
)

SAFE = ["nosuid", "nodev"]


class GVisor(ContainerBackend):
    """A ``SandboxBackend`` over the command ``runsc``; ``options`` are passed to it:
    ``--platform=kvm``."""

    name = "gvisor"
    program = "runsc"

    def __init__(self, options: tuple[str, ...] = ()):
        super().__init__()
        self._options = options

    async def launch(self, program: str, spec: SandboxSpec, init_command: list[str]) -> Launch:
        root = await asyncio.to_thread(root_for, tuple(spec.packages))
        name = f"sandbox-{secrets.token_hex(8)}"
        folder = Path(tempfile.mkdtemp(prefix="gvisor-"))
        try:
            (folder / "state").mkdir()
            (folder / "config.json").write_text(
                json.dumps(_bundle(root, spec, init_command)), encoding="utf-8"
            )
        except BaseException:  # remove the folder on any failure; raised again
            shutil.rmtree(folder, ignore_errors=True)
            raise
        runsc = [
            program,
            f"--root={folder}/state",
            "--network=none",
            "--ignore-cgroups",
            *self._options,
        ]
        end = shlex.join([*runsc, "delete", "--force", name])
        return Launch(
            [*runsc, "run", f"--bundle={folder}", name],
            after=f"{end}; rm -rf {shlex.quote(str(folder))}",
        )


def _bundle(root: Root, spec: SandboxSpec, init_command: list[str]) -> dict[str, object]:
    """The ``config.json`` of an OCI runtime bundle."""
    files_mb, shared_mb = file_sizes(spec)
    # runsc mounts a separate /tmp
    variables = {**environment(spec), "TMPDIR": spec.env.get("TMPDIR", f"{ROOT}/tmp")}
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": UID, "gid": UID},
            "args": init_command,
            "env": [f"{variable}={value}" for variable, value in variables.items()],
            "cwd": "/",
            "capabilities": {
                kind: []
                for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")
            },
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": MAX_FILES, "soft": MAX_FILES}],
            "noNewPrivileges": True,
        },
        "root": {"path": str(root.folder), "readonly": True},
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {
                "destination": "/dev",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "mode=755"],
            },
            *(
                {
                    "destination": inside,
                    "type": "bind",
                    "source": path,
                    "options": ["rbind", "ro", *SAFE],
                }
                for inside, path in root.visible.items()
            ),
            *(
                {
                    "destination": inside,
                    "type": "tmpfs",
                    "source": "tmpfs",
                    "options": [*SAFE, "mode=1777", f"size={size_mb}m"],
                }
                for inside, size_mb in (
                    (ROOT, max(1, files_mb - shared_mb)),
                    (SHARED, shared_mb),
                    ("/tmp", shared_mb),
                )
            ),
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]
        },
    }
