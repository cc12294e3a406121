"""What a reader must read to follow one evaluation or one training step, counted while it runs.

``python reading_cost.py evaluation FOLDER`` and ``… training FOLDER`` print a JSON object. The
evaluation is served and saved: a real server on loopback, five turns of one row, every rollout in
the journal. Only calls count, not imports; what a test double does counts for neither. Each is
measured in a process that did nothing else, after one run that is not measured.
"""

from __future__ import annotations

import dis
import itertools
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import verifiers as vf

PACKAGES = {"verifiers", "verifiers_trainer"}
RESUME = dis.opmap["RESUME"]
PARTS_OF_FUNCTIONS = {"<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>"}
"""They are read with the function that holds them."""
NO_FUNCTIONS = {"<module>", "find_spec", *PARTS_OF_FUNCTIONS}


class Recorder:
    """Records the functions of the packages that are entered, on every thread."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self._files_by_thread: dict[int, list[str]] = defaultdict(list)
        self._names: dict[str, str | None] = {}

    def record(self, work: Callable[[], Any]) -> None:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def as_dict(self) -> dict[str, Any]:
        """The counts.

        ``functions``: distinct functions entered. ``function_lines``: source lines that they span,
        each once.
        ``file_lines``: lines of the files that hold them. ``returns``: entries into a file other
        than that of the function entered just before on the same thread, if that thread had entered
        the file earlier; a function that is called in five turns counts five times, because its
        reader follows the calls and not the text.
        ``files``: names of the files.
        """
        lines: dict[str, set[int]] = defaultdict(set)
        for code in self.functions:
            last = max(line for *_, line in code.co_lines() if line)
            lines[code.co_filename].update(range(code.co_firstlineno, last + 1))
        return {
            "functions": len(self.functions),
            "function_lines": sum(map(len, lines.values())),
            "file_lines": sum(len(Path(path).read_text().splitlines()) for path in lines),
            "returns": sum(map(num_returns, self._files_by_thread.values())),
            "files": sorted(str(self._name(path)) for path in lines),
        }

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name in NO_FUNCTIONS or not _begins(frame):
            return
        if (name := self._name(code.co_filename)) is not None:
            self.functions.add(code)
            self._files_by_thread[threading.get_ident()].append(name)

    def _name(self, path: str) -> str | None:
        """The file below its package; None for other packages and for test doubles."""
        if path not in self._names:
            parts = Path(path).parts
            at = next(
                (
                    i
                    for i, part in enumerate(parts[:-1])
                    if part in PACKAGES and parts[i - 1] == "src"
                ),
                None,
            )
            is_double = at is not None and parts[at + 1] == "testing"
            self._names[path] = None if at is None or is_double else "/".join(parts[at:])
        return self._names[path]


def num_returns(files: list[str]) -> int:
    """How often a file is entered again after another one.

    >>> num_returns(["a", "a", "b", "a", "c", "b"])
    2
    """
    seen = set(files[:1])
    count = 0
    for before, entered in itertools.pairwise(files):
        count += entered != before and entered in seen
        seen.add(entered)
    return count


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


def evaluation(folder: Path) -> dict[str, Any]:
    """One row, five turns, one reward function; the fewest returns of five runs, which threads let
    differ by a few."""
    from verifiers.testing import FakeServer

    def evaluate(name: str) -> None:
        env = Talk(
            dataset=[{"question": "?", "answer": "yes"}],
            rubric=vf.Rubric(funcs=[correct]),
            max_turns=5,
        )
        client = vf.OpenAIChatCompletionsClient(vf.ClientConfig(api_base_url=server.url))
        results = env.evaluate(client, "scripted", save_results=True, results_path=folder / name)
        assert results["rewards"] == [1.0]
        assert (folder / name / "results.jsonl").stat().st_size > 0

    measured = []
    with FakeServer("yes", process=True) as server:
        evaluate("not measured")
        for number in range(5):
            recorder = Recorder()
            recorder.record(lambda: evaluate(f"run {number}"))  # noqa: B023 - called at once
            measured.append(recorder.as_dict())
        assert server.count == 30
    return min(measured, key=lambda counts: (counts["function_lines"], counts["returns"]))


def training(folder: Path) -> dict[str, Any]:
    """One optimizer step on two groups of rollouts with the embedded engine."""
    import torch

    from support.training import run, small_trainer

    torch.set_num_threads(1)
    recorder = Recorder()
    run(small_trainer(folder / "first", max_steps=1, deterministic=True))
    recorder.record(lambda: run(small_trainer(folder / "second", max_steps=1, deterministic=True)))
    return recorder.as_dict()


def training_in_child(folder: str) -> None:
    """Write the object into ``measured.json``: for a process that was forked after the imports."""
    Path(folder, "measured.json").write_text(json.dumps(training(Path(folder))))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    print(json.dumps((evaluation if sys.argv[1] == "evaluation" else training)(Path(sys.argv[2]))))
