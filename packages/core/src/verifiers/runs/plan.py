"""The plan of a run: examples times siblings, in order, each rollout with its key on disk.

A ``Plan`` does no I/O and runs nothing. ``pending`` compares it with saved rollouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from verifiers.data.examples import Example, Table
from verifiers.errors import ConfigError
from verifiers.runs.runner import Job
from verifiers.storage.identity import rollout_key

NUM_COMPARED = 2_000
"""Examples of a plan that are compared with the saved rollouts at a time."""


@dataclass(slots=True)
class Plan:
    """Every rollout of a run, in order: examples first, then siblings."""

    examples: Sequence[Example]
    siblings: Sequence[int]
    """How many rollouts each example has."""
    sibling_rows: Mapping[int, Sequence[Example]] = field(default_factory=dict)
    """Index of an example -> one row per sibling, where the rows of one ``example_id`` differ."""

    @classmethod
    def of_rows(cls, rows: Sequence[Example]) -> Plan:
        """Rows of equal ``example_id`` are siblings, in order of appearance; each row is run unchanged."""
        groups: dict[int, list[Example]] = {}
        for row in rows:
            groups.setdefault(row.example_id, []).append(row)
        members = list(groups.values())
        differing = {n: group for n, group in enumerate(members) if len({row.hash for row in group}) > 1}
        return cls([group[0] for group in members], [len(group) for group in members], differing)

    @classmethod
    def wrapped(cls, table: Table, n_samples: int) -> Plan:
        """``n_samples`` rollouts over the rows in order, wrapping around; repeated rows are siblings."""
        if not len(table):
            raise ConfigError("n_samples cannot be taken from an empty dataset", key="n_samples")
        rounds, rest = divmod(n_samples, len(table))
        counts = [rounds + (index < rest) for index in range(min(n_samples, len(table)))]
        return cls(table.take(len(counts)), counts)

    def __len__(self) -> int:
        return sum(self.siblings)

    @property
    def columns(self) -> set[str]:
        """The columns of the first row; the others are assumed to have them too."""
        return set(self.examples[0].row)

    def groups(self, flags: bytes | bytearray | None = None) -> Iterator[list[Job]]:
        """The jobs of one example at a time, or of those that have a 1 in ``flags`` at the index of a rollout.

        Rows of equal content are ``numbered``, so that every rollout has a unique key on disk and separate seeds.
        """
        counts: dict[str, int] = {}
        position = 0
        for index, (example, count) in enumerate(zip(self.examples, self.siblings, strict=True)):
            rows = self.sibling_rows.get(index) or [example]
            distinct = {row.hash: numbered(row, counts) for row in rows}
            if flags is None or 1 in flags[position : position + count]:
                yield [Job(distinct[rows[n % len(rows)].hash], n, count, position + n, None) for n in range(count)]
            position += count

    def jobs(self) -> Iterator[Job]:
        """One job at a time."""
        for group in self.groups():
            yield from group


def numbered(example: Example, counts: dict[str, int]) -> Example:
    """The example; the second and later ones of equal content with their number after the hash (``9f86….2``).

    ``counts`` holds how many of each hash came before, and is updated. Rollouts then have keys and seeds of their own.
    """
    number = counts[example.hash] = counts.get(example.hash, 0) + 1
    return example if number == 1 else replace(example, hash=f"{example.hash}.{number}")


class Saved(Protocol):
    """The saved rollouts of a run, each an object of their own kind."""

    num_saved: int
    """Different rollouts that are saved."""

    def find(self, keys: Sequence[str]) -> Sequence[Any]:
        """The newest rollout of each key, None where there is none."""

    def has_error(self, rollout: Any) -> bool:
        """Whether this rollout ended in an error."""


@dataclass(slots=True)
class Pending:
    """The pending rollouts of a plan; iterating yields their jobs, which are not held in memory."""

    plan: Plan
    flags: bytearray
    """1 at the index of each pending rollout, 0 at that of a finished one."""

    def __len__(self) -> int:
        return self.flags.count(1)

    def __iter__(self) -> Iterator[Job]:
        for jobs in self.plan.groups(self.flags):
            missing = [job for job in jobs if self.flags[job.position]]
            yield from missing if len(missing) == len(jobs) else (replace(j, num_pending=len(missing)) for j in missing)


def pending(
    plan: Plan, saved: Saved, take: Callable[[Job, Any], None], *, whole_groups: bool, retry_errors: bool
) -> Pending:
    """Compare a plan with saved rollouts, by ``rollout_key``; ``take`` receives each that is done.

    ``whole_groups``: siblings are scored together, so a group with a missing rollout is pending as a whole.
    ``retry_errors``: a saved rollout with an error is pending again.
    """
    flags = bytearray(b"\1") * len(plan)
    if not saved.num_saved:
        return Pending(plan, flags)
    groups = plan.groups()
    while several := list(itertools.islice(groups, NUM_COMPARED)):
        found = iter(saved.find([rollout_key(job.example.hash, job.sibling) for jobs in several for job in jobs]))
        for jobs in several:
            rollouts = [next(found) for _ in jobs]
            usable = [None if r is None or (retry_errors and saved.has_error(r)) else r for r in rollouts]
            if whole_groups and None in usable:
                continue
            for job, rollout in zip(jobs, usable, strict=True):
                if rollout is not None:
                    flags[job.position] = 0
                    take(job, rollout)
    return Pending(plan, flags)
