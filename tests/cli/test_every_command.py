"""What every command has in common: help with an example, a version, one JSON object, completion, no traceback."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from verifiers.runtime.install_lines import install_line

REPOSITORY = Path(__file__).parents[2]
SMALL = {
    "vf-compare": ("runs", "differences", "refused", "agreement"),
    "vf-rescore": ("run", "origin"),
    "vf-audit": (
        *("environment", "errors", "warnings", "notes", "success_metric", "oracle", "non_solutions"),
        *("best_non_solution", "profile", "num_rows", "num_rollouts", "seconds", "certificate", "kept"),
    ),
    "vf-init": ("id", "path", "files"),
    "vf-install": ("command", "distribution", "version", "entry_point"),
    "vf-setup": ("files",),
    "vf-serve-env": ("url",),
    "vf-view": ("url",),
    "vf-tui": (),
}
COMMANDS = ("vf-eval", *SMALL)
HOSTILE = "no\x1b]0;owned\x07\x1b[2J\u202esuch"


def run(command: str, *words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command as a child, without keys."""
    module = f"verifiers.cli.{command.removeprefix('vf-').replace('-', '_')}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "VF_"))}
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=cwd,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_each_command_has_its_entry_point():
    scripts = tomllib.loads((REPOSITORY / "packages/core/pyproject.toml").read_text())["project"]["scripts"]
    for command in COMMANDS:
        module, _, name = scripts[command].partition(":")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_says_how_to_complete(command, tmp_path):
    ran = run(command, "--help", cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    above_options = ran.stdout.partition("Options:")[0]
    assert f"\n    {command}" in above_options
    assert f"{command}" in ran.stdout.partition("Completion in bash: ")[2]
    for flag in ("--help", "--version", "--json", "--verbose", "--quiet"):
        assert flag in ran.stdout
    assert "Exit codes: 0 done, 2 something to correct, 3 " in ran.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_version_names_command_and_library(command, tmp_path):
    ran = run(command, "--version", cwd=tmp_path)
    assert (ran.returncode, ran.stdout.split(" ")[:2]) == (0, [f"{command},", "verifiers"])


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_options_are_all_named_in_one_json_object_and_escaped_in_text(command, tmp_path):
    wrong = ["--jsn", "--quite", f"--{HOSTILE}"]
    ran = run(command, *wrong, "--json", cwd=tmp_path)
    said = json.loads(ran.stdout)
    assert (ran.returncode, said["schema"], said["ok"], said["exit_code"]) == (2, 1, False, 2)
    keys = ("runs",) if command == "vf-eval" else SMALL[command]
    assert said.keys() == {"schema", "ok", "exit_code", "error", *keys}
    text = run(command, *wrong, cwd=tmp_path)
    assert (text.returncode, text.stdout) == (2, "")
    assert "Traceback" not in text.stderr
    assert "--jsn: no such option, did you mean --json?" in text.stderr
    assert "--quite: no such option, did you mean --quiet?" in text.stderr
    assert r"\x1b]0;owned\x07" in text.stderr
    assert not {"\x1b", "\x07", "\u202e"} & {*text.stderr}
    assert list(tmp_path.iterdir()) == []


def test_what_a_terminal_does_with_a_raw_escape():
    """Negative control: printed as it is, the same text holds the sequence that renames the window."""
    ran = subprocess.run(
        [sys.executable, "-c", f"print({HOSTILE!r})"], capture_output=True, check=True, env={"PYTHONUTF8": "1"}
    )
    assert b"\x1b]0;owned\x07" in ran.stdout


@pytest.mark.parametrize("command", ["vf-eval", "vf-init", "vf-install", "vf-view", "vf-compare", "vf-rescore"])
def test_hostile_words_are_exit_2_escaped_and_write_nothing(command, tmp_path):
    ran = run(command, HOSTILE, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert not {"\x1b", "\x07", "\u202e"} & {*ran.stderr}
    assert "Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "command"), [("vf_train", "vf-train"), ("vf_vllm", "vf-vllm"), ("vf_serve", "vf-serve")]
)
def test_a_command_of_a_package_that_is_absent_says_what_to_install(name, command):
    code = f"import sys; sys.modules['verifiers_trainer'] = None; from verifiers.cli import delegate as d; d.{name}()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    line = install_line("verifiers-trainer")
    assert ran.stderr == f"{command} needs the trainer, which is not installed: {line}\n"


# --- completion ---------------------------------------------------------------------------------------------------


def complete(command: str, words: list[str], cwd: Path) -> list[str]:
    """What the shell is told for the last of ``words``, by click's protocol for bash."""
    variable = f"_{command.replace('-', '_').upper()}_COMPLETE"
    asked = {variable: "bash_complete", "COMP_WORDS": " ".join([command, *words]), "COMP_CWORD": str(len(words))}
    ran = run(command, cwd=cwd, **asked)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


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
def test_the_shell_is_told_ids_words_flags_and_paths(command, words, offered, tmp_path):
    assert complete(command, words, tmp_path) == offered


def test_an_id_that_is_named_already_is_not_offered_again(tmp_path):
    assert complete("vf-eval", ["reverse-text,reverse"], tmp_path) == ["file,reverse-text,reverse"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_printed(shell, tmp_path):
    ran = run("vf-eval", cwd=tmp_path, _VF_EVAL_COMPLETE=f"{shell}_source")
    assert ran.returncode == 0, ran.stderr
    assert "vf-eval" in ran.stdout
    assert f"_VF_EVAL_COMPLETE={shell}_complete" in ran.stdout
