"""Docker and Podman: a container per sandbox, whose first process is the guest init.

The container has no network unless requested, no capability, a read-only root, a unique user id and
an empty image created here. The engine's limits apply in addition to those of the guest init. The
container ends and is removed when this process ends.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import tarfile
import tempfile

from verifiers.errors import SandboxUnavailable
from verifiers.sandbox.guest.supervisor import MAX_FILES, OWN_PROCESSES
from verifiers.sandbox.protocol import SandboxSpec
from verifiers_sandboxes.container import (
    ROOT,
    ContainerBackend,
    Launch,
    Root,
    environment,
    file_sizes,
    root_for,
    unique_uid,
)

INTERPRETER_MB = 128
"""Memory of guest init and worker before the code allocates anything."""
LABEL = "verifiers.sandbox"


class Docker(ContainerBackend):
    """A ``SandboxBackend`` over the command ``docker``; ``options`` are passed to ``docker run``:
    ``--runtime=runsc``.

    The engine must run on this machine, whose files are mounted into the containers.
    """

    name = program = "docker"
    network = True
    extra_options: tuple[str, ...] = ()

    def __init__(self, options: tuple[str, ...] = ()):
        super().__init__()
        self._options = options

    async def launch(self, program: str, spec: SandboxSpec, init_command: list[str]) -> Launch:
        root = root_for(tuple(spec.packages))
        image = f"{LABEL.replace('.', '-')}:{root.digest}"
        await self._ensure_image(program, image, root)
        name = f"{LABEL.replace('.', '-')}-{os.getpid()}-{secrets.token_hex(6)}"
        options = f"run --rm --interactive --name {name} --label {LABEL}={os.getpid()}"
        argv = [program, *options.split()]
        argv += [*_confinement(spec), *self.extra_options, *self._options]
        for inside, path in root.visible.items():
            argv += ["--mount", f"type=bind,source={path},target={inside},readonly"]
        for variable, value in environment(spec).items():
            argv += ["--env", f"{variable}={value}"]
        argv += ["--entrypoint", init_command[0], image, *init_command[1:]]
        return Launch(argv, after=f"{shlex.quote(program)} rm --force {name}")

    async def _ensure_image(self, program: str, image: str, root: Root) -> None:
        """Import the image, which contains only mount points and links, unless the
        engine has it."""
        if await _run(program, "image", "inspect", image) is None:
            return
        with tempfile.NamedTemporaryFile(suffix=".tar") as packed:
            with tarfile.open(fileobj=packed, mode="w") as tar:
                tar.add(root.folder, arcname=".", filter=_owned_by_root)
            packed.flush()
            if (failure := await _run(program, "import", packed.name, image)) is not None:
                raise SandboxUnavailable(
                    f"{self.name} could not import an image: {failure}", names=[self.name]
                )


class Podman(Docker):
    """A ``SandboxBackend`` over the command ``podman``."""

    name = program = "podman"
    extra_options = ("--read-only-tmpfs=false",)


def _confinement(spec: SandboxSpec) -> list[str]:
    files_mb, shared_mb = file_sizes(spec)
    user = unique_uid() if os.getuid() == 0 else 1 + unique_uid() % 60000
    memory = f"{spec.memory_mb + INTERPRETER_MB}m"
    processes = spec.num_processes + OWN_PROCESSES + 1
    return (
        "--read-only --cap-drop ALL --security-opt no-new-privileges --ipc private --log-driver"
        f" none --pull never {'' if spec.network else '--network none'}"
        f" --user {user}:{user} --hostname sandbox --workdir /"
        f" --tmpfs {ROOT}:rw,nosuid,nodev,exec,size={files_mb}m,mode=1777"
        f" --shm-size {shared_mb}m"
        f" --memory {memory} --memory-swap {memory} --pids-limit {processes}"
        f" --ulimit nofile={MAX_FILES}:{MAX_FILES} --ulimit nproc={processes}:{processes}"
        " --ulimit core=0:0"
    ).split()


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry


async def _run(*argv: str) -> str | None:
    """None when the command succeeded, else the last line of its stderr."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=pipe
    )
    _, errors = await process.communicate()
    if process.returncode == 0:
        return None
    return (
        errors.decode("utf-8", "replace").strip().splitlines()
        or [f"exit code {process.returncode}"]
    )[-1][:400]
