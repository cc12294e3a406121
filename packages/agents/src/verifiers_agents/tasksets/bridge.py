"""The other side of ``TasksetEnv``: runs tasksets of verifiers 0.4 in their own Python.

This file is read as text and run there by ``python -c``; it imports nothing of this package, whose
``verifiers`` is another one. Requests and answers are JSON objects, one a line, on standard input
and output; what tasksets print goes to standard error. It ends when its input does.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import itertools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any


def write(answer: dict[str, object]) -> None:
    """Answer one request, in one line."""
    ANSWERS.write(json.dumps(answer) + "\n")
    ANSWERS.flush()


class Bridge:
    """One environment of verifiers 0.4, and the episodes that run in it."""

    env: Any
    taskset: Any
    task_types: dict[str, Any]

    def __init__(self) -> None:
        self.v1: Any = importlib.import_module("verifiers.v1")
        """Another library's module, whose types are not known where this file is checked."""
        self.running: dict[int, asyncio.Task[None]] = {}
        """Request number -> its asyncio task."""

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader(limit=2**30)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        first = json.loads(await lines.readline())
        try:
            opened = self.open(first["config"], first["max_tasks"], first["max_turns"])
        except Exception as error:  # noqa: BLE001 - answered: any mistake of the taskset or of its settings
            write({"id": first["id"], "error": described(error)})
            return
        async with self.env.serving():
            write({"id": first["id"], "value": opened})
            while line := await lines.readline():
                request = json.loads(line)
                if "cancel" in request:
                    if (task := self.running.get(request["cancel"])) is not None:
                        task.cancel()
                    continue
                task = asyncio.create_task(self.answer(request))
                self.running[request["id"]] = task
            for task in self.running.values():
                task.cancel()
            await asyncio.gather(*self.running.values(), return_exceptions=True)

    def open(
        self, config: dict[str, Any], max_tasks: int | None, max_turns: int | None
    ) -> dict[str, object]:
        """Read the tasks; facts about the taskset, and its rows."""
        resolved = self.v1.resolve_env_config(with_defaults(config, max_turns, self.v1))
        self.env = self.v1.load_environment(resolved)
        self.taskset = self.v1.load_taskset(resolved.taskset)
        if max_tasks is None and not self.taskset.bounded:
            raise ValueError("the taskset has no end: say how many tasks, with max_tasks")
        tasks = list(itertools.islice(iter(self.taskset), max_tasks))
        self.task_types = {
            f"{type(task).__module__}.{type(task).__qualname__}": type(task) for task in tasks
        }
        return {
            "version": importlib.metadata.version("verifiers"),
            "roles": roles_of(resolved, self.v1),
            "scores": sorted({name for task in tasks for name in scores_of(type(task))}),
            "tasks": [
                {
                    "type": f"{type(task).__module__}.{type(task).__qualname__}",
                    "data": task.data.model_dump(mode="json"),
                    "system_prompt": task.data.system_prompt,
                }
                for task in tasks
            ],
        }

    async def answer(self, request: dict[str, Any]) -> None:
        try:
            write({"id": request["id"], "value": await self.episode(request)})
        except asyncio.CancelledError:
            write({"id": request["id"], "error": "cancelled"})
        except Exception as error:  # noqa: BLE001 - answered: the rollout of this request fails with it
            write({"id": request["id"], "error": described(error)})
        finally:
            del self.running[request["id"]]

    async def episode(self, request: dict[str, Any]) -> dict[str, object]:
        """Run one episode at the endpoint of the request; its traces without their messages."""
        of_type = self.task_types[request["task"]["type"]]
        data = of_type.data_type().model_validate(request["task"]["data"])
        config = self.env.config.taskset.task
        task = of_type(data, config) if config is not None else of_type(data)
        context = self.v1.ModelContext(
            model=request["model"],
            client=self.v1.EvalClientConfig(
                base_url=request["base_url"], api_key_var="VF_TASKSET_KEY"
            ),
        )
        (slot,) = self.env.slots(task, 1)
        episode = await self.env.run_slot(slot, context)
        return {
            "id": episode.id,
            "is_ok": bool(episode.ok),
            "errors": [f"{error.type}: {error.message}" for error in episode.errors],
            "traces": [trace_of(trace) for trace in episode.traces],
        }


def with_defaults(config: dict[str, Any], max_turns: int | None, v1: Any) -> dict[str, Any]:
    """The settings, with the harness ``null``, this machine and a limit of turns for each role
    without its own."""
    resolved = v1.resolve_env_config(config)
    for role in roles_of(resolved, v1):
        settings = config.setdefault(role, {})
        if max_turns is not None:
            settings.setdefault("max_turns", max_turns)
        if "runtime" in settings:
            continue
        harness = settings.setdefault("harness", {"id": "null"})
        if harness.get("id") != "null":
            raise ValueError(
                f"the harness {harness.get('id')!r} of {role!r} runs what the model writes, and no"
                f" runtime says where: name one that isolates it, config={{{role!r}: {{'runtime':"
                " {'type': 'docker'}}} (or podman, apptainer)"
            )
        settings["runtime"] = {"type": "subprocess"}
    return config


def roles_of(resolved: Any, v1: Any) -> list[str]:
    """The names of the agents of an environment."""
    fields = type(resolved).model_fields
    return [name for name in fields if isinstance(getattr(resolved, name), v1.AgentConfig)]


def scores_of(task_type: type) -> Iterator[str]:
    """The names of the rewards and metrics that a task declares."""
    for name in dir(task_type):
        attributes = getattr(getattr(task_type, name, None), "__dict__", {})
        if attributes.get("reward") is True or attributes.get("metric") is True:
            yield name


def trace_of(trace: Any) -> dict[str, object]:
    return {
        "agent": trace.agent.name if trace.agent is not None else None,
        "is_ok": bool(trace.ok),
        "stop_condition": trace.stop_condition,
        "reward": trace.reward if trace.rewards else None,
        "rewards": {name: [score.score, score.weight] for name, score in trace.rewards.items()},
        "metrics": dict(trace.metrics),
        "errors": [f"{error.type}: {error.message}" for error in trace.errors],
    }


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    ANSWERS = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what tasksets print is no answer
    asyncio.run(Bridge().serve())
