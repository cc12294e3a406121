"""Columns of an index in little memory: 0 to 8 bytes for a number or one of few names, 16 for a
key.

All are read like lists, and a slice is a list. Values are held in blocks, each in the smallest type
that holds all of its values.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

_SMALLER = {"f8": ("i1", "i2", "i4", "f4"), "i8": ("i1", "i2", "i4", "u4"), "i4": ("i1", "i2")}
"""Type of a column -> smaller types of a block, in which it is held when every value survives."""
_BLOCK_ROWS = 2**14
_KEY_DIGITS = 32


class Column(Sequence[Any]):
    """Values of a type: ``f8`` (NaN = unknown), ``i8``, ``i4``, or short texts ``S`` ("" = None).

    >>> column = Column("f8", [0.5, 2.0])
    >>> column.extend([7.0, None])
    >>> column[:], column[1], Column("S", [b"ab", b""])[:]
    ([0.5, 2.0, 7.0, nan], 2.0, ['ab', None])
    """

    def __init__(
        self, kind: str, values: Sequence[object] | np.ndarray = (), block_rows: int = _BLOCK_ROWS
    ):
        self._kind, self._block_rows = kind, block_rows
        self._blocks: list[np.ndarray] = []
        """All but the last have ``block_rows`` values; replaced at once, for other threads."""
        self.extend(values)

    def extend(self, values: Sequence[object] | np.ndarray) -> None:
        """Add values at the end. *Raises* OverflowError for an integer too large for the type."""
        if not len(values):
            return
        blocks, size = self._blocks, self._block_rows
        num_full = len(self) // size
        tail = _joined([*blocks[num_full:], np.asarray(values, self._kind)], self._kind)
        pieces = [
            smallest(tail[start : start + size], self._kind) for start in range(0, len(tail), size)
        ]
        self._blocks = blocks[:num_full] + pieces

    def __len__(self) -> int:
        blocks = self._blocks
        return (len(blocks) - 1) * self._block_rows + len(blocks[-1]) if blocks else 0

    def __getitem__(self, position: int | slice) -> Any:
        if isinstance(position, slice):
            return _listed(np.asarray(self)[position])
        blocks = self._blocks
        number, inside = divmod(range(len(self))[position], self._block_rows)
        return _listed(blocks[number][inside : inside + 1].astype(self._kind))[0]

    def __iter__(self) -> Iterator[object]:
        return iter(self[:])

    def since(self, row: int) -> np.ndarray:
        """The values from a row on, as an array."""
        number, inside = divmod(row, self._block_rows)
        return _joined(self._blocks[number:], self._kind)[inside:]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = self.since(0)
        return values if dtype is None else values.astype(dtype, copy=False)


def smallest(values: np.ndarray, kind: str) -> np.ndarray:
    """The values in the smallest type that holds each to the bit: NaN, and the sign of zero.

    Equal values are a view of that value.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        for smaller in _SMALLER.get(kind, ()):
            candidate = values.astype(smaller)
            if candidate.astype(kind).tobytes() == values.tobytes():
                values = candidate
                break
    first = values[:1].copy()
    if first.tobytes() * len(values) == values.tobytes():
        return np.broadcast_to(first, len(values))
    return values


def _joined(blocks: Sequence[np.ndarray], kind: str) -> np.ndarray:
    if not blocks:
        return np.empty(0, kind)
    is_text = kind == "S"  # a type without a length, which numpy would set to 1
    return np.concatenate(blocks, dtype=None if is_text else kind)


def _listed(values: np.ndarray) -> list[object]:
    plain: list[Any] = values.tolist()
    return [value.decode() or None for value in plain] if values.dtype.kind == "S" else plain


class NameColumn(Sequence["str | None"]):
    """Names of which few are different; None if there is none.

    >>> column = NameColumn(["stop", None, "stop"])
    >>> column[:], column.codes[:], column.names
    (['stop', None, 'stop'], [0, -1, 0], ['stop'])
    """

    def __init__(self, values: Iterable[str | None] = ()):
        self.codes = Column("i4")
        self.set_names([])
        self.codes.extend(self.encode(values))

    def set_names(self, names: Iterable[str]) -> None:
        """Replace the distinct names."""
        self.names = list(names)
        self._code: dict[str | None, int] = {name: code for code, name in enumerate(self.names)}
        self._code[None] = -1

    def encode(self, values: Iterable[str | None]) -> list[int]:
        """The code of each value, for ``codes``; a new name is added to ``names``."""
        values = list(values)
        for value in dict.fromkeys(values):
            if value is not None and value not in self._code:
                self._code[value] = len(self.names)
                self.names.append(value)
        return [self._code[value] for value in values]

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, position: int | slice) -> Any:
        names = [*self.names, None]  # the code -1 is the last
        codes = self.codes[position]
        return [names[code] for code in codes] if isinstance(position, slice) else names[codes]

    def __iter__(self) -> Iterator[str | None]:
        return iter(self[:])

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        names: np.ndarray = np.array([*self.names, None], object)[np.asarray(self.codes)]
        return names


