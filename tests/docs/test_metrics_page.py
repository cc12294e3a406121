"""``docs/reference/metrics.md`` has every metric that a training or an evaluation writes."""

import json
import re
from pathlib import Path

import pytest

from support.import_graph import CORE, REPOSITORY, TRAINER

PAGE = (REPOSITORY / "docs/reference/metrics.md").read_text(encoding="utf-8")


def names_on(page: str) -> set[str]:
    """The names in the first columns of the tables."""
    columns = (line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    return {name for column in columns for name in re.findall(r"`([^`]+)`", column)}


ON_THE_PAGE = names_on(PAGE)
SAVED = Path(__file__).parents[1] / "data/saved_0_3_dev"
OF_FUNCTIONS = {"reward/left", "reward/right", "reward/num_turns"}
LITERAL = re.compile(r'f?"([a-z]+/[a-z_{}]+(?:/[a-z_]+)?)"')
NO_METRICS = re.compile(r"application/|text/|eval/(before|after)|read/")


def names_in(source: str) -> set[str]:
    """Texts of the form of a metric's name; a name in braces stands for any."""
    names = {re.sub(r"\{[^}]*\}", "<name>", name) for name in LITERAL.findall(source)}
    return {name for name in names if not NO_METRICS.match(name)}


@pytest.fixture(scope="module")
def written():
    folders = ("algorithm", "pipeline", "run", "policy", "distributed")
    paths = [
        *TRAINER.glob("*.py"),
        *(path for folder in folders for path in (TRAINER / folder).rglob("*.py")),
    ]
    return {name for path in paths for name in names_in(path.read_text(encoding="utf-8"))}


def without(names: set[str]) -> list[str]:
    documented = {re.sub(r"<\w+>", "<name>", name) for name in ON_THE_PAGE}
    return sorted(names - documented)


def test_every_name_in_the_sources_is_on_the_page(written):
    assert len(written) > 50, "the pattern finds nothing"
    assert without(written - {"reward/success"}) == []  # of a metric that is named "success"


def test_every_name_of_a_saved_training_is_on_the_page():
    lines = (SAVED / "training/metrics.jsonl").read_text().splitlines()
    assert without({name for line in lines for name in json.loads(line)} - OF_FUNCTIONS) == []


def test_every_number_of_an_evaluation_is_on_the_page():
    metadata = json.loads((SAVED / "talk/metadata.json").read_text())
    numbers = {
        name
        for name in metadata
        if re.match("num_|avg_|pass_a|.*_stderr|cost|usage|stop_c|time", name)
    }
    assert len(numbers) > 12
    assert without(numbers) == []


def test_a_name_that_is_missing_would_be_found():
    """Negative control."""
    assert without(names_in('x = {"tokens/forgotten": 1, f"env/{name}/kept": 2}')) == [
        "env/<name>/kept",
        "tokens/forgotten",
    ]
    assert names_in('headers = {"Content-Type": "application/json"}') == set()


def test_the_page_of_a_training_tells_its_metrics_from_those_of_a_user():
    plots = (CORE / "view/static/plots.js").read_text(encoding="utf-8")
    ours = re.compile(re.search(r"const OURS = /(.*)/;", plots)[1].replace(r"\/", "/"))
    names = names_on(PAGE[: PAGE.index("## An evaluation")])
    assert len(names) > 90
    assert {name for name in names if not ours.match(name)} == set()
    for name in ("strictness", "judge/strictness", "losses", "my/reward"):
        assert not ours.match(name)
