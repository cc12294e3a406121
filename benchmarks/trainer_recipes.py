"""Held-out answers after each recipe, at equal sampled batches, from the same warm model.

    python benchmarks/trainer_recipes.py [--tasks reverse-text curriculum-sums] [--recipes NAME ...] [--seeds 2]
                                         [--batches 100] [--keep FOLDER] [--quick] [--store]

Every recipe starts from the model that ``trainer_learning.py`` starts from, samples ``--batches`` batches of 128
rollouts, and has beside its own settings those of the quickstart: a warm-up of the learning rate of 8 % and a linear
decay, here from 3e-4, the same engine, one thread. Runs are made one after another. Each answers every held-out
example eight times before and after training: mean reward, share of right answers with its standard error by example,
pass@8, and the nats per token, which estimate the entropy of the policy. A recipe that narrows the model has a falling
pass@8.

``--settings '{"learning_rate": 1.5e-4}'`` changes settings of all of them; ``--pairs`` is not used.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _learning import EXACT, changes_of
from _measure import Report, options, parse, print_table, versions
from trainer_learning import result_of, start

from verifiers_trainer.settings.recipes import RECIPES

QUICK = ("policy_gradient", "best_of_group")


def run(args: Any, task: str, seed: int, recipe: str, folder: Path) -> dict[str, Any]:
    """The result of one training, by ``_learning.recipe``."""
    job = {
        "folder": str(folder / f"{task}-{seed}"), "task": task, "seed": seed, "steps": 1, "batches": args.batches,
        "settings": {"recipe": recipe, **args.settings},
    }  # fmt: skip
    Path(job["folder"]).mkdir(parents=True, exist_ok=True)
    if not (Path(job["folder"]) / "model" / "config.json").exists():
        result_of(start("warm", Path(sys.executable), job))
    result = result_of(start("recipe", Path(sys.executable), job))
    with (folder / "runs.jsonl").open("a") as file:
        file.write(json.dumps({**job, **result}) + "\n")
    return result


def row_of(name: str, result: dict[str, Any]) -> list[str]:
    return [name, *changes_of(result), f"{result['sampled']:.0f}", f"{result['steps']}", f"{result['cpu_s']:.0f}"]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=EXACT, help="both; with --quick digits")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, help="all of them")
    parser.add_argument("--seeds", type=int, default=None, help="2, with --quick 1")
    parser.add_argument("--batches", type=int, default=None, help="100, with --quick 1")
    parser.add_argument("--settings", type=json.loads, default={}, help="settings of all recipes, as JSON")
    parser.add_argument("--keep", type=Path, help="a folder for the results and the warm models, which are reused")
    args = parse(parser)
    args.pairs = args.seeds or (1 if args.quick else 2)
    args.batches = args.batches or (1 if args.quick else 100)
    tasks = args.tasks or (["digits"] if args.quick else [task for task in EXACT if task != "digits"])
    recipes = args.recipes or (QUICK if args.quick else list(RECIPES))
    report = Report("trainer_recipes", args)
    print(versions("verifiers-trainer", "torch", "transformers"), "load", round(os.getloadavg()[0], 1))
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        for task in tasks:
            found = {
                recipe: [run(args, task, seed, recipe, folder) for seed in range(args.pairs)] for recipe in recipes
            }
            rows = [
                row_of(f"{recipe}, seed {seed}", result)
                for recipe, results in found.items()
                for seed, result in enumerate(results)
            ]
            header = ["", "reward", "exact", "pass@8", "nats/token", "sampled tokens", "steps", "CPU s"]
            print_table(f"{task}, held out, after {args.batches} batches", header, rows)
            wrong = {name: 1 - statistics.mean(r["after"]["exact"] for r in results) for name, results in found.items()}
            for name in recipes[1:]:
                over = wrong[name] / max(1e-9, wrong[recipes[0]])
                report.figure(f"{task}, wrong answers after {name} over {recipes[0]}", over)
    report.close()


if __name__ == "__main__":
    main()
