"""P2: wall time of thousands of rollouts that each wait one second for the model, against raw
loops.

    python benchmarks/latency.py [--case "4,096 at once"] [--quick] [--pairs 5] [--store]

Every contender starts without open connections, and all of its work is timed. The smaller case has
an ideal of two seconds and includes the SDK, which is too slow for the larger one.
"""

from __future__ import annotations

from dataclasses import dataclass

from _contenders import FLOOR, OURS, Load, cost
from _measure import (
    Report,
    interleaved,
    median,
    options,
    parse,
    print_table,
    raise_open_file_limit,
    ratio,
    versions,
)
from _server import BareServer

LATENCY_S = 1.0
TO_REACH = 1.2


@dataclass(frozen=True, slots=True)
class Case:
    """A load and its contenders; the first one is the floor."""

    load: Load
    contenders: tuple[str, ...]


CASES = {
    "4,096 at once": Case(Load(4096, 4096), (FLOOR, OURS)),
    "1,024, 512 at once": Case(
        Load(1024, 512), (FLOOR, OURS, "AsyncOpenAI (aiohttp)", "AsyncOpenAI")
    ),
}
QUICK = Case(Load(128, 128), (FLOOR, OURS))


def compare(name: str, case: Case, url: str, num_pairs: int, report: Report) -> None:
    """Print one block and its figure."""
    runs = {
        peer: lambda peer=peer: cost(peer, url, case.load, num_warmup=0) for peer in case.contenders
    }
    costs = interleaved(runs, num_pairs)
    rows = [
        [
            peer,
            f"{median(costs[peer], 'wall_s'):.2f}",
            f"{ratio(costs[peer], costs[FLOOR], 'wall_s'):.2f}",
            f"{median(costs[peer], 'cpu_s'):.2f}",
        ]
        for peer in case.contenders
    ]
    ideal_s = case.load.num_rollouts / case.load.in_flight * LATENCY_S
    title = (
        f"{name}: {case.load.num_rollouts} rollouts of {LATENCY_S:g} s, ideal {ideal_s:g} s,"
        f" {num_pairs} pairs"
    )
    print_table(title, ["", "wall s", "over the floor", "CPU s"], rows)
    over_floor = ratio(costs[OURS], costs[FLOOR], "wall_s")
    report.figure(f"{name}, wall over the raw loop", over_floor, to_reach=TO_REACH)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--case", choices=CASES, default=None, help="one case only")
    args = parse(parser)
    cases = (
        {args.case: CASES[args.case]}
        if args.case
        else {"128 at once": QUICK}
        if args.quick
        else CASES
    )
    limit = raise_open_file_limit()
    report = Report("P2", args)
    print(versions("verifiers", "aiohttp", "msgspec", "openai", "uvloop") + f", {limit} open files")
    with BareServer(LATENCY_S) as server:
        for name, case in cases.items():
            compare(name, case, server.url, args.pairs, report)
    report.close()


if __name__ == "__main__":
    main()
