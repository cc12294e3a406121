"""Structured results of tool servers, and the output schemas that the servers give them."""

import asyncio
import itertools
import sys
import time

import pytest

from verifiers.environments.integrations import extras

if not extras.MCP.is_installed:
    pytest.skip("mcp is not installed (the extra 'mcp')", allow_module_level=True)

from mcp_types import CallToolResult, Tool

from verifiers.environments.integrations import mcp_results
from verifiers.environments.integrations.mcp import MCPEnv
from verifiers.environments.integrations.mcp_results import result_check
from verifiers.errors import ToolCallError
from verifiers.rubrics import Rubric
from verifiers.testing import ScriptedClient
from verifiers.types import ToolCall

FREEZES = {"properties": {"r": {"type": "string", "pattern": "^(a+)+$"}}}
GROWS = {
    "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    | {"d40": {"type": "number"}},
    "$ref": "#/$defs/d0",
}
LINE = "a" * 40 + "!"

SERVER = """
import json, sys
TOOL = {"name": "work", "inputSchema": {"type": "object"}, "outputSchema": SCHEMA}
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    result = {
        "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                       "serverInfo": {"name": "s", "version": "1"}},
        "tools/list": {"tools": [TOOL]},
        "tools/call": {"content": [{"type": "text", "text": "done"}], "structuredContent": CONTENT},
    }.get(message["method"])
    answer = {"result": result} if result else {"error": {"code": -32601, "message": "unknown"}}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)
"""


def constant(completion) -> float:
    return 1.0


def answers_of(tmp_path, schema, content, num_rollouts=1):
    code = SERVER.replace("SCHEMA", repr(schema)).replace("CONTENT", repr(content))
    (tmp_path / "server.py").write_text(code)
    described = {"name": "s", "command": sys.executable, "args": [str(tmp_path / "server.py")]}
    rows = [{"question": str(i), "answer": ""} for i in range(num_rollouts)]
    with MCPEnv(mcp_servers=[described], dataset=rows, rubric=Rubric([constant])) as env:
        client = ScriptedClient([[ToolCall("c1", "work", {})], "Done."])
        results = env.evaluate(client, "m", rollout_timeout_s=60.0)
    assert results["errors"] == [None] * num_rollouts
    return [
        message["content"]
        for completion in results["completions"]
        for message in completion
        if message["role"] == "tool"
    ]


def checked(schema, content):
    async def check():
        tool = Tool(name="work", input_schema={"type": "object"}, output_schema=schema)
        result = CallToolResult(content=[], structured_content=content)
        await result_check([tool])("work", result)

    asyncio.run(check())


def test_a_result_that_its_schema_describes_is_an_answer(tmp_path):
    schema = {"type": "object", "properties": {"r": {"type": "number"}}}
    (answer,) = answers_of(tmp_path, schema, {"r": 5})
    assert "done" in answer


def test_a_result_that_its_schema_does_not_describe_is_the_error_of_its_call(tmp_path):
    schema = {"type": "object", "properties": {"r": {"type": "number"}}}
    (answer,) = answers_of(tmp_path, schema, {"r": "x"})
    assert "the result of the tool 'work' does not fit the output schema" in answer
    assert "$.r: 'x' is not of type 'number'" in answer


@pytest.mark.parametrize(
    ("schema", "content"), [(FREEZES, {"r": LINE}), (GROWS, 5), ({"pattern": "^(a+)+$"}, LINE)]
)
def test_a_schema_that_computes_for_ever_is_ended_beside_the_loop(schema, content, monkeypatch):
    monkeypatch.setattr(mcp_results, "LIMIT_S", 0.5)
    latest = []

    async def beats():
        while True:
            latest.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def both():
        heart = asyncio.ensure_future(beats())
        tool = Tool(name="work", input_schema={"type": "object"}, output_schema=schema)
        result = CallToolResult(content=[], structured_content=content)
        with pytest.raises(ToolCallError, match=r"takes more than 0\.5 s"):
            await result_check([tool])("work", result)
        heart.cancel()

    asyncio.run(both())
    assert max(b - a for a, b in itertools.pairwise(latest)) < 0.4


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5},
        {"pattern": "("},
        {"$ref": "#/nowhere"},
        {"$ref": "http://127.0.0.1:9/schema"},
        {"$schema": "no dialect", "type": "number"},
        {"$ref": "#"},
    ],
)
def test_a_schema_that_is_none_is_an_error_of_the_call_and_nothing_is_fetched(schema):
    with pytest.raises(ToolCallError, match="'work' does not fit the output schema"):
        checked(schema, "text")


def test_another_tool_and_a_valid_result_pass():
    checked({"type": "string"}, "text")

    async def unlisted():
        await result_check([])("work", CallToolResult(content=[], structured_content=5))

    asyncio.run(unlisted())
