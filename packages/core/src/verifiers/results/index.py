"""Index a file of saved rollouts: the byte offsets of each, and the columns for sorting and
filtering.

Supports journals and plain JSON lines (runs of other versions, completions of a training run),
finished or growing: ``read`` indexes appended lines within a time budget, so that a large file
shows its first rollouts quickly. Of a rollout that was run again the newest counts. Text stays on
disk and is read on demand.

Uses some 60 to 100 bytes of memory per rollout. Changes nothing on disk; ``index_file`` keeps an
index beside a large journal.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from verifiers.errors import JournalError
from verifiers.results.branches import SHARED, SHARED_MARK, completed, rows_back_of, whole_rows
from verifiers.results.columns import Column, KeyColumn, NameColumn
from verifiers.results.heads import INNER_NAMES, NAMES, NUMBERS, VALUES, digits_of, head_values
from verifiers.results.rows import READ_ERRORS, RolloutOutput, check_num_metrics, saved_row
from verifiers.runtime.bounded import open_file
from verifiers.runtime.decoding import decode_json
from verifiers.runtime.json import decode_row, encode_row
from verifiers.storage.images import StoredImages, stored_name
from verifiers.storage.journal import journal_lines, scan_journal

BATCH_ROWS = 2**12
"""Rows that are added to the columns at a time."""
_PLAIN = re.compile(r"[ -!#-\[\]-~]+")
"""Text that JSON does not escape, so that a line can be searched without decoding it."""


class _Texts(msgspec.Struct):
    prompt: object = None
    completion: Any = None
    answer: object = None


class _Info(msgspec.Struct):
    info: object = None


_TEXTS = msgspec.json.Decoder(_Texts)
_INFO = msgspec.json.Decoder(_Info)
_METRICS = VALUES.index("metrics")
MAX_VALUE_CHARS = 80
"""Length of a value of ``info`` that is no number."""


class RowIndex:
    """The index of a file. ``metric_names``: names of the metrics, for older versions without a
    ``metrics`` field.

    >>> def best(path):
    ...     index = RowIndex(path)
    ...     index.read()
    ...     return max(range(len(index)), key=index.columns["reward"].__getitem__)
    """

    def __init__(self, path: Path, metric_names: Sequence[str] = ()):
        self.path = path
        self._metric_names = list(metric_names)
        self._lock = threading.RLock()
        self._clear()

    def _clear(self) -> None:
        self.columns: dict[str, Any] = {name: Column("f8") for name in NUMBERS}
        self.columns |= {name: NameColumn() for name in (*NAMES, *INNER_NAMES)}
        self.columns |= {"example": Column("i8"), "key": Column("S")}
        """``key``: 16 digits of the hash of an example, and the number of an equal example."""
        self.metrics: dict[str, Column] = {}
        self._names_of_metrics: set[str] = set()
        self.usage: dict[str, Column] = {}
        """Counts of ``token_usage`` by name, NaN if a rollout has none."""
        self.keys = KeyColumn()
        self.ends = Column("i8")
        """Byte offset of the end of each line."""
        self._added: list[tuple[Any, ...]] = []
        """Rows that are not yet in the columns."""
        self.failure: JournalError | None = None
        """What stopped the reading: damage of the file, which stays in front of the
        rows after it."""
        self.generation = getattr(self, "generation", -1) + 1
        """Changes when the file was rewritten, so that row numbers refer to other rollouts."""
        self.end = 0
        """Bytes that were read: the end of a write."""
        self._identity: tuple[int, int] | None = None
        self._size = 0
        self.is_journal: bool | None = None
        """Whether the lines have checksums; None until the file was read."""

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def replaced(self) -> list[int]:
        """Row numbers that a newer attempt of the same rollout replaces."""
        return self.keys.replaced()

    @property
    def damage(self) -> str | None:
        """The damage of the file as a sentence; None for an intact file."""
        return None if self.failure is None else str(self.failure)

    @property
    def is_complete(self) -> bool:
        """Whether everything was read that the file held at the last ``read``, except an unfinished
        last line."""
        return self.failure is not None or self.end >= self._size

    @property
    def progress(self) -> float:
        """Fraction of the file that was read, 0 to 1."""
        return 1.0 if self.is_complete else self.end / self._size

    def read(self, budget_s: float = math.inf, max_rows: float = math.inf) -> None:
        """Index appended lines, for about ``budget_s`` seconds and up to the write with row
        ``max_rows``.

        Raises: ``OSError``.
        """
        deadline = time.monotonic() + budget_s
        with self._lock:
            stat = os.stat(self.path)
            identity = (stat.st_dev, stat.st_ino)
            if self._identity is not None and (
                identity != self._identity or stat.st_size < self.end
            ):
                self._clear()
            grown = stat.st_size != self._size or self._identity is None
            self._identity, self._size = identity, stat.st_size
            if self.failure is not None or (not grown and self.is_complete):
                return
            try:
                self._read(deadline, len(self) + max_rows)
            except JournalError as error:
                self.failure = error
            finally:
                self._flush()

    def _read(self, deadline: float, last_row: float) -> None:
        for ends, bodies in self._writes():
            for end, body in zip(ends, _completed(bodies, self.path), strict=True):
                if body:
                    self._add(body, end)
            self.end = ends[-1]
            if time.monotonic() > deadline or len(self) + len(self._added) >= last_row:
                return
            if len(self._added) >= BATCH_ROWS:
                self._flush()
        self._size = self.end  # the rest is an unfinished write

    def part(self, first: int) -> dict[str, Any]:
        """What is held of the rows from ``first`` on, as JSON-like values and arrays.

        Raises: ``TypeError`` for a file of another program, whose rows have no keys or whose
        examples no numbers.
        """
        columns = self._number_columns()
        if "example" not in columns or self.keys.first_missing is not None:
            raise TypeError(f"{self.path} was not written by this library")
        groups = {"columns": columns, "metrics": self.metrics, "usage": self.usage}
        values = {
            group: {name: column.since(first) for name, column in members.items()}
            for group, members in groups.items()
        }
        return {
            **values,
            "names": {name: self.columns[name].names for name in (*NAMES, *INNER_NAMES)},
        }

    def add_part(self, part: Mapping[str, Any], end: int) -> None:
        """Add what ``part`` returned for the next rows of a journal, up to the byte ``end``."""
        for name, names in part["names"].items():
            self.columns[name].set_names(names)
        self._extend(part["columns"], part["metrics"], part["usage"])
        self.end, self.is_journal = end, True

    def _number_columns(self) -> dict[str, Column]:
        """All that every row has, the end last, by the names under which it is kept."""
        columns = {name: self.columns[name] for name in (*NUMBERS, "key")}
        columns |= {name: self.columns[name].codes for name in (*NAMES, *INNER_NAMES)}
        if isinstance(example := self.columns["example"], Column):
            columns["example"] = example
        return columns | {"rollout_key": self.keys.codes, "end": self.ends}

    def _extend(
        self, columns: Mapping[str, Any], metrics: Mapping[str, Any], usage: Mapping[str, Any]
    ) -> None:
        """Add the values of some rows to each column; NaN if these or the earlier
        rows have none."""
        num_before, num_added = len(self), len(columns["end"])
        for group, values in ((self.metrics, metrics), (self.usage, usage)):
            for name in dict.fromkeys((*group, *values)):
                if name not in group:
                    group[name] = Column("f8", np.full(num_before, math.nan))
                group[name].extend(values[name] if name in values else np.full(num_added, math.nan))
        members = self._number_columns()
        for name, values in columns.items():
            members[name].extend(values)

    def newest(self, key: str) -> int | None:
        """The row number of the newest attempt of a rollout, by its ``rollout_key``."""
        return self.keys.newest(key)

    def stored(self, number: int) -> dict[str, Any]:
        """One line as it was written, with its images. Raises: as ``row``."""
        with open_file(self.path) as file:
            row: dict[str, Any] = StoredImages(self.path.parent).restored(
                self._stored(file, number)
            )
            return row

    def row(self, number: int) -> RolloutOutput:
        """A saved rollout, read from disk. Raises: ``JournalError`` for a line of another shape;
        ``LookupError``; ``OSError``; ``ValueError``: file changed."""
        return next(self.rows([number]))

    def rows(self, numbers: Iterable[int], *, restores: bool = True) -> Iterator[RolloutOutput]:
        """The saved rollouts with these row numbers, in this order; ``restores``: with their images,
        else with references to them. Raises: as ``row``."""
        images = StoredImages(self.path.parent)
        with open_file(self.path) as file:
            for number in numbers:
                row = self._stored(file, number)
                if restores:
                    images.restored(row)
                yield saved_row(row, f"{self.path}:{number + 1}", self._metric_names)

    def texts(self, numbers: Sequence[int]) -> Iterator[tuple[Any, Any, Any]]:
        """(prompt, completion, answer) of these row numbers, without decoding other fields. Raises:
        as ``row``."""
        with open_file(self.path) as file:
            for number in numbers:
                line = self._line(file, number)
                try:
                    if SHARED_MARK in line:
                        raise msgspec.DecodeError
                    texts = _TEXTS.decode(line)
                    yield texts.prompt, texts.completion, texts.answer
                except (msgspec.DecodeError, RecursionError):
                    row = self._stored(file, number)
                    yield row.get("prompt"), row.get("completion"), row.get("answer")

    def info_names(self) -> list[str]:
        """The keys of the first rollout's ``info`` that hold one value, as ``info.<key>``."""
        if not len(self):
            return []
        with open_file(self.path) as file:
            info = _info_of(self._line(file, 0))
        return [
            f"info.{key}"
            for key, value in info.items()
            if isinstance(value, str | int | float | bool)
        ]

    def info_values(
        self, name: str, first: int = 0, budget_s: float = math.inf
    ) -> tuple[list[object], int]:
        """(the values of ``info.<key>`` from row ``first`` on, the row number to continue from).

        Numbers stay numbers, other values become text; None if there is none. Stops after about
        ``budget_s`` seconds. Raises: as ``row``; ``ValueError`` for a name that does not begin with
        ``info.``.
        """
        if not name.startswith("info."):
            raise ValueError(f"{name!r} is not a key of info; write info.KEY")
        values = [
            _plain_value(_info_of(line).get(name.removeprefix("info.")))
            for _, line in self._lines(first, budget_s)
        ]
        return values, first + len(values)

    def search(
        self, text: str, first: int = 0, budget_s: float = math.inf
    ) -> tuple[list[int], int]:
        """(row numbers from ``first`` on whose texts contain ``text``, the row number to continue
        from).

        Ignores case. Stops after about ``budget_s`` seconds; at the end of the file the second
        value is the number of rows. Raises: as ``row``.
        """
        folded = text.casefold()
        matches: list[int] = []
        raw = folded.encode() if _PLAIN.fullmatch(folded) else None
        number = first - 1
        for number, line in self._lines(first, budget_s):
            if (raw is None or raw in line.lower()) and folded in _searched_text(
                decode_row(line)
            ).casefold():
                matches.append(number)
        return matches, number + 1

    def _lines(self, first: int, budget_s: float) -> Iterator[tuple[int, bytes]]:
        """Row numbers from ``first`` on and their lines, for about ``budget_s`` seconds."""
        deadline = time.monotonic() + budget_s
        with open_file(self.path) as file:
            for number in range(first, len(self)):
                yield number, self._line(file, number)
                if time.monotonic() > deadline:
                    return

    def _stored(self, file: IO[bytes], number: int) -> dict[str, object]:
        row = decode_row(self._line(file, number))
        row.pop("crc32", None), row.pop("write_part", None)
        if SHARED in row:
            rows_back = rows_back_of(row, location := f"{self.path}:{number + 1}")
            row = completed(row, self._stored(file, number - rows_back), location)
        return row

    def _line(self, file: IO[bytes], number: int) -> bytes:
        if not 0 <= number < len(self):
            raise LookupError(f"{self.path} has no row {number}")
        start = self.ends[number - 1] if number else 0  # an empty line before this row counts to it
        file.seek(start)
        line: bytes = file.read(self.ends[number] - start)
        return line

    def _writes(self) -> Iterator[tuple[list[int], list[bytes]]]:
        """The complete writes after the last read: end offsets of their lines, and the lines."""
        if self.is_journal is None:
            with open_file(self.path) as file:
                first = next(journal_lines(file, self.path), b"")
            if not first.endswith(b"\n"):  # nothing was written yet
                return iter(())
            self.is_journal = b'"crc32":' in first
        if self.is_journal:
            return scan_journal(self.path, self.end, len(self) + 1)
        return self._plain_lines(self.end)

    def _plain_lines(self, start: int) -> Iterator[tuple[list[int], list[bytes]]]:
        with open_file(self.path) as file:
            file.seek(start)
            for line in journal_lines(file, self.path):
                if not line.endswith(b"\n"):
                    return
                start += len(line)
                yield [start], [line.strip()]

    def _add(self, body: bytes, end: int) -> None:
        """Note a row that ends at the byte ``end``. *Raises* JournalError if it is no saved
        rollout."""
        line = len(self) + len(self._added) + 1
        try:
            values = head_values(body, self._metric_names)
        except READ_ERRORS as error:
            raise JournalError(
                f"{self.path}:{line}: this line is not a saved rollout ({type(error).__name__}:"
                f" {error})"
            ) from error
        self._names_of_metrics.update(values[_METRICS])
        check_num_metrics(self._names_of_metrics, f"{self.path}:{line}")
        self._added.append((*values, end))

    def _flush(self) -> None:
        """Move the noted rows to the columns."""
        if not self._added:
            return
        columns: dict[str, Any] = dict(
            zip((*VALUES, "end"), zip(*self._added, strict=True), strict=True)
        )
        self._added = []
        groups = []
        for group in (columns.pop("metrics"), columns.pop("usage")):
            names = dict.fromkeys(itertools.chain.from_iterable(group))
            groups.append({name: [values.get(name) for values in group] for name in names})
        for name in (*NAMES, *INNER_NAMES):
            columns[name] = self.columns[name].encode(columns[name])
        digits = {text: digits_of(text) for text in set(columns["key"])}
        columns["key"] = [digits[text] for text in columns["key"]]
        self._extend_others(columns)
        self._extend(columns, *groups)

    def _extend_others(self, columns: dict[str, Any]) -> None:
        """Add, and take out of ``columns``, the keys, and ids of examples that are no integers."""
        ids, held = columns["example"], self.columns["example"]
        if isinstance(held, list) or set(map(type, ids)) != {int} or max(map(abs, ids)) >= 2**63:
            self.columns["example"] = [*held, *columns.pop("example")]  # texts, of other programs
        self.keys.extend(columns.pop("rollout_key"))


