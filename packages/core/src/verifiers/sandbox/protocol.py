"""What a sandbox is: a place for code that a model wrote, with limits, that ends with its rollout.

    backend = await verifiers.sandbox.backend_for("auto")
    sandbox = await backend.open(SandboxSpec(packages=("numpy", "sympy")))
    (await sandbox.exec("x = 6 * 7\\nx", timeout_s=10)).value        # "42"; x stays for the next call
    (await sandbox.exec(["bash", "-c", "ls"], timeout_s=10)).stdout
    await sandbox.close()

These types say nothing of how a backend isolates. Limits are per sandbox: many sandboxes together may ask for more than
the machine has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from verifiers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox must offer and may use.

    Example: ``SandboxSpec(packages=("numpy", "sympy"), memory_mb=1024, env={"LANG": "C.UTF-8"})``
    """

    packages: tuple[str, ...] = ()
    """Distributions, as pip names them, that code inside can import; with what they need, and nothing else."""
    memory_mb: int = 2048
    """What each process may allocate beyond interpreter and packages, and all processes and files may hold together."""
    cpu_s: float = 600.0
    """CPU time that any one process may use."""
    wall_s: float = 3600.0
    """The sandbox ends this long after it was opened."""
    file_mb: int = 512
    """All files together; they lie in memory with the local backends, so no more than ``memory_mb``."""
    num_processes: int = 64
    """Processes and threads at the same time."""
    network: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    """The only variables of the caller's that code inside sees."""
    working_dir: str | None = None
    """Where calls start; made when it is not there. None: the sandbox's home."""
    max_output_bytes: int = 2**20
    """Of each of stdout and stderr, per call; the rest is dropped and marked."""

    def __post_init__(self) -> None:
        for name in ("memory_mb", "cpu_s", "wall_s", "file_mb", "num_processes", "max_output_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"SandboxSpec.{name} is {getattr(self, name)!r}; it must be above 0")
        if isinstance(self.packages, str):
            raise ConfigError(f"SandboxSpec.packages is the text {self.packages!r}; give a tuple of names")
        for name, value in self.env.items():
            if "=" in name or "\0" in f"{name}{value}" or not name:
                raise ConfigError(f"SandboxSpec.env has {name!r}, which cannot be the name of an environment variable")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What came of one call.

    Example: ``ExecResult(stdout="1\\n", value="42")``
    """

    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    """``repr`` of the trailing expression of Python code; None without one, or when it is None."""
    error: str | None = None
    """Traceback of Python code, or why a command could not be started."""
    exit_code: int | None = None
    """Of a command, negative for a signal; None for Python code and after a time-out."""
    timed_out: bool = False
    """The call was ended at ``timeout_s``: every process is gone and Python's state with it."""
    truncated: bool = False
    limit: str | None = None
    """The limit that was hit: "wall", "memory", "cpu", "file", "processes" or "output"; "killed" for another sudden end
    of the interpreter."""


@dataclass(frozen=True, slots=True)
class Availability:
    """What a probe said. True in a condition when the backend works here."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@runtime_checkable
class Sandbox(Protocol):
    """One per rollout. Calls of one sandbox run one after another."""

    async def exec(self, code_or_argv: str | list[str], *, timeout_s: float) -> ExecResult:
        """Run Python code in the persistent interpreter (text), or a command (list).

        What the code does wrong is in the result. *Raises* SandboxError when the sandbox itself is gone or closed.
        """
        ...

    async def read_file(self, path: str) -> bytes:
        """A regular file's bytes. *Raises* FileNotFoundError and its like, SandboxLimit above the size allowed."""
        ...

    async def write_file(self, path: str, data: bytes | str) -> None:
        """Write a file, with its folders. *Raises* OSError as the file system inside says it."""
        ...

    async def reset(self) -> None:
        """As if newly opened: no processes, files or state of before."""
        ...

    async def close(self) -> None:
        """End every process and remove every file. Again: nothing."""
        ...


@runtime_checkable
class SandboxBackend(Protocol):
    """A way to isolate."""

    name: str
    capabilities: frozenset[str]
    """Of "numpy", "sympy", "files", "network", "state", "isolation"."""

    async def available(self) -> Availability:
        """Whether it works here, from trying it."""
        ...

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """*Raises* SandboxUnavailable when none can be started, ConfigError for a package that is not installed."""
        ...
