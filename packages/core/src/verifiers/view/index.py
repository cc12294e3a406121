"""A file of rows, read once from front to back: where each row stands, and the few columns that sort and filter.

Works on journals and on plain lines (runs of other versions, a training's completions), finished or growing: ``read``
takes up what was appended, for as long as it is given, so that a large file shows its first rows at once. Of a row run
again the newest counts. Text stays on disk; a row is read when it is asked for.

Memory is about 300 bytes a row. This module never writes.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verifiers.data.messages import field, message_text
from verifiers.errors import JournalError
from verifiers.results.rows import ErrorInfo, RolloutOutput, row_from_disk
from verifiers.runtime.json import decode_row
from verifiers.storage.journal import scan_journal

NUMBERS = ("reward", "advantage", "turns", "input_tokens", "output_tokens", "chars", "total_ms", "sibling", "attempts")
"""Columns of numbers; an unknown one is NaN."""
NAMES = ("error", "stop_condition")
"""Columns of names, None for none. ``error`` is the class of a rollout's failure."""
_KEPT_CHARS = 16
_PLAIN = re.compile(r"[ -!#-\[\]-~]+")
"""Text that JSON spells as it is, so that a line can be passed over without decoding it."""


class _Message(msgspec.Struct):
    role: Any = ""
    content: Any = None
    tool_calls: Any = None
    reasoning_content: Any = None


class _Head(msgspec.Struct):
    """What the index needs of a row; everything else in its line is skipped without being decoded."""

    example_id: Any = None
    metrics: dict[str, float | None] | None = None
    completion: list[_Message] | str | None = None
    reward: float | None = None
    advantage: float | None = None
    error: Any = None
    stop_condition: str | None = None
    timing: dict[str, Any] | None = None
    token_usage: dict[str, Any] | None = None
    completion_tokens: int | None = None
    sibling: int | None = None
    attempts: int | None = None
    rollout_key: str | None = None
    example_hash: str | None = None


class _Texts(msgspec.Struct):
    prompt: Any = None
    completion: Any = None


_DECODER = msgspec.json.Decoder(_Head)
_TEXTS = msgspec.json.Decoder(_Texts)


