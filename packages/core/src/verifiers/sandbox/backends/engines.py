"""Docker and Podman: the keeper as a container's first process, with the engine's own limits beside the keeper's.

The container has no network unless asked for, no capability, a read-only root, a user of its own and no image but an
empty one made here. It is removed when it ends, and it ends with this process.
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
from verifiers.sandbox.host.container import (
    ROOT,
    ContainerBackend,
    Launch,
    Root,
    environment,
    file_sizes,
    own_uid,
    root_for,
)
from verifiers.sandbox.protocol import SandboxSpec

INTERPRETER_MB = 128
"""Of keeper and worker, before the code allocates anything."""
LABEL = "verifiers.sandbox"


class Docker(ContainerBackend):
    """A ``SandboxBackend`` over the command ``docker``; ``options`` go to its ``run``, such as ``--runtime=runsc``.

    The engine must run on this machine: the containers show its files.
    """

    name = program = "docker"
    network = True
    extra: tuple[str, ...] = ()

    def __init__(self, options: tuple[str, ...] = ()):
        super().__init__()
        self._options = options

    async def launch(self, program: str, spec: SandboxSpec, keeper: list[str]) -> Launch:
        root = root_for(tuple(spec.packages))
        image = f"{LABEL.replace('.', '-')}:{root.digest}"
        await self._have(program, image, root)
        name = f"{LABEL.replace('.', '-')}-{os.getpid()}-{secrets.token_hex(6)}"
        argv = [program, "run", "--rm", "--interactive", "--name", name, "--label", f"{LABEL}={os.getpid()}"]
        argv += [*_confinement(spec), *self.extra, *self._options]
        for place, path in root.shown.items():
            argv += ["--mount", f"type=bind,source={path},target={place},readonly"]
        for variable, value in environment(spec).items():
            argv += ["--env", f"{variable}={value}"]
        argv += ["--entrypoint", keeper[0], image, *keeper[1:]]
        return Launch(argv, after=f"{shlex.quote(program)} rm --force {name}")

    async def _have(self, program: str, image: str, root: Root) -> None:
        """The image that holds nothing but places to mount on."""
        if await _run(program, "image", "inspect", image) is None:
            return
        with tempfile.NamedTemporaryFile(suffix=".tar") as packed:
            with tarfile.open(fileobj=packed, mode="w") as tar:
                tar.add(root.folder, arcname=".", filter=_of_root)
            packed.flush()
            if (why := await _run(program, "import", packed.name, image)) is not None:
                raise SandboxUnavailable(f"{self.name} could not make an image: {why}", names=[self.name])


class Podman(Docker):
    """A ``SandboxBackend`` over the command ``podman``."""

    name = program = "podman"
    extra = ("--read-only-tmpfs=false",)


def _confinement(spec: SandboxSpec) -> list[str]:
    files_mb, shared_mb = file_sizes(spec)
    user = own_uid() if os.getuid() == 0 else 1 + own_uid() % 60000
    memory = f"{spec.memory_mb + INTERPRETER_MB}m"
    processes = spec.num_processes + OWN_PROCESSES + 1
    options = "--read-only --cap-drop ALL --security-opt no-new-privileges --ipc private --log-driver none --pull never"
    return [
        *options.split(),
        *([] if spec.network else ["--network", "none"]),
        *["--user", f"{user}:{user}", "--hostname", "sandbox", "--workdir", "/"],
        *["--tmpfs", f"{ROOT}:rw,nosuid,nodev,exec,size={files_mb}m,mode=1777", "--shm-size", f"{shared_mb}m"],
        *["--memory", memory, "--memory-swap", memory, "--pids-limit", str(processes)],
        *["--ulimit", f"nofile={MAX_FILES}:{MAX_FILES}", "--ulimit", f"nproc={processes}:{processes}"],
        *["--ulimit", "core=0:0"],
    ]


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry


async def _run(*argv: str) -> str | None:
    """None when it went well, else its last words."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=pipe
    )
    _, errors = await process.communicate()
    if process.returncode == 0:
        return None
    return (errors.decode("utf-8", "replace").strip().splitlines() or [f"exit code {process.returncode}"])[-1][:400]
