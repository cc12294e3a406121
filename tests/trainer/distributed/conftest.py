"""Functions called on several ranks, whose imports are paid once by a fork server."""

import pytest

from support.training_child import child_context


@pytest.fixture(scope="module")
def children():
    return child_context()
