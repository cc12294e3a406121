"""What every command has in common: help with an example, a version, one JSON object, completion,
no traceback."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from support.eval_command import Ran
from verifiers import errors
from verifiers.cli.common.streams import (
    EPILOG,
    EXIT_CODES,
    HAS_FINDINGS,
    INTERRUPTED,
    UNEXPECTED,
    CheckFailed,
)
from verifiers.runtime.install_lines import install_line

REPOSITORY = Path(__file__).parents[2]
SMALL = {
    "vf-compare": (
        "sets",
        "runs",
        "settings",
        "differences",
        "refused",
        "agreement",
        "without_partner",
    ),
    "vf-rescore": ("run", "origin"),
    "vf-audit": (
        *(
            "environment",
            "errors",
            "warnings",
            "notes",
            "success_metric",
            "oracle",
            "non_solutions",
        ),
        *(
            "best_non_solution",
            "rfc_008",
            "profile",
            "num_rows",
            "num_rollouts",
            "seconds",
            "certificate",
            "kept",
        ),
    ),
    "vf-init": ("id", "path", "files", "table"),
    "vf-install": ("command", "distribution", "version", "entry_point"),
    "vf-setup": ("files",),
    "vf-serve-env": ("url",),
    "vf-view": ("url",),
    "vf-tui": (),
}
COMMANDS = ("vf-eval", *SMALL)
HOSTILE = "no\x1b]0;owned\x07\x1b[2J\u202esuch"


def start(command: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command as a child, without keys."""
    module = f"verifiers.cli.{command.removeprefix('vf-').replace('-', '_')}"
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "VF_"))
    }
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=cwd,
        env=kept,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """``run(command, *words, **variables)``: the command's entry point in this process, in an empty
    folder, without keys. An exception is a failure of the test, where a child would print a
    traceback."""
    for name in [name for name in os.environ if name.startswith(("OPENAI_", "VF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run_here(command: str, *words: str, **variables: str) -> Ran:
        capfd.readouterr()
        main = entry_point(command)
        with monkeypatch.context() as call:
            call.setattr(sys, "argv", [command, *words])
            for name, value in variables.items():
                call.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main()
        streams = capfd.readouterr()
        return Ran(ended.value.code or 0, streams.out, streams.err)

    return run_here


@functools.cache
def scripts() -> dict[str, str]:
    return tomllib.loads((REPOSITORY / "packages/core/pyproject.toml").read_text())["project"][
        "scripts"
    ]


def entry_point(command: str) -> Callable[[], None]:
    module, _, name = scripts()[command].partition(":")
    return getattr(importlib.import_module(module), name)


def test_each_command_has_its_entry_point():
    for command in COMMANDS:
        assert callable(entry_point(command))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_says_how_to_complete(command, run):
    ran = run(command, "--help")
    assert (ran.code, ran.err) == (0, "")
    above_options = ran.out.partition("Options:")[0]
    assert f"\n    {command}" in above_options
    assert f"{command}" in ran.out.partition("Completion in bash: ")[2]
    for flag in ("--help", "--version", "--json", "--verbose", "--quiet"):
        assert flag in ran.out
    assert EPILOG in " ".join(ran.out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_version_names_command_and_library(command, tmp_path):
    """As a program, which the tests beside it are not: a start takes longer than what
    it does here."""
    ran = start(command, "--version", cwd=tmp_path)
    assert (ran.returncode, ran.stdout.split(" ")[:2]) == (0, [f"{command},", "verifiers"])


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_options_are_all_named_in_one_json_object_and_escaped_in_text(command, run, tmp_path):
    wrong = ["--jsn", "--quite", f"--{HOSTILE}"]
    ran = run(command, *wrong, "--json")
    said = json.loads(ran.out)
    assert (ran.code, said["schema"], said["ok"], said["exit_code"]) == (2, 1, False, 2)
    keys = ("runs",) if command == "vf-eval" else SMALL[command]
    assert said.keys() == {"schema", "ok", "exit_code", "error", *keys}
    text = run(command, *wrong)
    assert (text.code, text.out) == (2, "")
    assert "Traceback" not in text.err
    assert "--jsn: no such option, did you mean --json?" in text.err
    assert "--quite: no such option, did you mean --quiet?" in text.err
    assert r"\x1b]0;owned\x07" in text.err
    assert not {"\x1b", "\x07", "\u202e"} & {*text.err}
    assert list(tmp_path.iterdir()) == []


def test_what_a_terminal_does_with_a_raw_escape():
    """Negative control: printed as it is, the same text holds the sequence that
    renames the window."""
    ran = subprocess.run(
        [sys.executable, "-c", f"print({HOSTILE!r})"],
        capture_output=True,
        check=True,
        env={"PYTHONUTF8": "1"},
    )
    assert b"\x1b]0;owned\x07" in ran.stdout


@pytest.mark.parametrize(
    "command", ["vf-eval", "vf-init", "vf-install", "vf-view", "vf-compare", "vf-rescore"]
)
def test_hostile_words_are_exit_2_escaped_and_write_nothing(command, run, tmp_path):
    ran = run(command, HOSTILE)
    assert (ran.code, ran.out) == (2, "")
    assert not {"\x1b", "\x07", "\u202e"} & {*ran.err}
    assert "Traceback" not in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("vf_train", "vf-train"),
        ("vf_vllm", "vf-vllm"),
        ("vf_serve", "vf-serve"),
        ("vf_verify", "vf-verify"),
    ],
)
def test_a_command_of_a_package_that_is_absent_says_what_to_install(name, command):
    code = (
        "import sys; sys.modules['verifiers_trainer'] = None; from verifiers.cli import delegate"
        f" as d; d.{name}()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    line = install_line("verifiers-trainer")
    assert ran.stderr == f"{command} is in verifiers-trainer, which is not installed: {line}\n"


LINES = """
import sys
from verifiers.cli import compare, init, install, view

codes = [one.COMMAND.run(words) for one, words in (
    (install, ["--lst"]), (install, ["word-game", "--dry-run"]), (view, ["--prt"]), (init, ["word-game"]),
)]
print(codes, "numpy" in sys.modules)
print(compare.COMMAND.run(["a", "b"]), "numpy" in sys.modules)
"""


def test_a_notice_or_an_error_of_a_command_loads_no_numpy(tmp_path):
    """The last one is the negative control: a comparison of runs needs it."""
    ran = subprocess.run(
        [sys.executable, "-c", LINES], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "[2, 0, 2, 0] False" in ran.stdout.splitlines(), ran.stderr
    assert ran.stdout.splitlines()[-1] == "2 True"


# --- completion -----------------------------------------------------------------------------------


@pytest.fixture
def complete(run):
    """``complete(command, words)``: what the shell is told for the last of ``words``, by click's
    protocol for bash."""

    def ask(command: str, words: list[str]) -> list[str]:
        variable = f"_{command.replace('-', '_').upper()}_COMPLETE"
        asked = {
            variable: "bash_complete",
            "COMP_WORDS": " ".join([command, *words]),
            "COMP_CWORD": str(len(words)),
        }
        ran = run(command, **asked)
        assert ran.code == 0, ran.err
        return ran.out.splitlines()

    return ask


@pytest.mark.parametrize(
    ("command", "words", "offered"),
    [
        ("vf-eval", ["reverse"], ["plain,reverse-text"]),
        ("vf-eval", ["reverse-text,alphabet"], ["plain,reverse-text,alphabet-sort"]),
        ("vf-eval", ["x", "--progress", "pl"], ["plain,plain"]),
        ("vf-eval", ["x", "--export", "par"], ["plain,parquet"]),
        ("vf-eval", ["x", "--rollouts"], ["plain,--rollouts-per-example"]),
        ("vf-eval", ["./configs/e"], ["file,./configs/e"]),
        ("vf-eval", ["x", "--endpoints-path", "e"], ["file,e"]),
        ("vf-install", ["alphabet"], ["plain,alphabet-sort"]),
        ("vf-init", ["x", "--template", "m"], ["plain,multi"]),
        ("vf-setup", ["--prime"], ["plain,--prime-rl"]),
        ("vf-view", ["outp"], ["file,outp"]),
        ("vf-compare", ["outp"], ["file,outp"]),
    ],
)
def test_the_shell_is_told_ids_words_flags_and_paths(command, words, offered, complete):
    assert complete(command, words) == offered


def test_an_id_that_is_named_already_is_not_offered_again(complete):
    assert complete("vf-eval", ["reverse-text,reverse"]) == ["file,reverse-text,reverse"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_printed(shell, run):
    ran = run("vf-eval", _VF_EVAL_COMPLETE=f"{shell}_source")
    assert ran.code == 0, ran.err
    assert "vf-eval" in ran.out
    assert f"_VF_EVAL_COMPLETE={shell}_complete" in ran.out


def test_exit_codes_of_errors_are_in_the_table():
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass)]
    codes = {cls.exit_code for cls in classes if issubclass(cls, errors.VerifiersError)}
    assert {
        *codes,
        HAS_FINDINGS,
        UNEXPECTED,
        INTERRUPTED,
        CheckFailed.exit_code,
    } <= EXIT_CODES.keys()
