"""Follow the steps of a Dockerfile in a sandbox: the files of a task's image, as one archive that is unpacked in ``/``.

Promise: an archive is built once and then put into every sandbox of the task. A command that fails ends the build with
its line and its last message; there is no network, and no system program can be changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from verifiers.environments.harbor.dockerfile import Copy, Dockerfile, Run
from verifiers.errors import ConfigError
from verifiers.sandbox import ExecResult, Sandbox
from verifiers.sandbox.transfer import pack, put, take

HOST = "host"
"""In place of an image: this machine's system programs, read-only."""
_LEFT_OUT = tuple(
    f"--exclude=./{path}"
    for path in (
        "tmp/.transfer-* proc dev sys bin sbin lib lib64 lib32 usr/bin usr/sbin usr/lib usr/lib64 usr/lib32 "
        "usr/libexec usr/share/zoneinfo usr/share/terminfo opt/python opt/packages opt/sandbox etc/ld.so.cache "
        "etc/alternatives etc/localtime"
    ).split()
)


def check_image(image: str, images: Mapping[str, str], task: str) -> None:
    """*Raises* ConfigError unless ``images`` says what stands in the place of an image."""
    if image and images.get(image) != HOST:
        raise ConfigError(
            f"task {task}: its image {image!r} is not here, and none is downloaded; pass "
            f'images={{"{image}": "host"}} to use this machine\'s system programs in its place',
            example_id=task,
        )


def needs_sandbox(build: Dockerfile) -> bool:
    """Whether a Dockerfile runs commands, so that a sandbox is needed to build it."""
    return any(isinstance(step, Run) for step in build.steps)


def copied_files(build: Dockerfile) -> bytes:
    """The files of a Dockerfile without commands; empty without any."""
    files = [pair for step in build.steps if isinstance(step, Copy) for pair in step.files]
    return _packed(files) if files else b""


async def built_files(sandbox: Sandbox, build: Dockerfile, task: str, timeout_s: float) -> bytes:
    """Follow the steps in an empty sandbox and return what they made. *Raises* ConfigError for a command that fails."""
    await sandbox.exec(["mkdir", "-p", *build.folders, "/tmp"], timeout_s=timeout_s)
    for step in build.steps:
        if isinstance(step, Copy):
            await put(sandbox, _packed(step.files), "/")
            continue
        variables = [f"{name}={value}" for name, value in step.env]
        inside = ["sh", "-c", 'mkdir -p "$0" && cd "$0" && exec "$@"', step.workdir, *step.argv]
        result = await sandbox.exec(["env", *variables, *inside], timeout_s=timeout_s)
        if result.exit_code != 0:
            raise ConfigError(
                f"task {task}: the RUN in line {step.line} of its Dockerfile failed in the sandbox, which has no "
                f"network and changes no system program: {last_line(result)}",
                example_id=task,
            )
    packed = await take(sandbox, "/", ["--one-file-system", *_LEFT_OUT])
    assert packed is not None, "the root folder exists"
    return packed.archive


def last_line(result: ExecResult) -> str:
    """The last line that a command printed, for a message."""
    lines = (result.error or result.stderr or result.stdout).strip().splitlines()
    return lines[-1][:300] if lines else f"exit code {result.exit_code}"


def _packed(files: Iterable[tuple[Path, str]]) -> bytes:
    return pack([(path, inside.lstrip("/") or ".") for path, inside in files])
