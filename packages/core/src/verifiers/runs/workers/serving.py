"""The worker's side: build the environment, play what comes, ask the caller for every completion.

Promises: it ends when its channel does, and then nothing plays on; what one rollout does costs no other; it never calls
the model of the run itself. It keeps no results and decides nothing about the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

from verifiers.errors import ConfigError, ModelUnavailable, VerifiersError, WorkerLost
from verifiers.runs.runner import RunContext, RunEnvironment, generate_and_score, identity_of
from verifiers.runs.workers.channels import Channel
from verifiers.runs.workers.messages import (
    Answer,
    Ask,
    Cancel,
    Failed,
    Finished,
    Generate,
    Ready,
    Setup,
    Withdraw,
    portable,
)
from verifiers.runs.workers.packing import pack_state
from verifiers.runtime.gc import fewer_collections
from verifiers.runtime.threads import workers as loop_workers
from verifiers.types import ModelRequest, Response


async def serve(channel: Channel) -> None:
    """Generate what the channel asks for until it ends."""
    setup = await channel.receive()
    if not isinstance(setup, Setup):
        raise TypeError(f"a worker is told its set-up first, not {type(setup).__name__}")
    try:
        env = build(setup)
    except VerifiersError as error:
        await channel.send(Failed(0, portable(error)))
        return
    await channel.send(Ready(os.getpid()))
    with fewer_collections():
        await _Serving(channel, env, setup).run()


def build(setup: Setup) -> RunEnvironment:
    """The environment of a set-up. Raises as its loader; ``ConfigError`` for another than the caller's."""
    sys.path.extend(path for path in setup.import_paths if path not in sys.path)
    load, env_id, env_args = setup.loaded_from
    env: RunEnvironment = load(env_id, **env_args)
    env.set_kwargs(**setup.changes)
    own = identity_of(env)
    if differing := [name for name in own if own[name] != setup.identity.get(name, own[name])]:
        raise ConfigError(
            f"num_workers: a worker that loads {env_id!r} gets another environment than this one: "
            f"{', '.join(differing)} differ. Give the settings to load_environment or set_kwargs, or use num_workers=0"
        )
    return env


class _Serving:
    """The rollouts of one worker."""

    def __init__(self, channel: Channel, env: RunEnvironment, setup: Setup):
        self.channel, self.env, self.cleans_up = channel, env, setup.cleans_up
        self.client = _CallersClient(channel, setup.shows_tools)
        self.context = RunContext(
            client=self.client,
            model=setup.model,
            sampling_args=setup.sampling_args,
            score=setup.score,
            independent_scoring=setup.independent_scoring,
            require_tokens=setup.require_tokens,
            seed=setup.seed,
            rollout_timeout_s=setup.rollout_timeout_s,
            max_retries=setup.max_retries,
            scoring_slot=_slots(setup.max_scoring),
            tool_slot=_slots(setup.max_tools),
        )
        self.tasks: dict[int, asyncio.Task[None]] = {}
        if setup.max_threads is not None:
            loop_workers().max_threads = setup.max_threads

    async def run(self) -> None:
        """Generate until the channel ends; then nothing of it goes on."""
        try:
            while True:
                match await self.channel.receive():
                    case Generate() as order:
                        self.tasks[order.number] = asyncio.create_task(self._generate(order))
                    case Cancel(number):
                        if (running := self.tasks.get(number)) is not None:
                            running.cancel()
                    case Answer() as answer:
                        self.client.take(answer)
        except WorkerLost:
            pass
        finally:
            self.context.control.is_over = True
            left = list(self.tasks.values())
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _context_of(self, seed: int | None) -> RunContext:
        """The context whose draws derive from ``seed``."""
        return self.context if seed == self.context.seed else replace(self.context, seed=seed)

    async def _generate(self, order: Generate) -> None:
        env = self.env
        said: Finished | Failed
        try:
            state = await generate_and_score(env, order.job, self._context_of(order.seed))
            if self.cleans_up:
                await env.rubric.run_cleanup([state])
                state.cleaned_up = True
            said = Finished(order.number, pack_state(state))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - it ends the run: the caller raises it
            said = Failed(order.number, portable(error))
        finally:
            del self.tasks[order.number]
        with contextlib.suppress(WorkerLost):  # the caller is gone, and so is this worker at once
            await self.channel.send(said)


class _CallersClient:
    """The caller's client, seen from a worker: every request is a question to the other end."""

    def __init__(self, channel: Channel, shows_tools: bool | None = None):
        self._channel, self._shows_tools = channel, shows_tools
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Response]] = {}

    async def complete(self, request: ModelRequest) -> Response:
        """What the caller's client answers, or raises."""
        number = next(self._numbers)
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        try:
            await self._channel.send(Ask(number, request))
            return await future
        except WorkerLost as error:
            raise ModelUnavailable("the process that runs the evaluation is gone") from error
        except asyncio.CancelledError:
            with contextlib.suppress(WorkerLost):
                await self._channel.send(Withdraw(number))
            raise
        finally:
            del self._asked[number]

    async def shows_tools(self) -> bool | None:
        """What the caller's client said of it."""
        return self._shows_tools

    def take(self, answer: Answer) -> None:
        """Give an answer to whoever asked, unless it was withdrawn."""
        future = self._asked.get(answer.number)
        if future is None or future.done():
            return
        if answer.error is not None:
            future.set_exception(answer.error)
        elif answer.response is not None:
            future.set_result(answer.response)


def _slots(limit: int | None) -> AbstractAsyncContextManager[Any]:
    return nullcontext() if limit is None else asyncio.Semaphore(limit)


__all__ = ["build", "serve"]