class RowIndex:
    """The index of one file. ``metric_names``: what the metrics are called where rows do not say (older versions).

    >>> def best(path):
    ...     index = RowIndex(path)
    ...     index.read()
    ...     return max(range(len(index)), key=index.columns["reward"].__getitem__)
    """

    def __init__(self, path: Path, metric_names: Sequence[str] = ()):
        self.path = path
        self._metric_names = list(metric_names)
        self._lock = threading.RLock()
        self._clear()

    def _clear(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in ("example", "key", *NUMBERS, *NAMES)}
        self.metrics: dict[str, list[float]] = {}
        self.replaced: list[int] = []
        """Rows that a newer one of the same rollout replaces."""
        self.damage: str | None = None
        self.generation = getattr(self, "generation", -1) + 1
        """Changes when the file was written anew and row numbers mean other rows."""
        self._places: list[tuple[int, int]] = []  # start and end of its line
        self._newest: dict[str, int] = {}
        self._end = 0
        self._identity: tuple[int, int] | None = None
        self._size = 0
        self._is_journal: bool | None = None

    def __len__(self) -> int:
        return len(self._places)

    @property
    def is_complete(self) -> bool:
        """Whether everything the file held at the last look was read (an unfinished last line is not waited for)."""
        return self.damage is not None or self._end >= self._size

    @property
    def progress(self) -> float:
        """Share of the file that was read, 0 to 1."""
        return 1.0 if self.is_complete else self._end / self._size

    def read(self, budget_s: float = math.inf) -> None:
        """Take up what the file has gained, for about ``budget_s`` seconds. Raises: ``OSError``."""
        deadline = time.monotonic() + budget_s
        with self._lock:
            stat = os.stat(self.path)
            identity = (stat.st_dev, stat.st_ino)
            if self._identity is not None and (identity != self._identity or stat.st_size < self._end):
                self._clear()
            grown = stat.st_size != self._size or self._identity is None
            self._identity, self._size = identity, stat.st_size
            if self.damage is not None or (not grown and self.is_complete):
                return
            try:
                for ends, bodies in self._writes():
                    start = self._end
                    for end, body in zip(ends, bodies, strict=True):
                        if body:
                            self._places.append((start, end))
                            self._add(body)
                        start = end
                    self._end = start
                    if time.monotonic() > deadline:
                        return
                self._size = self._end  # the rest is an unfinished write
            except JournalError as error:
                self.damage = str(error)

    def row(self, number: int) -> RolloutOutput:
        """One row, read from disk. Raises: ``LookupError``; ``OSError``; ``ValueError`` when it is no row any more."""
        return next(self.rows([number]))

    def rows(self, numbers: Sequence[int]) -> Iterator[RolloutOutput]:
        """The rows of these numbers, in this order. Raises: as ``row``."""
        with open(self.path, "rb") as file:
            for number in numbers:
                yield row_from_disk(self._stored(file, number), self._metric_names)

    def texts(self, numbers: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        """(prompt, completion) of the rows of these numbers, without reading the rest of them. Raises: as ``row``."""
        with open(self.path, "rb") as file:
            for number in numbers:
                line = self._line(file, number)
                try:
                    texts = _TEXTS.decode(line)
                    yield texts.prompt, texts.completion
                except msgspec.DecodeError:
                    row = decode_row(line)
                    yield row.get("prompt"), row.get("completion")

    def search(self, text: str, first: int = 0, budget_s: float = math.inf) -> tuple[list[int], int]:
        """Rows from ``first`` on whose texts hold ``text``, upper and lower case alike, and the row to go on from.

        Stops after about ``budget_s`` seconds; at the end the row to go on from is the number of rows. Raises: as
        ``row``.
        """
        wanted = text.casefold()
        found: list[int] = []
        raw = wanted.encode() if _PLAIN.fullmatch(wanted) else None
        deadline = time.monotonic() + budget_s
        with open(self.path, "rb") as file:
            for number in range(first, len(self)):
                line = self._line(file, number)
                if (raw is None or raw in line.lower()) and wanted in _searched_text(decode_row(line)).casefold():
                    found.append(number)
                if time.monotonic() > deadline:
                    return found, number + 1
        return found, len(self)

    def _stored(self, file: object, number: int) -> dict[str, Any]:
        row = decode_row(self._line(file, number))
        row.pop("crc32", None), row.pop("write_part", None)
        return row

    def _line(self, file: Any, number: int) -> bytes:
        if not 0 <= number < len(self._places):
            raise LookupError(f"{self.path} has no row {number}")
        start, end = self._places[number]
        file.seek(start)
        line: bytes = file.read(end - start)
        return line

    def _writes(self) -> Iterator[tuple[list[int], list[bytes]]]:
        """What follows the last read, in writes that count whole: where their lines end, and the rows on them."""
        if self._is_journal is None:
            with open(self.path, "rb") as file:
                self._is_journal = b'"crc32":' in file.readline()
        if self._is_journal:
            return scan_journal(self.path, self._end, len(self) + 1)
        return self._plain_lines(self._end)

    def _plain_lines(self, start: int) -> Iterator[tuple[list[int], list[bytes]]]:
        with open(self.path, "rb") as file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start += len(line)
                yield [start], [line.strip()]

    def _add(self, body: bytes) -> None:
        try:
            head = _DECODER.decode(body)
            if head.metrics is None and self._metric_names:
                head = _head_of(decode_row(body), self._metric_names)
        except (msgspec.DecodeError, UnicodeError):  # unusual types, lone surrogates
            try:
                head = _head_of(decode_row(body), self._metric_names)
            except ValueError as error:
                self._places.pop()
                raise JournalError(f"{self.path}:{len(self) + 1}: this line is not a row ({error})") from error
        number, columns = len(self) - 1, self.columns
        if head.rollout_key is not None:
            if (older := self._newest.get(head.rollout_key)) is not None:
                self.replaced.append(older)
            self._newest[head.rollout_key] = number
        for name, value in _facts(head).items():
            columns[name].append(value)
        metrics = head.metrics or {}
        for name, value in metrics.items():
            if name not in self.metrics:
                self.metrics[name] = [math.nan] * number
            self.metrics[name].append(math.nan if value is None else value)
        if len(metrics) < len(self.metrics):
            for values in self.metrics.values():
                if len(values) == number:
                    values.append(math.nan)


def _facts(head: _Head) -> dict[str, Any]:
    usage, timing = head.token_usage or {}, head.timing or {}
    turns, chars = _measure(head.completion)
    sampled = usage.get("output_tokens", usage.get("completion_tokens", head.completion_tokens))
    return {
        "example": head.example_id,
        "key": head.example_hash[:_KEPT_CHARS] if head.example_hash else None,
        "reward": _number(head.reward),
        "advantage": _number(head.advantage),
        "turns": turns,
        "input_tokens": _number(usage.get("input_tokens", usage.get("prompt_tokens"))),
        "output_tokens": _number(sampled),
        "chars": chars,
        "total_ms": _number(timing.get("total_ms")),
        "sibling": _number(head.sibling),
        "attempts": _number(head.attempts),
        "error": None if head.error is None else ErrorInfo.of(head.error).get("error") or "error",
        "stop_condition": head.stop_condition,
    }


def _measure(completion: object) -> tuple[int, int]:
    """(turns of the model, characters it wrote) of a completion."""
    if not isinstance(completion, list):
        return (1, len(completion)) if isinstance(completion, str) else (0, 0)
    turns = chars = 0
    for message in completion:
        if message.role == "assistant":
            turns += 1
            content = message.content
            chars += len(content) if isinstance(content, str) else len(message_text({"content": content or ""}))
    return turns, chars


def _head_of(row: Mapping[str, Any], metric_names: Sequence[str]) -> _Head:
    """The head of a row of any version, by the slow way."""
    output = row_from_disk(row, metric_names)
    completion = output["completion"]
    if isinstance(completion, list):
        completion = [_Message(role=field(m, "role"), content=field(m, "content")) for m in completion]
    stop = output["stop_condition"]
    return _Head(
        example_id=output["example_id"],
        metrics=dict(output["metrics"]),
        completion=completion,
        reward=output["reward"],
        advantage=_number(row.get("advantage")),
        error=output["error"],
        stop_condition=None if stop is None else str(stop),
        timing=dict(output["timing"]),
        token_usage=row.get("token_usage") if isinstance(row.get("token_usage"), dict) else None,
        completion_tokens=row.get("completion_tokens"),
        sibling=row.get("sibling"),
        rollout_key=row.get("rollout_key"),
        example_hash=row.get("example_hash"),
    )


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else math.nan


def _searched_text(row: Mapping[str, Any]) -> str:
    """What a reader can see of a row: its conversation, answer and error."""
    pieces: list[str] = []
    for name in ("prompt", "completion", "answer", "error", "info"):
        _collect(row.get(name), pieces)
    return "\n".join(pieces)


def _collect(value: object, pieces: list[str]) -> None:
    if isinstance(value, str):
        if not value.startswith("data:"):
            pieces.append(value)
    elif isinstance(value, Mapping):
        for member in value.values():
            _collect(member, pieces)
    elif isinstance(value, list):
        for member in value:
            _collect(member, pieces)
