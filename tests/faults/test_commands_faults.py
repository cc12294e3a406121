"""Promise: a command that failed says so, writes nothing outside its folder and overwrites nothing.

Every refusal of ``vf-init`` and ``vf-install`` by itself: ``cli/test_vf_init.py``,
``cli/test_vf_install.py``.
"""

import pytest

from support.fresh_python import make_fresh_python
from verifiers.cli.install.command import RUNS_CODE

BROKEN_SETUP = "import sys\nprint('the compiler is on fire', file=sys.stderr)\nsys.exit(7)\n"


@pytest.fixture
def python(tmp_path):
    return make_fresh_python(tmp_path)


def project(folder):
    folder.mkdir(parents=True)
    (folder / "setup.py").write_text(BROKEN_SETUP)
    (folder / "pyproject.toml").write_text('[build-system]\nrequires = ["setuptools"]\n')


def files_below(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_an_environment_whose_build_fails_is_exit_3_with_the_real_reason_and_leaves_nothing(python):
    project(python.folder / "environments/word_game")
    installed = sorted(path.name for path in python.site_packages.iterdir())
    ran = python.command("install", "word-game")
    assert ran.code == 3
    assert "the compiler is on fire" in ran.err
    assert RUNS_CODE in ran.err
    assert "Traceback" not in ran.err
    assert sorted(path.name for path in python.site_packages.iterdir()) == installed


def test_an_installer_that_is_not_asked_how_it_ended_has_always_succeeded(python):
    """Negative control: the same failure, started and forgotten."""
    project(python.folder / "environments/word_game")
    code = (
        "import subprocess as s; s.run(['uv', 'pip', 'install', '-e', 'environments/word_game'],"
        " stderr=s.DEVNULL)"
    )
    assert python.run("-c", code).code == 0


@pytest.mark.parametrize(
    "words", [["init", "../../outside"], ["install", "../../no/such/place"]], ids=lambda w: w[0]
)
def test_a_name_that_leads_elsewhere_is_exit_2_and_nothing_is_written(python, words):
    before = files_below(python.folder.parent)
    ran = python.command(*words, PYTHONDONTWRITEBYTECODE="1")
    assert (ran.code, ran.out) == (2, "")
    assert "Traceback" not in ran.err
    assert files_below(python.folder.parent) == before


def test_vf_init_in_an_existing_folder_keeps_what_is_there(python):
    folder = python.folder / "environments/word_game"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("mine")
    (folder / "pyproject.toml").write_text("# mine")
    ran = python.command("init", "word-game")
    assert ran.code == 0
    assert (folder / "README.md").read_text() == "mine"
    assert (folder / "pyproject.toml").read_text() == "# mine"
    assert "README.md" in ran.err + ran.out


def test_joined_and_written_as_it_comes_a_name_leads_out_and_a_file_is_replaced(tmp_path):
    """Negative control."""
    inside = tmp_path / "work" / "environments"
    inside.mkdir(parents=True)
    outside = tmp_path / "README.md"
    outside.write_text("mine")
    (inside / "../../README.md").write_text("theirs")
    assert outside.read_text() == "theirs"
