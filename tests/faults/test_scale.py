"""Promise: memory is bounded by concurrency, not by the number of rollouts; open files by what the
process may open.

Every measurement is of a process of its own.
"""

import math

import pytest

from verifiers.testing import FakeServer

ENVIRONMENT = """
import asyncio, resource, sys, time
from itertools import chain
import verifiers as vf
from verifiers.storage.journal import Journal
from verifiers.runs.plan import Plan
from verifiers.runs.rollout import RunContext, generate_and_score
from verifiers.runs.runner import Runner
from verifiers.testing import ScriptedClient

def exact(completion, answer):
    return float(completion[-1]["content"] == answer)

def megabytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 1e6

def environment(count):
    rows = [{"question": f"{n} + 1", "answer": "ok"} for n in range(count)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[exact]))

class Model(ScriptedClient):
    "Remembers no request."
    def __init__(self):
        super().__init__("ok", delay_s=0.001)
        self.requests = Forgetful()

class Forgetful(list):
    def append(self, request):
        pass

count, path = int(sys.argv[1]), sys.argv[2]
env, siblings = environment(500), count // 500
env.evaluate(Model(), "m", keep_states=False, max_concurrent=64)  # what is imported and cached at first
before, began = megabytes(), time.monotonic()
"""

EVALUATE = """
results = env.evaluate(Model(), "m", keep_states=False, max_concurrent=1024, results_path=path,
                       rollouts_per_example=siblings)
assert results.metadata.avg_reward == 1.0 and len(results) == count
print(megabytes() - before, time.monotonic() - began)
"""

TO_DISK_ALONE = """
import json
class Sink:
    "Each finished rollout goes to the journal and nowhere else."
    most = 0
    async def store(self, jobs, states):
        await journal.append({"reward": states[0]["reward"], "completion": states[0]["completion"]})
        self.most = max(self.most, megabytes()) if jobs[0].position % 100 == 0 else self.most
    def complete(self, jobs, states):
        pass

async def main():
    sink = Sink()
    await Runner(env, RunContext(Model(), "m"), sink, concurrency=1024).run(
        chain.from_iterable(Plan(env.eval_table, [siblings] * 500).groups())
    )
    print(sink.most - before, time.monotonic() - began)

with Journal.open(path) as journal:
    asyncio.run(main())
"""

A_TASK_EACH = """
async def main():
    places, context = asyncio.Semaphore(1024), RunContext(Model(), "m")
    async def one(job):
        async with places:
            return await generate_and_score(env, job, context)
    jobs = list(chain.from_iterable(Plan(env.eval_table, [siblings] * 500).groups()))
    tasks = [asyncio.ensure_future(one(job)) for job in jobs]
    await asyncio.gather(*tasks)
    print(megabytes() - before, time.monotonic() - began)

asyncio.run(main())
"""


def measure(warm, folder, count, code):
    """(megabytes more than before, seconds)."""
    ended = warm.run(ENVIRONMENT + code, count, folder / f"{count}")
    assert ended.lines, ended.stderr
    grown, took = ended.lines[-1].split()
    return float(grown), float(took)


@pytest.mark.parametrize(
    ("few", "many", "limit_s"),
    [
        (2_000, 6_000, math.inf),
        pytest.param(5_000, 20_000, 60.0, marks=pytest.mark.slow, id="full size"),
    ],
)
def test_many_rollouts_at_concurrency_1024_need_no_more_memory_than_few(
    warm, tmp_path, few, many, limit_s
):
    first, _ = measure(warm, tmp_path, few, TO_DISK_ALONE)
    second, took_s = measure(warm, tmp_path, many, TO_DISK_ALONE)
    assert second < 100
    assert second - first < 10
    assert took_s < limit_s


@pytest.mark.parametrize(
    "count", [4_000, pytest.param(20_000, marks=pytest.mark.slow, id="full size")]
)
def test_a_saved_evaluation_keeps_its_rows_and_nothing_of_its_conversations(warm, tmp_path, count):
    """What is returned is there: about 4 KB for a short row, and less than 100 MB for 20,000."""
    grown, took_s = measure(warm, tmp_path, count, EVALUATE)
    assert grown < 20 + count * 0.004
    assert took_s < 60


def test_with_a_task_each_memory_grows_with_the_plan(warm, tmp_path):
    """Negative control."""
    few, _ = measure(warm, tmp_path, 2_000, A_TASK_EACH)
    many, _ = measure(warm, tmp_path, 6_000, A_TASK_EACH)
    assert many - few > 10


# --- open files -----------------------------------------------------------------------------------

FEW_FILES = """
import os, resource, sys
import verifiers as vf
import verifiers.clients.http as http

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
url, num_held, guarded = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "guarded"
held = [open(os.devnull) for _ in range(num_held)]
if not guarded:
    http.open_file_limit = lambda: 20_000
rows = [{"question": str(n)} for n in range(1500)]
env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[lambda answer: 1.0]))
results = env.evaluate(vf.ClientConfig(api_base_url=url, max_retries=0), "scripted", max_concurrent=1024,
                       keep_states=False, abort_after=0, on_log=print)
print({error.message for error in results["errors"] if error}, file=sys.stderr)
print(results["rewards"].count(1.0))
"""


@pytest.mark.parametrize("num_held", [0, 100], ids=["nothing else open", "100 files open"])
def test_with_256_open_files_a_concurrency_of_1024_is_clamped_with_a_sentence_and_nothing_fails(
    warm, num_held
):
    with FakeServer("x", process=True, delay_s=0.02) as server:
        ended = warm.run(FEW_FILES, server.url, num_held, "guarded")
        assert ended.lines[-1] == "1500", ended.stderr
        assert (
            "rollouts run at a time instead of 1024: this process may open 256 files"
            in ended.lines[0]
        )
        assert "ulimit -n" in ended.lines[0]
        assert 8 <= int(ended.lines[0].split()[0]) <= 256 - 64 - num_held


@pytest.mark.slow
def test_without_the_clamp_the_files_run_out_in_the_middle(warm):
    """Negative control."""
    with FakeServer("x", process=True, delay_s=0.02) as server:
        ended = warm.run(FEW_FILES, server.url, 0, "not guarded")
    assert ended.returncode != 0 or int(ended.lines[-1]) < 1500
    assert "Too many open files" in ended.stderr
