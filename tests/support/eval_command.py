"""Run the real ``vf-eval``: in this process where that is enough, as a child where signals and streams matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOY = '''
import verifiers as vf

def load_environment(num_rows: int = 6, broken_rewards: bool = False, **more):
    rows = [{"question": f"say {i}", "answer": str(i)} for i in range(num_rows)]

    def exact(completion, answer):
        if broken_rewards:
            raise ConnectionError("the judge is away")
        return float(completion[-1]["content"] == answer)

    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric(funcs=[exact]), **more)
'''
"""An environment of rows "say N" that wants N back."""


def last_word(request: Any) -> str:
    """The reply that the toy environment wants."""
    return request.prompt[-1]["content"].split()[-1]


def odd_only(request: Any) -> str:
    """Right for odd rows, wrong for even ones."""
    return last_word(request) if int(last_word(request)) % 2 else "no \x1b[31midea"


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        return json.loads(self.out)

    @property
    def paragraph(self) -> str:
        """The error paragraph, as one line."""
        assert "Traceback" not in self.err
        assert self.err.count("vf-eval: ") == 1, self.err
        return " ".join(self.err[self.err.index("vf-eval: ") :].split())


def start(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """``vf-eval words…`` in ``folder`` as a child with its streams piped."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "VF_"))}
    environment |= {"PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "verifiers.cli.eval", *words],
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
