"""The rules of Wordle as pure functions: marks of a guess, validity of a guess, and the state of a
game.

Marks follow the original game: green first, then yellow from left to right while the secret has
unmatched copies of the letter. Word lists are in ``words``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

GREEN, YELLOW, ABSENT = "G", "Y", "X"

_BRACKETED = re.compile(r"\[\s*([A-Za-z]+)\s*\]")
_BARE = re.compile(r"[A-Za-z]+")
_SPACED = re.compile(r"[A-Za-z](?: [A-Za-z])+")


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a game, for example ``Rules(5, 6, False, frozenset({"crane"}))``."""

    word_length: int
    max_guesses: int
    """Replies of the model, including those without a valid guess."""
    hard_mode: bool
    words: Collection[str]
    """Valid guesses in lower case; a set."""


@dataclass(frozen=True, slots=True)
class Move:
    """A reply: ``Move("crane", "XGYXX")``, or ``Move(problem="'zzzzz' is not in the word
    list.")``."""

    word: str = ""
    marks: str = ""
    """One of G, Y, X per letter; empty for an invalid reply."""
    problem: str = ""
    """Why the reply is invalid, as shown to the player."""


@dataclass(frozen=True, slots=True)
class Game:
    """A game so far: its moves in order, and the secret word."""

    answer: str
    moves: tuple[Move, ...]

    @property
    def is_solved(self) -> bool:
        return any(move.word == self.answer for move in self.moves)

    @property
    def num_invalid(self) -> int:
        return sum(bool(move.problem) for move in self.moves)

    @property
    def last_marks(self) -> str:
        """The marks of the last valid guess; empty without a valid guess."""
        return next((move.marks for move in reversed(self.moves) if move.marks), "")


def mark(guess: str, answer: str) -> str:
    """One of G (right place), Y (elsewhere in the word), X per letter of ``guess``; both words of
    equal length.

    A letter receives at most as many G and Y marks as the answer contains it: G first, then Y from
    left to right.

    >>> mark("geese", "eerie"), mark("crane", "crane")
    ('XGYXG', 'GGGGG')
    """
    marks = [ABSENT] * len(guess)
    unmatched: dict[str, int] = {}
    for i, letter in enumerate(answer):
        if guess[i] == letter:
            marks[i] = GREEN
        else:
            unmatched[letter] = unmatched.get(letter, 0) + 1
    for i, letter in enumerate(guess):
        if marks[i] is ABSENT and unmatched.get(letter):
            marks[i] = YELLOW
            unmatched[letter] -= 1
    return "".join(marks)


def read_guess(text: str | None) -> str | None:
    """The guess in the content of a ``<guess>`` tag, in lower case: ``[crane]``, or the bare word
    ``crane``.

    Text around the brackets is ignored, as are quotes, marks and spaces between the letters of a bare
    word; two different words in brackets, or unbracketed text of more than one word, give None.

    >>> read_guess("[CRANE]"), read_guess(" crane "), read_guess("I say [crane]!"), read_guess("[a] or [b]")
    ('crane', 'crane', 'crane', None)
    """
    if text is None:
        return None
    bracketed = {word.lower() for word in _BRACKETED.findall(text)}
    if bracketed:
        return bracketed.pop() if len(bracketed) == 1 else None
    bare = text.strip().strip("\"'`*.!").strip()
    letters = bare.replace(" ", "") if _SPACED.fullmatch(bare) else bare  # as the marks are shown
    return letters.lower() if _BARE.fullmatch(letters) else None


def hint_ignored(guess: str, moves: Iterable[Move]) -> str | None:
    """The first hard-mode violation of a guess; None when it is consistent with all earlier marks.

    A green letter must keep its position; every green or yellow letter must occur at least as often
    as it was marked in one guess.

    >>> hint_ignored("point", [Move("crane", "XXXYX")])
    >>> hint_ignored("ghost", [Move("crane", "XXXYX")])
    'the guess must contain N'
    """
    for move in moves:
        counts: dict[str, int] = {}
        for i, (letter, color) in enumerate(zip(move.word, move.marks, strict=True)):
            if color == GREEN and guess[i] != letter:
                return f"letter {i + 1} must be {letter.upper()}"
            if color != ABSENT:
                counts[letter] = counts.get(letter, 0) + 1
        for letter, count in counts.items():
            if guess.count(letter) < count:
                return f"the guess must contain {letter.upper()}" + (
                    f" {count} times" if count > 1 else ""
                )
    return None


def judge(content: str | None, answer: str, moves: Sequence[Move], rules: Rules) -> Move:
    """Evaluate the content of a ``<guess>`` tag (None without a tag) as the move
    after ``moves``."""
    guess = read_guess(content)
    if guess is None:
        return Move(problem="Give exactly one word, in square brackets inside <guess> tags.")
    if len(guess) != rules.word_length:
        short = guess if len(guess) <= 20 else f"{guess[:20]}..."
        return Move(
            problem=f"'{short}' has {len(guess)} letters; the word has {rules.word_length}."
        )
    if guess not in rules.words:
        return Move(problem=f"'{guess}' is not in the word list.")
    if (
        rules.hard_mode
        and (ignored := hint_ignored(guess, (move for move in moves if move.marks))) is not None
    ):
        return Move(problem=f"Hard mode: {ignored}.")
    return Move(guess, mark(guess, answer))


def is_over(answer: str, moves: Sequence[Move], rules: Rules) -> bool:
    """Whether the word was guessed or no guess is left."""
    return len(moves) >= rules.max_guesses or (bool(moves) and moves[-1].word == answer)


def replay(contents: Iterable[str | None], answer: str, rules: Rules) -> Game:
    """The game of these contents of ``<guess>`` tags, one per reply; contents after its end are
    ignored."""
    moves: list[Move] = []
    for content in contents:
        if is_over(answer, moves, rules):
            break
        moves.append(judge(content, answer, moves, rules))
    return Game(answer, tuple(moves))


def describe(answer: str, moves: Sequence[Move], rules: Rules) -> str:
    """The message after the last move: the letters over their marks (or the problem), and the
    remaining guesses."""
    move, remaining = moves[-1], rules.max_guesses - len(moves)
    feedback = move.problem or f"{' '.join(move.word.upper())}\n{' '.join(move.marks)}"
    if move.word == answer:
        return f"{feedback}\n\nSolved in {len(moves)} of {rules.max_guesses} guesses."
    if not remaining:
        return f"{feedback}\n\nNo guesses are left. The word was {answer.upper()}."
    return f"{feedback}\n\nYou have {remaining} guess{'es' if remaining > 1 else ''} left."
