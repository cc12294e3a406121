"""What other distributions provide is found where they are, and named where they are not."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from support.import_graph import REPOSITORY
from verifiers.errors import ConfigError
from verifiers.runtime import distributions
from verifiers.runtime.distributions import Provided, packages, provided
from verifiers.runtime.installed import not_installed, part, part_or_none

GROUPS = [value for name, value in vars(distributions).items() if name.isupper()]


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_recorded_is_what_the_distributions_declare(group):
    declared = {}
    for path in (REPOSITORY / "packages").glob("*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        declared |= project.get("entry-points", {}).get(group, {})
    assert declared == {name: known.value for name, known in provided(group).items()}
    assert {known.distribution for known in provided(group).values()} <= {*packages().values()}


def test_every_recorded_group_has_a_name():
    recorded = json.loads(Path(distributions.__file__).with_suffix(".json").read_text())
    assert {group for groups in recorded.values() for group in groups} == {*GROUPS}


@pytest.fixture
def of_a_shop(tmp_path, monkeypatch):
    """A folder on the path for a module ``shop``, which the record knows."""
    known = {"shelf": Provided("verifiers-shop", "shop.rooms:Shelf", "wood")}
    monkeypatch.setattr("verifiers.runtime.installed.provided", lambda group: known)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for module in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[module]


def test_a_recorded_part_is_found_where_the_metadata_does_not_list_it(of_a_shop):
    (of_a_shop / "shop").mkdir()
    (of_a_shop / "shop" / "rooms.py").write_text("class Shelf: pass\n")
    assert part("shelf").__name__ == "Shelf"


def test_one_that_is_absent_is_said_with_its_extra(of_a_shop):
    assert part_or_none("shelf", "verifiers.parts") is None
    with pytest.raises(ConfigError, match=r"^The shelf is in verifiers-shop, which is not instal"):
        part("shelf", "The shelf")
    assert "shop[wood]" in not_installed("shelf", "The shelf", "verifiers.parts")


def test_an_import_that_fails_inside_it_shows_its_own_error(of_a_shop):
    (of_a_shop / "shop").mkdir()
    (of_a_shop / "shop" / "rooms.py").write_text("import quite_absent_library\n")
    with pytest.raises(ModuleNotFoundError, match="quite_absent_library"):
        part("shelf")


def test_a_part_that_nobody_knows_is_named_with_its_group():
    with pytest.raises(ConfigError, match="'attic' of verifiers"):
        part("attic", "The attic")
