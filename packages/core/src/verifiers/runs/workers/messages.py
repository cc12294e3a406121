"""What a pool and a worker say to each other. Everything is plain data that pickles.

    pool -> worker      Setup once, then Generate and Cancel by job number, Answer by question number
    worker -> pool      Ready once (or Failed with number 0), then Finished or Failed, Ask and Withdraw

The bytes between the two ends are trusted: both are this program with the same environment packages. What a model
wrote is in them as text only.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.errors import RunError
from verifiers.rollouts.contract import LoadedFrom
from verifiers.runs.runner import Job
from verifiers.types import ModelRequest, Response


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker builds before it plays: the environment, by its id, and what all rollouts of the run share."""

    loaded_from: LoadedFrom
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings that were changed after the environment was loaded, for ``set_kwargs``."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What the caller's environment says of itself; a worker whose own says something else refuses to play."""
    model: str = ""
    sampling_args: Mapping[str, Any] = field(default_factory=dict)
    score: bool = True
    cleans_up: bool = True
    """Whether the rubric's clean-up handlers run in the worker; False when scoring is still to come."""
    independent_scoring: bool = False
    require_tokens: bool = False
    seed: int | None = None
    rollout_timeout_s: float | None = 3600.0
    max_retries: int = 0
    max_scoring: int | None = None
    """This worker's share of the limit of rollouts being scored."""
    max_tools: int | None = None
    """This worker's share of the limit of tool calls in flight."""
    max_threads: int | None = None
    shows_tools: bool | None = None
    """What the caller's client says of it."""
    import_paths: Sequence[str] = ()
    """The caller's ``sys.path``."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The environment stands."""

    pid: int


@dataclass(frozen=True, slots=True)
class Generate:
    """Generate and score one rollout."""

    number: int
    job: Job
    seed: int | None = None
    """What its sampling seeds derive from; a run may play an example again with other draws."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a rollout; nobody waits for it any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished rollout, whatever became of it (``packing``)."""

    number: int
    state: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """A rollout that ends the run, or (number 0) a worker that cannot begin."""

    number: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Ask:
    """A model call of a rollout; the caller's client answers it."""

    number: int
    request: ModelRequest


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Nobody waits for the answer any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion, or what the client raised."""

    number: int
    response: Response | None = None
    error: BaseException | None = None


Message = Setup | Ready | Generate | Cancel | Finished | Failed | Ask | Withdraw | Answer


def portable(error: BaseException) -> BaseException:
    """``error`` as it is when it survives pickling, else a ``RunError`` that says the same."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # noqa: BLE001 - an exception class of somebody else's; what it says is kept
        pass
    return RunError(f"{type(error).__name__}: {error}")
