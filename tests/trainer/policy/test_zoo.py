"""Classes of causal language models train, and the table of the documentation says how.

Ten run always; ``-m slow`` runs every class of the table again.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from support.families import KINDS, names, tiny_folder, trained

DOCS = Path(__file__).parents[3] / "docs"
TEN = {
    "llama": "full",
    "qwen3": "adapter",
    "gemma2": "full",
    "gpt2": "adapter",
    "qwen3_moe": "full",
    "gpt_oss": "adapter",
    "lfm2": "full",
    "qwen3_next": "full",
    "falcon_h1": "adapter",
    "nemotron_h": "adapter",
}
ROWS = [json.loads(line) for line in (DOCS / "train" / "models.jsonl").read_text().splitlines()]
OUTCOMES = {(row["name"], row["kind"]): row["outcome"] for row in ROWS}


def is_as_the_table_says(name: str, kind: str, folder: Path) -> None:
    seen = trained(name, kind, tiny_folder(name, folder / "base"), folder / "run")
    assert seen.outcome == OUTCOMES[name, kind], seen.why


@pytest.mark.parametrize(("name", "kind"), TEN.items())
def test_ten_families_train_as_the_table_says(name, kind, tmp_path):
    assert OUTCOMES[name, kind].startswith("exact")
    is_as_the_table_says(name, kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", names())
def test_every_class_trains_as_the_table_says(name, kind, tmp_path):
    if OUTCOMES.get((name, kind), "not run") == "not run":
        pytest.skip("it was not run for the table")
    is_as_the_table_says(name, kind, tmp_path)


def test_the_table_has_every_class_and_is_written_from_the_rows():
    spec = importlib.util.spec_from_file_location("models_page", DOCS / "models_page.py")
    models_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models_page)
    assert {name for name, _ in OUTCOMES} >= set(names())
    assert models_page.main(["--check"]) == 0, "run python docs/models_page.py"
    first = next(iter(models_page.read()))
    other = {**models_page.read(), first: {"outcome": "another"}}  # negative control
    before = models_page.PAGE.read_text()
    assert models_page.page(other, before) != before
