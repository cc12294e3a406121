"""The head of a saved rollout: what an index and the statistics need of its line, decoded without
the rest of it."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from verifiers.data.messages import field, message_text
from verifiers.results.coverage import counts_of
from verifiers.results.rows import row_from_disk
from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rollouts.rollout import SAVED
from verifiers.rollouts.values import number, reported, tree_number
from verifiers.runtime.json import decode_row

DECLARED_NUMBERS = [name for name, field in SAVED.items() if field.saved.index == "number"]
DECLARED_NAMES = [name for name, field in SAVED.items() if field.saved.index == "name"]
NUMBERS = (
    *DECLARED_NUMBERS,
    "turns",
    "input_tokens",
    "output_tokens",
    "chars",
    "total_ms",
    "sibling",
    "attempts",
    "trained",
    "tree",
    "fork_turn",
)
"""Numeric columns; an unknown value is NaN."""
NAMES = tuple(DECLARED_NAMES)
"""Columns of names; None when absent. ``error`` is the class of a rollout's error."""
INNER_NAMES = ("cause", "served", "counts")
"""Columns of names for the statistics: the innermost exception of an error and where it was raised;
the names under which a server answered, one a line: "" = as requested, None = it did not answer;
what a run counts of the rollout (``coverage.counts_of``), as text, of which few are different."""
_HASH = re.compile(r"([0-9a-f]{16})[0-9a-f]*(\.[1-9][0-9]{0,9})?")
"""The hash of an example, and the number of one of several with equal content."""


class _Message(msgspec.Struct, gc=False):
    role: str = ""
    content: str | list[Any] | None = None
    tool_calls: Any = None


class _Timing(msgspec.Struct, gc=False):
    total_ms: float | None = None


class _Measured(msgspec.Struct, gc=False):
    """The fields of a saved rollout of which an index keeps something else than the value."""

    example_id: Any = None
    metrics: dict[str, float | None] | None = None
    completion: list[_Message] | str | None = None
    timing: _Timing | None = None
    token_usage: dict[str, float | None] | None = None
    completion_tokens: float | None = None
    sibling: float | None = None
    attempts: float | None = None
    trained: bool | float | None = None
    fork: dict[str, int | None] | None = None
    rollout_key: str | None = None
    example_hash: str | None = None
    served_models: list[str] | None = None
    is_truncated: Any = None
    is_unparsed: object = None
    tool_defs: object = None
    tool_errors: Any = None
    failed_requests: Any = None


_Head = msgspec.defstruct(
    "_Head",
    [
        *((name, float | None, None) for name in DECLARED_NUMBERS),
        *((name, Any if name == "error" else str | None, None) for name in DECLARED_NAMES),
    ],
    bases=(_Measured,),
    gc=False,
)
"""The indexed fields of a saved rollout; the other fields of its line are skipped without being
decoded."""
_DECODER = msgspec.json.Decoder(_Head)


VALUES = (
    *NUMBERS,
    *NAMES,
    *INNER_NAMES,
    "example",
    "key",
    "rollout_key",
    "metrics",
    "usage",
)
"""Names of what ``head_values`` returns."""


def head_values(body: bytes, metric_names: Sequence[str]) -> tuple[Any, ...]:
    """The indexed values of a line, by ``VALUES``; ``metric_names`` as of ``RowIndex``.

    *Raises* LookupError, TypeError, ValueError or AttributeError if it is no saved rollout.
    """
    try:
        head: Any = _DECODER.decode(body)
        is_usual = head.metrics is not None and (head.completion, head.reward) != (None, None)
    except (msgspec.DecodeError, UnicodeError, RecursionError):  # other types, surrogates
        is_usual = False
    # values of the declared types need no reading; row_from_disk alone reads the others
    return _values_of(head if is_usual else _head_of(decode_row(body), metric_names))


