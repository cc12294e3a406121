"""Format a row of a dataset as that of a rollout: the prompt and the normalized columns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.data.messages import check_parts, normalize_chat, normalize_messages
from verifiers.errors import ConfigError, DatasetError
from verifiers.runtime.decoding import decode_json
from verifiers.runtime.suggest import closest
from verifiers.types import (
    AttributeDict,
    Message,
    Messages,
    SystemMessage,
    Tool,
    ToolCall,
    UserMessage,
)


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How an environment turns a row into a prompt."""

    system_prompt: str | None = None
    few_shot: Sequence[object] | None = None
    """Messages between the system prompt and the question, for rows without a ``prompt``."""
    message_type: str = "chat"
    question_key: str = "question"
    answer_key: str = "answer"
    default_task: Callable[[], str] = lambda: "default"
    """Returns the task of rows without a task; called when a row is formatted."""


def format_row(
    row: Mapping[str, object], row_format: RowFormat, location: str = "the row"
) -> dict[str, Any]:
    """Return a new row with normalized ``prompt answer info task example_id``; other columns are
    copied.

    Idempotent. Raises: ``DatasetError`` that begins with ``location``.
    """
    formatted: dict[str, object] = copy_row(dict(row))
    question = _cell(formatted, row_format.question_key, "question")
    if question is not None:
        if not isinstance(question, str):
            raise DatasetError(
                f"{location}: {row_format.question_key!r} must be text, not {type(question).__name__}"
                " (messages go into a column 'prompt')"
            )
        formatted["question"] = question
    formatted["prompt"] = _prompt(formatted, question, row_format, location)
    answer = _cell(formatted, row_format.answer_key, "answer")
    formatted["answer"] = "" if answer is None else answer
    formatted["info"] = _info(formatted.get("info"), location)
    task = formatted.get("task")
    formatted["task"] = row_format.default_task() if task is None else task
    formatted.setdefault("example_id", 0)
    return formatted


def _cell(row: Mapping[str, object], key: str, canonical: str) -> object:
    """The value of the configured column, else of the canonical column."""
    value = row.get(key)
    return row.get(canonical) if value is None else value


def _prompt(
    row: Mapping[str, object], question: str | None, row_format: RowFormat, location: str
) -> Messages:
    source = row.get("prompt")
    if source is None and question is None:
        raise DatasetError(
            no_question(location, row_format, [name for name in row if row[name] is not None])
        )
    try:
        if row_format.message_type == "completion":
            return normalize_messages(question if source is None else source, "completion")
        prompt = normalize_chat(source)
        if source is None:
            prompt = [*normalize_chat(row_format.few_shot), UserMessage(question)]  # type: ignore[arg-type]  # not None: checked above
        check_parts(prompt)
        if row_format.system_prompt and not _begins_with_system(prompt):
            prompt = [SystemMessage(row_format.system_prompt), *prompt]
    except (ConfigError, TypeError, AttributeError) as error:
        raise DatasetError(f"{location}: the prompt cannot be read: {error}") from error
    return prompt


def _begins_with_system(prompt: Sequence[Any]) -> bool:
    return bool(prompt) and prompt[0]["role"] in ("system", "developer")


def _info(info: object, location: str) -> dict[str, object]:
    if info is None or info == "":
        return {}
    if isinstance(info, str):
        try:
            info = decode_json(info)
        except ValueError as error:
            raise DatasetError(f"{location}: 'info' is text that is not JSON: {error}") from error
    if not isinstance(info, Mapping):
        raise DatasetError(
            f"{location}: 'info' must be a dict or the JSON text of one, not {type(info).__name__}"
        )
    return dict(info)


def no_question(location: str, row_format: RowFormat, columns: Sequence[str]) -> str:
    """Sentence about rows without a prompt."""
    key = row_format.question_key
    hint = closest(key, columns) or ', or name the column with question_key="..."'
    names = ", ".join(columns) or "none"
    return f"{location} has neither 'prompt' nor {key!r}; its columns are: {names}{hint}"


_ATOMS = frozenset((str, int, float, bool, type(None)))
_are_atoms = _ATOMS.issuperset
_DICTS = (Message, ToolCall, Tool, AttributeDict)


def copy_row(value: Any) -> Any:
    """Copy a row deeply, fast for JSON-like values: text and numbers are shared."""
    kind: Any = type(value)
    if kind is list:
        return value[:] if _are_atoms(map(type, value)) else [copy_row(member) for member in value]
    if kind is dict:
        copied = value.copy()
    elif kind in _ATOMS:
        return value
    elif isinstance(value, _DICTS):
        copied = kind.__new__(kind)
        dict.update(copied, value)
    else:
        return copy.deepcopy(value)
    if not _are_atoms(map(type, dict.values(copied))):
        for key, member in dict.items(copied):
            if type(member) not in _ATOMS:
                dict.__setitem__(copied, key, copy_row(member))
    return copied
