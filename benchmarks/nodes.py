"""P20: rollouts per second on 1, 2 and 4 nodes of a Ray cluster, of an environment that waits; a
node is killed.

    python benchmarks/nodes.py [--wait-s 2] [--rollouts 40] [--quick] [--pairs 3] [--store]

The nodes are network namespaces of this machine, each with a raylet of its own; needs root, Linux,
the command ip and the extra ray, and exits with 77 where one is missing. A worker scores eight
rollouts at a time, each of which waits, so that the rate is linear in the nodes where nothing else
limits. ``--rollouts`` are those of one node. The clock runs from the first model call to the last
durable rollout. At the end a node of four is killed when half of the rollouts are durable; every
rollout must then be in the result once, and none with an error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from _measure import Cost, Report, interleaved, options, parse, print_table, ratio

TESTS, ENVIRONMENTS = Path(__file__).parents[1] / "tests", Path(__file__).parent / "_environments"
sys.path[:0] = [str(TESTS), str(ENVIRONMENTS)]
MISSING = 77
AT_ONCE = 8
LINEAR = 0.95
NODES = (1, 2, 4)


def run(
    nodes: int, num_rollouts: int, wait_s: float, folder: str | None = None
) -> dict[str, object]:
    """Evaluate in a worker on each of ``nodes`` nodes; print the address of each finished rollout's
    machine."""
    import verifiers as vf
    from verifiers.testing import ScriptedClient

    calls: list[float] = []

    def answer(request: object) -> str:
        calls.append(time.perf_counter())
        return "done"

    env = vf.load_environment(
        "waiting_game", num_examples=num_rollouts, wait_s=wait_s, at_once=AT_ONCE
    )
    results = env.evaluate(
        ScriptedClient(answer),
        "scripted",
        num_workers=nodes,
        worker_backend="ray",
        max_concurrent=AT_ONCE * nodes,
        results_path=folder,
        state_columns=["machine"],
    )
    ended = time.perf_counter()
    rows = results["outputs"]
    return {
        "wall_s": ended - calls[0],
        "machines": Counter(row["machine"] for row in rows),
        "rows": len(rows),
        "errors": sum(row["error"] is not None for row in rows),
    }


class Cluster:
    """A head without cores for workers, on which the evaluation runs, and ``nodes`` nodes."""

    def __init__(self, nodes: int, folder: Path):
        from support.namespaces import Machines

        paths = os.pathsep.join((str(TESTS), str(ENVIRONMENTS)))
        self.machines = Machines(folder, nodes + 1, PYTHONPATH=paths)
        self.nodes, self.num_runs = nodes, 0

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            stack.enter_context(self.machines)
            self.address = self.machines.start_ray(0, *[2] * self.nodes)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

    def start(self, *words: object) -> subprocess.Popen[bytes]:
        """Start ``run`` in a process on the head."""
        self.num_runs += 1
        command = [sys.executable, str(Path(__file__).resolve()), "--run", *map(str, words)]
        return self.machines.start(
            self.machines.addresses[0],
            *command,
            log=f"run{self.num_runs}",
            RAY_ADDRESS=self.address,
        )

    def facts(self, process: subprocess.Popen[bytes]) -> dict[str, object]:
        """What ``run`` printed."""
        status, output = process.wait(600), self.machines.output(f"run{self.num_runs}")
        if status:
            raise RuntimeError(output)
        return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


def cost(cluster: Cluster, nodes: int, num_rollouts: int, wait_s: float) -> Cost:
    """The wall time of ``num_rollouts`` for each of ``nodes`` nodes, one of which each worker has
    to itself."""
    facts = cluster.facts(cluster.start(nodes, num_rollouts * nodes, wait_s))
    if len(facts["machines"]) != nodes:
        raise RuntimeError(f"{nodes} workers were placed on {facts['machines']}")
    print(
        f"{nodes} nodes: {num_rollouts * nodes} rollouts in {facts['wall_s']:.2f} s",
        file=sys.stderr,
    )
    return Cost(0.0, facts["wall_s"])


def kill_one(cluster: Cluster, num_rollouts: int, wait_s: float) -> tuple[int, int]:
    """Kill the last node when half of the rollouts are durable; return (lost,
    repeated) rollouts."""
    total, folder = num_rollouts * cluster.nodes, cluster.machines.folder / "killed"
    process = cluster.start(cluster.nodes, total, wait_s, folder)
    journal = folder / "results.jsonl"
    while not journal.is_file() or journal.read_bytes().count(b"\n") < total // 2:
        if process.poll() is not None:
            raise RuntimeError(cluster.machines.output(f"run{cluster.num_runs}"))
        time.sleep(0.05)
    killed = cluster.machines.addresses[-1]
    cluster.machines.kill(killed)
    facts = cluster.facts(process)
    ids = Counter(json.loads(line)["example_id"] for line in journal.read_text().splitlines())
    lost, repeated = total - len(ids), sum(ids.values()) - len(ids)
    print(
        f"{killed} was killed: {facts['rows']} results, {facts['errors']} with an error, "
        f"of {dict(facts['machines'])}; in the journal {lost} lost, {repeated} repeated"
    )
    return lost + facts["errors"], repeated


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        nodes, num_rollouts, wait_s, *folder = sys.argv[2:]
        print(json.dumps(run(int(nodes), int(num_rollouts), float(wait_s), *folder)))
        return
    parser = options(__doc__)
    parser.add_argument("--rollouts", type=int, default=None)
    parser.add_argument("--wait-s", type=float, default=None)
    args = parse(parser)
    from importlib.util import find_spec

    from support.namespaces import cannot

    if missing := cannot() or (None if find_spec("ray") else "the extra ray is not installed"):
        print(missing, file=sys.stderr)
        sys.exit(MISSING)
    num_rollouts = args.rollouts or (16 if args.quick else 40)
    wait_s = args.wait_s or (0.2 if args.quick else 2.0)
    counts = NODES[:2] if args.quick else NODES
    with tempfile.TemporaryDirectory() as folder, Cluster(counts[-1], Path(folder)) as cluster:
        runs = {f"{n} nodes": partial(cost, cluster, n, num_rollouts, wait_s) for n in counts}
        costs = interleaved(runs, args.pairs)
        lost, repeated = kill_one(cluster, num_rollouts, wait_s)
    single, report, table = costs["1 nodes"], Report("P20", args), []
    for n in counts:
        these = costs[f"{n} nodes"]
        linear = ratio(single, these, "wall_s")
        rate = n * num_rollouts / sorted(cost.wall_s for cost in these)[len(these) // 2]
        table.append([f"{n} nodes", f"{rate:.2f}", f"{linear * n:.2f}", f"{linear:.3f}"])
    title = f"{num_rollouts} rollouts of {wait_s:g} s for each node, {args.pairs} pairs"
    print_table(title, ["", "rollouts/s", "over one node", "over linear"], table)
    for n in counts[1:]:
        lost_time = ratio(costs[f"{n} nodes"], single, "wall_s")
        report.figure(f"{n} nodes, time over linear", lost_time, to_reach=1 / LINEAR)
    report.figure("rollouts lost with a killed node", lost, unit="", to_reach=0)
    report.figure("rollouts repeated in the journal", repeated, unit="", to_reach=0)
    report.close()


if __name__ == "__main__":
    main()
