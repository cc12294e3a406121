"""Columns of an index in little memory: 0 to 8 bytes for a number or one of few names, 16 for the key of a rollout.

All are appended to, and read like lists; a slice is a list. What was appended is held in 4 or 8 bytes, until ``seal``
makes a block of it, in the smallest type that holds each of its values; a block of equal values takes no memory. A
block may be in a file, and is then read from there whenever it is asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np

from verifiers.errors import JournalError
from verifiers.runtime.failpoints import failpoint
from verifiers.storage.files import write_all

_HASH_DIGITS = 16
_KEY_DIGITS = 32
_SMALLER = {"d": "bhif", "Q": "I", "q": "bhi", "i": "bh", "I": "BH"}
"""Type of a column -> smaller types of a block, in which it is held when every value survives."""
_SELECTED = 2**14
"""Values of a selection that are in memory at a time."""


class BlocksFile:
    """A file of blocks, open to be read and written; closed when nothing refers to it. *Raises* OSError."""

    def __init__(self, path: Path):
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        weakref.finalize(self, os.close, self._fd).atexit = False

    def read(self, start: int, num_bytes: int) -> bytes:
        """The bytes from ``start`` on; fewer at the end of the file."""
        return os.pread(self._fd, num_bytes, start)

    def replace_end(self, start: int, content: bytes) -> None:
        """Write ``content`` in place of what follows the byte ``start``."""
        os.ftruncate(self._fd, start)
        failpoint("index.append")
        os.lseek(self._fd, start, os.SEEK_SET)
        write_all(self._fd, content)


class FileBlock:
    """A block of numbers that is in a file from the byte ``start`` on. *Raises* JournalError when it has changed."""

    __slots__ = ("_checksum", "_file", "_kind", "_size", "_start")

    def __init__(self, file: BlocksFile, start: int, values: np.ndarray):
        self._file, self._start, self._kind, self._size = file, start, values.dtype, len(values)
        self._checksum = crc32(values.tobytes())

    def __len__(self) -> int:
        return self._size

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        content = self._file.read(self._start, self._size * self._kind.itemsize)
        if crc32(content) != self._checksum:
            raise JournalError(
                f"{self._file.path} was changed while this process used it; every rollout is in the journal beside it, "
                "so delete this file and load or resume the run again",
                path=str(self._file.path),
            )
        values: np.ndarray = np.frombuffer(content, self._kind)
        return values if dtype is None else values.astype(dtype, copy=False)


Block: TypeAlias = np.ndarray | FileBlock


class NumberColumn(Sequence[Any]):
    """Numbers of one type: ``d`` (NaN where one is unknown) or a type of integers, as ``array`` names them.

    >>> column = NumberColumn("d", [0.5, 2.0])
    >>> column.seal()
    >>> column.append(7.0)
    >>> column[:], column[-1], [block.dtype.str for block in column.blocks]
    ([0.5, 2.0, 7.0], 7.0, ['<f4'])
    """

    def __init__(self, typecode: str, values: Iterable[float] = ()):
        self.typecode = typecode
        self._parts: tuple[list[Block], list[int], array[Any]] = [], [], array(typecode, values)
        """Blocks, the number of values up to the end of each, and what follows; replaced at once for other threads."""
        self._last: tuple[Block | None, np.ndarray] = None, np.empty(0)
        """The block of the last single number, and its numbers."""

    @property
    def blocks(self) -> list[Block]:
        """What is sealed; one may be replaced by an equal one."""
        return self._parts[0]

    def append(self, value: float) -> None:
        """Add a number at the end."""
        self._parts[2].append(value)

    def set_blocks(self, blocks: Sequence[Block]) -> None:
        """Replace all numbers by those of these blocks."""
        ends = list(itertools.accumulate(map(len, blocks)))
        self._parts = list(blocks), ends, array(self.typecode)

    def seal(self) -> None:
        """Make a block of what was appended since the last one."""
        blocks, ends, tail = self._parts
        if len(tail):
            self._parts = [*blocks, _smallest(np.array(tail), self.typecode)], [*ends, len(self)], array(self.typecode)

    def __len__(self) -> int:
        _, ends, tail = self._parts
        return (ends[-1] if ends else 0) + len(tail)

    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            return self.part(start, stop).tolist() if step == 1 else [self[n] for n in range(start, stop, step)]
        blocks, ends, tail = self._parts
        place = place + len(self) if place < 0 else place
        number = bisect_right(ends, place)
        inside = place - (ends[number - 1] if number else 0)
        if number == len(blocks):
            return tail[inside]
        block, values = self._last
        if block is not blocks[number]:
            block, values = self._last = blocks[number], np.asarray(blocks[number])
        value = values[inside].item()
        return float(value) if self.typecode == "d" else value

    def __iter__(self) -> Iterator[Any]:
        for part in self.arrays():
            yield from part.tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.part(0, len(self)).astype(dtype or self.typecode, copy=False)

    def at(self, rows: np.ndarray) -> np.ndarray:
        """The numbers at some places, an integer array: as an array."""
        blocks, ends, tail = self._parts
        found = np.empty(len(rows), dtype=self.typecode)
        for start in range(0, len(rows), _SELECTED):  # near rows are in few blocks
            some, into = rows[start : start + _SELECTED], found[start : start + _SELECTED]
            where = np.searchsorted(ends, some, side="right")
            for number in np.flatnonzero(np.bincount(where)).tolist():
                is_here = where == number
                inside = some[is_here] - (ends[number - 1] if number else 0)
                values = np.asarray(blocks[number]) if number < len(blocks) else np.array(tail)
                into[is_here] = values[inside]
        return found

    def arrays(self) -> Iterator[np.ndarray]:
        """The blocks and the rest, of the column's type; only one is in memory."""
        blocks, _, tail = self._parts
        yield from (np.asarray(block).astype(self.typecode) for block in blocks)
        if len(tail):
            yield np.array(tail)

    def part(self, start: int, stop: int) -> np.ndarray:
        """The numbers from ``start`` to ``stop``, or to the end."""
        stop = min(stop, len(self))
        found, first = np.empty(max(0, stop - start), dtype=self.typecode), 0
        blocks, _, tail = self._parts
        for part in (*blocks, np.array(tail)):
            low, high = max(start, first), min(stop, first + len(part))
            if low < high:
                found[low - start : high - start] = np.asarray(part)[low - first : high - first]
            first += len(part)
        return found


