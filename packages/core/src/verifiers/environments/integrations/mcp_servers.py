"""Tool servers of the Model Context Protocol, child processes or behind an address, one set for
all event loops of this process.

Promise: a server starts on first use from any loop and runs until ``stop``. A dead server is
restarted by the next call, once per call; a call interrupted by its death is repeated, so a server
may see a call twice. A server sees ``HOME LOGNAME PATH SHELL TERM USER`` and the variables of its
``ServerSpec``; a server whose message is longer than ``MAX_MESSAGE_BYTES`` counts as dead. It ends
with the processes that it started; on Linux a reaper ends daemons too.

The connections belong to an event loop in a dedicated thread, because each blocking call of an
environment has its own loop that ends with the call. Models and messages are in ``mcp``. A child
process is not a sandbox. A server behind an address (``mcp_http``) counts as dead when it cannot be
reached or has forgotten its session, and its restart is another connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import verifiers
from verifiers.environments.integrations.mcp_http import (
    MAX_MESSAGE_BYTES,
    headers_of,
    http_streams,
)
from verifiers.environments.integrations.mcp_results import result_check
from verifiers.errors import ConfigError, InfraError, MissingKeyError, UsageError
from verifiers.runtime.bounded import size_text
from verifiers.runtime.redaction import redacted_text
from verifiers.runtime.suggest import check_keywords
from verifiers.storage.described import describe_members, type_name

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

T = TypeVar("T")
FIELDS = tuple(
    "name command args env description tools exclude rename url api_key_var header_vars".split()
)
STOP_LIMIT_S = 10.0
MAX_STDERR_BYTES = 4000
"""Bytes of the end of the stderr of a server to keep for error messages."""
EXIT_LIMIT_S = 2.0
"""Seconds that a server may take to exit when its stdin is closed, and again after SIGTERM."""
_REAP = (
    "import sys; sys.path.insert(0, {root!r}); from verifiers.sandbox.guest.reaper import reap;"
    " reap(sys.argv[1:])"
)
log = logging.getLogger("verifiers.mcp")


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Command, arguments and environment of a server, or its address.

    Example: ``ServerSpec("files", "npx", ("-y", "server-files"), {"ROOT": "/srv"})``.
    """

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets
    """Variables that the server sees in addition to the basic variables."""
    description: str = ""
    tools: tuple[str, ...] | None = None
    """The server's own names of the tools that are offered; None = all."""
    exclude: tuple[str, ...] = ()
    """Names of tools that are left out."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """The server's own name of a tool -> the name that the model calls."""
    url: str = ""
    """Address of a server that speaks Streamable HTTP, in place of a command."""
    api_key_var: str | None = None
    """Variable of this process whose value is sent as ``Authorization: Bearer``."""
    header_vars: Mapping[str, str] = field(default_factory=dict)
    """Header -> the variable of this process with its value."""

    @classmethod
    def of(cls, server: object) -> ServerSpec:
        """Build a spec from a mapping or an object with these fields.

        ``env`` may also be a list of variables of this process. *Raises* ConfigError for anything
        else, MissingKeyError for a listed variable that is not set.
        """
        if not isinstance(server, Mapping):
            server = {name: getattr(server, name) for name in FIELDS if hasattr(server, name)}
        check_keywords(server, FIELDS, "an MCP server")
        fields = {name: value for name, value in server.items() if value is not None}
        is_remote = bool(fields.get("url"))
        for name in ("name", "url" if is_remote else "command"):
            if not isinstance(fields.get(name), str) or not fields[name]:
                raise ConfigError(
                    f"an MCP server{' without a url' if name == 'command' else ''} needs a {name}; its"
                    f" fields are: {', '.join(fields) or 'nothing'}",
                    key=name,
                )
        _check_kind(fields, is_remote)
        args = fields.get("args", ())
        if isinstance(args, str) or not all(isinstance(arg, str) for arg in args):
            raise ConfigError(
                f"the args of the MCP server {fields['name']!r} must be a list of strings",
                key="args",
            )
        env = _environment(fields["name"], fields.get("env", {}))
        tools = fields.get("tools")
        return cls(
            fields["name"],
            fields.get("command", ""),
            tuple(args),
            env,
            fields.get("description", ""),
            None if tools is None else _names(fields, "tools"),
            _names(fields, "exclude"),
            dict(fields.get("rename", {})),
            fields.get("url", ""),
            fields.get("api_key_var"),
            dict(fields.get("header_vars", {})),
        )

    def identity(self) -> dict[str, Any]:
        """The fields, without a choice of tools where there is none: older runs have no such
        keys."""
        values = {name: getattr(self, name) for name in FIELDS}
        defaults: dict[str, Any] = {"tools": None, "exclude": (), "rename": {}}
        defaults |= {"url": "", "api_key_var": None, "header_vars": {}}
        return {"class": type_name(type(self))} | describe_members(
            {n: v for n, v in values.items() if n not in defaults or v != defaults[n]}
        )

    def headers(self) -> dict[str, str]:
        """The headers of a server with an address. *Raises* MissingKeyError."""
        return headers_of(self.name, self.api_key_var, self.header_vars)

    def offers(self, tool: str) -> bool:
        """Whether a tool of the server is offered to the model."""
        return (self.tools is None or tool in self.tools) and tool not in self.exclude


