"""``run.py mutate`` puts one fault at a time into the kernel, and takes it out again."""

import pytest

import mutation

SOURCE = """
from typing import TYPE_CHECKING

if TYPE_CHECKING and 1 < 2:
    import os

LIMIT: "dict[int, 3]" = 3

def is_full(held: int, name: str = "2 + 2") -> bool:
    if not name or held >= LIMIT:
        return True
    return name in ("é", f"{1}") and held * 2 == 4
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def test_conditions_operators_and_constants_that_run_are_flipped_one_at_a_time(file):
    assert {(mutant.before, mutant.after) for mutant in mutation.mutants_of(file)} == {
        ("3", "4"),
        ("not name or held >= LIMIT", "not name and held >= LIMIT"),
        ("not name", "name"),
        ("held >= LIMIT", "held > LIMIT"),
        ("True", "False"),
        (
            'name in ("é", f"{1}") and held * 2 == 4',
            "name in ('é', f'{1}') or held * 2 == 4",
        ),
        ('name in ("é", f"{1}")', "name not in ('é', f'{1}')"),
        ("held * 2 == 4", "held * 2 != 4"),
        ("held * 2", "held / 2"),
        ("2", "3"),
        ("4", "5"),
    }


def test_a_fault_is_in_the_file_for_as_long_as_its_tests_run(file):
    for mutant in mutation.mutants_of(file):
        with mutant.applied():
            names: dict = {}
            exec(file.read_text(encoding="utf-8"), names)
            assert file.read_text(encoding="utf-8") != SOURCE
        assert file.read_text(encoding="utf-8") == SOURCE
    with pytest.raises(KeyboardInterrupt), mutant.applied():
        raise KeyboardInterrupt
    assert file.read_text(encoding="utf-8") == SOURCE


def test_the_kernel_is_there_and_has_mutants():
    assert [path for path in mutation.KERNEL if not path.exists()] == []
    assert len(mutation.mutants_of(mutation.CORE / "storage/journal.py")) > 50


@pytest.mark.slow  # it reads what every module imports
def test_tests_of_the_mirrored_folder_come_first():
    first, *_ = mutation.Tests().stages(mutation.CORE / "storage/journal.py")
    assert "tests/core/storage/test_journal.py" in first


def test_tests_that_fail_notice_a_fault_and_tests_that_pass_do_not(tmp_path):
    test = tmp_path / "test_it.py"
    test.write_text("def test_it():\n    assert 1 < 1\n")
    assert "test_it.py::test_it" in (mutation.Tests.noticed_by([str(test)]) or "")
    test.write_text("def test_it():\n    assert 1 <= 1\n")
    assert mutation.Tests.noticed_by([str(test)]) is None
