"""The stored results of published releases are what their wheels give today."""

import json

import pytest

from support.parity import releases

pytestmark = [pytest.mark.real, pytest.mark.slow]  # builds an environment for each release


@pytest.mark.parametrize("release", releases.RELEASES)
def test_a_release_gives_the_stored_results(release):
    stored = json.loads(releases.STORED.read_text(encoding="utf-8"))
    expected = {name: values[release] for name, values in stored.items() if release in values}

    assert releases.values(release) == expected
