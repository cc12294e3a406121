"""``vf-install``: where an environment comes from, what is run, and that a failure is one.

Most tests run a recorder in the place of uv: a real program on the path that notes its arguments
and ends as it is told. Those at the end install for real, into a Python of their own and without a
network.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import importlib_metadata
import pytest

from support.eval_command import runner_of
from support.fresh_python import Ran, make_fresh_python
from verifiers.cli.install.command import COMMAND, RUNS_CODE
from verifiers.cli.install.installer import Finished

LOADER = """
import verifiers as vf

def load_environment(n: int = 1):
    return vf.SingleTurnEnv(dataset=[{"question": str(i), "answer": "1"} for i in range(n)])
"""
RECORDER = """#!{python}
import json, os, sys, time
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
with open(os.environ["RECORD"] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.replace(file.name, os.environ["RECORD"] + ".pid")
says = json.loads(os.environ.get("SAYS", "{{}}"))
for words, (code, text) in says.items():
    if words in " ".join(sys.argv):
        print(text)
        sys.exit(code)
time.sleep(float(os.environ.get("TAKES", "0")))
"""


@pytest.fixture
def vf_install(tmp_path, monkeypatch, capfd):
    """The command, run in this process inside an empty folder, with the recorder for uv."""
    folder, programs = tmp_path / "work", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    (programs / "uv").write_text(RECORDER.format(python=sys.executable))
    (programs / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    monkeypatch.chdir(folder)
    return runner_of(COMMAND, capfd)


@pytest.fixture
def recorded(tmp_path):
    """What the recorder was called with, so far."""

    def read() -> list[list[str]]:
        file = tmp_path / "record"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    return read


def make_project(
    folder: Path,
    env_id: str = "word-game",
    *,
    version: str = "0.3",
    source: str = LOADER,
    requires: str = "verifiers",
) -> Path:
    """A package with an entry point, as ``vf-init`` lays it out."""
    module = "vf_" + env_id.replace("-", "_")
    (folder / "src" / module).mkdir(parents=True)
    (folder / "src" / module / "__init__.py").write_text(source)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools>=77"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "vf-{env_id}"\nversion = "{version}"\ndependencies = ["{requires}"]\n'
        f'[project.entry-points."verifiers.environments"]\n{env_id} = "{module}:load_environment"\n'
        "[tool.uv.sources]\nverifiers = { workspace = true }\n"
    )
    return folder


def requirement(ran: Ran) -> str:
    """What a dry run would install, apart from ``verifiers`` itself."""
    assert ran.code == 0, ran.err
    first, python, *words = (
        ran.out.splitlines()[0].split(" --python ")[0],
        *ran.out.splitlines()[0].split()[4:],
    )
    assert first == "uv pip install"
    assert python == sys.executable
    *words, pin, flag, overrides = words
    assert pin.startswith("verifiers==")
    assert (flag, Path(overrides).read_text()) == ("--overrides", f"{pin}\n")
    return " ".join(words)


# --- where it comes from --------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["word-game", "word_game", "vf-word-game", "vf_word_game"])
def test_a_folder_of_environments_is_searched_in_each_spelling(vf_install, recorded, folder):
    make_project(Path("environments") / folder)
    assert requirement(vf_install("word-game", "--dry-run")) == f"-e ./environments/{folder}"
    assert recorded() == []


@pytest.mark.parametrize(
    "env_id",
    [
        "vf-word-game",
        "word_game",
        "Word.Game",
        "acme/word-game",
        "acme/vf_word-game@0.3",
        "word-game@latest",
    ],
)
def test_every_form_of_an_id_leads_to_the_same_folder(vf_install, env_id):
    make_project(Path("mine/word_game"))
    assert requirement(vf_install(env_id, "-p", "mine", "--dry-run")) == "-e ./mine/word_game"


def test_a_path_is_installed_as_it_is_named(vf_install, monkeypatch):
    make_project(Path("some/where"))
    assert requirement(vf_install("some/where", "--dry-run")) == "-e ./some/where"
    assert requirement(vf_install("./some/where", "--dry-run", "--no-editable")) == "./some/where"
    monkeypatch.chdir("some/where")
    assert requirement(vf_install(".", "--dry-run")) == "-e ."


def test_folder_before_workspace_before_installed_before_index(vf_install, tmp_path):
    work = Path.cwd()
    (work / "pyproject.toml").write_text(
        '[tool.uv.workspace]\nmembers = ["members/*"]\nexclude = ["members/old"]\n'
    )
    make_project(work / "members/anything", "reverse-text")
    make_project(work / "members/old", "alphabet-sort")
    make_project(work / "environments/reverse_text", "reverse-text")
    assert requirement(vf_install("reverse-text", "--dry-run")) == "-e ./environments/reverse_text"
    shutil.rmtree(work / "environments")
    assert requirement(vf_install("reverse-text", "--dry-run")) == f"-e {work}/members/anything"
    shutil.rmtree(work / "members/anything")
    assert "is installed already; nothing to do" in vf_install("reverse-text").out
    upgrade = requirement(vf_install("reverse-text", "--dry-run", "--upgrade"))
    words = "--upgrade-package vf-reverse-text --reinstall-package vf-reverse-text -e"
    assert upgrade == f"{words} {Path(__file__).parents[2]}/packages/envs/reverse-text"
    assert requirement(vf_install("alphabet-sort@9.9", "--dry-run")) == "vf-alphabet-sort==9.9"
    assert requirement(vf_install("no-such-thing@latest", "--dry-run")) == "vf-no-such-thing"


def test_what_is_installed_already_runs_no_installer_and_is_checked(vf_install, recorded):
    ran = vf_install("primeintellect/vf-reverse_text", "--json")
    assert ran.code == 0
    assert ran.json == {
        "schema": 1,
        "ok": True,
        "exit_code": 0,
        "command": None,
        "distribution": "vf-reverse-text",
        "version": "0.1.0",
        "entry_point": "vf_reverse_text:load_environment",
        "error": None,
    }
    assert recorded() == []


def test_a_repository_becomes_a_requirement_with_branch_and_folder(vf_install, recorded):
    at = "git+https://host/o/r.git@"
    words = ("vf-math-python", "--repo", "https://host/o/r.git", "--dry-run")
    assert (
        requirement(vf_install(*words))
        == f"'vf-math-python @ {at}main#subdirectory=packages/envs/math-python'"
    )
    words += ("-b", "v1.2", "--subdirectory", "games/m")
    assert requirement(vf_install(*words)) == f"'vf-math-python @ {at}v1.2#subdirectory=games/m'"
    assert (
        "git+ssh://git@host/o/r@main" in vf_install("x", "--repo", "git@host:o/r", "--dry-run").out
    )
    assert recorded() == []


def test_logins_are_not_printed(vf_install):
    ran = vf_install("x", "--repo", "https://me:canary@host/r", "--dry-run", "--json")
    assert "https://***@host/r" in ran.json["command"]
    assert "canary" not in ran.out + ran.err


# --- wrong words: exit 2, nothing run -------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give an environment: vf-install ENV; known here: alphabet-sort, "),
        (["a", "b"], "give one environment: vf-install ENV, not 2: a b"),
        (["a", "--form-repo", "--pth=x"], "--form-repo: no such option, did you mean --from-repo?"),
        (["a", "--form-repo", "--pth=x"], "--pth: no such option, did you mean --path?"),
        (["a", "-b", "main"], "add --from-repo or --repo URL"),
        (["a", "--subdirectory", "x"], "add --from-repo or --repo URL"),
        (
            ["a", "--repo", "ext::sh -c true"],
            "is neither a URL (https, ssh, git, file) nor an existing folder",
        ),
        (["a", "--repo", "--upload-pack=x"], "is neither a URL"),
        (["a", "--repo", "https://h/r", "-b", "--x"], "is not the name of a branch"),
        (["a", "--repo", "https://h/r", "-b", "a#subdirectory=b"], "is not the name of a branch"),
        (
            ["a", "--repo", "https://h/r", "--subdirectory", "../up"],
            "must be a folder inside the repository",
        ),
        (
            ["a", "--repo", "https://h/r", "--subdirectory", "/etc"],
            "must be a folder inside the repository",
        ),
        (["../../etc", "--repo", "https://h/r"], "is no environment id"),
        (["../../no/such/place"], "there is no file or folder ../../no/such/place"),
        ([""], "is no environment id"),
        (["--", "-e"], "-e: no such option"),
        (["a b; rm -rf x"], "is no environment id"),
        (["acme/game"], "no index is configured for the owner 'acme'"),
        (["--list", "a"], "--list takes no environment"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(vf_install, recorded, words, said):
    ran = vf_install(*words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("vf-install: ")
    assert said in " ".join(ran.err.split())
    assert recorded() == []


def test_folders_that_cannot_be_installed_are_refused(vf_install, recorded):
    Path("empty").mkdir()
    Path("file.txt").write_text("")
    make_project(Path("environments/word_game"))
    make_project(Path("environments/broken"))
    Path("environments/broken/pyproject.toml").write_text("[project\n")
    for words, said in (
        ("./empty", "the folder ./empty holds no environment"),
        ("./file.txt", "is not a Python file"),
        ("word-game@0.4", "has version 0.3, and 0.4 was requested; leave @0.4 out"),
        ("broken", "environments/broken/pyproject.toml cannot be read"),
    ):
        ran = vf_install(words)
        assert ran.code == 2
        assert said in ran.err
    assert recorded() == []


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("environments/local_game.py", "local-game"),
        ("environments/local_game.py", "environments/local_game.py"),
        ("environments/local_game/local_game.py", "local-game"),
        ("local_game.py", "local-game"),
    ],
)
def test_a_file_or_folder_without_a_project_needs_no_installation(
    vf_install, recorded, file, words
):
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(LOADER)
    ran = vf_install(words, "--upgrade", "--json")
    assert (ran.code, ran.json["entry_point"]) == (0, f"{file}:load_environment"), ran.err
    assert "needs no installation" in vf_install(words).out
    assert recorded() == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def load_environment(:\n", "environments/local_game.py:1: SyntaxError"),
        (
            LOADER.replace("load_environment", "load_enviroment"),
            "environments/local_game.py:4 defines load_enviroment",
        ),
    ],
)
def test_a_local_file_with_a_mistake_is_never_sought_in_the_index(
    vf_install, recorded, source, said
):
    Path("environments").mkdir()
    Path("environments/local_game.py").write_text(source)
    ran = vf_install("local-game")
    assert ran.code == 2
    assert said in ran.err
    assert recorded() == []


@pytest.mark.parametrize(("answer", "agrees"), [(b"y\n", "True"), (b"\n", "False")])
def test_on_a_terminal_it_asks_before_it_takes_a_package_that_declares_no_environment(
    answer, agrees
):
    script = (
        "from verifiers.cli.common.command import Call\nfrom verifiers.cli.install.command import"
        " _agrees\nprint(_agrees(Call([]), 'game 1.0 declares no entry point'))"
    )
    ours, theirs = os.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as terminal:
        child = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=theirs,
            stderr=theirs,
            stdout=subprocess.PIPE,
            text=True,
        )
        os.close(theirs)
        terminal.write(answer)
        assert child.communicate(timeout=60)[0].strip() == agrees


# --- what the installer does ----------------------------------------------------------------------


def test_it_says_that_installing_runs_code_and_prints_the_exact_command(vf_install, recorded):
    make_project(Path("environments/reverse_text"), "reverse-text", version="0.1.0")
    # the recorder installs nothing; the one installed already is found afterwards
    ran = vf_install("reverse-text")
    assert ran.code == 0
    assert RUNS_CODE in ran.err
    (words,) = recorded()
    assert f"+ uv {' '.join(words)}" in ran.err
    assert words[:3] == ["pip", "install", "--python"]
    assert words[4:6] == ["-e", "./environments/reverse_text"]
    assert ran.out.startswith("reverse-text (vf-reverse-text 0.1.0) is installed and imports")


def test_a_failing_installer_is_exit_3_with_its_last_lines(vf_install, monkeypatch):
    make_project(Path("environments/word_game"))
    lines = "\n".join(f"line {number}" for number in range(40))
    monkeypatch.setenv(
        "SAYS", json.dumps({"install": [7, lines + "\nerror: the compiler is on fire"]})
    )
    ran = vf_install("word-game", "--json")
    assert (ran.code, ran.json["exit_code"], ran.json["ok"]) == (3, 3, False)
    message = ran.json["error"]["message"]
    assert "ended with exit code 7" in message
    assert "error: the compiler is on fire" in message
    assert "line 39" in message
    assert "line 3\n" not in message


def test_an_installer_that_ends_well_without_the_environment_is_exit_3(vf_install):
    make_project(Path("environments/word_game"))
    ran = vf_install("word-game")
    assert ran.code == 3
    assert "no installed package provides the environment 'word-game'" in ran.err


def test_another_version_than_the_one_asked_for_is_exit_3(vf_install):
    Path("pyproject.toml").write_text(
        '[tool.verifiers.install.indexes]\nacme = "https://acme.example/simple"\n'
    )
    ran = vf_install("acme/reverse-text@7.7")  # the recorder installs nothing, so the old one stays
    assert ran.code == 3
    assert "version 7.7 was requested, and 0.1.0 was installed" in ran.err


NOT_FOUND = """  × No solution found when resolving dependencies:
  ╰─▶ Because {name} was not found in the
      package registry and you require {name}, we can conclude that your requirements are unsatisfiable."""


def test_what_is_nowhere_is_exit_2_with_the_nearest_ids(vf_install, recorded, monkeypatch):
    says = {name: [1, NOT_FOUND.format(name=name)] for name in ("vf-reverse-txt", "reverse-txt")}
    monkeypatch.setenv("SAYS", json.dumps(says))
    ran = vf_install("reverse-txt", "--json")
    assert ran.code == 2
    assert ran.json["error"]["type"] == "UnknownEnvironment"
    assert "did you mean 'reverse-text'?" in ran.json["error"]["message"]
    assert ran.json["error"]["hint"] == "reverse-text"
    assert [words[-1] for words in recorded()] == ["vf-reverse-txt", "reverse-txt"]
    assert all("--target" in words for words in recorded())  # only looked into


def test_an_index_that_fails_is_not_taken_for_an_index_that_has_nothing(
    vf_install, recorded, monkeypatch
):
    monkeypatch.setenv(
        "SAYS", json.dumps({"install": [2, "error: Failed to fetch: connection refused"]})
    )
    ran = vf_install("some-game")
    assert ran.code == 3
    assert "connection refused" in ran.err
    assert len(recorded()) == 1


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        (NOT_FOUND.format(name="vf-x"), True),
        ("Because there is no version of vf-x==9.9 and you require vf-x==9.9, ...", True),
        ("ERROR: No matching distribution found for vf-x==9.9", True),
        ("Because vf-x was not found in the cache and you require vf-x, ...", True),
        (
            "Because vf-x depends on torch==99 and torch was not found in the package registry ...",
            False,
        ),
        ("ERROR: No matching distribution found for vf-x-more", False),
        ("ERROR: No matching distribution found for torch==99", False),
    ],
)
def test_an_installers_words_for_nothing_found(text, lacks):
    assert Finished(["uv"], 1, text.splitlines()).lacks("vf-x") is lacks
    assert Finished(["uv"], 0, text.splitlines()).lacks("vf-x") is False


def test_pip_is_taken_where_there_is_no_uv(vf_install, recorded, tmp_path, monkeypatch):
    make_project(Path("environments/reverse_text"), "reverse-text", version="0.1.0")
    (tmp_path / "modules/pip").mkdir(parents=True)
    (tmp_path / "modules/pip/__init__.py").write_text("")
    (tmp_path / "modules/pip/__main__.py").write_text(RECORDER.format(python=sys.executable))
    without_uv = tmp_path / "nothing"
    without_uv.mkdir()
    monkeypatch.setenv("PATH", str(without_uv))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *w: n != "uv" and find_spec(n, *w))
    ran = vf_install("reverse-text", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["command"].startswith(
        f"{sys.executable} -m pip install -e ./environments/reverse_text verifiers=="
    )
    (words,) = recorded()
    assert words[:3] == ["install", "-e", "./environments/reverse_text"]
    monkeypatch.setenv(
        "SAYS", json.dumps({"install -e": [1, "vf-reverse-text 0.1.0 depends on verifiers<0.2"]})
    )
    ran = vf_install("reverse-text", "--json")
    assert ran.code == 0, ran.err
    pin = f"verifiers=={importlib_metadata.version('verifiers')}"
    assert [" ".join(words) for words in recorded()[2:]] == [
        "install --no-deps -e ./environments/reverse_text",
        f"install {pin}",
    ]
    assert ran.json["command"].endswith(
        f"--no-deps -e ./environments/reverse_text && {sys.executable} -m pip install {pin}"
    )


def test_uv_of_this_python_is_taken_where_none_is_on_the_path(vf_install, tmp_path, monkeypatch):
    make_project(Path("environments/word_game"))
    (tmp_path / "modules/uv").mkdir(parents=True)
    (tmp_path / "modules/uv/__init__.py").write_text("")
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    ran = vf_install("word-game", "--dry-run")
    assert ran.out.startswith(f"{sys.executable} -m uv pip install --python {sys.executable} -e ")


def is_running(pid: int) -> bool:
    """Whether the process is there and has not ended."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.usefixtures("vf_install")
def test_an_interrupt_ends_the_installer_too_and_is_exit_130(tmp_path):
    make_project(Path("environments/word_game"))
    child = subprocess.Popen(
        [sys.executable, "-m", "verifiers.cli.install.command", "word-game"],
        env={**os.environ, "TAKES": "30"},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 20
    while not (tmp_path / "record.pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 130
    installer = int((tmp_path / "record.pid").read_text())
    while is_running(installer) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(installer)
    assert "vf-install: interrupted" in err
    assert "Traceback" not in err


def test_the_list_names_id_version_distribution_and_what_it_is(vf_install):
    ran = vf_install("--list", "--json")
    (entry,) = [listed for listed in ran.json["environments"] if listed["id"] == "reverse-text"]
    assert (entry["version"], entry["distribution"]) == ("0.1.0", "vf-reverse-text")
    assert entry["audit"].startswith("audit passed")
    assert entry["summary"].startswith("Write a text backwards")
    printed = vf_install("--list").out
    assert "\n    Write a text backwards" in printed
    lines = [line for line in printed.splitlines() if not line.startswith(" ")]
    assert ["reverse-text", "0.1.0", "vf-reverse-text"] in [line.split()[:3] for line in lines]
    assert len({line.index(line.split()[1]) for line in lines}) == 1  # in columns


def test_the_options_are_these(vf_install):
    flags = sorted(
        flag
        for option in COMMAND.click_command().params
        for flag in option.opts
        if flag.startswith("--")
    )
    assert (
        flags
        == (
            "--agent --branch --dry-run --from-repo --json --list --no-editable --path --quiet"
            " --repo --subdirectory --taskset --upgrade --verbose --version --yes"
        ).split()
    )
    assert "vf-install [OPTIONS] ENV" in vf_install("--help").out


# --- for real: uv, git and indexes on this disk ---------------------------------------------------


@pytest.fixture
def python(tmp_path):
    return make_fresh_python(tmp_path)


def git(folder: Path, *words: str) -> None:
    who = [
        "-c",
        "user.name=test",
        "-c",
        "user.email=test@example.org",
        "-c",
        "commit.gpgsign=false",
    ]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """A git repository with a member of a workspace, beside its own ``verifiers``, and a package of
    the old layout."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    root = tmp_path / "repository"
    make_project(root / "packages/envs/word-game")
    make_project(root / "packages/core", "core").joinpath("pyproject.toml").write_text(
        '[project]\nname = "verifiers"\nversion = "99"\n'
    )
    (root / "pyproject.toml").write_text(
        '[tool.uv.workspace]\nmembers = ["packages/core", "packages/envs/*"]\n'
    )
    old = root / "environments/old_game"
    old.mkdir(parents=True)
    (old / "old_game.py").write_text(LOADER)
    (old / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend ='
        ' "setuptools.build_meta"\n[project]\nname = "old-game"\nversion ='
        ' "0.1"\n[tool.setuptools]\npy-modules = ["old_game"]\n'
    )
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "all")
    return root


def test_an_environment_of_a_git_repository_is_installed_and_verifiers_stays(python, repository):
    # uv counts a repository on this disk as a network
    online = {"UV_OFFLINE": "0", "UV_NO_INDEX": "1"}
    ran = python.command(
        "install", "vf-word-game", "--repo", repository.as_uri(), "--json", **online
    )
    assert ran.code == 0, ran.err
    assert (
        f"git+{repository.as_uri()}@main#subdirectory=packages/envs/word-game"
        in ran.json["command"]
    )
    assert (ran.json["distribution"], ran.json["version"]) == ("vf-word-game", "0.3")
    assert list(python.site_packages.glob("verifiers-99*")) == []
    ran = python.command("install", "acme/old-game", "--repo", repository, "--json", **online)
    assert ran.code == 0, ran.err
    assert "#subdirectory=environments/old_game" in ran.json["command"]
    assert ran.json["entry_point"] == "old_game:load_environment"


def test_from_repo_takes_the_repository_that_verifiers_came_from(python, repository):
    online = {"UV_OFFLINE": "0", "UV_NO_INDEX": "1"}
    ran = python.command("install", "vf-word-game", "--from-repo", **online)
    assert ran.code == 2
    assert "--from-repo needs the repository of verifiers" in ran.err
    assert "name it with --repo URL" in " ".join(ran.err.split())
    (about,) = python.site_packages.glob("verifiers-*.dist-info")
    origin = {"url": (repository / "packages/core").as_uri(), "dir_info": {"editable": True}}
    (about / "direct_url.json").write_text(json.dumps(origin))
    ran = python.command("install", "vf-word-game", "--from-repo", "--json", **online)
    assert ran.code == 0, ran.err
    assert (
        f"git+{repository.as_uri()}@main#subdirectory=packages/envs/word-game"
        in ran.json["command"]
    )


def test_an_environment_comes_first_from_the_commit_that_verifiers_came_from(python, repository):
    commit = (repository / ".git/refs/heads/main").read_text().strip()
    make_project(repository / "packages/envs/later-game", "later-game")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "later")
    (about,) = python.site_packages.glob("verifiers-*.dist-info")
    origin = {
        "url": repository.as_uri(),
        "vcs_info": {"vcs": "git", "commit_id": commit},
        "subdirectory": "packages/core",
    }
    (about / "direct_url.json").write_text(json.dumps(origin))
    expected = f"git+{repository.as_uri()}@{commit}#subdirectory=packages/envs/word-game"
    planned = python.command("install", "word-game", "--dry-run", "--json")
    assert expected in planned.json["command"]
    ran = python.command("install", "word-game", "--json", UV_OFFLINE="0", UV_NO_INDEX="1")
    assert ran.code == 0, ran.err
    assert expected in ran.json["command"]
    assert ran.json["distribution"] == "vf-word-game"
    # what that commit lacks is looked for in the index
    ran = python.command("install", "later-game", UV_OFFLINE="0", UV_NO_INDEX="1")
    assert ran.code != 0
    assert "there is no vf-later-game" in ran.err


def test_a_repository_without_the_environment_or_the_branch_installs_nothing(
    vf_install, recorded, repository
):
    ran = vf_install("word-gaem", "--repo", str(repository))
    assert ran.code == 2
    assert "has no pyproject.toml in packages/envs/word-gaem or environments/word_gaem" in ran.err
    assert 'did you mean "word-game"?' in ran.err
    ran = vf_install("word-game", "--repo", str(repository), "-b", "no-such-branch")
    assert ran.code == 3
    assert "no-such-branch not found" in ran.err
    ran = vf_install("word-game@7", "--repo", str(repository))
    assert (ran.code, "has version 0.3, and 7 was requested" in ran.err) == (2, True)
    assert recorded() == []


def test_a_broken_environment_is_exit_3_with_the_real_error(python):
    make_project(python.folder / "environments/word_game", source="import no_such_dependency\n")
    ran = python.command("install", "word-game", "--json")
    assert ran.code == 3
    assert (
        "ModuleNotFoundError: No module named 'no_such_dependency'" in ran.json["error"]["message"]
    )
    assert "Traceback" not in ran.err


def test_in_a_uv_project_it_says_that_a_sync_removes_it_and_how_to_keep_it(python):
    make_project(python.folder / "environments/word_game")
    lock = python.venv.parent / "uv.lock"
    lock.write_text("version = 1\n")
    ran = python.command("install", "word-game")
    assert ran.code == 0, ran.err
    said = " ".join(ran.err.split())
    assert f"{lock} does not hold vf-word-game, so `uv sync` removes it" in said
    assert "uv add --editable ./environments/word_game" in said
    lock.write_text('version = 1\n\n[[package]]\nname = "vf-word-game"\n')  # negative control
    ran = python.command("install", "./environments/word_game")
    assert (ran.code, "uv add" in ran.err) == (0, False), ran.err


CUDA_BY_DEFAULT = """[project]
name = "mine"
version = "0.1"
requires-python = ">=3.11"
dependencies = ["torch"]
{line}
"""


@pytest.mark.parametrize("is_left_out", [True, False])
def test_the_line_of_the_docs_locks_no_library_of_cuda(python, tmp_path, is_left_out):
    page = (Path(__file__).parents[2] / "docs/own-project.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("override-dependencies")]
    index = tmp_path / "index"
    needed = [f"{name}; sys_platform == 'linux'" for name in ("nvidia-cublas>=13", "triton")]
    add_wheel(index, "torch", "2.9", {"torch.py": ""}, None, *needed)
    add_wheel(index, "nvidia-cublas", "13.4", {"nvidia.py": ""})
    add_wheel(index, "triton", "3.9", {"triton.py": ""})
    text = CUDA_BY_DEFAULT.format(line=f"[tool.uv]\n{line}" if is_left_out else "")
    (python.folder / "pyproject.toml").write_text(text)
    where = {**python.variables, "UV_DEFAULT_INDEX": index.as_uri()}
    plan = ["uv", "lock", "--dry-run", "--python", sys.executable]
    ran = subprocess.run(plan, cwd=python.folder, env=where, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ("nvidia-" in ran.stderr) is not is_left_out


def test_a_module_in_the_working_directory_does_not_stand_in_for_the_installed_one(python):
    make_project(python.folder / "environments/word_game", source="import no_such_dependency\n")
    (python.folder / "vf_word_game.py").write_text(LOADER)
    ran = python.command("install", "word-game")
    assert ran.code == 3
    assert "no_such_dependency" in ran.err


def add_wheel(
    index: Path,
    name: str,
    version: str,
    files: dict[str, str],
    entry_points: str | None = None,
    *requires: str,
    listed: Sequence[str] | None = None,
) -> None:
    """Put a wheel into ``index``, a folder laid out as a package index is; ``listed``: the files that
    its RECORD names, all by default."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: A game.\n"
    }
    about["METADATA"] += "".join(f"Requires-Dist: {required}\n" for required in requires)
    about["WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    if entry_points:
        about["entry_points.txt"] = f"[verifiers.environments]\n{entry_points}\n"
    about["RECORD"] = "".join(
        f"{path},,\n"
        for path in (
            *(files if listed is None else listed),
            *(f"{stem}.dist-info/{n}" for n in about),
        )
    )
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        for path, text in about.items():
            wheel.writestr(f"{stem}.dist-info/{path}", text)
    links = "".join(
        f'<a href="{path.name}">{path.name}</a>\n' for path in sorted(folder.glob("*.whl"))
    )
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")


def test_an_index_gives_the_pinned_version_and_no_package_that_is_not_an_environment(
    python, tmp_path
):
    index = tmp_path / "index"
    entry = "index-game = vf_index_game:load_environment"
    for version in ("0.3", "0.4.0"):
        add_wheel(index, "vf-index-game", version, {"vf_index_game.py": LOADER}, entry)
    add_wheel(index, "plain", "1.0", {"plain.py": "raise SystemExit('it ran')\n"})
    add_wheel(index, "old-game", "0.1", {"old_game.py": LOADER})
    where = {"UV_DEFAULT_INDEX": index.as_uri()}
    ran = python.command("install", "index-game@0.3", "--json", **where)
    assert (ran.code, ran.json["version"]) == (0, "0.3"), ran.err
    ran = python.command("install", "index-game@0.4", "--json", **where)
    assert (ran.code, ran.json["version"]) == (0, "0.4.0"), ran.err
    ran = python.command("install", "index-game@0.5", **where)
    assert ran.code == 2, ran.err
    assert "did you mean 'index-game'" in ran.err
    ran = python.command("install", "plain", **where)
    assert ran.code == 2, ran.err
    assert "plain is not an environment, and was not installed" in ran.err
    assert not (python.site_packages / "plain.py").exists()
    # it has a loader, but does not say that it is an environment
    ran = python.command("install", "old-game", **where)
    assert ran.code == 2, ran.err
    assert (
        "old-game (A game.) of the package index declares no entry point in verifiers.environments"
        in ran.err
    )
    assert not (python.site_packages / "old_game.py").exists()
    ran = python.command("install", "old-game", "--yes", "--json", **where)
    assert (ran.code, ran.json and ran.json["entry_point"]) == (0, "old_game:load_environment"), (
        ran.err
    )


@pytest.fixture
def foreign(tmp_path):
    """An index with another library called verifiers: in this very version, and in a newer one."""
    from importlib.metadata import version

    for number in (version("verifiers"), "99.0"):
        add_wheel(
            tmp_path / "public",
            "verifiers",
            number,
            {"verifiers/__init__.py": "raise SystemExit('foreign')\n"},
        )
    return {"UV_DEFAULT_INDEX": (tmp_path / "public").as_uri()}


@pytest.mark.parametrize(
    "words", [["word-game"], ["word-game", "--upgrade"], ["word-game", "--no-editable"]], ids=str
)
def test_another_library_of_the_same_name_and_number_is_never_taken(python, foreign, words):
    make_project(python.folder / "environments/word_game")
    ran = python.command("install", *words, "--json", **foreign)
    assert ran.code == 0, ran.err
    assert python.run("-c", "import verifiers; verifiers.load_environment('word-game')").code == 0
    assert not (python.site_packages / "verifiers").exists()


EVALUATE = """
import verifiers as vf
from verifiers.testing import ScriptedClient
results = vf.load_environment("old-game").evaluate(ScriptedClient("1"), "m", num_examples=1, rollouts_per_example=2)
print(len(results), results.metadata.num_errors)
"""


def test_a_package_of_the_index_that_requires_another_verifiers_by_name_runs_with_this_one(
    python, foreign, tmp_path
):
    """Historical packages declare it; one of them also depends on another that asks for extras of
    it."""
    index, entry = tmp_path / "public", "old-game = vf_old_game:load_environment"
    needs = ("verifiers[dice]<0.2,>=0.1.3", "game-helpers")
    add_wheel(index, "vf-old-game", "0.1", {"vf_old_game.py": LOADER}, entry, *needs)
    add_wheel(index, "dice", "6.0", {"dice.py": ""})
    add_wheel(index, "game-helpers", "0.1", {"game_helpers.py": ""}, None, "verifiers[rl]>=0.1.5")
    (about,) = python.site_packages.glob("verifiers-*.dist-info")
    with (about / "METADATA").open("a") as metadata:
        metadata.write("Provides-Extra: dice\nRequires-Dist: dice>=1 ; extra == 'dice'\n")
    ran = python.command("install", "old-game", **foreign)
    assert ran.code == 0, ran.err
    version = importlib_metadata.version("verifiers")
    assert (
        f"vf-old-game requires verifiers[dice]<0.2,>=0.1.3; verifiers {version} takes its place"
        in ran.err
    )
    assert python.run("-c", EVALUATE).out == "2 0\n"
    assert (python.site_packages / "game_helpers.py").exists()
    assert (python.site_packages / "dice.py").exists()
    assert not (python.site_packages / "verifiers").exists()


def test_installed_plainly_into_a_python_without_it_the_other_library_is_taken(python, foreign):
    """Negative control: what the name alone leads to. Where the installer does not see ours, the
    exchange is found."""
    project = make_project(python.folder / "environments/word_game")
    (about,) = python.site_packages.glob("verifiers-*.dist-info")
    shutil.rmtree(about)
    plain = ["uv", "pip", "install", "--python", python.executable, "--no-sources", project]
    subprocess.run(plain, env={**python.variables, **foreign}, check=True, capture_output=True)
    assert (
        (python.site_packages / "verifiers/__init__.py")
        .read_text()
        .startswith("raise SystemExit('foreign')")
    )


def test_a_library_that_is_not_installed_installs_nothing(vf_install, recorded, monkeypatch):
    def absent(name):
        raise importlib_metadata.PackageNotFoundError(name)

    make_project(Path("environments/word_game"))
    monkeypatch.setattr(importlib_metadata, "distribution", absent)
    ran = vf_install("word-game")
    assert ran.code == 2
    assert "an installer would fetch another library of this name" in " ".join(ran.err.split())
    assert recorded() == []


def test_an_installer_that_replaces_the_library_is_exit_3(python, tmp_path):
    """Whatever the reason: here a program on the path that does more than it was asked for."""
    make_project(python.folder / "environments/word_game")
    programs = tmp_path / "programs"
    programs.mkdir()
    (about,) = python.site_packages.glob("verifiers-*.dist-info")
    (programs / "uv").write_text(f"#!/bin/sh\necho '{{}}' > {about}/direct_url.json\n")
    (programs / "uv").chmod(0o755)
    ran = python.command("install", "word-game", PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")
    assert ran.code == 3
    assert "replaced the running verifiers library" in ran.err


def test_an_owners_environment_comes_from_the_owners_index_alone(python, tmp_path):
    entry = "word-game = vf_word_game:load_environment"
    add_wheel(
        tmp_path / "public",
        "vf-word-game",
        "9.0",
        {"vf_word_game.py": "raise SystemExit('foreign')"},
        entry,
    )
    add_wheel(tmp_path / "acme", "vf-word-game", "0.1", {"vf_word_game.py": LOADER}, entry)
    (python.folder / "pyproject.toml").write_text(
        f'[tool.verifiers.install.indexes]\nacme = "{(tmp_path / "acme").as_uri()}"\n'
    )
    everywhere = {
        "UV_DEFAULT_INDEX": (tmp_path / "public").as_uri(),
        "UV_INDEX": (tmp_path / "public").as_uri(),
    }
    ran = python.command("install", "acme/word-game", "--json", **everywhere)
    assert (ran.code, ran.json["version"]) == (0, "0.1"), ran.err
    assert (
        f"--default-index {(tmp_path / 'acme').as_uri()} vf-word-game && uv pip install"
        in ran.json["command"]
    )
    ran = python.command("install", "acme/other-game", **everywhere)
    assert ran.code == 2, ran.err


def test_an_environment_beside_the_library_comes_before_the_index(vf_install, tmp_path):
    ran = vf_install("reverse-text", "--upgrade", "--dry-run", "--json")
    assert ran.code == 0
    assert ran.json["command"].split("-e ")[1].split()[0].endswith("packages/envs/reverse-text")
    plain = vf_install("no-such-environment", "--dry-run", "--json")
    assert "vf-no-such-environment" in plain.json["command"]  # negative control: the index


def test_a_wheel_is_installed_by_its_path(vf_install, tmp_path):
    wheel = tmp_path / "vf_my_task-0.1.0-py3-none-any.whl"
    wheel.touch()
    ran = vf_install(str(wheel), "--dry-run", "--json")
    assert (ran.json["distribution"], ran.code) == ("vf-my-task", 0)
    assert f" {wheel} " in ran.json["command"]
