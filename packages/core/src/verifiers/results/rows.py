"""Saved rollouts: ``RolloutOutput`` in memory, its line on disk, and back.

A saved rollout is plain data that pickles and encodes as JSON. Unknown numbers are NaN in memory
and null on disk; ``error`` is an ``ErrorInfo`` without secrets; metrics are stored under
``metrics`` and at the top level, unless the name is the library's (``OWN_NAMES``). ``storage.journal`` writes the
file; ``loading`` reads it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from verifiers import compat
from verifiers.errors import JournalError
from verifiers.results.branches import SHARED
from verifiers.rollouts.rollout import (
    SAVED,
    Rollout,
    read_fields,
    transcript_of,
)
from verifiers.rollouts.state import State
from verifiers.rollouts.transcript import Transcript
from verifiers.rollouts.typed_fields import SavedFields
from verifiers.rollouts.views import plain
from verifiers.rubrics.advantages import centered_advantages
from verifiers.runtime.json import canonical_json, decode_row, encode_row
from verifiers.runtime.redaction import redacted_column
from verifiers.storage.configurations import rollout_key
from verifiers.storage.images import check_stands_alone
from verifiers.storage.journal import RESERVED_KEYS
from verifiers.types import AttributeDict

FIELDS = frozenset(SAVED) - {"trajectory"}
"""Fields of a saved rollout, without its turns, which are a state column."""
ALWAYS = tuple(name for name, field in SAVED.items() if field.saved.when == "always")
"""Those that every saved rollout has."""
DISK_FIELDS = ("rollout_key", "example_hash", "sibling", "attempts")
COLUMNS_OF_RUNS = frozenset(DISK_FIELDS) | RESERVED_KEYS | {SHARED}
"""What a run adds to the line of a rollout; no state column may have such a name."""
_COLUMNS_OF_FILES = (
    "served_models label group trained excluded completion_tokens policy_version turn_tokens"
    " run_path set"
)
RUN_FACTS = ("env_id", "env_args", "model")
RUN_COLUMNS = ("run_path", "set", *RUN_FACTS)
"""Columns of a rollout that was read from a folder of several runs."""
OWN_NAMES = SAVED.keys() | COLUMNS_OF_RUNS | frozenset(_COLUMNS_OF_FILES.split())
"""Names of a saved rollout that are the library's. A metric of such a name is in ``metrics``
alone."""
MAX_METRICS = 1_000
"""Names of metrics of a run: each is a column of as many numbers as there are rollouts."""
READ_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What reading values of another program raises where their shape is another."""
RENAMED_METRICS = compat.METRICS
"""Metric names of older versions, on reading."""


class RolloutOutput(AttributeDict, SavedFields):
    """A finished rollout: the fields of ``SavedFields``, each metric by name, and the requested state
    columns.

    >>> from verifiers.testing import ScriptedClient
    >>> row = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}]).evaluate(ScriptedClient("2"), "m").outputs[0]
    >>> row["completion"], row.stop_condition, row.error
    ([{'role': 'assistant', 'content': '2'}], 'max_turns_reached', None)
    """


def state_to_output(state: State, state_columns: Sequence[str] | None = None) -> RolloutOutput:
    """Convert a finished state. A state column ``trajectory`` contains the steps without provider
    objects."""
    output = RolloutOutput(state.record.fields())
    for name in (*(state_columns or ()), *state.saved_columns):
        if name == "trajectory":
            output[name] = state.record.transcript.without_provider_objects()
        elif name not in output:
            output[name] = redacted_column(json_ready(plain(state.get(name))))
    return _with_flat_metrics(output)


def encoded_output(output: Mapping[str, Any]) -> dict[str, Any]:
    """A rollout as JSON values: each message and token id of its turns once, unknown numbers None.

    A step is a dict whose values are made when they are read: the general encoder does not see
    them.
    """
    turns = output.get("trajectory")
    row = {**output, "trajectory": Transcript(turns).to_json()} if turns else output
    return decode_row(check_stands_alone(encode_row(row)))


