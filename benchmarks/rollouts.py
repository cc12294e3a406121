"""P1: CPU time of one rollout in the steady state, against raw loops that only call the model.

    python benchmarks/rollouts.py [--rollouts 10000] [--case "1 turn, 64 in flight"] [--quick]
    [--pairs 5] [--store]

The server answers at once. Contenders take turns in one process; each opens its connections and
runs a warm-up first, which is not counted. Ours is the whole of ``env.evaluate``: plan, states,
model calls, scoring, durable journal and the final results. CPU time is that of the client's
process with all its threads.

Cases with more work per rollout run fewer of them, and the SDK runs a fifth, at the same cost per
rollout. The examples are all different, one rollout each, so siblings share no preparation of the
dataset.
"""

from __future__ import annotations

from dataclasses import replace

from _contenders import CONTENDERS, FLOOR, OURS, Load, cost
from _measure import Report, interleaved, median, options, parse, print_table, ratio, versions
from _server import BareServer

CASES = {
    "1 turn, 64 in flight": Load(10_000, 64),
    "1 turn, 512 in flight": Load(10_000, 512),
    "5 turns, 64 in flight": Load(2_000, 64, num_turns=5),
    "5 turns with tools, 64 in flight": Load(2_000, 64, num_turns=5, with_tools=True),
    "1 turn with 256 log-probs, 64 in flight": Load(2_000, 64, with_tokens=True),
    "5 turns with 256 log-probs, 64 in flight": Load(500, 64, num_turns=5, with_tokens=True),
}
OVER_FLOOR, OVER_SDK = 2.0, 1.0


def share(name: str, load: Load) -> Load:
    """A fifth of the rollouts for the SDK, whose cost per call is ten times as high
    and as steady."""
    if "OpenAI" in name:
        return replace(load, num_rollouts=max(load.in_flight, load.num_rollouts // 5))
    return load


def compare(case: str, load: Load, url: str, num_pairs: int, report: Report) -> None:
    """Print one block and its figures."""
    loads = {name: share(name, load) for name in CONTENDERS}
    runs = {
        name: lambda name=name: cost(
            name, url, loads[name], min(loads[name].num_rollouts, 2 * load.in_flight)
        )
        for name in CONTENDERS
    }
    costs = interleaved(runs, num_pairs)
    ratios = {
        name: ratio(
            costs[name], costs[FLOOR], "cpu_s", load.num_rollouts / loads[name].num_rollouts
        )
        for name in costs
    }
    rows = [
        [
            name,
            f"{median(costs[name], 'cpu_s') / loads[name].num_rollouts * 1e3:.3f}",
            f"{ratios[name]:.2f}",
        ]
        for name in costs
    ]
    title = (
        f"{case}: {load.num_rollouts} rollouts (SDK: {loads['AsyncOpenAI'].num_rollouts}),"
        f" {num_pairs} pairs"
    )
    print_table(title, ["", "CPU ms/rollout", "over the floor"], rows)
    report.figure(f"{case}, over the raw loop", ratios[OURS], to_reach=OVER_FLOOR)
    over_json = ratio(costs[OURS], costs["raw aiohttp + json"], "cpu_s")
    report.figure(f"{case}, over the raw loop with json", over_json, to_reach=OVER_FLOOR)
    for peer in ("AsyncOpenAI (aiohttp)", "AsyncOpenAI"):
        scale = loads[peer].num_rollouts / load.num_rollouts
        report.figure(
            f"{case}, over {peer}",
            ratio(costs[OURS], costs[peer], "cpu_s", scale),
            to_reach=OVER_SDK,
        )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--rollouts", type=int, default=None, help="rollouts of one turn; other cases in proportion"
    )
    parser.add_argument("--case", choices=CASES, default=None, help="one case only")
    args = parse(parser)
    num_rollouts = args.rollouts or (200 if args.quick else 10_000)
    cases = [args.case] if args.case else list(CASES)[: 1 if args.quick else None]
    report = Report("P1", args)
    print(versions("verifiers", "aiohttp", "msgspec", "openai", "uvloop"))
    with BareServer() as server:
        for case in cases:
            load = CASES[case]
            load = replace(
                load, num_rollouts=max(load.in_flight, load.num_rollouts * num_rollouts // 10_000)
            )
            compare(case, load, server.url, args.pairs, report)
    report.close()


if __name__ == "__main__":
    main()
