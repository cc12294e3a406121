"""Tool servers of the Model Context Protocol, child processes or behind an address, one set for
all event loops of this process.

Promise: a server starts on first use from any loop and runs until ``stop``. What happens to one
call is that call's: an answer that is too long, that is no message or that does not come costs its
neighbours nothing, and a call that was answered is never repeated. A server counts as dead when it
has ended, or when something else that it is asked gets no answer either. It is then started again,
after a pause where that happens again and again; calls that were cut off by its death are repeated
once, one at a time, so that a call that kills its server does so alone. A server may see a call
twice.

A server sees ``HOME LOGNAME PATH SHELL TERM USER`` and the variables of its ``ServerSpec``. It ends
with the processes that it started; on Linux a reaper ends daemons too. A child process is not a
sandbox.

The connections belong to an event loop in a dedicated thread, because each blocking call of an
environment has its own loop that ends with the call. Models and messages are in ``mcp``. The restart
of a server behind an address (``mcp_http``) is another connection, and calls on the former one end
there.
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
from verifiers.environments.integrations import mcp_messages
from verifiers.environments.integrations.mcp_http import headers_of, http_streams
from verifiers.environments.integrations.mcp_messages import (
    Loss,
    Stage,
    decoded,
    encoded,
    id_of,
    loss_of,
    unanswered,
)
from verifiers.environments.integrations.mcp_results import result_check
from verifiers.errors import ConfigError, InfraError, MissingKeyError, UsageError
from verifiers.runtime.bounded import size_text
from verifiers.runtime.redaction import redacted_text, redacted_words, remember_secrets
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
ASK_LIMIT_S = 10.0
"""Seconds after which a server that is asked whether it is there counts as dead."""
SILENT_LIMIT_S = 60.0
"""The same for a child process that has said nothing since a call was given up: it may be busy with
another."""
PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Pause before a server is started again that was started again before and answered no call since;
it doubles."""
MAX_SKIPPED = 16
"""Longest messages after which a line without an end counts as the death of its server."""
MAX_PAGES, MAX_LISTED_BYTES = 1000, 16 * 2**20
"""Of the tools that a server lists."""
_ENDS = 1024
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
        remember_secrets(env)
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

    def identity(self) -> dict[str, object]:
        """The fields, without a choice of tools where there is none: older runs have no such
        keys."""
        values = {name: getattr(self, name) for name in FIELDS}
        defaults: dict[str, object] = {"tools": None, "exclude": (), "rename": {}}
        defaults |= {"url": "", "api_key_var": None, "header_vars": {}}
        values["args"] = redacted_words(self.args)
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

    async def tools(self) -> list[tuple[str, object]]:
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
        except TimeoutError:  # the results are there; what is left ends with this process
            log.warning("the MCP servers did not end within %g s", STOP_LIMIT_S)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(STOP_LIMIT_S)

    async def _all_tools(self) -> list[tuple[str, object]]:
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

    async def _there(self, work: Coroutine[object, object, T]) -> T:
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
    """A run of a server: its session, its tools, its calls, and the event that ends it."""

    def __init__(self) -> None:
        self.session: Any = None
        self.tools: list[Any] = []
        self.num_calls = self.num_heard = 0
        self.is_left = False
        self.ended = asyncio.Event()
        self.life: asyncio.Task[None] | None = None
        self.check: asyncio.Task[bool] | None = None

    async def ask(self, limit_s: float) -> bool:
        """Whether the server answers something else than a call."""
        from mcp import MCPError
        from mcp_types.version import MODERN_PROTOCOL_VERSIONS

        session = self.session.session
        is_modern = session.protocol_version in MODERN_PROTOCOL_VERSIONS
        try:
            async with asyncio.timeout(limit_s):
                if is_modern:
                    await session.send_discover(session.protocol_version)
                else:
                    await session.send_ping()
        except TimeoutError:
            return False
        except MCPError as error:
            return loss_of(error) is None
        except Exception:  # noqa: BLE001  an answer, whatever it holds
            return True
        return True