def _values_of(head: Any) -> tuple[object, ...]:
    usage = {name: number(count) for name, count in reported(head.token_usage).items()}
    turns, chars = _measure(head.completion)
    cause, names = None, {name: _text(getattr(head, name)) for name in DECLARED_NAMES}
    if head.error is not None:
        failure = ErrorInfo.of(head.error)
        names["error"] = failure.get("error") or "unknown"
        cause = f"{failure.cause} in {failure.get('where')}"
    return (
        *(number(getattr(head, name)) for name in DECLARED_NUMBERS),
        turns,
        usage.get("input_tokens", usage.get("prompt_tokens")),
        usage.get("output_tokens", usage.get("completion_tokens", head.completion_tokens)),
        chars,
        head.timing and number(head.timing.total_ms),
        number(head.sibling),
        number(head.attempts),
        number(head.trained),
        tree_number(head.fork),
        math.nan if head.fork is None else number(head.fork["turn"]),
        *names.values(),
        cause,
        "\n".join(head.served_models or ()) if head.completion else None,
        _counts_text(head),
        head.example_id,
        head.example_hash,
        head.rollout_key,
        {name: number(value) for name, value in (head.metrics or {}).items()},
        usage,
    )


def digits_of(example_hash: str | None) -> bytes:
    """What ``key`` holds of the hash of an example; of a text of another program its hash."""
    if not example_hash:
        return b""
    if match := _HASH.fullmatch(example_hash):
        return (match[1] + (match[2] or "")).encode()
    return hashlib.sha256(example_hash.encode("utf-8", "surrogatepass")).hexdigest()[:16].encode()


def _measure(completion: object) -> tuple[int, int]:
    """(model turns, characters of the model's text) of a completion."""
    if not isinstance(completion, list):
        return (1, len(completion)) if isinstance(completion, str) else (0, 0)
    turns = chars = 0
    for message in completion:
        if message.role == "assistant":
            turns += 1
            content = message.content
            chars += (
                len(content)
                if isinstance(content, str)
                else len(message_text({"content": content or ""}))
            )
    return turns, chars


def _head_of(row: Mapping[str, object], metric_names: Sequence[str]) -> object:
    """The head of a saved rollout of any version, by complete decoding."""
    output = row_from_disk(row, metric_names)
    completion = output["completion"]
    if isinstance(completion, list):
        completion = [
            _Message(*(field(message, name) for name in ("role", "content", "tool_calls")))
            for message in completion
        ]
    return _Head(
        **{name: output[name] for name in DECLARED_NUMBERS},
        **{name: output.get(name) for name in DECLARED_NAMES},
        example_id=output["example_id"],
        metrics=output["metrics"],
        completion=completion,
        timing=_Timing(output["timing"].get("total_ms")),
        token_usage=output["token_usage"],
        completion_tokens=number(row.get("completion_tokens")),
        sibling=number(row.get("sibling")),
        attempts=number(row.get("attempts")),
        trained=number(row.get("trained")),
        fork=row.get("fork"),
        rollout_key=_text(row.get("rollout_key")),
        example_hash=_text(row.get("example_hash")),
        served_models=_texts(row.get("served_models")),
        **{name: row.get(name) for name in COUNTED},
    )


COUNTED = ("is_truncated", "is_unparsed", "tool_defs", "tool_errors", "failed_requests")


def _counts_text(head: Any) -> str:
    """The counts of a row: ``rollouts 1 tool_calls 3``. Values that no run writes count nothing."""
    tools = head.tool_defs if isinstance(head.tool_defs, list) else []
    failed = head.failed_requests if isinstance(head.failed_requests, Mapping) else {}
    counts = counts_of(
        head.completion,
        error=head.error,
        reward=head.reward,
        is_truncated=head.is_truncated,
        is_unparsed=head.is_unparsed,
        tool_defs=[tool for tool in tools if _is_tool(tool)],
        tool_errors=_texts(head.tool_errors) or [],
        failed_requests={kind: n for kind, n in failed.items() if type(n) is int and n >= 0},
        attempts=head.attempts,
    )
    return " ".join(f"{name} {count}" for name, count in counts.items())


def _is_tool(tool: object) -> bool:
    return isinstance(tool, Mapping) and isinstance(tool.get("function") or tool, Mapping)


def counts_of_text(text: str) -> dict[str, int]:
    """The counts in the column ``counts`` of a row.

    >>> counts_of_text("rollouts 1 tool_calls 3")
    {'rollouts': 1, 'tool_calls': 3}
    """
    words = text.split(" ") if text else []
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: object) -> list[str] | None:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else None
