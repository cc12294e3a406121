"""The real OpenEnv: its client plays our server, ours plays its servers, and its importer takes a
package of ours.

Run by ``python3 tests/real/peers.py openenv``.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip(
    "openenv", reason="OpenEnv is not installed: python3 tests/real/peers.py openenv"
)

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient

import verifiers as vf
from support.env_server import served
from verifiers.testing import ScriptedClient

pytestmark = [pytest.mark.real, pytest.mark.slow]

QUIET = {**os.environ, "HF_HUB_OFFLINE": "1"}


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def right(completion, answer):
    return float(completion[-1]["content"] == answer)


@contextmanager
def running(command, env=None):
    """The first line that a server's command prints, while it runs."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env or QUIET
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def openenv_server(app):
    """The address of an OpenEnv application on a thread."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    ends = time.monotonic() + 60
    while not server.started and time.monotonic() < ends:
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)


# --- its client, our server


def test_its_client_plays_several_turns_in_sessions_at_the_same_time():
    async def play(url, index):
        async with GenericEnvClient(base_url=url) as client:
            first = await client.reset(split="train", index=index)
            (tool,) = first.observation["tools"]
            second = await client.step(
                {"type": "call_tool", "tool_name": tool["name"], "arguments": {"a": index, "b": 1}}
            )
            (answer,) = second.observation["messages"]
            third = await client.step({"content": answer["content"]})
            state = await client.state()
            return [first.done, second.reward, third.done, third.reward, state["step_count"]]

    async def all_(url):
        return await asyncio.gather(*(play(url, index) for index in range(4)))

    rows = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(4)]
    env = vf.ToolEnv(tools=[add], max_turns=3, dataset=rows, rubric=vf.Rubric(funcs=[right]))
    with served(env) as (url, _):
        assert asyncio.run(all_(url)) == [[False, None, True, 1.0, 2]] * 4


def test_the_command_serves_a_package():
    command = [
        sys.executable,
        "-m",
        "verifiers.cli.serve_env",
        "reverse-text",
        "--port",
        "0",
        "--json",
    ]
    with running(command) as process:
        url = json.loads(process.stdout.readline())["url"]

        async def play():
            async with GenericEnvClient(base_url=url) as client:
                asked = await client.reset(split="eval", index=0)
                return asked, await client.step({"content": "no"})

        asked, ended = asyncio.run(play())
        assert asked.observation["messages"][-1]["role"] == "user"
        assert (ended.done, 0.0 <= ended.reward < 1.0) == (True, True)
        ours = vf.OpenEnvEnv(url, num_train_episodes=0, num_eval_episodes=3)
        results = ours.evaluate(ScriptedClient(["no"]), "m")
        assert (len(results["rewards"]), results["errors"]) == (3, [None] * 3)


# --- its servers, our client


class Guess(Action):
    number: int


class Hint(Observation):
    text: str = ""


class Guessing(Environment):
    """Guess a number of the seed: higher, lower, or right."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed=None, episode_id=None, **_):
        self._number = (seed or 0) % 10
        self._state = State(episode_id=episode_id or "", step_count=0)
        return Hint(text="Guess a number from 0 to 9.")

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        if action.number > 99:
            raise RuntimeError("out of range")
        if action.number == self._number:
            return Hint(text="Right.", reward=1.0, done=True)
        return Hint(text="Higher." if action.number < self._number else "Lower.", reward=0.0)

    @property
    def state(self):
        return self._state


def upwards(request):
    """Counts from 0."""
    return str(sum(message["role"] == "assistant" for message in request.prompt))


@pytest.fixture(scope="module")
def guessing():
    with openenv_server(
        create_app(Guessing, Guess, Hint, env_name="guessing", max_concurrent_envs=8)
    ) as url:
        yield url


