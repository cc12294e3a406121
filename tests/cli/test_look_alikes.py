"""``vf-install`` and a stranger's package: real uv and pip, a package index on loopback, a Python
of the test's own.

A package of an index takes nothing from another package: no file, module, command or environment of
it. Where only its name is like another's, the user is asked, which without a terminal is a refusal.
Each refusal names both packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cli.test_vf_install import LOADER, add_wheel, make_project
from support.fresh_python import FreshPython, make_fresh_python
from verifiers.cli.install.look_alikes import look_alike

GAME = {"vf_word_game.py": LOADER}
OFFERS = "word-game = vf_word_game:load_environment"
PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
FOREIGN = "raise SystemExit('a stranger ran')\n"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Requests are not printed."""


@pytest.fixture
def index(tmp_path):
    """A simple index on loopback: the folder of its wheels, and its URL."""
    folder = tmp_path / "index"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def python(tmp_path):
    return make_fresh_python(tmp_path)


@pytest.fixture
def install(python, index):
    """``vf-install`` with that index, by uv, or with ``uv=False`` by pip."""

    def run(*words: str, uv: bool = True):
        online = {
            "UV_OFFLINE": "0",
            "UV_DEFAULT_INDEX": index[1],
            "PIP_INDEX_URL": index[1],
            "PIP_NO_CACHE_DIR": "1",
        }
        if not uv:
            online["PATH"] = os.pathsep.join(
                folder
                for folder in os.environ["PATH"].split(os.pathsep)
                if not Path(folder, "uv").exists()
            )
        return python.command("install", *words, **online)

    return run


def plainly(python: FreshPython, index: tuple[Path, str], requirement: str) -> None:
    """Negative control: the installer alone, which asks nothing."""
    command = [
        "uv",
        "pip",
        "install",
        "--python",
        python.executable,
        "--default-index",
        index[1],
        requirement,
    ]
    subprocess.run(
        command, env={**python.variables, "UV_OFFLINE": "0"}, check=True, capture_output=True
    )


def words_of(ran) -> str:
    return " ".join(ran.err.split())


def installed(python: FreshPython) -> dict[str, str]:
    """Name -> version, as a fresh interpreter sees them."""
    code = (
        "import json, importlib_metadata as m; print(json.dumps({d.name: d.version for d in"
        " m.distributions()}))"
    )
    return json.loads(python.run("-c", code).out)


def library_of(python: FreshPython) -> str:
    return python.run("-c", "import verifiers; print(verifiers.__file__)").out.strip()


@pytest.mark.parametrize("uv", [True, False], ids=["uv", "pip"])
def test_an_honest_package_of_an_index_is_installed(python, index, install, uv):
    """Negative control of every refusal below: nothing of it is anyone else's."""
    add_wheel(index[0], "vf-word-game", "0.4", GAME, OFFERS)
    ran = install("Word_Game", "--json", uv=uv)
    assert ran.code == 0, ran.err
    assert (ran.json["distribution"], ran.json["version"]) == ("vf-word-game", "0.4")


TAKES = {
    "library-game": (
        {"verifiers/__init__.py": FOREIGN},
        "",
        "the module 'verifiers', which hides or replaces that of",
    ),
    "module-game": (
        {"vf_reverse_text.py": FOREIGN},
        "",
        "the module 'vf_reverse_text', which hides or replaces that of",
    ),
    "id-game": (
        {},
        "Reverse_Text = vf_game:load_environment",
        "the environment 'reverse-text', which vf-reverse-text",
    ),
    "file-game": (
        {"dice/rolls.py": FOREIGN},
        "",
        "the file 'dice/rolls.py', which belongs to dice 6.0",
    ),
    "command-game": (
        {},
        "[console_scripts]\ndice-roll = vf_game:x",
        "the command 'dice-roll', which belongs to dice 6.0",
    ),
    "script-game": (
        {"vf_script_game-9.0.data/scripts/vf-eval": "#!python\n" + FOREIGN},
        "",
        "the command 'vf-eval', which belongs to verifiers",
    ),
    "data-game": (
        {f"vf_data_game-9.0.data/data/{PACKAGES}/verifiers/__init__.py": FOREIGN},
        "",
        "the module 'verifiers', which hides or replaces that of",
    ),
    "case-game": (
        {"Verifiers/__init__.py": FOREIGN},
        "",
        "the module 'Verifiers', which hides or replaces that of verifiers",
    ),
    "unlisted-game": (
        {"verifiers/runs/__init__.py": FOREIGN},
        "",
        "the module 'verifiers', which hides or replaces that of",
    ),
}
"""Id of a stranger's environment -> files and entry points that it brings besides its own, what the
refusal says."""


