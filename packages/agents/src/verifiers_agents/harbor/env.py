"""``HarborEnv``: task folders in Harbor's format as an environment, each rollout in a sandbox of
its own.

Promise: a task's checks run in a fresh sandbox that holds of the agent's only the declared
artifacts, so that nothing that the model leaves behind (processes, reward files, changed tests or
programs) reaches them. What a task asks for and the sandbox cannot give is refused by name when the
tasks are read. Without a verdict the reward is unknown.

``task`` reads the folders, ``building`` follows their Dockerfiles, ``grading`` runs the checks;
``environments.sandbox`` opens and closes the sandboxes, ``agents.turns`` plays an agent program.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Unpack

from verifiers.environments.sandbox import SandboxEnv, SandboxOptions
from verifiers.errors import ConfigError
from verifiers.rollouts.author_code import setup, stop
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.runtime.calls import PerLoop
from verifiers.runtime.signatures import spell_out
from verifiers.sandbox import ExecResult, Sandbox, SandboxSpec
from verifiers.sandbox.transfer import Packed
from verifiers.storage.identity import Free
from verifiers_agents.agent import Agent, Installed
from verifiers_agents.conversation import Role
from verifiers_agents.gateway import Route
from verifiers_agents.harbor import building, grading
from verifiers_agents.harbor.building import Layer
from verifiers_agents.harbor.images import Images, ImageStore
from verifiers_agents.harbor.task import HarborTask, read_tasks
from verifiers_agents.process import (
    SETTINGS,
    AgentFolders,
    AgentProcess,
    Limits,
    contents,
    named_files,
    spec_for,
)
from verifiers_agents.turns import FIRST, MAX_IDLE_S, METRICS, TRAINED_ROLES, AgentTurns

GRADING = ("fresh", "shared")
SCRIPTED = ("oracle", "nop")
MAX_TURNS = 30
SYSTEM_PROMPT = (
    "You work in a Linux sandbox without a network. Do the task with the tool bash. "
    "When it is done, answer without a tool call."
)
LIMITS = Limits(max_output_bytes=16 * 2**20, max_log_bytes=128 * 1024, max_file_bytes=2**20)
"""Bounds of an agent program's output."""


def _settings_of(task: HarborTask) -> dict[str, str]:
    """Limit of a task's sandbox -> what sets it: the key of its ``task.toml``, if it has it."""
    keys = {
        "memory": "memory_mb" if task.memory_mb else "",
        "file": "storage_mb" if task.storage_mb else "",
    }
    of_task = {limit: f"environment.{key} of its task.toml" for limit, key in keys.items() if key}
    return {**SETTINGS, **of_task}


@dataclass(slots=True)
class HarborRun:
    """A rollout of a task: ``state["harbor"]``."""

    task: HarborTask
    ends_at: float | None
    """When the agent's time ends, of ``time.monotonic``."""
    artifacts: list[tuple[str, Packed | None]] = field(default_factory=list)
    verdict: grading.Verdict | None = None


def _defaults() -> dict[str, object]:
    """The defaults of ``SandboxEnv``, and those that differ."""
    inherited = inspect.signature(SandboxEnv.__init__).parameters
    return {name: parameter.default for name, parameter in inherited.items()} | {
        "max_turns": MAX_TURNS,
        "system_prompt": SYSTEM_PROMPT,
    }


