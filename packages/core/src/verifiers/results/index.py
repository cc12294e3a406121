"""Index a file of saved rollouts: the byte offsets of each, and the columns for sorting and filtering.

Supports journals and plain JSON lines (runs of other versions, completions of a training run), finished or growing:
``read`` indexes appended lines within a time budget, so that a large file shows its first rollouts quickly. Of a
rollout that was run again the newest counts. Text stays on disk and is read on demand.

Uses some 60 to 100 bytes of memory per rollout, and none for those whose blocks are in a file. Changes no results;
``index_file`` keeps an index beside a large journal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from verifiers.data.messages import field, message_text
from verifiers.errors import JournalError
from verifiers.results.columns import Block, BlocksFile, HashColumn, KeyColumn, NameColumn, NumberColumn
from verifiers.results.outputs import ErrorInfo, RolloutOutput, row_from_disk
from verifiers.runtime.json import decode_row
from verifiers.storage.journal import scan_journal

NUMBERS = (
    "reward",
    "advantage",
    "turns",
    "input_tokens",
    "output_tokens",
    "chars",
    "total_ms",
    "sibling",
    "attempts",
    "trained",
)
"""Numeric columns; an unknown value is NaN."""
NAMES = ("error", "stop_condition", "task")
"""Columns of names; None when absent. ``error`` is the class of a rollout's error."""
INNER_NAMES = ("cause", "served")
"""Columns of names for the statistics: the innermost exception of an error and where it was raised; the names under
which a server answered, one a line: "" = as requested, None = it did not answer."""
_PLAIN = re.compile(r"[ -!#-\[\]-~]+")
"""Text that JSON does not escape, so that a line can be searched without decoding it."""


class _Message(msgspec.Struct):
    role: Any = ""
    content: Any = None
    tool_calls: Any = None
    reasoning_content: Any = None


class _Head(msgspec.Struct):
    """The indexed fields of a saved rollout; the other fields of its line are skipped without being decoded."""

    example_id: Any = None
    metrics: dict[str, float | None] | None = None
    completion: list[_Message] | str | None = None
    reward: float | None = None
    advantage: float | None = None
    error: Any = None
    stop_condition: str | None = None
    task: Any = None
    timing: dict[str, Any] | None = None
    token_usage: dict[str, Any] | None = None
    completion_tokens: int | None = None
    sibling: int | None = None
    attempts: int | None = None
    trained: bool | None = None
    rollout_key: str | None = None
    example_hash: str | None = None
    served_models: list[str] | None = None


class _Texts(msgspec.Struct):
    prompt: Any = None
    completion: Any = None
    answer: Any = None


class _Info(msgspec.Struct):
    info: Any = None


_DECODER = msgspec.json.Decoder(_Head)
_TEXTS = msgspec.json.Decoder(_Texts)
_INFO = msgspec.json.Decoder(_Info)
BLOCK_ROWS = 2**14
"""Rows after which the columns are sealed: their values are then held in smaller types."""
MAX_VALUE_CHARS = 80
"""Length of a value of ``info`` that is no number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """The end of a block of the columns, which is the end of a write."""

    num_rows: int
    """Rows up to there."""
    end: int
    """Bytes of the file up to there."""
    checksum: int
    """The CRC-32 of these bytes, of a journal."""
    num_names: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How many names each column of names has up to there."""


