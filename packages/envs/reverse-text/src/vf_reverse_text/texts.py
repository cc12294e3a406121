"""The texts to reverse, generated from the shipped words.

They are a pure function of (unit, bounds, count, seed): all different, with lengths within the
bounds. A longer request begins with the texts of a shorter request, so the held-out set is
independent of the size of the training set.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from importlib import resources

from verifiers.errors import ConfigError

DEFAULT_LENGTHS = {"word": (3, 6), "sentence": (20, 80), "paragraph": (80, 180)}
"""Characters of a generated text, minimum and maximum, by default."""

SENTENCE_LENGTHS = (20, 60)
"""Characters of a sentence inside a longer paragraph."""

MAX_MISSES = 1000
"""Consecutive repeated texts after which the bounds are considered exhausted."""


@functools.cache
def load_words() -> tuple[str, ...]:
    """The shipped words: lower case, 2 to 12 letters, sorted (see DATA.md)."""
    return tuple((resources.files(__package__) / "words.txt").read_text(encoding="ascii").split())


@functools.cache
def words_by_length() -> dict[int, tuple[str, ...]]:
    """The shipped words by their number of letters; every length from 2 to 12 occurs."""
    lengths: dict[int, list[str]] = {}
    for word in load_words():
        lengths.setdefault(len(word), []).append(word)
    return {length: tuple(words) for length, words in lengths.items()}


def generate_texts(unit: str, min_chars: int, max_chars: int, count: int, seed: int) -> list[str]:
    """``count`` different texts of ``min_chars`` to ``max_chars`` characters.

    *Raises* ConfigError when the bounds allow fewer different texts.
    """
    rng = random.Random(f"reverse-text/{unit}/{min_chars}/{max_chars}/{seed}")
    if unit == "word":
        return _choose_words(rng, min_chars, max_chars, count)
    make = make_sentence if unit == "sentence" else make_paragraph
    return _collect_different(
        lambda: make(rng, rng.randint(min_chars, max_chars)), count, f"a {unit}", max_chars
    )


def _choose_words(rng: random.Random, min_chars: int, max_chars: int, count: int) -> list[str]:
    words = [word for word in load_words() if min_chars <= len(word) <= max_chars]
    if count > len(words):
        raise ConfigError(
            f"reverse-text has {len(words)} words of {min_chars} to {max_chars} letters, but"
            f" num_train_examples + num_eval_examples asks for {count}: ask for fewer, or widen"
            " min_chars and max_chars"
        )
    rng.shuffle(words)
    return words[:count]


def _collect_different(make: Callable[[], str], count: int, what: str, max_chars: int) -> list[str]:
    texts: dict[str, None] = {}
    misses = 0
    while len(texts) < count:
        before = len(texts)
        texts[make()] = None
        misses = 0 if len(texts) > before else misses + 1
        if misses > MAX_MISSES:
            raise ConfigError(
                f"reverse-text found only {before} different texts for {what} of at most"
                f" {max_chars} characters, but num_train_examples + num_eval_examples asks for"
                f" {count}: ask for fewer, or raise max_chars"
            )
    return list(texts)


def make_sentence(rng: random.Random, length: int) -> str:
    """A line of random words that starts with a capital and ends with a full stop, exactly
    ``length`` (>= 3) long."""
    words, by_length = load_words(), words_by_length()
    room, sentence = length - 1, []  # one character is the full stop
    while room not in by_length:
        word = rng.choice(words)
        while len(word) > room - 3:  # leave a space and two letters for the last word
            word = rng.choice(words)
        sentence.append(word)
        room -= len(word) + 1
    sentence.append(rng.choice(by_length[room]))
    return " ".join(sentence).capitalize() + "."


def make_paragraph(rng: random.Random, length: int) -> str:
    """Sentences joined by spaces, exactly ``length`` (>= 3) characters long."""
    shortest, longest = SENTENCE_LENGTHS
    sentences = []
    while length > longest:
        size = rng.randint(shortest, min(longest, length - 1 - shortest))
        sentences.append(make_sentence(rng, size))
        length -= size + 1
    return " ".join([*sentences, make_sentence(rng, length)])
