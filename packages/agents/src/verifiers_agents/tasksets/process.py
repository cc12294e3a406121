"""The process in which a taskset of verifiers 0.4 runs, with a Python of its own.

Requests may come from any thread and loop; ``bridge`` answers them, each in one line of JSON. A
process that ends fails the requests that wait for it with ``InfraError``, which has its last words;
the next request starts another.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import resources
from typing import TypedDict

from verifiers.errors import ConfigError, InfraError
from verifiers.runtime.bounded import read_lines
from verifiers.runtime.decoding import decode_message

OPEN_S = 180.0
"""Time limit of the start of a taskset."""
CLOSE_S = 10.0
LAST_WORDS_S = 1.0
LAST_LINES = 15
MAX_VALUES = 10**7
"""Values of one answer; the first has all tasks."""
THREAD = "verifiers-taskset"


class Task(TypedDict):
    """A task as the taskset's process sends it, and takes it back."""

    type: str
    data: dict[str, object]
    system_prompt: str | None


class Opened(TypedDict):
    """What the process says of its taskset."""

    version: str
    roles: list[str]
    scores: list[str]
    tasks: list[Task]


class Trace(TypedDict):
    """What one agent of an episode did, without its messages, which are the turns here."""

    agent: str | None
    is_ok: bool
    stop_condition: str | None
    reward: float | None
    rewards: dict[str, tuple[float, float]]
    """Name -> score and weight."""
    metrics: dict[str, float]
    errors: list[str]


class Episode(TypedDict):
    """The result of a task."""

    id: str
    is_ok: bool
    errors: list[str]
    traces: list[Trace]


@dataclass(frozen=True, slots=True)
class Source:
    """What a process runs: its Python, and the settings of the environment."""

    python: str
    config: Mapping[str, object]
    max_tasks: int | None
    max_turns: int | None = None


class TasksetProcess:
    """A running taskset. *Raises* ConfigError for a taskset that cannot be opened."""

    def __init__(self, source: Source):
        self._source = source
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[object]] = {}
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._process = self._start()
        self._is_over = False
        """Whether no answer comes any more; read and set under the lock."""
        self._output = threading.Thread(target=self._read_output, name=THREAD, daemon=True)
        self._output.start()
        self._answers = threading.Thread(target=self._read_answers, name=THREAD, daemon=True)
        self._answers.start()
        limits = {"max_tasks": source.max_tasks, "max_turns": source.max_turns}
        opened = self._ask(0, {"config": source.config, **limits})
        try:
            self.opened: Opened = opened.result(OPEN_S)  # type: ignore[assignment]
        except TimeoutError:
            self.close()
            raise ConfigError(
                f"the taskset did not open within {OPEN_S:g} s{self._words()}", key="taskset"
            ) from None
        except InfraError as error:
            self.close()
            raise ConfigError(f"the taskset cannot be opened: {error}", key="taskset") from error

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, task: Task, model: str, base_url: str) -> tuple[int, Future[object]]:
        """Begin an episode; its number, and an ``Episode`` to come. Cancel it with ``cancel``."""
        number = next(self._numbers)
        request = {"task": task, "model": model, "base_url": base_url}
        return number, self._ask(number, request)

    def cancel(self, number: int) -> None:
        """End an episode; nothing of it runs any longer."""
        self._write({"cancel": number})

    def close(self) -> None:
        """End the process and what it started."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError):  # unsent words are lost with a dead process
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._answers.join(LAST_WORDS_S)

    def _start(self) -> subprocess.Popen[bytes]:
        program = resources.files(__package__).joinpath("bridge.py").read_text(encoding="utf-8")
        environment = {**os.environ, "VF_TASKSET_KEY": "unused", "PYTHONUNBUFFERED": "1"}
        try:
            return subprocess.Popen(
                [self._source.python, "-P", "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process, which ends that one
            )
        except OSError as error:
            raise ConfigError(
                f"python={self._source.python!r} cannot be started: {error}", key="python"
            ) from error

    def _ask(self, number: int, request: Mapping[str, object]) -> Future[object]:
        answer: Future[object] = Future()
        with self._lock:
            if self._is_over:
                answer.set_exception(self._ended())
                return answer
            self._waiting[number] = answer
        self._write({"id": number, **request})
        return answer

    def _write(self, request: Mapping[str, object]) -> None:
        """Send a request. A process that has ended fails what waits for it, in `_read_answers`."""
        line = json.dumps(request).encode() + b"\n"
        assert self._process.stdin is not None
        # ValueError: closed
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                answer = decode_message(line, MAX_VALUES)
                waiting = self._waiting.pop(answer["id"], None)
            except (ValueError, KeyError, TypeError):
                self._last_lines.append(line[:500].decode("utf-8", "replace").rstrip())
                continue
            if waiting is None or not waiting.set_running_or_notify_cancel():
                continue
            if "error" in answer:
                waiting.set_exception(InfraError(f"the taskset failed: {answer['error']}"))
            else:
                waiting.set_result(answer.get("value"))
        self._process.wait()
        self._output.join(LAST_WORDS_S)
        with self._lock:
            self._is_over = True
            ended = list(self._waiting.values())
            self._waiting.clear()
        for waiting in ended:
            if waiting.set_running_or_notify_cancel():
                waiting.set_exception(self._ended())

    def _read_output(self) -> None:
        assert self._process.stderr is not None
        for line in read_lines(self._process.stderr):
            if line.strip():
                self._last_lines.append(line.rstrip())

    def _ended(self) -> InfraError:
        return InfraError(
            f"the process of the taskset ended with exit code {self._process.poll()}{self._words()}"
        )

    def _words(self) -> str:
        lines = list(self._last_lines)
        return f"; its last words: {' / '.join(lines[-3:])}" if lines else ""
