"""What ``check_environment`` found, as values and as text.

A finding says what is wrong, where, and what to write instead. This module checks nothing.
"""

from __future__ import annotations

import functools
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

_OWN_FOLDER = str(Path(__file__).resolve().parents[1]) + os.sep
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: ``Finding("no-reward-function", "no function …", "vf_x.py:12 (Game)", "give …")``."""

    code: str
    message: str
    place: str
    fix: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}\n    at:  {self.place}\n    fix: {self.fix}"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Everything ``check_environment`` found in one environment."""

    environment: str
    errors: tuple[Finding, ...] = ()
    """What makes results wrong or runs fail."""
    warnings: tuple[Finding, ...] = ()
    """What is probably not meant."""
    notes: tuple[str, ...] = ()
    """What was not checked, and facts that are neither right nor wrong."""
    num_rollouts: int = 0

    @property
    def ok(self) -> bool:
        """Whether there are no errors; warnings do not count."""
        return not self.errors

    def __str__(self) -> str:
        counted = f"{_counted(self.errors, 'error')}, {_counted(self.warnings, 'warning')}"
        lines = [f"{self.environment}: {counted} ({self.num_rollouts} rollouts played)"]
        lines += [f"  error {finding}" for finding in self.errors]
        lines += [f"  warning {finding}" for finding in self.warnings]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _counted(findings: tuple[Finding, ...], name: str) -> str:
    return f"{len(findings) or 'no'} {name}{'' if len(findings) == 1 else 's'}"


@dataclass(slots=True)
class Findings:
    """Collects findings; the same one is kept once. ``member`` names the part of an ``EnvGroup`` that is checked."""

    errors: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_rollouts: int = 0
    member: str = ""

    def error(self, code: str, message: str, place: str, fix: str) -> None:
        self._add(self.errors, Finding(code, message, self.member + place, fix))

    def warn(self, code: str, message: str, place: str, fix: str) -> None:
        self._add(self.warnings, Finding(code, message, self.member + place, fix))

    def note(self, text: str) -> None:
        if (text := self.member + text) not in self.notes:
            self.notes.append(text)

    def report(self, environment: str) -> CheckReport:
        return CheckReport(environment, tuple(self.errors), tuple(self.warnings), tuple(self.notes), self.num_rollouts)

    def _add(self, findings: list[Finding], finding: Finding) -> None:
        if not any((f.code, f.place, f.fix) == (finding.code, finding.place, finding.fix) for f in findings):
            findings.append(finding)


def place_of(definition: object) -> str:
    """Where a function or class is written: ``file:line (name)``; its name alone when that is not known."""
    while isinstance(definition, functools.partial):
        definition = definition.func
    name = getattr(definition, "__qualname__", None) or type(definition).__qualname__
    if not (inspect.isroutine(definition) or inspect.isclass(definition)):
        definition = type(definition)
    try:
        _, line = inspect.getsourcelines(definition)
        return f"{_short(inspect.getsourcefile(definition) or '?')}:{line} ({name})"
    except (OSError, TypeError):  # written in an interpreter, or compiled
        return name


def method_place(owner: object, name: str) -> str:
    """``place_of`` a method of an object, or its class and name when it has no such method."""
    method: Callable[..., Any] | None = getattr(type(owner), name, None)
    return place_of(method) if callable(method) else f"{type(owner).__name__}.{name}"


def raised_at(error: BaseException, otherwise: str) -> str:
    """The author's innermost line where an error was raised; ``otherwise`` when it was raised in none of theirs."""
    return _last_of_author(traceback.extract_tb(error.__traceback__)) or otherwise


def running_at(frame: FrameType | None, otherwise: str) -> str:
    """The author's innermost line that a thread is in; ``otherwise`` when it is in none of theirs."""
    stack = traceback.extract_stack(frame) if frame is not None else []
    return _last_of_author(stack) or otherwise


def said(error: BaseException) -> str:
    """``TypeName: text`` of an error."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _last_of_author(frames: Iterable[traceback.FrameSummary]) -> str | None:
    """The last frame that is neither of this package nor of the standard library."""
    own = [frame for frame in frames if not _is_ours_or_pythons(frame.filename)]
    return f"{_short(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else None


def _is_ours_or_pythons(path: str) -> bool:
    return path.startswith((_OWN_FOLDER, "<")) or (path.startswith(_STANDARD_LIBRARY) and "site-packages" not in path)


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
