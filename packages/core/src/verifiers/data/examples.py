"""The rows of a dataset as examples: formatted, with an id and a content hash.

A ``Table`` is the dataset of an environment: a lazy, immutable sequence of ``Example``. The dataset
is read on first use and a row is formatted on first access; rollouts work on copies.

``row_format`` formats a row; ``sources`` opens datasets of any accepted type; ``runs.runner``
selects the examples of a run.
"""

from __future__ import annotations

import hashlib
import logging
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from verifiers.data.example_sets import load_example_dataset
from verifiers.data.row_format import RowFormat, copy_row, format_row, no_question
from verifiers.data.sources import DatasetLike, Rows, Source, is_builder
from verifiers.errors import DatasetError
from verifiers.runtime.json import canonical_json
from verifiers.types import Immutable

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = [
    "Example",
    "RowFormat",
    "Table",
    "copy_row",
    "examples_from",
    "format_row",
    "load_example_dataset",
]

log = logging.getLogger(__name__)

CHUNK = 1000
"""Rows to format at a time when iterating over a table."""
MAX_HELD = 20_000
"""Rows of a dataset up to which formatted rows are held; of a larger dataset their hashes are, and
a row is formatted when it is asked for."""
_HASH_BYTES = 32


class Example(Immutable, frozen=True):
    """A formatted row. ``Example(0, "9f86…", {"example_id": 0, "prompt": […], "answer": "4",
    "info": {}, …})``."""

    example_id: int
    hash: str
    """SHA-256 over the canonical JSON of all columns but ``example_id``, a null counting as absent;
    64 hex digits. Stable across runs, orders and machines. Equal rows have equal hashes."""
    row: dict[str, Any]
    """``prompt answer info task example_id`` and the row's further columns. Read-only: change a
    ``copy_row(row)``."""


