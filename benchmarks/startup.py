"""P5: start-up time of ``import verifiers``, ``vf-eval --help`` and the first request of `vf-eval`.

    python benchmarks/startup.py [--quick] [--pairs 5] [--store]

Each is a fresh interpreter; an interpreter that does nothing is the floor. Wall time is what a user
notices and depends on the load of the machine; CPU time, which the child measures itself from start
to end, does not. The time of the first request is from starting the process to the arrival of its
first completion request at a server on loopback. It includes the check that the endpoint is
reachable.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from _measure import Cost, Report, interleaved, median, options, parse, print_table, ratio

from verifiers.testing import FakeServer

EPILOGUE = (
    "import atexit, os, time; atexit.register(lambda: os.write(2, b'%.6f' % time.process_time()))\n"
)
COMMAND = (
    "import sys; sys.argv = ['vf-eval', *sys.argv[1:]]\nfrom verifiers.cli.evaluate.command import"
    " main; main()"
)
FLOOR = "bare interpreter"
IMPORT, HELP, FIRST_REQUEST = "import verifiers", "vf-eval --help", "vf-eval, first request"
TO_REACH_S = {IMPORT: 0.3, HELP: 0.5, FIRST_REQUEST: 0.6}


def child(code: str, *arguments: str, folder: str | None = None) -> Cost:
    """Run code in a fresh interpreter and wait for its end."""
    started = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-c", EPILOGUE + code, *arguments],
        capture_output=True,
        cwd=folder,
        env=_environment(),
    )
    wall_s = time.monotonic() - started
    if process.returncode:
        raise SystemExit(f"{code} {' '.join(arguments)} failed:\n{process.stderr.decode()}")
    return Cost(float(process.stderr.rpartition(b"\n")[2]), wall_s)


def first_request() -> Cost:
    """Run `vf-eval` to its end; the wall time is that of its first completion request."""
    with (
        tempfile.TemporaryDirectory() as folder,
        FakeServer("<reversed_text>a</reversed_text>") as server,
    ):
        arguments = f"reverse-text -n 1 -r 1 -m scripted -b {server.url} --progress none".split()
        started = time.monotonic()
        cost = child(COMMAND, *arguments, folder=folder)
        return Cost(cost.cpu_s, server.times_s[0] - started)


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "OPENAI", "COV"))
    }


def main() -> None:
    args = parse(options(__doc__))
    report = Report("P5", args)
    runs = {
        FLOOR: lambda: child("pass"),
        IMPORT: lambda: child("import verifiers"),
        HELP: lambda: child(COMMAND, "--help"),
        FIRST_REQUEST: first_request,
    }
    for run in runs.values():  # once, so that every module is compiled and in the page cache
        run()
    costs = interleaved(runs, args.pairs)
    rows = [
        [
            name,
            *(f"{median(costs[name], field) * 1e3:.0f}" for field in ("wall_s", "cpu_s")),
            *(f"{ratio(costs[name], costs[FLOOR], field):.1f}" for field in ("wall_s", "cpu_s")),
        ]
        for name in runs
    ]
    header = ["", "wall ms", "CPU ms", "wall over bare", "CPU over bare"]
    print_table(f"start-up, {args.pairs} pairs (CPU of the whole process)", header, rows)
    for name, to_reach_s in TO_REACH_S.items():
        report.figure(f"{name}, wall", median(costs[name], "wall_s"), " s", to_reach_s)
        report.figure(
            f"{name}, CPU over the bare interpreter", ratio(costs[name], costs[FLOOR], "cpu_s")
        )
    report.close()


if __name__ == "__main__":
    main()
