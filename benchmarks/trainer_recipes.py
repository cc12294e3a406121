"""Held-out answers after each recipe, ours and TRL's, at equal sampled batches, from the same warm
model.

    python benchmarks/trainer_recipes.py [--tasks reverse-text curriculum-sums] [--recipes
    NAME[@RATE] ...] [--seeds 2]
                                         [--batches 100] [--keep FOLDER] [--search] [--quick]
                                         [--store]

Every recipe starts from the model that ``trainer_learning.py`` starts from, samples ``--batches``
batches of 128 rollouts, and has beside its own settings those of the quickstart: a warm-up of the
learning rate of 8 % and a linear decay, here from 3e-4, the same engine, one thread. Runs are made
one after another. Each answers every held-out example eight times before and after training: mean
reward, share of right answers with its standard error by example, pass@8, and the nats per token,
which estimate the entropy of the policy. A recipe that narrows the model has a falling pass@8.

``plain`` is a loop of plain code with one update per batch, as ``policy_gradient``
(``_learning.plain``): the floor of the CPU time.

``best_of_turns`` is ``best_of_group`` with the best answers of each turn, groups of equal weight,
and none replaced (``TURNS``), for "two-words", whose turns have rewards of their own; a batch has
as many rollouts as one of TRL.

``NAME@RATE`` is a recipe at another learning rate than 3e-4: ``best_of_group@2e-4``.

Names that begin with ``trl`` are settings of TRL 1.16.0's ``GRPOTrainer`` (``TRL_SETTINGS``), which
it installs: its rollouts come from the same environment and engine through our bridge, and it has
the same batches, schedule and optimizer. Its answers are sampled by the same code.

``--search`` compares the two trainers, each with its best settings: it trains seed 0 with each of
``SEARCH`` on every task, takes the settings of each side with the most right answers after it, and
trains the other seeds with those alone. ``--keep FOLDER`` keeps results and warm models; a training
whose result is there is not repeated.

``--settings '{"beta": 0.01}'`` changes settings of all recipes of ours; ``--pairs`` is not used.
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
    "trl_4_updates_2_passes": _FOUR | {"num_iterations": 2},
    "trl_64_2_passes": {
        "per_device_train_batch_size": 32,
        "steps_per_generation": 2,
        "num_iterations": 2,
    },
}
"""Settings of ``GRPOConfig`` that differ from its defaults; batches of 128 but in the
last, of 64."""
TURNS = "best_of_turns"
OUR_SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"recipe": name} for name in RECIPES},
    TURNS: {
        "recipe": "best_of_group",
        "credit": "turn",
        "gamma": 0.0,
        "aggregation": "prompt_mean",
        "zero_variance": "keep",
    },
}
PLAIN = "plain"
OVER_PLAIN = 1.25
SEARCH = {
    "ours": ("clipped_updates@1.5e-4", "best_of_group", "best_of_group@2e-4"),
    "TRL": ("trl", "trl_4_updates@1.5e-4", "trl_4_updates_2_passes@1.5e-4"),
}
SEARCH_OF_TURNS = {"ours": (SEARCH["ours"][0], SEARCH["ours"][1], TURNS), "TRL": SEARCH["TRL"]}
"""The candidates of each side, as many for both; with ``SEARCH_OF_TURNS`` where turns have rewards
of their own."""


def run(args: Any, task: str, seed: int, recipe: str, folder: Path) -> dict[str, Any]:
    """The result of one training, by ``_learning.recipe`` or ``_learning.trl``."""
    name, _, rate = recipe.partition("@")
    changed = {"learning_rate": float(rate)} if rate else {}
    is_trl = name in TRL_SETTINGS
    job: dict[str, Any] = {
        "folder": str(folder / f"{task}-{seed}"), "task": task, "seed": seed, "steps": 1, "batches": args.batches,
        "settings": TRL_SETTINGS[name] | changed if is_trl else OUR_SETTINGS.get(name, {}) | args.settings | changed,
    }  # fmt: skip
    key, results = json.dumps([recipe, job], sort_keys=True), folder / "runs.jsonl"
    for line in results.read_text().splitlines() if results.exists() else ():
        if (earlier := json.loads(line))["key"] == key:
            return dict(earlier["result"])
    Path(job["folder"]).mkdir(parents=True, exist_ok=True)
    if not (Path(job["folder"]) / "model" / "config.json").exists():
        result_of(start("warm", Path(sys.executable), job))
    if is_trl:
        result = run_trl(args, job)
    else:
        result = result_of(start("plain" if name == PLAIN else "recipe", Path(sys.executable), job))
    with results.open("a") as file:
        file.write(
            json.dumps({"key": key, "recipe": recipe, "task": task, "seed": seed, "result": result})
            + "\n"
        )
    return result


def run_trl(args: Any, job: dict[str, Any]) -> dict[str, Any]:
    """The result of one training by TRL; the answers are sampled by ``_learning.answers`` before
    and after."""
    folder, ours, settings = Path(job["folder"]), Path(sys.executable), job["settings"]
    job["steps"] = (
        args.batches * settings.get("steps_per_generation", 1) * settings.get("num_iterations", 1)
    )
    job["settings"] = {"lr_scheduler_type": "linear", "warmup_steps": 0.08, **settings}
    with tempfile.TemporaryDirectory() as saved:
        curve = result_of(start("trl", interpreter(TRL, args.cache), {**job, "save": saved}))
        before, after = (
            result_of(start("answers", ours, {**job, "model": str(model)}))
            for model in (folder / "model", saved)
        )
    return {
        "before": before, "after": after, "cpu_s": curve["seconds"][-1][0], "steps": job["steps"],
        "sampled": sum(curve["sampled"]), "reward": curve["reward"],
    }  # fmt: skip


def row_of(name: str, result: dict[str, Any]) -> list[str]:
    return [
        name,
        *changes_of(result),
        f"{result['sampled']:.0f}",
        f"{result['steps']}",
        f"{result['cpu_s']:.0f}",
    ]


def searched(args: Any, task: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The results of each candidate with seed 0, and of the best of each side with all seeds."""
    search = SEARCH_OF_TURNS if task == "two-words" else SEARCH
    results = {
        recipe: [run(args, task, 0, recipe, folder)] for side in search.values() for recipe in side
    }
    best = [
        max(side, key=lambda recipe: results[recipe][0]["after"]["exact"])
        for side in search.values()
    ]
    for recipe in best:
        results[recipe] += [run(args, task, seed, recipe, folder) for seed in range(1, args.pairs)]
    print(
        task,
        "best settings:",
        *(f"{side} {recipe}" for side, recipe in zip(search, best, strict=True)),
        flush=True,
    )
    ours = best[0]
    return {ours: results.pop(ours), best[1]: results.pop(best[1]), **results}


