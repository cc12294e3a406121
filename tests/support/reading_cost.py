"""What a reader must open to follow one evaluation or one training step: files, and edges from file to file.

``python reading_cost.py evaluation`` and ``python reading_cost.py training FOLDER`` print a JSON object. Only calls
count, not imports; what a test double does counts for neither. Each is measured in a process that did nothing else.
"""

from __future__ import annotations

import dis
import itertools
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import verifiers as vf

PACKAGES = {"verifiers", "verifiers_trainer"}
RESUME = dis.opmap["RESUME"]


class Recorder:
    """Records the source files of the packages that calls pass through, on every thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.edges: set[tuple[str, str]] = set()
        self._names: dict[str, str | None] = {}

    def record(self, work: Callable[[], Any]) -> None:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or frame.f_code.co_name in ("<module>", "find_spec") or not _begins(frame):
            return
        if (called := self._name(frame)) is None:
            return
        self.files.add(called)
        caller = frame.f_back
        while caller is not None and self._name(caller) is None:
            caller = None if self._is_double(caller) else caller.f_back
        if caller is not None and (name := self._name(caller)) not in (None, called):
            self.edges.add((str(name), called))

    @staticmethod
    def _is_double(frame: FrameType) -> bool:
        parts = Path(frame.f_code.co_filename).parts
        return any(pair == ("verifiers", "testing") for pair in itertools.pairwise(parts))

    def _name(self, frame: FrameType) -> str | None:
        """The file below its package; None for other packages and for test doubles."""
        path = frame.f_code.co_filename
        if path not in self._names:
            parts = Path(path).parts
            at = next((i for i, part in enumerate(parts[:-1]) if part in PACKAGES and parts[i - 1] == "src"), None)
            is_double = at is not None and parts[at + 1] == "testing"
            self._names[path] = None if at is None or is_double else "/".join(parts[at:])
        return self._names[path]


def _begins(frame: FrameType) -> bool:
    """Whether the function is entered; a coroutine that goes on after an ``await`` is no call."""
    code, at = frame.f_code.co_code, max(frame.f_lasti, 0)
    return code[at] != RESUME or code[at + 1] == 0


class Talk(vf.MultiTurnEnv):
    """Five turns."""

    def env_response(self, messages: Any, state: vf.State) -> str:
        return "more"


def correct(completion: Any, answer: str) -> float:
    return float(completion[-1].content == answer)


def evaluation() -> Recorder:
    """One row, five turns, one reward function."""
    from verifiers.testing import ScriptedClient

    def evaluate() -> None:
        env = Talk(dataset=[{"question": "?", "answer": "yes"}], rubric=vf.Rubric(funcs=[correct]), max_turns=5)
        results = env.evaluate(ScriptedClient("yes"), "scripted")
        assert results["rewards"] == [1.0]

    evaluate()  # imports everything
    recorder = Recorder()
    recorder.record(evaluate)
    return recorder


def training(folder: Path) -> Recorder:
    """One optimizer step on two groups of rollouts with the embedded engine."""
    import torch

    from support.training import run, small_trainer

    torch.set_num_threads(1)
    recorder = Recorder()
    run(small_trainer(folder / "first", max_steps=1, deterministic=True))
    recorder.record(lambda: run(small_trainer(folder / "second", max_steps=1, deterministic=True)))
    return recorder


def as_json(recorder: Recorder) -> str:
    """Names of files, and pairs of them."""
    return json.dumps({"files": sorted(recorder.files), "edges": sorted(recorder.edges)})


def training_in_child(folder: str) -> None:
    """Write the object into ``measured.json``: for a process that was forked after the imports."""
    Path(folder, "measured.json").write_text(as_json(training(Path(folder))))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    print(as_json(evaluation() if sys.argv[1] == "evaluation" else training(Path(sys.argv[2]))))