def _smallest(values: np.ndarray, typecode: str) -> np.ndarray:
    """The values in the smallest type that holds each of them; equal ones as a view of one."""
    with np.errstate(invalid="ignore", over="ignore"):
        for smaller in _SMALLER[typecode]:
            fewer = values.astype(smaller)
            if _are_same(fewer.astype(typecode), values):
                values = fewer
                break
    repeated = np.broadcast_to(values[:1].copy(), values.shape)
    return repeated if _are_same(repeated, values) else values


def _are_same(some: np.ndarray, others: np.ndarray) -> bool:
    """Whether the values are equal, NaN to NaN, and -0.0 not to 0.0."""
    if some.dtype.kind != "f":
        return np.array_equal(some, others)
    return np.array_equal(some, others, equal_nan=True) and np.array_equal(np.signbit(some), np.signbit(others))


class NameColumn(Sequence["str | None"]):
    """Names of which few are different; None where there is none.

    >>> column = NameColumn(["stop", None, "stop"])
    >>> column[:], column.codes[:], column.names
    (['stop', None, 'stop'], [0, -1, 0], ['stop'])
    """

    def __init__(self, values: Iterable[str | None] = ()):
        self.names: list[str] = []
        self.codes = NumberColumn("i")
        self._code: dict[str | None, int] = {None: -1}
        for value in values:
            self.append(value)

    def set_names(self, names: Sequence[str]) -> None:
        """Replace the distinct names."""
        self.names = list(names)
        self._code = {None: -1} | {name: code for code, name in enumerate(names)}

    def append(self, value: str | None) -> None:
        """Add a name at the end."""
        code = self._code.get(value)
        if code is None:
            assert value is not None
            code = self._code[value] = len(self.names)
            self.names.append(value)
        self.codes.append(code)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return [self._name(code) for code in self.codes[place]]
        return self._name(self.codes[place])

    def _name(self, code: int) -> str | None:
        return None if code < 0 else self.names[code]


