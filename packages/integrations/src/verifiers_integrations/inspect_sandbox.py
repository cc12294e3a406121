"""Our sandbox under Inspect, in place of containers: ``Task(..., sandbox="verifiers")``.

    from inspect_ai.solver import basic_agent
    from inspect_ai.tool import bash
    Task(dataset=…, solver=basic_agent(tools=[bash()]), sandbox="verifiers", scorer=…)

Promise: each sample has a sandbox of its own without a network, writable below ``/`` but for the
system programs, that is closed when the sample ends. A command that overruns its time is ended with
all other processes of the sandbox. A Dockerfile is not built; ``sandbox=("verifiers", PATH)`` is
refused.

Imported by Inspect only (an entry point of its group ``inspect_ai`` names this module): it needs
``inspect-ai``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from inspect_ai.util import ExecResult, OutputLimitExceededError, SandboxEnvironment, sandboxenv

from verifiers.errors import ConfigError, SandboxLimit
from verifiers.sandbox import Sandbox, SandboxSpec, backend_for

WALL_S = 6 * 3600.0
WORKDIR = "/workspace"
SPEC = SandboxSpec(
    cpu_s=WALL_S,
    wall_s=WALL_S,
    working_dir=WORKDIR,
    writable_root=True,
    max_output_bytes=10 * 2**20,
)
ROOT_USERS = (None, "root", "0")


@sandboxenv(name="verifiers")
class VerifiersSandbox(SandboxEnvironment):  # type: ignore[misc]  # Inspect is not installed where types are checked
    """A sandbox of a sample. Its working folder is ``/workspace``."""

    def __init__(self, sandbox: Sandbox):
        super().__init__()
        self._sandbox = sandbox

    @classmethod
    async def sample_init(
        cls, task_name: str, config: object, metadata: Mapping[str, str]
    ) -> dict[str, VerifiersSandbox]:
        if config is not None:
            raise ConfigError(
                f"task {task_name}: the sandbox 'verifiers' takes no configuration, got {config!r}"
            )
        return {"default": cls(await (await backend_for("bubblewrap")).open(SPEC))}

    @classmethod
    async def sample_cleanup(
        cls, task_name: str, config: object, environments: Mapping[str, Any], interrupted: bool
    ) -> None:
        for environment in environments.values():
            await environment.as_type(VerifiersSandbox).close()

    async def close(self) -> None:
        """End the sandbox."""
        await self._sandbox.close()

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> Any:
        if user not in ROOT_USERS:
            raise ConfigError(f"the sandbox 'verifiers' has one user; it cannot run as {user!r}")
        script, path = 'cd "$0" && exec "$@"', None
        if input is not None:
            path = "/tmp/.input"
            await self._sandbox.write_file(path, input)
            script += f" < {shlex.quote(path)}"
        variables = [f"{name}={value}" for name, value in (env or {}).items()]
        folder = cwd or WORKDIR
        argv = ["/usr/bin/env", *variables, "/bin/sh", "-c", script, folder, *cmd]
        result = await self._sandbox.exec(argv, timeout_s=timeout or WALL_S)
        if result.timed_out:
            raise TimeoutError(f"the command did not end within {timeout} s")
        if result.truncated:
            raise OutputLimitExceededError("10 MiB", result.stdout)
        code = 1 if result.exit_code is None else result.exit_code
        stderr = "\n".join(part for part in (result.stderr, result.error) if part)
        return ExecResult(code == 0, 128 - code if code < 0 else code, result.stdout, stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        await self._sandbox.write_file(file, contents)

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        try:
            content = await self._sandbox.read_file(file)
        except SandboxLimit as error:
            raise OutputLimitExceededError("64 MiB", None) from error
        return content.decode() if text else content
