"""Workers on a Ray cluster: each is an actor on any node.

Every node needs this project and the environment's package, installed or shipped by Ray
(``ray.init(runtime_env={"working_dir": …})``); what is missing is reported with the node's address.
Unless a cluster was joined before (``ray.init(address=…)`` or the variable ``RAY_ADDRESS``), Ray
starts one on this machine. The caller makes the model calls. Needs the extra ``ray``, which is
imported when a worker is opened.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import threading
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError, WorkerLost
from verifiers.runs.workers.channels import GRACE_S
from verifiers.runs.workers.messages import Failed, Message
from verifiers.runs.workers.serving import serve
from verifiers.runtime.install_lines import install_line

if TYPE_CHECKING:
    from types import ModuleType

_JOIN_LOCK = threading.Lock()
"""Workers open concurrently; the cluster must be joined once."""


def _join_cluster(ray: ModuleType) -> None:
    with _JOIN_LOCK:
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=True)


class RayChannel:
    """The pool's end of a worker that is an actor: messages are arguments and results of its two
    methods."""

    def __init__(self, ray: ModuleType, actor: Any):
        self._ray, self._actor = ray, actor
        self._inbox: list[bytes] = []

    @classmethod
    async def open(cls) -> RayChannel:
        """Start an actor that reserves one core. *Raises* ConfigError when ray is not installed."""
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                f'worker_backend="ray" needs Ray: {install_line("verifiers", "ray")}'
            ) from error
        await asyncio.to_thread(_join_cluster, ray)
        actor = (
            ray.remote(_Actor)
            .options(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")
            .remote()
        )
        return cls(ray, actor)

    async def send(self, message: Message) -> None:
        try:
            await self._actor.send.remote(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except self._ray.exceptions.RayError as error:
            raise _lost(error) from error

    async def receive(self) -> Message:
        try:
            while not self._inbox:
                self._inbox = (await self._actor.receive.remote())[::-1]
        except self._ray.exceptions.RayError as error:
            raise _lost(error) from error
        message: Message = pickle.loads(self._inbox.pop())
        return message

    async def close(self) -> None:
        try:
            await asyncio.wait_for(self._actor.end.remote(), GRACE_S)
        except (self._ray.exceptions.RayError, TimeoutError):
            pass  # dead already, or killed below
        finally:
            self._ray.kill(self._actor)


class _Actor:
    """The worker's end; ``send`` and ``receive`` are named from the pool's side."""

    def __init__(self) -> None:
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._serving: asyncio.Task[None] | None = None

    async def send(self, packed: bytes) -> None:
        """A message from the pool."""
        if self._serving is None:
            self._serving = asyncio.create_task(serve(_ActorEnd(self._incoming, self._outgoing)))
        self._incoming.put_nowait(packed)

    async def receive(self) -> list[bytes]:
        """Wait for messages for the pool and return all of them."""
        messages = [await self._outgoing.get()]
        while not self._outgoing.empty():
            messages.append(self._outgoing.get_nowait())
        return messages

    async def end(self) -> None:
        """Stop all rollouts."""
        self._incoming.put_nowait(None)
        if self._serving is not None:
            await self._serving

    def pid(self) -> int:
        """The actor's process."""
        return os.getpid()


class _ActorEnd:
    """The channel that ``serve`` sees inside an actor."""

    def __init__(self, incoming: asyncio.Queue[bytes | None], outgoing: asyncio.Queue[bytes]):
        self._incoming, self._outgoing = incoming, outgoing

    async def send(self, message: Message) -> None:
        if isinstance(message, Failed) and message.number == 0:
            message = Failed(0, _on_this_node(message.error))
        self._outgoing.put_nowait(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    async def receive(self) -> Message:
        packed = await self._incoming.get()
        if packed is None:
            raise WorkerLost("the run is over")
        message: Message = pickle.loads(packed)
        return message

    async def close(self) -> None:
        """Do nothing: the pool kills the actor."""


def _on_this_node(error: BaseException) -> ConfigError:
    import ray

    utilities: Any = ray.util  # its functions have no types
    return ConfigError(f"Ray node {utilities.get_node_ip_address()}: {error}; {_NEEDS}")


def _lost(error: BaseException) -> WorkerLost | ConfigError:
    """The error of a dead worker; of a worker whose node cannot import this project, which no other
    worker would survive."""
    text = str(error)
    if missing := re.search(r"ModuleNotFoundError: (.+)", text):
        node = re.search(r"\bip=([^,)\s]+)", text)
        return ConfigError(f"Ray node {node[1] if node else '(unknown)'}: {missing[1]}; {_NEEDS}")
    return WorkerLost(
        "a worker on the Ray cluster died:"
        f" {text.splitlines()[0] if text else type(error).__name__}"
    )


_NEEDS = (
    "every node needs this project and the environment's package: install them there, or ship the"
    ' environment\'s folder with ray.init(runtime_env={"working_dir": FOLDER}) before the'
    " evaluation"
)
