"""Saved rollouts, in memory (``RolloutOutput``) and on disk.

A saved rollout is plain data that pickles and encodes as JSON. Unknown numbers are NaN in memory and null on disk;
``error`` is an ``ErrorInfo`` without secrets; metrics are stored under ``metrics`` and at the top level, unless a field
has that name. ``storage.journal`` writes the file; ``outputs`` computes statistics.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from verifiers import compat
from verifiers.data.messages import normalize_messages
from verifiers.errors import JournalError, ScoringError, where_of
from verifiers.results.trajectory_rows import pack, public_steps, unpack
from verifiers.rollouts.state import State, Timing
from verifiers.runtime.json import decode_row, encode_row
from verifiers.runtime.redaction import redacted_column, redacted_text
from verifiers.storage.identity import rollout_key
from verifiers.types import AttributeDict

NAN = math.nan
MAX_MESSAGE_CHARS = 4_000
MAX_TRACEBACK_CHARS = 16_000
FIELDS = (
    "example_id prompt completion answer task info reward advantage metrics error is_completed is_truncated "
    "stop_condition timing token_usage tool_defs"
).split()
DISK_FIELDS = ("rollout_key", "example_hash", "sibling", "attempts")
RENAMED_METRICS = compat.METRICS
"""Metric names of older versions, on reading."""
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)
_IS_LIBRARY = re.compile(r"/(site-packages|dist-packages|python3\.\d+|src/verifiers|src/verifiers_trainer)/|<")
"""Paths of frames that are not the author's code, on whatever machine wrote them."""


class RolloutInput(TypedDict, total=False):
    """A dataset row as the input of a rollout; further columns are allowed.

    >>> row: vf.RolloutInput = {"prompt": [vf.UserMessage("2 + 2")], "answer": "4", "info": {"level": 1}}
    """

    prompt: Any
    answer: Any
    task: str
    info: dict[str, Any]
    example_id: int


class RolloutOutput(AttributeDict):
    """One finished rollout: the fields ``FIELDS``, each metric by name, and the requested state columns.

    >>> from verifiers.testing import ScriptedClient
    >>> row = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}]).evaluate(ScriptedClient("2"), "m").outputs[0]
    >>> row["completion"], row.stop_condition, row.error
    ([{'role': 'assistant', 'content': '2'}], 'max_turns_reached', None)
    """

    if TYPE_CHECKING:
        example_id: Any
        prompt: Any
        completion: Any
        answer: Any
        task: str
        info: dict[str, Any]
        reward: float
        advantage: float | None
        metrics: dict[str, float]
        error: ErrorInfo | None
        is_completed: bool
        is_truncated: bool
        stop_condition: str | None
        timing: dict[str, float]
        token_usage: dict[str, int] | None
        tool_defs: list[Any] | None


class ErrorInfo(AttributeDict):
    """A failure as data: ``error message error_chain_repr error_chain_str where retryable attempts traceback``.

    >>> vf.ErrorInfo.of(vf.ToolCallError("there is no tool 'ad'")).message
    "there is no tool 'ad'"
    """

    if TYPE_CHECKING:
        error: str
        message: str
        error_chain_repr: str
        error_chain_str: str
        where: str | None
        retryable: bool
        attempts: Any
        traceback: str | None

    @classmethod
    def of(cls, error: object) -> ErrorInfo:
        """From an exception, its mapping as read from disk, or the text that older versions wrote."""
        if isinstance(error, Mapping):
            return cls(error)
        if (recorded := getattr(error, "recorded", None)) is not None:  # it was raised in another process
            return cls(recorded)
        if not isinstance(error, BaseException):
            return cls(_blank_error() | {"error": str(error).split("(", 1)[0], "message": redacted_text(str(error))})
        chain = error_chain(error)
        attempts = getattr(error, "attempts", None)
        return cls(
            error=type(error).__name__,
            message=_cut(redacted_text(str(error)), MAX_MESSAGE_CHARS),
            error_chain_repr=_cut(redacted_text(" -> ".join(map(repr, chain))), MAX_MESSAGE_CHARS),
            error_chain_str=" -> ".join(type(link).__name__ for link in chain),
            where=_where(error),
            retryable=bool(getattr(error, "retryable", False)),
            attempts=attempts if isinstance(attempts, int) else len(attempts or ()),
            traceback=_cut(redacted_text("".join(traceback.format_exception(error))), MAX_TRACEBACK_CHARS),
        )

    @property
    def is_scoring_error(self) -> bool:
        """Whether only a reward function failed, not the rollout itself."""
        return self.get("error") == ScoringError.__name__

    @property
    def author_line(self) -> str | None:
        """``"sums.py:12"``: the deepest line of the first exception's traceback in the author's code; None without one.

        Frames of this product, of Python's library and of installed packages do not count.
        """
        innermost = (self.get("traceback") or "").split("\nDuring handling of ")[0].split("\nThe above exception ")[0]
        frames = [frame for frame in _FRAME.findall(innermost) if not _IS_LIBRARY.search(frame[0])]
        return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else None

    @property
    def cause(self) -> str:
        """Class name of the innermost exception."""
        chain = self.get("error_chain_str") or self.get("error") or "unknown"
        return chain.rsplit(" -> ", 1)[-1]


