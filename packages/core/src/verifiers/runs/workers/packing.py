"""A finished rollout as bytes, and back.

Objects that do not pickle (a game, a connection) stay in the worker, as does the client; everything
else of the state is sent. An error keeps its chain and traceback.
"""

from __future__ import annotations

import pickle

from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rollouts.rollout import FIELDS
from verifiers.rollouts.state import State
from verifiers.runs.workers.messages import portable

PROTOCOL = pickle.HIGHEST_PROTOCOL
_NOT_IN_STATE = [attribute for attribute, field in FIELDS.items() if field.key is None]


def pack_state(state: State) -> bytes:
    """Serialise the state without the values that do not pickle."""
    fields = {key: value for key, value in state.copy().items() if key != "client"}
    error = fields["error"]
    attributes = {
        "attempts": state.attempts,
        "cleaned_up": state.cleaned_up,
        "saved_columns": state.saved_columns,
        "branches": [pack_state(branch) for branch in state.branches],
        "record": {name: getattr(state.record, name) for name in _NOT_IN_STATE},
        "recorded": ErrorInfo.of(error) if error is not None else None,
    }
    if isinstance(error, BaseException):
        fields["error"] = portable(error)
    try:
        return pickle.dumps((fields, attributes), PROTOCOL)
    except Exception:  # noqa: BLE001 - an author's object may raise anything; it is left out
        return pickle.dumps(
            ({key: value for key, value in fields.items() if _pickles(value)}, attributes), PROTOCOL
        )


def unpack_state(packed: bytes) -> State:
    """The state of ``pack_state``; its ``client`` is None."""
    fields, attributes = pickle.loads(packed)
    state = State(fields)
    state.attempts, state.cleaned_up = attributes["attempts"], attributes["cleaned_up"]
    state.saved_columns = attributes["saved_columns"]
    state.branches = tuple(map(unpack_state, attributes["branches"]))
    for name, value in attributes["record"].items():
        setattr(state.record, name, value)
    if isinstance(state["error"], BaseException):
        state["error"].recorded = attributes["recorded"]  # type: ignore[attr-defined]  # read by ``rows.ErrorInfo.of``
    return state


def _pickles(value: object) -> bool:
    try:
        pickle.dumps(value, PROTOCOL)
    except Exception:  # noqa: BLE001 - see pack_state
        return False
    return True
