"""``vf-view`` as a command, and the copy it writes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from support import view_runs
from support.atif_rollouts import played
from support.eval_command import runner_of
from verifiers.cli.view import COMMAND
from verifiers.view.app import static_files
from verifiers.view.export import joined, modules

CAREFUL = "evals%2Ftimes-table--careful-7b%2F3fa9c1d2"


@pytest.fixture
def vf_view(tmp_path, monkeypatch, capfd):
    """The command, run in this process inside an empty folder."""
    monkeypatch.chdir(tmp_path)
    return runner_of(COMMAND, capfd)


def test_it_serves_says_where_and_ends_with_an_interrupt(runs):
    child = subprocess.Popen(
        [sys.executable, "-m", "verifiers.cli.view", str(runs), "--json", "--no-browser"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        said = json.loads(child.stdout.readline())
        assert set(said) == {"schema", "ok", "exit_code", "url", "error"}
        with urllib.request.urlopen(said["url"] + "api/runs", timeout=20) as answer:
            assert len(json.load(answer)["runs"]) == 4
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=20)
    finally:
        child.kill()
    assert (child.returncode, out) == (130, "")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "word", ["times-table", "vf-times_table", "acme/times-table", "environments/times_table.py"]
)
def test_an_environment_by_id_or_path_shows_its_evaluations(runs, vf_view, tmp_path, word):
    (tmp_path / "outputs").symlink_to(runs)
    (tmp_path / "environments").mkdir()
    # not needed to look at its runs
    (tmp_path / "environments/times_table.py").write_text("def load_environment(:\n")
    ran = vf_view(word, "--export", "copy")
    assert ran.code == 0, ran.err
    assert "2 runs" in ran.out
    refused = vf_view("word-game", "--export", "copy")
    assert refused.code == 2
    assert "word-game is not a folder" in refused.err


def test_trajectories_are_shown_as_a_run(vf_view, tmp_path):
    played("tools").to_atif(tmp_path / "atif")
    for word in ("atif", "atif/000000.json"):
        ran = vf_view(word, "--export", f"copy-{len(word)}")
        assert ran.code == 0, ran.err
        assert "1 runs" in ran.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "there is no ./outputs"),
        (("nowhere",), "nowhere is not a folder"),
        ((".", "--host", "0.0.0.0"), "--allow-remote"),
        ((".", "--no-brwser"), "did you mean --no-browser"),
        (("export", "."), "vf-view export DIR OUT"),
        ((".", "--once"), "--export"),
        ((".", "--port", "70000"), "70000"),
    ],
)
def test_what_is_wrong_is_one_paragraph_and_exit_2(vf_view, words, said):
    ran = vf_view(*words)
    assert ran.code == 2
    assert said in ran.err
    assert ran.err.count("vf-view: ") == 1


@pytest.mark.slow
def test_a_tokenizer_that_is_not_here_is_named(vf_view):
    pytest.importorskip("transformers", reason="transformers is not installed")
    ran = vf_view(".", "--tokenizer", "no/such-tokenizer")
    assert ran.code == 2
    assert "--tokenizer no/such-tokenizer: no such tokenizer on this machine" in ran.err


def test_outputs_of_the_folder_and_its_environments_are_the_default(tmp_path, monkeypatch):
    from verifiers.view.catalog import Catalog, default_folders

    monkeypatch.chdir(tmp_path)
    view_runs.image_run(tmp_path / "outputs")
    view_runs.image_run(tmp_path / "environments" / "pictures" / "outputs")
    assert len(Catalog(default_folders()).sources()) == 2


# --- the copy -------------------------------------------------------------------------------------


def test_a_copy_works_from_the_disk(vf_view, runs, page):
    ran = vf_view("export", str(runs), "site", "--json")
    said = json.loads(ran.out)
    assert ran.code == 0
    assert said["url"].startswith("file://")
    page.open(said["url"])
    page.wait_text("careful-7b")
    page.open(f"{said['url']}#/run/{CAREFUL}")
    page.wait_text("36 rollouts")
    page.wait_text("What is 3 times 1?")
    page.press("/", *"about a hundred")
    page.wait(lambda: "36 rollouts" not in page.text() and "searching" not in page.text())
    page.open(f"{said['url']}#/run/{CAREFUL}")
    page.wait_text("36 rollouts")
    page.press("j", "ENTER")
    page.wait_text("multiply()")
    page.press("j")
    page.wait_text("2 of 36")
    page.picture("copy")
    page.open(f"{said['url']}#/training/learner")
    page.wait_text("Rollouts of step 30")
    assert page.js("return window.owned") is None


def test_a_copy_draws_markdown_and_formulas_from_the_disk(vf_view, tmp_path, page):
    view_runs.prose_run(tmp_path / "areas")
    url = json.loads(vf_view("export", str(tmp_path / "areas"), "site", "--json").out)["url"]
    page.open(f"{url}#/run/evals%2Fareas--writer%2F11bb22cc/0")
    page.wait_text("rollout begins")
    assert page.count(".drawn .katex-html") == 4
    fonts = "return document.fonts.ready.then(() => document.fonts.check('12px KaTeX_Math'))"
    assert page.js(fonts)
    loaded = "return [...document.fonts].filter((font) => font.status === 'loaded').length"
    assert page.js(loaded) > 2
    assert (tmp_path / "site" / "vendor" / "LICENSE-katex.txt").exists()


def test_a_copy_says_nothing_of_this_machine(vf_view, runs, tmp_path):
    assert vf_view(str(runs), "--export", "site", "--once").code == 0
    written = b"".join(
        path.read_bytes() for path in (tmp_path / "site").rglob("*") if path.is_file()
    )
    assert str(runs).encode() not in written
    assert b"Content-Security-Policy" in (tmp_path / "site" / "index.html").read_bytes()


def test_a_copy_replaces_a_copy_and_nothing_else(vf_view, runs, tmp_path):
    assert vf_view("export", str(runs), "site").code == 0
    assert vf_view("export", str(runs), "site").code == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index.html").write_text("my own page")
    ran = vf_view("export", str(runs), "mine")
    assert ran.code == 2
    assert "holds other files" in ran.err
    assert (tmp_path / "mine" / "index.html").read_text() == "my own page"
    assert not list(tmp_path.glob(".*"))


def test_copying_tells_how_far_it_is(vf_view, runs, monkeypatch):
    monkeypatch.setattr("verifiers.view.export.REPORT_EVERY_S", 0.0)
    ran = vf_view("export", str(runs), "site")
    assert "vf-view: copying, run 1 of " in ran.err
    assert re.search(r"copying, run \d of \d, \d+ rollouts", ran.err)
    assert re.search(r"copying, run \d of \d, step 30\n", ran.err)
    monkeypatch.setattr("verifiers.view.export.REPORT_EVERY_S", 60.0)  # negative control
    assert "copying" not in vf_view("export", str(runs), "site").err


COUNTS_OF_READS = """
import sys
from pathlib import Path
from verifiers.view.catalog import Catalog
from verifiers.view.export import export
from verifiers.view.library import Library

