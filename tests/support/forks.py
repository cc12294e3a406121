"""Run the tests in forks of the process that collected them, which is what ``-n`` does on Linux.

Collecting imports torch, transformers and every test file: eight to fourteen CPU seconds, which
each process of pytest-xdist would spend. A file stays with one process, so that what it shares (a
server, a browser, a process to fork from) is made once; the longest are begun first.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import multiprocessing
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import pytest

ROOT = Path(__file__).parents[2]
ONE_BROWSER = "tests/view"
FORKED = "child_context"
"""Files with this word fork trainings from a process that has imported torch, which takes six CPU
seconds."""
ONE_TREE = "from support.sources import"
"""Files with this line read the syntax trees of all sources, which takes ten."""

LONGEST_FIRST = (
    FORKED,
    ONE_BROWSER,
    ONE_TREE,
    "tests/docs/test_blocks.py",
    "tests/faults/test_journal_faults.py",
    "tests/faults/test_resume.py",
    "tests/trainer/policy/test_compiled.py",
    "tests/core/runs/test_workers.py",
    "tests/trainer/cli/test_cli_train.py",
    "tests/typing/test_type_checkers.py",
    "tests/cli/test_vf_install.py",
    "tests/trainer/algorithm/test_updates.py",
    "tests/core/checks/test_audit_zoo.py",
    "tests/faults/test_secrets.py",
    "tests/trainer/run/test_own_loop.py",
    "tests/architecture/test_patterns.py",
    "tests/trainer/algorithm/test_objective.py",
    "tests/trainer/cli/test_quickstart.py",
    "tests/trainer/policy/test_zoo.py",
    "tests/trainer/policy/test_quantization.py",
    "tests/trainer/pipeline/test_curriculum.py",
    "tests/trainer/run/test_algorithm_state.py",
    "tests/trainer/policy/test_reference.py",
    "tests/trainer/policy/test_teacher_context.py",
    "tests/trainer/policy/test_teacher.py",
    "tests/trainer/run/test_history.py",
    "tests/trainer/engines/test_vllm_engine.py",
    "packages/envs/math-python/tests/test_math_python.py",
)
"""Units of ten seconds and more, by ``tests/profile_suite.py``. An omission costs a longer end,
nothing else."""

THRESHOLDS = (10_000, 20, 20)
"""Of garbage collection, in a process of tests: at Python's own it takes a twelfth of their CPU
time. Lower than those of a run, so that a run still raises them."""

LOOK_S = 2.0
"""Interval of looks at whether processes that say nothing have died."""


@functools.cache
def unit_of(file: str) -> str:
    """The file, or what it shares with others."""
    if file.startswith(f"{ONE_BROWSER}/"):
        return ONE_BROWSER
    text = (ROOT / file).read_text(encoding="utf-8")
    return next((line for line in (FORKED, ONE_TREE) if line in text), file)


def rank(test: str) -> int:
    """The place of a test's unit; equal ones stay in the order of their folders."""
    unit = unit_of(test.partition("::")[0])
    return LONGEST_FIRST.index(unit) if unit in LONGEST_FIRST else len(LONGEST_FIRST)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Make the processes of ``-n`` forks of this one, where a fork is safe; elsewhere they are
    pytest-xdist's."""
    option = config.option
    if not config.getoption("numprocesses", None) or option.dist != "no" or option.usepdb:
        return  # without pytest-xdist there is no such option
    if sys.platform != "linux":
        option.dist = "loadfile"
        return
    if option.numprocesses in ("auto", "logical"):
        option.numprocesses = config.hook.pytest_xdist_auto_num_workers(config=config)
    config.pluginmanager.register(Forks(option.numprocesses))
    option.numprocesses = 0


