"""The contenders that run conversations: raw aiohttp, the raw ``openai`` SDK, and ``env.evaluate``.

A contender is opened inside a running loop, warmed up there, and then runs ``num_rollouts``
conversations with ``in_flight`` at once. The raw ones do the minimum of any client: build the body,
send it, decode the response into plain objects, append its message. They score and store nothing;
ours scores with a function, builds every saved rollout and makes it durable.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from _measure import Cost, Stopwatch, new_event_loop

import verifiers as vf
from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.types import ModelRequest, UserMessage

QUESTION = "What is six times seven? " * 10
SYSTEM = "Answer in one sentence."
FOLLOW_UP = "Are you sure? Think about it once more."
SAMPLING = {"temperature": 0.7, "max_tokens": 256}
TOKEN_SAMPLING = {"logprobs": True, "extra_body": {"return_token_ids": True}}


@dataclass(frozen=True, slots=True)
class Load:
    """The work of a contender. ``with_tokens`` requests 256 token ids and log-probabilities per
    turn; with ``with_tools`` the model calls a function on every turn but the last (``num_turns``
    is then 5, as on the server).
    """

    num_rollouts: int
    in_flight: int
    num_turns: int = 1
    with_tokens: bool = False
    with_tools: bool = False


def square(n: int) -> int:
    """The square of a number.

    Args:
        n: The number.
    """
    return n * n


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "square",
            "description": "The square of a number.",
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer", "description": "The number."}},
                "required": ["n"],
            },
        },
    }
]
Say = Callable[[list[dict[str, Any]]], Awaitable[dict[str, Any]]]
"""From a conversation to the model's message."""
Run = Callable[[int], Awaitable[None]]
"""Run a number of conversations."""
Close = Callable[[], Awaitable[object]]


async def raw(url: str, load: Load) -> tuple[Run, Close]:
    """One pooled aiohttp session, the standard ``json`` both ways, dicts out."""
    return await _raw(url, load, lambda body: json.dumps(body).encode(), json.loads)


async def raw_msgspec(url: str, load: Load) -> tuple[Run, Close]:
    """The floor: ``raw`` with the fastest JSON library, also into dicts."""
    return await _raw(url, load, msgspec.json.Encoder().encode, msgspec.json.Decoder().decode)


async def _raw(
    url: str, load: Load, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]
) -> tuple[Run, Close]:
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=load.in_flight),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Content-Type": "application/json", "Authorization": "Bearer k"},
    )
    target = f"{url}/chat/completions"
    extra: dict[str, Any] = {"logprobs": True, "return_token_ids": True} if load.with_tokens else {}
    if load.with_tools:
        extra["tools"] = TOOLS

    async def say(messages: list[dict[str, Any]]) -> dict[str, Any]:
        body = encode({"model": "m", "messages": messages, **SAMPLING, **extra})
        async with session.post(target, data=body) as answer:
            return decode(await answer.read())["choices"][0]["message"]

    return _conversations(say, load), session.close


async def openai(url: str, load: Load) -> tuple[Run, Close]:
    """``AsyncOpenAI`` as its documentation shows it."""
    return _sdk(url, load, None)


async def openai_aiohttp(url: str, load: Load) -> tuple[Run, Close]:
    """``AsyncOpenAI`` on its aiohttp transport."""
    import openai as sdk

    return _sdk(url, load, sdk.DefaultAioHttpClient(timeout=600))


