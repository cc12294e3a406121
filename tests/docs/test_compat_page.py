"""The page of older spellings is what the tables say, and every table is on it."""

import importlib.util
import re
from pathlib import Path

import pytest

from verifiers import compat

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def builder(monkeypatch, tmp_path):
    """The script, writing beside the real page."""
    spec = importlib.util.spec_from_file_location("compat_page", DOCS / "compat_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(
    importlib.util.find_spec("verifiers_trainer") is None, reason="its tables are on the page too"
)
def test_the_page_is_up_to_date(builder, capsys):
    assert builder.main(["--check"]) == 0, (
        f"run python docs/compat_page.py\n{capsys.readouterr().out}"
    )


def test_a_page_that_says_something_else_is_found_and_made_anew(
    builder, monkeypatch, tmp_path, capsys
):
    page = tmp_path / "reference" / "compat.md"
    monkeypatch.setattr(builder, "PAGE", page)
    assert builder.main(["--check"]) == 1
    assert builder.main([]) == 0
    assert builder.main(["--check"]) == 0
    page.write_text(page.read_text().replace("`RolloutError`", "`RollError`"))
    assert builder.main(["--check"]) == 1
    assert "not what the tables say" in capsys.readouterr().out


def test_every_table_of_the_module_is_shown():
    shown = {id(table) for _, table in compat.PAGE}
    rows = {old for _, table in compat.PAGE for old in table}
    tables = {n: t for n, t in vars(compat).items() if n.isupper() and isinstance(t, dict)}
    assert {"NAMES", "RUN_OPTIONS", "MODULES", "LATER"} <= set(tables)
    for name, table in tables.items():
        if name in ("MODULES", "LATER_MODULES"):
            assert {f"verifiers.{module}" for module in table} <= rows
        elif name in ("MODULE_NAMES", "SUBSTITUTES"):
            assert {
                f"verifiers.{module}.{old}" for module, names in table.items() for old in names
            } <= rows
        else:
            assert id(table) in shown, name


def test_further_packages_add_their_tables(builder, monkeypatch):
    both = list(builder.tables(("verifiers", "no_such_package")))
    assert [title for title, _ in both] == [title for title, _ in compat.PAGE]
    made = builder.page(
        [*both, ("Settings of the trainer", {"old_a": "new_b", "x|y": "", "z": "pkg.a:B pkg.c"})]
    )
    assert "## Settings of the trainer\n\n| older | now |\n|---|---|\n| `old_a` | `new_b` |" in made
    assert "| `x\\|y` | the names below |" in made
    assert "| `z` | `pkg.a.B`, `pkg.c` |" in made


def test_every_row_has_two_cells(builder):
    rows = [line for line in builder.page(builder.tables()).splitlines() if line.startswith("|")]
    assert all(len(re.split(r"(?<!\\)\|", row)) == 4 for row in rows)
