"""Whether an answer is the right one, without a judge: equal after what does not matter is taken away.

Case, accents, punctuation, articles and thousands separators do not matter; anything more or less does.
"""

from __future__ import annotations

import re
import unicodedata

LONGEST = 400
"""Characters of an answer that are read; a longer one is no answer to these questions."""


def normalised(text: str) -> str:
    """What two equal answers share.

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
    r"(?<=\d) ?(m|metres|meters|km|kilometres|kilometers|sq km|km2|square kilometres|square kilometers)$"
)


def matches(given: str | None, answer: str) -> bool:
    """Whether ``given`` is ``answer``; a number may be followed by its unit.

    >>> matches("the Uk.", "UK"), matches("2,994 metres", "2,994"), matches("Paris or Lyon", "Paris"), matches("", "")
    (True, True, False, False)
    """
    if not given or len(given) > LONGEST:
        return False
    said, wanted = normalised(given), normalised(answer)
    if wanted.replace(".", "").isdigit():
        said = UNITS.sub("", said)
    if re.fullmatch(r"\d{1,2} [a-z]+", wanted):  # a day: "September 7th" is "7 September"
        said = re.sub(r"\b(\d{1,2})(st|nd|rd|th)\b", r"\1", said).replace(" of ", " ")
        said = re.sub(r"^([a-z]+) (\d{1,2})$", r"\2 \1", said)
    return said == wanted