class RowIndex:
    """The index of one file. ``metric_names``: names of the metrics, for older versions without a ``metrics`` field.

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
        self.columns: dict[str, Any] = {name: NumberColumn("d") for name in NUMBERS}
        self.columns |= {name: NameColumn() for name in (*NAMES, *INNER_NAMES)}
        self.columns |= {"example": NumberColumn("q"), "key": HashColumn()}
        self.metrics: dict[str, NumberColumn] = {}
        self.usage: dict[str, NumberColumn] = {}
        """Counts of ``token_usage`` by name, NaN where a rollout has none."""
        self.keys = KeyColumn()
        self.ends = NumberColumn("Q")
        """Byte offset of the end of each line."""
        self.marks: list[Mark] = []
        """The end of each block of the columns."""
        self.failure: JournalError | None = None
        """What stopped the reading: damage of the file, which stays in front of the rows after it."""
        self.generation = getattr(self, "generation", -1) + 1
        """Changes when the file was rewritten, so that row numbers refer to other rollouts."""
        self.end, self.checksum = 0, 0
        """Bytes that were read; of a journal their CRC-32."""
        self.num_kept, self.kept_bytes = 0, 0
        """Blocks that the index beside the journal holds, and the bytes that they take there."""
        self.kept_in: BlocksFile | None = None
        """That index, once it is open."""
        self._identity: tuple[int, int] | None = None
        self._size = 0
        self.is_journal: bool | None = None
        """Whether the lines have checksums; None until the file was read."""

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def replaced(self) -> list[int]:
        """Row numbers that a newer attempt of the same rollout replaces."""
        return self.keys.replaced()

    @property
    def damage(self) -> str | None:
        """The damage of the file as a sentence; None for an intact file."""
        return None if self.failure is None else str(self.failure)

    @property
    def is_complete(self) -> bool:
        """Whether everything was read that the file held at the last ``read``, except an unfinished last line."""
        return self.failure is not None or self.end >= self._size

    @property
    def progress(self) -> float:
        """Fraction of the file that was read, 0 to 1."""
        return 1.0 if self.is_complete else self.end / self._size

    def read(self, budget_s: float = math.inf) -> None:
        """Index appended lines, for about ``budget_s`` seconds. Raises: ``OSError``."""
        deadline = time.monotonic() + budget_s
        with self._lock:
            stat = os.stat(self.path)
            identity = (stat.st_dev, stat.st_ino)
            if self._identity is not None and (identity != self._identity or stat.st_size < self.end):
                self._clear()
            grown = stat.st_size != self._size or self._identity is None
            self._identity, self._size = identity, stat.st_size
            if self.failure is not None or (not grown and self.is_complete):
                return
            try:
                for ends, bodies, checksum in self._writes():
                    for end, body in zip(ends, bodies, strict=True):
                        if body:
                            self._add(body)
                            self.ends.append(end)
                    self.end, self.checksum = ends[-1], checksum
                    if len(self) - (self.marks[-1].num_rows if self.marks else 0) >= BLOCK_ROWS:
                        self.seal()
                    if time.monotonic() > deadline:
                        return
                self._size = self.end  # the rest is an unfinished write
            except JournalError as error:
                self.failure = error

    def seal(self) -> None:
        """Hold what was read since the last block in a block of its own."""
        if len(self) > (self.marks[-1].num_rows if self.marks else 0):
            for column in self._number_columns().values():
                column.seal()
            names = {name: len(self.columns[name].names) for name in (*NAMES, *INNER_NAMES)}
            self.marks.append(Mark(len(self), self.end, self.checksum, names))

    def new_names(self, number: int) -> dict[str, list[str]]:
        """The names of each column of names that no block before this one has."""
        before = self.marks[number - 1].num_names if number else {}
        ends = self.marks[number].num_names
        return {name: self.columns[name].names[before.get(name, 0) : end] for name, end in ends.items()}

    def blocks(self, number: int) -> dict[str, Block]:
        """One block of each column, to be kept.

        Raises: ``TypeError`` for a file of another program, whose rows have no keys or whose examples no numbers.
        """
        is_ours = isinstance(self.columns["example"], NumberColumn) and not self.columns["key"].others
        if not is_ours or self.keys.first_missing is not None:
            raise TypeError(f"{self.path} was not written by this library")
        return {name: column.blocks[number] for name, column in self._number_columns().items()}

    def replace_blocks(self, number: int, blocks: Mapping[str, Block]) -> None:
        """Hold equal blocks instead: those that are in a file."""
        columns = self._number_columns()
        for name, block in blocks.items():
            columns[name].blocks[number] = block

    def restore(
        self, marks: Sequence[Mark], names: Mapping[str, list[str]], blocks: Sequence[Mapping[str, Block]]
    ) -> None:
        """Take over what ``blocks`` returned for each of the first blocks of a journal, and all ``names`` in them.

        Raises: ``LookupError`` when a column is missing.
        """
        self.marks, self.end, self.checksum = list(marks), marks[-1].end, marks[-1].checksum
        self.is_journal = True
        for group, prefix in ((self.metrics, "metrics."), (self.usage, "usage.")):
            for name in dict.fromkeys(name for block in blocks for name in block if name.startswith(prefix)):
                group[name.removeprefix(prefix)] = NumberColumn("d")
        for name, column in self._number_columns().items():
            if name.startswith(("metrics.", "usage.")):
                column.set_blocks([b.get(name, nan) for b, nan in zip(blocks, self._unknown(), strict=True)])
            else:
                column.set_blocks([block[name] for block in blocks])
        for name in (*NAMES, *INNER_NAMES):
            self.columns[name].set_names(names[name])

    def _unknown(self) -> list[np.ndarray]:
        """The blocks of a column whose every value is unknown."""
        ends = [0, *(mark.num_rows for mark in self.marks)]
        return [np.broadcast_to(np.array([math.nan]), end - start) for start, end in itertools.pairwise(ends)]

    def _number_columns(self) -> dict[str, NumberColumn]:
        """All that is indexed, by the names under which it is kept."""
        hashes, (high, low) = self.columns["key"], self.keys.halves
        columns = {"ends": self.ends, "digits": hashes.digits, "numbers": hashes.numbers, "high": high, "low": low}
        columns |= {name: self.columns[name] for name in NUMBERS}
        columns |= {name: self.columns[name].codes for name in (*NAMES, *INNER_NAMES)}
        columns |= {f"metrics.{name}": values for name, values in self.metrics.items()}
        columns |= {f"usage.{name}": values for name, values in self.usage.items()}
        if isinstance(example := self.columns["example"], NumberColumn):
            columns["example"] = example
        return columns

    def newest(self, key: str) -> int | None:
        """The row number of the newest attempt of a rollout, by its ``rollout_key``."""
        return self.keys.newest(key)

    def stored(self, number: int) -> dict[str, Any]:
        """One line as it is on disk. Raises: as ``row``."""
        with open(self.path, "rb") as file:
            return self._stored(file, number)

    def row(self, number: int) -> RolloutOutput:
        """One saved rollout, read from disk. Raises: ``LookupError``; ``OSError``; ``ValueError``: file changed."""
        return next(self.rows([number]))

    def rows(self, numbers: Iterable[int]) -> Iterator[RolloutOutput]:
        """The saved rollouts with these row numbers, in this order. Raises: as ``row``."""
        with open(self.path, "rb") as file:
            for number in numbers:
                yield row_from_disk(self._stored(file, number), self._metric_names)

    def texts(self, numbers: Sequence[int]) -> Iterator[tuple[Any, Any, Any]]:
        """(prompt, completion, answer) of these row numbers, without decoding other fields. Raises: as ``row``."""
        with open(self.path, "rb") as file:
            for number in numbers:
                line = self._line(file, number)
                try:
                    texts = _TEXTS.decode(line)
                    yield texts.prompt, texts.completion, texts.answer
                except msgspec.DecodeError:
                    row = decode_row(line)
                    yield row.get("prompt"), row.get("completion"), row.get("answer")

    def info_names(self) -> list[str]:
        """The keys of the first rollout's ``info`` that hold one value, as ``info.<key>``."""
        if not len(self):
            return []
        with open(self.path, "rb") as file:
            info = _info_of(self._line(file, 0))
        return [f"info.{key}" for key, value in info.items() if isinstance(value, str | int | float | bool)]

    def info_values(self, name: str, first: int = 0, budget_s: float = math.inf) -> tuple[list[Any], int]:
        """(the values of ``info.<key>`` from row ``first`` on, the row number to continue from).

        Numbers stay numbers, other values become text; None where there is none. Stops after about ``budget_s``
        seconds. Raises: as ``row``; ``ValueError`` for a name that does not begin with ``info.``.
        """
        if not name.startswith("info."):
            raise ValueError(f"{name!r} is not a key of info; write info.KEY")
        values: list[Any] = []
        deadline = time.monotonic() + budget_s
        with open(self.path, "rb") as file:
            for number in range(first, len(self)):
                info = _info_of(self._line(file, number))
                values.append(_plain_value(info.get(name.removeprefix("info."))))
                if time.monotonic() > deadline:
                    return values, number + 1
        return values, len(self)

    def search(self, text: str, first: int = 0, budget_s: float = math.inf) -> tuple[list[int], int]:
        """(row numbers from ``first`` on whose texts contain ``text``, the row number to continue from).

        Ignores case. Stops after about ``budget_s`` seconds; at the end of the file the second value is the number of
        rows. Raises: as ``row``.
        """
        folded = text.casefold()
        matches: list[int] = []
        raw = folded.encode() if _PLAIN.fullmatch(folded) else None
        deadline = time.monotonic() + budget_s
        with open(self.path, "rb") as file:
            for number in range(first, len(self)):
                line = self._line(file, number)
                if (raw is None or raw in line.lower()) and folded in _searched_text(decode_row(line)).casefold():
                    matches.append(number)
                if time.monotonic() > deadline:
                    return matches, number + 1
        return matches, len(self)

    def _stored(self, file: IO[bytes], number: int) -> dict[str, Any]:
        row = decode_row(self._line(file, number))
        row.pop("crc32", None), row.pop("write_part", None)
        return row

    def _line(self, file: IO[bytes], number: int) -> bytes:
        if not 0 <= number < len(self):
            raise LookupError(f"{self.path} has no row {number}")
        start = self.ends[number - 1] if number else 0  # an empty line before this one counts to it
        file.seek(start)
        line: bytes = file.read(self.ends[number] - start)
        return line

    def _writes(self) -> Iterator[tuple[list[int], list[bytes], int]]:
        """The complete writes after the last read: end offsets of their lines, the lines' content, the checksum."""
        if self.is_journal is None:
            with open(self.path, "rb") as file:
                first = file.readline()
            if not first.endswith(b"\n"):  # nothing was written yet
                return iter(())
            self.is_journal = b'"crc32":' in first
        if self.is_journal:
            return scan_journal(self.path, self.end, len(self) + 1, self.checksum)
        return self._plain_lines(self.end)

    def _plain_lines(self, start: int) -> Iterator[tuple[list[int], list[bytes], int]]:
        with open(self.path, "rb") as file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start += len(line)
                yield [start], [line.strip()], 0

    def _add(self, body: bytes) -> None:
        try:
            head: _Head | None = _DECODER.decode(body)
        except (msgspec.DecodeError, UnicodeError):  # unusual types, lone surrogates
            head = None
        if head is None or (head.metrics is None and (self._metric_names or head.completion is None)):
            try:
                head = _head_of(decode_row(body), self._metric_names)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise JournalError(
                    f"{self.path}:{len(self) + 1}: this line is not a saved rollout ({type(error).__name__}: {error})"
                ) from error
        number, columns = len(self), self.columns
        usage, timing = head.token_usage or {}, head.timing or {}
        turns, chars = _measure(head.completion)
        sampled = usage.get("output_tokens", usage.get("completion_tokens", head.completion_tokens))
        try:
            columns["example"].append(head.example_id)
        except (TypeError, OverflowError):  # ids of other programs may be texts
            columns["example"] = [*columns["example"], head.example_id]
        columns["key"].append(head.example_hash)
        columns["reward"].append(_number(head.reward))
        columns["advantage"].append(_number(head.advantage))
        columns["turns"].append(turns)
        columns["input_tokens"].append(_number(usage.get("input_tokens", usage.get("prompt_tokens"))))
        columns["output_tokens"].append(_number(sampled))
        columns["chars"].append(chars)
        columns["total_ms"].append(_number(timing.get("total_ms")))
        columns["sibling"].append(_number(head.sibling))
        columns["attempts"].append(_number(head.attempts))
        columns["trained"].append(_number(head.trained))
        failure = None if head.error is None else ErrorInfo.of(head.error)
        columns["error"].append(None if failure is None else failure.get("error") or "unknown")
        columns["cause"].append(None if failure is None else f"{failure.cause} in {failure.get('where')}")
        columns["stop_condition"].append(head.stop_condition)
        columns["task"].append(head.task if type(head.task) is str else None)
        columns["served"].append("\n".join(head.served_models or ()) if head.completion else None)
        self._append(self.metrics, head.metrics or {}, number)
        self._append(self.usage, usage, number)
        self.keys.append(head.rollout_key)

    def _append(self, columns: dict[str, NumberColumn], values: Mapping[str, Any], number: int) -> None:
        """Add the values of row ``number`` to the columns; NaN where the row, or an earlier one, has none."""
        for name, value in values.items():
            if name not in columns:
                column = NumberColumn("d")
                column.set_blocks(self._unknown())
                for _ in range(number - len(column)):
                    column.append(math.nan)
                columns[name] = column
            columns[name].append(_number(value))
        if len(values) < len(columns):
            for column in columns.values():
                if len(column) == number:
                    column.append(math.nan)


