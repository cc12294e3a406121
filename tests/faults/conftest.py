"""Fixtures of the tests of promises."""

import pytest

from support.eval_command import eval_folder, vf_eval  # noqa: F401 - fixtures are found by name
from support.warm import Warm


@pytest.fixture(scope="module")
def warm():
    """Children that start in a tenth of a second."""
    with Warm() as warm:
        yield warm
