"""A budget across kill -9 and resume: the bill that the server keeps never exceeds it, with a
thousand in flight."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.storage.journal import read_journal
from verifiers.testing import FakeServer

pytestmark = pytest.mark.slow

READ, SAMPLED, NUM_ROWS, IN_FLIGHT = 300, 100, 2500, 1000
PRICE = 10.0
COST = (READ + SAMPLED) * PRICE / 1e6
LIMIT = 2200 * COST
KILLS = [950, 1150]
"""Requests that the server has seen when a session is killed."""

CHILD = """
import sys
import verifiers as vf

url, folder = sys.argv[1:3]
limit, price, num_rows, in_flight, sampled = map(float, sys.argv[3:])
rows = [{"question": f"row {n}", "answer": ""} for n in range(int(num_rows))]
env = vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([lambda completion: 1.0]))
prices = {"usd_per_million_input_tokens": price, "usd_per_million_output_tokens": price}
options = {"max_concurrent": int(in_flight), "max_tokens": int(sampled), "preflight": False, "keep_states": False}
client = vf.ClientConfig(api_base_url=url, **prices)
try:
    env.evaluate(client, "m", num_examples=-1, results_path=folder, max_cost_usd=limit or None, **options)
except vf.BudgetExhausted as error:
    print(error)
    sys.exit(3)
"""


def counted(request):
    return vf.Response(vf.AssistantMessage("ok"), usage=vf.Usage(READ, SAMPLED))


def raise_open_files():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def start(url: str, folder: Path, limit: float) -> subprocess.Popen[str]:
    numbers = map(str, (limit, PRICE, NUM_ROWS, IN_FLIGHT, SAMPLED))
    words = [sys.executable, "-c", CHILD, url, str(folder), *numbers]
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=raise_open_files,
        env=os.environ,
    )


def sessions(folder: Path, limit: float, kills: list[int]) -> tuple[float, int, str]:
    """Kill a session at each number of requests, then let one end: (bill, most in
    flight, output)."""
    raise_open_files()
    with FakeServer(counted, record=False, delay_s=0.4) as server:
        for after in kills:
            child = start(server.url, folder, limit)
            deadline = time.monotonic() + 60
            while server.count < after and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            child.send_signal(signal.SIGKILL)
            child.communicate()
        child = start(server.url, folder, limit)
        out, err = child.communicate(timeout=120)
        assert child.returncode in (0, 3), err
        return server.count * COST, server.max_in_flight, out


def test_the_bill_stays_below_the_limit_across_kills_with_a_thousand_in_flight(tmp_path):
    bill, in_flight, out = sessions(tmp_path / "run", LIMIT, KILLS)
    assert in_flight >= 950
    assert KILLS[-1] * COST < bill <= LIMIT
    assert "are spent, and the next request may cost" in out
    ledger = list(read_journal(tmp_path / "run/spending.jsonl"))
    unsettled = {row["reserve"] for row in ledger if "reserve" in row} - {
        row.get("settle") for row in ledger
    }
    assert len(unsettled) >= 100  # in flight when it was killed: they count at their most
    assert len(vf.load_results(tmp_path / "run")) * COST <= bill


def test_without_a_limit_the_same_sessions_spend_more(tmp_path):
    """Negative control."""
    bill, _, _ = sessions(tmp_path / "run", 0.0, KILLS)
    assert bill > LIMIT