def row_for_disk(
    output: Mapping[str, Any], example_hash: str, sibling: int, attempts: int = 1
) -> dict[str, object]:
    """The rollout in the journal's format: with its key, and each message and token id of the
    trajectory once."""
    row = {**output}
    if row.get("trajectory"):
        row["trajectory"] = Transcript(row["trajectory"]).to_json()
    row["rollout_key"] = rollout_key(example_hash, sibling)
    row.update(example_hash=example_hash, sibling=sibling, attempts=attempts)
    return row


def journal_rows(outputs: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, object]]:
    """Each rollout as a journal has it, as JSON values: with a key of its own, from which it is
    read again."""
    siblings: dict[str, set[int]] = {}
    for output in outputs:
        example_hash = output.get("example_hash") or content_hash(output)
        numbers, sibling = siblings.setdefault(example_hash, set()), output.get("sibling")
        if not isinstance(sibling, int) or sibling in numbers:
            sibling = next(n for n in itertools.count(len(numbers)) if n not in numbers)
        numbers.add(sibling)
        attempts = output.get("attempts") or 1
        row = row_for_disk(output, example_hash, sibling, attempts)
        yield decode_row(check_stands_alone(encode_row(row)))


def remainder_of(row: Mapping[str, object], read: Mapping[str, object]) -> dict[str, object]:
    """What ``with_remainder`` needs to make ``row`` of what another format gives: its values of
    ``fields`` that are others, and the names that it lacks (``absent``); empty if it is equal."""
    fields = {
        name: value
        for name, value in row.items()
        if name not in read or read[name] != value or type(read[name]) is not type(value)
    }
    absent = [name for name in read if name not in row]
    return {"fields": fields, "absent": absent} if fields or absent else {}


def with_remainder(read: Mapping[str, object], remainder: object) -> dict[str, object]:
    """The row of which ``remainder_of`` made ``remainder``. *Raises* TypeError for a remainder of
    another shape."""
    if not isinstance(remainder, Mapping):
        raise TypeError(f"a remainder is an object, not a {type(remainder).__name__}")
    fields, absent = remainder.get("fields") or {}, remainder.get("absent") or []
    if not isinstance(fields, Mapping) or not isinstance(absent, list):
        raise TypeError("a remainder has fields, an object, and absent, a list")
    return {name: value for name, value in read.items() if name not in absent} | dict(fields)


def row_from_disk(row: Mapping[str, object], metric_names: Sequence[str] = ()) -> RolloutOutput:
    """Read a saved rollout, also of older versions, whose metrics are only at the top level
    (``metric_names``).

    ``advantage`` stays None if it is null: unknown or not computed yet, which only the whole
    group shows.

    *Raises* KeyError for a row without prompt, completion and reward: of something else.
    """
    if row.keys().isdisjoint(("prompt", "completion", "reward")):
        raise KeyError("prompt, completion or reward")
    metrics = row.get("metrics")
    if not isinstance(metrics, Mapping):
        metrics = {name: row[name] for name in metric_names if name in row}
    renamed = {} if "rollout_key" in row else RENAMED_METRICS
    values = {
        **row,
        "metrics": {renamed.get(name, name): value for name, value in metrics.items()},
        "timing": saved_times(row),
    }
    defaults: dict[str, object] = {**dict.fromkeys(ALWAYS), "reward": math.nan, "info": {}}
    # in the order of a new rollout's fields
    in_order = {name: row.get(name, defaults.get(name)) for name in SAVED}
    absent = [name for name in SAVED if name not in row and name not in defaults]
    output = RolloutOutput({**in_order, **row})
    for name in absent:
        del output[name]
    output.update(read_fields(values))
    for old in renamed:
        output.pop(old, None)
    for name, value in metrics.items():  # else it is a state column of this name
        if name not in OWN_NAMES and row.get(name) == value:
            output.pop(name, None)
    if (turns := output.get("trajectory")) is not None and not isinstance(turns, list):
        raise TypeError(f"its trajectory is a {type(turns).__name__}, and no list of turns")
    if turns is not None:
        output["trajectory"] = transcript_of(output)
    return _with_flat_metrics(output)


