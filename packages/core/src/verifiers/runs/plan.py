"""A plan of a run: examples times siblings, in order, and which of its rollouts are pending."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from verifiers.data.examples import CHUNK, Example, Table
from verifiers.errors import ConfigError
from verifiers.storage.configurations import rollout_key
from verifiers.types import Immutable

NUM_COMPARED = 2_000
"""Examples of a plan that are compared with the saved rollouts at a time."""


class Job(Immutable, frozen=True):
    """A planned rollout: the ``sibling``-th of an example that has ``siblings`` of them."""

    example: Example
    sibling: int
    siblings: int
    position: int
    """Index in the plan; results are ordered by it."""
    num_pending: int | None = None
    """Siblings that this run generates when others are finished already; None = all."""
    num_branches: int = 1
    """Rollouts that are generated with it as one tree: it and the siblings after it."""

    @property
    def in_part(self) -> bool:
        """Whether an earlier run finished some of the siblings."""
        return self.num_pending is not None and self.num_pending < self.siblings


@dataclass(slots=True)
class Plan:
    """Every rollout of a run, in order: examples first, then siblings."""

    examples: Sequence[Example]
    siblings: Sequence[int]
    """How many rollouts each example has."""
    sibling_rows: Mapping[int, Sequence[Example]] = field(default_factory=dict)
    """Index of an example -> one row per sibling, where the rows of one ``example_id`` differ."""
    _may_repeat: bool | None = field(default=None, init=False, repr=False, compare=False)
    """Whether two examples may have equal content; None until it was asked for, since that sorts
    all hashes."""

    @classmethod
    def of_rows(cls, rows: Sequence[Example]) -> Plan:
        """Rows of equal ``example_id`` are siblings, in order of appearance; each row is run
        unchanged."""
        groups: dict[int, list[Example]] = {}
        for row in rows:
            groups.setdefault(row.example_id, []).append(row)
        members = list(groups.values())
        differing = {
            n: group for n, group in enumerate(members) if len({row.hash for row in group}) > 1
        }
        return cls([group[0] for group in members], [len(group) for group in members], differing)

    @classmethod
    def wrapped(cls, table: Table, n_samples: int) -> Plan:
        """``n_samples`` rollouts over the rows in order, wrapping around; repeated rows are
        siblings."""
        if not len(table):
            raise ConfigError("n_samples cannot be taken from an empty dataset", key="n_samples")
        rounds, remainder = divmod(n_samples, len(table))
        counts = [rounds + (index < remainder) for index in range(min(n_samples, len(table)))]
        return cls(table.take(len(counts)), counts)

    def __len__(self) -> int:
        return sum(self.siblings)

    @property
    def columns(self) -> set[str]:
        """The columns of the first row; the others are assumed to have them too."""
        return set(self.examples[0].row)

    def groups(self, flags: bytes | bytearray | None = None) -> Iterator[list[Job]]:
        """The jobs of one example at a time, or of those that have a 1 in ``flags`` at the index of
        a rollout.

        Formats the rows of these examples alone.
        """
        if flags is not None and 1 not in flags:
            return
        hashes, position = self.hashes(), 0
        for start in range(0, len(self.siblings), CHUNK):
            selected: dict[int, tuple[int, list[str]]] = {}
            for index, group_hashes in enumerate(itertools.islice(hashes, CHUNK), start):
                if flags is None or 1 in flags[position : position + len(group_hashes)]:
                    selected[index] = position, group_hashes
                position += len(group_hashes)
            for (index, (first, group_hashes)), example in zip(
                selected.items(), self._examples_at(list(selected)), strict=True
            ):
                rows = self.sibling_rows.get(index) or [example]
                yield [
                    Job(
                        _with_hash(rows[n % len(rows)], name), n, len(group_hashes), first + n, None
                    )
                    for n, name in enumerate(group_hashes)
                ]

    def hashes(self) -> Iterator[list[str]]:
        """For one example at a time the hash of each of its rollouts; formats no row that was
        formatted before.

        Rows of equal content are numbered: the second and later rows have their number after the
        hash (``9f86….2``), so that every rollout has a unique key on disk and separate seeds.
        """
        if isinstance(self.examples, Table):
            plain = self.examples.hashes()
            self._may_repeat = (
                self.examples.may_repeat() if self._may_repeat is None else self._may_repeat
            )
        else:
            plain, self._may_repeat = (example.hash for example in self.examples), True
        counts: dict[str, int] = {}
        for index, (row_hash, count) in enumerate(zip(plain, self.siblings, strict=True)):
            rows = self.sibling_rows.get(index)
            if rows is None and not self._may_repeat:
                yield [row_hash] * count
                continue
            hashes = [row_hash] if rows is None else [row.hash for row in rows]
            distinct = {each: _numbered(each, counts) for each in hashes}
            yield [distinct[hashes[n % len(hashes)]] for n in range(count)]

    def example_ids(self) -> Iterator[int]:
        """The id of each example; formats no row."""
        if not isinstance(self.examples, Table):
            yield from (example.example_id for example in self.examples)
            return
        for start in range(0, len(self.examples), CHUNK):
            yield from self.examples[start : start + CHUNK].example_ids()

    def _examples_at(self, indexes: list[int]) -> list[Example]:
        if isinstance(self.examples, Table):
            return self.examples.at(indexes)
        return [self.examples[index] for index in indexes]


def numbered(example: Example, counts: dict[str, int]) -> Example:
    """The example; the second and later examples of equal content with their number after the hash
    (``9f86….2``).

    ``counts`` holds how many of each hash came before, and is updated. Rollouts then have keys and
    seeds of their own.
    """
    return _with_hash(example, _numbered(example.hash, counts))


def _numbered(example_hash: str, counts: dict[str, int]) -> str:
    number = counts[example_hash] = counts.get(example_hash, 0) + 1
    return example_hash if number == 1 else f"{example_hash}.{number}"


def _with_hash(example: Example, name: str) -> Example:
    return example if example.hash == name else replace(example, hash=name)


class Saved(Protocol):
    """The saved rollouts of a run, each an object of their own kind."""

    num_saved: int
    """Different rollouts that are saved."""

    def find(self, keys: Sequence[str]) -> Sequence[Any]:
        """The newest rollout of each key, None if there is none."""

    def has_error(self, rollout: object) -> bool:
        """Whether this rollout ended in an error."""


@dataclass(slots=True)
class Pending:
    """The pending rollouts of a plan; iterating yields their jobs, which are not held in memory."""

    plan: Plan
    flags: bytearray
    """1 at the index of each pending rollout, 0 at that of a finished rollout."""

    def __len__(self) -> int:
        return self.flags.count(1)

    def __iter__(self) -> Iterator[Job]:
        for jobs in self.plan.groups(self.flags):
            missing = [job for job in jobs if self.flags[job.position]]
            yield from (
                missing
                if len(missing) == len(jobs)
                else (replace(j, num_pending=len(missing)) for j in missing)
            )

    def keys(self) -> Iterator[tuple[int, str]]:
        """(index in the plan, ``rollout_key``) of each pending rollout; formats no row."""
        if len(self):
            every = (
                (name, sibling)
                for names in self.plan.hashes()
                for sibling, name in enumerate(names)
            )
            for position, (name, sibling) in enumerate(every):
                if self.flags[position]:
                    yield position, rollout_key(name, sibling)


def pending(
    plan: Plan,
    saved: Saved,
    take: Callable[[int, int, object], None],
    *,
    whole_groups: bool,
    retry_errors: bool,
) -> Pending:
    """Compare a plan with saved rollouts, by ``rollout_key``; ``take`` receives each that is done,
    after its index in the plan and the id of its example.

    ``whole_groups``: siblings are scored together, so a group with a missing rollout is pending as
    a whole.
    ``retry_errors``: a saved rollout with an error is pending again.
    """
    flags = bytearray(b"\1") * len(plan)
    if not saved.num_saved:
        return Pending(plan, flags)
    groups, position = zip(plan.example_ids(), plan.hashes(), strict=True), 0
    while several := list(itertools.islice(groups, NUM_COMPARED)):
        keys = [
            rollout_key(name, sibling) for _, names in several for sibling, name in enumerate(names)
        ]
        saved_rollouts = iter(saved.find(keys))
        for example_id, names in several:
            rollouts = [next(saved_rollouts) for _ in names]
            usable = [
                None if r is None or (retry_errors and saved.has_error(r)) else r for r in rollouts
            ]
            if not (whole_groups and None in usable):
                for index, rollout in enumerate(usable, position):
                    if rollout is not None:
                        flags[index] = 0
                        take(index, example_id, rollout)
            position += len(names)
    return Pending(plan, flags)
