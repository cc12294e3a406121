"""Run the real ``vf-eval``: in this process where that is enough, as a child where signals and
kills matter."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.fresh_python import Ran
from verifiers.cli.evaluate.command import run_command

TOY = """
import verifiers as vf

def load_environment(num_rows: int = 6, broken_rewards: bool = False, **more):
    rows = [{"question": f"say {i}", "answer": str(i)} for i in range(num_rows)]

    def exact(completion, answer):
        if broken_rewards:
            raise ConnectionError("the judge is away")
        return float(completion[-1]["content"] == answer)

    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric(funcs=[exact]), **more)
"""
"""An environment of rows "say N" that wants N back."""


COMMAND = (sys.executable, "-m", "verifiers.cli.evaluate.command")


def install_toy(folder: Path) -> None:
    """Put the toy environment into ``folder``, as an installed distribution with an entry point."""
    (folder / "toy.py").write_text(TOY)
    about = folder / "vf_toy-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vf-toy\nVersion: 1.0\nSummary: Say it.\n"
    )
    (about / "entry_points.txt").write_text(
        "[verifiers.environments]\ntoy = toy:load_environment\n"
    )
    importlib.invalidate_caches()  # a finder that looked here a moment ago sees no newer folder


def last_word(request: Any) -> str:
    """The reply that the toy environment wants."""
    return request.prompt[-1]["content"].split()[-1]


def odd_only(request: Any) -> str:
    """Right for odd rows, wrong for even ones."""
    return last_word(request) if int(last_word(request)) % 2 else "no \x1b[31midea"


@pytest.fixture
def eval_folder(tmp_path, monkeypatch):
    """A working directory with the toy environment, without keys."""
    install_toy(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    importlib.invalidate_caches()
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "VF_ENDPOINTS", "VF_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def vf_eval(eval_folder, capfd):
    """The command, run in this process inside ``eval_folder``."""

    def run(*words: str) -> Ran:
        capfd.readouterr()
        code = run_command(words)
        streams = capfd.readouterr()
        return Ran(code, streams.out, streams.err)

    return run


def start(
    folder: Path, *words: str, command: Sequence[str] = COMMAND, **variables: str
) -> subprocess.Popen[str]:
    """``vf-eval words…`` in ``folder`` as a child with its streams piped."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "VF_"))}
    environment |= {"PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1", **variables}
    return subprocess.Popen(
        [*command, *words],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def end(child: subprocess.Popen[str], timeout_s: float = 30.0) -> Ran:
    """Wait for the child."""
    try:
        out, err = child.communicate(timeout=timeout_s)
    finally:
        child.kill()
    return Ran(child.returncode, out, err)


def rows_on_disk(folder: Path) -> list[dict[str, Any]]:
    """The rows of the only run in ``folder``."""
    (file,) = folder.glob("outputs/evals/*/*/results.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def runner_of(command, capfd):
    """A function that runs a line of a small command in this process."""

    def run(*words):
        capfd.readouterr()
        code = command.run(words)
        streams = capfd.readouterr()
        return Ran(code, streams.out, streams.err)

    return run


def files_below(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()
    )