class _Server:
    """A server; used on the loop of the servers only."""

    def __init__(self, spec: ServerSpec, start_limit_s: float):
        self.spec, self.start_limit_s = spec, start_limit_s
        self._starting: asyncio.Task[_Connection] | None = None
        self._open: set[_Connection] = set()
        self._one_at_a_time = asyncio.Lock()
        self._num_starts = 0
        """Since the last call that was answered."""
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
        try:
            return await self._call_once(tool, arguments)
        except Loss as loss:
            if loss.stage is Stage.ANSWERED:
                raise self._failed(tool, loss) from loss
            log.warning("the MCP server %r died; starting it again", self.spec.name)
            cut_off = loss.stage is Stage.CUT_OFF
        # it may be what ended the server, and shall do so alone
        async with self._one_at_a_time if cut_off else contextlib.nullcontext():
            try:
                return await self._call_once(tool, arguments)
            except Loss as loss:
                raise self._failed(tool, loss, is_again=True) from loss

    async def _call_once(self, tool: str, arguments: Mapping[str, object]) -> object:
        """Call a tool. *Raises* Loss, which is ``ANSWERED`` when the server continues without it."""
        from mcp import MCPError
        from pydantic import ValidationError

        connection = await self.connection()
        connection.num_calls += 1
        num_heard = connection.num_heard
        try:
            result = await connection.session.call_tool(tool, arguments)
            self._num_starts = 0
            return result
        except MCPError as error:
            if (loss := loss_of(error)) is None:
                self._num_starts = 0
                raise
            if await self._is_there(connection):
                loss.stage = Stage.ANSWERED
            else:
                self._leave(connection)
            raise loss from error
        except ValidationError as error:  # of the server, and so none that the model could mend
            fault = error.errors(include_url=False, include_input=False)[0]
            member = ".".join(map(str, fault["loc"]))[:100]
            why = f"it answered with what is no result of a tool ({member}: {fault['msg'][:200]})"
            raise Loss(why, Stage.ANSWERED) from error
        except asyncio.CancelledError:
            if not self.spec.url and connection.check is None:
                connection.check = asyncio.ensure_future(self._end_if_silent(connection, num_heard))
            raise
        finally:
            connection.num_calls -= 1
            if connection.is_left and not connection.num_calls:
                connection.ended.set()

    async def _is_there(self, connection: _Connection) -> bool:
        """Whether a server that lost a call answers something else; asked once for all calls that
        are lost at the same time."""
        if connection.ended.is_set() or connection.is_left:
            return False
        if connection.check is None or connection.check.done():
            connection.check = asyncio.ensure_future(connection.ask(ASK_LIMIT_S))
        return await asyncio.shield(connection.check)

    async def _end_if_silent(self, connection: _Connection, num_heard: int) -> bool:
        """End a child process that says nothing to anybody after a call was given up."""
        is_there = await connection.ask(SILENT_LIMIT_S) or connection.num_heard > num_heard
        connection.check = None
        if not is_there and not connection.ended.is_set():
            self._fault = f"; it said nothing for {SILENT_LIMIT_S:g} s"
            self._leave(connection)
            connection.ended.set()
        return is_there

    def _leave(self, connection: _Connection) -> None:
        """Use another connection from now on; this one ends with its last call."""
        starting = self._starting
        if (
            starting is not None
            and starting.done()
            and not starting.cancelled()
            and not starting.exception()
            and starting.result() is connection
        ):
            self._starting = None
        connection.is_left = True

    def _failed(self, tool: str, loss: Loss, is_again: bool = False) -> InfraError:
        if not is_again or loss.stage is Stage.ANSWERED:
            return InfraError(
                f"the MCP server {self.spec.name!r} gave no answer to the call of {tool!r}: {loss}"
            )
        return InfraError(
            f"the MCP server {self.spec.name!r} died during the call of {tool!r}, and again after a"
            f" restart: {loss}{self._fault}{self._stderr_text()}"
        )

    async def stop(self) -> None:
        """End all runs of the server, also one that starts."""
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        self._starting = None
        lives = [connection.life for connection in self._open if connection.life is not None]
        for connection in self._open:
            connection.ended.set()
        if lives:
            await asyncio.wait(lives)

    async def _start(self) -> _Connection:
        if not self.spec.url:  # two processes of a server may be in each other's way
            await self._end_left()
        self._num_starts += 1
        if self._num_starts > 2:
            await asyncio.sleep(min(PAUSE_S * 2.0 ** (self._num_starts - 3), MAX_PAUSE_S))
        connection, ready = _Connection(), asyncio.get_running_loop().create_future()
        connection.life = asyncio.ensure_future(self._live(connection, ready))
        self._open.add(connection)
        connection.life.add_done_callback(lambda _: self._open.discard(connection))
        try:
            await ready
        except asyncio.CancelledError:
            connection.life.cancel()
            await asyncio.wait([connection.life])
            raise
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

    async def _end_left(self) -> None:
        """Wait until the processes that are not used any more have exited."""
        unused = [connection for connection in self._open if connection.is_left]
        for connection in unused:
            connection.ended.set()
        lives = [connection.life for connection in unused if connection.life is not None]
        if lives:
            await asyncio.wait(lives)

    async def _live(self, connection: _Connection, ready: asyncio.Future[None]) -> None:
        """Run the server until ``connection.ended``; an error of the start goes to ``ready``."""
        from mcp import Client

        try:
            async with contextlib.AsyncExitStack() as stack:
                if self.spec.url:
                    transport = http_streams(self.spec.url, self.spec.headers(), self.start_limit_s)
                else:
                    transport = self._process(connection)
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
    async def _process(self, connection: _Connection) -> AsyncIterator[tuple[Any, Any]]:
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
            limit=mcp_messages.MAX_MESSAGE_BYTES,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        keeping = asyncio.ensure_future(self._keep_end(process.stderr))
        arrived, incoming = anyio.create_memory_object_stream[Any](0)
        outgoing, queued = anyio.create_memory_object_stream[Any](0)
        tasks = [
            asyncio.ensure_future(self._read(process.stdout, arrived, connection)),
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
        self,
        stdout: asyncio.StreamReader,
        arrived: MemoryObjectSendStream[object],
        connection: _Connection,
    ) -> None:
        """Forward the server's messages until it closes its stdout or a line has no end. An answer
        that is too long or no message is the loss of its call."""
        import anyio
        from mcp.shared.message import SessionMessage

        with arrived, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                try:
                    line = await _line(stdout)
                    item = SessionMessage(decoded(line))
                except (asyncio.IncompleteReadError, ConnectionError):
                    return
                except _LongLine as long:
                    if long.request_id is None and not long.is_skipped:
                        self._fault = f"; {long}"
                        return
                    if long.request_id is None:
                        log.warning("the MCP server %r: %s; it is left out", self.spec.name, long)
                        continue
                    item = unanswered(long.request_id, Loss(str(long)))
                except ValueError as error:
                    if (request_id := id_of(line, line)) is None:
                        await arrived.send(error)  # what it prints beside its messages
                        continue
                    item = unanswered(request_id, Loss(f"its answer cannot be read: {error}"))
                connection.num_heard += 1
                await arrived.send(item)

    def _stderr_text(self) -> str:
        """Return the end of the stderr of the server, for the end of an error message."""
        text = redacted_text(self._stderr.decode(errors="replace")).strip()
        return f"; its stderr ends:\n{text[-1000:]}" if text else ""


