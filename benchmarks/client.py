"""What one model call costs: this package's transport against a raw aiohttp loop and the openai SDK.

    python benchmarks/client.py [--calls 2000] [--pairs 5] [--wall 4096] [--peers raw,ours,openai]

The server is `FakeServer` in a process of its own, so CPU time is the client's alone. The contenders take turns in one
run; figures are medians over the pairs and ratios to the raw loop of the same pair. "raw" is aiohttp with one pooled
session, ``json.dumps`` and ``msgspec`` decoding into dicts, and builds no `Response`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import statistics
import time
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec

from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.testing import FakeServer
from verifiers.types import ModelRequest, SystemMessage, UserMessage

TEXT = "The answer is 42. " * 20
PROMPT = [SystemMessage("Answer in one sentence."), UserMessage("What is six times seven? " * 10)]
SAMPLING = {"temperature": 0.7, "max_tokens": 256}
Call = Callable[[], Awaitable[object]]
Close = Callable[[], Awaitable[object]]


async def raw(url: str, in_flight: int) -> tuple[Call, Close]:
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight))
    target = f"{url}/chat/completions"

    async def call() -> object:
        body = json.dumps({"model": "m", "messages": PROMPT, **SAMPLING}).encode()
        async with session.post(target, data=body, headers={"Content-Type": "application/json"}) as answer:
            return msgspec.json.decode(await answer.read())["choices"][0]["message"]["content"]

    return call, session.close


async def ours(url: str, in_flight: int) -> tuple[Call, Close]:
    client = OpenAIChatCompletionsClient(base_url=url, api_key="k")
    return lambda: client.complete(ModelRequest(PROMPT, "m", sampling_args=SAMPLING, rollout_id="r")), client.aclose


async def openai(url: str, in_flight: int) -> tuple[Call, Close]:
    import openai as sdk

    client = sdk.AsyncOpenAI(base_url=url, api_key="k", max_retries=0, timeout=600)
    return lambda: client.chat.completions.create(model="m", messages=PROMPT, **SAMPLING), client.close  # type: ignore


async def openai_aiohttp(url: str, in_flight: int) -> tuple[Call, Close]:
    import openai as sdk

    http_client = sdk.DefaultAioHttpClient(timeout=600)
    client = sdk.AsyncOpenAI(base_url=url, api_key="k", max_retries=0, http_client=http_client)
    return lambda: client.chat.completions.create(model="m", messages=PROMPT, **SAMPLING), client.close  # type: ignore


PEERS = {"raw": raw, "ours": ours, "openai": openai, "openai+aiohttp": openai_aiohttp}


async def drive(peer: str, url: str, num_calls: int, in_flight: int) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of ``num_calls`` calls by ``in_flight`` workers, after a warm-up of one call each."""
    call, close = await PEERS[peer](url, in_flight)
    try:
        await asyncio.gather(*(call() for _ in range(min(in_flight, num_calls, 64))))
        left = iter(range(num_calls))

        async def work() -> None:
            for _ in left:
                await call()

        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*(work() for _ in range(in_flight)))
        return time.process_time() - cpu, time.perf_counter() - wall
    finally:
        await close()


def compare(peers: list[str], num_pairs: int, num_calls: int, in_flight: int, delay_s: float) -> None:
    """Print one block of the table."""
    figures: dict[str, list[tuple[float, float]]] = {peer: [] for peer in peers}
    with FakeServer(TEXT, process=True, record=False, delay_s=delay_s) as server:
        for _ in range(num_pairs):
            for peer in peers:
                figures[peer].append(asyncio.run(drive(peer, server.url, num_calls, in_flight)))
    print(f"\n{num_calls} calls, {in_flight} in flight, latency {delay_s:g} s, {num_pairs} pairs")
    for peer in peers:
        cpu_ms = statistics.median(cpu for cpu, _ in figures[peer]) / num_calls * 1e3
        wall_s = statistics.median(wall for _, wall in figures[peer])
        ratios = [
            (cpu / raw_cpu, wall / raw_wall)
            for (cpu, wall), (raw_cpu, raw_wall) in zip(figures[peer], figures[peers[0]], strict=True)
        ]
        cpu_ratio, wall_ratio = (statistics.median(column) for column in zip(*ratios, strict=True))
        print(f"{peer:>16}  CPU {cpu_ms:6.3f} ms/call ({cpu_ratio:5.2f}x)   wall {wall_s:6.2f} s ({wall_ratio:5.2f}x)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--wall", type=int, default=4096, help="concurrency of the latency test; 0 leaves it out")
    parser.add_argument("--peers", default="raw,ours,openai,openai+aiohttp", help="the first is the reference")
    arguments = parser.parse_args()
    peers = arguments.peers.split(",")
    versions = {name: importlib.metadata.version(name) for name in ("aiohttp", "msgspec", "openai")}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    for in_flight in (64, 512):
        compare(peers, arguments.pairs, arguments.calls, in_flight, 0)
    if arguments.wall:
        compare([p for p in peers if p != "openai"], arguments.pairs, arguments.wall, arguments.wall, 1.0)


if __name__ == "__main__":
    main()
