"""An environment served to OpenEnv's clients, and one at the other end of a session."""

import asyncio
import json
import math
import time
from contextlib import contextmanager

import aiohttp
import pytest
from aiohttp import web

import verifiers as vf
from support.env_server import served, served_app
from support.integration_envs import tool_env
from support.small_envs import Talk, single_turn
from verifiers.testing import ScriptedClient


def adding(request):
    """Calls the tool, then says what it gave."""
    last = request.prompt[-1]
    if last["role"] == "tool":
        return last["content"]
    return vf.ToolCall("c1", "add", {"a": int(last["content"].split()[0]), "b": 1})


def remote(url, **parameters):
    parameters.setdefault("num_train_episodes", 0)
    parameters.setdefault("num_eval_episodes", 2)
    return vf.OpenEnvEnv(url, **parameters)


def rows(*indices, split="eval"):
    return [
        {"question": "", "example_id": i, "info": {"reset": {"split": split, "index": i}}}
        for i in indices
    ]


def plain(results):
    """The conversation and the reward of each rollout."""
    return [
        ([dict(m) for m in (*output["prompt"], *output["completion"])], output["reward"])
        for output in results.outputs
    ]


def test_a_served_environment_plays_as_it_does_here():
    with served(tool_env()) as (url, _):
        there = remote(url, eval_dataset=rows(0, 1)).evaluate(
            ScriptedClient(adding), "m", rollouts_per_example=2
        )
    here = tool_env().evaluate(ScriptedClient(adding), "m", rollouts_per_example=2)
    assert there["rewards"] == here["rewards"] == [1.0] * 4
    assert plain(there) == plain(here)


def test_the_tools_of_the_served_environment_reach_the_model():
    client = ScriptedClient(adding)
    with served(tool_env()) as (url, _):
        remote(url, eval_dataset=rows(0)).evaluate(client, "m")
    (tool,) = client.requests[0].tools
    assert (tool["function"]["name"], sorted(tool["function"]["parameters"]["properties"])) == (
        "add",
        ["a", "b"],
    )


def test_sessions_run_at_the_same_time_and_end():
    busy = [0, 0]

    class Slow(Talk):
        async def env_response(self, messages, state, **kwargs):
            busy[0] += 1
            busy[1] = max(busy)
            await asyncio.sleep(0.1)
            busy[0] -= 1
            return [{"role": "user", "content": f"more, {state['prompt'][-1]['content']}"}]

    env = Slow(
        8, max_turns=3, rubric=vf.Rubric(funcs=[lambda state: float(len(state["trajectory"]))])
    )
    with served(env) as (url, server):
        results = remote(url, eval_dataset=rows(*range(8), split="train"), max_turns=5).evaluate(
            ScriptedClient(lambda request: request.prompt[0]["content"]), "m", max_concurrent=8
        )
        assert server.num_sessions == 0
    assert results["rewards"] == [3.0] * 8, results["errors"]
    assert busy[1] >= 4
    for prompt, completion in zip(results["prompts"], results["completions"], strict=True):
        question = prompt[-1]["content"]
        assert [m["content"] for m in completion] == [
            question,
            f"more, {question}",
            question,
            f"more, {question}",
            question,
        ]


def test_a_reward_that_is_unknown_there_is_unknown_here():
    def broken(completion):
        raise RuntimeError("the judge is away")

    with served(single_turn(1, rubric=vf.Rubric(funcs=[broken]))) as (url, _):
        results = remote(url, eval_dataset=rows(0, split="train")).evaluate(
            ScriptedClient(["x"]), "m"
        )
    assert math.isnan(results["rewards"][0])
    assert "the judge is away" in results["errors"][0]["error_chain_repr"]


async def session(url, *messages):
    """The answers of one session to each message in turn; a text is sent as it is."""
    answers = []
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws") as socket:
        for message in messages:
            await socket.send_str(message if isinstance(message, str) else json.dumps(message))
            answers.append(json.loads((await socket.receive(timeout=10)).data))
    return answers


def step(**action):
    return {"type": "step", "data": action}


async def test_the_messages_of_a_session():
    with served(tool_env()) as (url, _):
        reset, tools, called, state, ended, after = await session(
            url,
            {"type": "reset", "data": {"split": "train", "index": 2, "episode_id": "mine"}},
            step(type="list_tools"),
            step(type="call_tool", tool_name="add", arguments={"a": 2, "b": 1}),
            {"type": "state"},
            step(content="3"),
            step(content="4"),
        )
    assert reset["data"]["observation"]["messages"] == [{"role": "user", "content": "2 + 1"}]
    assert (reset["data"]["reward"], reset["data"]["done"]) == (None, False)
    assert tools["data"]["observation"]["tools"] == reset["data"]["observation"]["tools"]
    (answer,) = called["data"]["observation"]["messages"]
    assert (answer["role"], answer["content"]) == ("tool", "3")
    assert state["data"] == {"episode_id": "mine", "step_count": 1, "split": "train", "index": 2}
    assert (ended["data"]["reward"], ended["data"]["done"]) == (1.0, True)
    assert ended["data"]["metadata"]["metrics"]["right"] == 1.0
    assert (after["type"], after["data"]["code"]) == ("error", "EXECUTION_ERROR")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "INVALID_JSON"),
        ({"type": "stop"}, "UNKNOWN_TYPE"),
        (step(content=3), "VALIDATION_ERROR"),
        (step(), "VALIDATION_ERROR"),
        (step(tool_calls=[{}]), "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"split": "dev"}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"split": "train", "index": 99}}, "VALIDATION_ERROR"),
    ],
)
async def test_a_message_that_cannot_be_followed_leaves_the_session_as_it_was(message, code):
    with served(single_turn(1)) as (url, _):
        _, refused, ended = await session(url, {"type": "reset"}, message, step(content="x"))
    assert (refused["type"], refused["data"]["code"]) == ("error", code)
    assert ended["data"]["done"]