def _completed(bodies: list[bytes], path: Path) -> list[bytes]:
    """The rows of a write, those of branches with what they share with their parents."""
    if not any(SHARED_MARK in body for body in bodies):
        return bodies
    return [encode_row(row) for row in whole_rows(map(decode_row, bodies), str(path))]


def _info_of(line: bytes) -> Mapping[str, object]:
    try:
        info = _INFO.decode(line).info
    except (msgspec.DecodeError, UnicodeError, RecursionError):  # lone surrogates
        info = decode_row(line).get("info")
    if isinstance(info, str):  # runs of other versions
        with contextlib.suppress(ValueError):
            info = decode_json(info)
    return info if isinstance(info, Mapping) else {}


def _plain_value(value: object) -> object:
    if value is None or isinstance(value, int | float):
        return value
    return (value if isinstance(value, str) else json.dumps(value))[:MAX_VALUE_CHARS]


def _searched_text(row: Mapping[str, object]) -> str:
    """The searchable text of a saved rollout: its conversation, answer, error and info."""
    pieces: list[str] = []
    for name in ("prompt", "completion", "answer", "error", "info"):
        _collect(row.get(name), pieces)
    return "\n".join(pieces)


def _collect(value: object, pieces: list[str]) -> None:
    if isinstance(value, str):
        if not value.startswith("data:") and not stored_name(value):
            pieces.append(value)
    elif isinstance(value, Mapping):
        for member in value.values():
            _collect(member, pieces)
    elif isinstance(value, list):
        for member in value:
            _collect(member, pieces)
