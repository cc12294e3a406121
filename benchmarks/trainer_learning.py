"""P12: what is learned per trained token and per second of CPU time, against TRL with its defaults.

    python benchmarks/trainer_learning.py [--task reverse-text] [--steps 100] [--seeds 2] [--cache FOLDER]
                                          [--quick] [--store]

Both trainers begin with the same model (``builtin:tiny``, shown the form of an answer by the supervised warm-up that
``vf-train quickstart`` uses), play the same rows of the same environment through the same embedded engine with the
same sampling (TRL 1.16.0 through our ``rollout_func``), and have the same AdamW, constant learning rate, batch and
group size. Everything else is each one's default: loss, scaling of advantages, clipping, which groups are trained, and
that ours samples one step off-policy. TRL computes its batch at once, without gradient checkpointing: the fastest it
can be on such a model. ``--ours '{"advantage": "mean_std"}'`` changes a setting of ours. Both run at the same time.

A curve is the mean reward of the rollouts sampled for each step, over ten steps. The figures are TRL's over ours at the
end of the shorter run, at as many trained tokens and at as much CPU time: below 1, ours is ahead. ``--pairs`` is not
used; ``--seeds`` are the pairs, each with a warm-up of its own. The tasks are small enough for a CPU (``_learning``).
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


def started(who: str, python: Path, told: dict[str, Any]) -> subprocess.Popen[str]:
    """One trainer in a process of its own."""
    return subprocess.Popen(
        [str(python), str(Path(__file__).with_name("_learning.py")), who, json.dumps(told)],
        env=child_environment() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it found. Raises ``RuntimeError`` with what it said when it failed."""
    said, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, process.args[2:]))} failed:\n{errors[-3000:]}")  # type: ignore[index]
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def reward_at(curve: dict[str, Any], axis: Sequence[float], place: float) -> float:
    """The mean reward of the last ten steps that ended at or before ``place`` on ``axis``; of the first ones else."""
    num_steps = max(1, sum(value <= place for value in axis))
    return statistics.mean(curve["reward"][max(0, num_steps - WINDOW) : num_steps])


def compare(curves: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each trainer its reward at the start, at the end, at as many trained tokens and at as much CPU time."""
    tokens = {who: list(itertools.accumulate(curve["trained"])) for who, curve in curves.items()}
    seconds = {who: [cpu_s for cpu_s, _ in curve["seconds"]] for who, curve in curves.items()}
    same_tokens = min(axis[-1] for axis in tokens.values())
    same_seconds = min(axis[-1] for axis in seconds.values())
    return {
        who: {
            "begin": statistics.mean(curve["reward"][:WINDOW]),
            "end": statistics.mean(curve["reward"][-WINDOW:]),
            "tokens": reward_at(curve, tokens[who], same_tokens),
            "time": reward_at(curve, seconds[who], same_seconds),
            "trained": tokens[who][-1],
            "cpu_s": seconds[who][-1],
        }
        for who, curve in curves.items()
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--task", choices=TASKS, default=None, help="reverse-text, with --quick digits")
    parser.add_argument("--steps", type=int, default=None, help="100, with --quick 2")
    parser.add_argument("--seeds", type=int, default=None, help="2, with --quick 1")
    parser.add_argument("--ours", type=json.loads, default={}, help="settings of ours beside the defaults, as JSON")
    parser.add_argument("--keep", type=Path, help="a folder for the curves and the warm models, which are used again")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"where TRL lives; {CACHE}")
    given = parse(parser)
    given.pairs = given.seeds or (1 if given.quick else 2)
    given.task = given.task or ("digits" if given.quick else "reverse-text")
    report = Report("trainer_learning", given)
    pythons = {"ours": Path(sys.executable)}
    if given.quick and not is_installed(TRL, given.cache):
        print(f"{TRL}: not installed in {given.cache}, left out")
    else:
        pythons["trl"] = interpreter(TRL, given.cache)
    print(versions("verifiers-trainer", "torch", "transformers"), TRL, "load", round(os.getloadavg()[0], 1))
    found = [run(given, pythons, seed) for seed in range(given.pairs)]
    columns = ("begin", "end", "tokens", "time")
    rows = [
        [
            f"{who}, seed {seed}",
            *(f"{numbers[who][name]:.3f}" for name in columns),
            f"{numbers[who]['trained']:.0f}",
            f"{numbers[who]['cpu_s']:.0f}",
        ]
        for seed, numbers in enumerate(found)
        for who in pythons
    ]
    header = ["", "first steps", "last steps", "equal tokens", "equal time", "trained tokens", "CPU s"]
    print_table(f"mean reward on {given.task}", header, rows)
    for name, said in (("tokens", "at equal trained tokens"), ("time", "at equal CPU time")):
        if "trl" in pythons:
            over = statistics.mean(numbers["trl"][name] / max(1e-9, numbers["ours"][name]) for numbers in found)
            report.figure(f"P12: {given.task}, reward of TRL over ours {said}", over, to_reach=1.0)
    begun = statistics.mean(numbers["ours"]["end"] / max(1e-9, numbers["ours"]["begin"]) for numbers in found)
    report.figure(f"P12: {given.task}, reward of ours, last steps over first", begun)
    report.close()


def run(given: Any, pythons: dict[str, Path], seed: int) -> dict[str, dict[str, float]]:
    """One pair: the warm-up, then both trainers at once."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if given.keep is None else given.keep / f"{given.task}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        steps = given.steps or (2 if given.quick else 100)
        told = {"folder": str(folder), "task": given.task, "seed": seed, "steps": steps, "ours": given.ours}
        if not (folder / "model" / "config.json").exists():
            ended(started("warm", pythons["ours"], told))
        running = {who: started(who, python, told) for who, python in pythons.items()}
        curves = {who: ended(process) for who, process in running.items()}
        if given.keep is not None:
            (folder / "curves.json").write_text(json.dumps(curves))
    return compare(curves)


if __name__ == "__main__":
    main()