class HashColumn(Sequence["str | None"]):
    """The first 16 digits of hashes of examples, with the number of an example of equal content; None for none.

    >>> HashColumn(["9f86d081884c7d659a2feaa0c55ad015", "9f86d081884c7d659a2feaa0c55ad015.2", None])[:]
    ['9f86d081884c7d65', '9f86d081884c7d65.2', None]
    """

    def __init__(self, values: Iterable[str | None] = ()):
        self.digits = NumberColumn("Q")
        self.numbers = NumberColumn("I")
        """1 for an example, n for the n-th of equal content, 0 for None."""
        self.others: dict[int, str] = {}
        """Place -> a text that is no hash, in files of other programs."""
        for value in values:
            self.append(value)

    def append(self, value: str | None) -> None:
        """Add a hash at the end."""
        number, digits = 0, 0
        if value:
            text, _, suffix = value.partition(".")
            try:
                digits, number = int(text[:_HASH_DIGITS], 16), int(suffix or 1)
            except ValueError:
                number = -1
            if number < 1 or len(text) < _HASH_DIGITS or not text.isalnum():
                digits, number = 0, 1
                self.others[len(self)] = value
        self.digits.append(digits)
        self.numbers.append(number)

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        number = self.numbers[place]
        if not number:
            return None
        if self.others and (other := self.others.get(place % len(self))) is not None:
            return other
        text = f"{self.digits[place]:0{_HASH_DIGITS}x}"
        return text if number == 1 else f"{text}.{number}"

    @property
    def is_plain(self) -> bool:
        """Whether ``digits`` alone tell all examples apart."""
        return not self.others and all((block == 1).all() for block in self.numbers.arrays())


class KeyColumn:
    """Keys of rollouts, of which the newest row of each is found.

    >>> column = KeyColumn()
    >>> for key in ("0f" * 16, "1e" * 16, "0f" * 16):
    ...     column.append(key)
    >>> column.find(["1e" * 16, "0f" * 16, "2d" * 16]).tolist(), column.replaced()
    ([1, 2, -1], [0])
    """

    def __init__(self) -> None:
        self.halves = NumberColumn("Q"), NumberColumn("Q")
        self.first_missing: int | None = None
        """The number of the first row without a key."""
        self._order: Any = None

    def append(self, key: str | None) -> None:
        """Add the key of one row; None = it has none."""
        if key is None and self.first_missing is None:
            self.first_missing = len(self)
        high, low = _halves(f"row {len(self)} has no key" if key is None else key)
        self.halves[0].append(high)
        self.halves[1].append(low)

    def __len__(self) -> int:
        return len(self.halves[0])

    def find(self, keys: Iterable[str]) -> Any:
        """The number of the newest row of each key, -1 where there is none: an array."""
        pairs = _halves_of(list(keys))
        found = np.full(len(pairs), -1, dtype=np.int64)
        if not len(self) or not len(pairs):
            return found
        order, high = self._sorted()
        low = self.halves[1]
        places = np.searchsorted(high, pairs[:, 0], side="right") - 1
        same_high = (places >= 0) & (high[places] == pairs[:, 0])
        same = same_high & (low.at(order[places]) == pairs[:, 1])
        found[same] = order[places[same]]
        for each in np.flatnonzero(same_high & ~same):  # two keys that share their first half
            place = int(places[each])
            while place >= 0 and high[place] == pairs[each, 0] and low[int(order[place])] != pairs[each, 1]:
                place -= 1
            if place >= 0 and high[place] == pairs[each, 0]:
                found[each] = order[place]
        return found

    def pairs(self, start: int) -> Iterator[tuple[int, int]]:
        """The two halves of each key from a row on: as ``pairs_of``."""
        high, low = self.halves
        for first in range(start, len(self), _SELECTED):
            yield from zip(high[first : first + _SELECTED], low[first : first + _SELECTED], strict=True)

    def newest(self, key: str) -> int | None:
        """The number of the newest row of one key."""
        number = int(self.find([key])[0])
        return None if number < 0 else number

    def replaced(self) -> list[int]:
        """Numbers of the rows that a newer one replaces, in order."""
        if not len(self):
            return []
        order, high = self._sorted()
        (places,) = np.nonzero(high[1:] == high[:-1])
        low = self.halves[1]
        older = order[places][low.at(order[places]) == low.at(order[places + 1])]
        return sorted(older.tolist())

    def forget_order(self) -> None:
        """Free what speeds up ``find``."""
        self._order = None

    def _sorted(self) -> tuple[Any, Any]:
        """(row numbers ordered by key, then by row; the first halves of their keys in this order)."""
        if self._order is None or len(self._order[0]) != len(self):
            high, low = map(np.asarray, self.halves)
            order = np.lexsort((low, high)).astype(np.int32 if len(self) < 2**31 else np.int64)  # stable
            self._order = order, high[order]
        return self._order  # type: ignore[no-any-return]


