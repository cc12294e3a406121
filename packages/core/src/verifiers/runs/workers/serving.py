"""The worker's side: load the environment, generate the requested rollouts, send every model call
to the caller.

Guarantees: when its channel closes, all rollouts are cancelled and it returns; a failed rollout
does not affect others; the worker never calls the model of the run itself. It stores no results.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from dataclasses import replace

from verifiers.errors import ConfigError, ModelUnavailable, VerifiersError, WorkerLost
from verifiers.runs.rollout import RunEnvironment, generate_and_score, slots
from verifiers.runs.workers.channels import Channel
from verifiers.runs.workers.messages import (
    CallModel,
    Cancel,
    CancelCall,
    Failed,
    Finished,
    Generate,
    ModelReply,
    Ready,
    Setup,
    portable,
)
from verifiers.runs.workers.packing import pack_state
from verifiers.runtime.calls import settle
from verifiers.runtime.gc import fewer_collections
from verifiers.runtime.worker_threads import workers as loop_workers
from verifiers.storage.identity import identity_of
from verifiers.types import ModelRequest, Response


async def serve(channel: Channel) -> None:
    """Run the requests of the channel until it closes."""
    setup = await channel.receive()
    if not isinstance(setup, Setup):
        raise TypeError(f"the first message to a worker must be Setup, not {type(setup).__name__}")
    try:
        env = build(setup)
    except VerifiersError as error:
        await channel.send(Failed(0, portable(error)))
        return
    await channel.send(Ready(os.getpid()))
    with fewer_collections():
        await _Serving(channel, env, setup).run()


def build(setup: Setup) -> RunEnvironment:
    """Load the environment. *Raises* what its loader raises; ConfigError when it differs from the
    caller's."""
    sys.path.extend(path for path in setup.import_paths if path not in sys.path)
    load, env_id, env_args = setup.loaded_from
    env: RunEnvironment = load(env_id, **env_args)
    env.set_kwargs(**setup.changes)
    # loaded by path here, where the caller may have named it by an id of another spelling
    env.env_id = setup.identity.get("env_id", env.env_id)
    identity = identity_of(env)
    if differences := [
        name for name in identity if identity[name] != setup.identity.get(name, identity[name])
    ]:
        raise ConfigError(
            f"num_workers: a worker that loads {env_id!r} gets a different environment:"
            f" {', '.join(differences)} differ. Pass the settings to load_environment or"
            " set_kwargs, or use num_workers=0"
        )
    return env


class _Serving:
    """The rollouts of a worker."""

    def __init__(self, channel: Channel, env: RunEnvironment, setup: Setup):
        self.channel, self.env, self.cleans_up = channel, env, setup.cleans_up
        self.client = _CallersClient(channel, setup.shows_tools)
        self.context = replace(
            setup.context,
            client=self.client,
            scoring_slot=slots(setup.max_scoring),
            tool_slot=slots(setup.max_tools),
        )
        self.tasks: dict[int, asyncio.Task[None]] = {}
        if setup.max_threads is not None:
            loop_workers().max_threads = setup.max_threads

    async def run(self) -> None:
        """Handle messages until the channel closes, then cancel all rollouts."""
        try:
            while True:
                match await self.channel.receive():
                    case Generate() as request:
                        self.tasks[request.number] = asyncio.create_task(self._generate(request))
                    case Cancel(number):
                        if (running := self.tasks.get(number)) is not None:
                            running.cancel()
                    case ModelReply() as reply:
                        self.client.take(reply)
        except WorkerLost:
            pass
        finally:
            self.context.control.is_over = True
            tasks = list(self.tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate(self, request: Generate) -> None:
        env, context = self.env, replace(self.context, seed=request.seed)
        reply: Finished | Failed
        try:
            state = await generate_and_score(env, request.job, context)
            if self.cleans_up:
                await env.rubric.run_cleanup(list(state.leaves))
                for leaf in state.leaves:
                    leaf.cleaned_up = True
            reply = Finished(request.number, pack_state(state))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - ends the run: the caller raises it
            reply = Failed(request.number, portable(error))
        finally:
            del self.tasks[request.number]
        with contextlib.suppress(WorkerLost):  # the caller is gone: this worker is about to exit
            await self.channel.send(reply)


class _CallersClient:
    """A client that sends every request to the caller's client."""

    def __init__(self, channel: Channel, shows_tools: bool | None = None):
        self._channel, self._shows_tools = channel, shows_tools
        self._numbers = itertools.count(1)
        self._futures: dict[int, asyncio.Future[Response]] = {}

    async def complete(self, request: ModelRequest) -> Response:
        """The response of the caller's client. *Raises* what that client raises."""
        number = next(self._numbers)
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._futures[number] = future
        try:
            await self._channel.send(CallModel(number, request))
            return await future
        except WorkerLost as error:
            raise ModelUnavailable("the process that runs the evaluation is gone") from error
        except asyncio.CancelledError:
            with contextlib.suppress(WorkerLost):
                await self._channel.send(CancelCall(number))
            raise
        finally:
            del self._futures[number]

    async def shows_tools(self) -> bool | None:
        """The value of the caller's client."""
        return self._shows_tools

    def take(self, reply: ModelReply) -> None:
        """Resolve the call that a reply belongs to, unless it was cancelled."""
        settle(self._futures.get(reply.number), reply.response, reply.error)
