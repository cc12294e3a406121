"""Types of the sandboxes in which model-written code runs: limits, results, and the protocols of
backends.

    backend = await verifiers.sandbox.backend_for("auto")
    sandbox = await backend.open(SandboxSpec(packages=("numpy", "sympy")))
    (await sandbox.exec("x = 6 * 7\\nx", timeout_s=10)).value        # "42"; x stays for the next call
    (await sandbox.exec(["bash", "-c", "ls"], timeout_s=10)).stdout
    await sandbox.close()

A backend defines the isolation. Limits are per sandbox: many sandboxes together may exceed what the
machine has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from verifiers.errors import ConfigError
from verifiers.runtime.redaction import remember_secrets


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Contents and limits of a sandbox.

    Example: ``SandboxSpec(packages=("numpy", "sympy"), memory_mb=1024, env={"LANG": "C.UTF-8"})``
    """

    packages: tuple[str, ...] = ()
    """Distributions (pip names) that code inside can import, with their dependencies and nothing
    else."""
    memory_mb: int = 2048
    """MB that each process may allocate beyond interpreter and packages; also of all processes and
    files together."""
    cpu_s: float = 600.0
    """CPU time of any one process, in seconds."""
    wall_s: float = 3600.0
    """Seconds after which an opened sandbox ends."""
    file_mb: int = 512
    """MB of all files together; the local backends keep files in memory, so at most
    ``memory_mb``."""
    num_processes: int = 64
    """Concurrent processes and threads."""
    network: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the code; variables of this process are not passed on."""
    working_dir: str | None = None
    """Working directory of calls, created when it does not exist. None: the sandbox's home."""
    writable_root: bool = False
    """Whether the code may create files anywhere below ``/`` but among the system programs. False:
    only in its home and in ``/tmp``. Backends without the capability "root" refuse it."""
    root: str | None = None
    """Absolute path of a host's folder whose files are the root file system, in place of the host's
    system programs. They stay as they are: what the code changes is in memory. Backends without the
    capability "root" refuse it."""
    max_output_bytes: int = 2**20
    """Bytes of each of stdout and stderr, per call; the rest is dropped and marked."""
    mounts: Mapping[str, str] = field(default_factory=dict)
    """Absolute path inside -> absolute path of a file or folder of the host, read-only. Needs a
    backend with the capability "mounts"; sandboxes with equal packages and mounts start from one
    process."""
    limit_address_space: bool = True
    """False for programs that reserve far more memory than they use (V8, Bun, Go): only the memory
    in use counts."""

    def __post_init__(self) -> None:
        remember_secrets(self.env)
        for name in "memory_mb cpu_s wall_s file_mb num_processes max_output_bytes".split():
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"SandboxSpec.{name} is {getattr(self, name)!r}; it must be above 0"
                )
        if isinstance(self.packages, str):
            raise ConfigError(
                f"SandboxSpec.packages is the string {self.packages!r}; pass a tuple of names"
            )
        for name, value in self.env.items():
            if "=" in name or "\0" in f"{name}{value}" or not name:
                raise ConfigError(
                    f"SandboxSpec.env contains {name!r}, which is not a valid name of an"
                    " environment variable"
                )
        if self.root is not None and not os.path.isabs(self.root):
            raise ConfigError(
                f"SandboxSpec.root is {self.root!r}; it must be an absolute path of the host"
            )
        for inside, outside in self.mounts.items():
            if (
                not os.path.isabs(inside)
                or not os.path.isabs(outside)
                or os.path.normpath(inside) != inside
            ):
                raise ConfigError(
                    f"SandboxSpec.mounts maps {inside!r} to {outside!r}; give a normalised absolute"
                    " path inside, and an absolute path of the host"
                )

    def check_capabilities(self, backend: str, capabilities: Set[str]) -> None:
        """*Raises* ConfigError for a root file system of its own, mounts or a network that a
        backend of these capabilities has not."""
        if (self.writable_root or self.root is not None) and "root" not in capabilities:
            name = "writable_root" if self.root is None else "root"
            raise ConfigError(
                f"The sandbox {backend!r} has no root file system of its own (SandboxSpec.{name}); "
                "use sandbox='bubblewrap'"
            )
        if self.mounts and "mounts" not in capabilities:
            raise ConfigError(
                f"The sandbox {backend!r} cannot mount {', '.join(self.mounts.values())}; use"
                " sandbox='bubblewrap'"
            )
        if self.network and "network" not in capabilities:
            raise ConfigError(
                f"The sandbox {backend!r} has no network; leave network=False or use a remote"
                " backend"
            )


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a call.

    Example: ``ExecResult(stdout="1\\n", value="42")``
    """

    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    """``repr`` of the trailing expression of Python code; None without an expression, or when it is
    None."""
    error: str | None = None
    """Traceback of Python code, or why a command could not be started."""
    exit_code: int | None = None
    """Exit code of a command, negative for a signal; None for Python code and after a time-out."""
    timed_out: bool = False
    """The call exceeded ``timeout_s``: every process was killed, and Python variables are lost."""
    truncated: bool = False
    """Some output was dropped."""
    limit: str | None = None
    """The limit that was reached: "wall", "memory", "cpu", "file", "processes" or "output";
    "killed" when the interpreter died for another reason."""


@dataclass(frozen=True, slots=True)
class Availability:
    """The result of a probe; truthy when the backend works on this machine."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@runtime_checkable
class Sandbox(Protocol):
    """A sandbox of a rollout. Calls run sequentially."""

    async def exec(self, code_or_argv: str | list[str], *, timeout_s: float) -> ExecResult:
        """Run Python code in the persistent interpreter (text), or a command (list).

        Errors of the code are in the result. *Raises* SandboxError when the sandbox itself is gone
        or closed.
        """
        ...

    async def read_file(self, path: str) -> bytes:
        """Read a regular file. *Raises* OSError of the sandbox, such as FileNotFoundError;
        SandboxLimit above 64 MB."""
        ...

    async def write_file(self, path: str, data: bytes | str) -> None:
        """Write a file and create its folders. *Raises* the OSError of the sandbox."""
        ...

    async def restart(self) -> None:
        """Kill every process and start a new interpreter; the files stay."""
        ...

    async def reset(self) -> None:
        """Kill every process and delete all files and state, as in a newly opened sandbox."""
        ...

    async def close(self) -> None:
        """Kill every process and delete every file. A second call does nothing."""
        ...


@runtime_checkable
class SandboxBackend(Protocol):
    """An isolation mechanism, such as ``bubblewrap``."""

    name: str
    capabilities: frozenset[str]
    """A subset of "numpy", "sympy", "files", "network", "state", "isolation", "mounts", "root"."""

    async def available(self) -> Availability:
        """Probe the backend: whether it works on this machine, and the reason if not."""
        ...

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Open a sandbox. *Raises* SandboxUnavailable when it cannot be started, ConfigError for a
        missing package."""
        ...
