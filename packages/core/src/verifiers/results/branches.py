"""Rows of branches: what a branch shares with its parent is written once, and read back whole.

In a file of rollouts the row of a branch lacks the turns and the messages that it shares with its
parent, a row before it in the same write. ``shared`` says where they are: ``rows_back``, how many
rows above; ``messages``, how many messages (characters, of a text) of the completion; ``turns``,
for each shared turn what differs in this rollout, such as its reward. Every reader of the library
gives whole rollouts; an export has no row with ``shared``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from verifiers.errors import JournalError

SHARED = "shared"
"""Key of a row that lacks what its parent has."""
SHARED_MARK = b'"shared":'


def without_copies(rows: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
    """The rows of one write, of which a branch whose parent is before it lacks what they share."""
    at: dict[tuple[Any, int], int] = {}
    written = []
    for number, row in enumerate(rows):
        fork: Any = row.get("fork")
        parent = at.get((row.get("example_hash"), fork["parent"])) if fork else None
        if fork:
            at[row.get("example_hash"), fork["sibling"]] = number
        written.append(
            dict(row)
            if parent is None
            else _without_shared(row, rows[parent], fork["turn"], number - parent)
        )
    return written


def _without_shared(
    row: Mapping[str, Any], parent: Mapping[str, Any], turn: int, rows_back: int
) -> dict[str, object]:
    num_messages = _num_equal(parent.get("completion"), row.get("completion"))
    shared: dict[str, object] = {"rows_back": rows_back, "messages": num_messages}
    changes: dict[str, Any] = {SHARED: shared}
    if num_messages:
        changes["completion"] = row["completion"][num_messages:]
    steps, parents = row.get("trajectory"), parent.get("trajectory")
    if steps and parents:
        changes["trajectory"] = steps[turn:]
        shared["turns"] = [
            {name: value for name, value in step.items() if name not in old or old[name] != value}
            for step, old in zip(steps[:turn], parents, strict=False)
        ]
    return {**row, **changes}


def _num_equal(before: Any, now: Any) -> int:
    if not any(isinstance(before, kind) and isinstance(now, kind) for kind in (str, list)):
        return 0
    pairs = enumerate(zip(before, now, strict=False))
    return next((n for n, (old, new) in pairs if old != new), min(len(before), len(now)))


def whole_rows(rows: Iterable[dict[str, Any]], location: str) -> Iterator[dict[str, Any]]:
    """The rows of a file in its order, each whole. *Raises* JournalError, which names ``location``
    and the row, where the parent of a branch is not where it was."""
    tree: list[dict[str, Any]] = []
    for number, row in enumerate(rows, 1):
        if SHARED in row:
            rows_back = rows_back_of(row, where := f"{location}:{number}")
            if rows_back > len(tree):
                raise _misplaced(where, rows_back)
            row = completed(row, tree[-rows_back], where)
        elif tree and (not (fork := row.get("fork")) or fork.get("parent") is None):
            tree.clear()
        if row.get("fork"):
            tree.append(row)
        yield row


def rows_back_of(row: Mapping[str, object], location: str) -> int:
    """How many rows above a row its parent is. *Raises* JournalError for what is no number."""
    shared = row[SHARED]
    rows_back = shared.get("rows_back") if isinstance(shared, Mapping) else None
    if not isinstance(rows_back, int) or rows_back < 1:
        raise _misplaced(location, rows_back)
    return rows_back


def _misplaced(location: str, rows_back: object) -> JournalError:
    return JournalError(
        f"{location}: the row shares the turns of the row {rows_back} above, which is not there:"
        " restore the file, or remove the line"
    )


def completed(row: Mapping[str, Any], parent: Mapping[str, Any], location: str) -> dict[str, Any]:
    """The row of a branch with what it shares with its parent, which is whole. *Raises*
    JournalError for a parent without these."""
    shared = row[SHARED]
    read = {name: value for name, value in row.items() if name != SHARED}
    try:
        if num_messages := shared["messages"]:
            read["completion"] = parent["completion"][:num_messages] + row["completion"]
        if "turns" in shared:
            turns = zip(parent["trajectory"], shared["turns"], strict=False)
            read["trajectory"] = [old | changes for old, changes in turns] + row["trajectory"]
    except (LookupError, TypeError) as error:
        raise _misplaced(location, shared["rows_back"]) from error
    return read
