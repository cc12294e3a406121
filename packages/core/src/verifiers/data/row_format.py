"""Format a row of a dataset as that of a rollout: the prompt and the normalized columns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.data.images import FORMATS, image_part, image_url, is_image, is_url, local_path
from verifiers.data.messages import (
    as_mapping,
    check_parts,
    content_part,
    field,
    normalize_chat,
    normalize_messages,
)
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
    formatted: dict[str, object] = copy_row(_with_parts(row, location))
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
            if any(_images_of(row, name) for name in IMAGE_COLUMNS):
                raise ConfigError(
                    'completion mode is text alone, and the row has images: use message_type="chat"'
                )
            return normalize_messages(question if source is None else source, "completion")
        prompt = normalize_chat(_with_local_files(source))
        if source is None:
            prompt = [*normalize_chat(row_format.few_shot), UserMessage(question)]  # type: ignore[arg-type]  # not None: checked above
        prompt = _with_images(prompt, [*_images_of(row, "image"), *_images_of(row, "images")])
        check_parts(prompt)
        if row_format.system_prompt and not _begins_with_system(prompt):
            prompt = [SystemMessage(row_format.system_prompt), *prompt]
    except (ConfigError, TypeError, AttributeError) as error:
        raise DatasetError(f"{location}: the prompt cannot be read: {error}") from error
    return prompt


IMAGE_COLUMNS = ("image", "images")
"""Columns whose images are those of the prompt."""


def _with_parts(row: Mapping[str, object], location: str) -> dict[str, Any]:
    """The row with content parts in place of images, in its columns and in lists in them."""
    columns = dict(row)
    for name, cell in row.items():
        try:
            if is_image(cell):
                columns[name] = image_part(cell)
            elif isinstance(cell, list | tuple) and any(map(is_image, cell)):
                columns[name] = list(map(content_part, cell))
        except ConfigError as error:
            raise DatasetError(f"{location}: the column {name!r}: {error}") from error
    return columns


def _images_of(row: Mapping[str, object], name: str) -> list[Any]:
    """The parts of a column of images; none where it holds something else."""
    cell = row.get(name)
    parts = cell if isinstance(cell, list) else [cell]
    return parts if all(image_url(part) is not None for part in parts) else []


def _with_images(prompt: list[Message], parts: list[object]) -> list[Message]:
    """The prompt with images in its places ``{"type": "image"}``, else before the text of its last
    user message; a prompt that has images is complete."""
    contents = [message.get("content") for message in prompt]
    prompt_parts = [part for content in contents if isinstance(content, list) for part in content]
    num_places = sum(map(_is_place, prompt_parts))
    if not parts or (not num_places and any(image_url(part) is not None for part in prompt_parts)):
        return prompt
    if num_places and num_places != len(parts):
        raise ConfigError(
            f"the prompt has {num_places} places for images, and the row has {len(parts)} images"
        )
    remaining, prompt = iter(parts), list(prompt)
    users = [number for number, message in enumerate(prompt) if message["role"] == "user"]
    for number, content in enumerate(contents):
        if num_places and isinstance(content, list):
            content = [next(remaining) if _is_place(part) else part for part in content]
        elif not num_places and users and number == users[-1]:
            texts = content if isinstance(content, list) else [content_part(content)]
            content = [*parts, *texts]
        else:
            continue
        prompt[number] = prompt[number].model_copy(update={"content": content})
    return prompt


def _is_place(part: object) -> bool:
    return (
        isinstance(part, Mapping) and part.get("type") == "image" and set(part) <= {"type", "text"}
    )


def _with_local_files(prompt: object) -> Any:
    """Messages with the images of the working folder in place of their paths.

    A row may be a stranger's, so it reaches no other file. *Raises* ConfigError for another path.
    """
    if not isinstance(prompt, list | tuple):
        return prompt
    return [_with_files(message) for message in prompt]


def _with_files(message: object) -> Any:
    content = field(message, "content")
    if not isinstance(content, list | tuple):
        return message
    parts = [_with_file(part) for part in content]
    if all(new is old for new, old in zip(parts, content, strict=True)):
        return message
    return {**as_mapping(message, "a message"), "content": parts}


def _with_file(part: object) -> Any:
    url = image_url(part)
    if url is None and isinstance(part, Mapping) and part.get("type") == "image":
        url = part["image"] if isinstance(part.get("image"), str) else None
    if url is None or not _is_file(url):
        return part
    folder = Path.cwd().resolve()
    path = (folder / local_path(url)).resolve()
    if not path.is_relative_to(folder):
        raise ConfigError(
            f"the image {url[:200]!r} is outside of the working folder {folder}; read it in the"
            " environment's own code: vf.image_part(path)"
        )
    detail = field(field(part, "image_url"), "detail")
    return image_part(path, detail=str(detail or ""))


def _is_file(url: str) -> bool:
    """Whether the text in an address's place names a file of an image."""
    end = url.rpartition(".")[2].lower()
    is_named = end == "jpeg" or end in FORMATS.values()
    return url[:5].lower() == "file:" or (is_named and "://" not in url and not is_url(url))


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