def _check_kind(fields: Mapping[str, Any], is_remote: bool) -> None:
    """*Raises* ConfigError for fields of the other kind of server, and for an address that is none
    or holds a login; MissingKeyError for a variable that is not set."""
    name = fields["name"]
    excluded = ("command", "args", "env") if is_remote else ("api_key_var", "header_vars")
    if wrong := [key for key in excluded if fields.get(key)]:
        raise ConfigError(
            f"the MCP server {name!r} has {'a url' if is_remote else 'no url'}, which"
            f" {wrong[0]} does not go with",
            key=wrong[0],
        )
    if not is_remote:
        return
    address = urlsplit(fields["url"])
    if address.scheme not in ("http", "https") or not address.hostname or "@" in address.netloc:
        raise ConfigError(
            f"the url of the MCP server {name!r} must be http://HOST/… or https://HOST/…, without"
            " a login: name the variable of its key in api_key_var",
            key="url",
        )
    headers_of(name, fields.get("api_key_var"), fields.get("header_vars", {}))


def _names(fields: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = fields.get(key, ())
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"the {key} of the MCP server {fields['name']!r} must be a list of names of tools",
            key=key,
        )
    return tuple(names)


def _environment(server: str, env: Mapping[str, str] | Iterable[str]) -> dict[str, str]:
    if not isinstance(env, Mapping):
        names = [env] if isinstance(env, str) else list(env)
        if missing := [name for name in names if name not in os.environ]:
            raise MissingKeyError(
                f"the MCP server {server!r} needs {', '.join(missing)}, which this process does not"
                " have",
                names=missing,
            )
        env = {name: os.environ[name] for name in names}
    if not all(isinstance(part, str) for pair in env.items() for part in pair):
        raise ConfigError(
            f"the env of the MCP server {server!r} must map names to strings", key="env"
        )
    return dict(env)


