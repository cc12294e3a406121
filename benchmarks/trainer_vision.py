"""Whether a tiny model that takes images learns colours from rewards alone, and what it learns
where each picture is another row's.

    python benchmarks/trainer_vision.py [--kinds idefics3 qwen2_5_vl] [--seeds 3] [--steps 80]
                                        [--keep FOLDER] [--quick] [--store]

A random model of 120,000 or 150,000 parameters is asked for the colour of a picture, one of four, and is
paid for the first letter of the right one: of 114 tokens it samples one. A batch is twelve groups
of eight, one step off-policy; the vision tower stays as it is, random. A training ends when the
mean reward of four steps is above 0.9. The control has the same questions and answers, with the
pictures shuffled among the rows, and as many steps as the slowest seed. Printed: the reward along
the steps, that of pictures which were not trained on, and CPU seconds of training (one process of
one thread). Each step is a line on stderr. `--pairs` is not used.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _measure import Report, options, parse, print_table, result_of_job, versions

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

KINDS = ("idefics3", "qwen2_5_vl")
FEW = {"batch_size": 8, "rollouts_per_example": 4}
"""The batch of a quick run."""


def train(job: dict[str, Any]) -> dict[str, Any]:
    """One training: its curve, CPU seconds and the reward of pictures that it has not seen."""
    import logging

    import torch

    from support.vision_learning import learn_colours

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        curve = learn_colours(
            job["kind"], job["seed"], job["steps"], Path(folder), job["is_shuffled"],
            is_shown=True, **job["settings"],
        )  # fmt: skip
    return {"rewards": curve.rewards, "cpu_s": curve.cpu_s, "held_out": curve.held_out}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80, help="at most; the usual end is 0.9")
    parser.add_argument("--keep", type=Path, help="a folder for the results, which are reused")
    parser.add_argument("--job", type=json.loads, help="one training, as the script starts it")
    args = parse(parser)
    if args.job:
        print(json.dumps(train(args.job)))
        return
    if args.quick:
        args.kinds, args.seeds, args.steps = KINDS[:1], 1, 2
    args.pairs = args.seeds
    report = Report("trainer_vision", args)
    print(versions("torch", "transformers"), "load", round(os.getloadavg()[0], 1))
    with tempfile.TemporaryDirectory() as temporary:
        for kind in args.kinds:
            measure(kind, args.keep or Path(temporary), args, report)
    report.close()


def measure(kind: str, folder: Path, args: Any, report: Report) -> None:
    def result(seed: int, steps: int, is_shuffled: bool) -> dict[str, Any]:
        job = {
            "kind": kind, "seed": seed, "steps": steps, "is_shuffled": is_shuffled,
            "settings": FEW if args.quick else {},
        }  # fmt: skip
        name = f"{kind}-{seed}-{'shuffled' if is_shuffled else 'right'}.json"
        return result_of_job(__file__, job, folder / name)

    seeds = [result(seed, args.steps, is_shuffled=False) for seed in range(args.seeds)]
    control = result(0, max(len(run["rewards"]) for run in seeds), is_shuffled=True)
    runs = {f"seed {seed}": run for seed, run in enumerate(seeds)} | {"shuffled": control}
    header = [kind, "steps", "first", "half-way", "last", "unseen pictures", "CPU s"]
    rows = []
    for name, run in runs.items():
        rewards = run["rewards"]
        middle = len(rewards) // 2
        windows = [statistics.fmean(w) for w in (rewards[:4], rewards[middle:][:4], rewards[-4:])]
        cells = [*windows, run["held_out"]]
        cpu_s = f"{run['cpu_s'][-1]:.0f}"
        rows.append([name, f"{len(rewards)}", *(f"{value:.2f}" for value in cells), cpu_s])
    print_table(
        "mean reward of four steps, and of 64 pictures that were not trained on", header, rows
    )
    last = min(statistics.fmean(run["rewards"][-4:]) for run in seeds)
    of_control = statistics.fmean(control["rewards"][-4:])
    report.figure(
        f"{kind}: reward lacking to 1, the worst of the seeds", 1 - last, "", to_reach=0.1
    )
    report.figure(
        f"{kind}: unseen pictures, reward lacking to 1, the worst",
        1 - min(run["held_out"] for run in seeds),
        "",
    )
    if last:
        report.figure(
            f"{kind}: shuffled over the worst of the seeds", of_control / last, to_reach=0.4
        )
    report.figure(
        f"{kind}: CPU time of the slowest seed over ten minutes",
        max(run["cpu_s"][-1] for run in seeds) / 600,
        to_reach=1.0,
    )


if __name__ == "__main__":
    main()
