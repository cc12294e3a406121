"""The tests stand in the folders of what they test: ``tests/core/rubrics`` tests
``verifiers/rubrics``."""

from pathlib import Path

import pytest

import verifiers
import verifiers_trainer

TESTS = Path(__file__).parents[1]
PACKAGES = {
    "core": Path(verifiers.__file__).parent,
    "trainer": Path(verifiers_trainer.__file__).parent,
}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_tests_is_a_folder_of_the_package(package):
    folders = {path.parent.name for path in (TESTS / package).glob("*/test_*.py")}
    assert folders <= {path.name for path in PACKAGES[package].iterdir() if path.is_dir()}
