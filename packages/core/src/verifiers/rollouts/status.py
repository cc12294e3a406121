"""``Status``: how a rollout ended, one value that is replaced and never edited.

| who | when | what |
|---|---|---|
| `Rollout` | it is made | `Status()`: it runs |
| `Environment.add_model_response` | a limit of tokens cut a reply | `cut()` |
| `loop.generate` | a stop condition holds | `stopped(name of the condition)` |
| `loop.generate`, `runs.rollout`, the worker pool | something failed | `failed(error)` |
| `loop` | a time limit is over | `stopped(TIMEOUT)`; the run's limit: `failed(error, TIMEOUT)` |
| `loop.conclude` | always, last | `finished()` |
| an author | any time | a key of the state: `stop_condition error is_truncated is_completed` |

The four keys are views: ``Rollout.stop``, ``error``, ``is_truncated`` and ``is_completed`` read and
replace the status.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from verifiers.types import StopReason


@dataclass(frozen=True, slots=True)
class Status:
    """How a rollout ended; ``Status()`` while it runs.

    >>> from verifiers.rollouts.status import Status
    >>> Status().cut().stopped("max_turns_reached").finished()
    Status(reason='max_turns_reached', error=None, is_truncated=True, is_completed=True)
    """

    reason: str | None = None
    """A ``StopReason``, or the name of an author's stop condition."""
    error: Any = None
    """What ended it: the exception while it runs, ``ErrorInfo`` once it is finished."""
    is_truncated: bool = False
    """Whether a limit of tokens or time cut it."""
    is_completed: bool = False
    """Whether it has ended."""

    def stopped(self, reason: str | None) -> Status:
        """A stop condition holds; limits of tokens and time truncate."""
        return replace(
            self, reason=reason, is_truncated=self.is_truncated or StopReason.truncates(reason)
        )

    def failed(self, error: object, reason: str = StopReason.ERROR.value) -> Status:
        """Something failed."""
        return replace(self.stopped(reason), error=error)

    def cut(self) -> Status:
        """A limit of tokens cut a reply; the rollout continues."""
        return replace(self, is_truncated=True)

    def finished(self) -> Status:
        """Nothing more happens."""
        return replace(self.stopped(self.reason), is_completed=True)
