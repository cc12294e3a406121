"""How tests are shared out between processes: whole files, the longest first, and a crash costs one test."""

import re
import subprocess
import sys

import pytest

from support.whole_files import FORKED, LONGEST_FIRST, ONE_BROWSER, ROOT, rank, unit_of

CONFTEST = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from support import whole_files
whole_files.ROOT = Path(__file__).parent

def pytest_xdist_make_scheduler(config, log):
    return whole_files.WholeFiles(config, log)
"""
FILE = """
import os, pytest

@pytest.mark.parametrize("number", range(6))
def test_it(number):
    if {crashes} and number == 2:
        os._exit(1)
"""


def test_what_shares_a_browser_or_a_process_to_fork_from_is_one_unit():
    assert unit_of("tests/view/test_page.py") == unit_of("tests/view/test_index.py") == ONE_BROWSER
    assert unit_of("tests/trainer/distributed/test_ranks.py") == unit_of("tests/trainer/run/test_resume.py") == FORKED
    assert unit_of("tests/docs/test_blocks.py") == "tests/docs/test_blocks.py"


def test_the_longest_are_first_and_there():
    assert rank("tests/docs/test_blocks.py::x[a::b]") < rank("tests/core/test_types.py::x")
    assert rank("tests/core/test_types.py::x") == rank("packages/envs/wordle/tests/test_wordle.py::y")
    assert [unit for unit in LONGEST_FIRST if not (ROOT / unit).exists()] == [FORKED]


@pytest.mark.slow
def test_a_file_stays_with_one_process_and_one_that_dies_loses_the_test_it_died_of(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.format(tests=str(ROOT / "tests")))
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(FILE.format(crashes=name in "bd"))
    words = ["-v", "-n", "2", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    ran = subprocess.run([sys.executable, "-m", "pytest", *words], capture_output=True, text=True, cwd=tmp_path)
    assert "2 failed, 22 passed" in ran.stdout, ran.stdout
    done = re.findall(r"\[(gw\d)\].* (PASSED|FAILED) test_(\w)\.py::test_it\[(\d)\]", ran.stdout)
    assert sorted((file, number) for _, how, file, number in done if how == "FAILED") == [("b", "2"), ("d", "2")]
    assert {len({process for process, _, file, _ in done if file == name}) for name in "ac"} == {1}


ALONE = """
import sys
import pytest

class Hidden:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "xdist":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Hidden)
sys.path.insert(0, sys.argv[1])
sys.exit(pytest.main(["-q", "--rootdir", ".", "."]))
"""


@pytest.mark.parametrize("is_imported", [False, True], ids=["ours", "negative control"])
def test_tests_run_where_pytest_xdist_is_not_installed(tmp_path, monkeypatch, is_imported):
    """As in the environments of ``tests/real/peers.py``."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    head = "from support.whole_files import WholeFiles\n" if is_imported else ""
    (tmp_path / "conftest.py").write_text(head + (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    words = [sys.executable, "-c", ALONE, str(ROOT / "tests")]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert ("No module named 'xdist" in ran.stderr, "1 passed" in ran.stdout) == (is_imported, not is_imported), ran
