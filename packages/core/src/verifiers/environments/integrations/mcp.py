"""``MCPEnv``: a tool environment whose tools come from servers of the Model Context Protocol
(child processes, or Streamable HTTP).

Promise: the constructor starts nothing. The servers start with the first rollout, once per
environment, and stop at teardown; their tools are added to those of the environment, under distinct
names. A server sees only the basic environment variables and those configured for it. Processes and
connections are in ``mcp_servers``.

Tool errors reported by a server become error texts for the model. A call that gets no answer, or
one that cannot be used, ends its rollout with ``InfraError``, and the reward is unknown; no other
rollout has part in it.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from verifiers.data.messages import field
from verifiers.data.row_format import copy_row
from verifiers.data.tool_schema import ToolFunction
from verifiers.environments.integrations import extras
from verifiers.environments.integrations.mcp_servers import Servers, ServerSpec
from verifiers.environments.tool import CallOptions, ToolEnv
from verifiers.environments.tool_answers import (
    MAX_DESCRIPTION_CHARS,
    check_definitions,
    cut_description,
)
from verifiers.errors import ConfigError, ToolCallError, message_of
from verifiers.rollouts.author_code import setup, teardown
from verifiers.rollouts.state import State
from verifiers.runtime.signatures import spell_out
from verifiers.storage.described import describe
from verifiers.types import ImageUrlContentPart, InputAudioContentPart, TextContentPart, Tool

if TYPE_CHECKING:
    import mcp_types


def tell_error(error: Exception) -> str:
    """Format an error for the model; the default ``error_formatter``."""
    return f"Error: {message_of(error)}"


class ServerOptions(CallOptions, total=False):
    """Parameters of ``ToolEnv`` that ``MCPEnv`` passes on unchanged."""

    stop_errors: Sequence[type[BaseException]] | None
    max_tool_result_chars: int


class MCPEnv(ToolEnv):
    """An environment with the tools of MCP servers.

    Args:
        mcp_servers: Mappings or objects with ``name``, ``command``, ``args``, ``env``,
            ``description``, ``tools`` (names of those that are offered; default: all), ``exclude``
            and ``rename`` (the server's own name -> the name for the model). Names that no provider
            takes, or that two servers have, are offered as ``cal_search``, ``server_search``.
            ``env`` maps variables to values, or lists variables of this process; the server sees
            these and ``HOME``, ``LOGNAME``, ``PATH``, ``SHELL``, ``TERM``, ``USER``. In place of
            a command, ``url`` is the address of a server (Streamable HTTP, of either generation of
            the protocol), ``api_key_var`` the variable that holds its key, and ``header_vars``
            maps further headers to variables.
        max_turns: Model calls after which a rollout ends.
        error_formatter: Function from an exception to the text that the model reads.
        start_timeout_s: Time limit of a server's start, in seconds.

    Example::

        env = MCPEnv(
            mcp_servers=[{"name": "files", "command": "npx", "args": ["-y", "server-files"], "env": {"ROOT": "/srv"}}],
            dataset=[{"question": "Which files are there?", "answer": "notes.txt"}],
        )

    A server that died is started again, and a call that its death cut off is repeated once; a call
    that was answered, however, is not. Further parameters are
    those of ``ToolEnv``; its ``tools`` are offered together with those of the servers.

    *Raises* ConfigError when the extra is not installed or a server is described incorrectly; at
    the first rollout when a server does not start, or when two tools have the same name.
    """

    @spell_out(ServerOptions, ToolEnv.__init__)
    def __init__(
        self,
        mcp_servers: Sequence[object] = (),
        max_turns: int = 10,
        error_formatter: Callable[[Exception], str] = tell_error,
        start_timeout_s: float = 30.0,
        **parameters: Unpack[ServerOptions],
    ):
        extras.MCP.load("MCPEnv")
        specs = [ServerSpec.of(server) for server in mcp_servers]
        if not specs:
            raise ConfigError(
                "MCPEnv needs at least one server in mcp_servers; without any, write a ToolEnv"
            )
        names = [spec.name for spec in specs]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ConfigError(
                f"two MCP servers are named {repeated[0]!r}; names must differ", key="mcp_servers"
            )
        super().__init__(max_turns=max_turns, error_formatter=error_formatter, **parameters)
        self.mcp_servers = specs
        self._servers = Servers(specs, start_timeout_s)
        self._join_lock = threading.Lock()
        self._server_tools: list[Tool] | None = None

    def identity(self) -> dict[str, Any]:
        """Identity with the servers in place of their tools, which are unknown until the servers
        run."""
        server_tools = {tool["name"] for tool in self._server_tools or ()}
        functions = [tool for name, tool in self._functions.items() if name not in server_tools]
        offered = [
            tool
            for tool in self.tool_defs
            if field(tool.get("function") or tool, "name") not in server_tools
        ]
        return super().identity() | {
            "tools": describe([tool.function for tool in functions]),
            "tool_defs": describe(offered),
        }

    @setup(priority=100)
    async def offer_server_tools(self, state: State) -> None:
        """Start the servers that are not running, and add their tools to those of the rollout."""
        listed = await self._servers.tools()
        with self._join_lock:
            if self._server_tools is None:
                self._server_tools = self._join(listed)
        offered = {field(tool.get("function") or tool, "name") for tool in state["tool_defs"]}
        new = [copy_row(tool) for tool in self._server_tools if tool["name"] not in offered]
        state["tool_defs"] = [*state["tool_defs"], *new]

    @teardown
    async def stop_servers(self) -> None:
        """Stop the servers."""
        await self._servers.stop()

    def _join(self, listed: Sequence[tuple[str, Any]]) -> list[Tool]:
        """Add the tools of the servers. *Raises* ConfigError for a duplicate name, before any is
        added."""
        owners = dict.fromkeys(
            (field(t.get("function") or t, "name") for t in self.tool_defs), "the environment"
        )
        functions = []
        specs = {spec.name: spec for spec in self.mcp_servers}
        for spec in specs.values():
            names = {tool.name for server, tool in listed if server == spec.name}
            if unknown := {*(spec.tools or ()), *spec.exclude, *spec.rename} - names:
                raise ConfigError(
                    f"the MCP server {spec.name!r} has no tool {min(unknown)!r}; its tools are:"
                    f" {', '.join(sorted(names))}"
                )
        offered = [(server, tool) for server, tool in listed if specs[server].offers(tool.name)]
        counts = Counter(tool.name for _, tool in offered)
        for server, tool in offered:
            owner, name = f"the MCP server {server!r}", specs[server].rename.get(tool.name)
            if name is None:  # a legal name, distinct from those of other servers
                name = tool.name if counts[tool.name] == 1 else f"{server}_{tool.name}"
                name = re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64]
            if name in owners:
                raise ConfigError(
                    f"{owners[name]} and {owner} both have a tool {name!r}; rename one or"
                    f" leave one out (rename or exclude of the server {server!r})"
                )
            owners[name] = owner
            try:
                functions.append(self._function(server, tool, name))
            except ConfigError as error:
                raise ConfigError(f"{owner}: {error}") from error
        try:
            check_definitions([function.definition for function in functions])
        except ValueError as error:
            raise ConfigError(
                f"the MCP servers: {error}; offer fewer of them (tools or exclude of a server)"
            ) from error
        for function in functions:
            self._add(function)
        return [function.definition for function in functions]

    def _function(self, server: str, tool: mcp_types.Tool, name: str) -> ToolFunction:
        async def call(**arguments: object) -> Any:
            from mcp import MCPError

            try:
                result = await self._servers.call(server, tool.name, arguments)
            except MCPError as error:
                raise ToolCallError(error.message) from error
            content = content_of(result)
            if result.is_error:
                raise ToolCallError(content if isinstance(content, str) else str(content))
            return content

        call.__name__ = name
        description = tool.description or ""
        if len(description) > MAX_DESCRIPTION_CHARS:
            self.warn_once(
                f"the description of the tool {name!r} of the MCP server {server!r} has"
                f" {len(description):,} characters; it is cut to {MAX_DESCRIPTION_CHARS:,}"
            )
        definition = Tool(name, cut_description(description), tool.input_schema)
        return ToolFunction.with_definition(call, definition)


def content_of(result: mcp_types.CallToolResult) -> Any:
    """Convert the result of a tool call to message content: text if all blocks are text, else a
    list of parts."""
    parts = [_part(block) for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(block: mcp_types.ContentBlock) -> Any:
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
                getattr(resource, "text", None)
                or f"[{resource.mime_type or 'data'}: {resource.uri}]"
            )
        case _:
            return TextContentPart(f"[{block.type}: {getattr(block, 'uri', '')}]")
