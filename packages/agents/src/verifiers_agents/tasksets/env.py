"""``TasksetEnv``: the tasksets that are published for verifiers 0.4, evaluated and trained here.

The taskset lives with its verifiers in a Python of its own, since the two libraries have one name.
Its episodes run there, at the base URL of the rollout's model, so that each of their model calls is
a turn here, with its tokens; rewards and metrics are those that the taskset gives. ``process``
speaks with that Python, ``bridge`` is what runs there.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Unpack, cast

from verifiers.environments.keywords import ConversationOptions
from verifiers.errors import AgentError, ConfigError, ScoringError
from verifiers.rollouts.author_code import cleanup, teardown
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.runtime.decoding import decode_json
from verifiers.runtime.signatures import spell_out
from verifiers.storage.identity import Free
from verifiers_agents.agent import Agent, Installed
from verifiers_agents.conversation import Role
from verifiers_agents.gateway import Route
from verifiers_agents.process import AgentProcess
from verifiers_agents.tasksets.folders import python_of
from verifiers_agents.tasksets.process import (
    Episode,
    Opened,
    Source,
    Task,
    TasksetProcess,
    Trace,
)
from verifiers_agents.turns import (
    FIRST,
    MAX_IDLE_S,
    METRICS,
    TRAINED_ROLES,
    AgentTurns,
    agent_run,
)

SCORING_S = 60.0
"""Seconds for a taskset to score a rollout that a limit of the run has ended."""


class TasksetEnv(AgentTurns):
    """A taskset of verifiers 0.4 (``verifiers.v1``) as an environment.

    Args:
        taskset: Its id there, such as "reverse-text".
        python: The Python in which the taskset and verifiers 0.4 are installed; default: the one
            that ``vf-install --taskset`` made for it.
        config: Settings of its environment, as its own ``--env.…`` and TOML files have them:
            ``{"taskset": {"split": "train"}, "agent": {"harness": {"id": "bash"}, "runtime":
            {"type": "docker"}}}``. Without them the harness is ``null``, the model and the
            taskset's tools; a harness that runs what the model writes needs a runtime.
        eval_config: Settings that differ for the evaluation set; default: the rows of the
            evaluation are those of the training.
        role: The agent whose reward counts, where an episode has several.
        max_tasks: Tasks to read; None = all. A taskset without an end needs it.
        max_turns: Turns of each agent; -1 = no limit.
        trained_roles: Which of "main", "subagent", "summary" and "side" are trained.
        max_idle_seconds: Longest time without a model call.

    Further parameters are those of ``MultiTurnEnv``. ``state["episode"]`` has the rewards, metrics
    and errors of the episode; rewards and metrics that a task declares are metrics here.

    *Raises* ConfigError for a taskset that is not installed or cannot be opened.

    Example::

        env = vf.TasksetEnv("reverse-text")
    """

    @spell_out(ConversationOptions, AgentTurns.__init__)
    def __init__(
        self,
        taskset: str,
        python: Annotated[
            str | os.PathLike[str] | None, Free("the version and the rows are recorded")
        ] = None,
        config: Mapping[str, object] | None = None,
        eval_config: Mapping[str, object] | None = None,
        role: str | None = None,
        max_tasks: int | None = None,
        max_turns: int = -1,
        trained_roles: Sequence[Role] = TRAINED_ROLES,
        max_idle_seconds: float = MAX_IDLE_S,
        **parameters: Unpack[ConversationOptions],
    ):
        for name in ("dataset", "eval_dataset"):
            if parameters.get(name) is not None:
                raise ConfigError(
                    f"TasksetEnv takes no {name}; its rows are the taskset's tasks", key=name
                )
        executable = str(Path(python).expanduser()) if python else python_of(taskset)
        self.taskset, self.role = taskset, role
        self._lock = threading.Lock()
        self._processes: dict[str, TasksetProcess] = {}
        self._sources: dict[str, Source] = {}
        opened = self._read("dataset", executable, config, max_turns, max_tasks)
        parameters["dataset"] = [_row(task, "dataset") for task in opened["tasks"]]
        if eval_config is not None:
            merged = {**(config or {}), **eval_config}
            evaluation = self._read("eval_dataset", executable, merged, max_turns, max_tasks)
            parameters["eval_dataset"] = [_row(t, "eval_dataset") for t in evaluation["tasks"]]
        self.verifiers_version = opened["version"]
        if role is not None and role not in opened["roles"]:
            raise ConfigError(
                f"role is {role!r}; the agents of {taskset!r} are {', '.join(opened['roles'])}",
                key="role",
            )
        if role is None and len(opened["roles"]) > 1:
            raise ConfigError(
                f"episodes of {taskset!r} have several agents, {', '.join(opened['roles'])}: say"
                " whose reward counts, with role=…",
                key="role",
            )
        if parameters.get("rubric") is None:
            parameters["rubric"] = Rubric([self.taskset_reward])
        super().__init__(max_turns=max_turns, **parameters)
        self.set_agent(None, None, None, (), trained_roles, "exact", max_idle_seconds, False)
        for name in opened["scores"]:
            self.monitor_rubric.add_metric(self._score(name))
        for metric in METRICS:
            self.monitor_rubric.add_metric(metric)

    def _read(
        self,
        which: str,
        python: str,
        config: Mapping[str, object] | None,
        max_turns: int,
        max_tasks: int | None,
    ) -> Opened:
        """What a process says of the taskset; it ends with that, and rollouts start another."""
        settings = copy.deepcopy(dict(config or {}))
        of_taskset = settings.setdefault("taskset", {})
        if not isinstance(of_taskset, dict) or of_taskset.get("id", self.taskset) != self.taskset:
            raise ConfigError(
                f"config['taskset'] is {of_taskset!r}: a table of settings, and its id is the"
                f" first argument, {self.taskset!r}",
                key="config",
            )
        of_taskset["id"] = self.taskset
        source = Source(python, settings, max_tasks, max_turns if max_turns > 0 else None)
        self._sources[which] = source
        process = TasksetProcess(source)
        process.close()
        if not process.opened["tasks"]:
            raise ConfigError(f"the taskset {self.taskset!r} has no tasks", key="taskset")
        return process.opened

    def _running_process(self, which: str) -> TasksetProcess:
        """The process of a set of rows; another one if it has ended. Blocks."""
        with self._lock:
            process = self._processes.get(which)
            if process is None or not process.is_alive:
                process = self._processes[which] = TasksetProcess(self._sources[which])
            return process

    def identity(self) -> dict[str, object]:
        """The parameters, and the version of the taskset's verifiers."""
        return super().identity() | {"taskset_verifiers": self.verifiers_version}

    # --- one rollout ------------------------------------------------------------------------------

    async def run_agent(self, state: State) -> None:
        """Play the row's task in the taskset's process. *Raises* AgentError for an episode that
        failed there."""
        info = cast(Mapping[str, str], state["info"])
        process = await asyncio.to_thread(self._running_process, info["set"])
        url, task = agent_run(state).route.url, cast(Task, decode_json(info["task"]))
        number, answer = process.ask(task, state["model"], url)
        try:
            episode = cast(Episode, await asyncio.wrap_future(answer))
        except asyncio.CancelledError:
            process.cancel(number)
            raise
        state["episode"] = episode
        state.saved_columns = (*state.saved_columns, "episode")
        errors = [*episode["errors"], *(e for trace in episode["traces"] for e in trace["errors"])]
        if not episode["is_ok"] or (errors and self._trace(state) is None):
            raise AgentError(
                f"the episode of the taskset {self.taskset!r} failed:"
                f" {'; '.join(errors) or 'it names no error'}"
            )

    @cleanup(priority=FIRST + 1)
    async def finish_episode(self, state: State) -> None:
        """Let the taskset score a rollout that a limit of this run has ended."""
        run = agent_run(state)
        if run.task is None or run.task.done() or state["error"] is not None:
            return
        run.route.close(str(state["stop_condition"] or "the rollout is over"))
        await asyncio.wait([run.task], timeout=SCORING_S)

    async def open_process(
        self, agent: Agent, installed: Installed | None, route: Route, state: State
    ) -> AgentProcess:
        """*Raises* NotImplementedError: the episode runs in the taskset's process."""
        raise NotImplementedError("a TasksetEnv opens no sandbox")

    @teardown
    def close_processes(self) -> None:
        """End the taskset's processes."""
        for process in self._processes.values():
            process.close()

    # --- scoring ----------------------------------------------------------------------------------

    def _trace(self, state: State) -> Trace | None:
        """The trace whose reward counts; None for an episode without it."""
        episode = cast("Episode | None", state.get("episode"))
        if episode is None:
            return None
        traces = [t for t in episode["traces"] if self.role in (None, t["agent"])]
        return traces[0] if len(traces) == 1 else None

    def taskset_reward(self, state: State) -> float:
        """The reward that the taskset gave. *Raises* ScoringError when it gave none."""
        trace = self._trace(state)
        if trace is None or trace["reward"] is None:
            raise ScoringError(f"the taskset {self.taskset!r} gave no reward")
        return trace["reward"]

    def _score(self, name: str) -> Callable[[State], float | None]:
        """A metric with a reward, without its weight, or metric of the taskset."""

        def score(state: State) -> float | None:
            trace = self._trace(state)
            if trace is None:
                return None
            value, _ = trace["rewards"].get(name, (trace["metrics"].get(name), 0.0))
            return value

        score.__name__ = name
        return score


def load_environment(name: str, **parameters: Any) -> TasksetEnv:
    """The taskset ``v1:NAME`` of commands; ``parameters`` are those of ``vf.TasksetEnv``."""
    return TasksetEnv(name, **parameters)


def _row(task: Task, which: str) -> dict[str, object]:
    """A task as a row: its prompt, and the task itself, as text since tasks differ in their
    columns."""
    data = task["data"]
    prompt, answer = data.get("prompt"), data.get("answer")
    messages: list[object] = []
    if task["system_prompt"]:
        messages.append({"role": "system", "content": task["system_prompt"]})
    if isinstance(prompt, list):
        messages += prompt
    else:
        messages.append({"role": "user", "content": str(prompt or "")})
    return {
        "prompt": messages,
        "answer": answer if isinstance(answer, str) else "",
        "info": {"task": json.dumps(task, sort_keys=True), "set": which},
    }