async def test_a_client_that_leaves_ends_its_rollout():
    cleaned = []

    class Waiting(Talk):
        @vf.cleanup
        async def clean(self, state):
            cleaned.append(len(state["trajectory"]))

    with served(Waiting(1, max_turns=5)) as (url, server):
        await session(url, {"type": "reset"}, step(content="x"))
        ends = time.monotonic() + 10
        while (server.num_sessions or not cleaned) and time.monotonic() < ends:  # noqa: ASYNC110 - on another thread
            await asyncio.sleep(0.02)
        assert (server.num_sessions, cleaned) == (0, [1])


def test_a_client_waits_while_every_session_is_in_use_and_says_so_in_the_end():
    with served(tool_env(4), max_sessions=1) as (url, _):
        four = remote(url, eval_dataset=rows(0, 1)).evaluate(
            ScriptedClient(adding), "m", rollouts_per_example=2
        )
    assert four["rewards"] == [1.0] * 4
    late = remote("http://127.0.0.1:9", connect_timeout_s=1).evaluate(
        ScriptedClient(["x"]), "m", num_examples=1
    )
    assert math.isnan(late["rewards"][0])
    assert "gave no session" in late["errors"][0]["error_chain_repr"]


async def test_tasks_are_listed_without_their_answers():
    with served(tool_env(3)) as (url, server):
        async with aiohttp.ClientSession() as http:

            async def post(route, **body):
                async with http.post(f"{url}/{server.name}/{route}", json=body) as response:
                    return response.status, await response.json()

            async with http.get(f"{url}/{server.name}/splits") as response:
                splits = await response.json()
            assert [split["name"] for split in splits] == ["train", "eval"]
            assert await post("num_tasks", split="train") == (200, {"num_tasks": 3})
            status, told = await post("task", split="train", index=1)
            assert (status, told["task"]["prompt"][-1]["content"], "answer" in told["task"]) == (
                200,
                "1 + 1",
                False,
            )
            status, told = await post("task_range", split="eval", start=1)
            assert [task["index"] for task in told["tasks"]] == [1]
            assert (await post("task", split="train", index=7))[0] == 400


def test_an_address_without_a_scheme_is_refused():
    with pytest.raises(vf.ConfigError, match="http://"):
        vf.OpenEnvEnv("localhost:8000")


UNREADABLE = {
    "no JSON": "what?",
    "no object": "[1]",
    "data is a list": '{"type": "observation", "data": [1]}',
    "nested": "[" * 100_000,
    "reward is text": '{"data": {"observation": {}, "reward": "high", "done": true}}',
    "reward is NaN": '{"data": {"observation": {}, "reward": NaN, "done": true}}',
    "reward is 1e308": '{"data": {"observation": {}, "reward": 1e308, "done": true}}',
    "reward is a list": '{"data": {"observation": {}, "reward": [1], "done": true}}',
}
REFUSED = '{"type": "error", "data": {"message": "no such move", "code": "VALIDATION_ERROR"}}'


@contextmanager
def answering(step):
    """The address of a server of moves that answers each step with this text."""
    schema = {"action": {"properties": {"move": {"type": "string"}}, "required": ["move"]}}
    begun = {"type": "observation", "data": {"observation": {"text": "go"}, "done": False}}

    async def listen(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            is_step = json.loads(message.data)["type"] == "step"
            await socket.send_str(step if is_step else json.dumps(begun))
        return socket

    async def describe(request):
        return web.json_response(schema)

    app = web.Application()
    app.add_routes([web.get("/schema", describe), web.get("/ws", listen)])
    with served_app(app) as url:
        yield url


@pytest.mark.parametrize("step", UNREADABLE.values(), ids=UNREADABLE)
def test_an_answer_of_the_server_that_cannot_be_read_leaves_the_reward_unknown(step):
    with answering(step) as url:
        results = remote(url, num_eval_episodes=1).evaluate(ScriptedClient(["left"]), "m")
    assert math.isnan(results["rewards"][0])
    assert results["errors"][0]["error"] == "InfraError"
    assert url in results["errors"][0]["message"]


def test_an_action_that_the_server_refuses_is_worth_nothing():
    """Negative control: what the model did wrong is known to be."""
    with answering(REFUSED) as url:
        results = remote(url, num_eval_episodes=1).evaluate(ScriptedClient(["left"]), "m")
    assert results["rewards"] == [0.0]
    assert "no such move" in str(results["completions"][0][-1])