def recipe_of(text: str) -> str:
    """Check a value of ``--recipes``. *Raises* ValueError."""
    name, _, rate = text.partition("@")
    if name not in (*OUR_SETTINGS, *TRL_SETTINGS, PLAIN) or (rate and float(rate) <= 0):
        raise ValueError(text)
    return text


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=EXACT, help="both; with --quick digits")
    parser.add_argument(
        "--recipes",
        nargs="+",
        type=recipe_of,
        help=f"{', '.join([*OUR_SETTINGS, *TRL_SETTINGS, PLAIN])}; the recipes",
    )
    parser.add_argument(
        "--search", action="store_true", help="ours and TRL, each with its best settings"
    )
    parser.add_argument("--seeds", type=int, default=None, help="2, with --quick 1")
    parser.add_argument("--batches", type=int, default=None, help="100, with --quick 1")
    parser.add_argument(
        "--settings", type=json.loads, default={}, help="settings of all recipes, as JSON"
    )
    parser.add_argument(
        "--keep", type=Path, help="a folder for the results and the warm models, which are reused"
    )
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help=f"folder of TRL's environment; {CACHE}"
    )
    args = parse(parser)
    args.pairs = args.seeds or (1 if args.quick else 2)
    args.batches = args.batches or (1 if args.quick else 100)
    tasks = args.tasks or (
        ["digits"] if args.quick else [task for task in EXACT if task != "digits"]
    )
    recipes = args.recipes or (QUICK if args.quick else list(RECIPES))
    report = Report("trainer_recipes", args)
    print(
        versions("verifiers-trainer", "torch", "transformers"), "load", round(os.getloadavg()[0], 1)
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        for task in tasks:
            if args.search:
                results = searched(args, task, folder)
            else:
                results = {
                    recipe: [run(args, task, seed, recipe, folder) for seed in range(args.pairs)]
                    for recipe in recipes
                }
            rows = [
                row_of(f"{recipe}, seed {seed}", result)
                for recipe, results in results.items()
                for seed, result in enumerate(results)
            ]
            header = [
                "",
                "reward",
                "exact",
                "pass@8",
                "nats/token",
                "sampled tokens",
                "steps",
                "CPU s",
            ]
            print_table(f"{task}, held out, after {args.batches} batches", header, rows)
            wrong = {
                name: 1 - statistics.mean(r["after"]["exact"] for r in results)
                for name, results in results.items()
            }
            first, *later = results
            for name in later[:1] if args.search else later:
                over = wrong[name] / max(1e-9, wrong[first])
                report.figure(f"{task}, wrong answers after {name} over {first}", over)
            if first == PLAIN:
                cpu_s = {
                    name: statistics.mean(r["cpu_s"] for r in results)
                    for name, results in results.items()
                }
                for name in later:
                    report.figure(
                        f"P22: {task}, CPU time of {name} over {first}",
                        cpu_s[name] / cpu_s[first],
                        to_reach=OVER_PLAIN,
                    )
    report.close()


if __name__ == "__main__":
    main()