class Table(Sequence[Example]):
    """A lazy, immutable sequence of examples.

    Raises, on first access of rows: ``DatasetError`` that names the row and its columns.

    >>> table = Table.of([{"question": "2 + 2?", "answer": "4"}], system_prompt="Be brief.")
    >>> table[0].row["prompt"]
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '2 + 2?'}]
    """

    def __init__(self, store: _Store, positions: Sequence[int] | None = None):
        self._store, self._positions = store, positions
        self._order: Iterator[int] | None = None
        self._hub_dataset: Any = None

    @property
    def row_format(self) -> RowFormat:
        """The format of the rows of this table, to apply to other rows (``examples_from``)."""
        return self._store.row_format

    @classmethod
    def of(cls, dataset: DatasetLike, **row_format: Any) -> Table:
        """The table of a dataset of any accepted type; keywords are the fields of ``RowFormat``."""
        return cls(_Store(Source(dataset).train, RowFormat(**row_format)))

    @classmethod
    def pair(
        cls, dataset: DatasetLike | None, eval_dataset: DatasetLike | None, row_format: RowFormat
    ) -> tuple[Table | None, Table | None]:
        """Create the training and the evaluation table, None for an absent table; see ``of``.

        A dataset with splits provides ``train``, and ``test`` else ``validation`` without an
        ``eval_dataset``. The splits of a builder function are unknown here, so its evaluation table
        falls back to the training rows.
        """
        train = Source(dataset) if dataset is not None else None
        table = cls(_Store(train.train, row_format)) if train is not None else None
        if eval_dataset is not None:
            return table, cls(_Store(Source(eval_dataset).only_evaluation, row_format))
        if train is None:
            return None, None
        if is_builder(dataset):
            return table, cls(_Store(lambda: _evaluation_or_all(train), row_format))
        if isinstance(dataset, Mapping) and train.evaluation() is not None:
            return table, cls(_Store(train.only_evaluation, row_format))
        return table, None

    @staticmethod
    def required(table: Table | None, env: object) -> Table:
        """Return ``table``. Raises: ``DatasetError`` that names the environment if it is None."""
        if table is None:
            name = getattr(env, "env_id", "") or type(env).__name__
            raise DatasetError(
                f"{name} has no training set, only an evaluation set; pass dataset=..."
            )
        return table

    def __len__(self) -> int:
        return len(self._store) if self._positions is None else len(self._positions)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Table: ...
    def __getitem__(self, index: int | slice) -> Example | Table:
        selected = self._row_positions()[index]
        if isinstance(selected, Sequence):
            return Table(self._store, selected)
        return self._store.examples([selected])[0]

    def __iter__(self) -> Iterator[Example]:
        for chunk in _chunks(self._row_positions()):
            yield from self._store.examples(chunk)

    def __deepcopy__(self, memo: Mapping[int, object]) -> Table:
        return self  # immutable

    def __repr__(self) -> str:
        return f"Table({len(self)} examples)" if self._store.is_open else "Table(not read yet)"

    def take(self, n: int = -1, seed: int | None = None) -> Table:
        """Return the first ``n`` examples (all, if negative or too many), shuffled first if there
        is a ``seed``.

        Formats their rows now, so that an invalid row fails before a run starts. A larger ``n``
        with the same seed begins with the same examples.
        """
        positions = self._row_positions()
        # the order of ``datasets.Dataset.shuffle(seed)``, which published runs depend on
        if seed is not None:
            order = np.random.default_rng(seed).permutation(len(positions))
            positions = [positions[i] for i in order]
        subset = Table(self._store, positions if n < 0 else positions[:n])
        self._store.check(subset._row_positions())
        return subset

    def at(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples at these places."""
        positions = self._row_positions()
        return self._store.examples([positions[index] for index in indices])

    def hashes(self) -> Iterator[str]:
        """Yield the hash of each example; formats only those that never were."""
        return self._store.hashes(self._row_positions())

    def example_ids(self) -> list[int]:
        """Return the id of each example; formats none."""
        return self._store.ids(self._row_positions())

    def may_repeat(self) -> bool:
        """Whether two examples may have equal content; formats only those that never were."""
        return self._store.may_repeat(self._row_positions())

    def only(self, hashes: Collection[str]) -> Table:
        """The examples whose content hash is among ``hashes``, in this order; reads every row."""
        pairs = zip(self._row_positions(), self, strict=True)
        selected = [position for position, example in pairs if example.hash in hashes]
        return Table(self._store, selected)

    def sample(self, n: int, seed: int | None = None) -> list[dict[str, object]]:
        """Draw ``n`` row copies without replacement, reshuffling when exhausted.

        Without a seed, each call continues one shared order, the same in every process; a seed
        starts a separate order and leaves the shared one unchanged. Raises: ``DatasetError`` for an
        empty table.
        """
        if n > 0 and not len(self):
            raise DatasetError("cannot sample prompts: the dataset is empty")
        if seed is not None:
            order = _endless_order(self._row_positions(), random.Random(seed))
        else:
            self._order = self._order or _endless_order(self._row_positions(), random.Random(0))
            order = self._order
        examples = self._store.examples([next(order) for _ in range(n)])
        return [copy_row(example.row) for example in examples]

    def to_hf(self) -> Dataset:
        """Return the rows as a lossless ``datasets.Dataset``; see ``data.arrow``."""
        from verifiers.data.arrow import to_dataset

        if self._hub_dataset is None:
            self._hub_dataset = to_dataset([example.row for example in self])
        # a new view, so that set_format() of the caller has no effect here
        return self._hub_dataset.with_format(None)

    def _row_positions(self) -> Sequence[int]:
        return range(len(self._store)) if self._positions is None else self._positions


class _Store:
    """The rows of a table and its sub-tables, each formatted once; of more than ``MAX_HELD``,
    whenever it is read."""

    def __init__(self, open_rows: Callable[[], Rows], row_format: RowFormat):
        self._open_rows, self.row_format = open_rows, row_format
        self._rows: Rows | None = None
        self._examples: list[Example | None] = []
        self._ids: Sequence[int] = ()
        self._old_ids: list[object] | None = None
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        return self._rows is not None

    def __len__(self) -> int:
        return len(self._opened())

    def _opened(self) -> Rows:
        with self._lock:
            if self._rows is None:
                self._rows = self._checked(self._open_rows())
            return self._rows

    def _checked(self, rows: Rows) -> Rows:
        if rows.columns and not {"prompt", self.row_format.question_key} & set(rows.columns):
            raise DatasetError(no_question("the dataset", self.row_format, rows.columns))
        if self.row_format.few_shot and "prompt" in rows.columns:
            log.warning(
                "few_shot is ignored: the dataset has a column 'prompt', and its prompts are used"
                " unchanged"
            )
        old_ids = rows.column("example_id") if "example_id" in rows.columns else None
        if old_ids and all(type(i) is int for i in old_ids) and len(set(old_ids)) == len(old_ids):
            self._ids, self._old_ids = old_ids, None
        else:
            self._ids, self._old_ids = range(len(rows)), old_ids
        self._is_held = len(rows) <= MAX_HELD
        self._examples = [None] * len(rows) if self._is_held else []
        self._hashes = bytearray(0 if self._is_held else _HASH_BYTES * len(rows))
        self._is_hashed = bytearray(0 if self._is_held else len(rows))
        return rows

    def examples(self, positions: Sequence[int]) -> list[Example]:
        """Return the examples at ``positions``, formatting each on first access."""
        rows = self._opened()
        if not self._is_held:
            return [example for chunk in _chunks(positions) for example in self._read(rows, chunk)]
        for chunk in _chunks([p for p in dict.fromkeys(positions) if self._examples[p] is None]):
            for position, row in zip(chunk, rows.read(chunk), strict=True):
                self._examples[position] = self._example(position, row)
        return [self._examples[position] for position in positions]  # type: ignore[misc]  # all are formatted

    def check(self, positions: Sequence[int]) -> None:
        """Format the rows at ``positions`` that never were, without returning them."""
        rows = self._opened()
        if self._is_held:
            self.examples(positions)
            return
        for chunk in _chunks(positions):
            self._read(rows, [position for position in chunk if not self._is_hashed[position]])

    def hashes(self, positions: Sequence[int]) -> Iterator[str]:
        """Yield the hash of each example at ``positions``."""
        self.check(positions)
        if self._is_held:
            yield from (example.hash for example in self.examples(positions))
            return
        for position in positions:
            yield self._hashes[_HASH_BYTES * position : _HASH_BYTES * (position + 1)].hex()

    def ids(self, positions: Sequence[int]) -> list[int]:
        """Return the ids of the examples at ``positions``."""
        self._opened()
        return [self._ids[position] for position in positions]

    def may_repeat(self, positions: Sequence[int]) -> bool:
        """Return whether two examples at ``positions`` may be equal: by the first eight bytes of
        their hashes."""
        self.check(positions)
        if self._is_held:
            return True
        all_beginnings = np.frombuffer(self._hashes, dtype=np.uint64)[:: _HASH_BYTES // 8]
        beginnings = all_beginnings[np.asarray(positions, np.int64)]
        return len(np.unique(beginnings)) < len(beginnings)

    def _read(self, rows: Rows, positions: Sequence[int]) -> list[Example]:
        """Format rows, and hold only their hashes. Raises: ``DatasetError`` for a changed row."""
        examples = []
        for position, row in zip(positions, rows.read(positions) if positions else [], strict=True):
            example = self._example(position, row)
            slot = slice(_HASH_BYTES * position, _HASH_BYTES * (position + 1))
            content = bytes.fromhex(example.hash)
            if self._is_hashed[position] and self._hashes[slot] != content:
                raise DatasetError(
                    f"row {position} of the dataset was changed since it was first read; do not"
                    " edit it"
                )
            self._hashes[slot] = content
            self._is_hashed[position] = 1
            examples.append(example)
        return examples

    def _example(self, position: int, row: dict[str, object]) -> Example:
        row.pop("example_id", None)
        if self._old_ids is not None and (old := self._old_ids[position]) is not None:
            row.setdefault("src_id", old)
        row["example_id"] = self._ids[position]
        return _example(row, self.row_format, f"row {position} of the dataset")


def _evaluation_or_all(source: Source) -> Rows:
    if source.evaluation() is None:
        log.warning("the dataset has no evaluation set; the training set is used")
    return source.only_evaluation()


def _endless_order(positions: Sequence[int], generator: random.Random) -> Iterator[int]:
    """Yield every position once in random order, reshuffled for each pass, without end."""
    order = list(positions)
    while order:
        generator.shuffle(order)
        yield from order


def examples_from(inputs: DatasetLike, row_format: RowFormat) -> list[Example]:
    """Format the rows passed for a run: equal ``example_id`` stay equal, rows without an id get
    a new id.

    Non-integer ids are replaced, equal ids by equal ids, and stored as ``src_id``. Accepts any
    type of dataset. A prompt of messages is taken as it is, without the system prompt of the
    environment.

    Raises: ``DatasetError`` for an invalid row.
    """
    rows_in = Source(inputs).train()
    rows = rows_in.read(range(len(rows_in)))
    used = {row["example_id"] for row in rows if type(row.get("example_id")) is int}
    free = (number for number in range(2 * len(rows)) if number not in used)
    replaced: dict[str, int] = {}
    bare = replace(row_format, system_prompt=None)
    examples = []
    for position, row in enumerate(rows):
        source_id = row.get("example_id")
        if source_id is None:
            row["example_id"] = next(free)
        elif type(source_id) is not int:
            if str(source_id) not in replaced:
                replaced[str(source_id)] = next(free)
            row["src_id"], row["example_id"] = source_id, replaced[str(source_id)]
        # the caller's own messages get no system prompt
        form = bare if isinstance(row.get("prompt"), list | tuple) else row_format
        examples.append(_example(row, form, f"row {position} of the inputs"))
    return examples


def _example(row: Mapping[str, object], row_format: RowFormat, location: str) -> Example:
    formatted = format_row(row, row_format, location)
    hashed = formatted.copy()
    del hashed["example_id"]
    if NoneType in map(type, hashed.values()):
        hashed = {name: value for name, value in hashed.items() if value is not None}
    try:
        digest = hashlib.sha256(canonical_json(hashed)).hexdigest()
    except (TypeError, ValueError, RecursionError) as error:
        name = next((name for name, value in hashed.items() if not _is_json(value)), "")
        raise DatasetError(
            f"{location}: column {name!r} holds a value that JSON cannot store ({error}); use plain"
            " values in rows and create objects from them in setup_state"
        ) from error
    return Example(formatted["example_id"], digest, formatted)


def _chunks(positions: Sequence[int]) -> Iterator[Sequence[int]]:
    return (positions[start : start + CHUNK] for start in range(0, len(positions), CHUNK))


def _is_json(value: object) -> bool:
    try:
        canonical_json(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