def test_our_client_plays_its_server(guessing):
    env = vf.OpenEnvEnv(guessing, num_train_episodes=0, num_eval_episodes=4, seed=2, max_turns=10)
    results = env.evaluate(ScriptedClient(upwards), "m", rollouts_per_example=2, max_concurrent=8)
    assert (results["rewards"], results["errors"]) == ([1.0] * 8, [None] * 8)
    assert [len(state["trajectory"]) for state in results["states"]][::2] == [3, 4, 5, 6]
    said = [message["content"] for message in results["completions"][0]]
    assert said == ["0", "Higher.", "1", "Higher.", "2"] or said == [
        "0",
        "Higher.",
        "1",
        "Higher.",
        "2",
        "Right.",
    ]


def test_an_answer_that_is_no_action_ends_the_episode_and_a_failure_of_the_server_is_unknown(
    guessing,
):
    env = vf.OpenEnvEnv(guessing, num_train_episodes=0, num_eval_episodes=1)
    unread = env.evaluate(ScriptedClient(["I think seven"]), "m")
    assert (unread["rewards"], unread["errors"]) == ([0.0], [None])
    failed = env.evaluate(ScriptedClient(["100"]), "m")
    assert str(failed["rewards"]) == "[nan]"
    assert "out of range" in failed["errors"][0]["error_chain_repr"]


def test_a_server_with_one_session_serves_one_rollout_after_the_other():
    with openenv_server(
        create_app(Guessing, Guess, Hint, env_name="guessing", max_concurrent_envs=1)
    ) as url:
        env = vf.OpenEnvEnv(url, num_train_episodes=0, num_eval_episodes=3, max_turns=10)
        results = env.evaluate(ScriptedClient(upwards), "m", max_concurrent=3)
    assert (results["rewards"], results["errors"]) == ([1.0] * 3, [None] * 3)


# --- a package of ours, imported by its command

PACKAGE = Path(__file__).parents[2] / "packages" / "envs" / "reverse-text"


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The address of the server that ``openenv import`` wrote of reverse-text."""
    folder = tmp_path_factory.mktemp("imported")
    command = [
        Path(sys.executable).with_name("openenv"),
        "import",
        PACKAGE,
        "--name",
        "reversing",
        "-o",
        "servers",
    ]
    ran = subprocess.run(
        command, cwd=folder, env=QUIET, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = [sys.executable, "-m", "reversing.server.app", "--port", str(port)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            server, cwd=folder / "servers", env=QUIET, stdout=log, stderr=log
        )
        try:
            ends = time.monotonic() + 120
            while not _listens(port) and process.poll() is None and time.monotonic() < ends:
                time.sleep(0.1)
            assert _listens(port), (folder / "log").read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


def _listens(port):
    with socket.socket() as there:
        return there.connect_ex(("127.0.0.1", port)) == 0


def test_an_imported_package_gives_the_rewards_that_it_gives_here(imported):
    env = vf.load_environment("reverse-text")
    rows = [env.eval_dataset[index] for index in range(2)]
    texts = [rows[0]["answer"], rows[1]["answer"][:-20]]
    answers = [f"<reversed_text>{text}</reversed_text>" for text in texts]

    async def play(index):
        async with GenericEnvClient(base_url=imported) as client:
            first = await client.reset(split="eval", index=index)
            listed = await client.step({"type": "list_tools"})
            submit = {
                "type": "call_tool",
                "tool_name": "submit",
                "arguments": {"completion": answers[index]},
            }
            ended = await client.step(submit)
            return first, listed, ended, await client.state()

    async def play_all():
        return [await play(index) for index in range(2)]

    played = asyncio.run(play_all())
    here = env.generate([dict(row) for row in rows], ScriptedClient(answers), "m", max_concurrent=1)
    for index, (first, listed, ended, state) in enumerate(played):
        prompt = [message["content"] for message in first.observation["metadata"]["prompt"]]
        assert prompt == [message["content"] for message in rows[index]["prompt"]]
        assert [tool["name"] for tool in listed.observation["tools"]] == ["submit"]
        assert (first.done, ended.done, ended.reward) == (False, True, here["rewards"][index])
        assert (state["split"], state["index"]) == ("eval", index)
        metrics = ended.observation["metadata"]["metrics"]
        assert metrics == {name: here["outputs"][index]["metrics"][name] for name in metrics}
    assert here["rewards"][0] == 1.0
    assert 0.0 < here["rewards"][1] < 1.0
