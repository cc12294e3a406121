"""``SandboxEnv``: the model runs shell commands in one sandbox per rollout.

Promise: the first tool call of a rollout opens its sandbox, and the end of the rollout closes it,
also after an error, a time-out or a cancellation. Failures of the code (a failing command, a limit,
a time-out) become text for the model; a failure of the sandbox ends the rollout with a
``SandboxError``, and its reward is unknown.

``verifiers.sandbox`` isolates the code; ``sandbox_text`` formats results for the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, Unpack

from verifiers import compat
from verifiers.environments.sandbox_text import command_text, has_failed
from verifiers.environments.stateful_tool import StatefulToolEnv
from verifiers.environments.tool import CallOptions
from verifiers.errors import (
    ConfigError,
    SandboxError,
    SandboxLimit,
    SandboxUnavailable,
    ToolError,
    UsageError,
    VerifiersError,
)
from verifiers.rollouts.author_code import cleanup, fork, maybe_await, setup
from verifiers.rollouts.state import State
from verifiers.runtime.calls import PerLoop
from verifiers.runtime.signatures import spell_out
from verifiers.sandbox import ExecResult, Sandbox, SandboxBackend, SandboxSpec, backend_for
from verifiers.sandbox.opening import opening
from verifiers.sandbox.transfer import copy_files
from verifiers.types import Messages, ToolCall

FIRST, LAST = 1000, -1000
"""Cleanup priorities outside the range of subclasses: ``post_rollout`` runs first, the sandbox
closes last."""


@dataclass(slots=True)
class SandboxUse:
    """The sandbox of a rollout and its usage: ``state["sandbox"]``. The numbers remain after it
    is closed."""

    spec: SandboxSpec
    sandbox: Sandbox | None = None
    """Open from the first call until the rollout ends."""
    is_over: bool = False
    num_calls: int = 0
    """Calls that ran."""
    num_errors: int = 0
    """Calls that failed or could not run."""
    ready_wait_s: float = 0.0
    command_s: float = 0.0
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


def sandbox_ready_wait_time(state: State) -> float:
    """Seconds until the sandbox of the rollout was open; 0 without a sandbox."""
    return _use_of(state).ready_wait_s


def sandbox_command_execution_time(state: State) -> float:
    """Total seconds of the commands of the rollout."""
    return _use_of(state).command_s


def tool_errors(state: State) -> float:
    """Tool calls that failed (an exception, an exit code, a limit, a time-out) or could not run."""
    return float(_use_of(state).num_errors)


class RemoteOptions(TypedDict, total=False):
    """Parameters of remote sandbox services, without effect on a local sandbox."""

    docker_image: str | None
    start_command: str | None
    gpu_count: int | None
    gpu_type: str | None
    team_id: str | None
    labels: Sequence[str] | None
    sandbox_name: str | None
    advanced_configs: object
    max_retries: int | None
    base_delay: float | None
    backoff_factor: float | None
    max_backoff_seconds: float | None
    jitter: float | None
    sandbox_client_max_workers: int | None
    sandbox_client_max_connections: int | None
    sandbox_client_max_keepalive_connections: int | None
    sandbox_wait_for_creation_max_attempts: int | None


class ToolOptions(CallOptions, RemoteOptions, total=False):
    """The parameters of ``ToolEnv`` whose defaults are the same in a sandbox, and those of remote
    services."""

    max_turns: int
    error_formatter: Callable[[Exception], str]


class SandboxOptions(ToolOptions, total=False):
    """The parameters of ``SandboxEnv`` but ``max_startup_wait_seconds``, for the constructors of
    its subclasses."""

    sandbox: str | SandboxBackend
    memory_gb: float
    cpu_cores: float
    disk_size_gb: float
    timeout_per_command_seconds: float
    timeout_minutes: float
    environment_vars: Mapping[str, str] | None
    working_dir: str | None
    artifacts: Sequence[str]
    stop_errors: Sequence[type[BaseException]] | None
    max_tool_result_chars: int


class SandboxEnv(StatefulToolEnv):
    """A ``StatefulToolEnv`` whose tool ``bash(command)`` runs in the rollout's sandbox.

    Args:
        sandbox: A backend or its name; "auto" selects the first isolating one whose probe passes.
        memory_gb: Memory of a sandbox.
        cpu_cores: Cores of a sandbox.
        disk_size_gb: Disk space of a sandbox.
        timeout_per_command_seconds: Time limit of a call.
        timeout_minutes: Time limit of a sandbox.
        environment_vars: The variables that the code sees; it sees no others.
        working_dir: Working directory of the code.
        artifacts: Paths of the files that hold the model's results. They are read when the rollout
            ends, into ``state["artifacts"]``, and ``run_check`` puts them into a fresh sandbox to
            check them there.
        max_startup_wait_seconds: Time limit of the opening of a sandbox.
        stop_errors: Exception classes that end the rollout; default: the failures of the sandbox.
        max_tool_result_chars: Longer results of a tool are cut to this many characters.

    Parameters of remote services (``docker_image``, ``gpu_count``, …) are accepted, stored in
    ``remote_options`` and have no effect on a local sandbox.

    Tools, ``run_code``, ``env_response`` and ``post_rollout`` share the sandbox with the model's
    code, which can forge what they see there.

    To add tools that use the sandbox: ``add_tool(self.mine, args_to_skip=["state"])`` with an
    ``async def mine(self, …, state)`` that awaits ``self.run_code(state, code_or_argv)`` or
    ``self.get_sandbox(state)``; an override of ``update_tool_args`` calls
    ``super().update_tool_args``.

    *Raises* ConfigError for an invalid parameter; at the first rollout for a package that is not
    installed.
    """

    packages: tuple[str, ...] = ()
    """Distributions that the code can import."""

    @spell_out(ToolOptions, StatefulToolEnv.__init__)
    def __init__(
        self,
        sandbox: str | SandboxBackend = "auto",
        memory_gb: float = 2,
        cpu_cores: float = 1,
        disk_size_gb: float = 5,
        timeout_per_command_seconds: float = 30,
        timeout_minutes: float = 60,
        environment_vars: Mapping[str, str] | None = None,
        working_dir: str | None = None,
        artifacts: Sequence[str] = (),
        max_startup_wait_seconds: float = 60,
        stop_errors: Sequence[type[BaseException]] | None = None,
        max_tool_result_chars: int = 20_000,
        **parameters: Unpack[ToolOptions],
    ):
        options: dict[str, Any] = {**parameters}
        self.remote_options = {
            name: options.pop(name) for name in compat.REMOTE_SANDBOX & options.keys()
        }
        super().__init__(
            stop_errors=[SandboxUnavailable] if stop_errors is None else stop_errors,
            max_tool_result_chars=max_tool_result_chars,
            **options,
        )
        numbers = {
            "memory_gb": memory_gb,
            "cpu_cores": cpu_cores,
            "disk_size_gb": disk_size_gb,
            "timeout_per_command_seconds": timeout_per_command_seconds,
            "timeout_minutes": timeout_minutes,
            "max_startup_wait_seconds": max_startup_wait_seconds,
        }
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{name} must be a number above 0, not {value!r}", key=name)
        if isinstance(artifacts, str):
            raise ConfigError(
                f"artifacts is the text {artifacts!r}; pass a list of paths", key="artifacts"
            )
        self.sandbox = sandbox
        self.artifacts = tuple(artifacts)
        self.timeout_per_command_seconds = timeout_per_command_seconds
        self.max_startup_wait_seconds = max_startup_wait_seconds
        self.sandbox_spec = SandboxSpec(
            packages=self.packages,
            memory_mb=max(1, int(memory_gb * 1024)),
            cpu_s=60 * timeout_minutes * cpu_cores,
            wall_s=60 * timeout_minutes,
            file_mb=max(1, int(min(disk_size_gb, memory_gb) * 1024)),
            env={str(name): str(value) for name, value in (environment_vars or {}).items()},
            working_dir=working_dir,
        )
        for metric in self.measured():
            self.monitor_rubric.add_metric(metric)
        self._backend: SandboxBackend | None = None
        self._selection_lock = PerLoop(asyncio.Lock)
        self._proof_lock = PerLoop(asyncio.Lock)
        self._is_proven = False
        self._refusal: VerifiersError | None = None
        if self.remote_options:
            self.logger.info(
                "ignored by a local sandbox: %s", ", ".join(sorted(self.remote_options))
            )
        self.add_sandbox_tools()

    def add_sandbox_tools(self) -> None:
        """Add the tool ``bash``; subclasses override this to offer other tools."""
        self.add_tool(self.bash, args_to_skip=["state"])

    def measured(self) -> list[Callable[[State], float]]:
        """Metrics of every rollout."""
        return [sandbox_ready_wait_time, sandbox_command_execution_time, tool_errors]

    # --- methods to override ----------------------------------------------------------------------

    def get_sandbox_spec(self, state: State) -> Any:
        """The ``SandboxSpec`` of a rollout, by default the environment's. Sync or async."""
        return self.sandbox_spec

    def sandbox_opened(self, sandbox: Sandbox, state: State) -> Any:
        """Called once with each sandbox that is opened for a rollout, such as to write files. Sync
        or async."""

    def post_rollout(self, state: State) -> Any:
        """Called after the rollout, while its sandbox, if any, is still open. Sync or async."""

    # --- the tool ---------------------------------------------------------------------------------

    async def bash(self, command: str, state: State) -> str:
        """Run a shell command. Files stay until the end of the conversation; there is no network.

        Args:
            command: The command, as a person writes it in a terminal.
        """
        return command_text(
            await self.run_code(state, ["bash", "-c", command]), self.timeout_per_command_seconds
        )

    async def run_code(
        self, state: State, code_or_argv: str | list[str], timeout_s: float | None = None
    ) -> ExecResult:
        """Run Python code (text) or a command (list) in the rollout's sandbox; counted and timed.

        It shares the sandbox with the model's code; ``run_check`` checks results. *Raises*
        SandboxError when the sandbox does not work.
        """
        use = _use_of(state)
        sandbox = await self.get_sandbox(state)
        started = time.perf_counter()
        try:
            result = await sandbox.exec(
                code_or_argv, timeout_s=timeout_s or self.timeout_per_command_seconds
            )
        except BaseException:  # counted as an error of this rollout; raised again
            use.num_errors += 1
            raise
        finally:
            use.num_calls += 1
            use.command_s += time.perf_counter() - started
        use.num_errors += has_failed(result)
        return result

    async def run_check(
        self,
        state: State,
        code_or_argv: str | list[str],
        files: Mapping[str, bytes | str] | None = None,
        timeout_s: float | None = None,
    ) -> ExecResult:
        """Run Python code (text) or a command (list) that checks results, in a fresh sandbox that
        is closed afterwards.

        The sandbox holds the files ``state["artifacts"]`` of the rollout, then ``files`` (path ->
        content), and nothing else of the model's: none of its processes, variables or other files.
        Code of the model that the check runs or imports shares the sandbox with the check. Works
        also after the rollout, in a reward function.

        *Raises* SandboxError when the sandbox does not work.
        """
        async with self.fresh_sandbox(state) as sandbox:
            for path, content in {**state.get("artifacts", {}), **(files or {})}.items():
                await sandbox.write_file(path, content)
            return await sandbox.exec(
                code_or_argv, timeout_s=timeout_s or self.timeout_per_command_seconds
            )

    @contextlib.asynccontextmanager
    async def fresh_sandbox(
        self, state: State, spec: SandboxSpec | None = None
    ) -> AsyncIterator[Sandbox]:
        """Open a sandbox for a rollout in which no code of the model has run; it is closed at the
        end of the block.

        ``spec``: None for that of the rollout's own sandbox.
        """
        sandbox = await self._open(spec or _use_of(state).spec)
        try:
            await maybe_await(self.sandbox_opened(sandbox, state))
            yield sandbox
        finally:
            await sandbox.close()

    async def get_sandbox(self, state: State) -> Sandbox:
        """Return the sandbox of the rollout; the first call opens it. *Raises* SandboxUnavailable
        after the limit."""
        use = _use_of(state)
        async with use.opening:
            if use.sandbox is None:
                if use.is_over:
                    raise SandboxUnavailable(
                        "the rollout is over; its sandbox cannot be opened again"
                    )
                started = time.perf_counter()
                use.sandbox = await self._open(use.spec)
                await maybe_await(self.sandbox_opened(use.sandbox, state))
                use.ready_wait_s = time.perf_counter() - started
            return use.sandbox

    async def _open(self, spec: SandboxSpec) -> Sandbox:
        async with opening(self.max_startup_wait_seconds):
            return await (await self._selected_backend()).open(spec)

    async def _selected_backend(self) -> SandboxBackend:
        """Return the backend; the first call probes for it."""
        async with self._selection_lock.here():
            if self._backend is None:
                self._backend = await backend_for(self.sandbox)
            return self._backend

    # --- one rollout ------------------------------------------------------------------------------

    @setup(priority=FIRST)
    async def prepare_sandbox(self, state: State) -> None:
        """Store the spec of the sandbox. The first rollout opens its sandbox at once, so that an
        invalid setting ends the run before the first model call."""
        spec = await maybe_await(compat.hook(self, "get_sandbox_spec", compat.SANDBOX_HOOKS)(state))
        if not isinstance(spec, SandboxSpec):
            raise ConfigError(
                f"get_sandbox_spec returned {type(spec).__name__}; return a SandboxSpec"
            )
        state["sandbox"] = SandboxUse(spec)
        if not self._is_proven:
            await self._prove(state)

    async def _prove(self, state: State) -> None:
        """Open the sandbox of a rollout while the others wait; its failure is raised in those
        that waited too."""
        before = self._refusal
        async with self._proof_lock.here():
            if self._is_proven:
                return
            if self._refusal is not before and self._refusal is not None:
                raise type(self._refusal)(str(self._refusal)) from self._refusal
            try:
                await self.get_sandbox(state)
            except (UsageError, SandboxError) as error:
                self._refusal = error
                raise
            self._is_proven = True

    @fork(priority=FIRST)
    async def fork_sandbox(self, state: State, branch: State) -> None:
        """Open a sandbox for a branch with the files of its parent's."""
        use = _use_of(state)
        branch["sandbox"] = copied = replace(use, sandbox=None, opening=asyncio.Lock())
        async with use.opening:
            if use.sandbox is None:
                return
            if use.spec.writable_root or use.spec.root is not None:
                raise ConfigError(
                    "the sandbox of this environment has a root file system of its own, whose"
                    " changes cannot be copied for a branch; leave branching out, or writable_root"
                    " and root of its SandboxSpec",
                    key="branching",
                )
            copied.sandbox = await self._open(use.spec)
            await copy_files(use.sandbox, copied.sandbox)

    @cleanup(priority=FIRST)
    async def finish_rollout(self, state: State) -> None:
        """Call ``post_rollout``."""
        await maybe_await(self.post_rollout(state))

    @cleanup(priority=LAST + 1)
    async def collect_artifacts(self, state: State) -> None:
        """Read the declared files into ``state["artifacts"]``: path -> content. Those that cannot
        be read are absent.

        Every process ends first, and a new interpreter reads: the model's may read something else.
        """
        collected: dict[str, bytes] = {}
        sandbox = _use_of(state).sandbox
        if sandbox is not None and self.artifacts:
            await sandbox.restart()
            for path in self.artifacts:
                try:
                    collected[path] = await sandbox.read_file(path)
                except (OSError, SandboxLimit) as error:
                    self.logger.debug("the artifact %s is absent: %s", path, error)
        state["artifacts"] = collected

    @cleanup(priority=LAST)
    async def close_sandbox(self, state: State) -> None:
        """Close the sandbox of the rollout."""
        use = _use_of(state)
        use.is_over = True
        async with use.opening:
            sandbox, use.sandbox = use.sandbox, None
        if sandbox is not None:
            await sandbox.close()

    def update_tool_args(
        self,
        tool_name: str,
        tool_args: dict[str, object],
        messages: Messages,
        state: State,
        **kwargs: object,
    ) -> Any:
        """Add ``state`` to the arguments of tools that declare it as a hidden parameter."""
        tool = self._functions.get(tool_name)
        if tool is not None and "state" in tool.hidden:
            return tool_args | {"state": state}
        return tool_args

    async def prepare_arguments(
        self, call: ToolCall, messages: Messages, state: State
    ) -> dict[str, object]:
        """Prepare the arguments as ``StatefulToolEnv`` does, and count refused calls as errors."""
        try:
            return await super().prepare_arguments(call, messages, state)
        except ToolError:
            _use_of(state).num_errors += 1
            raise


def _use_of(state: State) -> SandboxUse:
    """Return the ``SandboxUse`` of a rollout; a new object if the setup failed before
    storing it."""
    use = state.get("sandbox")
    return use if isinstance(use, SandboxUse) else SandboxUse(SandboxSpec())