def error_chain(error: BaseException) -> list[BaseException]:
    """The exception and its chain of causes, outermost first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain


def state_to_output(state: State, state_columns: Sequence[str] | None = None) -> RolloutOutput:
    """Convert a finished state. A state column ``trajectory`` contains the steps without provider objects."""
    reward, error = state["reward"], state["error"]
    output = RolloutOutput(
        example_id=state["example_id"],
        prompt=state["prompt"],
        completion=state["completion"],
        answer=state["answer"],
        task=state["task"],
        info=state["info"],
        reward=NAN if reward is None else reward,
        advantage=state["advantage"],
        metrics=dict(state["metrics"]),
        error=None if error is None else ErrorInfo.of(error),
        is_completed=state["is_completed"],
        is_truncated=state["is_truncated"],
        stop_condition=state["stop_condition"],
        timing=_timing(state["timing"]),
        token_usage=dict(state["usage"]),
        tool_defs=state["tool_defs"],
    )
    for name in (*(state_columns or ()), *state.saved_columns):
        if name not in output:
            output[name] = _column(name, state.get(name))
    return _with_flat_metrics(output)


def row_for_disk(output: Mapping[str, Any], example_hash: str, sibling: int, attempts: int = 1) -> dict[str, Any]:
    """The rollout in the journal's format: with its key, and each message and token id of the trajectory once."""
    row = {**output}
    if row.get("trajectory"):
        row["trajectory"] = pack(row["trajectory"])
    row["rollout_key"] = rollout_key(example_hash, sibling)
    row.update(example_hash=example_hash, sibling=sibling, attempts=attempts)
    return row


def row_from_disk(row: Mapping[str, Any], metric_names: Sequence[str] = ()) -> RolloutOutput:
    """Read a saved rollout, also of older versions, whose metrics are only at the top level (``metric_names``).

    ``advantage`` stays None where it is null: unknown or not computed yet, which only the whole group shows.

    *Raises* KeyError for a row without prompt, completion and reward: of something else.
    """
    if row.keys().isdisjoint(("prompt", "completion", "reward")):
        raise KeyError("prompt, completion or reward")
    output = RolloutOutput(dict.fromkeys(FIELDS) | dict(row))
    metrics = row.get("metrics")
    if not isinstance(metrics, Mapping):
        metrics = {name: row[name] for name in metric_names if name in row}
    renamed = {} if "rollout_key" in row else RENAMED_METRICS
    output["metrics"] = {renamed.get(name, name): _number(value) for name, value in metrics.items()}
    for old in renamed:
        output.pop(old, None)
    for name in metrics:
        if name not in FIELDS:
            output.pop(name, None)
    output["reward"] = _number(row.get("reward"))
    for name in ("prompt", "completion"):
        if isinstance(output[name], list):
            output[name] = normalize_messages(output[name])
    if output["error"] is not None:
        output["error"] = ErrorInfo.of(output["error"])
    timing = output["timing"]
    if not timing or not timing.keys().isdisjoint(compat.TIMES):
        timing = compat.load(compat.FLAT_TIMING)(row)
    output["timing"] = _timing(timing)
    output["info"] = {} if output["info"] is None else output["info"]
    if isinstance(output.get("trajectory"), list):
        output["trajectory"] = unpack(output["trajectory"])
    return _with_flat_metrics(output)


def saved_row(row: Mapping[str, Any], place: str, metric_names: Sequence[str] = ()) -> RolloutOutput:
    """As ``row_from_disk``. *Raises* JournalError that names ``place``, ``file:line``, for a row of another shape."""
    try:
        return row_from_disk(row, metric_names)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise JournalError(
            f"{place}: this line is not a saved rollout ({type(error).__name__}: {error}); restore the file or remove "
            "the line"
        ) from error


def output_to_state(output: Mapping[str, Any]) -> State:
    """Convert a saved rollout to a state, for code that scores or tokenises it."""
    set_names = {*FIELDS, *DISK_FIELDS, *output["metrics"]} - {"token_usage"}
    fields = {name: value for name, value in output.items() if name in State.INPUT_FIELDS}
    state = State(fields, trajectory=output.get("trajectory") or [], usage=dict(output.get("token_usage") or {}))
    for name in ("completion", "reward", "advantage", "metrics", "is_completed", "is_truncated", "stop_condition"):
        state[name] = output.get(name)
    state["error"] = output.get("error")
    state.update((name, value) for name, value in output.items() if name not in set_names and name != "token_usage")
    return state


def json_ready(value: object) -> Any:
    """A copy in plain JSON types; NaN becomes None, and unsupported values the journal's marker."""
    return decode_row(encode_row({"value": value}))["value"]


def _with_flat_metrics(output: RolloutOutput) -> RolloutOutput:
    for name, value in output["metrics"].items():
        output.setdefault(name, value)
    return output


def _column(name: str, value: Any) -> Any:
    if name == "trajectory":
        return public_steps(value or [])
    return redacted_column(json_ready(value))


def _timing(times: Mapping[str, float]) -> Timing:
    """These times alone, without a zero for each that is not among them."""
    timing = Timing.__new__(Timing)
    timing.update(times)
    return timing


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else NAN


def _where(error: BaseException) -> str | None:
    if where := where_of(error):
        return where
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else None


def _blank_error() -> dict[str, Any]:
    names = ("error_chain_repr", "error_chain_str", "where", "traceback")
    return dict.fromkeys(names) | {"retryable": False, "attempts": 0}


def _cut(text: str, limit: int) -> str:
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}\n… {len(text) - limit} characters left out …\n{text[-half:]}"


def example_key(output: Mapping[str, Any]) -> Any:
    """The key that siblings share: the hash of their example if stored, else its id."""
    return output.get("example_hash") or output["example_id"]