opened = []
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
for folder in sys.argv[1:]:
    opened.clear()
    export(Library(Catalog([Path(folder)])), Path(folder + "-copy"))
    print(*(sum(name in path for path in opened) for name in ("settings.json", "completions")))
"""


def test_a_copy_reads_the_settings_of_a_training_as_often_for_any_number_of_steps(tmp_path):
    folders = [str(tmp_path / name / "learner") for name in ("short", "long")]
    for folder, num_steps in zip(folders, (2, 9), strict=True):
        view_runs.training(Path(folder), num_steps=num_steps)
    command = [sys.executable, "-c", COUNTS_OF_READS, *folders]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (of_short, completions), (of_long, more) = (
        map(int, line.split()) for line in said.splitlines()
    )
    assert of_short == of_long > 0
    assert more > completions  # control: those of each step are read


def test_the_modules_can_be_joined():
    page_modules = modules(static_files())
    names = [
        name
        for text in page_modules.values()
        for name in re.findall(
            r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", text, re.MULTILINE
        )
    ]
    assert sorted(names) == sorted(set(names))
    script = joined(page_modules)
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    assert all(f"function {name}(" in script for name in ("visible", "transcript", "runsPage"))
    assert (
        script.index("function visible(")
        < script.index("function transcript(")
        < script.index("async function open(")
    )
