"""The rules of Wordle, as pure functions: how a guess is marked, which guesses count, what a whole game was worth.

Marks are the real game's: green first, then yellow from left to right for as long as the secret has more of that
letter. This module knows nothing of models, messages, rewards' weights or word lists (``words``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

GREEN, YELLOW, ABSENT = "G", "Y", "X"

_BRACKETED = re.compile(r"\[\s*([A-Za-z]+)\s*\]")
_BARE = re.compile(r"[A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Rules:
    """What a game is played by, for example ``Rules(5, 6, False, frozenset({"crane"}))``."""

    word_length: int
    max_guesses: int
    """Replies of the model; one that holds no guess that counts is used up too."""
    hard_mode: bool
    words: Collection[str]
    """What may be guessed, in small letters; fast to search (a set)."""


@dataclass(frozen=True, slots=True)
class Move:
    """One reply: ``Move("crane", "XGYXX")``, or ``Move(problem="'zzzzz' is not in the word list.")``."""

    word: str = ""
    marks: str = ""
    """One of G, Y, X per letter; empty where the reply did not count."""
    problem: str = ""
    """Why the reply did not count, as the player is told."""


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
        """The marks of the last guess that counted; empty without one."""
        return next((move.marks for move in reversed(self.moves) if move.marks), "")


def mark(guess: str, answer: str) -> str:
    """One of G (right place), Y (elsewhere in the word), X per letter of ``guess``; both words of one length.

    A letter gets no more G and Y together than the answer has of it: G first, then Y from left to right.

    >>> mark("geese", "eerie"), mark("crane", "crane")
    ('XGYXG', 'GGGGG')
    """
    marks = [ABSENT] * len(guess)
    left: dict[str, int] = {}
    for i, letter in enumerate(answer):
        if guess[i] == letter:
            marks[i] = GREEN
        else:
            left[letter] = left.get(letter, 0) + 1
    for i, letter in enumerate(guess):
        if marks[i] is ABSENT and left.get(letter):
            marks[i] = YELLOW
            left[letter] -= 1
    return "".join(marks)


def read_guess(text: str | None) -> str | None:
    """The guess in the content of a ``<guess>`` tag, in small letters: ``[crane]``, or the bare word ``crane``.

    Words around the brackets do not matter; two different words in brackets, or bare text of more than one word, are
    no guess (None).

    >>> read_guess("[CRANE]"), read_guess(" crane "), read_guess("I say [crane]!"), read_guess("[a] or [b]")
    ('crane', 'crane', 'crane', None)
    """
    if text is None:
        return None
    bracketed = {word.lower() for word in _BRACKETED.findall(text)}
    if bracketed:
        return bracketed.pop() if len(bracketed) == 1 else None
    bare = text.strip()
    return bare.lower() if _BARE.fullmatch(bare) else None


def hint_ignored(guess: str, moves: Iterable[Move]) -> str | None:
    """What of the earlier marks a guess does not use, as hard mode demands; None when it uses all.

    A green letter stays in its place; every letter that was found, green or yellow, stands in the guess at least as
    often as it was found in one guess.

    >>> hint_ignored("point", [Move("crane", "XXXYX")])
    >>> hint_ignored("ghost", [Move("crane", "XXXYX")])
    'the guess must contain N'
    """
    for move in moves:
        found: dict[str, int] = {}
        for i, (letter, color) in enumerate(zip(move.word, move.marks, strict=True)):
            if color == GREEN and guess[i] != letter:
                return f"letter {i + 1} must be {letter.upper()}"
            if color != ABSENT:
                found[letter] = found.get(letter, 0) + 1
        for letter, count in found.items():
            if guess.count(letter) < count:
                return f"the guess must contain {letter.upper()}" + (f" {count} times" if count > 1 else "")
    return None


def judge(content: str | None, answer: str, moves: Sequence[Move], rules: Rules) -> Move:
    """The move that the content of a ``<guess>`` tag makes (None: there was no tag), after ``moves``."""
    guess = read_guess(content)
    if guess is None:
        return Move(problem="Give exactly one word, in square brackets inside <guess> tags.")
    if len(guess) != rules.word_length:
        shown = guess if len(guess) <= 20 else f"{guess[:20]}..."
        return Move(problem=f"'{shown}' has {len(guess)} letters; the word has {rules.word_length}.")
    if guess not in rules.words:
        return Move(problem=f"'{guess}' is not in the word list.")
    if rules.hard_mode and (ignored := hint_ignored(guess, (move for move in moves if move.marks))) is not None:
        return Move(problem=f"Hard mode: {ignored}.")
    return Move(guess, mark(guess, answer))


def is_over(answer: str, moves: Sequence[Move], rules: Rules) -> bool:
    """Whether the word was guessed or no guess is left."""
    return len(moves) >= rules.max_guesses or (bool(moves) and moves[-1].word == answer)


def replay(contents: Iterable[str | None], answer: str, rules: Rules) -> Game:
    """The game that these contents of ``<guess>`` tags, one per reply, play; what comes after its end is left out."""
    moves: list[Move] = []
    for content in contents:
        if is_over(answer, moves, rules):
            break
        moves.append(judge(content, answer, moves, rules))
    return Game(answer, tuple(moves))


def describe(answer: str, moves: Sequence[Move], rules: Rules) -> str:
    """What the player is told after the last move: the letters over their marks (or the problem), and what is left."""
    move, left = moves[-1], rules.max_guesses - len(moves)
    told = move.problem or f"{' '.join(move.word.upper())}\n{' '.join(move.marks)}"
    if move.word == answer:
        return f"{told}\n\nSolved in {len(moves)} of {rules.max_guesses} guesses."
    if not left:
        return f"{told}\n\nNo guesses are left. The word was {answer.upper()}."
    return f"{told}\n\nYou have {left} guess{'es' if left > 1 else ''} left."
