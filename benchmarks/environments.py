"""CPU time of one turn in the shipped environments of several turns, model calls free, against a
bare environment.

    python benchmarks/environments.py [--rollouts 1000] [--quick] [--pairs 5] [--store]

A scripted client in the same process responds at once; the rest is the runner, the state, the
environment's work and its reward: ``env.evaluate`` with scoring, without a journal. The bare
environment has as many turns, with a constant reply and reward; the ratio over it is the cost of
the environment itself. To reach: 5,000 turns per second of CPU time, 200 us a turn.

The scripts: wordle is lost after six valid guesses; alphabet-sort (three turns of one to five
names; long: of five) is answered correctly, or with two names exchanged in every turn, which are
then compared character by character.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from _measure import (
    Cost,
    Report,
    Stopwatch,
    interleaved,
    median,
    new_event_loop,
    options,
    parse,
    print_table,
    ratio,
    versions,
)

import verifiers as vf
from verifiers.testing import ScriptedClient

IN_FLIGHT = 64
MAX_US_PER_TURN = 200.0
SIBLINGS = 5
GUESSES = ("words", "plans", "tours", "chips", "games", "bikes")
"""Plurals: valid guesses that are never the secret."""
SIX_TURNS, THREE_TURNS = "bare, 6 turns", "bare, 3 turns"


@dataclass(frozen=True, slots=True)
class Case:
    """An environment of ``num_turns`` turns, a scripted model, and the bare environment to compare
    with."""

    env: vf.Environment
    reply: Callable[[Any], str]
    num_turns: int
    over: str | None


class _Bare(vf.MultiTurnEnv):
    """An environment with a constant reply."""

    def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [vf.UserMessage("Go on.")]


def bare(num_turns: int, num_examples: int) -> Case:
    async def constant() -> float:
        return 1.0

    rows = [
        {"question": "Begin.", "answer": "x", "info": {"number": i}} for i in range(num_examples)
    ]
    env = _Bare(dataset=rows, max_turns=num_turns, rubric=vf.Rubric([constant]))
    return Case(env, lambda request: "Well.", num_turns, None)


def wordle(num_examples: int, **arguments: Any) -> Case:
    env = vf.load_environment(
        "wordle", num_train_examples=1, num_eval_examples=num_examples, **arguments
    )
    replies = [f"<think>\nA thought.\n</think>\n<guess>\n[{word}]\n</guess>" for word in GUESSES]
    return Case(env, lambda request: replies[len(request.prompt) // 2 - 1], len(GUESSES), SIX_TURNS)


def alphabet_sort(num_examples: int, slips: bool, **arguments: Any) -> Case:
    numbers = {"min_turns": 3, "max_turns": 3} | arguments
    env = vf.load_environment(
        "alphabet-sort", num_train_examples=1, num_eval_examples=num_examples, **numbers
    )
    answers: dict[tuple[str, int], str] = {}
    for example in env.eval_table:
        row = example.row
        messages = [row["prompt"][-1]["content"], *row["info"]["follow_ups"]]
        for turn, (message, target) in enumerate(
            zip(messages, row["info"]["targets"], strict=True)
        ):
            tag = "combined_alphabetical_sorted" if turn else "alphabetical_sorted"
            lines = re.sub(r"(?s)^(.*?)\n(.*?)(\n|$)", r"\2\n\1\3", target) if slips else target
            answers[message, turn] = f"<{tag}>\n{lines}\n</{tag}>"
    return Case(
        env,
        lambda request: answers[request.prompt[-1]["content"], len(request.prompt) // 2],
        3,
        THREE_TURNS,
    )


def cases(num_examples: int) -> dict[str, Case]:
    return {
        SIX_TURNS: bare(6, num_examples),
        THREE_TURNS: bare(3, num_examples),
        "wordle": wordle(num_examples),
        "wordle, without think": wordle(num_examples, use_think=False),
        "alphabet-sort, right": alphabet_sort(num_examples, slips=False),
        "alphabet-sort, with slips": alphabet_sort(num_examples, slips=True),
        "alphabet-sort, long, with slips": alphabet_sort(
            num_examples, slips=True, min_names_per_turn=5
        ),
    }


def cost(case: Case, num_examples: int) -> Cost:
    """The cost of five rollouts of each example on a fresh loop, after a few that are
    not counted."""

    async def run(number: int) -> int:
        client = ScriptedClient(case.reply)
        results = await case.env.evaluate(
            client,
            "scripted",
            num_examples=number,
            rollouts_per_example=SIBLINGS,
            max_concurrent=IN_FLIGHT,
            keep_states=False,
        )
        assert not any(results["errors"]), results["errors"][:1]
        return len(client.requests)

    async def measure() -> Cost:
        await run(min(num_examples, IN_FLIGHT))
        with Stopwatch() as watch:
            num_turns = await run(num_examples)
        assert num_turns == SIBLINGS * num_examples * case.num_turns, (num_turns, case.num_turns)
        return watch.cost

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(measure())


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--rollouts", type=int, default=None, help="rollouts of each case, 1,000 at most"
    )
    args = parse(parser)
    num_examples = min(args.rollouts or (50 if args.quick else 1000), 1000) // SIBLINGS
    num_rollouts = num_examples * SIBLINGS
    report = Report("ENV", args)
    print(versions("verifiers", "vf-wordle", "vf-alphabet-sort", "uvloop"))
    all_cases = cases(num_examples)
    runs = {name: lambda case=case: cost(case, num_examples) for name, case in all_cases.items()}
    costs = interleaved(runs, args.pairs)
    rows = []
    for name, case in all_cases.items():
        us = median(costs[name], "cpu_s") / num_rollouts / case.num_turns * 1e6
        over = ratio(costs[name], costs[case.over], "cpu_s") if case.over else 1.0
        rows.append([name, f"{us:.0f}", f"{1e6 / us:,.0f}", f"{over:.2f}"])
    print_table(
        f"{num_rollouts} rollouts, {IN_FLIGHT} in flight, {args.pairs} rounds",
        ["", "CPU us/turn", "turns/s", "over the bare one"],
        rows,
    )
    for (name, case), row in zip(all_cases.items(), rows, strict=True):
        if case.over:
            report.figure(
                f"{name}, CPU time per turn", float(row[1]), " us", to_reach=MAX_US_PER_TURN
            )
            report.figure(
                f"{name}, over the bare environment", ratio(costs[name], costs[case.over], "cpu_s")
            )
    report.close()


if __name__ == "__main__":
    main()
