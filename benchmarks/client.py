"""The cost of one model call: this package's transport alone, against raw aiohttp loops and the
openai SDK.

    python benchmarks/client.py [--calls 2000] [--quick] [--pairs 5] [--store]

The part of P1 that every client pays: a call through HTTP. Contenders are opened and warmed up
first, which is not counted; CPU time is that of the client's process.
"""

from __future__ import annotations

from _contenders import FLOOR, Load, cost
from _measure import Report, interleaved, median, options, parse, print_table, ratio, versions
from _server import BareServer

PEERS = (FLOOR, "raw aiohttp + json", "our client alone", "AsyncOpenAI (aiohttp)", "AsyncOpenAI")
CASES = {"64 in flight": 64, "512 in flight": 512, "256 log-probs, 64 in flight": 64}


def compare(case: str, load: Load, url: str, num_pairs: int, report: Report) -> None:
    """Print one block and its figure."""
    runs = {
        peer: lambda peer=peer: cost(peer, url, load, num_warmup=2 * load.in_flight)
        for peer in PEERS
    }
    costs = interleaved(runs, num_pairs)
    over = {peer: ratio(costs[peer], costs[FLOOR], "cpu_s") for peer in PEERS}
    rows = [
        [peer, f"{median(costs[peer], 'cpu_s') / load.num_rollouts * 1e3:.3f}", f"{over[peer]:.2f}"]
        for peer in PEERS
    ]
    print_table(
        f"{case}: {load.num_rollouts} calls, {num_pairs} pairs",
        ["", "CPU ms/call", "over the floor"],
        rows,
    )
    report.figure(f"{case}, over the raw loop", over["our client alone"])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--calls", type=int, default=None)
    args = parse(parser)
    num_calls = args.calls or (100 if args.quick else 2000)
    report = Report("client", args)
    print(versions("verifiers", "aiohttp", "msgspec", "openai", "uvloop"))
    with BareServer() as server:
        for case, in_flight in list(CASES.items())[: 1 if args.quick else None]:
            with_tokens = "log-probs" in case
            load = Load(
                num_calls // 5 if with_tokens else num_calls,
                min(in_flight, num_calls),
                with_tokens=with_tokens,
            )
            compare(case, load, server.url, args.pairs, report)
    report.close()


if __name__ == "__main__":
    main()
