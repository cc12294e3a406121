"""Shared by all benchmarks: interleaved runs, medians of ratios, tables, stored figures.

Contenders take turns in one process (A B C, A B C, ...), a ratio is taken within one round and the
median over rounds is reported, because on a shared machine only runs of the same seconds can be
compared. CPU time is the whole process's, threads included, never the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")
PAIRS = 5


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one run, in seconds."""

    cpu_s: float
    wall_s: float


class Stopwatch:
    """``with Stopwatch() as watch: ...``, then ``watch.cost``. Garbage of earlier runs is collected
    first."""

    cost: Cost

    def __enter__(self) -> Stopwatch:
        gc.collect()
        self._cpu_s, self._wall_s = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.cost = Cost(time.process_time() - self._cpu_s, time.perf_counter() - self._wall_s)


def interleaved(
    contenders: Mapping[str, Callable[[], Cost]], num_pairs: int
) -> dict[str, list[Cost]]:
    """The costs of each contender, ``num_pairs`` of them, taken in turn."""
    costs: dict[str, list[Cost]] = {name: [] for name in contenders}
    for _ in range(num_pairs):
        for name, run in contenders.items():
            costs[name].append(run())
    return costs


def median(costs: Sequence[Cost], field: str) -> float:
    """The median of ``cpu_s`` or ``wall_s``."""
    return statistics.median(getattr(cost, field) for cost in costs)


def ratio(costs: Sequence[Cost], floor: Sequence[Cost], field: str, scale: float = 1.0) -> float:
    """The median over rounds of cost over floor, times ``scale`` (the floor's count over that of
    the costs)."""
    return statistics.median(
        scale * getattr(cost, field) / getattr(base, field)
        for cost, base in zip(costs, floor, strict=True)
    )


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One block: names to the left, numbers to the right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for name, *numbers in lines:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        print("  ".join([f"  {name.ljust(widths[0])}", *cells]))


class Report:
    """The figures of one script: each is printed with its target and its difference to the stored
    number.

    Example: ``report.figure("1 turn, 64 in flight, over raw", 2.7, to_reach=2.0)``
    """

    def __init__(self, script: str, args: argparse.Namespace):
        self._script, self._args = script, args
        self._everything: dict[str, dict[str, Any]] = (
            json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        )
        self._stored = self._everything.get(script, {})
        self._figures: dict[str, float] = {}

    def figure(
        self, name: str, value: float, unit: str = "x", to_reach: float | None = None
    ) -> None:
        """Print and remember one number; smaller is better, and ``to_reach`` is the upper bound."""
        self._figures[name] = round(value, 4)
        words = [f"{self._script}: {name}: {value:.2f}{unit}"]
        if to_reach is not None:
            words.append(f"to reach <= {to_reach:g}{unit}: {'yes' if value <= to_reach else 'NO'}")
        if stored := self._stored.get(name):
            before = stored["value"]
            change = f" ({(value / before - 1) * 100:+.0f}%)" if before else ""
            words.append(f"stored {before:.2f}{unit}{change}")
        print("; ".join(words))

    def close(self) -> None:
        """With ``--store``, write the figures to ``results.json``; other stored figures stay."""
        if not self._args.store:
            return
        facts = {
            "pairs": self._args.pairs,
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
        }
        entries = {name: {"value": value, **facts} for name, value in self._figures.items()}
        self._everything[self._script] = self._stored | entries
        RESULTS.write_text(json.dumps(dict(sorted(self._everything.items())), indent=1) + "\n")


def machine() -> str:
    """The machine's cores, architecture and Python version."""
    return (
        f"{len(os.sched_getaffinity(0))} shared cores, {platform.machine()}, Python"
        f" {platform.python_version()}"
    )


def versions(*names: str) -> str:
    """The versions of installed packages, for example ``aiohttp 3.14``; absent ones
    are left out."""
    entries = []
    for name in names:
        try:
            entries.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(entries)


def result_of_job(script: str, job: Mapping[str, Any], stored_as: Path) -> dict[str, Any]:
    """The JSON that ``script --job JOB`` prints last, in a process of its own; the file holds it, and
    is read where it exists already."""
    if not stored_as.exists():
        command = [sys.executable, script, "--job", json.dumps(job)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        stored_as.parent.mkdir(parents=True, exist_ok=True)
        stored_as.write_text(output.splitlines()[-1])
    return json.loads(stored_as.read_text())


def options(description: str | None) -> argparse.ArgumentParser:
    """The options of every script. ``--quick`` checks that the script works; its numbers are not
    meaningful."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one small round: checks the script, not the speed"
    )
    parser.add_argument("--pairs", type=int, default=None, help=f"rounds; {PAIRS}, with --quick 1")
    parser.add_argument("--store", action="store_true", help="store the figures in results.json")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, with ``pairs`` set."""
    args = parser.parse_args()
    if args.quick and args.store:
        parser.error("--quick checks that the script works; its numbers are not worth storing")
    args.pairs = args.pairs or (1 if args.quick else PAIRS)
    return args


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of ``env.evaluate``, for every contender: uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def raise_open_file_limit() -> int:
    """Raise this process's limit of open files to its maximum; return the new limit."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
