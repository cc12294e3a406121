"""The rows of a table as questions with answers, for ``vf-init --from``.

What can be seen is not asked: the two columns by their names, several right answers by their
separator, decimal commas by the numbers. A row that cannot be used is left out and counted, with
its reason. Cells become the rows of a JSONL file and nothing else: no cell and no name of a column
gets into code, settings or instructions.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verifiers.data.tables import MAX_ROWS, TextTable, read_table
from verifiers.errors import ConfigError
from verifiers.parsers import XMLParser

QUESTIONS = (
    "question problem prompt instruction input query task frage aufgabe pregunta domanda".split()
)
"""Names of a column of questions, the more usual first."""
ANSWERS = (
    "answer solution target label expected_answer expected ground_truth gold reference"
    " correct_answer answers output response antwort lösung réponse respuesta risposta".split()
)
SEPARATORS = ("|", ";")
MAX_CELL_CHARS = 100_000
MAX_ANSWER_CHARS = 100
"""Longest of several answers that a separator is seen between: a longer text only contains it."""
MAX_HELD_OUT = 200
NAMED_ROWS = 5
NAMED_COLUMNS = 30

_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:[.,' \u00a0\u202f][0-9]{3})+|[0-9]+)(?:[.,][0-9]+)?")
_TAGS = XMLParser(["answer"])
_BRACKETS = ("()", "[]", "{}")


@dataclass(slots=True)
class Questions:
    """What became of a table."""

    question_column: str
    answer_column: str
    encoding: str
    separator: str | None = None
    similar_columns: list[str] = field(default_factory=list)
    """Columns that are not used though they have a usual name too."""
    decimal_mark: str = ""
    """``","`` or ``"."``; empty when no answer is a number, or when the numbers disagree."""
    is_mark_mixed: bool = False
    """Whether they disagree, so that numbers are compared as texts."""
    num_read: int = 0
    answers: dict[str, list[str]] = field(default_factory=dict)
    """Question -> its right answers."""
    excluded: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Reason -> the numbers of the rows that are left out, from 1 below the header."""

    @property
    def num_held_out(self) -> int:
        """Rows for evaluation: a fifth."""
        return max(1, min(MAX_HELD_OUT, len(self.answers) // 5))

    @property
    def num_several(self) -> int:
        """Questions with several right answers."""
        return sum(len(answers) > 1 for answers in self.answers.values())

    @property
    def num_long(self) -> int:
        """Questions whose right answers are all longer than ``MAX_ANSWER_CHARS``."""
        return sum(min(map(len, answers)) > MAX_ANSWER_CHARS for answers in self.answers.values())

    def jsonl(self) -> str:
        """The rows of the package, in an order that does not depend on that of the table: a table
        is often sorted, and the first rows are held out."""
        order = sorted(self.answers, key=lambda text: hashlib.sha256(text.encode()).digest())
        rows = (
            {
                "question": question,
                "answer": self.answers[question][0],
                "info": {"answers": self.answers[question]},
            }
            for question in order
        )
        return "".join(json.dumps(row) + "\n" for row in rows)

    def facts(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "question_column": self.question_column,
            "answer_column": self.answer_column,
            "encoding": self.encoding,
            "separator": self.separator,
            "decimal_mark": self.decimal_mark or None,
            "num_read": self.num_read,
            "num_rows": len(self.answers),
            "num_held_out": self.num_held_out,
            "left_out": {reason: len(rows) for reason, rows in self.excluded.items()},
        }

    def sentences(self, *, has_judge: bool) -> list[str]:
        """For people."""
        lines = [
            f"{len(self.answers)} of {self.num_read} rows: the question is {_short(self.question_column)},"
            f" the answer {_short(self.answer_column)}; {self.num_held_out} held out for evaluation"
        ]
        if self.similar_columns:
            names = ", ".join(map(_short, self.similar_columns[:NAMED_COLUMNS]))
            lines.append(f"not used: {names}; choose with --question-column, --answer-column")
        for reason, rows in self.excluded.items():
            more = ", …" if len(rows) > NAMED_ROWS else ""
            numbers = ", ".join(map(str, rows[:NAMED_ROWS]))
            lines.append(f"left out: {len(rows)} with {reason} (row {numbers}{more})")
        if self.encoding == "cp1252":
            lines.append("read as Windows-1252, as it is not UTF-8")
        if self.separator:
            lines.append(
                f"several right answers in {self.num_several} rows, separated by {self.separator!r};"
                " if that is a part of the answers: --answer-separator none"
            )
        if self.decimal_mark:
            sign = {",": "comma", ".": "point"}[self.decimal_mark]
            lines.append(f"answers that are numbers are compared as numbers, with a decimal {sign}")
        if self.is_mark_mixed:
            lines.append(
                "some numbers have a decimal comma and others a decimal point, so all are compared"
                " as text: write them in one way, or set DECIMAL_MARK in rewards.py"
            )
        if self.num_long and not has_judge:
            lines.append(
                f"{self.num_long} rows have an answer of more than {MAX_ANSWER_CHARS} characters,"
                " which a model seldom meets word for word: --judge"
            )
        return lines


def read_questions(
    path: Path, question_column: str | None, answer_column: str | None, separator: str | None
) -> Questions:
    """The questions of a table. ``separator``: between right answers; None looks for it.

    *Raises* ``DatasetError`` for a file that cannot be read, ``ConfigError`` for columns that
    cannot be seen and a table with fewer than two usable rows.
    """
    table = read_table(path)
    names = choose_columns(table.columns, path, question_column, answer_column)
    usual = {*QUESTIONS, *ANSWERS}
    similar = [name for name in table.columns if _folded(name) in usual and name not in names]
    questions = Questions(*names, encoding=table.encoding, similar_columns=similar)
    pairs = _usable_pairs(table, path, questions)
    texts = [answer for _, _, answers in pairs for answer in answers]
    questions.separator = _separator_of(texts) if separator is None else separator or None
    if questions.separator is not None:
        pairs = [
            (number, question, _divided(answers, questions.separator))
            for number, question, answers in pairs
        ]
    _keep_consistent(pairs, questions)
    if len(questions.answers) < 2:
        reasons = ", ".join(f"{len(rows)} {why}" for why, rows in questions.excluded.items())
        raise ConfigError(
            f"{str(path)!r} has {len(questions.answers)} usable rows of {questions.num_read}"
            f" ({reasons or 'it is empty'}); at least 2 are needed, for training and for evaluation",
            path=str(path),
        )
    usable = [answer for answers in questions.answers.values() for answer in answers]
    mark = decimal_mark_of(usable, prefer_comma=table.delimiter == ";")
    questions.decimal_mark, questions.is_mark_mixed = mark or "", mark is None
    return questions


def choose_columns(
    columns: Sequence[str], path: Path, question_column: str | None, answer_column: str | None
) -> tuple[str, str]:
    """The columns of the question and of the answer: as named, else by their usual names.

    *Raises* ``ConfigError`` that names the columns and the flags.

    >>> choose_columns(["id", "Problem", "Final answer", "Answer"], Path("t.csv"), None, None)
    ('Problem', 'Answer')
    """
    roles = (
        ("--question-column", question_column, QUESTIONS),
        ("--answer-column", answer_column, ANSWERS),
    )
    pair, unseen = [], []
    for flag, name, usual in roles:
        by_name = {_folded(column): column for column in reversed(columns)}
        seen = next((by_name[word] for word in usual if word in by_name), None)
        column = seen
        if name is not None:
            column = name if name in columns else by_name.get(_folded(name))
        if column is None or columns.count(column) > 1:
            unseen.append(flag)
        else:
            pair.append(column)
    listed = ", ".join(map(_short, columns[:NAMED_COLUMNS])) or "none"
    more = f" and {len(columns) - NAMED_COLUMNS} more" if len(columns) > NAMED_COLUMNS else ""
    if unseen:
        raise ConfigError(
            f"{str(path)!r} has the columns {listed}{more}: choose with"
            f" {' and '.join(f'{flag} NAME' for flag in unseen)}, a name that is there once",
            path=str(path),
        )
    if pair[0] == pair[1]:
        raise ConfigError(
            f"--question-column and --answer-column are both {_short(pair[0])}; {str(path)!r} has"
            f" the columns {listed}{more}",
            path=str(path),
        )
    return pair[0], pair[1]


def decimal_mark_of(answers: Iterable[str], *, prefer_comma: bool = False) -> str | None:
    """The decimal mark of the answers that are numbers, ``""`` without any, None if they disagree.

    A code such as 007, whose zeros count, is no number and says nothing about the others.

    ``prefer_comma``: what 1,234 means when no other number tells.

    >>> decimal_mark_of(["3,5", "1.234,5", "Paris"]), decimal_mark_of(["1,234", "12"])
    (',', '.')
    >>> decimal_mark_of(["007", "3,5"]), decimal_mark_of(["007"]), decimal_mark_of(["3,5", "2.75"])
    (',', '', None)
    """
    marks: set[str] = set()
    is_any = is_unclear = False
    for answer in answers:
        text = answer.strip().replace("\u2212", "-")
        if not _NUMBER.fullmatch(text):
            continue
        digits = text.lstrip("+-")
        if re.match(r"0[0-9]", digits):
            continue
        is_any = True
        if fraction := re.search(r"([.,])([0-9]+)$", digits):
            mark, before = fraction[1], digits[: fraction.start()]
            if len(fraction[2]) != 3 or before == "0" or len(re.split("[.,' ]", before)[0]) > 3:
                marks.add(mark)
            elif set(before) & set(".,' \u00a0\u202f") - {mark}:
                marks.add(mark)  # 1.234,567
            elif mark in before:
                marks.add("," if mark == "." else ".")  # 1.234.567
            else:
                is_unclear = True
    if not is_any:
        return ""
    if len(marks) > 1:
        return None
    if marks:
        return marks.pop()
    return "," if is_unclear and prefer_comma else "."


def normalised(answer: str) -> str:
    """As the package compares texts: any case, any white space."""
    return " ".join(unicodedata.normalize("NFC", answer).casefold().split())


def _usable_pairs(
    table: TextTable, path: Path, questions: Questions
) -> list[tuple[int, str, list[str]]]:
    """(row, question, answers) of the rows that have both; the others are counted."""
    names = (questions.question_column, questions.answer_column)
    pairs: list[tuple[int, str, list[str]]] = []
    for number, cells in enumerate(table.records(names), 1):
        if number > MAX_ROWS:
            raise ConfigError(
                f"{str(path)!r} has more than {MAX_ROWS:,} rows; divide it", path=path
            )
        questions.num_read = number
        question, answers = ("", [""]) if cells is None else (_text(cells[0]), _texts(cells[1]))
        if cells is None:
            reason = "more cells than the header"
        elif question is None or answers is None:
            reason = "a cell that is no text"
        elif not question:
            reason = "an empty question"
        elif not answers:
            reason = "an empty answer"
        elif max(map(len, (question, *answers))) > MAX_CELL_CHARS:
            reason = f"a cell of more than {MAX_CELL_CHARS:,} characters"
        elif not all(map(_fits_tags, answers)):
            reason = "an answer that <answer> tags cannot hold"
        else:
            pairs.append((number, question, answers))
            continue
        questions.excluded[reason].append(number)
    return pairs


def _keep_consistent(pairs: Sequence[tuple[int, str, list[str]]], questions: Questions) -> None:
    """Keep every question once; one that has different answers is left out."""
    rows: dict[str, list[tuple[int, str, list[str]]]] = defaultdict(list)
    for pair in pairs:
        rows[" ".join(pair[1].split())].append(pair)
    for same in rows.values():
        numbers = [number for number, _, _ in same]
        if len({frozenset(map(normalised, answers)) for _, _, answers in same}) > 1:
            questions.excluded["a contradiction: the same question, another answer"] += numbers
            continue
        _, question, answers = same[0]
        questions.answers[question] = answers
        if numbers[1:]:
            questions.excluded["a duplicate of another row"] += numbers[1:]


def _separator_of(answers: Sequence[str]) -> str | None:
    """The mark between right answers, when it is that wherever it occurs."""
    for separator in SEPARATORS:
        cells = [answer for answer in answers if separator in answer]
        if cells and all(_is_list(cell.split(separator)) for cell in cells):
            return separator
    return None


def _is_list(parts: Sequence[str]) -> bool:
    names = {normalised(part) for part in parts}
    return "" not in names and all(
        len(part) <= MAX_ANSWER_CHARS
        and all(part.count(pair[0]) == part.count(pair[1]) for pair in _BRACKETS)
        for part in parts
    )


def _divided(answers: Sequence[str], separator: str) -> list[str]:
    by_name: dict[str, str] = {}
    for part in (part.strip() for answer in answers for part in answer.split(separator)):
        by_name.setdefault(normalised(part), part)
    return [part for name, part in by_name.items() if name] or list(answers)


def _texts(cell: object) -> list[str] | None:
    """The right answers of a cell, which may be a list; None for one that is no text."""
    if not isinstance(cell, list | tuple):
        cell = [cell]
    texts = [_text(member) for member in cell]
    if None in texts:
        return None
    return list(dict.fromkeys(text for text in texts if text))


def _text(cell: object) -> str | None:
    """A cell as text; None for one that is neither text nor a number nor a date."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, float):
        return f"{cell:.15g}" if math.isfinite(cell) else ""
    if isinstance(cell, datetime.datetime):
        at_midnight = cell.time() == datetime.time()
        return cell.date().isoformat() if at_midnight else cell.isoformat(" ")
    if isinstance(cell, decimal.Decimal):
        return f"{cell:f}" if cell.is_finite() else ""
    if not isinstance(cell, str):
        return str(cell) if isinstance(cell, int | datetime.date | datetime.time) else None
    try:
        cell.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which no request can carry
        return None
    return cell.strip()


def _fits_tags(answer: str) -> bool:
    """Whether a reply can hold it: no tag of an answer or of reasoning is a part of it."""
    reply = [{"role": "assistant", "content": f"It is <answer> {answer} </answer>"}]
    return bool(_TAGS.parse_answer(reply) == answer)


def _folded(column: str) -> str:
    return re.sub(r"[\W_]+", "_", column.casefold()).strip("_")


def _short(name: str) -> str:
    return repr(name if len(name) <= 60 else f"{name[:60]}…")
