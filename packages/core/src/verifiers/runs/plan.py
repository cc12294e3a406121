"""What a run is to play: examples times siblings, in order, each with the name it has on disk.

A ``Plan`` is pure: it reads no disk and plays nothing. ``pending`` compares it with durable rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verifiers.data.examples import Example, Table
from verifiers.errors import ConfigError
from verifiers.runs.runner import Job
from verifiers.storage.identity import rollout_key


@dataclass(slots=True)
class Plan:
    """Every rollout of a run, in order: examples first, then siblings."""

    examples: Sequence[Example]
    siblings: Sequence[int]
    """How many rollouts each example has."""
    own_rows: Mapping[int, Sequence[Example]] = field(default_factory=dict)
    """Place of an example -> one row per sibling, where siblings of one ``example_id`` differ."""

    @classmethod
    def of_rows(cls, rows: Sequence[Example]) -> Plan:
        """Rows of equal ``example_id`` are siblings, in order of appearance; each is played as it is."""
        groups: dict[int, list[Example]] = {}
        for row in rows:
            groups.setdefault(row.example_id, []).append(row)
        members = list(groups.values())
        differing = {n: group for n, group in enumerate(members) if len({row.hash for row in group}) > 1}
        return cls([group[0] for group in members], [len(group) for group in members], differing)

    @classmethod
    def wrapped(cls, table: Table, n_samples: int) -> Plan:
        """``n_samples`` rollouts over the rows in order, wrapping round; wrapped rows are siblings."""
        if not len(table):
            raise ConfigError("n_samples cannot be taken from an empty dataset", key="n_samples")
        rounds, rest = divmod(n_samples, len(table))
        counts = [rounds + (place < rest) for place in range(min(n_samples, len(table)))]
        return cls(table.take(len(counts)), counts)

    def __len__(self) -> int:
        return sum(self.siblings)

    @property
    def columns(self) -> set[str]:
        """The columns that every row has as far as the first one tells."""
        return set(self.examples[0].row)

    def groups(self) -> Iterator[list[Job]]:
        """The jobs of one example at a time.

        Rows of equal content are told apart by their number, which stands behind the hash of the second and later
        ones: ``9f86….2``. So each rollout has a name of its own on disk, and seeds of its own.
        """
        seen: dict[str, int] = {}
        position = 0
        for place, (example, count) in enumerate(zip(self.examples, self.siblings, strict=True)):
            rows = self.own_rows.get(place) or [example]
            numbered = {row.hash: _numbered(row, seen) for row in rows}
            jobs = [Job(numbered[rows[n % len(rows)].hash], n, count, position + n, None) for n in range(count)]
            position += count
            yield jobs

    def jobs(self) -> Iterator[Job]:
        """One job at a time."""
        for group in self.groups():
            yield from group


def _numbered(row: Example, seen: dict[str, int]) -> Example:
    number = seen[row.hash] = seen.get(row.hash, 0) + 1
    return row if number == 1 else replace(row, hash=f"{row.hash}.{number}")


@dataclass(slots=True)
class Pending:
    """What is left of a plan, and what is there already."""

    jobs: list[Job]
    done: list[tuple[Job, Mapping[str, Any]]]
    """Jobs with their durable rows."""
    foreign: list[str]
    """Keys of durable rows that belong to no rollout of the plan: of removed or edited examples, or beyond it."""


def pending(plan: Plan, durable: Mapping[str, Mapping[str, Any]], *, whole_groups: bool, retry_errors: bool) -> Pending:
    """Compare a plan with durable rows, by ``rollout_key``.

    ``whole_groups``: siblings are scored together, so a group with a missing row is pending as a whole.
    ``retry_errors``: a row with an error is pending again.
    """
    result = Pending([], [], [])
    if not durable:
        result.jobs.extend(plan.jobs())
        return result
    foreign = dict.fromkeys(durable)
    for jobs in plan.groups():
        keys = [rollout_key(job.example.hash, job.sibling) for job in jobs]
        rows = [durable.get(key) for key in keys]
        for key in keys:
            foreign.pop(key, None)
        usable = [None if row is not None and retry_errors and row.get("error") else row for row in rows]
        if whole_groups and None in usable:
            usable = [None] * len(jobs)
        result.done += [(job, row) for job, row in zip(jobs, usable, strict=True) if row is not None]
        missing = [job for job, row in zip(jobs, usable, strict=True) if row is None]
        if len(missing) < len(jobs):
            missing = [replace(job, num_pending=len(missing)) for job in missing]
        result.jobs += missing
    result.foreign = list(foreign)
    return result
