"""P6: the cost of one durable journal line under 1,024 concurrent writers, against loops that only
write.

    python benchmarks/journal.py [--rows 20480] [--writers 1024] [--folder .] [--quick] [--pairs 5]
    [--store]

Every round runs each contender once with the same 6 KB lines on the same disk; the table shows
medians over rounds and the ratio to "one write per record": encode a line in the same way, write
it, never flush.

CPU time is the whole process's, the writer thread and 1,024 waiting tasks included.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from _measure import (
    Cost,
    Report,
    Stopwatch,
    interleaved,
    median,
    options,
    parse,
    print_table,
    ratio,
)

from verifiers.runtime.json import encode_row
from verifiers.storage.journal import Journal, read_journal

TO_REACH_US = 150
FLOOR, DURABLE = "one write per record", "journal, durable"


def example_row(key: int) -> dict[str, Any]:
    """A rollout of about 6 KB: two messages, scores and timing."""
    return {
        "example_id": key,
        "prompt": [{"role": "user", "content": "What is the sum of these numbers?\n" * 30}],
        "completion": [
            {"role": "assistant", "content": "First I add the ones, then the tens. " * 125}
        ],
        "reward": 0.5 + key % 7,
        "metrics": {"correct": 1.0, "format": 0.25},
        "timing": {"generation_ms": 812.25, "scoring_ms": 1.5, "total_ms": 813.75},
    }


async def append_all(path: Path, rows: list[dict[str, Any]], num_writers: int) -> None:
    """Append all rows by concurrent writers; each is acknowledged after its fsync."""
    pending = iter(rows)

    async def writer(journal: Journal) -> None:
        for row in pending:
            await journal.append(row)

    with Journal.open(path) as journal:
        await asyncio.gather(*(writer(journal) for _ in range(num_writers)))


def write_journal(path: Path, rows: list[dict[str, Any]], num_writers: int) -> None:
    """Write the journal on a new event loop."""
    asyncio.run(append_all(path, rows, num_writers))


def write_plainly(path: Path, rows: list[dict[str, Any]], flush: bool = False) -> None:
    """One write per record, with ``flush`` also one fdatasync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for row in rows:
        os.write(fd, encode_row(row) + b"\n")
        if flush:
            os.fdatasync(fd)
    os.close(fd)


def into_fresh_file(
    write: Callable[[Path, list[dict[str, Any]]], None], rows: list[dict[str, Any]], folder: str
) -> Cost:
    """The cost of writing ``rows`` to a new file."""
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".benchmark-") as fresh,
        Stopwatch() as watch,
    ):
        write(Path(fresh, "results.jsonl"), rows)
    return watch.cost


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--writers", type=int, default=1024)
    parser.add_argument(
        "--folder", default=".", help="folder of the files; its disk is part of the measurement"
    )
    args = parse(parser)
    rows = [example_row(key) for key in range(args.rows or (1024 if args.quick else 20_480))]
    some_rows = rows[: 20 if args.quick else 500]
    contenders: dict[
        str, tuple[Callable[[Path, list[dict[str, Any]]], None], list[dict[str, Any]]]
    ] = {
        FLOOR: (write_plainly, rows),
        DURABLE: (partial(write_journal, num_writers=args.writers), rows),
        "fdatasync per record": (partial(write_plainly, flush=True), some_rows),
        "journal, one writer": (partial(write_journal, num_writers=1), some_rows),
    }
    with tempfile.TemporaryDirectory(dir=args.folder, prefix=".benchmark-") as once:
        write_journal(Path(once, "results.jsonl"), some_rows, args.writers)
        assert sum(1 for _ in read_journal(Path(once, "results.jsonl"))) == len(some_rows)
    runs = {
        name: partial(into_fresh_file, write, subset, args.folder)
        for name, (write, subset) in contenders.items()
    }
    costs = interleaved(runs, args.pairs)
    table = []
    for name, (_, subset) in contenders.items():
        per_row = [
            f"{median(costs[name], field) / len(subset) * 1e6:.1f}" for field in ("wall_s", "cpu_s")
        ]
        over = [
            f"{ratio(costs[name], costs[FLOOR], field, len(rows) / len(subset)):.2f}"
            for field in ("wall_s", "cpu_s")
        ]
        table.append([name, *per_row, *over])
    title = (
        f"{len(rows)} rows of {len(encode_row(rows[0]))} bytes, {args.writers} writers,"
        f" {args.pairs} pairs"
    )
    print_table(
        title, ["", "wall us/row", "CPU us/row", "wall over floor", "CPU over floor"], table
    )
    report = Report("P6", args)
    report.figure(
        "durable row, wall", median(costs[DURABLE], "wall_s") / len(rows) * 1e6, " us", TO_REACH_US
    )
    report.figure("durable row, wall over one write", ratio(costs[DURABLE], costs[FLOOR], "wall_s"))
    report.figure("durable row, CPU over one write", ratio(costs[DURABLE], costs[FLOOR], "cpu_s"))
    report.close()


if __name__ == "__main__":
    main()
