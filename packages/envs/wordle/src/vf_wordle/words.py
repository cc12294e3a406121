"""The shipped words (see DATA.md), and their split into secrets of training and of held-out games.

Every eleventh answer is held out, for every seed, so no model is trained on a word of the
evaluation. Pure functions.
"""

from __future__ import annotations

import functools
import random
from importlib import resources

from verifiers.errors import ConfigError

LENGTHS = range(4, 9)
"""Allowed word lengths."""

HELD_OUT_EVERY = 11


@functools.cache
def load_words(file: str, length: int) -> tuple[str, ...]:
    """The words of ``answers.txt`` (common words) or ``guesses.txt`` (all, answers included) of a
    length, sorted."""
    text = (resources.files(__package__) / file).read_text(encoding="ascii")
    return tuple(word for word in text.split() if len(word) == length)


@functools.cache
def valid_guesses(length: int) -> frozenset[str]:
    """Valid guesses."""
    return frozenset(load_words("guesses.txt", length))


def secrets(length: int, held_out: bool) -> list[str]:
    """The secret words of training or held-out games, sorted."""
    answers = load_words("answers.txt", length)
    return [word for i, word in enumerate(answers) if (i % HELD_OUT_EVERY == 0) == held_out]


def draw_secrets(
    length: int, count: int | None, seed: int, held_out: bool, at_most: int | None = None
) -> list[str]:
    """``count`` different words in seeded order; None: all, but at most ``at_most``.

    *Raises* ConfigError when there are fewer words.
    """
    words = secrets(length, held_out)
    random.Random(f"wordle/{length}/{held_out}/{seed}").shuffle(words)
    if count is not None and count > len(words):
        which, kind = (
            ("num_eval_examples", "held-out") if held_out else ("num_train_examples", "training")
        )
        raise ConfigError(
            f"{which}={count} is more than the {len(words)} {kind} words of {length} letters"
        )
    return words[: at_most if count is None else count]
