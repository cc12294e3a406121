"""P1 and P2 against other evaluation frameworks: single-turn rollouts, interleaved.

    python benchmarks/peers.py [--rollouts 400] [--case "64 in flight"] [--cache FOLDER] [--quick]
    [--pairs 5] [--store]

Each peer is installed in a separate virtual environment under ``--cache``
(``~/.cache/verifiers-benchmarks``), with pinned versions, on first use; that takes some minutes and
400 MB each. ``_peers.py`` defines their work. Ours runs ten times as many rollouts, at the same
cost per rollout. ``--quick`` skips peers that are not installed.

The figures are theirs over ours: larger is better; the target is at least 10.
"""

from __future__ import annotations

import statistics
import subprocess
from pathlib import Path

from _contenders import FLOOR, OURS, Load, cost
from _measure import (
    Cost,
    Report,
    interleaved,
    median,
    options,
    parse,
    print_table,
    raise_open_file_limit,
    versions,
)
from _peers import PACKAGES, interpreter, peer_cost
from _server import BareServer

CACHE = Path.home() / ".cache" / "verifiers-benchmarks"
CASES = {
    "64 in flight": (64, 0.0),
    "512 in flight": (512, 0.0),
    "1,024 of one second, 512 at once": (512, 1.0),
}
OUR_FACTOR = 10


def available(folder: Path, quick: bool) -> dict[str, Path]:
    """The interpreters of the peers; prints why a peer cannot be installed and skips it."""
    pythons = {}
    for peer in PACKAGES:
        if quick and not (folder / peer.replace(" ", "-") / "installed").exists():
            print(f"{peer}: not installed in {folder}, left out")
            continue
        try:
            pythons[peer] = interpreter(peer, folder)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{peer}: could not be installed ({error}), left out")
    return pythons


def compare(
    case: str, num_rollouts: int, peers: dict[str, Path], num_pairs: int, report: Report
) -> None:
    """Print one block and its figures: CPU where there is no latency, wall time where there is."""
    in_flight, latency_s = CASES[case]
    field = "wall_s" if latency_s else "cpu_s"
    num_theirs = 2 * in_flight if latency_s else max(in_flight, num_rollouts)
    num_ours = num_theirs if latency_s else OUR_FACTOR * num_theirs
    load = Load(num_ours, in_flight)
    with BareServer(latency_s) as server:
        runs = {
            name: lambda name=name: cost(name, server.url, load, 2 * in_flight)
            for name in (FLOOR, OURS)
        }
        for peer, python in peers.items():
            runs[peer] = lambda peer=peer, python=python: peer_cost(
                python, peer, server.url, num_theirs, in_flight
            )
        costs = interleaved(runs, num_pairs)
    counts = {name: num_ours if name in (FLOOR, OURS) else num_theirs for name in runs}

    def times_ours(theirs: list[Cost], count: int) -> float:
        return statistics.median(
            getattr(their, field) / count / (getattr(our, field) / num_ours)
            for their, our in zip(theirs, costs[OURS], strict=True)
        )

    over = {name: times_ours(costs[name], counts[name]) for name in runs}
    unit = "wall s" if latency_s else "CPU ms/rollout"
    rows = []
    for name in runs:
        value = (
            median(costs[name], field)
            if latency_s
            else median(costs[name], field) / counts[name] * 1e3
        )
        rows.append([name, f"{value:.3f}", f"{over[name]:.1f}"])
    title = f"{case}: {num_ours} rollouts of ours, {num_theirs} of the others, {num_pairs} pairs"
    print_table(title, ["", unit, "over ours"], rows)
    for name in (FLOOR, *peers):
        report.figure(f"{case}, {name} over ours", over[name])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--rollouts", type=int, default=None, help="of each peer in the cases without latency"
    )
    parser.add_argument("--case", choices=CASES, default=None, help="one case only")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help=f"folder of the peers' environments; {CACHE}"
    )
    args = parse(parser)
    raise_open_file_limit()
    cases = [args.case] if args.case else list(CASES)[: 1 if args.quick else None]
    report = Report("peers", args)
    print(versions("verifiers", "aiohttp", "msgspec", "uvloop"))
    peers = available(args.cache, args.quick)
    for case in cases:
        compare(case, args.rollouts or (64 if args.quick else 400), peers, args.pairs, report)
    report.close()


if __name__ == "__main__":
    main()