def pairs_of(keys: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The two halves of each key."""
    return map(tuple, _halves_of(keys).tolist())


def _halves_of(keys: Sequence[str]) -> Any:
    """``_halves`` of each key, as an array [N, 2]; those of this library are read at once."""
    joined = "".join(keys)
    if {len(key) for key in keys} == {_KEY_DIGITS} and joined.isalnum():
        with contextlib.suppress(ValueError):  # letters that are no digits
            return np.frombuffer(bytes.fromhex(joined), dtype=">u8").reshape(-1, 2).astype(np.uint64)
    return np.array([_halves(key) for key in keys], dtype=np.uint64).reshape(-1, 2)


def _halves(key: str) -> tuple[int, int]:
    """128 bits of a key: its 32 digits, or of a text of another form, which other programs write, its hash."""
    try:
        if len(key) == _KEY_DIGITS and key.isalnum():
            return int(key[:16], 16), int(key[16:], 16)
    except ValueError:
        pass
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")


Column: TypeAlias = NumberColumn | NameColumn | HashColumn | list[Any]


class Selection(Sequence[Any]):
    """The values of some rows of a column, read when they are iterated; ``rows`` is an array of their numbers.

    >>> list(Selection(NumberColumn("d", [0.5, 1.0]), np.array([1, 0, 1])))
    [1.0, 0.5, 1.0]
    """

    def __init__(self, column: Column, rows: np.ndarray):
        self._column, self._rows = column, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return list(Selection(self._column, self._rows[place]))
        return self._column[int(self._rows[place])]

    def __iter__(self) -> Iterator[Any]:
        column = self._column
        for start in range(0, len(self._rows), _SELECTED):
            rows = self._rows[start : start + _SELECTED]
            if isinstance(column, NumberColumn):
                yield from column.at(rows).tolist()
            elif isinstance(column, NameColumn):
                names = [*column.names, None]  # the code -1 is the last
                yield from [names[code] for code in column.codes.at(rows).tolist()]
            else:
                yield from [column[row] for row in rows.tolist()]

    def take(self, places: np.ndarray) -> Selection:
        """The values at some places of this selection."""
        return Selection(self._column, self._rows[places])

    def part(self, start: int, stop: int) -> np.ndarray:
        """The numbers from ``start`` to ``stop`` of a column of numbers. *Raises* TypeError for another."""
        if not isinstance(self._column, NumberColumn):
            raise TypeError("only a column of numbers is an array")
        return self._column.at(self._rows[start:stop])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The numbers of a column of numbers. *Raises* TypeError for another."""
        values = self.part(0, len(self))
        return values.astype(dtype or values.dtype, copy=False)
