"""Findings of ``check_environment``, as values and as text: the problem, its place, and the fix."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

from verifiers.runtime import places
from verifiers.runtime.redaction import redacted_text


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem: ``Finding("no-reward-function", "no function …", "vf_x.py:12 (Game)", "give
    …")``."""

    code: str
    message: str
    place: str
    fix: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}\n    at:  {self.place}\n    fix: {self.fix}"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All findings of ``check_environment`` for an environment."""

    environment: str
    errors: tuple[Finding, ...] = ()
    """Problems that make results wrong or runs fail."""
    warnings: tuple[Finding, ...] = ()
    """Probable mistakes."""
    notes: tuple[str, ...] = ()
    """Parts that were not checked, and neutral observations."""
    num_rollouts: int = 0

    @property
    def ok(self) -> bool:
        """Whether there are no errors; warnings do not count."""
        return not self.errors

    def __str__(self) -> str:
        counts = f"{counted(self.errors, 'error')}, {counted(self.warnings, 'warning')}"
        head = f"{self.environment}: {counts} ({self.num_rollouts} rollouts run)"
        return "\n".join([head, *self.finding_lines()])

    def finding_lines(self) -> list[str]:
        """The findings and notes, with their kind."""
        lines = [f"  error {finding}" for finding in self.errors]
        lines += [f"  warning {finding}" for finding in self.warnings]
        return lines + [f"  note: {note}" for note in self.notes]


def counted(items: Sequence[object], name: str) -> str:
    """``2 errors``, ``no errors``."""
    return f"{len(items) or 'no'} {name}{'' if len(items) == 1 else 's'}"


@dataclass(slots=True)
class Findings:
    """Collects findings, each once. ``member`` names the member of an ``EnvGroup`` under check."""

    errors: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_rollouts: int = 0
    member: str = ""

    def error(self, code: str, message: str, location: str, fix: str) -> None:
        self._add(self.errors, Finding(code, message, self.member + location, fix))

    def warn(self, code: str, message: str, location: str, fix: str) -> None:
        self._add(self.warnings, Finding(code, message, self.member + location, fix))

    def note(self, text: str) -> None:
        if (text := self.member + text) not in self.notes:
            self.notes.append(text)

    @contextlib.contextmanager
    def of_member(self, name: str) -> Iterator[None]:
        """Within the block the findings are those of a member."""
        outer = self.member
        self.member = f"{outer}member {name!r}: "
        yield
        self.member = outer

    def report(self, environment: str) -> CheckReport:
        errors, warnings, notes = tuple(self.errors), tuple(self.warnings), tuple(self.notes)
        return CheckReport(environment, errors, warnings, notes, self.num_rollouts)

    def _add(self, findings: list[Finding], finding: Finding) -> None:
        key = finding.code, finding.place, finding.fix
        if key not in ((f.code, f.place, f.fix) for f in findings):
            findings.append(finding)


def place_of(definition: object) -> str:
    """Where a function or class is defined: ``file:line (name)``; its name without a file."""
    while isinstance(definition, functools.partial):
        definition = definition.func
    name = getattr(definition, "__qualname__", None) or type(definition).__qualname__
    if not (inspect.isroutine(definition) or inspect.isclass(definition)):
        definition = type(definition)
    try:
        _, line = inspect.getsourcelines(definition)
        return f"{places.short_path(inspect.getsourcefile(definition) or '?')}:{line} ({name})"
    except (OSError, TypeError):  # defined interactively, or compiled
        return name


def method_place(owner: object, name: str) -> str:
    """``place_of`` a method of an object, or its class and name when it has no such method."""
    method: Callable[..., object] | None = getattr(type(owner), name, None)
    return place_of(method) if callable(method) else f"{type(owner).__name__}.{name}"


def raised_at(error: BaseException, otherwise: str) -> str:
    """The innermost line of author code in an error's traceback, or ``otherwise``."""
    return places.raised_at(error) or otherwise


def running_at(frame: FrameType | None, otherwise: str) -> str:
    """The innermost line of author code on a thread's stack; ``otherwise`` when there is none."""
    stack = traceback.extract_stack(frame) if frame is not None else []
    return places.last_of_author(stack) or otherwise


def error_text(error: BaseException) -> str:
    """``TypeName: text`` of an error, without secrets."""
    return redacted_text(f"{type(error).__name__}: {error}") if str(error) else type(error).__name__
