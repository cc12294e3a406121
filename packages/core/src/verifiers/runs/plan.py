"""The plan of a run: examples times siblings, in order, each rollout with its key on disk.

A ``Plan`` does no I/O and runs nothing. ``pending`` compares it with saved rollouts.
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

    def groups(self) -> Iterator[list[Job]]:
        """The jobs of one example at a time.

        Rows of equal content are ``numbered``, so that every rollout has a unique key on disk and separate seeds.
        """
        counts: dict[str, int] = {}
        position = 0
        for index, (example, count) in enumerate(zip(self.examples, self.siblings, strict=True)):
            rows = self.sibling_rows.get(index) or [example]
            distinct = {row.hash: numbered(row, counts) for row in rows}
            jobs = [Job(distinct[rows[n % len(rows)].hash], n, count, position + n, None) for n in range(count)]
            position += count
            yield jobs

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


@dataclass(slots=True)
class Pending:
    """A plan split into pending and finished rollouts."""

    jobs: list[Job]
    done: list[tuple[Job, Mapping[str, Any]]]
    """Finished jobs with their saved rollouts."""
    foreign: list[str]
    """Keys of saved rollouts outside the plan: of removed or edited examples, or of a larger plan."""


def pending(plan: Plan, durable: Mapping[str, Mapping[str, Any]], *, whole_groups: bool, retry_errors: bool) -> Pending:
    """Compare a plan with saved rollouts, by ``rollout_key``.

    ``whole_groups``: siblings are scored together, so a group with a missing rollout is pending as a whole.
    ``retry_errors``: a saved rollout with an error is pending again.
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
