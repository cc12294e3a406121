"""Whether the structured result of a tool of an MCP server has the form that the server described.

The schema is of a stranger, and a pattern or alternatives in it may compute for ever without giving
the interpreter back. It is applied in a process of its own, with a time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from verifiers.errors import ScoringError, ToolCallError
from verifiers.runtime.processes import process_pool

if TYPE_CHECKING:
    import mcp_types

LIMIT_S = 5.0
"""Time limit of the check of one result."""
_MAX_QUOTED = 300


def result_check(
    tools: Iterable[mcp_types.Tool],
) -> Callable[[str, mcp_types.CallToolResult], Coroutine[Any, Any, None]]:
    """``validate_tool_result`` of a session with these tools, which *raises* ToolCallError for a
    result that its tool's output schema does not describe."""
    schemas = {tool.name: tool.output_schema for tool in tools if tool.output_schema is not None}

    async def check(name: str, result: mcp_types.CallToolResult) -> None:
        if name not in schemas:
            return
        arguments = {"schema": schemas[name], "content": result.structured_content}
        try:
            wrong = await process_pool().run(mismatch, arguments, LIMIT_S, f"the schema of {name}")
        except TimeoutError:
            wrong = f"checking it takes more than {LIMIT_S:g} s"
        except ScoringError as error:
            wrong = str(error)[:_MAX_QUOTED]
        if wrong:
            raise ToolCallError(
                f"the result of the tool {name!r} does not fit the output schema of its server: {wrong}"
            )

    return check


def mismatch(schema: Mapping[str, object], content: object) -> str:
    """What of a content a schema does not describe, "" for nothing. Runs in a worker process."""
    from jsonschema import SchemaError
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    validator = validator_for(schema)
    try:
        validator.check_schema(schema)
        # an empty registry: nothing is fetched
        error = best_match(validator(schema, registry=Registry()).iter_errors(content))
    except (SchemaError, Unresolvable) as invalid:
        return f"the schema is not valid: {invalid}"[:_MAX_QUOTED]
    return "" if error is None else f"{error.json_path}: {error.message}"[:_MAX_QUOTED]
