"""The table of losses on the page is the table in the code, name by name and column by column."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the trainer")

from verifiers_trainer.algorithm.advantages import ADVANTAGES
from verifiers_trainer.algorithm.aggregation import AGGREGATIONS
from verifiers_trainer.algorithm.losses import OBJECTIVES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "\n\n".join(
    (DOCS / page).read_text(encoding="utf-8")
    for page in ("reference/losses.md", "train/objective.md")
)


def rows_below(header):
    lines = iter(PAGE[PAGE.index(header) :].splitlines()[2:])
    cells = []
    while (line := next(lines)).startswith("| "):
        cells.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return cells


def test_each_row_of_the_page_is_a_row_of_the_code():
    def bounds(objective):
        listed = [
            f"`{name}` {objective.bounds[name]:g}" if name in objective.bounds else f"`{name}`"
            for name in objective.reads
        ]
        return ", ".join(listed) or "none"

    shown = {
        name: [*columns] for name, _, *columns in rows_below("| `loss` | per token | aggregation |")
    }
    assert shown == {
        f"`{name}`": [
            f"`{objective.aggregation}`",
            f"`{objective.advantage}`",
            bounds(objective),
            objective.kl,
            objective.source,
        ]
        for name, objective in OBJECTIVES.items()
    }


@pytest.mark.parametrize(
    ("header", "registry"),
    [("| `advantage` |", ADVANTAGES), ("| `aggregation` |", AGGREGATIONS)],
    ids=["advantage", "aggregation"],
)
def test_the_page_lists_every_name(header, registry):
    listed = {name.split("`")[1] for name, *_ in rows_below(header)}
    assert listed == set(registry)
