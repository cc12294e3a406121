"""``vf-eval --check``: run `check_environment` on each environment, before the first request to a
model.

Then a short audit of each: a way to be paid without solving the task is a warning here;
``vf-audit`` says more. Builds the environments with the evaluation's arguments and settings. The
checks themselves are in ``checks``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verifiers.checks import audit_environment, check_environment
from verifiers.cli.common.streams import CheckFailed
from verifiers.cli.evaluate.display import Display
from verifiers.cli.evaluate.options import EnvironmentSettings, EvalSettings, Evaluation
from verifiers.cli.evaluate.planning import builder
from verifiers.environments.base import Environment
from verifiers.runtime.terminal import escape_control
from verifiers.runtime.values import options_of

AUDITED_ROWS = 4
AUDIT_BUDGET_S = 20.0


def check_all(evaluations: Sequence[Evaluation], display: Display) -> None:
    """Check each environment once per set of arguments; warnings go to the display.

    *Raises* ``CheckFailed`` with every report that has errors.
    """
    subjects: dict[tuple[str, str], Any] = {}
    for evaluation in evaluations:
        subjects.setdefault(
            (evaluation.env_id, repr(_changes(evaluation.settings))),
            _subject(evaluation.env_id, evaluation.settings),
        )
    reports = [check_environment(subject) for subject in subjects.values()]
    for report, subject in zip(reports, subjects.values(), strict=True):
        if report.ok:
            show = display.warn if report.warnings else display.note
            show(escape_control(str(report)))
            _audit(subject, display)
    if refused := [report for report in reports if not report.ok]:
        raise CheckFailed(
            "\n".join(["the check found errors; no evaluation was run", *map(str, refused)]),
            names=[finding.code for report in refused for finding in report.errors],
        )


def _subject(env_id: str, settings: EvalSettings) -> str | Callable[[], Environment]:
    """The argument of the check: the id without settings, so that its loader is checked too."""
    return builder(env_id, settings) if _changes(settings) else env_id


def _changes(settings: EvalSettings) -> dict[str, Any]:
    """The settings by which the environment is another than its loader makes."""
    values = {name: getattr(settings, name) for name in options_of(EnvironmentSettings)}
    return {name: value for name, value in values.items() if value and name != "env_dir_path"}


def _audit(subject: str | Callable[[], Environment], display: Display) -> None:
    report = audit_environment(subject, n=AUDITED_ROWS, search_steps=0, budget_s=AUDIT_BUDGET_S)
    if report.errors:
        findings = "\n".join(f"  {finding}" for finding in report.errors)
        text = f"{report.environment}: the audit found (vf-audit says more)\n{findings}"
        display.warn(escape_control(text))
