"""The result of an audit, as values, as JSON and as one page of text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from verifiers.checks.report import CheckReport, counted

MAX_SHOWN = 6
"""Non-solutions on the page; the JSON has all of them."""
WIDTH = 52
NOT_REPEATABLE = "reward-is-not-repeatable"
"""The code of a finding: the same replies earned different rewards."""
MANY_ROWS = 0.25
"""Share of the rows on which a non-solution must be paid in full to be an error."""
NEED_THE_ANSWER = ("hedge", "odd form")
"""Families whose replies contain the right answer."""


@dataclass(frozen=True, slots=True)
class Paid:
    """What one way to reply earned: means over ``num_rows`` rows, NaN where unknown."""

    name: str
    family: str
    reward: float
    success: float
    """Share of the rows counted as solved; NaN if nothing says what solved means."""
    share_wrong_paid: float
    """Of the rows where it was not the right answer, the share that was paid like a solution."""
    num_rows: int
    is_task: bool = False
    """It is the right answer in at least half of the rows: the task itself, and no non-solution."""
    sample: str = ""
    """One of its replies, cut."""
    unearned: float = math.nan
    """Its mean reward, without what it earned where it was the right answer."""

    @property
    def is_policy(self) -> bool:
        """Whether a model could reply so unsolved: it is not the task, and needs no answer."""
        return not self.is_task and self.family not in NEED_THE_ANSWER


@dataclass(frozen=True, slots=True)
class RowProfile:
    """How often a model solved one row."""

    example_id: object
    example_hash: str
    num_solved: int
    num_rollouts: int

    @property
    def kind(self) -> str:
        """ "dead" (never solved), "solved" (always) or "useful": only there a group of rollouts has
        a gradient."""
        if self.num_solved == 0:
            return "dead"
        return "solved" if self.num_solved == self.num_rollouts else "useful"


@dataclass(frozen=True, slots=True)
class AuditReport(CheckReport):
    """All findings of ``audit_environment``, and what was paid for what. Errors are ways to be paid
    without solving the task, and rows that cannot be trusted."""

    success_metric: str | None = None
    """What counts as solved; "reward" where every reward is 0 or 1."""
    oracle: Paid | None = None
    """What a right answer earned; None without an oracle."""
    non_solutions: tuple[Paid, ...] = ()
    """The highest reward first."""
    profile: tuple[RowProfile, ...] = ()
    num_rows: int = 0
    seconds: float = 0.0

    @property
    def best_non_solution(self) -> Paid | None:
        """What pays most without solving the task: below it a learning curve shows nothing."""
        rewarded = (p for p in self.non_solutions if p.is_policy and not math.isnan(p.reward))
        return max(rewarded, key=lambda paid: paid.reward, default=None)

    def to_json(self) -> dict[str, object]:
        """Plain values; unknown numbers are None."""
        best = self.best_non_solution
        content = asdict(self) | {
            "ok": self.ok,
            "best_non_solution": None if best is None else asdict(best),
            "profile": [{**asdict(row), "kind": row.kind} for row in self.profile],
        }
        return {name: _plain(value) for name, value in content.items()}

    def __str__(self) -> str:
        if not self.ok:
            verdict = counted(self.errors, "error")
        elif any(not math.isnan(paid.reward) for paid in self.non_solutions):
            verdict = "no way to be paid without solving it was found"
        else:
            verdict = "the reward was not audited"
        warned = f", {counted(self.warnings, 'warning')}" if self.warnings else ""
        size = f"{self.num_rollouts:,} rollouts of {self.num_rows} rows"
        unknown = "not known (the reward is graded and no success metric is named)"
        lines = [
            f"{self.environment}: {verdict}{warned}",
            f"  {size}, {self.seconds:.1f} s, no model",
            f"  success metric   {self.success_metric or unknown}",
        ]
        if self.non_solutions:
            lines.append(f"  {'':<{WIDTH}}reward   solved   paid though wrong")
            lines += self._table()
        if self.profile:
            kinds = [row.kind for row in self.profile]
            counts = [f"{kinds.count(kind)} {kind}" for kind in ("dead", "solved", "useful")]
            lines.append(f"  rows for this model: {', '.join(counts)}, of {len(kinds)}")
        return "\n".join([*lines, *self.finding_lines()])

    def _table(self) -> list[str]:
        """The right answer, and the non-solutions that earned most."""
        lines = [] if self.oracle is None else [_line("a right answer", self.oracle)]
        played = [p for p in self.non_solutions if p.is_policy or p.share_wrong_paid > 0]
        unknown = [paid for paid in played if math.isnan(paid.reward)]
        earning = [paid for paid in played if paid.reward > 0]
        lines += [_line(paid.name, paid) for paid in earning[:MAX_SHOWN]]
        if unknown:
            lines.append(f"  the reward of {counted(unknown, 'non-solution')} is unknown")
        if num_more := len(played) - len(unknown) - len(earning[:MAX_SHOWN]):
            earned = "earned nothing" if len(earning) <= MAX_SHOWN else "earned no more"
            lines.append(f"  {num_more} {'more ' if earning else ''}non-solutions {earned}")
        return lines


def _line(name: str, paid: Paid) -> str:
    label = name if len(name) < WIDTH else name[: WIDTH - 2] + "…"
    wrong = "" if math.isnan(paid.share_wrong_paid) else f"{paid.share_wrong_paid:.0%}"
    return f"  {label:<{WIDTH}}{_number(paid.reward):<9}{_number(paid.success):<9}{wrong}"


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.3f}"


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(member) for key, member in value.items()}
    return [_plain(member) for member in value] if isinstance(value, list | tuple) else value
