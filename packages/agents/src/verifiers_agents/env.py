"""``AgentEnv``: an agent program works on each row, in a sandbox of its own without a network.

``turns`` makes its model calls the turns of the rollout; this module has the parameters, the
sandbox and the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Unpack

from verifiers.environments.keywords import ConversationOptions
from verifiers.environments.multi_turn import MultiTurnEnv
from verifiers.errors import ConfigError
from verifiers.rollouts.author_code import cleanup, maybe_await, setup
from verifiers.rollouts.state import State
from verifiers.runtime.signatures import spell_out
from verifiers.sandbox import SandboxBackend, SandboxSpec, backend_for
from verifiers.sandbox.opening import opening
from verifiers.storage.identity import Free
from verifiers_agents.agent import Agent, Installed
from verifiers_agents.conversation import Role
from verifiers_agents.gateway import Route
from verifiers_agents.host_programs import host_program
from verifiers_agents.process import (
    AgentFolders,
    AgentProcess,
    Limits,
    check_backend,
    contents,
    named_files,
    spec_for,
)
from verifiers_agents.turns import (
    FIRST,
    MAX_IDLE_S,
    METRICS,
    TRAINED_ROLES,
    AgentFunction,
    AgentTurns,
    agent_run,
)


class AgentOptions(ConversationOptions, total=False):
    """The parameters of ``AgentEnv`` whose defaults are those of ``MultiTurnEnv``."""

    max_turns: int


class AgentEnv(AgentTurns):
    """An environment in which an agent program works, in a sandbox without a network that reaches
    its model alone.

    Args:
        agent: A name ("codex", "opencode", "pi", "claude-code", "qwen-code", "mini-swe-agent", or
            of an entry point in ``verifiers.agents``; "codex@0.169.0" for a version), an
            ``Agent``, or an async function of the state for a framework in this process, which
            takes its base URL from ``vf.model_gateway(state)``.
        command: Any other program, with placeholders as in ``Agent``; a word that names a file of
            the working directory, or a script elsewhere, is copied into the work folder. A Python
            of the host's, named by its path (``sys.executable``), a console script and ``uv run``
            bring their virtual environment and their installation, read-only; ``python3`` is that
            of the sandbox, which can import ``packages``. A program also finds
            ``OPENAI_BASE_URL``, ``ANTHROPIC_BASE_URL``, ``VF_MODEL`` and ``VF_PROMPT`` in its
            environment.
        dialect: The only API of models that is offered ("chat", "responses", "messages"); default:
            the agent's, or all.
        agent_args: Further arguments of the agent's command.
        files: Path -> text, bytes or ``Path`` of the host, written before the agent starts;
            relative paths are in the work folder; ``~/`` is its home, where texts may hold
            placeholders, as configurations do. A row adds its own in ``info["files"]``.
        collect: Patterns of files in the work folder that are read at the end into
            ``state["files"]``. A row adds its own in ``info["collect"]``.
        packages: Distributions that Python programs inside can import.
        environment_vars: Environment variables that the agent sees beside those above.
        tools: Names of the agent's tools that the model sees; default: all.
        trained_roles: Which of "main", "subagent", "summary" and "side" are trained.
        history: "exact" (a conversation stays one sample, as sampled) or "template", for the
            trainer.
        sandbox: A backend or its name; "auto" selects the first isolating one whose probe passes.
        memory_gb: Memory of a sandbox.
        disk_size_gb: Disk space of a sandbox.
        timeout_minutes: Time limit of a sandbox.
        max_startup_wait_seconds: Time limit of the opening of a sandbox.
        max_idle_seconds: Longest time without a model call.
        score_failures: Score a rollout whose program fails after its model has answered, also where
            the model ended it; False leaves the reward unknown.
        max_output_mb: Limit of the agent's output.
        max_log_kb: How much of the agent's output is kept.
        max_file_mb: Largest file that is collected.
        keep_workdirs: A folder of the host for a copy of each work folder.

    *Raises* ConfigError for an invalid parameter; at the first rollout for an agent that is not
    installed.

    >>> import openai
    >>> from verifiers.testing import ScriptedClient
    >>> async def my_agent(state):
    ...     async with vf.model_gateway(state) as url, openai.AsyncOpenAI(base_url=url, api_key="unused") as client:
    ...         await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "2 + 2?"}])
    >>> env = vf.AgentEnv(agent=my_agent, dataset=[{"question": "2 + 2?", "answer": "4"}])
    >>> results = env.evaluate(ScriptedClient("4"), "m")
    >>> results["stop_conditions"], results["completions"][0][-1].content
    (['agent_ended'], '4')
    """

    @spell_out(AgentOptions, MultiTurnEnv.__init__)
    def __init__(
        self,
        agent: str | Agent | AgentFunction | None = None,
        command: Sequence[str] | None = None,
        dialect: str | None = None,
        agent_args: Sequence[str] = (),
        files: Mapping[str, str | bytes | Path] | None = None,
        collect: Sequence[str] = (),
        packages: Sequence[str] = (),
        environment_vars: Mapping[str, str] | None = None,
        tools: Sequence[str] | None = None,
        trained_roles: Sequence[Role] = TRAINED_ROLES,
        history: str = "exact",
        sandbox: str | SandboxBackend = "auto",
        memory_gb: float = 4,
        disk_size_gb: float = 2,
        timeout_minutes: float = 60,
        max_startup_wait_seconds: float = 60,
        max_idle_seconds: float = MAX_IDLE_S,
        score_failures: bool = True,
        max_output_mb: float = 16,
        max_log_kb: float = 128,
        max_file_mb: float = 1,
        keep_workdirs: Annotated[str | Path | None, Free("a copy for people")] = None,
        **parameters: Unpack[AgentOptions],
    ):
        super().__init__(**parameters)
        if (agent is None) is (command is None) and not (agent is None and self._runs_in_process):
            raise ConfigError(
                "AgentEnv needs agent= (a name, an Agent or a function) or command=[…], and not"
                " both"
            )
        if isinstance(collect, str):
            raise ConfigError("collect is a list of patterns, not one text", key="collect")
        limits = max_idle_seconds, score_failures
        self.set_agent(agent, command, dialect, agent_args, trained_roles, history, *limits)
        copied: dict[str, bytes] = {}
        if self.command is not None:
            self.command, copied = named_files(self.command)
        self.files = {**copied, **contents(files)}
        self.collect, self.keep_workdirs = list(collect), keep_workdirs
        self.seen_tools = None if tools is None else list(tools)
        self.max_startup_wait_seconds = max_startup_wait_seconds
        self.sandbox = sandbox
        self.sandbox_spec = SandboxSpec(
            packages=tuple(packages),
            memory_mb=max(1, int(memory_gb * 1024)),
            cpu_s=60 * timeout_minutes,
            wall_s=60 * timeout_minutes,
            file_mb=max(1, int(min(disk_size_gb, memory_gb) * 1024)),
            env={str(name): str(value) for name, value in (environment_vars or {}).items()},
        )
        self.process_limits = Limits(
            int(max_output_mb * 2**20), int(max_log_kb * 1024), int(max_file_mb * 2**20)
        )
        for metric in METRICS:
            self.monitor_rubric.add_metric(metric)
        self._backend: SandboxBackend | None = None

    # --- methods to override ----------------------------------------------------------------------

    def post_rollout(self, state: State) -> Any:
        """Called when the agent has ended, while its sandbox, if any, is still open.
        Sync or async."""

    # --- one rollout ------------------------------------------------------------------------------

    @setup(priority=FIRST)
    async def select_sandbox(self, state: State) -> None:
        """Find the backend of an agent program, so that a backend that cannot hold it ends the run
        before the first call."""
        if self._backend is None and self.described_agent() is not None:
            backend = await backend_for(self.sandbox)
            check_backend(backend)
            if self.command is not None:  # uv may install what it needs: once, and not on the loop
                await asyncio.to_thread(host_program, tuple(self.command), os.getcwd())
            self._backend = backend

    async def open_process(
        self, agent: Agent, installed: Installed | None, route: Route, state: State
    ) -> AgentProcess:
        """Open a sandbox, and prepare the agent in it with the files of the environment and of the
        row."""
        assert self._backend is not None
        info = state["info"] if isinstance(state["info"], Mapping) else {}
        files = {**self.files, **contents(info.get("files"))}
        prompt = self.prompt_for_agent(state)
        async with opening(self.max_startup_wait_seconds):
            paths = await asyncio.to_thread(AgentFolders.within, self._backend)
            sandbox = await self._backend.open(
                spec_for(self.sandbox_spec, installed, agent, paths.is_isolated)
            )
            return await AgentProcess.open(
                agent, installed, sandbox, paths, route, prompt, files, self.process_limits
            )

    @cleanup(priority=FIRST)
    async def finish_rollout(self, state: State) -> None:
        """Call ``post_rollout``, after ``finish_agent``."""
        if "agent_run" in state:
            await maybe_await(self.post_rollout(state))


@contextlib.asynccontextmanager
async def model_gateway(state: State) -> AsyncIterator[str]:
    """The base URL of a rollout's model for a framework in this process; ends in ``/v1``.

    Args:
        state: The state of the rollout, which the agent function received.

    It speaks chat completions, responses and messages; any API key is accepted, and the model's
    name is not read. Every call is a turn of the rollout. *Raises* ConfigError for the state of
    another environment than ``AgentEnv``.

    >>> async def agent(state):
    ...     async with vf.model_gateway(state) as url:
    ...         print(url.split("/")[-1])
    >>> env = vf.AgentEnv(agent=agent, dataset=[{"question": "?"}])
    >>> from verifiers.testing import ScriptedClient
    >>> print(env.evaluate(ScriptedClient("4"), "m").outputs[0].error.message)
    v1
    the agent 'agent' ended without a model call
    """
    yield agent_run(state).route.url
