"""The shipped words (see DATA.md), and which of them are secret in training and in held-out games.

Every eleventh answer is kept for held-out games, whatever the seed, so no model is ever trained on a word that it is
measured with. Everything here is a pure function of its arguments.
"""

from __future__ import annotations

import functools
import random
from importlib import resources

from verifiers.errors import ConfigError

LENGTHS = range(4, 9)
"""Letters that a word may have."""

HELD_OUT_EVERY = 11


@functools.cache
def load_words(file: str, length: int) -> tuple[str, ...]:
    """The words of ``answers.txt`` (common ones) or ``guesses.txt`` (all, answers included) of a length, sorted."""
    text = (resources.files(__package__) / file).read_text(encoding="ascii")
    return tuple(word for word in text.split() if len(word) == length)


@functools.cache
def valid_guesses(length: int) -> frozenset[str]:
    """What may be guessed."""
    return frozenset(load_words("guesses.txt", length))


def secrets(length: int, held_out: bool) -> list[str]:
    """The words that are secret in training games, or in held-out games, sorted."""
    answers = load_words("answers.txt", length)
    return [word for i, word in enumerate(answers) if (i % HELD_OUT_EVERY == 0) == held_out]


def draw_secrets(length: int, count: int | None, seed: int, held_out: bool, at_most: int | None = None) -> list[str]:
    """``count`` different words in an order that the seed chooses; None: all there are, and no more than ``at_most``.

    *Raises* ConfigError for more words than there are.
    """
    words = secrets(length, held_out)
    random.Random(f"wordle/{length}/{held_out}/{seed}").shuffle(words)
    if count is not None and count > len(words):
        which, kind = ("num_eval_examples", "held-out") if held_out else ("num_train_examples", "training")
        raise ConfigError(f"{which}={count} is more than the {len(words)} {kind} words of {length} letters")
    return words[: at_most if count is None else count]
