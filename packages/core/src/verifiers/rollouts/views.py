"""``View``: a dict some of whose keys are attributes of a record, for code that reads dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Dict = dict[str, Any]
else:

    class _Dict(MutableMapping, dict):
        """A dict whose methods all go through the few that ``View`` defines."""

        __getitem__ = dict.__getitem__  # it calls ``__missing__`` for keys that it does not store
        __delitem__ = dict.__delitem__


class View(_Dict):
    """A dict whose keys ``names()`` are read and written elsewhere; it stores the other keys.

    Subclasses define ``names``, ``read`` and ``write``. Every method of a dict, ``dict(view)``,
    ``{**view}`` and JSON see all keys.
    """

    def names(self) -> tuple[str, ...]:
        """The keys that are stored elsewhere."""
        raise NotImplementedError

    def read(self, key: str) -> Any:
        """The value of one of ``names``, or of a key that is computed. *Raises* KeyError."""
        raise NotImplementedError

    def write(self, key: str, value: object) -> bool:
        """Store the value elsewhere; False if the view stores it."""
        raise NotImplementedError

    def __missing__(self, key: str) -> Any:
        return self.read(key)

    def __setitem__(self, key: str, value: object) -> None:
        if not self.write(key, value):
            dict.__setitem__(self, key, value)

    def __iter__(self) -> Iterator[str]:
        yield from self.names()
        yield from dict.__iter__(self)

    def __len__(self) -> int:
        return len(self.names()) + dict.__len__(self)

    def __or__(self, mapping: Mapping[str, object]) -> dict[str, Any]:  # type: ignore[override]
        return {**self, **mapping}

    def __ior__(self, mapping: Any) -> Any:  # type: ignore[misc]
        self.update(mapping)
        return self

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> dict[str, Any]:
        """A plain dict of all keys."""
        return dict(self)


def plain(value: object) -> Any:
    """A value with plain dicts in place of views, for encoders in C, which read a
    dict's storage."""
    if isinstance(value, View):
        value = dict(value)
    if isinstance(value, dict):
        return {key: plain(member) for key, member in value.items()}
    return [plain(member) for member in value] if isinstance(value, list) else value
