"""Held-out answers after each recipe, ours and TRL's, at equal sampled batches, from the same warm model.

    python benchmarks/trainer_recipes.py [--tasks reverse-text curriculum-sums] [--recipes NAME ...] [--seeds 2]
                                         [--batches 100] [--keep FOLDER] [--quick] [--store]

Every recipe starts from the model that ``trainer_learning.py`` starts from, samples ``--batches`` batches of 128
rollouts, and has beside its own settings those of the quickstart: a warm-up of the learning rate of 8 % and a linear
decay, here from 3e-4, the same engine, one thread. Runs are made one after another. Each answers every held-out
example eight times before and after training: mean reward, share of right answers with its standard error by example,
pass@8, and the nats per token, which estimate the entropy of the policy. A recipe that narrows the model has a falling
pass@8.

Names that begin with ``trl`` are settings of TRL 1.16.0's ``GRPOTrainer`` (``TRL_SETTINGS``), which it installs: its
rollouts come from the same environment and engine through our bridge, and it has the same batches, schedule and
optimizer. Its answers are sampled by the same code.

``--settings '{"learning_rate": 1.5e-4}'`` changes settings of all recipes of ours; ``--pairs`` is not used.
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
from _peers import TRL, interpreter
from peers import CACHE
from trainer_learning import result_of, start

from verifiers_trainer.settings.recipes import RECIPES

QUICK = ("policy_gradient", "best_of_group")
_FOUR = {"per_device_train_batch_size": 32, "steps_per_generation": 4}
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl_4_updates": _FOUR,
    "trl_4_updates_half_rate": _FOUR | {"learning_rate": 1.5e-4},
    "trl_4_updates_2_passes_half_rate": _FOUR | {"learning_rate": 1.5e-4, "num_iterations": 2},
}
"""Settings of ``GRPOConfig`` that differ from its defaults; batches of 128 as in every recipe."""


def run(args: Any, task: str, seed: int, recipe: str, folder: Path) -> dict[str, Any]:
    """The result of one training, by ``_learning.recipe`` or ``_learning.trl``."""
    job: dict[str, Any] = {
        "folder": str(folder / f"{task}-{seed}"), "task": task, "seed": seed, "steps": 1, "batches": args.batches,
        "settings": {"recipe": recipe, **args.settings},
    }  # fmt: skip
    Path(job["folder"]).mkdir(parents=True, exist_ok=True)
    if not (Path(job["folder"]) / "model" / "config.json").exists():
        result_of(start("warm", Path(sys.executable), job))
    if recipe in TRL_SETTINGS:
        result = run_trl(args, job, TRL_SETTINGS[recipe])
    else:
        result = result_of(start("recipe", Path(sys.executable), job))
    with (folder / "runs.jsonl").open("a") as file:
        file.write(json.dumps({**job, **result}) + "\n")
    return result


def run_trl(args: Any, job: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The result of one training by TRL; the answers are sampled by ``_learning.answers`` before and after."""
    folder, ours = Path(job["folder"]), Path(sys.executable)
    job["steps"] = args.batches * settings.get("steps_per_generation", 1) * settings.get("num_iterations", 1)
    job["settings"] = {"lr_scheduler_type": "linear", "warmup_steps": 0.08, **settings}
    with tempfile.TemporaryDirectory() as saved:
        curve = result_of(start("trl", interpreter(TRL, args.cache), {**job, "save": saved}))
        before, after = (
            result_of(start("answers", ours, {**job, "model": str(model)})) for model in (folder / "model", saved)
        )
    return {
        "before": before, "after": after, "cpu_s": curve["seconds"][-1][0], "steps": job["steps"],
        "sampled": sum(curve["sampled"]), "reward": curve["reward"],
    }  # fmt: skip


def row_of(name: str, result: dict[str, Any]) -> list[str]:
    return [name, *changes_of(result), f"{result['sampled']:.0f}", f"{result['steps']}", f"{result['cpu_s']:.0f}"]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=EXACT, help="both; with --quick digits")
    parser.add_argument("--recipes", nargs="+", choices=[*RECIPES, *TRL_SETTINGS], help="all of ours")
    parser.add_argument("--seeds", type=int, default=None, help="2, with --quick 1")
    parser.add_argument("--batches", type=int, default=None, help="100, with --quick 1")
    parser.add_argument("--settings", type=json.loads, default={}, help="settings of all recipes, as JSON")
    parser.add_argument("--keep", type=Path, help="a folder for the results and the warm models, which are reused")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"folder of TRL's environment; {CACHE}")
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
