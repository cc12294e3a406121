"""P3: the cost of a turn in long conversations, and the bytes stored.

    python benchmarks/turns.py [--turns-played 6400] [--quick] [--pairs 5] [--store]

The history is sent again on every turn, so the cost of a turn grows with the turns before it even
in a raw loop. Growth is CPU per turn at 64 turns over that at 5, each for ``env.evaluate`` and for
the raw aiohttp loop; the figure is ours over the raw loop's: what grows beyond sending the history.
The same with 256 token ids and log-probabilities per turn.

Stored bytes are those of the journal with every turn in it (``state_columns=["trajectory"]``) at 64
turns over 32: 2 when they are linear, 4 when each turn repeats the ones before.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from _contenders import FLOOR, OURS, SAMPLING, TOKEN_SAMPLING, Load, cost, environment
from _measure import (
    Cost,
    Report,
    interleaved,
    median,
    new_event_loop,
    options,
    parse,
    print_table,
    ratio,
    versions,
)
from _server import BareServer

from verifiers.clients import OpenAIChatCompletionsClient

FEW, MANY = 5, 64
GROWTH, LINEAR = 1.3, 2.1


def growth(costs: dict[str, list[Cost]], name: str, turns: dict[int, int]) -> float:
    """CPU per turn at many turns over that at few; ``turns``: the total number of turns."""
    return ratio(
        costs[f"{name}, {MANY}"], costs[f"{name}, {FEW}"], "cpu_s", turns[FEW] / turns[MANY]
    )


def compare(
    case: str, with_tokens: bool, num_turns: int, url: str, num_pairs: int, report: Report
) -> None:
    """Print one block and its figure."""
    loads = {
        turns: Load(max(8, num_turns // turns), 32, num_turns=turns, with_tokens=with_tokens)
        for turns in (FEW, MANY)
    }
    totals = {turns: load.num_rollouts * turns for turns, load in loads.items()}
    runs = {
        f"{name}, {turns}": lambda name=name, load=load: cost(
            name, url, load, num_warmup=min(32, load.num_rollouts)
        )
        for name in (FLOOR, OURS)
        for turns, load in loads.items()
    }
    costs = interleaved(runs, num_pairs)
    rows = []
    for name in (FLOOR, OURS):
        per_turn = [
            f"{median(costs[f'{name}, {turns}'], 'cpu_s') / totals[turns] * 1e3:.4f}"
            for turns in loads
        ]
        rows.append([name, *per_turn, f"{growth(costs, name, totals):.2f}"])
    header = ["", *(f"ms/turn at {turns}" for turns in loads), "growth"]
    print_table(f"{case}: about {num_turns} turns each, {num_pairs} pairs", header, rows)
    over = growth(costs, OURS, totals) / growth(costs, FLOOR, totals)
    report.figure(f"{case}, growth over the raw loop's", over, to_reach=GROWTH)


def stored_bytes(url: str, num_turns: int, num_rollouts: int) -> int:
    """The size of a journal of rollouts with all their turns."""

    async def run(folder: str) -> int:
        load = Load(num_rollouts, 8, num_turns=num_turns, with_tokens=True)
        client = OpenAIChatCompletionsClient(base_url=url, api_key="k")
        await environment(load).evaluate(
            client,
            "m",
            SAMPLING | TOKEN_SAMPLING,
            results_path=folder,
            keep_states=False,
            state_columns=["trajectory"],
        )
        await client.aclose()
        return Path(folder, "results.jsonl").stat().st_size

    with (
        tempfile.TemporaryDirectory(dir=".", prefix=".benchmark-") as folder,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        return runner.run(run(folder))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--turns-played", type=int, default=None, help="total turns of each contender and length"
    )
    args = parse(parser)
    num_turns = args.turns_played or (640 if args.quick else 6400)
    report = Report("P3", args)
    print(versions("verifiers", "aiohttp", "msgspec", "uvloop"))
    with BareServer() as server:
        compare("plain turns", False, num_turns, server.url, args.pairs, report)
        if not args.quick:
            compare(
                "turns with 256 log-probs", True, num_turns // 2, server.url, args.pairs, report
            )
        sizes = {
            turns: stored_bytes(server.url, turns, 2 if args.quick else 16)
            for turns in (MANY // 2, MANY)
        }
    print(
        f"\n  stored: {sizes[MANY] / sizes[MANY // 2] / 2:.2f}x the bytes per turn at {MANY} turns"
        f" as at {MANY // 2}"
    )
    report.figure(
        f"stored bytes at {MANY} turns over {MANY // 2}",
        sizes[MANY] / sizes[MANY // 2],
        to_reach=LINEAR,
    )
    report.close()


if __name__ == "__main__":
    main()
