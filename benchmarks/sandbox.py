"""P15: the cost of a sandbox: start to first result, one call in a session, memory of many sessions
at once.

    python benchmarks/sandbox.py [--backend bubblewrap] [--sessions 200] [--quick] [--pairs 5]
    [--store]

The reference, interleaved, is a plain child interpreter that imports the same packages and prints
one result, without isolation. The zygote is started before; its start is reported separately, since
it is paid once per process. The figures are stored in ``results_sandbox.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import _measure
from _measure import Report, options, parse, print_table

from verifiers.sandbox import Sandbox, SandboxBackend, SandboxSpec, backend_for
from verifiers.sandbox.guest.supervisor import descendants

_measure.RESULTS = Path(__file__).with_name("results_sandbox.json")
PACKAGES = ("numpy", "sympy")
SPEC = SandboxSpec(packages=PACKAGES)
FIRST = "import numpy, sympy\nsympy.Integer(6) * 7"
START_MS, CALL_US, MEMORY_GB = 60, 1e6 / 3000, 8
TIMEOUT_S = 300.0


async def first_result(backend: SandboxBackend) -> float:
    """Milliseconds from ``open`` to a result that uses the packages."""
    start = time.perf_counter()
    sandbox = await backend.open(SPEC)
    result = await sandbox.exec(FIRST, timeout_s=TIMEOUT_S)
    seconds = time.perf_counter() - start
    await sandbox.close()
    assert result.value == "42", result
    return seconds * 1e3


def plain_interpreter() -> float:
    """Milliseconds to the same result from ``python -c``."""
    start = time.perf_counter()
    code = "import numpy, sympy\nprint(sympy.Integer(6) * 7)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "42\n"
    return (time.perf_counter() - start) * 1e3


async def call_us(sandbox: Sandbox, num_calls: int) -> float:
    """Microseconds of one ``1+1``, run sequentially."""
    start = time.perf_counter()
    for _ in range(num_calls):
        result = await sandbox.exec("1+1", timeout_s=TIMEOUT_S)
    assert result.value == "2"
    return (time.perf_counter() - start) / num_calls * 1e6


def memory_below_mb() -> float:
    """Memory of all descendant processes in MB; shared pages counted once."""
    total_kb = 0
    for pid in descendants(os.getpid()):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total_kb += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total_kb / 1024


async def many(backend: SandboxBackend, num_sessions: int) -> tuple[float, float, float]:
    """Total MB of ``num_sessions`` concurrent sessions, seconds to open them, seconds to compute in
    each."""
    start = time.perf_counter()
    sandboxes = await asyncio.gather(*(backend.open(SPEC) for _ in range(num_sessions)))
    opened = time.perf_counter()
    code = "import sympy\nx = sympy.symbols('x')\nstr(sympy.integrate(x**2 * sympy.sin(x), x))"
    results = await asyncio.gather(
        *(sandbox.exec(code, timeout_s=TIMEOUT_S) for sandbox in sandboxes)
    )
    computed = time.perf_counter()
    assert all(result.value == "'-x**2*cos(x) + 2*x*sin(x) + 2*cos(x)'" for result in results), (
        results[0]
    )
    memory_mb = memory_below_mb()
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
    return memory_mb, opened - start, computed - opened


async def measure(args: argparse.Namespace) -> None:
    backend = await backend_for(args.backend)
    start = time.perf_counter()
    await first_result(backend)
    cold_s = time.perf_counter() - start
    starts, plain, calls = [], [], []
    sandbox = await backend.open(SPEC)
    for _ in range(args.pairs):
        starts.append(
            statistics.median([await first_result(backend) for _ in range(3 if args.quick else 20)])
        )
        plain.append(
            statistics.median([await asyncio.to_thread(plain_interpreter) for _ in range(2)])
        )
        calls.append(await call_us(sandbox, 100 if args.quick else 5000))
    await sandbox.close()
    memory_mb, open_s, compute_s = await many(backend, args.sessions or (4 if args.quick else 200))
    num_sessions = args.sessions or (4 if args.quick else 200)
    table = [
        ["first use of the packages in this process, s", f"{cold_s:.2f}"],
        ["start to first result, ms", f"{statistics.median(starts):.1f}"],
        ["plain interpreter, ms", f"{statistics.median(plain):.1f}"],
        ["one call, us", f"{statistics.median(calls):.0f}"],
        [f"{num_sessions} sessions that computed, MB each", f"{memory_mb / num_sessions:.1f}"],
        [f"opening {num_sessions} at once, s", f"{open_s:.2f}"],
        ["an integral in each, s", f"{compute_s:.2f}"],
    ]
    print_table(f"{args.backend}, {', '.join(PACKAGES)}, {args.pairs} pairs", ["", "median"], table)
    report = Report("P15", args)
    over = statistics.median(ours / theirs for ours, theirs in zip(starts, plain, strict=True))
    report.figure("start to first result over a plain interpreter", over)
    report.figure("start to first result", statistics.median(starts), " ms", START_MS)
    report.figure("one call", statistics.median(calls), " us", round(CALL_US))
    report.figure(f"{num_sessions} sessions", memory_mb / 1024, " GB", MEMORY_GB)
    report.close()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--sessions", type=int, default=None)
    asyncio.run(measure(parse(parser)))


if __name__ == "__main__":
    main()
