"""The real gateway of rLLM between our agent flow and a real model: what it records is what the
model sampled.

Run by ``python3 tests/real/peers.py rllm-gateway``. The types of rLLM itself, which is on no
package index, are recorded ones.
"""

import asyncio
import socket
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip(
    "rllm_model_gateway", reason="it is not installed: python3 tests/real/peers.py rllm-gateway"
)

import uvicorn
from rllm_model_gateway import GatewayClient, GatewayConfig, create_app

import verifiers as vf
from support.embedded import serving
from support.integration_envs import right, tool_env
from support.peer_double import install
from verifiers.testing import FakeServer
from verifiers_integrations import rllm
from verifiers_integrations.common import peer_task
from verifiers_trainer.engines.http.endpoint import Address

pytestmark = pytest.mark.real


class Talk(vf.MultiTurnEnv):
    """Says "more" after each turn."""

    async def env_response(self, messages, state):
        return [{"role": "user", "content": "more"}]


@pytest.fixture(autouse=True)
def double(monkeypatch):
    install(monkeypatch, "rllm")


@pytest.fixture
def gateway(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_app(
        GatewayConfig(host="127.0.0.1", port=port, db_path=str(tmp_path / "traces.db"))
    )
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    ends = time.monotonic() + 30
    while not server.started and time.monotonic() < ends:
        time.sleep(0.02)
    with GatewayClient(f"http://127.0.0.1:{port}") as client:
        yield client
    server.should_exit = True
    thread.join(10)


def play(env, gateway, uids, model, calls=2, **sampling):
    """An episode of each uid at once, each through a session of the gateway, which stores ``calls``
    calls of each."""
    flow = rllm.VerifiersAgentFlow(env, sampling)
    rows = env.get_dataset()

    async def play_rollout(number, uid):
        session = gateway.create_session(uid)
        config = SimpleNamespace(
            base_url=gateway.get_session_url(session), model=model, session_uid=uid
        )
        return await flow.arun(
            SimpleNamespace(metadata=peer_task(rows[number % len(rows)])), config
        )

    async def all_():
        return await asyncio.gather(*(play_rollout(number, uid) for number, uid in enumerate(uids)))

    episodes = asyncio.run(all_())
    ends = time.monotonic() + 20
    while True:  # a call is stored after it is answered, and two of a session in any order
        traces = {
            uid: sorted(gateway.get_session_traces(uid), key=lambda trace: trace.timestamp)
            for uid in uids
        }
        if time.monotonic() > ends or all(len(stored) >= calls for stored in traces.values()):
            return episodes, traces
        time.sleep(0.05)


def test_the_gateway_holds_what_the_model_sampled_apart_for_each_session(gateway):
    env = Talk(
        dataset=[{"question": f"say {n}"} for n in range(3)],
        max_turns=2,
        rubric=vf.Rubric(funcs=[lambda state: float(len(state["trajectory"]))]),
    )
    uids = [f"{task}:{sibling}" for task in range(3) for sibling in range(2)]
    with serving(address=Address(api_key="none")) as engine:
        gateway.add_worker(engine.base_url.removesuffix("/v1"))
        episodes, traces = play(
            env, gateway, uids, engine.served_model, max_tokens=6, temperature=1.0
        )
    assert [episode.id for episode in episodes] == uids
    for episode in episodes:
        first, second = traces[episode.id]
        assert (episode.trajectories[0].reward, episode.trajectories[0].steps) == (2.0, [])
        assert episode.termination_reason.name == "MAX_TURNS_EXCEEDED"
        for trace in (first, second):
            assert 0 < len(trace.completion_token_ids) == len(trace.logprobs) <= 6
            assert all(value <= 0 for value in trace.logprobs)
        assert second.messages[-1] == {"role": "user", "content": "more"}
        assert second.messages[-2]["content"] == first.response_message["content"]
        assert len(second.prompt_token_ids) > len(first.prompt_token_ids) > 0


def test_tools_and_the_reward_pass_through_the_gateway(gateway):
    script = [vf.ToolCall("c1", "add", '{"a": 0, "b": 1}'), "1"]
    with FakeServer(script, tokens=True) as worker:
        gateway.add_worker(worker.url.removesuffix("/v1"))
        (episode,), traces = play(tool_env(1, [right]), gateway, ["0:0"], "m", temperature=0.5)
        sent = [hit.json() for hit in worker.hits]
    first, second = traces["0:0"]
    assert (episode.trajectories[0].reward, episode.is_correct) == (1.0, True)
    assert [tool["function"]["name"] for tool in sent[0]["tools"]] == ["add"]
    assert (sent[0]["return_token_ids"], sent[0]["temperature"]) == (True, 0.5)
    assert first.response_message["tool_calls"][0]["function"]["name"] == "add"
    assert (second.messages[-1]["role"], second.messages[-1]["content"]) == ("tool", "1")
    assert len(second.completion_token_ids) == len(second.logprobs) > 0


def test_a_request_that_the_worker_refuses_is_the_rollouts_error(gateway):
    with FakeServer("1", script=[400]) as worker:
        gateway.add_worker(worker.url.removesuffix("/v1"))
        (episode,), _ = play(tool_env(1, [right]), gateway, ["0:0"], "m", calls=0)
    assert (episode.trajectories[0].reward, episode.metrics["vf_unscored"]) == (0.0, 1)
    assert episode.termination_reason.name == "ERROR"