def saved_times(row: Mapping[str, Any]) -> Mapping[str, float]:
    """The times of a saved rollout; ``legacy`` reads those of older versions too."""
    return row.get("timing") or {}


def saved_row(
    row: Mapping[str, object], location: str, metric_names: Sequence[str] = ()
) -> RolloutOutput:
    """As ``row_from_disk``. *Raises* JournalError that names ``location``, ``file:line``, for a row
    of another shape."""
    try:
        return row_from_disk(row, metric_names)
    except READ_ERRORS as error:
        raise JournalError(
            f"{location}: this line is not a saved rollout ({type(error).__name__}: {error}); restore"
            " the file or remove the line"
        ) from error


def check_num_metrics(names: Sized, location: str) -> None:
    """*Raises* JournalError, which names ``location``, for more metrics than ``MAX_METRICS``."""
    if len(names) > MAX_METRICS:
        raise JournalError(
            f"{location}: with this rollout there are more than {MAX_METRICS:,} metrics, each a"
            " column of every rollout; keep values whose names are data in one column of the state"
            " (state_columns)"
        )


def output_to_state(output: Mapping[str, Any]) -> State:
    """Convert a saved rollout to a state, for code that scores or tokenises it."""
    state = State.of(Rollout.from_json(output))
    columns = {*SAVED, *DISK_FIELDS, *output["metrics"]}
    state.update((name, value) for name, value in output.items() if name not in columns)
    return state


def _with_flat_metrics(output: RolloutOutput) -> RolloutOutput:
    for name, value in output["metrics"].items():
        if name not in OWN_NAMES:
            output.setdefault(name, value)
    return output


def example_key(output: Mapping[str, object]) -> object:
    """The key that siblings share: the hash of their example if stored, else its id; with the run
    in rollouts of several runs."""
    key = output.get("example_hash") or output["example_id"]
    return (output["run_path"], key) if "run_path" in output else key


def content_hash(output: Mapping[str, object]) -> str:
    """A substitute for the hash of the dataset row, from the columns that the output has."""
    columns = json_ready({name: output[name] for name in ("prompt", "answer", "task", "info")})
    return hashlib.sha256(canonical_json(columns)).hexdigest()


def json_ready(value: object) -> Any:
    """A copy in plain JSON types; NaN becomes None, and unsupported values the journal's marker."""
    return decode_row(encode_row({"value": value}))["value"]


def keep_columns(output: RolloutOutput, state_columns: Sequence[str]) -> None:
    """Remove the extra columns of a rollout but these."""
    columns = {*FIELDS, *DISK_FIELDS, *output["metrics"], *state_columns}
    for name in [name for name in output if name not in columns]:
        del output[name]


def fill_advantages(outputs: Sequence[RolloutOutput]) -> None:
    """Set the advantages of every group that has none: reward minus group mean.

    In a group that has some, missing advantages become NaN: those rewards are unknown.
    """
    if all([output["advantage"] is not None and "trajectory" not in output for output in outputs]):
        return
    groups: dict[object, list[RolloutOutput]] = {}
    for output in outputs:
        groups.setdefault(example_key(output), []).append(output)
    for group in groups.values():
        advantages = [output["advantage"] for output in group]
        if None in advantages:
            if advantages.count(None) == len(group):
                advantages = centered_advantages([output["reward"] for output in group])
            else:
                advantages = [
                    math.nan if advantage is None else advantage for advantage in advantages
                ]
        for output, advantage in zip(group, advantages, strict=True):
            set_advantage(output, advantage)


def set_advantage(output: RolloutOutput, advantage: float | None) -> None:
    """Set the advantage of a rollout, and of those of its turns that have none of their own."""
    output["advantage"] = advantage
    for step in output.get("trajectory") or ():
        if step["advantage"] is None:
            step["advantage"] = advantage
