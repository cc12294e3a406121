"""The environment client of verifiers 0.4.0, in an environment of its own, plays on ``vf-serve-env
--wire zmq``.

Run by ``python3 tests/real/peers.py env-client``.
"""

import asyncio
import json
import os
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("zmq.asyncio", reason="pyzmq is not installed: the extra env-server")
if "VF_PEER_PYTHON" not in os.environ:
    pytest.skip(
        "verifiers 0.4.0 is not installed: python3 tests/real/peers.py env-client",
        allow_module_level=True,
    )

import verifiers as vf
from verifiers.testing import FakeServer
from verifiers_integrations.zmq_server import ZmqServer

pytestmark = [pytest.mark.real, pytest.mark.slow]

DRIVER = Path(__file__).with_name("env_client.py")
CLEANED = []


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def right(completion, answer):
    if answer == "unknown":
        raise ValueError("there is no answer")
    return float(completion[-1]["content"] == answer)


class Adding(vf.ToolEnv):
    """One to a number, with a tool."""

    @vf.cleanup
    def note(self, state):
        CLEANED.append(state["prompt"][-1]["content"])


async def playing(request):
    """Calls the tool, then says what it gave; to "late" it says nothing for long."""
    last = request.prompt[-1]
    if last["role"] == "tool":
        return last["content"]
    if last["content"] == "late":
        await asyncio.sleep(60)
    return vf.ToolCall("c1", "add", {"a": int(last["content"].split()[0]), "b": 1})


@contextmanager
def served(env):
    """The address of the server on a thread."""
    loop, addresses, started = asyncio.new_event_loop(), [], threading.Event()
    ended = asyncio.Event()

    def announce(address):
        addresses.append(address)
        started.set()

    serving = ZmqServer(env, "tcp://127.0.0.1:*").serve(announce, ended)
    thread = threading.Thread(target=lambda: loop.run_until_complete(serving), daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()


@pytest.fixture(scope="module")
def got():
    """What that client got, and the same rollouts played here."""
    rows = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(4)]
    env = Adding(tools=[add], max_turns=3, dataset=rows, rubric=vf.Rubric(funcs=[right]))
    with FakeServer(playing, tokens=True) as model:
        with served(env) as address:
            command = [os.environ["VF_PEER_PYTHON"], str(DRIVER), address, model.url]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
            assert ran.returncode == 0, ran.stderr[-3000:]
            ends = time.monotonic() + 30
            while "late" not in CLEANED and time.monotonic() < ends:
                time.sleep(0.05)
        config = vf.ClientConfig(api_base_url=model.url)
        sampling = {"logprobs": True, "extra_body": {"return_token_ids": True}, "temperature": 0.5}
        here = env.evaluate(config, "m", sampling_args=sampling, state_columns=["trajectory"])
    return json.loads(ran.stdout.splitlines()[-1]) | {"here": here}


def test_its_client_gets_our_rollouts_with_their_rewards_and_messages(got):
    assert (got["version"], got["health"]) == ("0.4.0", True)
    here = got["here"]
    assert len(got["rows"]) == 4
    for row, output in zip(got["rows"], here["outputs"], strict=True):
        assert (row["ok"], row["reward"], row["errors"]) == (True, output["reward"], [])
        assert row["metrics"] == output["metrics"]
        messages = [*output["prompt"], *output["completion"]]
        assert row["roles"] == [message["role"] for message in messages]
        assert [text or "" for text in row["texts"]] == [
            message["content"] or "" for message in messages
        ]
        assert (row["turns"], row["tools"], row["is_truncated"]) == (2, ["add"], False)
    assert [row["reward"] for row in got["rows"]] == [1.0] * 4


def test_its_branches_have_the_sampled_token_ids_and_log_probabilities(got):
    for row, output in zip(got["rows"], got["here"]["outputs"], strict=True):
        turns = [step["tokens"] for step in output["trajectory"]]
        last = row["branches"][-1]
        assert last["token_ids"] == [*turns[-1]["prompt_ids"], *turns[-1]["completion_ids"]]
        sampled = [
            logprob for logprob, flag in zip(last["logprobs"], last["sampled"], strict=True) if flag
        ]
        assert sampled[-len(turns[-1]["completion_ids"]) :] == pytest.approx(
            turns[-1]["completion_logprobs"]
        )
        num_sampled = sum(sum(branch["sampled"]) for branch in row["branches"])
        assert num_sampled == sum(len(turn["completion_ids"]) for turn in turns) > 0


def test_an_unknown_reward_has_no_value_and_its_error(got):
    unscored = got["unscored"]
    assert (unscored["ok"], unscored["rewards"], unscored["errors"]) == (
        False,
        {"reward": None},
        ["ScoringError"],
    )
    assert unscored["reward"] == 0  # its own sum leaves the unknown one out
    assert unscored["metrics"]["right"] is None
    assert (got["own"]["reward"], got["own"]["ok"]) == (1.0, True)


def test_a_request_that_cannot_be_followed_fails_alone(got):
    assert "its idx 99 is none of the 4 rows of train" in got["absent"]["failed"]
    assert "the task sets image" in got["image"]["failed"]
    assert got["after"] is True


def test_a_rollout_that_it_abandons_is_cleaned_up(got):
    assert got["cancelled"] is True
    assert CLEANED.count("late") == 1


def test_it_assembles_our_deltas(got):
    assert got["deltas"][0] == ["open", "set", "trace"]
    assert got["deltas"][-1] == ["calls", "errors", "nodes", "set", "trace"]
