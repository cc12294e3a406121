"""P25: CPU time of one model call of an agent through the gateway, 64 agents at once, against a raw
loopback echo.

    python benchmarks/gateway.py [--agents 64] [--calls 20] [--quick] [--pairs 5] [--store]

The agents are tasks of another process, which send chat completions over loopback as agents do: one
tool, and a history that grows by a call and a result of 1 kB with each turn. Measured is the CPU
time of this process: the server, the rollouts with their recorded turns, and a model that answers
at once. The echo is an aiohttp server that reads the same requests and answers with ready bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import aiohttp
from _measure import (
    Cost,
    Report,
    Stopwatch,
    interleaved,
    median,
    options,
    parse,
    print_table,
    ratio,
    versions,
)
from aiohttp import web

import verifiers as vf
from verifiers.testing import ScriptedClient

TO_REACH_MS = 3.0
RESULT = "The quick brown fox. " * 48
"""A tool's result: 1 kB."""
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command. " * 60,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "bash", "arguments": '{"command":"ls -l"}'},
}


# --- the agents, in a process of their own --------------------------------------------------------


async def work(session: aiohttp.ClientSession, url: str, num_calls: int) -> None:
    """One agent: each turn appends the answer and the tool's result to its history."""
    messages: list[dict] = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Go."},
    ]
    for _ in range(num_calls):
        body = {"model": "m", "messages": messages, "tools": [TOOL]}
        async with session.post(f"{url}/chat/completions", json=body) as reply:
            answer = (await reply.json())["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": RESULT}
        messages += [answer, result]


async def agents() -> None:
    """Start an agent for each line ``URL CALLS`` of stdin; print a line for each that has ended."""
    loop, running = asyncio.get_running_loop(), set()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def call_agent(url: str, num_calls: int) -> None:
            await work(session, url, num_calls)
            print(url, flush=True)

        while line := await loop.run_in_executor(None, sys.stdin.readline):
            url, num_calls = line.split()
            task = asyncio.create_task(call_agent(url, int(num_calls)))
            running.add(task)
            task.add_done_callback(running.discard)


class Agents:
    """The process of the agents."""

    def __enter__(self) -> Agents:
        self._child = subprocess.Popen(
            [sys.executable, __file__, "agents"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ended: dict[str, list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]] = {}
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(timeout=10)

    async def run(self, url: str, num_calls: int) -> None:
        """Run one agent to its end."""
        assert self._child.stdin is not None
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        self._ended.setdefault(url, []).append((loop, ended))
        self._child.stdin.write(f"{url} {num_calls}\n")
        self._child.stdin.flush()
        await ended

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            loop, ended = self._ended[line.strip()].pop()
            loop.call_soon_threadsafe(ended.set_result, None)


# --- what is measured -----------------------------------------------------------------------------


def through_the_gateway(agents: Agents, num_agents: int, num_calls: int) -> Cost:
    """All agents at once as rollouts."""

    async def agent(state: vf.State) -> None:
        async with vf.model_gateway(state) as url:
            await agents.run(url, num_calls)

    env = vf.AgentEnv(agent=agent, dataset=[{"question": "Go."}], score_rollouts=False)
    client = ScriptedClient([vf.ToolCall(CALL["id"], "bash", CALL["function"]["arguments"])])
    with Stopwatch() as watch:
        results = env.evaluate(
            client, "m", rollouts_per_example=num_agents, max_concurrent=num_agents
        )
    assert [output.metrics["num_turns"] for output in results.outputs] == [num_calls] * num_agents
    return watch.cost


@contextlib.contextmanager
def echo_server() -> Iterator[str]:
    """A server in a thread that reads a request and answers with ready bytes; its base URL."""
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
    reply = json.dumps(
        {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    )

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=reply, content_type="application/json")

    async def listen() -> web.AppRunner:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        return runner

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(listen(), loop).result()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def against_the_echo(agents: Agents, url: str, num_agents: int, num_calls: int) -> Cost:
    """All agents at once on the echo."""

    async def all_at_once() -> None:
        await asyncio.gather(*(agents.run(url, num_calls) for _ in range(num_agents)))

    with Stopwatch() as watch:
        asyncio.run(all_at_once())
    return watch.cost


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--calls", type=int, default=20)
    args = parse(parser)
    if args.quick:
        args.agents, args.calls = 16, 5
    print(versions("aiohttp"))
    report = Report("gateway", args)
    with Agents() as running, echo_server() as url:
        contenders = {
            "echo": lambda: against_the_echo(running, url, args.agents, args.calls),
            "gateway": lambda: through_the_gateway(running, args.agents, args.calls),
        }
        for contender in contenders.values():
            contender()  # connections, imports
        costs = interleaved(contenders, args.pairs)
    calls = args.agents * args.calls
    rows = [
        [
            name,
            f"{1e3 * median(spent, 'cpu_s') / calls:.2f}",
            f"{ratio(spent, costs['echo'], 'cpu_s'):.2f}",
        ]
        for name, spent in costs.items()
    ]
    print_table(
        f"{args.agents} agents at once, {args.calls} calls each",
        ["", "CPU ms/call", "over the echo"],
        rows,
    )
    report.figure("CPU of a call over the echo", ratio(costs["gateway"], costs["echo"], "cpu_s"))
    report.figure(
        "CPU of a call",
        1e3 * median(costs["gateway"], "cpu_s") / calls,
        unit=" ms",
        to_reach=TO_REACH_MS,
    )
    report.close()


if __name__ == "__main__":
    asyncio.run(agents()) if sys.argv[1:] == ["agents"] else main()
