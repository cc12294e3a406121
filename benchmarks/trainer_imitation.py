"""Held-out answers after distillation and imitation of a trained model, beside the reinforcement
learning that made it.

    python benchmarks/trainer_imitation.py [--tasks reverse-text] [--seeds 1] [--methods gkd distill
    sft]
                                           [--settings JSON] [--keep FOLDER] [--quick] [--store]

All start from the same warm model. Reinforcement learning has the quickstart's recipe, batches and
learning rate, and makes the teacher. ``gkd`` and ``distill`` sample batches of 128 rollouts, each
used four times for eight updates; ``sft`` imitates the teacher's right ones of one answer to each
training example. Runs are made one after another, with one thread. CPU seconds are those of the
training loop, sampling included; for ``sft`` those of the teacher's sampling are a column of their
own. ``--settings '{"gkd": {"learning_rate": 1e-3}}'`` changes settings; ``--pairs`` is not used.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from _learning import EXACT, changes_of
from _measure import Report, options, parse, print_table, versions
from trainer_learning import result_of, start

OFTEN = {"updates_per_batch": 8, "num_iterations": 4, "rollouts_per_example": 2, "adam_beta2": 0.98}
METHODS: dict[str, dict[str, Any]] = {
    "rl": {"batches": 120, "settings": {"recipe": "best_of_group", "learning_rate": 2e-4}},
    "gkd": {"batches": 10, "settings": {"loss": "gkd", "learning_rate": 8e-4, **OFTEN}},
    "distill": {"batches": 10, "settings": {"loss": "distill", "learning_rate": 3e-4, **OFTEN}},
    "sft": {"batches": 100, "settings": {"loss": "sft", "learning_rate": 1e-3, "min_reward": 1.0}},
}


def run(folder: Path, task: str, seed: int, method: str, args: Any) -> dict[str, Any]:
    """The result of one training; that of reinforcement learning is kept, with its model."""
    home = folder / f"{task}-{seed}"
    home.mkdir(parents=True, exist_ok=True)
    job: dict[str, Any] = {
        "folder": str(home),
        "task": task,
        "seed": seed,
        "steps": 1,
        **METHODS[method],
    }
    job["settings"] = job["settings"] | args.settings.get(method, {})
    if args.quick:
        job["batches"] = 1
    if not (home / "model/config.json").exists():
        result_of(start("warm", Path(sys.executable), job))
    if method == "rl":
        job["save"] = str(home / "teacher")
    elif method == "sft":
        sampled = result_of(
            start("sample", Path(sys.executable), {**job, "teacher": str(home / "teacher")})
        )
        job["settings"] |= {"saved_runs": sampled["folder"]}
        if args.quick:
            job["settings"] |= {"min_reward": 0.0}  # a model of one batch has no right answer
    else:
        job["settings"] |= {"teacher": str(home / "teacher")}
    result = result_of(start("recipe", Path(sys.executable), job))
    result["sampling_s"] = sampled["cpu_s"] if method == "sft" else 0.0
    with (folder / "runs.jsonl").open("a") as file:
        file.write(json.dumps({**job, "method": method, **result}) + "\n")
    return result


def row_of(name: str, result: dict[str, Any]) -> list[str]:
    return [
        name,
        *changes_of(result),
        f"{result['steps']}",
        f"{result['cpu_s']:.0f}",
        f"{result['sampling_s']:.0f}",
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--tasks", nargs="+", choices=EXACT, help="reverse-text; with --quick digits"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=[name for name in METHODS if name != "rl"],
        help="all of them",
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--settings", type=json.loads, default={}, help="settings by method, as JSON"
    )
    parser.add_argument(
        "--keep", type=Path, help="a folder for the results, and the models, which are reused"
    )
    args = parse(parser)
    args.pairs = args.seeds
    tasks = args.tasks or (["digits"] if args.quick else ["reverse-text"])
    methods = args.methods or [name for name in METHODS if name != "rl"]
    report = Report("trainer_imitation", args)
    print(
        versions("verifiers-trainer", "torch", "transformers"), "load", round(os.getloadavg()[0], 1)
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        for task in tasks:
            results: dict[str, dict[str, Any]] = {}
            for seed in range(args.seeds):
                kept = folder / f"{task}-{seed}/rl.json"
                if not kept.exists():
                    result = run(folder, task, seed, "rl", args)
                    kept.write_text(json.dumps(result))
                results[f"rl, seed {seed}"] = json.loads(kept.read_text())
                for method in methods:
                    results[f"{method}, seed {seed}"] = run(folder, task, seed, method, args)
            header = [
                "",
                "reward",
                "exact",
                "pass@8",
                "nats/token",
                "steps",
                "CPU s",
                "teacher's CPU s",
            ]
            print_table(f"{task}, held out", header, [row_of(*entry) for entry in results.items()])
            for method in methods:
                spent = sum(
                    results[f"{method}, seed {seed}"]["cpu_s"] for seed in range(args.seeds)
                )
                of_rl = sum(results[f"rl, seed {seed}"]["cpu_s"] for seed in range(args.seeds))
                report.figure(
                    f"{task}, CPU time of {method} over reinforcement learning",
                    spent / of_rl,
                    to_reach=0.2,
                )
    report.close()


if __name__ == "__main__":
    main()