@pytest.mark.parametrize("uv", [True, False], ids=["uv", "pip"])
def test_a_package_that_takes_what_is_anothers_is_refused_before_it_is_installed(
    python, index, install, uv
):
    dice = "[console_scripts]\ndice-roll = dice:x"
    add_wheel(index[0], "dice", "6.0", {"dice/rolls.py": ""}, dice)
    plainly(python, index, "dice")
    before, library = installed(python), library_of(python)
    assert "vf-reverse-text" in before
    for env_id in TAKES if uv else ("library-game", "script-game", "data-game"):
        files, offers, said = TAKES[env_id]
        entry_points = f"{env_id} = vf_game:load_environment\n{offers}"
        files = {"vf_game.py": LOADER} | files
        listed = [] if env_id == "unlisted-game" else list(files)
        add_wheel(index[0], f"vf-{env_id}", "9.0", files, entry_points, listed=listed)
        ran = install(env_id, "--yes", uv=uv)
        assert ran.code == 2, ran.err
        assert f"vf-{env_id} 9.0 brings {said}" in words_of(ran)
        assert "so it was not installed" in words_of(ran)
    assert (installed(python), library_of(python)) == (before, library)
    assert (python.site_packages / "dice/rolls.py").read_text() == ""


def test_without_looking_the_library_and_the_environment_would_be_the_strangers(python, index):
    """Negative control."""
    add_wheel(index[0], "vf-word-game", "9.0", GAME | {"verifiers/__init__.py": FOREIGN}, OFFERS)
    plainly(python, index, "vf-word-game")
    assert "a stranger ran" in python.run("-c", "import verifiers").err


def test_a_higher_version_does_not_replace_a_package_that_came_from_a_folder_unasked(
    python, index, install, tmp_path
):
    folder = make_project(tmp_path / "mine")
    assert install(str(folder)).code == 0
    add_wheel(index[0], "vf-word-game", "9.0", GAME, OFFERS)
    for words in (["vf_Word.game", "--upgrade"], ["word-game@9.0"]):
        ran = install(*words)
        assert ran.code == 2, ran.err
        said = (
            "vf-word-game 9.0 of the package index would replace vf-word-game 0.3, which was"
            " installed from"
        )
        assert f"{said} {folder.as_uri()}" in words_of(ran)
    assert installed(python)["vf-word-game"] == "0.3"
    ran = install("word-game@9.0", "--yes", "--json")
    assert (ran.code, ran.json and ran.json["version"]) == (0, "9.0"), ran.err


def test_a_higher_version_replaces_a_package_of_the_index(python, index, install):
    """Negative control: where both came from the index, an upgrade is one."""
    add_wheel(index[0], "vf-word-game", "0.4", GAME, OFFERS)
    assert install("word-game").code == 0
    add_wheel(index[0], "vf-word-game", "9.0", GAME, OFFERS)
    assert install("word-game", "--upgrade").code == 0
    assert installed(python)["vf-word-game"] == "9.0"


def test_a_name_one_letter_from_a_known_one_is_asked_about(python, index, install):
    module = {"vf_revers_text.py": LOADER}
    add_wheel(
        index[0], "vf-revers-text", "1.0", module, "revers-text = vf_revers_text:load_environment"
    )
    ran = install("revers-text")
    assert ran.code == 2, ran.err
    assert (
        "vf-revers-text of the package index is not 'reverse-text', the known environment of almost"
        " its name" in words_of(ran)
    )
    assert "vf-revers-text" not in installed(python)
    assert install("revers-text", "--yes").code == 0


def test_a_package_of_another_environment_is_not_installed_for_the_one_that_was_requested(
    python, index, install
):
    add_wheel(
        index[0], "vf-word-game", "1.0", {"other.py": LOADER}, "other-game = other:load_environment"
    )
    ran = install("word-game")
    assert ran.code == 2, ran.err
    assert (
        "vf-word-game declares 'other-game' and not 'word-game', and was not installed"
        in words_of(ran)
    )
    assert "vf-word-game" not in installed(python)


def test_what_a_dependency_takes_is_found_after_the_installation(python, index, install):
    """Only the requested package is inspected before; the error names what it brought, and what to
    uninstall."""
    add_wheel(index[0], "vf-word-game", "1.0", GAME, OFFERS, "helpers")
    add_wheel(index[0], "helpers", "2.0", {"vf_reverse_text.py": ""})
    ran = install("word-game")
    assert ran.code == 3, ran.err
    assert (
        "helpers 2.0 brings the module 'vf_reverse_text', which hides or replaces that of"
        " vf-reverse-text" in (words_of(ran))
    )
    assert "uninstall helpers" in words_of(ran)


@pytest.mark.parametrize(
    ("name", "env_id"),
    [
        ("revers-text", "reverse-text"),
        ("reverse-texts", "reverse-text"),
        ("reverse-etxt", "reverse-text"),
        ("rewerse-text", "reverse-text"),
        ("reversetext", "reverse-text"),
        ("w0rd-game", "word-game"),
        ("vf-worcl-game", None),
        ("aime2025", None),
        ("aime-2024", "aime2024"),
        ("word-game", None),
        ("chess", None),
    ],
)
def test_which_names_are_mistaken_for_which(name, env_id):
    assert look_alike(name, ["reverse-text", "vf-word-game", "aime2024"]) in (
        env_id,
        env_id and f"vf-{env_id}",
    )
