"""Several ``[[env]]`` tables -> what each says, and the share of each. Pure: loads no environment.

[[env]]                     [[env]]
id = "gsm8k"                id = "wordle"
weight = 3                  name = "games"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.runtime.suggest import closest
from verifiers_trainer.pipeline.mixture import distinct

KEYS = ("id", "args", "name", "weight")


@dataclass(frozen=True, slots=True)
class EnvTable:
    """One environment of several: ``EnvTable("gsm8k", {"num_train_examples": 500}, "gsm8k", 3.0)``."""

    id: str
    args: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """What it is called in the metrics; its id, without owner and version, unless given."""
    weight: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Its keys, as a file gives them."""
        said = {"id": self.id, "name": self.name, "args": dict(self.args), "weight": self.weight}
        return {key: value for key, value in said.items() if value not in (None, {})}


def read_tables(tables: Sequence[Any]) -> tuple[list[EnvTable], list[str]]:
    """(environments, problems) of the values of ``[[env]]``; with problems the environments are incomplete."""
    found, problems = [], []
    for number, table in enumerate(tables, 1):
        place = f"[[env]] number {number}"
        if not isinstance(table, Mapping):
            problems.append(f"{place} must be a table, not {table!r}")
            continue
        wrong = [f"{place} does not know {key!r}{closest(key, KEYS)}" for key in table if key not in KEYS]
        if not isinstance(table.get("id"), str) or not table["id"]:
            wrong.append(f"{place} needs an id")
        if not isinstance(table.get("name", ""), str):
            wrong.append(f"{place}: name is {table['name']!r}; it must be a text")
        if not isinstance(table.get("args", {}), Mapping):
            wrong.append(f"{place}: args must be a table, not {table['args']!r}")
        weight = table.get("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            wrong.append(f"{place}: weight is {weight!r}; it must be a number above 0")
        problems += wrong
        if not wrong:
            found.append(EnvTable(table["id"], dict(table.get("args", {})), table.get("name", ""), table.get("weight")))
    names = distinct([table.name or short_name(table.id) for table in found])
    return [EnvTable(t.id, t.args, name, t.weight) for t, name in zip(found, names, strict=True)], problems


def short_name(env_id: str) -> str:
    """An id without owner and version.

    >>> short_name("primeintellect/wordle@0.1.4")
    'wordle'
    """
    return env_id.rpartition("/")[2].partition("@")[0]


def shares(tables: Sequence[EnvTable]) -> dict[str, float] | None:
    """``env_weights`` of the tables: 1 where none is given; None when no table gives one."""
    if all(table.weight is None for table in tables):
        return None
    return {table.name: float(1 if table.weight is None else table.weight) for table in tables}