class HarborEnv(AgentTurns, SandboxEnv):
    """Tasks in Harbor's format (https://harborframework.com): an agent works in a sandbox,
    ``tests/test.sh`` grades.

    Args:
        path: A task folder, or a folder of task folders, to train on.
        eval_path: The same, to evaluate on.
        agent: None gives the model the tool ``bash``. An agent program ("codex" and the other names
            of ``AgentEnv``, or an ``Agent``) works in the task's sandbox, and its model calls are
            the turns of the rollout. "oracle" runs ``solution/solve.sh`` and "nop" does nothing,
            both without a model call.
        command: Any other agent program; words that name files of the working directory are copied
            into the home folder.
        agent_args: Further arguments of the agent's command.
        agent_files: Files for the agent, as ``files`` of ``AgentEnv``.
        only: Names of the tasks to read; None = all.
        images: Image of a ``FROM`` -> "host", this machine's system programs, read-only; or the
            path of its root file system: a folder, an archive (``docker export``, ``docker save``),
            or a layout (``skopeo copy … oci:…``), unpacked once into the user's cache. Or a folder
            that has these. An image that is not there is refused. A task without image and
            Dockerfile runs on the host's system programs too.
        grading: "fresh" checks the declared artifacts (default: the work folder) in a fresh
            sandbox. "shared" checks in the agent's own sandbox, as Harbor does where a task does
            not say; the model can forge the verdict there. A task that itself asks for "shared" is
            refused unless it is passed here.
        waive: Keys of ``task.toml`` to run without, such as ``"environment.network_mode"``.
        host_variables: Names of this process's variables that a ``task.toml`` may take by
            ``${NAME}``; programs and models in the sandbox can read them.
        trained_roles: Which of "main", "subagent", "summary" and "side" are trained.
        max_idle_seconds: Longest time without a model call of an agent.
        score_failures: As of ``AgentEnv``.
        max_startup_wait_seconds: Time limit of the opening of a sandbox.

    A task's ``agent.timeout_sec`` bounds the time of the agent, ``max_turns`` and a task's
    ``[metadata] max_turns`` its turns.

    Further parameters are those of ``SandboxEnv``. The reward is that of ``reward.json`` or
    ``reward.txt``; ``state["verdict"]`` has all rewards and what the tests printed.

    *Raises* ConfigError for a task that cannot be honoured, with the task, the key and a way out.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp(), "greet")
    >>> for name, text in {
    ...     "task.toml": 'artifacts = ["/app"]', "instruction.md": "Write hello to /app/out.txt.",
    ...     "environment/Dockerfile": "FROM debian:bookworm\\nWORKDIR /app",
    ...     "tests/test.sh": "#!/bin/sh\\ngrep -qx hello /app/out.txt; echo $((! $?)) > /logs/verifier/reward.txt",
    ... }.items():
    ...     (folder / name).parent.mkdir(parents=True, exist_ok=True)
    ...     _ = (folder / name).write_text(text)
    >>> env = vf.HarborEnv(folder, images={"debian:bookworm": "host"})
    >>> env.get_dataset()["info"][0]["harbor_task"]
    'greet'
    """

    @spell_out(SandboxOptions, _defaults())
    def __init__(
        self,
        path: Annotated[
            str | os.PathLike[str] | None, Free("every row has the hash of its task")
        ] = None,
        eval_path: Annotated[
            str | os.PathLike[str] | None, Free("every row has the hash of its task")
        ] = None,
        agent: str | Agent | None = None,
        command: Sequence[str] | None = None,
        agent_args: Sequence[str] = (),
        agent_files: Mapping[str, str | bytes | Path] | None = None,
        only: Annotated[Sequence[str] | None, Free("every row has the hash of its task")] = None,
        images: Images | None = None,
        grading: str = "fresh",
        waive: Sequence[str] = (),
        host_variables: Sequence[str] = (),
        trained_roles: Sequence[Role] = TRAINED_ROLES,
        max_idle_seconds: float = MAX_IDLE_S,
        score_failures: bool = True,
        max_startup_wait_seconds: float = 60,
        **parameters: Unpack[SandboxOptions],
    ):
        runs_program = command is not None or (agent is not None and agent not in SCRIPTED)
        history = "exact" if runs_program else "template"
        limits = max_idle_seconds, score_failures
        self.set_agent(agent, command, None, agent_args, trained_roles, history, *limits)
        files: dict[str, bytes] = {}
        if self.command is not None:  # in the work folder they would be artifacts
            self.command, files = named_files(self.command)
            self.command = [f"{{home}}/{word}" if word in files else word for word in self.command]
        self.agent_files = {
            **{f"~/{path}": content for path, content in files.items()},
            **contents(agent_files),
        }
        self._runs_program = runs_program
        if runs_program:
            self.described_agent()  # an unknown name is an error of the constructor
        elif agent_args or agent_files:
            raise ConfigError(
                "agent_args and agent_files are for an agent program: pass agent=… or command=[…]",
                key="agent",
            )
        if grading not in GRADING:
            raise ConfigError(
                f"grading is {grading!r}; it must be one of {', '.join(GRADING)}", key="grading"
            )
        for name in ("dataset", "eval_dataset", "working_dir", "artifacts"):
            if parameters.get(name):
                raise ConfigError(
                    f"HarborEnv takes no {name}; it comes from the task folders", key=name
                )
        self.images, self.grading = images or {}, grading
        self._image_store = ImageStore(self.images)
        self._tasks: dict[tuple[str, str], HarborTask] = {}
        for which, source in (("dataset", path), ("eval_dataset", eval_path)):
            if source is not None:
                parameters[which] = self._rows(source, only, waive, host_variables)  # type: ignore[literal-required]
        if not self._tasks:
            raise ConfigError(
                "HarborEnv needs task folders: pass path=… or eval_path=…", key="path"
            )
        if parameters.get("rubric") is None:
            # the task's own limit holds
            parameters["rubric"] = Rubric([self.task_reward], timeout_s=None)
        parameters.setdefault("system_prompt", SYSTEM_PROMPT if self._has_bash else None)
        parameters.setdefault("max_turns", MAX_TURNS)
        super().__init__(max_startup_wait_seconds=max_startup_wait_seconds, **parameters)
        self._layers: dict[str, Layer] = {}
        self._build_lock = PerLoop(asyncio.Lock)

    def _rows(
        self,
        source: str | os.PathLike[str],
        only: Sequence[str] | None,
        waive: Sequence[str],
        host_variables: Sequence[str],
    ) -> list[dict[str, Any]]:
        rows = []
        for task in read_tasks(source, self._image_store, only, waive, host_variables):
            self._check(task)
            self._tasks[task.name, task.digest] = task
            info = {"harbor_task": task.name, "digest": task.digest}
            rows.append(
                {"question": task.instruction, "answer": "", "task": task.name, "info": info}
            )
        return rows

    def _check(self, task: HarborTask) -> None:
        if self.grading == "fresh":
            grading.declared_artifacts(task)
            if task.shares_verifier:
                raise ConfigError(
                    f"task {task.name} asks for checks in the agent's own sandbox"
                    " (verifier.environment_mode), where the model can forge the verdict; pass"
                    " grading='shared' to accept that",
                    example_id=task.name,
                )

    def tasks(self) -> list[HarborTask]:
        """The tasks that were read, training tasks first."""
        return list(self._tasks.values())

    @property
    def _has_bash(self) -> bool:
        """Whether the model itself acts, with the tool ``bash``."""
        return self.agent is None and self.command is None

    def add_sandbox_tools(self) -> None:
        """Offer ``bash``, unless a script or an agent program acts."""
        if self._has_bash:
            super().add_sandbox_tools()

    def measured(self) -> list[Callable[[State], float]]:
        """The metrics of every rollout."""
        return [*super().measured(), *(METRICS if self._runs_program else ())]

    # --- the sandbox of a task --------------------------------------------------------------------

    def get_sandbox_spec(self, state: State) -> SandboxSpec:
        """The environment's limits, with those of the task in their place, and what an agent
        program needs."""
        spec, agent = self._spec_of(_task_of(state, self._tasks)), self.described_agent()
        return spec if agent is None else spec_for(spec, self.installed(agent), agent)

    def _spec_of(self, task: HarborTask) -> SandboxSpec:
        base = self.sandbox_spec
        memory_mb = task.memory_mb or base.memory_mb
        return SandboxSpec(
            packages=base.packages,
            memory_mb=memory_mb,
            cpu_s=base.cpu_s,
            wall_s=max(
                base.wall_s,
                task.build_timeout_s,
                (task.agent_timeout_s or 0) + task.verifier_timeout_s,
            ),
            file_mb=min(task.storage_mb or base.file_mb, memory_mb),
            num_processes=base.num_processes,
            env={**base.env, **task.env},
            working_dir=task.build.workdir,
            writable_root=True,
            root=None if task.build.root is None else str(task.build.root),
        )

    async def sandbox_opened(self, sandbox: Sandbox, state: State) -> None:
        """Put the files of the task's image into a sandbox."""
        await (await self._layer(_task_of(state, self._tasks))).put(sandbox)

    async def _layer(self, task: HarborTask) -> Layer:
        """What the task's Dockerfile makes of its image; built once."""
        async with self._build_lock.here():
            if task.digest not in self._layers:
                self._layers[task.digest] = await building.layer_of(
                    task.build,
                    lambda: self._open(self._spec_of(task)),
                    task.name,
                    task.build_timeout_s,
                )
            return self._layers[task.digest]

    # --- acting -----------------------------------------------------------------------------------

    @setup
    async def start_task(self, state: State) -> None:
        """Note when the agent's time ends; let the script act that stands in place of a model."""
        task = _task_of(state, self._tasks)
        ends_at = None if task.agent_timeout_s is None else time.monotonic() + task.agent_timeout_s
        state["harbor"] = HarborRun(task, ends_at)
        if self.agent == "oracle":
            limit_s = task.agent_timeout_s or self.sandbox_spec.wall_s
            await grading.solve(await self.get_sandbox(state), task, limit_s)

    async def run_code(
        self, state: State, code_or_argv: str | list[str], timeout_s: float | None = None
    ) -> ExecResult:
        """As ``SandboxEnv``; no call lasts longer than the agent's time."""
        limit_s = timeout_s or self.timeout_per_command_seconds
        return await super().run_code(
            state, code_or_argv, max(0.001, min(limit_s, self.agent_seconds_left(state)))
        )

    def agent_seconds_left(self, state: State) -> float:
        """Seconds until the time of the task (``agent.timeout_sec``) is over."""
        ends_at = state["harbor"].ends_at
        return math.inf if ends_at is None else ends_at - time.monotonic()

    def described_agent(self) -> Agent | None:
        """The agent program; None for the model with bash, and for a script."""
        return super().described_agent() if self._runs_program else None

    @setup(priority=FIRST)
    async def prepare_agent(self, state: State) -> None:
        """Find the agent program, if there is any."""
        if self._runs_program:
            await super().prepare_agent(state)

    async def open_process(
        self, agent: Agent, installed: Installed | None, route: Route, state: State
    ) -> AgentProcess:
        """Prepare the agent in the sandbox of the task, in its work folder."""
        sandbox = await self.get_sandbox(state)
        task, prompt = state["harbor"].task, self.prompt_for_agent(state)
        build, limits = task.build, replace(LIMITS, settings=_settings_of(task))
        paths = AgentFolders.isolated(build.workdir, build.root is not None)
        return await AgentProcess.open(
            agent, installed, sandbox, paths, route, prompt, self.agent_files, limits
        )

    @stop(priority=50)
    async def agent_ended(self, state: State) -> bool:
        """Stop when the agent program has ended; before the first turn when a script acted in place
        of the model."""
        return self.agent in SCRIPTED or await super().agent_ended(state)

    @stop
    def no_tools_called(self, state: State) -> Any:
        """Stop when the model with bash answers without a call; an agent program says itself when
        it ends."""
        return self._has_bash and super().no_tools_called(state)

    @stop
    def agent_time_over(self, state: State) -> bool:
        """Stop when the time of the task (``agent.timeout_sec``) is over."""
        return self.agent_seconds_left(state) <= 0

    @stop
    def task_turns_reached(self, state: State) -> bool:
        """Stop when the model has had the turns of the task (``[metadata] max_turns``)."""
        return self.turns_so_far(state) >= (state["harbor"].task.max_turns or 10**9)

    # --- grading ----------------------------------------------------------------------------------

    async def post_rollout(self, state: State) -> None:
        """Collect the artifacts; with ``grading="shared"``, run the checks, which then have a
        minute."""
        run: HarborRun | None = state.get("harbor")
        if run is None or not (state["error"] is None or state["error"].scorable):
            return
        if self.grading == "shared":
            run.verdict = await grading.run_tests(await self.get_sandbox(state), run.task)
        elif state["sandbox"].sandbox is not None or run.task.collect:
            run.artifacts = await grading.collect(await self.get_sandbox(state), run.task)

    async def task_reward(self, state: State) -> float:
        """The reward that the task's tests give. *Raises* ScoringError when they give none."""
        run: HarborRun = state["harbor"]
        if run.verdict is None:
            async with self.fresh_sandbox(state, self._spec_of(run.task)) as sandbox:
                await grading.deliver(sandbox, run.artifacts)
                run.verdict = await grading.run_tests(sandbox, run.task)
        state["verdict"] = {"rewards": dict(run.verdict.rewards), "output": run.verdict.output}
        return run.verdict.reward


def _task_of(state: State, tasks: Mapping[tuple[str, str], HarborTask]) -> HarborTask:
    info = state["info"]
    return tasks[info["harbor_task"], info["digest"]]
