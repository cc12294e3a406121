"""A search for replies that are paid without being right: small programs over the question, changed
step by step.

A program joins pieces (parts of the question, answers of other rows, short constants) and writes
them in some format. It is the same for every row and never sees the row's answer. The search keeps
a change when the mean reward of a few rows does not fall.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from verifiers.checks.audit.answers import Format, question_of
from verifiers.checks.audit.panel import CHANGES, CONSTANTS, Answers, NonSolution, data_of
from verifiers.checks.audit.playing import Turn

SEPARATORS = ("", " ", ", ", "\n", " or ", " = ", " and ", "; ", "/", " + ")
FORMATS = ("format", "format twice", "plain", "format then plain", "plain then format")
MAX_PIECES = 4


@dataclass(frozen=True, slots=True)
class Program:
    """A reply as a rule: ``pieces`` joined by ``separator``, written in ``form``."""

    pieces: tuple[str, ...]
    separator: str = " "
    form: str = "format"

    @property
    def name(self) -> str:
        joined = f", joined by {self.separator!r}" if len(self.pieces) > 1 else ""
        return f"search: {' + '.join(self.pieces)}{joined}, {self.form}"


def as_non_solution(program: Program, write: Format, answers: Answers) -> NonSolution:
    """The policy of a program."""

    def slot(turn: Turn) -> str:
        return program.separator.join(_piece(piece, turn, answers) for piece in program.pieces)

    def reply(turn: Turn) -> str:
        text = slot(turn)
        written = write(turn, text)
        return {
            "format": written,
            "format twice": f"{written}\n{written}",
            "plain": text,
            "format then plain": f"{written}\n{text}",
            "plain then format": f"{text}\n{written}",
        }[program.form]

    return NonSolution(program.name, "search", reply, slot)


async def climb(
    measure: Callable[[NonSolution], Awaitable[float]],
    write: Format,
    answers: Answers,
    changes: Sequence[str],
    steps: int,
    seed: int,
) -> list[NonSolution]:
    """The best programs of ``steps`` measurements, best first; ``measure`` returns a mean reward.

    ``changes``: the names of ``CHANGES`` that a program may use, without those that are the task
    itself.
    """
    rng = random.Random(seed)
    scored: dict[Program, float] = {}
    best: Program | None = None
    for step in range(steps):
        if step < steps // 3 or best is None:
            program = _random(rng, answers, changes)
        else:
            program = _changed(best, rng, answers, changes)
        if program in scored:
            continue
        scored[program] = await measure(as_non_solution(program, write, answers))
        if best is None or scored[program] >= scored[best]:
            best = program
    ranked = sorted(scored, key=lambda program: scored[program], reverse=True)
    # of equal rewards the first that was found
    distinct = {scored[program]: program for program in reversed(ranked)}
    best_first = [distinct[reward] for reward in sorted(distinct, reverse=True)[:3]]
    return [as_non_solution(program, write, answers) for program in best_first]


def _piece(piece: str, turn: Turn, answers: Answers) -> str:
    kind, _, name = piece.partition(" ")
    rng = random.Random(turn.example.hash)
    if kind == "question":
        return CHANGES[name](question_of(turn.example), rng)
    if kind == "data":
        return CHANGES[name](data_of(turn.heard), rng)
    if kind == "answer":
        index = int(name)
        return answers.texts[index] if index < len(answers.texts) else ""
    return name


def _random_piece(rng: random.Random, answers: Answers, changes: Sequence[str]) -> str:
    kind = rng.choice(("question", "data", "data", "answer", "constant"))
    if kind in ("question", "data"):
        return f"{kind} {rng.choice(changes)}"
    if kind == "answer" and answers.texts:
        return f"answer {rng.randrange(min(8, len(answers.texts)))}"
    return f"constant {rng.choice(CONSTANTS)}"


def _random(rng: random.Random, answers: Answers, changes: Sequence[str]) -> Program:
    pieces = tuple(_random_piece(rng, answers, changes) for _ in range(rng.choice((1, 1, 2, 3))))
    return Program(pieces, rng.choice(SEPARATORS), rng.choice(FORMATS))


def _changed(
    program: Program, rng: random.Random, answers: Answers, changes: Sequence[str]
) -> Program:
    pieces = list(program.pieces)
    match rng.randrange(5):
        case 0 if len(pieces) < MAX_PIECES:
            pieces.insert(rng.randrange(len(pieces) + 1), _random_piece(rng, answers, changes))
        case 1 if len(pieces) > 1:
            pieces.pop(rng.randrange(len(pieces)))
        case 2:
            return replace(program, separator=rng.choice(SEPARATORS))
        case 3:
            return replace(program, form=rng.choice(FORMATS))
        case _:
            pieces[rng.randrange(len(pieces))] = _random_piece(rng, answers, changes)
    return replace(program, pieces=tuple(pieces))
