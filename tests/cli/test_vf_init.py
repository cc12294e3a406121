"""``vf-init``: what it writes works as it is, what is there stays, and a wrong word
writes nothing."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from support.doc_blocks import blocks_of
from support.eval_command import files_below, runner_of
from support.fresh_python import Ran, make_fresh_python, needs_setuptools
from verifiers.cli.init import COMMAND
from verifiers.cli.scaffold import TEMPLATES, parse_name
from verifiers.testing import FakeServer

REPOSITORY = Path(__file__).parents[2]
FORMS = [(template, *more) for template in TEMPLATES for more in ((), ("--multi-file",))]
ONE_MODULE = [
    ".gitignore",
    "AGENTS.md",
    "README.md",
    "pyproject.toml",
    "src/vf_word_game/__init__.py",
    "src/vf_word_game/py.typed",
    "tests/test_word_game.py",
]


@pytest.fixture
def vf_init(tmp_path, monkeypatch, capfd):
    """The command, run in this process inside an empty folder."""
    monkeypatch.chdir(tmp_path)
    return runner_of(COMMAND, capfd)


def make_workspace(root: Path, *, with_verifiers: bool = True) -> None:
    (root / "packages/envs").mkdir(parents=True)
    (root / "pyproject.toml").write_text(
        '[tool.uv.workspace]\nmembers = ["packages/core", "packages/envs/*"]\n'
    )
    if with_verifiers:
        (root / "packages/core").mkdir()
        (root / "packages/core/pyproject.toml").write_text(
            '[project]\nname = "verifiers"\nversion = "1"\n'
        )


# --- what is written ------------------------------------------------------------------------------


def test_the_example_of_the_guide_names_folder_distribution_module_and_id(vf_init, tmp_path):
    ran = vf_init("vf-custom-environment")
    assert (ran.code, ran.err) == (0, "")
    folder = tmp_path / "environments/custom_environment"
    document = tomllib.loads((folder / "pyproject.toml").read_text())
    project = document["project"]
    assert (project["name"], project["version"], project["dependencies"]) == (
        "vf-custom-environment",
        "0.1.0",
        ["verifiers"],
    )
    entry_points = {
        "verifiers.environments": {"custom-environment": "vf_custom_environment:load_environment"}
    }
    assert project["entry-points"] == entry_points
    assert document["tool"]["verifiers"]["eval"] == {"num_examples": 5, "rollouts_per_example": 3}
    # where ours came from
    assert document["tool"]["uv"]["sources"]["verifiers"]["path"].endswith("packages/core")
    assert (folder / "src/vf_custom_environment/__init__.py").is_file()
    for step in (
        "vf-install custom-environment",
        "vf-eval custom-environment",
        "python -m pytest environments/custom",
    ):
        assert step in ran.out


def test_the_forms_of_a_package(vf_init, tmp_path):
    vf_init("word-game")
    assert files_below(tmp_path / "environments/word_game") == ONE_MODULE
    vf_init("word-game", "-p", "more", "--multi-file", "--no-tests")
    several = [
        *ONE_MODULE[:5],
        "src/vf_word_game/data.py",
        "src/vf_word_game/py.typed",
        "src/vf_word_game/rewards.py",
    ]
    assert files_below(tmp_path / "more/word_game") == several


@pytest.mark.parametrize("form", FORMS, ids="".join)
def test_what_is_generated_is_formatted_and_passes_the_linter(vf_init, form):
    vf_init("word-game", "--template", *form)
    config = REPOSITORY / "pyproject.toml"
    for check in (["check"], ["format", "--check"]):
        ran = subprocess.run(
            [
                sys.executable,
                "-m",
                "ruff",
                *check,
                "--no-cache",
                "--config",
                config,
                "environments",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("form", FORMS, ids="".join)
def test_in_the_workspace_it_keeps_to_the_common_shape_of_environment_packages(
    vf_init, tmp_path, monkeypatch, form
):
    make_workspace(tmp_path)
    vf_init("word-game", "--template", *form)
    envs = tmp_path / "packages/envs"
    assert (envs / "word-game/src/vf_word_game/__init__.py").is_file()
    spec = importlib.util.spec_from_file_location(
        "common_shape", REPOSITORY / "tests/envs/test_packages.py"
    )
    common = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(common)
    monkeypatch.syspath_prepend(envs / "word-game/src")
    common.ENVS = envs
    common.load_function = lambda _: importlib.import_module("vf_word_game").load_environment
    not_of_a_template = {
        "test_the_installed_distribution_offers_its_id",
        # no model has played it yet
        "test_the_readme_names_every_reward_and_metric_and_the_baselines",
        "test_an_oracle_reaches_the_maximum",
    }
    if form[0] == "python" and shutil.which("bwrap") is None:
        not_of_a_template.add("test_the_check_of_environments_is_clean")
    try:
        for name in dir(common):
            if name.startswith("test_") and name not in not_of_a_template:
                getattr(common, name)("word-game")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "vf_word_game"]:
            del sys.modules[name]


def test_only_a_member_of_the_workspace_takes_verifiers_from_it(vf_init, tmp_path):
    make_workspace(tmp_path)
    vf_init("word-game")
    vf_init("word-game", "-p", "elsewhere")
    member = tomllib.loads((tmp_path / "packages/envs/word-game/pyproject.toml").read_text())
    assert member["tool"]["uv"]["sources"] == {"verifiers": {"workspace": True}}
    make_workspace(tmp_path / "other", with_verifiers=False)
    os.chdir(tmp_path / "other/packages")
    assert vf_init("word-game").code == 0
    for folder in (tmp_path / "elsewhere/word_game", tmp_path / "other/packages/envs/word-game"):
        source = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["uv"]["sources"][
            "verifiers"
        ]
        assert (folder / source.pop("path")).samefile(REPOSITORY / "packages/core")
        assert source == {"editable": True}


def test_the_place_that_the_library_came_from_is_uvs_source(tmp_path):
    python = make_fresh_python(tmp_path)
    (about,) = python.site_packages.glob("verifiers-*.dist-info")
    origins = {
        "a": {
            "url": "https://host/o/r.git",
            "vcs_info": {"vcs": "git", "commit_id": "f00"},
            "subdirectory": "packages/core",
        },
        "b": {"url": "file:///somewhere-that-is-gone", "dir_info": {"editable": True}},
        "c": {
            "url": "https://me:canary@host/r.git",
            "vcs_info": {"vcs": "git", "commit_id": "f00"},
        },
        "d": {"url": tmp_path.as_uri(), "dir_info": {}},
    }
    sources = {}
    for name, origin in origins.items():
        (about / "direct_url.json").write_text(json.dumps(origin))
        assert python.command("init", name).code == 0
        text = (python.folder / "environments" / name / "pyproject.toml").read_text()
        assert "canary" not in text
        sources[name] = tomllib.loads(text)["tool"].get("uv", {}).get("sources")
    git = {"git": "https://host/o/r.git", "rev": "f00", "subdirectory": "packages/core"}
    bare = {"git": "https://host/r.git", "rev": "f00"}
    path = {"path": os.path.relpath(tmp_path, python.folder / "environments/d")}
    assert sources == {
        "a": {"verifiers": git},
        "b": None,
        "c": {"verifiers": bare},
        "d": {"verifiers": path},
    }


def test_json_is_one_object_with_the_documented_keys(vf_init, tmp_path):
    ran = vf_init("word-game", "--json")
    assert ran.out.count("\n") == 1
    assert ran.json.keys() == {"schema", "ok", "exit_code", "error", "id", "path", "files", "table"}
    assert (ran.json["schema"], ran.json["ok"], ran.json["id"]) == (1, True, "word-game")
    assert sorted(ran.json["files"]) == files_below(tmp_path / ran.json["path"])
    wrong = vf_init("word game", "--json")
    assert (wrong.code, wrong.json["exit_code"], wrong.json["files"]) == (2, 2, None)
    assert wrong.json["error"]["type"] == "ConfigError"


# --- what is there stays --------------------------------------------------------------------------


def test_files_that_are_there_are_kept_and_named(vf_init, tmp_path):
    vf_init("word-game")
    folder = tmp_path / "environments/word_game"
    (folder / "src/vf_word_game/__init__.py").write_text("mine = 1\n")
    (folder / "README.md").write_text("mine")
    (folder / "tests/test_word_game.py").unlink()
    ran = vf_init("word-game")
    assert ran.code == 0
    assert (folder / "src/vf_word_game/__init__.py").read_text() == "mine = 1\n"
    assert (folder / "README.md").read_text() == "mine"
    assert (folder / "tests/test_word_game.py").is_file()
    assert "kept      src/vf_word_game/__init__.py" in ran.out
    assert "written   tests/test_word_game.py" in ran.out
    assert "6 files existed already" in ran.err
    assert "--rewrite-readme replaces the README" in ran.err


def test_rewrite_readme_replaces_the_readme_alone(vf_init, tmp_path):
    vf_init("word-game")
    folder = tmp_path / "environments/word_game"
    (folder / "README.md").write_text("mine")
    (folder / "pyproject.toml").write_text("# mine")
    ran = vf_init("word-game", "--rewrite-readme", "--json")
    assert (ran.json["files"]["README.md"], ran.json["files"]["pyproject.toml"]) == (
        "replaced",
        "kept",
    )
    assert (folder / "README.md").read_text().startswith("# word-game")
    assert (folder / "pyproject.toml").read_text() == "# mine"


def limited(folder: Path, *words: str) -> Ran:
    """``vf-init words…`` in a child in which every write beyond 400 bytes of a file fails, as on a
    full disk."""
    program = (
        "import resource, sys; from verifiers.cli.init import COMMAND; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400)); sys.exit(COMMAND.run(sys.argv[1:]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path):
    ran = limited(tmp_path, "word-game", "-p", "deep/er")
    assert ran.code == 2
    assert "word_game cannot be written: File too large. Nothing was changed." in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_an_existing_folder_as_it_was(tmp_path):
    folder = tmp_path / "environments/word_game"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("mine")
    assert limited(tmp_path, "word-game", "--rewrite-readme").code == 2
    assert files_below(tmp_path) == ["environments/word_game/README.md"]
    assert (folder / "README.md").read_text() == "mine"
    assert list(folder.iterdir()) == [folder / "README.md"]


# --- wrong words ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "env_id"),
    [
        ("a", "a"),
        ("1st.Game", "1st-game"),
        ("VF-x__y", "x-y"),
        ("vf_vf-x", "vf-x"),
        ("a" * 100, "a" * 100),
    ],
)
def test_names_are_folded_to_ids(name, env_id):
    assert parse_name(name).id == env_id


@pytest.mark.parametrize(
    "name",
    [
        "",
        "vf-",
        "-x",
        "x-",
        ".x",
        "a b",
        "a/b",
        "../x",
        "/etc/x",
        "x@1",
        "o/x@1",
        "é",
        "x\n",
        "a" * 101,
        "..",
        "x;rm",
    ],
)
def test_an_invalid_name_is_refused_and_nothing_is_written(vf_init, tmp_path, name):
    ran = vf_init("--", name) if not name.startswith("-") else vf_init(name)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("vf-init: ")
    assert "Traceback" not in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the name of the environment: vf-init NAME"),
        (["a", "b"], "not 2: a b"),
        (
            ["a", "--templte", "x", "--muti-file"],
            "--templte: no such option, did you mean --template?",
        ),
        (
            ["a", "--templte", "x", "--muti-file"],
            "--muti-file: no such option, did you mean --multi-file?",
        ),
        (
            ["a", "--template", "singel"],
            (
                "must be one of single, multi, tool, stateful, python, not 'singel', did you mean"
                ' "single"?'
            ),
        ),
        (["a", "--path"], "requires an argument"),
    ],
)
def test_wrong_words_are_named_and_nothing_is_written(vf_init, tmp_path, words, said):
    ran = vf_init(*words)
    assert ran.code == 2
    assert said in " ".join(ran.err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "link",
    ["environments/word_game", "environments/word_game/src", "environments/word_game/README.md"],
)
def test_links_that_lead_elsewhere_are_refused(vf_init, tmp_path, link):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / link).parent.mkdir(parents=True)
    (tmp_path / link).symlink_to(outside / "new" if link.endswith(".md") else outside)
    ran = vf_init("word-game", "--rewrite-readme")
    assert ran.code == 2
    assert "links to" in ran.err
    assert list(outside.iterdir()) == []
    assert files_below(tmp_path) == ([link] if link.endswith(".md") else [])


@pytest.mark.parametrize(
    "blocked", ["environments", "environments/word_game", "environments/word_game/src"]
)
def test_a_file_where_a_folder_belongs_is_refused(vf_init, tmp_path, blocked):
    (tmp_path / blocked).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / blocked).write_text("mine")
    ran = vf_init("word-game")
    assert ran.code == 2
    assert f"{blocked} is a file; a folder is needed there" in ran.err
    assert files_below(tmp_path) == [blocked]


def test_the_options_are_these(vf_init):
    flags = sorted(
        flag
        for option in COMMAND.click_command().params
        for flag in option.opts
        if flag.startswith("--")
    )
    assert (
        flags
        == "--answer-column --answer-separator --from --json --judge --multi-file --no-tests --path"
        " --question-column --quiet --rewrite-readme --template --verbose --version".split()
    )
    assert "vf-init [OPTIONS] NAME" in vf_init("--help").out
    assert vf_init("--version").out.startswith("vf-init, verifiers ")


# --- end to end -----------------------------------------------------------------------------------


def oracle(request):
    """Right answers for the rows of the single-turn template."""
    answers = {"France": "Paris", "7 times 6": "42", "planet": "Mercury"}
    return next(
        f"<answer>{answer}</answer>"
        for word, answer in answers.items()
        if word in request.prompt[-1].content
    )


def test_a_new_package_installs_evaluates_and_passes_its_test_unchanged(tmp_path):
    python = make_fresh_python(tmp_path)
    assert python.command("init", "vf-word-game").code == 0
    installed = python.command("install", "vf-word-game", "--json")
    assert installed.code == 0, installed.err
    assert installed.json["entry_point"] == "vf_word_game:load_environment"
    with FakeServer(oracle, models=["m"]) as server:
        ran = python.command("eval", "word-game", "-b", server.url, "--json")
    assert ran.code == 0, ran.err
    (run,) = ran.json["runs"]
    assert (run["num_rollouts"], run["rollouts_per_example"], run["avg_reward"]) == (9, 3, 1.0)
    assert run["avg_metrics"]["answered"] == 1.0
    tested = python.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "environments/word_game")
    assert tested.code == 0, tested.out


def test_what_its_instructions_for_agents_say_to_run_runs(tmp_path):
    python = make_fresh_python(tmp_path)
    assert python.command("init", "vf-word-game").code == 0
    page = python.folder / "environments/word_game/AGENTS.md"
    assert len(page.read_text().splitlines()) < 60
    (block,) = (block for block in blocks_of(page) if block.language == "bash")
    with FakeServer(oracle, models=["m"]) as server:
        for line in block.code.splitlines():
            program, *words = line.split()
            if program == "python":
                ran = python.run(*words)
            else:
                further = ["-m", "m", "-b", server.url] if program == "vf-eval" else []
                ran = python.command(program.removeprefix("vf-"), *words, *further)
            assert ran.code == 0, (line, ran.out, ran.err)


@pytest.mark.slow
def test_every_template_in_both_forms_installs_and_passes_its_test(tmp_path):
    python = make_fresh_python(tmp_path)
    ids = []
    for number, form in enumerate(FORMS):
        ids.append(f"game-{number}-{form[0]}")
        assert python.command("init", ids[-1], "--template", *form).code == 0
        installed = python.command("install", ids[-1])
        assert installed.code == 0, installed.err
    tested = python.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "environments")
    assert tested.code == 0, tested.out
    if shutil.which("bwrap") is None:  # the model's code is not run without a sandbox
        ids = [env_id for env_id in ids if not env_id.endswith("-python")]
    for env_id in ids:
        audited = python.command("audit", env_id)
        assert audited.code == 0, audited.out
    with FakeServer("<answer>no</answer><guess>1</guess>", models=["m"]) as server:
        ran = python.command("eval", ",".join(ids), "-b", server.url, "--json")
    assert ran.code == 0, ran.err
    assert [run["num_rollouts"] for run in ran.json["runs"]] == [9] * len(ids)


def test_wheel_and_source_archive_of_verifiers_take_the_templates_along(tmp_path):
    needs_setuptools()
    core = tmp_path / "core"
    left_out = shutil.ignore_patterns("*.egg-info", "__pycache__", "build")
    shutil.copytree(REPOSITORY / "packages/core", core, ignore=left_out)
    program = (
        "from setuptools import build_meta as b; import tarfile; t = tarfile.open('dist/' +"
        " b.build_sdist('dist')); t.extraction_filter = getattr(tarfile, 'data_filter', None);"
        " t.extractall('unpacked')"
    )
    subprocess.run([sys.executable, "-c", program], cwd=core, check=True, capture_output=True)
    (unpacked,) = (core / "unpacked").iterdir()
    program = "from setuptools import build_meta as b; print(b.build_wheel('dist'))"
    subprocess.run([sys.executable, "-c", program], cwd=unpacked, check=True, capture_output=True)
    (wheel,) = unpacked.glob("dist/*.whl")
    shipped = {
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if name.startswith("verifiers/templates/")
    }
    source = REPOSITORY / "packages/core/src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "verifiers/templates").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {Path(name).suffix for name in wanted} == {".tmpl", ".toml", ".yaml", ".py"}
    assert wanted <= shipped
