"""P6: what one durable journal row costs under 1,024 concurrent writers, beside loops that only write.

    python benchmarks/journal.py [--rows 20480] [--writers 1024] [--rounds 5] [--folder .]

Every round runs each way once, in turn, with the same 6 KB rows on the same disk; the table shows medians over
rounds and each way's ratio to "one write per record": encode a row the same way, write it, never flush.

CPU time is the whole process's, the writer thread and 1,024 waiting tasks included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from verifiers.encoding import encode_row
from verifiers.journal import Journal, read_journal

TO_REACH_US = 150
"""The figure of the performance table, wall time per row."""


def example_row(key: int) -> dict:
    """A rollout of about 6 KB: two messages, scores and timing."""
    return {
        "example_id": key,
        "prompt": [{"role": "user", "content": "What is the sum of these numbers?\n" * 30}],
        "completion": [{"role": "assistant", "content": "First I add the ones, then the tens. " * 125}],
        "reward": 0.5 + key % 7,
        "metrics": {"correct": 1.0, "format": 0.25},
        "timing": {"generation_ms": 812.25, "scoring_ms": 1.5, "total_ms": 813.75},
    }


async def journalled(path: Path, rows: list[dict], num_writers: int) -> None:
    """The journal: every row acknowledged after its fsync."""
    owed = iter(rows)

    async def writer(journal: Journal) -> None:
        for row in owed:
            await journal.append(row)

    with Journal.open(path) as journal:
        await asyncio.gather(*(writer(journal) for _ in range(num_writers)))


def written(path: Path, rows: list[dict]) -> None:
    """One write per record, nothing durable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for row in rows:
        os.write(fd, encode_row(row) + b"\n")
    os.close(fd)


def flushed(path: Path, rows: list[dict]) -> None:
    """One write and one fdatasync per record."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for row in rows:
        os.write(fd, encode_row(row) + b"\n")
        os.fdatasync(fd)
    os.close(fd)


def per_row_us(run: Callable[[Path, list[dict]], object], rows: list[dict], folder: str) -> tuple[float, float]:
    """(wall, CPU) microseconds per row of one run into a fresh file."""
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        wall, cpu = time.perf_counter(), time.process_time()
        run(Path(fresh, "results.jsonl"), rows)
        return (time.perf_counter() - wall) / len(rows) * 1e6, (time.process_time() - cpu) / len(rows) * 1e6


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=20_480)
    options.add_argument("--writers", type=int, default=1024)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--folder", default=".", help="where the files go; the disk is part of what is measured")
    given = options.parse_args()
    rows = [example_row(key) for key in range(given.rows)]
    ways: dict[str, tuple[Callable, list[dict]]] = {
        "one write per record": (written, rows),
        "journal, durable": (lambda path, some: asyncio.run(journalled(path, some, given.writers)), rows),
        "fdatasync per record": (flushed, rows[:500]),
        "journal, one writer": (lambda path, some: asyncio.run(journalled(path, some, 1)), rows[:500]),
    }
    with tempfile.TemporaryDirectory(dir=given.folder) as once:
        asyncio.run(journalled(Path(once, "results.jsonl"), rows[:500], given.writers))
        assert sum(1 for _ in read_journal(Path(once, "results.jsonl"))) == len(rows[:500])
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(given.rounds):
        for name, (run, some) in ways.items():
            measured[name].append(per_row_us(run, some, given.folder))
    base = measured["one write per record"]
    print(f"{given.rows} rows of {len(json.dumps(rows[0]))} bytes, {given.writers} writers, {given.rounds} rounds")
    print(f"{'':24}{'wall us/row':>12}{'CPU us/row':>12}{'wall ratio':>12}{'CPU ratio':>12}")
    for name, pairs in measured.items():
        wall, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios = [(w / w0, c / c0) for (w, c), (w0, c0) in zip(pairs, base, strict=True)]
        wall_ratio, cpu_ratio = (statistics.median(column) for column in zip(*ratios, strict=True))
        print(f"{name:24}{wall:12.1f}{cpu:12.1f}{wall_ratio:12.2f}{cpu_ratio:12.2f}")
    reached = statistics.median(wall for wall, _ in measured["journal, durable"])
    verdict = "yes" if reached < TO_REACH_US else "NO"
    print(f"P6: {reached:.0f} us per durable row, to reach < {TO_REACH_US} us: {verdict}")


if __name__ == "__main__":
    main()