class Forks:
    """A pytest plugin: shares out units of tests between so many processes, and reports what they
    report."""

    def __init__(self, number: int) -> None:
        self._number = number

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests. A process that dies loses the test it died of, which fails; another takes
        up the rest."""
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop says so
        if started := [
            thread.name for thread in threading.enumerate() if thread is not threading.main_thread()
        ]:
            raise pytest.UsageError(
                f"a test file starts threads when it is imported, which no fork has: {started}"
            )
        session.items.sort(key=lambda item: rank(item.nodeid))
        units: dict[str, list[int]] = {}
        for number, item in enumerate(session.items):
            units.setdefault(unit_of(item.nodeid.partition("::")[0]), []).append(number)
        session.config._tmp_path_factory.getbasetemp()  # those of all processes are in it
        waiting = deque(units.values())
        running: dict[Connection, Fork] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self._number:
                    fork = Fork(session, waiting)
                    running[fork.line] = fork
                ended = [line for line, fork in running.items() if not fork.process.is_alive()]
                for line in ended or cast(list[Connection], wait(list(running), LOOK_S)):
                    if not running[line].read():
                        del running[line]
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for fork in running.values():
                fork.process.kill()
        return True


class Fork:
    """A process that runs units of tests; everything but `run` happens in the one
    that started it."""

    def __init__(self, session: pytest.Session, waiting: deque[list[int]]) -> None:
        self._session, self._waiting = session, waiting
        self._units_left: list[int] = []
        """Tests that were handed out and are not reported yet, in their order."""
        context = multiprocessing.get_context("fork")
        self.line, self._theirs = context.Pipe()
        self.process = context.Process(target=self.run)
        self.process.start()
        self._theirs.close()

    def read(self) -> bool:
        """Take one message; *returns* False when it was the last."""
        is_alive = self.process.is_alive()
        try:
            # its end may still be open in a process that it has forked
            if not is_alive and not self.line.poll():
                raise EOFError
            match self.line.recv():
                case None:
                    unit = self._waiting.popleft() if self._waiting else []
                    self._units_left += unit
                    self.line.send(unit)
                case reports, warned:
                    self._units_left.pop(0)
                    self._report(reports, warned)
            return True
        except (EOFError, ConnectionError):
            self.line.close()
            self.process.join()
        if self._units_left:
            died_of, *unit_left = self._units_left
            if unit_left:
                self._waiting.appendleft(unit_left)
            item = self._session.items[died_of]
            what = f"the process that ran it ended with exit code {self.process.exitcode}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", what, "call")
            self._session.config.hook.pytest_runtest_logreport(report=report)
        elif self.process.exitcode:
            raise self._session.Interrupted(
                f"a process of tests ended between tests, with code {self.process.exitcode}"
            )
        return False

    def _report(
        self, reports: list[dict[str, Any]], warned: list[tuple[str, str, str, int, str, str]]
    ) -> None:
        config = self._session.config
        for data in reports:
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            config.hook.pytest_runtest_logreport(report=report)
        for text, category, file, at, when, nodeid in warned:
            message = warnings.WarningMessage(text, type(category, (Warning,), {}), file, at)
            config.hook.pytest_warning_recorded.call_historic(
                kwargs={
                    "warning_message": message,
                    "when": when,
                    "nodeid": nodeid,
                    "location": None,
                }
            )

    def run(self) -> None:
        """Run what is handed out, in the new process."""
        self.line.close()
        config, items = self._session.config, self._session.items
        gc.set_threshold(*THRESHOLDS)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # the other processes use the other cores
        folders = config._tmp_path_factory
        folders._basetemp = folders.mktemp(f"fork-{os.getpid()}", numbered=False)
        capture = config.pluginmanager.getplugin("capturemanager")
        if capture is not None:  # a file that all processes would write
            capture.stop_global_capturing()
            capture.start_global_capturing()
        config.pluginmanager.unregister(name="terminalreporter")
        record = Record(config)
        config.pluginmanager.register(record)
        record.warned.clear()  # those of the collection, which are known
        # the one that started it ends too
        with contextlib.suppress(KeyboardInterrupt, EOFError, ConnectionError):
            for number, following in itertools.pairwise(
                itertools.chain(self._handed_out(), [None])
            ):
                # whether what tests share is still needed
                after = None if following is None else items[following]
                config.hook.pytest_runtest_protocol(item=items[number], nextitem=after)
                self._theirs.send((record.reports, record.warned))
                record.reports.clear()
                record.warned.clear()

    def _handed_out(self) -> Iterator[int]:
        self._theirs.send(None)
        while unit := self._theirs.recv():
            yield from unit
            self._theirs.send(None)


class Record:
    """A pytest plugin: what one test has to tell."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.reports: list[dict[str, Any]] = []
        self.warned: list[tuple[str, str, str, int, str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a report."""
        self.reports.append(
            self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        )

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str
    ) -> None:
        """Keep what of a warning is shown."""
        told = warning_message
        self.warned.append(
            (str(told.message), told.category.__name__, told.filename, told.lineno, when, nodeid)
        )
