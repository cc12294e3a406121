"""How tests are shared out between processes: whole files, the longest first, and a crash costs one
test."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from support.forks import FORKED, LONGEST_FIRST, ONE_BROWSER, ONE_TREE, ROOT, rank, unit_of

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere pytest-xdist shares out the tests"
)

CONFTEST = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from support import forks
from support.forks import pytest_cmdline_main
forks.ROOT = Path(__file__).parent
"""
FILE = """
import os, pathlib, pytest, warnings

LOG = pathlib.Path(__file__).parent / "log"

def log(*words):
    with LOG.open("a") as file:
        print({name!r}, os.getpid(), *words, file=file)

@pytest.fixture(scope="module")
def shared():
    yield
    log("closed")

@pytest.mark.parametrize("number", range(6))
def test_it(number, shared, tmp_path):
    log(number, tmp_path)
    print("said by", {name!r}, number)
    {line}
"""


def run(
    folder: Path, files: dict[str, str], *words: str, broken: str = ""
) -> tuple[str, dict[str, list[list[str]]]]:
    """Run one test file per name with its own last line, in two processes, with what is ``broken``
    in conftest.py.

    *Returns* what pytest printed, and of each file what its tests have logged: process, number and
    folder.
    """
    (folder / "conftest.py").write_text(CONFTEST.format(tests=str(ROOT / "tests")) + broken)
    for name, line in files.items():
        (folder / f"test_{name}.py").write_text(FILE.format(name=name, line=line))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        folder,
        *words,
        folder,
    ]
    ran = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, cwd=folder, check=False
    )
    logged = defaultdict(list)
    for line in (folder / "log").read_text().splitlines():
        name, *columns = line.split()
        logged[name].append(columns)
    return ran.stdout + ran.stderr, logged


def test_what_shares_a_browser_a_process_to_fork_from_or_syntax_trees_is_one_unit():
    assert unit_of("tests/view/test_page.py") == unit_of("tests/view/test_index.py") == ONE_BROWSER
    assert (
        unit_of("tests/trainer/distributed/test_ranks.py")
        == unit_of("tests/trainer/run/test_resume.py")
        == FORKED
    )
    assert unit_of("tests/architecture/test_words.py") == ONE_TREE
    assert unit_of("tests/docs/test_blocks.py") == "tests/docs/test_blocks.py"


def test_the_longest_are_first_and_there():
    assert rank("tests/docs/test_blocks.py::x[a::b]") < rank("tests/core/test_types.py::x")
    assert rank("tests/core/test_types.py::x") == rank(
        "packages/envs/wordle/tests/test_wordle.py::y"
    )
    assert [unit for unit in LONGEST_FIRST if not (ROOT / unit).exists()] == [FORKED, ONE_TREE]


def test_a_file_stays_with_one_process_which_keeps_what_it_shares_to_the_end(tmp_path):
    told, logged = run(tmp_path, dict.fromkeys("abcd", "pass"), "-q")
    assert "24 passed" in told, told
    assert {
        name: len({process for process, *_ in lines}) for name, lines in logged.items()
    } == dict.fromkeys("abcd", 1)
    assert all(
        [what for _, what, *_ in lines] == [*"012345", "closed"] for lines in logged.values()
    )
    assert len({process for lines in logged.values() for process, *_ in lines}) == 2
    folders = [
        folder for lines in logged.values() for _, _, *of_test in lines for folder in of_test
    ]
    assert len(set(folders)) == 24
    assert len({Path(folder).parent for folder in folders}) == 2
    assert len({Path(folder).parents[1] for folder in folders}) == 1


def test_a_process_that_dies_loses_the_test_it_died_of(tmp_path):
    dies = "if number == 2: os._exit(7)"
    told, logged = run(tmp_path, {"a": "pass", "b": dies, "c": "pass", "d": dies}, "-v", "-rN")
    assert "2 failed, 22 passed" in told, told
    assert sorted(re.findall(r"(\S+) FAILED", told)) == [
        "test_b.py::test_it[2]",
        "test_d.py::test_it[2]",
    ]
    assert told.count("the process that ran it ended with exit code 7") == 2
    assert all(
        [what for _, what, *_ in logged[name] if what != "closed"] == [*"012345"] for name in "abcd"
    )


def test_a_process_that_dies_is_missed_also_while_its_own_fork_lives_on(tmp_path):
    """Which holds what the other end would see closed."""
    dies = (
        "import time; number == 2 and (os.fork() and os._exit(7) or time.sleep(8) or os._exit(0))"
    )
    told, logged = run(tmp_path, {"a": "pass", "b": dies}, "-q", "-rN")
    assert "1 failed, 11 passed" in told, told
    assert [what for _, what, *_ in logged["b"] if what != "closed"] == [*"012345"]


def test_processes_that_die_before_their_first_test_end_the_run(tmp_path):
    (tmp_path / "log").touch()
    told, logged = run(tmp_path, {"a": "pass"}, "-q", broken="forks.Record.__init__ = None")
    assert "a process of tests ended between tests, with code 1" in told, told
    assert not logged


def test_what_a_test_prints_warns_and_skips_is_told_once(tmp_path):
    lines = {
        "a": "assert number != 3",
        "b": "warnings.warn(f'beware of {number}', FutureWarning)",
        "c": "pytest.skip('not here')",
        "d": "pass",
    }
    told, _ = run(tmp_path, lines, "-q", "-rs")
    assert "1 failed, 17 passed, 6 skipped, 6 warnings" in told, told
    assert told.count("said by a 3") == 1
    assert "said by a 2" not in told
    assert "said by b" not in told
    assert all(told.count(f"FutureWarning: beware of {number}") == 1 for number in range(6))
    assert "SKIPPED [6] test_c.py" in told
    assert "not here" in told


def test_the_first_failure_ends_every_process_where_that_is_asked_for(tmp_path):
    """Not after the minutes that the other one would take."""
    told, logged = run(
        tmp_path, {"a": "assert False", "b": "import time; time.sleep(60)", "c": "pass"}, "-q", "-x"
    )
    assert "1 failed" in told, told
    assert "stopping after 1 failures" in told
    assert "c" not in logged


def test_a_file_that_starts_a_thread_when_it_is_imported_is_refused(tmp_path):
    (tmp_path / "log").touch()
    (tmp_path / "test_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(5,), name='mine',"
        " daemon=True).start()\n"
    )
    told, logged = run(tmp_path, {"a": "pass"}, "-q")
    assert "starts threads when it is imported, which no fork has: ['mine']" in told, told
    assert not logged


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
    head = "import xdist\n" if is_imported else ""
    (tmp_path / "conftest.py").write_text(
        head + (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    )
    words = [sys.executable, "-c", ALONE, str(ROOT / "tests")]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert ("No module named 'xdist" in ran.stderr, "1 passed" in ran.stdout) == (
        is_imported,
        not is_imported,
    ), ran
