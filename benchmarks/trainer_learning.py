"""P12: reward per trained token and per second of CPU time, against TRL with its defaults.

    python benchmarks/trainer_learning.py [--task reverse-text] [--steps 100] [--seeds 2] [--cache
    FOLDER]
                                          [--quick] [--store]

Both trainers start from the same model (``builtin:tiny`` after the supervised warm-up on the format
of an answer that ``vf-train quickstart`` uses), run the same rows of the same environment through
the same embedded engine with the same sampling (TRL 1.16.0 through our ``rollout_func``), and have
the same AdamW, constant learning rate, batch and group size. Everything else is the default of
each: loss, scaling of advantages, clipping, the trained groups, and sampling one step off-policy in
ours. TRL computes its batch at once, without gradient checkpointing: its fastest setting for such a
model. ``--ours '{"advantage": "mean_std"}'`` changes a setting of ours. Both run at the same time.

A curve is the mean reward of the rollouts sampled for each step, over ten steps. The figures are
TRL's over ours at the end of the shorter run, at as many trained tokens and at as much CPU time:
below 1, ours is ahead. ``--pairs`` is not used; ``--seeds`` are the pairs, each with a separate
warm-up. The tasks are small enough for a CPU (``_learning``).
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _learning import TASKS
from _measure import Report, options, parse, print_table, versions
from _peers import TRL, child_environment, interpreter, is_installed
from peers import CACHE

WINDOW = 10


def start(trainer: str, python: Path, job: dict[str, Any]) -> subprocess.Popen[str]:
    """Start one trainer in a separate process."""
    return subprocess.Popen(
        [str(python), str(Path(__file__).with_name("_learning.py")), trainer, json.dumps(job)],
        env=child_environment()
        | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The result of a process. *Raises* RuntimeError with its stderr when it failed."""
    output, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, process.args[2:]))} failed:\n{errors[-3000:]}")  # type: ignore[index]
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def reward_at(curve: dict[str, Any], axis: Sequence[float], limit: float) -> float:
    """The mean reward of the last ten steps that ended at or before ``limit`` on ``axis``; at least
    of the first."""
    num_steps = max(1, sum(value <= limit for value in axis))
    return statistics.mean(curve["reward"][max(0, num_steps - WINDOW) : num_steps])


def compare(curves: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each trainer its reward at the start, at the end, at equal trained tokens and at equal
    CPU time."""
    tokens = {
        trainer: list(itertools.accumulate(curve["trained"])) for trainer, curve in curves.items()
    }
    seconds = {
        trainer: [cpu_s for cpu_s, _ in curve["seconds"]] for trainer, curve in curves.items()
    }
    same_tokens = min(axis[-1] for axis in tokens.values())
    same_seconds = min(axis[-1] for axis in seconds.values())
    return {
        trainer: {
            "begin": statistics.mean(curve["reward"][:WINDOW]),
            "end": statistics.mean(curve["reward"][-WINDOW:]),
            "tokens": reward_at(curve, tokens[trainer], same_tokens),
            "time": reward_at(curve, seconds[trainer], same_seconds),
            "trained": tokens[trainer][-1],
            "cpu_s": seconds[trainer][-1],
        }
        for trainer, curve in curves.items()
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--task", choices=TASKS, default=None, help="reverse-text, with --quick digits"
    )
    parser.add_argument("--steps", type=int, default=None, help="100, with --quick 2")
    parser.add_argument("--seeds", type=int, default=None, help="2, with --quick 1")
    parser.add_argument(
        "--ours",
        type=json.loads,
        default={},
        help="settings of ours that differ from the defaults, as JSON",
    )
    parser.add_argument(
        "--keep", type=Path, help="a folder for the curves and the warm models, which are reused"
    )
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help=f"folder of TRL's environment; {CACHE}"
    )
    args = parse(parser)
    args.pairs = args.seeds or (1 if args.quick else 2)
    args.task = args.task or ("digits" if args.quick else "reverse-text")
    report = Report("trainer_learning", args)
    pythons = {"ours": Path(sys.executable)}
    if args.quick and not is_installed(TRL, args.cache):
        print(f"{TRL}: not installed in {args.cache}, left out")
    else:
        pythons["trl"] = interpreter(TRL, args.cache)
    print(
        versions("verifiers-trainer", "torch", "transformers"),
        TRL,
        "load",
        round(os.getloadavg()[0], 1),
    )
    results = [run(args, pythons, seed) for seed in range(args.pairs)]
    columns = ("begin", "end", "tokens", "time")
    rows = [
        [
            f"{trainer}, seed {seed}",
            *(f"{numbers[trainer][name]:.3f}" for name in columns),
            f"{numbers[trainer]['trained']:.0f}",
            f"{numbers[trainer]['cpu_s']:.0f}",
        ]
        for seed, numbers in enumerate(results)
        for trainer in pythons
    ]
    header = [
        "",
        "first steps",
        "last steps",
        "equal tokens",
        "equal time",
        "trained tokens",
        "CPU s",
    ]
    print_table(f"mean reward on {args.task}", header, rows)
    for name, axis_name in (("tokens", "at equal trained tokens"), ("time", "at equal CPU time")):
        if "trl" in pythons:
            over = statistics.mean(
                numbers["trl"][name] / max(1e-9, numbers["ours"][name]) for numbers in results
            )
            report.figure(
                f"P12: {args.task}, reward of TRL over ours {axis_name}", over, to_reach=1.0
            )
    gain = statistics.mean(
        numbers["ours"]["end"] / max(1e-9, numbers["ours"]["begin"]) for numbers in results
    )
    report.figure(f"P12: {args.task}, reward of ours, last steps over first", gain)
    report.close()


def run(args: Any, pythons: dict[str, Path], seed: int) -> dict[str, dict[str, float]]:
    """Run one pair: the warm-up, then both trainers concurrently."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if args.keep is None else args.keep / f"{args.task}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        steps = args.steps or (2 if args.quick else 100)
        job = {
            "folder": str(folder),
            "task": args.task,
            "seed": seed,
            "steps": steps,
            "ours": args.ours,
        }
        if not (folder / "model" / "config.json").exists():
            result_of(start("warm", pythons["ours"], job))
        running = {trainer: start(trainer, python, job) for trainer, python in pythons.items()}
        curves = {trainer: result_of(process) for trainer, process in running.items()}
        if args.keep is not None:
            (folder / "curves.json").write_text(json.dumps(curves))
    return compare(curves)


if __name__ == "__main__":
    main()
