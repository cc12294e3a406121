"""``curriculum = "pool"`` over uniform passes, at equal sampled tokens: two tasks, three seeds.

    python benchmarks/trainer_curriculum.py [--tokens 30000] [--seeds 3] [--tasks words sums] [--quick]

Both trainings of a pair start from one warm tiny model (``_tiny_tasks``) and train on the same 192
rows of mixed difficulty, pass after pass, until so many tokens are sampled, those of dropped groups
included: words of two to five letters backwards, or sums of two numbers up to 20. The reward is 1
for the right answer, and groups without a signal are replaced in both. The figures are the share of
right answers of 192 held-out rows, eight replies each, and the share of sampled groups with a signal.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

from _measure import Report, options, parse, print_table
from _tiny_tasks import ALPHABET, Row, sums, train, warm, words

TASKS: dict[str, Callable[[int, int], list[Row]]] = {
    "words": lambda count, seed: words(count, seed, (2, 3, 4, 5)),
    "sums": lambda count, seed: sums(count, seed, 20),
}
ROWS, HELD_OUT, WARM_STEPS = 192, 192, {"words": 70, "sums": 400}
WARM_ROWS = {"words": 1200, "sums": 400}


def exact(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def reply(row: Row, rng: random.Random) -> str:
    """The right answer in four of five rows, else one with another character."""
    answer = str(row["answer"])
    if rng.random() < 0.8:
        return answer
    position = rng.randrange(len(answer))
    letters = ALPHABET if answer.isalpha() else "0123456789"
    return answer[:position] + rng.choice(letters) + answer[position + 1 :]


def pair(task: str, seed: int, tokens: int, warm_steps: int) -> dict[str, dict[str, float]]:
    """What each curriculum reached."""
    from transformers import TrainerCallback

    rows = TASKS[task](ROWS + HELD_OUT, seed)
    policy = warm(TASKS[task](WARM_ROWS[task], seed + 100), reply, seed, warm_steps)
    results = {}
    for curriculum in ("uniform", "pool"):
        env = vf_env(rows)
        lines: list[dict[str, Any]] = []

        class Until(TrainerCallback):
            def __init__(self) -> None:
                self.sampled = 0.0

            def on_log(
                self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any
            ) -> None:
                self.sampled += (logs or {}).get("tokens/completion", 0)
                control.should_training_stop = self.sampled >= tokens

        lines = train(
            policy, env, [Until()], curriculum=curriculum, seed=seed, max_steps=10_000,
            learning_rate=5e-4, logging_steps=1, eval_strategy="steps", eval_steps=25,
            eval_num_examples=HELD_OUT, eval_rollouts_per_example=8, eval_on_start=True,
        )  # fmt: skip
        steps = [line for line in lines if "tokens/completion" in line]
        evaluations = [line["eval_reward"] for line in lines if "eval_reward" in line]
        live, dead = (sum(line[f"groups/{kind}"] for line in steps) for kind in ("live", "dead"))
        results[curriculum] = {
            "before": evaluations[0], "after": evaluations[-1], "signal": live / (live + dead),
            "steps": len(steps), "tokens": sum(line["tokens/completion"] for line in steps),
        }  # fmt: skip
    return results


def vf_env(rows: list[Row]) -> Any:
    import verifiers as vf

    return vf.SingleTurnEnv(
        dataset=rows[:ROWS], eval_dataset=rows[ROWS:], rubric=vf.Rubric([exact])
    )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    args = parse(parser)
    report = Report("trainer_curriculum", args)
    tokens, seeds = (1000, 1) if args.quick else (args.tokens, args.seeds)
    for task in args.tasks[:1] if args.quick else args.tasks:
        pairs = [
            pair(task, seed, tokens, 10 if args.quick else WARM_STEPS[task])
            for seed in range(seeds)
        ]
        rows = [
            [f"seed {seed}, {name}", *(f"{value:.3g}" for value in result.values())]
            for seed, results in enumerate(pairs)
            for name, result in results.items()
        ]
        print_table(task, ["", *pairs[0]["pool"]], rows)
        for number in ("after", "signal"):
            ratios = [r["pool"][number] / max(r["uniform"][number], 1e-9) for r in pairs]
            report.figure(f"{task}, {number}, pool over uniform", statistics.mean(ratios))
    report.close()


if __name__ == "__main__":
    main()
