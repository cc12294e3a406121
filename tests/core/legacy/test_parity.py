"""The same small scripts give here what they gave under published releases, or differ for a stated
reason."""

import json
import logging
import math

import pytest

from support.parity import play, scripts
from support.parity.releases import RELEASES, STORED

PUBLISHED = json.loads(STORED.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", scripts.ROWS)
def test_a_script_gives_the_published_result(name):
    row = scripts.ROWS[name]
    published = PUBLISHED[name]
    expected = row.value if row.differs else published[max(published, key=list(RELEASES).index)]

    assert _comparable(play.outcome(row.script)) == _comparable(expected)


@pytest.mark.parametrize("name", [name for name, row in scripts.ROWS.items() if row.differs])
def test_a_stated_difference_is_one(name):
    published = PUBLISHED[name]

    assert scripts.ROWS[name].value != published[max(published, key=list(RELEASES).index)]


def test_every_item_of_the_lists_has_a_row_and_every_row_a_stored_result():
    items = {row.item for row in scripts.ROWS.values()}

    assert {f"1.{n}" for n in range(1, 10)} <= items
    # 2.12 needs installed packages: test_registry
    assert {f"2.{n}" for n in range(16)} - {"2.12"} <= items
    assert {f"3.{n}" for n in range(1, 8)} <= items
    assert {f"4.{n}" for n in range(1, 10)} - {"4.3"} <= items  # 4.3: test_compat_functions
    assert scripts.ROWS.keys() == PUBLISHED.keys()


def _comparable(value):
    """NaN as text: it does not equal itself."""
    if isinstance(value, list):
        return [_comparable(member) for member in value]
    if isinstance(value, dict):
        return {key: _comparable(member) for key, member in value.items()}
    return "unknown" if isinstance(value, float) and math.isnan(value) else value
