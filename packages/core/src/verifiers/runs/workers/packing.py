"""A finished rollout as bytes, and back.

Live objects of the author's (a game, a connection) stay behind in the worker, as does the client; everything else of
the state arrives, and its turns share their prefixes again as they did where they were played. An error arrives with
the chain and the traceback it had.
"""

from __future__ import annotations

import pickle
from typing import Any

from verifiers.results.rows import ErrorInfo
from verifiers.rollouts.state import State, TrajectoryStep, TrajectoryStepTokens
from verifiers.runs.workers.messages import portable

PROTOCOL = pickle.HIGHEST_PROTOCOL


def pack_state(state: State) -> bytes:
    """The rollout without what cannot leave its process."""
    fields = {key: value for key, value in state.copy().items() if key != "client"}
    error = fields["error"]
    noted = {
        "attempts": state.attempts,
        "cleaned_up": state.cleaned_up,
        "recorded": ErrorInfo.of(error) if error is not None else None,
    }
    if isinstance(error, BaseException):
        fields["error"] = portable(error)
    try:
        return pickle.dumps((fields, noted), PROTOCOL)
    except Exception:  # noqa: BLE001 - pickle raises whatever an author's object does; the rest is sent without it
        return pickle.dumps(({key: value for key, value in fields.items() if _pickles(value)}, noted), PROTOCOL)


def unpack_state(packed: bytes) -> State:
    """The rollout again; its ``client`` is None."""
    fields, noted = pickle.loads(packed)
    fields["trajectory"] = _linked(fields.get("trajectory") or [])
    state = State(fields)
    state.attempts, state.cleaned_up = noted["attempts"], noted["cleaned_up"]
    if isinstance(state["error"], BaseException):
        state["error"].recorded = noted["recorded"]  # type: ignore[attr-defined]  # read by ``rows.ErrorInfo.of``
    return state


def _linked(steps: list[Any]) -> list[Any]:
    """The steps with their common prefixes stored once."""
    linked: list[Any] = []
    for step in steps:
        if not isinstance(step, TrajectoryStep):
            return steps
        before = linked[-1] if linked else None
        fields = dict(step)
        if isinstance(fields.get("tokens"), TrajectoryStepTokens):
            tokens = before["tokens"] if before is not None else None
            fields["tokens"] = TrajectoryStepTokens(**fields["tokens"], previous=tokens)
        linked.append(TrajectoryStep(**fields, previous=before))
    if linked:
        linked[-1].settle()
    return linked


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value, PROTOCOL)
    except Exception:  # noqa: BLE001 - see pack_state
        return False
    return True
