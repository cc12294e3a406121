"""``vf-serve-env``: an environment as a server, for clients of OpenEnv or over ZeroMQ."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from verifiers.cli.common.command import Call, Listening, SmallCommand, one_word
from verifiers.errors import ConfigError
from verifiers.runtime.installed import part
from verifiers.runtime.notations import Table
from verifiers.runtime.values import Count, option

if TYPE_CHECKING:
    from aiohttp.web import Application

ABOUT = """Serve an environment to clients of OpenEnv: the client that steps a session is its model.

With --wire zmq, serve whole rollouts to the environment client of `verifiers` 0.4, which names the model's endpoint.

Sessions run at the same time, each with a rollout of its own. There is no authentication: serve to machines you trust.

\b
  vf-serve-env reverse-text
  vf-serve-env reverse-text --wire zmq --port 5000
  vf-serve-env wordle -a num_eval_examples=50 --port 8001 --max-sessions 16
"""


class Server(Protocol):
    """A server of another distribution; it has ``app`` or ``serve``, by its wire."""

    name: str
    max_sessions: int
    app: Callable[[], Application]
    serve: Callable[[Callable[[str], None], asyncio.Event], Awaitable[None]]


@dataclass(frozen=True)
class ServeEnvSettings(Listening):
    """The flags of ``vf-serve-env``."""

    env_args: Table = option({}, "Arguments of load_environment.", "-a")
    wire: Literal["openenv", "zmq"] = option(
        "openenv", "Clients to serve: OpenEnv's, or those of verifiers 0.4 over ZeroMQ."
    )
    max_sessions: Count = option(64, "Sessions at the same time.")


def run(call: Call, settings: ServeEnvSettings) -> None:
    """Serve until interrupted. *Raises* ``ConfigError``."""
    from verifiers.environments.registry import load_environment

    is_zmq = settings.wire == "zmq"
    server_class = part("ZmqServer" if is_zmq else "EnvServer", "vf-serve-env")
    env = load_environment(one_word(call, "one environment"), **settings.env_args)
    host, port, max_sessions = settings.host, settings.port, settings.max_sessions
    if is_zmq:
        asyncio.run(
            _serve_zmq(call, server_class(env, f"tcp://{host}:{port or '*'}", max_sessions))
        )
    else:
        asyncio.run(_serve(call, server_class(env, max_sessions), host, port))


async def _serve(call: Call, server: Server, host: str, port: int) -> None:
    from verifiers.clients.serving import open_app

    ended = _ended()
    try:
        runner = await open_app(server.app(), host, port)
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be listened at: {error.strerror or error}; give --port"
        ) from error
    try:
        address = f"http://{host}:{runner.addresses[0][1]}"
        _announce(call, server, address, f"vf.OpenEnvEnv({address!r})")
        await ended.wait()
    finally:
        await runner.cleanup()


async def _serve_zmq(call: Call, server: Server) -> None:
    await server.serve(
        lambda address: _announce(call, server, address, f"EnvClient({address!r})"), _ended()
    )


def _ended() -> asyncio.Event:
    """Set by SIGTERM: the server ends as with Ctrl-C, rollouts are cancelled and clean up."""
    ended = asyncio.Event()
    # Windows, or a loop beside the main thread
    with contextlib.suppress(NotImplementedError, RuntimeError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    return ended


def _announce(call: Call, server: Server, address: str, client: str) -> None:
    text = f"{server.name} at {address}, {server.max_sessions} sessions: {client}"
    call.answer_now(text, url=address)


COMMAND = SmallCommand(
    name="vf-serve-env",
    about=ABOUT,
    metavar="ENV",
    options=ServeEnvSettings,
    keys=("url",),
    action=run,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
