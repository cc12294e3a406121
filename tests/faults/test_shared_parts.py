"""What several rollouts share (a judge, a pool of connections, a pool of processes, a zygote of
sandboxes): a failure of one of them costs the rollout that met it and no neighbour."""

import asyncio
import json
import math
import os
import signal
import sys
import textwrap

import pytest

import verifiers as vf
from support.isolated import needs_sandbox
from verifiers.clients import ClientConfig, OpenAIChatCompletionsClient, RetryPolicy
from verifiers.sandbox import SandboxSpec, backend_for
from verifiers.sandbox.host import zygotes
from verifiers.testing import Behaviour, FakeServer, ScriptedClient

NUM_ROWS, BAD = 8, 3
ROWS = [{"question": f"row {n};", "answer": str(n)} for n in range(NUM_ROWS)]
FAILURES = {
    "500": Behaviour(500),
    "no HTTP": Behaviour(garbage=b"\0\xff" * 50),
    "reset": Behaviour(reset=True),
    "cut": Behaviour(cut_bytes=40),
    "silence": Behaviour(never=True),
    "no JSON": Behaviour(body="<html>"),
    "too long": Behaviour(body="x" * 300_000),
    "not what its encoding says": Behaviour(headers={"Content-Encoding": "gzip"}, body="plain"),
    "refused": Behaviour(400),
}


def misbehaving(failure):
    """A server that fails the requests of one row in this way; with None, of none."""

    def script(hit):
        is_bad = f"row {BAD};" in json.dumps(hit.json()["messages"])
        return FAILURES[failure] if failure and is_bad else None

    return script


def client_of(server):
    config = ClientConfig(
        api_base_url=server.url, max_connections=2, timeout=1.5, max_response_bytes=200_000
    )
    return OpenAIChatCompletionsClient(config, retry=RetryPolicy(max_retries=0))


def right(completion, answer):
    return float(completion[-1]["content"] == answer)


def number_of(request):
    return str(request.prompt[-1]["content"].split()[1].rstrip(";"))


def check(results, is_bad):
    """The rollout that met the failure, when there is one, is unknown; all others have their reward."""
    for example, reward in zip(results["answer"], results["reward"], strict=True):
        if is_bad and example == str(BAD):
            assert math.isnan(reward)
        else:
            assert reward == 1.0


@pytest.mark.parametrize("failure", [*FAILURES, None])
def test_a_request_that_fails_costs_no_other_of_the_pool_of_connections(failure):
    env = vf.SingleTurnEnv(eval_dataset=ROWS, rubric=vf.Rubric(funcs=[right]))
    with FakeServer(number_of, script=misbehaving(failure)) as server:
        results = env.evaluate(client_of(server), "m", rollouts_per_example=1)
    check(results, failure is not None)
    errors = [error for error in results["error"] if error is not None]
    assert len(errors) == (failure is not None)


@pytest.mark.parametrize("failure", [*FAILURES, None])
def test_a_judge_that_fails_once_costs_no_other_verdict(failure):
    def verdict(request):
        return "<score>1</score>"

    with FakeServer(verdict, script=misbehaving(failure)) as server:
        judge = vf.JudgeRubric(
            judge_client=client_of(server),
            judge_models=["judge"],
            score_range=(0, 1),
            judge_prompt="{question} Was this right: {response}? Write <score>0 or 1</score>.",
        )
        env = vf.SingleTurnEnv(eval_dataset=ROWS, rubric=judge)
        results = env.evaluate(ScriptedClient(number_of), "m", rollouts_per_example=1)
    check(results, failure is not None)
    assert (
        results["error"] == [None] * NUM_ROWS or sum(e is not None for e in results["error"]) == 1
    )


SOURCE = """
    import os, signal, sys
    def score(answer):
        if answer == str({bad}):
            {how}
        return 1.0
"""
ENDS = {
    "exits": "os._exit(3)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "closes its files": "os.closerange(0, 256)",
    "writes beside its result": "os.write(1, b'\\0' * 4096); os._exit(0)",
    "stops": "os.kill(os.getpid(), signal.SIGSTOP)",
    "is too deep": "(lambda f: f(f))(lambda f: f(f))",
    "returns what no process can send": "return (lambda: 0)",
    "nothing": "pass",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_of_a_pool_that_ends_costs_no_other_reward(how, tmp_path, monkeypatch):
    source = textwrap.dedent(SOURCE).format(bad=BAD, how=ENDS[how])
    (tmp_path / "scores_of_a_pool.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    import scores_of_a_pool

    try:
        rubric = vf.Rubric(timeout_s=3.0)
        rubric.add_reward_func(scores_of_a_pool.score, isolated=True)
        env = vf.SingleTurnEnv(eval_dataset=ROWS, rubric=rubric)
        results = env.evaluate(ScriptedClient(number_of), "m", rollouts_per_example=1)
    finally:
        del sys.modules["scores_of_a_pool"]
    check(results, how != "nothing")


def test_a_zygote_that_dies_costs_no_later_session():
    needs_sandbox("bubblewrap")

    async def work():
        backend = await backend_for("bubblewrap")
        for round_number in range(3):
            first = await backend.open(SandboxSpec())
            assert (await first.exec("print(1)", timeout_s=20)).stdout.strip() == "1"
            for zygote in zygotes._zygotes.values():
                os.kill(zygote._process.pid, signal.SIGKILL)
            await asyncio.sleep(0.02 * round_number)
            opened = await asyncio.gather(*(backend.open(SandboxSpec()) for _ in range(4)))
            for later in opened:
                assert (await later.exec("print(2)", timeout_s=20)).stdout.strip() == "2"
                await later.close()
            with pytest.raises(vf.SandboxError):  # its own, which the zygote took with it
                await first.exec("print(3)", timeout_s=20)
            await first.close()

    asyncio.run(work())