class Servers:
    """A set of servers; every method may be called from any event loop."""

    def __init__(self, specs: Sequence[ServerSpec], start_limit_s: float):
        self.servers = {spec.name: _Server(spec, start_limit_s) for spec in specs}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def tools(self) -> list[tuple[str, Any]]:
        """Start the servers that are not running and return (name of the server, tool) of all.

        *Raises* ConfigError for a server that does not start.
        """
        return await self._there(self._all_tools())

    async def call(self, server: str, tool: str, arguments: dict[str, Any]) -> Any:
        """Call a tool and return the result. *Raises* InfraError when the server died, also after a
        restart."""
        return await self._there(self.servers[server].call(tool, arguments))

    async def stop(self) -> None:
        """Stop the servers and the thread; a later call starts them again."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        work = asyncio.run_coroutine_threadsafe(self._stop_all(), loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(work), STOP_LIMIT_S)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(STOP_LIMIT_S)

    async def _all_tools(self) -> list[tuple[str, Any]]:
        connections = await asyncio.gather(
            *(server.connection() for server in self.servers.values())
        )
        return [
            (name, tool)
            for name, connection in zip(self.servers, connections, strict=True)
            for tool in connection.tools
        ]

    async def _stop_all(self) -> None:
        await asyncio.gather(*(server.stop() for server in self.servers.values()))

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` on the loop of the servers; a cancellation is forwarded."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=(self._loop,), name="verifiers-mcp-servers", daemon=True
                )
                self._thread.start()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await asyncio.wrap_future(future)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class _Connection:
    """A run of a server: its session, its tools, and the event that ends it."""

    def __init__(self) -> None:
        self.session: Any = None
        self.tools: list[Any] = []
        self.ended = asyncio.Event()
        self.life: asyncio.Task[None] | None = None


class _Server:
    """A server; used on the loop of the servers only."""

    def __init__(self, spec: ServerSpec, start_limit_s: float):
        self.spec, self.start_limit_s = spec, start_limit_s
        self._starting: asyncio.Task[_Connection] | None = None
        self._has_run = False
        self._stderr = b""
        self._fault = ""

    async def connection(self) -> _Connection:
        """Return the running server, starting it if needed. *Raises* ConfigError, on a restart
        InfraError."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        starting = self._starting
        try:
            # cancelling one caller must not cancel the others
            return await asyncio.shield(starting)
        except (UsageError, InfraError):
            if self._starting is starting:
                self._starting = None
            raise

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        import anyio
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, PARSE_ERROR

        for is_last in (False, True):
            running = await self.connection()
            try:
                return await running.session.call_tool(tool, arguments)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
                death: Exception = error
            except MCPError as error:
                if error.code not in (CONNECTION_CLOSED, PARSE_ERROR):
                    raise
                death = error
                if self.spec.url:
                    self._fault = f"; {error.message}"
            log.warning(
                "the MCP server %r died%s", self.spec.name, "" if is_last else "; restarting it"
            )
            await self._end(running)
        raise InfraError(
            f"the MCP server {self.spec.name!r} died during the call of {tool!r}, and again after a"
            f" restart{self._fault}{self._stderr_text()}"
        ) from death

    async def stop(self) -> None:
        if self._starting is None:
            return
        try:
            running = await self._starting
        except (UsageError, InfraError):
            return  # the start failed, and its callers have the error
        await self._end(running)

    async def _end(self, running: _Connection) -> None:
        """End a run of the server, and wait until its process has exited."""
        starting = self._starting
        if (
            starting is not None
            and starting.done()
            and not starting.exception()
            and starting.result() is running
        ):
            self._starting = None
        running.ended.set()
        if running.life is not None:
            await asyncio.wait([running.life])

    async def _start(self) -> _Connection:
        connection, ready = _Connection(), asyncio.get_running_loop().create_future()
        connection.life = asyncio.ensure_future(self._live(connection, ready))
        try:
            await ready
        except Exception as error:
            await asyncio.wait([connection.life])
            failure = InfraError if self._has_run else ConfigError
            if isinstance(error, TimeoutError):
                what = f"no answer within {self.start_limit_s:g} s"
            else:
                what = str(error)
            raise failure(
                f"the MCP server {self.spec.name!r} ({self.spec.command or redacted_text(self.spec.url)})"
                f" did not {'answer' if self.spec.url else 'start'}:"
                f" {what}{self._fault}{self._stderr_text()}"
            ) from error
        self._has_run = True
        return connection

    async def _live(self, connection: _Connection, ready: asyncio.Future[None]) -> None:
        """Run the server until ``connection.ended``; an error of the start goes to ``ready``."""
        from mcp import Client

        try:
            async with contextlib.AsyncExitStack() as stack:
                if self.spec.url:
                    self._fault = ""
                    transport = http_streams(self.spec.url, self.spec.headers(), self.start_limit_s)
                else:
                    transport = self._process()
                try:
                    async with asyncio.timeout(self.start_limit_s):
                        client = await stack.enter_async_context(Client(transport, cache=None))
                        connection.tools = await _all_tools(client)
                except Exception as error:  # noqa: BLE001  raised in ``_start``, which awaits it
                    ready.set_exception(_only(error))
                    return
                client.session.validate_tool_result = result_check(connection.tools)  # type: ignore[method-assign, assignment]
                connection.session = client
                ready.set_result(None)
                await connection.ended.wait()
        except Exception as error:  # noqa: BLE001  raised in ``_start``, or logged after the start
            if not ready.done():
                ready.set_exception(error)
            else:
                log.warning("the connection to the MCP server %r ended: %s", self.spec.name, error)

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[tuple[Any, Any]]:
        """(messages of a new process of the server, messages to it).

        The protocol's library has a transport for it, whose reader holds a line of any length.
        """
        import anyio
        from mcp.client.stdio import get_default_environment

        self._fault, self._stderr = "", b""
        environment = get_default_environment() | dict(self.spec.env)
        process = await asyncio.create_subprocess_exec(
            *_reaped([self.spec.command, *self.spec.args], environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            limit=MAX_MESSAGE_BYTES,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        keeping = asyncio.ensure_future(self._keep_end(process.stderr))
        arrived, incoming = anyio.create_memory_object_stream[Any](0)
        outgoing, queued = anyio.create_memory_object_stream[Any](0)
        tasks = [
            asyncio.ensure_future(self._read(process.stdout, arrived)),
            asyncio.ensure_future(_write(process.stdin, queued, arrived)),
        ]
        try:
            yield incoming, outgoing
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for stream in (arrived, incoming, outgoing, queued):
                stream.close()
            await _end_process(process, 0.0 if self._fault else EXIT_LIMIT_S)
            await asyncio.wait([keeping], timeout=0.5)  # a grandchild may hold the pipe open
            keeping.cancel()
            process._transport.close()  # type: ignore[attr-defined]

    async def _keep_end(self, stderr: asyncio.StreamReader) -> None:
        """Keep the end of what the server writes to its stderr."""
        while chunk := await stderr.read(MAX_STDERR_BYTES):
            self._stderr = (self._stderr + chunk)[-MAX_STDERR_BYTES:]

    async def _read(
        self, stdout: asyncio.StreamReader, arrived: MemoryObjectSendStream[Any]
    ) -> None:
        """Forward the server's messages until it closes its stdout or a line is too long."""
        import anyio
        import mcp_types
        from mcp.shared.message import SessionMessage

        with arrived, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                try:
                    line = await stdout.readuntil(b"\n")
                except asyncio.IncompleteReadError:
                    return
                except asyncio.LimitOverrunError:
                    self._fault = f"; it sent a message longer than {size_text(MAX_MESSAGE_BYTES)}"
                    return
                try:
                    await arrived.send(
                        SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line))
                    )
                except ValueError as error:
                    await arrived.send(error)

    def _stderr_text(self) -> str:
        """Return the end of the stderr of the server, for the end of an error message."""
        text = redacted_text(self._stderr.decode(errors="replace")).strip()
        return f"; its stderr ends:\n{text[-1000:]}" if text else ""


