"""``MCPEnv``: a tool environment whose tools come from servers of the Model Context Protocol (stdio).

Promise: constructing one starts nothing. The servers start with the first rollout, once for the environment, and stop
at teardown; their tools then stand beside the environment's own, under names that are all different. A server sees no
environment variable but the harmless ones and those it was given. Processes and connections are in ``mcp_servers``.

What a server reports as a tool's error is told to the model. A server that is gone is not the model's doing: the
rollout ends with ``InfraError``, and its reward is unknown.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from verifiers.data.examples import copy_row
from verifiers.data.messages import field
from verifiers.data.tool_schema import ToolFunction
from verifiers.environments.integrations import extras
from verifiers.environments.integrations.mcp_servers import Servers, ServerSpec
from verifiers.environments.tool import CallOptions, ToolEnv
from verifiers.errors import ConfigError, ToolCallError
from verifiers.rollouts.decorators import setup, teardown
from verifiers.rollouts.state import State
from verifiers.runtime.signatures import spell_out
from verifiers.storage.identity import describe
from verifiers.types import ImageUrlContentPart, InputAudioContentPart, TextContentPart, Tool


def tell_error(error: Exception) -> str:
    """The default text about an error for the model."""
    return f"Error: {error}"


class ServerOptions(CallOptions, total=False):
    """Parameters of ``ToolEnv`` that an environment of servers passes on as they are."""

    stop_errors: Sequence[type[BaseException]] | None
    max_tool_result_chars: int


class MCPEnv(ToolEnv):
    """An environment with the tools of MCP servers.

    Example::

        env = MCPEnv(
            mcp_servers=[{"name": "files", "command": "npx", "args": ["-y", "server-files"], "env": {"ROOT": "/srv"}}],
            dataset=[{"question": "Which files are there?", "answer": "notes.txt"}],
        )

    ``mcp_servers``: mappings or objects with ``name``, ``command``, ``args``, ``env`` and ``description``. ``env`` maps
    variables to values, or lists variables of this process; the server sees these and ``HOME``, ``LOGNAME``, ``PATH``,
    ``SHELL``, ``TERM``, ``USER``. A server must answer within ``start_timeout_s``; one that dies is started again, once
    for the call that finds it dead, and that call is made again. Further parameters are ``ToolEnv``'s; its ``tools``
    stand beside the servers'.

    *Raises* ConfigError when the extra is not installed or a server is not described properly; at the first rollout
    when a server does not start, or when two tools have one name.
    """

    @spell_out(ServerOptions, ToolEnv.__init__)
    def __init__(
        self,
        mcp_servers: Sequence[Any] = (),
        max_turns: int = 10,
        error_formatter: Callable[[Exception], str] = tell_error,
        start_timeout_s: float = 30.0,
        **parameters: Unpack[ServerOptions],
    ):
        extras.MCP.load("MCPEnv")
        specs = [ServerSpec.of(given) for given in mcp_servers]
        if not specs:
            raise ConfigError("MCPEnv needs at least one server in mcp_servers; without any, write a ToolEnv")
        names = [spec.name for spec in specs]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"two MCP servers are called {repeated[0]!r}; names must differ", key="mcp_servers")
        super().__init__(max_turns=max_turns, error_formatter=error_formatter, **parameters)
        self.mcp_servers = specs
        self._servers = Servers(specs, start_timeout_s)
        self._joining = threading.Lock()
        self._joined: list[Tool] | None = None

    def identity(self) -> dict[str, Any]:
        """As every part; the servers stand for their tools, which are known only once they run."""
        joined = {tool["name"] for tool in self._joined or ()}
        own = [tool for name, tool in self._functions.items() if name not in joined]
        offered = [tool for tool in self.tool_defs if field(tool.get("function") or tool, "name") not in joined]
        return super().identity() | {"tools": describe([tool.function for tool in own]), "tool_defs": describe(offered)}

    @setup(priority=100)
    async def offer_server_tools(self, state: State) -> None:
        """Start the servers where they are not running; the rollout is offered their tools beside its own."""
        listed = await self._servers.tools()
        with self._joining:
            if self._joined is None:
                self._joined = self._join(listed)
        offered = {field(tool.get("function") or tool, "name") for tool in state["tool_defs"]}
        new = [copy_row(tool) for tool in self._joined if tool["name"] not in offered]
        state["tool_defs"] = [*state["tool_defs"], *new]

    @teardown
    async def stop_servers(self) -> None:
        """Stop the servers."""
        await self._servers.stop()

    def _join(self, listed: Sequence[tuple[str, Any]]) -> list[Tool]:
        """Add the tools of the servers. *Raises* ConfigError for a name twice, before any is added."""
        owners = dict.fromkeys((field(t.get("function") or t, "name") for t in self.tool_defs), "the environment")
        functions = []
        for server, tool in listed:
            owner = f"the MCP server {server!r}"
            if tool.name in owners:
                raise ConfigError(
                    f"{owners[tool.name]} and {owner} both have a tool {tool.name!r}; rename one or leave one out"
                )
            owners[tool.name] = owner
            try:
                functions.append(self._function(server, tool))
            except ConfigError as error:
                raise ConfigError(f"{owner}: {error}") from error
        for function in functions:
            self._add(function)
        return [function.definition for function in functions]

    def _function(self, server: str, tool: Any) -> ToolFunction:
        async def call(**arguments: Any) -> Any:
            from mcp import MCPError

            try:
                result = await self._servers.call(server, tool.name, arguments)
            except MCPError as error:
                raise ToolCallError(error.message) from error
            content = content_of(result)
            if result.is_error:
                raise ToolCallError(content if isinstance(content, str) else str(content))
            return content

        call.__name__ = tool.name
        return ToolFunction.with_definition(call, Tool(tool.name, tool.description or "", tool.input_schema))


def content_of(result: Any) -> Any:
    """The result of a tool call as message content: text where there is only text, else a list of parts."""
    parts = [_part(block) for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(block: Any) -> Any:
    match block.type:
        case "text":
            return TextContentPart(block.text)
        case "image":
            return ImageUrlContentPart(f"data:{block.mime_type};base64,{block.data}")
        case "audio":
            return InputAudioContentPart(block.data, block.mime_type.rpartition("/")[2])
        case "resource":
            resource = block.resource
            return TextContentPart(
                getattr(resource, "text", None) or f"[{resource.mime_type or 'data'}: {resource.uri}]"
            )
        case _:
            return TextContentPart(f"[{block.type}: {getattr(block, 'uri', '')}]")