class _LongLine(Exception):
    """A line of a server is too long; ``is_skipped``: it is a message, and its end was found."""

    def __init__(self, start: bytes, end: bytes, is_skipped: bool):
        limit = size_text(mcp_messages.MAX_MESSAGE_BYTES)
        super().__init__(f"it sent a message longer than {limit}")
        self.request_id = id_of(start, end) if is_skipped else None
        self.is_skipped = is_skipped and (self.request_id is not None or b'"method"' in start)


async def _line(stdout: asyncio.StreamReader) -> bytes:
    """The next line. *Raises* _LongLine when it has been skipped, or does not end;
    IncompleteReadError."""
    start = end = b""
    num_bytes = 0
    while True:
        try:
            line = await stdout.readuntil(b"\n")
        except asyncio.LimitOverrunError as error:
            part = await stdout.readexactly(error.consumed)
            num_bytes += len(part)
            start, end = start or part[:_ENDS], (end + part[-_ENDS:])[-_ENDS:]
            if num_bytes > MAX_SKIPPED * mcp_messages.MAX_MESSAGE_BYTES or not start.startswith(
                b"{"
            ):
                raise _LongLine(start, end, is_skipped=False) from None
            continue
        if not num_bytes:
            return line
        raise _LongLine(start, end + line[-_ENDS:], is_skipped=True)


async def _write(
    stdin: asyncio.StreamWriter,
    queued: MemoryObjectReceiveStream[Any],
    arrived: MemoryObjectSendStream[Any],
) -> None:
    """Forward messages to the server; when it takes no more, its side counts as closed too."""
    with contextlib.suppress(OSError):
        async for message in queued:
            try:
                line = encoded(message.message) + b"\n"
            except ValueError as error:
                why = f"the call cannot be sent ({type(error).__name__})"
                await arrived.send(unanswered(message.message.id, Loss(why)))
                continue
            stdin.write(line)
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
        *(sys.executable, "-P", "-c"),
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
    """The tools of a server. *Raises* ValueError when they have no end."""
    tools: list[object] = []
    cursor, num_bytes = None, 0
    for _ in range(MAX_PAGES):
        listed = await client.list_tools(cursor=cursor)
        tools += listed.tools
        num_bytes += sum(len(tool.model_dump_json()) for tool in listed.tools)
        if num_bytes > MAX_LISTED_BYTES:
            raise ValueError(f"the list of its tools is longer than {size_text(MAX_LISTED_BYTES)}")
        last, cursor = cursor, listed.next_cursor
        if not cursor:
            return tools
        if cursor == last:
            raise ValueError("the list of its tools has the same page twice")
    raise ValueError(f"the list of its tools has more than {MAX_PAGES} pages")
