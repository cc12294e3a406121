"""The messages between a pool and its workers: plain data that pickles.

    pool -> worker      Setup once, then Generate and Cancel by job number, ModelReply by call number
    worker -> pool      Ready once (or Failed with number 0), then Finished or Failed, CallModel and CancelCall

The bytes between the two ends are trusted: both run this program with the same environment
packages. Model output appears in them only as text.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.errors import RunError, message_of
from verifiers.rollouts.contract import LoadedFrom
from verifiers.runs.plan import Job
from verifiers.runs.rollout import RunContext
from verifiers.types import ModelRequest, Response


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker needs to load the environment by its id, and what all rollouts of the run
    share."""

    loaded_from: LoadedFrom
    context: RunContext
    """The caller's, without what stays in its process: the client and the slots."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings that were changed after the environment was loaded, for ``set_kwargs``."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Identity of the caller's environment; a worker with another identity refuses to start."""
    cleans_up: bool = True
    """Whether the rubric's clean-up handlers run in the worker; False when scoring comes later."""
    max_scoring: int | None = None
    """This worker's share of the limit of concurrently scored rollouts."""
    max_tools: int | None = None
    """This worker's share of the limit of concurrent tool calls."""
    max_threads: int | None = None
    shows_tools: bool | None = None
    """The caller's ``client.shows_tools()``."""
    import_paths: Sequence[str] = ()
    """The caller's ``sys.path``."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The environment is loaded."""

    pid: int


@dataclass(frozen=True, slots=True)
class Generate:
    """Generate and score one rollout."""

    number: int
    job: Job
    seed: int | None = None
    """Base of the sampling seeds; a run may sample an example again with another seed."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a rollout that is no longer needed."""

    number: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished rollout, failed or not, as bytes (``packing``)."""

    number: int
    state: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """An error that ends the run, or (number 0) a worker that cannot start."""

    number: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class CallModel:
    """A model call of a rollout, for the caller's client."""

    number: int
    request: ModelRequest


@dataclass(frozen=True, slots=True)
class CancelCall:
    """Cancel a model call."""

    number: int


@dataclass(frozen=True, slots=True)
class ModelReply:
    """The completion of a model call, or the exception that the client raised."""

    number: int
    response: Response | None = None
    error: BaseException | None = None


Message = (
    Setup | Ready | Generate | Cancel | Finished | Failed | CallModel | CancelCall | ModelReply
)


def portable(error: BaseException) -> BaseException:
    """``error`` when it survives pickling, else a ``RunError`` with the same message."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # noqa: BLE001 - a foreign exception class may raise anything; its message is sent
        pass
    return RunError(f"{type(error).__name__}: {message_of(error)}")
