"""P4: resident memory of a long run, and of rollouts that are kept for training.

    python benchmarks/memory.py [--rollouts 20000] [--quick] [--pairs 1] [--store]

Each figure is taken in a process of its own, which is warmed up first by a run of the same concurrency.

* a run: growth of the resident memory over 20,000 single-turn rollouts at concurrency 1,024, states not kept: results
  and journal on, and the rows, which ``evaluate`` returns, apart (``rows MB``: what the same run's rows take, freed);
* kept: growth over 2,000 five-turn rollouts with 256 token ids and log-probabilities per turn whose states are kept,
  as training keeps them, over their bare payload: int32 ids and float32 log-probabilities, each stored once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _contenders import SAMPLING, TOKEN_SAMPLING, Load, environment
from _measure import Report, new_event_loop, options, parse, print_table, raise_open_file_limit, versions
from _server import ENVIRONMENT_TOKENS, PROMPT_TOKENS, TOKENS_PER_TURN, BareServer

from verifiers.clients import OpenAIChatCompletionsClient

RUN_MB, KEPT_MB = 100.0, 120.0
TURNS = 5


def resident_mb() -> float:
    """Memory of this process that is in RAM, in MB, after a collection."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def long_run(url: str, num_rollouts: int, folder: str) -> list[float]:
    """MB by which the process grew after each quarter of the run, in runs of their own so that rows are freed."""
    in_flight = min(1024, num_rollouts // 4)
    client = OpenAIChatCompletionsClient(base_url=url, api_key="k")
    env = environment(Load(num_rollouts, in_flight))

    async def play(number: int, num_examples: int) -> None:
        await env.evaluate(
            client,
            "m",
            SAMPLING,
            num_examples=num_examples,
            max_concurrent=in_flight,
            results_path=Path(folder, str(number)),
            keep_states=False,
        )

    await play(0, num_rollouts // 4)
    before = resident_mb()
    grown = []
    for number in range(1, 5):
        await play(number, num_rollouts // 4)
        grown.append(resident_mb() - before)
    await client.aclose()
    return grown


async def one_run(url: str, num_rollouts: int, folder: str) -> list[float]:
    """MB by which the process grew in one run whose results are held; the loop's lag in it, 99th percentile, in ms."""
    in_flight = min(1024, num_rollouts // 4)
    client = OpenAIChatCompletionsClient(base_url=url, api_key="k")
    env = environment(Load(num_rollouts, in_flight))
    settings = {"max_concurrent": in_flight, "keep_states": False}
    await env.evaluate(client, "m", SAMPLING, num_examples=in_flight, results_path=Path(folder, "0"), **settings)
    before, lags = resident_mb(), []
    sampling = asyncio.create_task(sample_lag(lags))
    results = await env.evaluate(client, "m", SAMPLING, results_path=Path(folder, "1"), **settings)
    sampling.cancel()
    grown = resident_mb() - before
    assert len(results) == num_rollouts
    await client.aclose()
    return [grown, sorted(lags)[int(0.99 * len(lags))]]


async def sample_lag(lags: list[float]) -> None:
    """Append, every 10 ms, by how many ms the event loop came late."""
    while True:
        asked = time.perf_counter()
        await asyncio.sleep(0.01)
        lags.append(1000 * (time.perf_counter() - asked) - 10)


async def kept(url: str, num_rollouts: int, folder: str) -> list[float]:
    """MB by which the process grew with the states of so many five-turn rollouts."""
    client = OpenAIChatCompletionsClient(base_url=url, api_key="k")
    load = Load(num_rollouts, 64, num_turns=TURNS, with_tokens=True)
    env, sampling = environment(load), SAMPLING | TOKEN_SAMPLING
    await env.evaluate(client, "m", sampling, num_examples=min(64, num_rollouts), max_concurrent=64)
    assert len(env.eval_table.take()) == num_rollouts  # the dataset is no part of what a rollout takes
    before = resident_mb()
    results = await env.evaluate(client, "m", sampling, max_concurrent=64)
    grown = resident_mb() - before
    assert len(results["states"]) == num_rollouts
    await client.aclose()
    return [grown]


CASES = {"long run": long_run, "one run": one_run, "kept": kept}


def measured(case: str, url: str, num_rollouts: int) -> list[float]:
    """A case in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", case, "--url", url, "--rollouts", str(num_rollouts)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [float(number) for number in done.stdout.split()]


def child(given: argparse.Namespace) -> None:
    raise_open_file_limit()
    with (
        tempfile.TemporaryDirectory(dir=".", prefix=".benchmark-") as folder,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        print(*runner.run(CASES[given.child](given.url, given.rollouts, folder)))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rollouts", type=int, default=None, help="of the long run; a tenth of them is kept")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parse(parser)
    if given.child:
        child(given)
        return
    num_rollouts = given.rollouts or (400 if given.quick else 20_000)
    report = Report("P4", given)
    print(versions("verifiers", "aiohttp", "msgspec", "uvloop"))
    raise_open_file_limit()
    with BareServer() as server:
        quarters = measured("long run", server.url, num_rollouts)
        held, lag_ms = measured("one run", server.url, num_rollouts)
        (states,) = measured("kept", server.url, num_rollouts // 10)
    tokens = TURNS * TOKENS_PER_TURN + PROMPT_TOKENS + (TURNS - 1) * ENVIRONMENT_TOKENS
    payload = num_rollouts // 10 * (4 * tokens + 4 * TURNS * TOKENS_PER_TURN) / 1e6
    rows = [[f"after run {n} of {num_rollouts // 4} rollouts", f"{mb:.1f}"] for n, mb in enumerate(quarters, 1)]
    rows.append([f"one run of {num_rollouts}, its results held", f"{held:.1f}"])
    rows.append([f"{num_rollouts // 10} five-turn rollouts with 256 log-probs per turn, kept", f"{states:.1f}"])
    rows.append(["their ids and log-probabilities alone", f"{payload:.1f}"])
    print_table("growth of the resident memory", ["", "MB"], rows)
    report.figure(f"growth over {num_rollouts:,} rollouts", quarters[-1], " MB", to_reach=RUN_MB)
    report.figure("growth of one run with its results held", held, " MB", to_reach=RUN_MB)
    report.figure("lag of the event loop in that run, 99th percentile", lag_ms, " ms")
    report.figure(f"{num_rollouts // 10:,} five-turn rollouts kept", states, " MB", to_reach=KEPT_MB)
    report.figure("kept rollouts over their bare payload", states / payload)
    report.close()


if __name__ == "__main__":
    main()
