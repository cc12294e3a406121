"""P24: a task of Harbor's format: start of its sandbox, one graded rollout, and many tasks at once.

    python benchmarks/task_sandbox.py [--starts 50] [--tasks 200] [--concurrent 200] [--quick]

A start is from ``open`` to the files of the task's image in their places. The reference,
interleaved, is a sandbox without a root of its own and without files. Many tasks: the solutions of
``shell-tasks`` run by the oracle, each graded in a second sandbox; every reward must be 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import time
from collections.abc import Awaitable, Callable

import verifiers as vf
from verifiers.sandbox import SandboxBackend, SandboxSpec, backend_for
from verifiers.testing import ScriptedClient
from verifiers_agents.harbor import building
from verifiers_agents.harbor.images import HOST, ImageStore
from verifiers_agents.harbor.task import read_tasks
from vf_shell_tasks import IMAGE, TASKS

START_MS = 60.0


async def task_start(backend: SandboxBackend, layer: building.Layer) -> float:
    """Milliseconds to a sandbox with a root of its own and the files of a task."""
    start = time.perf_counter()
    sandbox = await backend.open(SandboxSpec(writable_root=True, working_dir="/app"))
    await layer.put(sandbox)
    elapsed = time.perf_counter() - start
    await sandbox.close()
    return elapsed * 1e3


async def plain_start(backend: SandboxBackend) -> float:
    """Milliseconds to a sandbox with neither."""
    start = time.perf_counter()
    sandbox = await backend.open(SandboxSpec())
    elapsed = time.perf_counter() - start
    await sandbox.close()
    return elapsed * 1e3


async def starts(count: int) -> tuple[list[float], list[float]]:
    """``count`` starts of each kind, in turns, after one that is not counted (it starts the
    zygote)."""
    backend = await backend_for("bubblewrap")
    (task,) = read_tasks(TASKS / "csv-totals", ImageStore({IMAGE: HOST}))
    layer = building.copied_files(task.build)
    kinds: tuple[Callable[[], Awaitable[float]], ...] = (
        lambda: task_start(backend, layer),
        lambda: plain_start(backend),
    )
    for kind in kinds:
        await kind()
    measured: tuple[list[float], list[float]] = ([], [])
    for _ in range(count):
        for kind, values in zip(kinds, measured, strict=True):
            values.append(await kind())
    return measured


def many(count: int, concurrent: int) -> tuple[float, float]:
    """Seconds for ``count`` solved and graded tasks, and CPU seconds of all processes."""
    env = vf.load_environment("shell-tasks", agent="oracle")
    rollouts = -(-count // 20)
    before, start = _cpu_s(), time.perf_counter()
    results = env.evaluate(
        ScriptedClient("never called"),
        "oracle",
        rollouts_per_example=rollouts,
        max_concurrent=concurrent,
    )
    elapsed = time.perf_counter() - start
    failed = [output for output in results.outputs if output.reward != 1.0]
    assert not failed, (
        f"{len(failed)} of {20 * rollouts} solutions were not graded 1:"
        f" {failed[0].error or failed[0].task}"
    )
    return elapsed, _cpu_s() - before


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime + children.ru_utime + children.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--concurrent", type=int, default=200)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.starts, options.tasks = 10, 20
    print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    task, plain = asyncio.run(starts(options.starts))
    for name, values in (("task sandbox", task), ("plain sandbox", plain)):
        low, high = min(values), statistics.quantiles(values, n=20)[-1]
        print(
            f"{name}: median {statistics.median(values):.1f} ms, least {low:.1f} ms, 95% within"
            f" {high:.1f} ms"
        )
    print(f"to reach: {START_MS:g} ms")
    print(
        "P24: start of a task sandbox over a plain one:"
        f" {statistics.median(task) / statistics.median(plain):.2f}x"
    )
    elapsed, cpu_s = many(options.tasks, options.concurrent)
    print(
        f"{options.tasks} tasks, {options.concurrent} at once: {elapsed:.1f} s, {cpu_s:.1f} CPU s"
        " of this process"
    )


if __name__ == "__main__":
    main()
