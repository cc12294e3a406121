"""Train a tiny random model of every causal language model class, and write the table of
``docs/train/models.md``.

    python docs/models_page.py                 write the table from docs/train/models.jsonl
    python docs/models_page.py --check         exit 1 when the table differs from the file
    python docs/models_page.py --run           train every class first, some twenty minutes
    python docs/models_page.py --run NAME …    these only; the rows of others stay
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE, ROWS = DOCS / "train" / "models.md", DOCS / "train" / "models.jsonl"
BEGIN, END = "<!-- begin: docs/models_page.py -->\n", "<!-- end -->\n"
KINDS = ("full", "adapter")
Row = Mapping[str, Any]


def read() -> dict[tuple[str, str], Row]:
    """(model type, kind) -> row of the file."""
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["name"], row["kind"]): row for row in rows}


def write(rows: Mapping[tuple[str, str], Row]) -> None:
    text = "".join(json.dumps(rows[key]) + "\n" for key in sorted(rows))
    ROWS.write_text(text)


def run(names: Sequence[str]) -> None:
    """Train ``names`` and keep what was seen after each."""
    sys.path.insert(0, str(DOCS.parent / "tests"))
    from support import families

    rows = read()
    for name in names or families.names():
        with tempfile.TemporaryDirectory() as folder:
            for row in families.seen(name, Path(folder)):
                rows[name, row["kind"]] = row
                sys.stdout.write(f"{name} {row['kind']}: {row['outcome']} {row['why']}\n")
                sys.stdout.flush()
        write(rows)


def table(rows: Mapping[tuple[str, str], Row]) -> Iterator[str]:
    """The lines of the page between the marks."""
    names = sorted({name for name, _ in rows})
    yield "| model type | all weights | adapter |"
    yield "|---|---|---|"
    for name in names:
        cells = [rows.get((name, kind), {}).get("outcome", "not run") for kind in KINDS]
        yield f"| `{name}` | {cells[0]} | {cells[1]} |"
    yield ""
    yield "What refused, or went wrong:"
    yield ""
    yield "| model type | |"
    yield "|---|---|"
    for name in names:
        said = {row["why"] for kind in KINDS if (row := rows.get((name, kind), {})).get("why")}
        for why in sorted(said):
            yield f"| `{name}` | {_cell(why)} |"


def _cell(text: str) -> str:
    for sign in "|<>*_`":
        text = text.replace(sign, f"\\{sign}")
    return text


def page(rows: Mapping[tuple[str, str], Row], before: str) -> str:
    """``before`` with the table of ``rows``."""
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + "".join(f"{line}\n" for line in table(rows)) + END + tail


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--run", nargs="*", metavar="NAME")
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    if chosen.run is not None:
        run(chosen.run)
    before = PAGE.read_text()
    after = page(read(), before)
    if chosen.check:
        return int(before != after)
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