def _measure(completion: object) -> tuple[int, int]:
    """(model turns, characters of the model's text) of a completion."""
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
    """The head of a saved rollout of any version, by complete decoding."""
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
        task=row.get("task"),
        timing=dict(output["timing"]),
        token_usage=row.get("token_usage") if isinstance(row.get("token_usage"), dict) else None,
        completion_tokens=row.get("completion_tokens"),
        sibling=row.get("sibling"),
        trained=row.get("trained"),
        rollout_key=_text(row.get("rollout_key")),
        example_hash=_text(row.get("example_hash")),
        served_models=_texts(row.get("served_models")),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: object) -> list[str] | None:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else None


def _info_of(line: bytes) -> Mapping[str, Any]:
    try:
        info = _INFO.decode(line).info
    except (msgspec.DecodeError, UnicodeError):  # lone surrogates
        info = decode_row(line).get("info")
    if isinstance(info, str):  # runs of other versions
        with contextlib.suppress(ValueError):
            info = json.loads(info)
    return info if isinstance(info, Mapping) else {}


def _plain_value(value: object) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    return (value if isinstance(value, str) else json.dumps(value))[:MAX_VALUE_CHARS]


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def _searched_text(row: Mapping[str, Any]) -> str:
    """The searchable text of a saved rollout: its conversation, answer, error and info."""
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