async def _write(
    stdin: asyncio.StreamWriter,
    queued: MemoryObjectReceiveStream[Any],
    arrived: MemoryObjectSendStream[Any],
) -> None:
    """Forward messages to the server; when it takes no more, its side counts as closed too."""
    with contextlib.suppress(OSError):
        async for message in queued:
            stdin.write(
                message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
            )
            await stdin.drain()
        return
    arrived.close()


def _reaped(command: list[str], environment: Mapping[str, str]) -> list[str]:
    """The command under a reaper, if there is any. *Raises* FileNotFoundError as the command
    does."""
    if sys.platform != "linux":
        return command
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    return [
        sys.executable,
        "-c",
        _REAP.format(root=str(Path(verifiers.__file__).parents[1])),
        *command,
    ]


async def _end_process(process: Any, limit_s: float) -> None:
    """Close the stdin of a server; after ``limit_s`` SIGTERM to all that it started, after the same
    again its reaper's signal to kill them."""
    with contextlib.suppress(OSError):
        process.stdin.close()
    for number, end, wait_s in (
        (signal.SIGTERM, os.killpg, limit_s),
        (signal.SIGUSR1 if sys.platform == "linux" else signal.SIGKILL, os.kill, limit_s),
        (signal.SIGKILL, os.killpg, EXIT_LIMIT_S),
    ):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), wait_s)
            break
        with contextlib.suppress(ProcessLookupError):
            end(process.pid, number)
    with contextlib.suppress(ProcessLookupError):  # what it started, and left behind
        os.killpg(process.pid, signal.SIGKILL)


def _only(error: Exception) -> Exception:
    """The error that a group is about."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def _all_tools(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor = None
    while True:
        listed = await client.list_tools(cursor=cursor)
        tools += listed.tools
        cursor = listed.next_cursor
        if not cursor:
            return tools
