"""Columns of an index in little memory: 8 bytes for a number, 4 for one of few names, 16 for the key of a rollout.

All are appended to, and read like lists; a slice is a list.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

_HASH_DIGITS = 16
_KEY_DIGITS = 32


class NameColumn(Sequence["str | None"]):
    """Names of which few are different; None where there is none.

    >>> column = NameColumn(["stop", None, "stop"])
    >>> column[:], column.codes.tolist(), column.names
    (['stop', None, 'stop'], [0, -1, 0], ['stop'])
    """

    def __init__(self, values: Iterable[str | None] = ()):
        self.names: list[str] = []
        self.codes = array("i")
        self._code: dict[str | None, int] = {None: -1}
        for value in values:
            self.append(value)

    @classmethod
    def of_codes(cls, names: Sequence[str], codes: array[int]) -> NameColumn:
        """The column with these distinct names, and these codes: indices of names, -1 for None."""
        column = cls()
        column.names, column.codes = list(names), codes
        column._code |= {name: code for code, name in enumerate(names)}
        return column

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
        self.digits = array("Q")
        self.numbers = array("I")
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
        return not self.others and set(self.numbers) == {1}


class KeyColumn:
    """Keys of rollouts, of which the newest row of each is found.

    >>> column = KeyColumn()
    >>> for key in ("0f" * 16, "1e" * 16, "0f" * 16):
    ...     column.append(key)
    >>> column.find(["1e" * 16, "0f" * 16, "2d" * 16]).tolist(), column.replaced()
    ([1, 2, -1], [0])
    """

    def __init__(self) -> None:
        self.halves = array("Q"), array("Q")
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
        order, high, low = self._sorted()
        places = np.searchsorted(high, pairs[:, 0], side="right") - 1
        same_high = (places >= 0) & (high[places] == pairs[:, 0])
        same = same_high & (low[places] == pairs[:, 1])
        found[same] = order[places[same]]
        for each in np.flatnonzero(same_high & ~same):  # two keys that share their first half
            place = int(places[each])
            while place >= 0 and high[place] == pairs[each, 0] and low[place] != pairs[each, 1]:
                place -= 1
            if place >= 0 and high[place] == pairs[each, 0]:
                found[each] = order[place]
        return found

    def newest(self, key: str) -> int | None:
        """The number of the newest row of one key."""
        number = int(self.find([key])[0])
        return None if number < 0 else number

    def replaced(self) -> list[int]:
        """Numbers of the rows that a newer one replaces, in order."""
        if not len(self):
            return []
        order, high, low = self._sorted()
        same = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
        return sorted(order[:-1][same].tolist())

    def _sorted(self) -> tuple[Any, Any, Any]:
        """(row numbers ordered by key, then by row; both halves of their keys in this order)."""
        if self._order is None or len(self._order[0]) != len(self):
            high, low = (np.array(half, dtype=np.uint64) for half in self.halves)
            order = np.lexsort((low, high))  # stable
            self._order = order, high[order], low[order]
        return self._order  # type: ignore[no-any-return]


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


Column: TypeAlias = "array[Any] | NameColumn | HashColumn | list[Any]"


def select(column: Column, rows: np.ndarray) -> Any:
    """The values of some rows, whose numbers are an integer array: an array of numbers, or a list of names.

    >>> select(array("d", [0.5, 1.0]), np.array([1, 0, 1])).tolist(), select(NameColumn(["stop"]), np.array([0, 0]))
    ([1.0, 0.5, 1.0], ['stop', 'stop'])
    """
    if isinstance(column, array):
        return array(column.typecode, np.array(column)[rows].tobytes())
    if isinstance(column, NameColumn):
        names = np.array([*column.names, None], dtype=object)
        return names[np.array(column.codes)[rows]].tolist()
    return [column[row] for row in rows.tolist()]
