"""P4: resident memory of a long run, and of rollouts retained for training.

    python benchmarks/memory.py [--rollouts 20000] [--quick] [--pairs 1] [--store]

Each figure is taken in a separate process, warmed up first by a run of the same concurrency.

* a run: growth of the resident memory over 20,000 single-turn rollouts at concurrency 1,024, states
  not kept: results and journal on; a second figure includes the results that ``evaluate`` returns;
* kept: growth over 2,000 five-turn rollouts with 256 token ids and log-probabilities per turn whose
  states are kept, as training keeps them, over their bare payload: int32 ids and float32
  log-probabilities, each stored once.
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
from _measure import (
    Report,
    new_event_loop,
    options,
    parse,
    print_table,
    raise_open_file_limit,
    versions,
)
from _server import ENVIRONMENT_TOKENS, PROMPT_TOKENS, TOKENS_PER_TURN, BareServer

from verifiers.clients import OpenAIChatCompletionsClient

RUN_MB, KEPT_MB = 100.0, 120.0
TURNS = 5


def resident_mb() -> float:
    """Resident memory of this process in MB, after a garbage collection."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def long_run(url: str, num_rollouts: int, folder: str) -> list[float]:
    """Growth of the process in MB after each quarter, in separate runs so that
    results are freed."""
    in_flight = min(1024, num_rollouts // 4)
    client = OpenAIChatCompletionsClient(base_url=url, api_key="k")
    env = environment(Load(num_rollouts, in_flight))

    async def run(number: int, num_examples: int) -> None:
        await env.evaluate(
            client,
            "m",
            SAMPLING,
            num_examples=num_examples,
            max_concurrent=in_flight,
            results_path=Path(folder, str(number)),
            keep_states=False,
        )

    await run(0, num_rollouts // 4)
    before = resident_mb()
    growth = []
    for number in range(1, 5):
        await run(number, num_rollouts // 4)
        growth.append(resident_mb() - before)
    await client.aclose()
    return growth


async def one_run(url: str, num_rollouts: int, folder: str) -> list[float]:
    """Growth of the process in MB over one run with its results, and the 99th percentile of the
    loop's lag in ms."""
    in_flight = min(1024, num_rollouts // 4)
    client = OpenAIChatCompletionsClient(base_url=url, api_key="k")
    env = environment(Load(num_rollouts, in_flight))
    settings = {"max_concurrent": in_flight, "keep_states": False}
    await env.evaluate(
        client, "m", SAMPLING, num_examples=in_flight, results_path=Path(folder, "0"), **settings
    )
    before, lags = resident_mb(), []
    sampling = asyncio.create_task(sample_lag(lags))
    results = await env.evaluate(client, "m", SAMPLING, results_path=Path(folder, "1"), **settings)
    sampling.cancel()
    growth = resident_mb() - before
    assert len(results) == num_rollouts
    await client.aclose()
    return [growth, sorted(lags)[int(0.99 * len(lags))]]


async def sample_lag(lags: list[float]) -> None:
    """Append the lag of the event loop in ms, every 10 ms."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(0.01)
        lags.append(1000 * (time.perf_counter() - start) - 10)


async def retained_states(url: str, num_rollouts: int, folder: str) -> list[float]:
    """Growth of the process in MB with the states of ``num_rollouts`` five-turn rollouts."""
    client = OpenAIChatCompletionsClient(base_url=url, api_key="k")
    load = Load(num_rollouts, 64, num_turns=TURNS, with_tokens=True)
    env, sampling = environment(load), SAMPLING | TOKEN_SAMPLING
    await env.evaluate(client, "m", sampling, num_examples=min(64, num_rollouts), max_concurrent=64)
    assert len(env.eval_table.take()) == num_rollouts  # so that the dataset is not counted
    before = resident_mb()
    results = await env.evaluate(client, "m", sampling, max_concurrent=64)
    growth = resident_mb() - before
    assert len(results["states"]) == num_rollouts
    await client.aclose()
    return [growth]


CASES = {"long run": long_run, "one run": one_run, "kept": retained_states}


def measure(case: str, url: str, num_rollouts: int) -> list[float]:
    """Run a case in a fresh process."""
    process = subprocess.run(
        [sys.executable, __file__, "--child", case, "--url", url, "--rollouts", str(num_rollouts)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [float(number) for number in process.stdout.split()]


def child(args: argparse.Namespace) -> None:
    raise_open_file_limit()
    with (
        tempfile.TemporaryDirectory(dir=".", prefix=".benchmark-") as folder,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        print(*runner.run(CASES[args.child](args.url, args.rollouts, folder)))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--rollouts", type=int, default=None, help="of the long run; a tenth of them is kept"
    )
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parse(parser)
    if args.child:
        child(args)
        return
    num_rollouts = args.rollouts or (400 if args.quick else 20_000)
    report = Report("P4", args)
    print(versions("verifiers", "aiohttp", "msgspec", "uvloop"))
    raise_open_file_limit()
    with BareServer() as server:
        quarters = measure("long run", server.url, num_rollouts)
        one_run_mb, lag_ms = measure("one run", server.url, num_rollouts)
        (states,) = measure("kept", server.url, num_rollouts // 10)
    tokens = TURNS * TOKENS_PER_TURN + PROMPT_TOKENS + (TURNS - 1) * ENVIRONMENT_TOKENS
    payload = num_rollouts // 10 * (4 * tokens + 4 * TURNS * TOKENS_PER_TURN) / 1e6
    rows = [
        [f"after run {n} of {num_rollouts // 4} rollouts", f"{mb:.1f}"]
        for n, mb in enumerate(quarters, 1)
    ]
    rows.append([f"one run of {num_rollouts}, its results held", f"{one_run_mb:.1f}"])
    rows.append(
        [
            f"{num_rollouts // 10} five-turn rollouts with 256 log-probs per turn, kept",
            f"{states:.1f}",
        ]
    )
    rows.append(["their ids and log-probabilities alone", f"{payload:.1f}"])
    print_table("growth of the resident memory", ["", "MB"], rows)
    report.figure(f"growth over {num_rollouts:,} rollouts", quarters[-1], " MB", to_reach=RUN_MB)
    report.figure("growth of one run with its results held", one_run_mb, " MB", to_reach=RUN_MB)
    report.figure("lag of the event loop in that run, 99th percentile", lag_ms, " ms")
    report.figure(
        f"{num_rollouts // 10:,} five-turn rollouts kept", states, " MB", to_reach=KEPT_MB
    )
    report.figure("kept rollouts over their bare payload", states / payload)
    report.close()


if __name__ == "__main__":
    main()
