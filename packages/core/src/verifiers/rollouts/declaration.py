"""``Saved``: what is declared of a field of a record, on the field's own line.

``name: Annotated[type, Saved(...)] = default`` says once what everything else derives: the keys
that authors see (``State``, ``TrajectoryStep``), the JSON of journal and checkpoint, the columns of
results and exports, what an index keeps, the types for checkers (``typed_fields``) and the table of
the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

T = TypeVar("T")


def same(value: T) -> T:
    """The value as it is."""
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Names and formats of a field. ``name``, ``key`` and ``column`` are the attribute's name where
    they are empty."""

    name: str = ""
    """In a saved rollout."""
    when: Literal["always", "if set", "if asked", "never"] = "always"
    """Which saved rollouts have it: ``if set`` those whose value says something, ``if asked`` those
    whose run saves the column of this name."""
    key: str | None = ""
    """In the author's dict; None: authors do not see it."""
    column: str = ""
    """The list of all rollouts' values in results."""
    type: str = ""
    """Of a saved value, where it is another than the attribute's."""
    default: Callable[[], Any] | None = None
    """Of a column of a row."""
    write: Callable[[Any], Any] = same
    """The value -> a value that ``runtime.json`` encodes."""
    read: Callable[[Any], Any] = same
    """A decoded JSON value -> the value. *Raises* ValueError, KeyError or TypeError for another
    shape."""
    index: Literal["", "number", "name"] = ""
    """How an index of many rollouts keeps it, in one column; ``""``: it does not."""


class Field(NamedTuple):
    """A declared field."""

    attribute: str
    type: Any
    """As annotated."""
    saved: Saved

    @property
    def name(self) -> str:
        return self.saved.name or self.attribute

    @property
    def key(self) -> str | None:
        return None if self.saved.key is None else self.saved.key or self.attribute

    @property
    def column(self) -> str:
        return self.saved.column or self.name


def declared(cls: type) -> dict[str, Field]:
    """The fields of a class that have a ``Saved``, by attribute: annotations first, then
    properties."""
    hints = get_type_hints(cls, include_extras=True)
    for name, member in vars(cls).items():
        if isinstance(member, property) and member.fget is not None:
            hints[name] = get_type_hints(member.fget, include_extras=True).get("return")
    fields = {}
    for name, hint in hints.items():
        for mark in get_args(hint)[1:]:
            if isinstance(mark, Saved):
                fields[name] = Field(name, get_args(hint)[0], mark)
    return fields


def values_to_save(fields: Mapping[str, Field], record: object) -> dict[str, object]:
    """The saved values of a record, by saved name: of the fields that are saved always, and of
    those that say something."""
    saved = {}
    for attribute, field in fields.items():
        mark = field.saved
        if mark.when == "always":
            saved[field.name] = mark.write(getattr(record, attribute))
        elif mark.when == "if set" and (value := getattr(record, attribute)) not in EMPTY:
            saved[field.name] = mark.write(value)
    return saved


EMPTY: tuple[Any, ...] = (None, "", {}, [])
"""Values that say nothing; False says something."""
