"""Compare a model's answer with the right answer, without a judge: equality of the normalised
texts.

Case, accents, punctuation, articles and thousands separators are ignored; any other difference
counts.
"""

from __future__ import annotations

import re
import unicodedata

LONGEST = 400
"""Maximum characters of an answer; longer ones never match."""


def normalised(text: str) -> str:
    """The canonical text of an answer; equal for matching answers.

    >>> normalised("The Republic of Côte d'Ivoire"), normalised("4,807.0 m"), normalised("7 September.")
    ('republic of cote d ivoire', '4807 m', '7 september')
    """
    plain = unicodedata.normalize("NFKD", text[:LONGEST]).casefold()
    plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", plain)
    plain = re.sub(r"(\d)\.0+(?!\d)", r"\1", plain)
    plain = re.sub(r"(?<!\d)\.|\.(?!\d)|[^\w\s.]", " ", plain)
    return " ".join(word for word in plain.split() if word not in ("a", "an", "the"))


UNITS = re.compile(
    r"(?<=\d) ?(m|metres|meters|km|kilometres|kilometers|sq km|km2|square kilometres|square"
    r" kilometers)$"
)


def matches(text: str | None, answer: str) -> bool:
    """Whether ``text`` matches ``answer``; a number may be followed by its unit.

    >>> matches("the Uk.", "UK"), matches("2,994 metres", "2,994"), matches("Paris or Lyon", "Paris"), matches("", "")
    (True, True, False, False)
    """
    if not text or len(text) > LONGEST:
        return False
    actual, expected = normalised(text), normalised(answer)
    if expected.replace(".", "").isdigit():
        actual = UNITS.sub("", actual)
    if re.fullmatch(r"\d{1,2} [a-z]+", expected):  # a day: "September 7th" is "7 September"
        actual = re.sub(r"\b(\d{1,2})(st|nd|rd|th)\b", r"\1", actual).replace(" of ", " ")
        actual = re.sub(r"^([a-z]+) (\d{1,2})$", r"\2 \1", actual)
    return actual == expected
