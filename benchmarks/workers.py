"""P13: rollouts per second of an environment that computes, with 1, 2 and 4 environment workers.

    python benchmarks/workers.py [--rollouts 400] [--work-ms 20] [--quick] [--pairs 5] [--store]

Every round runs the same rollouts with each number of workers, in turn, against a scripted model in
this process. The workers' start (a fresh interpreter that imports the environment) is not counted:
the clock runs from the first rollout to the last. "Per core" is the rate over that of one worker
and over the usable cores: min(workers, cores).
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

from _measure import Cost, Report, interleaved, options, parse, print_table, ratio

import verifiers as vf
from verifiers.testing import ScriptedClient

sys.path.insert(0, str(Path(__file__).parent / "_environments"))
TO_REACH_PER_CORE = 0.9


def cost(num_workers: int, num_rollouts: int, work_ms: float) -> Cost:
    """The wall time from the first model call to the last durable rollout."""
    call_times: list[float] = []

    def answer(request: object) -> str:
        call_times.append(time.perf_counter())
        return "go on"

    env = vf.load_environment("computing_game", num_examples=num_rollouts, work_ms=work_ms)
    env.evaluate(
        ScriptedClient(answer),
        "scripted",
        num_workers=num_workers,
        max_concurrent=32,
        keep_states=False,
    )
    return Cost(0.0, call_times[-1] - call_times[0])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rollouts", type=int, default=None)
    parser.add_argument("--work-ms", type=float, default=20.0)
    args = parse(parser)
    num_rollouts = args.rollouts or (20 if args.quick else 400)
    cores = len(os.sched_getaffinity(0))
    runs = {f"{n} workers": partial(cost, n, num_rollouts, args.work_ms) for n in (1, 2, 4)}
    costs = interleaved(runs, args.pairs)
    single, report, table = costs["1 workers"], Report("P13", args), []
    for n in (1, 2, 4):
        these = costs[f"{n} workers"]
        speed_up = ratio(single, these, "wall_s")
        per_core = speed_up / min(n, cores)
        rate = num_rollouts / sorted(cost_of_run.wall_s for cost_of_run in these)[len(these) // 2]
        table.append([f"{n} workers", f"{rate:.0f}", f"{speed_up:.2f}", f"{per_core:.2f}"])
    title = (
        f"{num_rollouts} rollouts of {args.work_ms:g} ms computation, {cores} cores, {args.pairs}"
        " pairs"
    )
    print_table(title, ["", "rollouts/s", "over one worker", "per core"], table)
    for n in (2, 4):
        lost = min(n, cores) / ratio(single, costs[f"{n} workers"], "wall_s")
        report.figure(f"{n} workers, time over linear", lost, to_reach=1 / TO_REACH_PER_CORE)
    report.close()


if __name__ == "__main__":
    main()