class KeyColumn:
    """Keys of rollouts, of which the newest row of each is found.

    >>> column = KeyColumn()
    >>> column.extend(["0f" * 16, "1e" * 16, "0f" * 16])
    >>> column.find(["1e" * 16, "0f" * 16, "2d" * 16]).tolist(), column.replaced()
    ([1, 2, -1], [0])
    """

    def __init__(self) -> None:
        self.codes = Column("S16")
        self.first_missing: int | None = None
        """The number of the first row without a key."""
        self.forget_order()

    def extend(self, keys: Iterable[str | None]) -> None:
        """Add the key of each row; None = it has none, and replaces no other."""
        codes = []
        for row, key in enumerate(keys, len(self.codes)):
            if key is None and self.first_missing is None:
                self.first_missing = row
            codes.append(_code_of(f"row {row} has no key" if key is None else key))
        self.codes.extend(codes)

    def find(self, keys: Iterable[str]) -> np.ndarray:
        """The number of the newest row of each key, -1 if there is none: an array."""
        codes = np.array([_code_of(key) for key in keys], "S16")
        order, sorted_codes = self._sorted()
        if not len(order):
            return np.full(len(codes), -1)
        # -1 wraps, and is not equal
        positions = np.searchsorted(sorted_codes, codes, side="right") - 1
        return np.where(sorted_codes[positions] == codes, order[positions], -1)

    def newest(self, key: str) -> int | None:
        """The number of the newest row of a key."""
        number = int(self.find([key])[0])
        return None if number < 0 else number

    def replaced(self) -> list[int]:
        """Numbers of the rows that a newer row replaces, in order."""
        order, sorted_codes = self._sorted()
        return sorted(order[:-1][sorted_codes[1:] == sorted_codes[:-1]].tolist())

    def forget_order(self) -> None:
        """Free what speeds up ``find``."""
        self._order: tuple[np.ndarray, np.ndarray] = np.empty(0, np.int64), np.empty(0, "S16")

    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """(row numbers sorted_codes by key, then by row; the keys in this order)."""
        if len(self._order[0]) != len(self.codes):
            codes = np.asarray(self.codes)
            order = np.argsort(codes, kind="stable")
            self._order = order, codes[order]
        return self._order


def _code_of(key: str) -> bytes:
    """128 bits of a key: its 32 digits, or of a text of another form, which other programs write,
    its hash."""
    try:
        if len(key) == _KEY_DIGITS and key.isalnum():
            return bytes.fromhex(key)
    except ValueError:  # letters that are no digits
        pass
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:16]


AnyColumn: TypeAlias = Column | NameColumn | list[Any]


class Selection(Sequence[Any]):
    """The values of some rows of a column, read when they are asked for; ``rows``: an array of
    numbers.

    >>> list(Selection(Column("f8", [0.5, 1.0]), np.array([1, 0, 1])))
    [1.0, 0.5, 1.0]
    """

    def __init__(self, column: AnyColumn, rows: np.ndarray):
        self._column, self._rows = column, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: Any) -> Any:
        rows = self._rows[position]
        if isinstance(position, slice):
            return list(Selection(self._column, rows))
        return self._column[int(rows)]

    def __iter__(self) -> Iterator[Any]:
        values = np.asarray(self)
        starts = range(0, len(values), _BLOCK_ROWS)  # a list of all values would take 32 bytes each
        return itertools.chain.from_iterable(_listed(values[n : n + _BLOCK_ROWS]) for n in starts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        column = self._column
        is_list = isinstance(column, list)
        values = np.fromiter(column, object, len(column)) if is_list else np.asarray(column)
        selected: np.ndarray = values[self._rows]
        return selected.astype(dtype or values.dtype, copy=False)