def _sdk(url: str, load: Load, http_client: Any) -> tuple[Run, Close]:
    import openai as sdk

    client = sdk.AsyncOpenAI(
        base_url=url, api_key="k", max_retries=0, timeout=600, http_client=http_client
    )
    sampling: dict[str, Any] = SAMPLING | (TOKEN_SAMPLING if load.with_tokens else {})
    if load.with_tools:
        sampling["tools"] = TOOLS

    async def say(messages: list[dict[str, Any]]) -> dict[str, Any]:
        answer = await client.chat.completions.create(model="m", messages=messages, **sampling)  # type: ignore[arg-type]
        message = answer.choices[0].message
        content: dict[str, Any] = {"role": "assistant", "content": message.content}
        if message.tool_calls:
            content["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        return content

    return _conversations(say, load), client.close


def _conversations(say: Say, load: Load) -> Run:
    """Run conversations by bounded workers."""

    def respond(message: dict[str, Any]) -> list[dict[str, Any]]:
        if not load.with_tools:
            return [{"role": "user", "content": FOLLOW_UP}]
        calls = [
            (call["id"], json.loads(call["function"]["arguments"]))
            for call in message["tool_calls"]
        ]
        return [
            {"role": "tool", "tool_call_id": id, "content": str(square(**arguments))}
            for id, arguments in calls
        ]

    async def converse() -> None:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
        for turn in range(load.num_turns):
            message = await say(messages)
            if turn + 1 < load.num_turns:
                messages = [*messages, message, *respond(message)]

    async def run(num_rollouts: int) -> None:
        remaining = iter(range(num_rollouts))

        async def work() -> None:
            for _ in remaining:
                await converse()

        await asyncio.gather(*(work() for _ in range(min(load.in_flight, num_rollouts))))

    return run


async def transport(url: str, load: Load) -> tuple[Run, Close]:
    """Our client alone, called as an environment calls it, with retries, limiter and validated
    `Response`."""
    client = OpenAIChatCompletionsClient(base_url=url, api_key="k")
    sampling: dict[str, Any] = SAMPLING | (TOKEN_SAMPLING if load.with_tokens else {})
    tools = TOOLS if load.with_tools else None

    async def say(messages: list[dict[str, Any]]) -> dict[str, Any]:
        request = ModelRequest(
            messages,
            "m",
            tools=tools,
            sampling_args=sampling,
            rollout_id="r",
            require_tokens=load.with_tokens,
        )
        return (await client.complete(request)).message

    return _conversations(say, load), client.aclose


async def ours(url: str, load: Load) -> tuple[Run, Close]:
    """``env.evaluate`` as a user calls it, scored and journalled, without returned states."""
    client = OpenAIChatCompletionsClient(base_url=url, api_key="k")
    env = environment(load)
    assert len(env.eval_table) == load.num_rollouts  # reads the dataset, which a rollout does not
    folder = tempfile.TemporaryDirectory(dir=".", prefix=".benchmark-")
    runs = iter(range(1000))
    sampling = SAMPLING | (TOKEN_SAMPLING if load.with_tokens else {})

    async def run(num_rollouts: int) -> None:
        results = await env.evaluate(
            client,
            "m",
            sampling,
            num_examples=num_rollouts,
            max_concurrent=load.in_flight,
            results_path=Path(folder.name, str(next(runs))),
            keep_states=False,
        )
        assert len(results) == num_rollouts
        assert set(results["rewards"]) == {1.0}, results["errors"][:1]

    async def close() -> None:
        folder.cleanup()
        await client.aclose()

    return run, close


def environment(load: Load) -> vf.Environment:
    """One example per rollout, ``load.num_turns`` turns, one reward function."""

    def correct(completion, answer) -> float:
        return float(answer in completion[-1]["content"])

    rows = [
        {"question": QUESTION, "answer": "42", "info": {"number": i}}
        for i in range(load.num_rollouts)
    ]
    parts: dict[str, Any] = {
        "dataset": rows,
        "system_prompt": SYSTEM,
        "rubric": vf.Rubric(funcs=[correct]),
    }
    if load.with_tools:
        return vf.ToolEnv(tools=[square], max_turns=load.num_turns, **parts)
    if load.num_turns == 1:
        return vf.SingleTurnEnv(**parts)
    return _FollowUp(max_turns=load.num_turns, **parts)


class _FollowUp(vf.MultiTurnEnv):
    """An environment with a constant reply."""

    def env_response(self, messages, state, **_):
        return [UserMessage(FOLLOW_UP)]


CONTENDERS: dict[str, Callable[[str, Load], Awaitable[tuple[Run, Close]]]] = {
    "raw aiohttp + msgspec": raw_msgspec,
    "raw aiohttp + json": raw,
    "our client alone": transport,
    "env.evaluate": ours,
    "AsyncOpenAI (aiohttp)": openai_aiohttp,
    "AsyncOpenAI": openai,
}
FLOOR = "raw aiohttp + msgspec"
OURS = "env.evaluate"


def cost(name: str, url: str, load: Load, num_warmup: int) -> Cost:
    """The cost of ``load`` for one contender on a fresh loop, after ``num_warmup`` rollouts that
    are not counted."""

    async def measure() -> Cost:
        run, close = await CONTENDERS[name](url, load)
        try:
            if num_warmup:
                await run(num_warmup)
            with Stopwatch() as watch:
                await run(load.num_rollouts)
            return watch.cost
        finally:
            await close()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(measure())
