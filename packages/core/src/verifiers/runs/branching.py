"""Grow trees: the rollouts of a group that share turns are generated together.

A tree takes as many jobs as it has rollouts; the jobs are siblings, so that plan, keys, seeds and
batches are those of a group without branches. A branch that fails costs itself alone. Where the
first rollout ends before the fork, the others begin at the prompt, as siblings do.

Who tells of branches: ``Rollout.fork`` (record), ``results.branches`` (files, statistics).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from verifiers.rollouts.branching import Branching, Snapshots
from verifiers.rollouts.contract import RolloutEnvironment
from verifiers.rollouts.loop import conclude, generate
from verifiers.rollouts.state import State
from verifiers.rollouts.values import Fork
from verifiers.runs.plan import Job

NewState = Callable[[int], Awaitable[State]]
"""The number of a sibling -> its state at the prompt."""


class ForkingEnvironment(RolloutEnvironment, Protocol):
    """What growing trees needs of an environment beside the loop."""

    branching: Branching | None
    """Where its rollouts fork; None: they do not."""

    @property
    def max_branches(self) -> int:
        """Rollouts of a tree; of several environments the most; 0 if none branches."""
        ...

    def for_row(self, row: Mapping[str, Any]) -> ForkingEnvironment: ...


def trees(env: ForkingEnvironment, jobs: Iterable[Job]) -> Iterator[list[Job]]:
    """The jobs that are generated together, in order: those of a tree, or each alone."""
    if not env.max_branches:
        for job in jobs:
            yield [job]
        return

    def tree_of(job: Job) -> tuple[int, int]:
        branching = env.for_row(job.example.row).branching
        size = 1 if branching is None else branching.branches
        return job.position - job.sibling, job.sibling // size

    for _, members in itertools.groupby(jobs, tree_of):
        tree = list(members)
        yield [replace(tree[0], num_branches=len(tree)), *tree[1:]]


async def grow(
    env: ForkingEnvironment, branching: Branching, job: Job, new: NewState, limit_s: float | None
) -> State:
    """Generate the tree of which ``job`` is the first rollout; return that, with the others as its
    ``branches``. *Raises* what concerns the whole run."""
    first, snapshots = await new(job.sibling), Snapshots(branching)
    first.before_call = snapshots.take
    try:
        async with asyncio.TaskGroup() as group:
            # 1. the first rollout, at least up to the fork
            running = group.create_task(generate(env, first, limit_s))
            if branching.tokens is None and branching.turn is not None:
                forked = group.create_task(snapshots.is_taken.wait())
                await asyncio.wait((running, forked), return_when=asyncio.FIRST_COMPLETED)
                forked.cancel()
            else:
                await asyncio.wait((running,))
                await snapshots.judge(first)
            # 2. its branches, and where there are none rollouts of their own
            further = await _siblings_of(branching, job, new, first, snapshots)
            for state in further:
                if state.record.error is None:
                    group.create_task(generate(env, state, limit_s))
    except BaseExceptionGroup as failures:
        raise first_leaf(failures) from failures
    finally:
        await snapshots.close()
    first.before_call, first.branches = None, tuple(further)
    first.record.fork = Fork(job.sibling)
    return first


async def _siblings_of(
    branching: Branching, job: Job, new: NewState, first: State, snapshots: Snapshots
) -> list[State]:
    """The further states of a tree, in the order of their siblings: branches of its first rollout,
    then rollouts of their own."""
    numbers = range(job.sibling + 1, job.sibling + job.num_branches)
    branches: list[State] = []
    if (snapshot := snapshots.best) is not None:
        turn, num_branches = len(snapshot.record.transcript), len(numbers)
        if branching.tokens is not None:
            tokens = branching.tokens * job.num_branches / job.siblings
            turns = first.record.transcript.turns
            num_branches = branching.num_branches(turns, turn, num_branches, tokens)
        if num_branches:
            further = await snapshot.fork(num_branches - 1) if num_branches > 1 else []
            branches, snapshots.best = [snapshot, *further], None
        for number, branch in zip(numbers, branches, strict=False):
            branch.record.fork = Fork(number, job.sibling, turn)
    single = [await new(number) for number in numbers[len(branches) :]]
    for number, state in zip(numbers[len(branches) :], single, strict=True):
        state.record.fork = Fork(number)
        if snapshot is None and snapshots.failure is not None:
            state.record.status = state.record.status.failed(snapshots.failure)
            conclude(state, time.perf_counter())
    return [*branches, *single]


def first_leaf(failures: BaseExceptionGroup) -> BaseException:
    """The first exception of a group that is none itself."""
    leaf: BaseException = failures
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf
