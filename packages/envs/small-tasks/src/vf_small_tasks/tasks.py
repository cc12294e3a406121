"""The seven tasks: instruction, solved examples, every question with its answer, and what counts as
right.

They were chosen by measurement: a model of 135M parameters solves a fifth to four fifths of each,
and no constant reply, echo or copied word solves more than one in thirty. What makes them solvable
for it: the words are common, the questions are whole sentences, and the answer is a rewriting of
the question.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

Pair = tuple[str, str]
"""(question, answer)"""

FIRST_NAMES = (
    "Adam Alice Amy Andrew Anna Ben Carl Carol Chris Daniel David Diana Emily Emma Eric Frank"
    " George Grace Helen Henry Jack James Jane John Julia Kate Kevin Laura Linda Lucy Maria Mark"
    " Martin Mary Nancy Oliver Paul Peter Rose Sarah Simon Sophie Susan Thomas Victor"
).split()
LAST_NAMES = (
    "Allen Anderson Baker Bell Brown Carter Clark Collins Cook Cooper Cox Davis Edwards Evans"
    " Foster Garcia Gray Green Hall Harris Hill Howard Hughes Jackson James Johnson Jones Kelly"
    " King Lee Lewis Lopez Martin Miller Moore Morgan Morris Murphy Nelson Parker Perez Perry"
    " Phillips Price Reed Rivera Roberts Ross Russell Sanders Scott Smith Stewart Taylor Turner"
    " Walker Ward Watson White Wright"
).split()
CAPITALS = {
    "Argentina": "Buenos Aires", "Australia": "Canberra", "Austria": "Vienna", "Belgium": "Brussels",
    "Brazil": "Brasilia", "Bulgaria": "Sofia", "Canada": "Ottawa", "Chile": "Santiago", "China": "Beijing",
    "Colombia": "Bogota", "Croatia": "Zagreb", "Cuba": "Havana", "Cyprus": "Nicosia", "Denmark": "Copenhagen",
    "Ecuador": "Quito", "Egypt": "Cairo", "Estonia": "Tallinn", "Ethiopia": "Addis Ababa", "Finland": "Helsinki",
    "France": "Paris", "Germany": "Berlin", "Ghana": "Accra", "Greece": "Athens", "Hungary": "Budapest",
    "Iceland": "Reykjavik", "India": "New Delhi", "Indonesia": "Jakarta", "Iran": "Tehran", "Iraq": "Baghdad",
    "Ireland": "Dublin", "Italy": "Rome", "Japan": "Tokyo", "Jordan": "Amman", "Kenya": "Nairobi", "Latvia": "Riga",
    "Lebanon": "Beirut", "Malaysia": "Kuala Lumpur", "Morocco": "Rabat", "Nepal": "Kathmandu",
    "New Zealand": "Wellington", "Nigeria": "Abuja", "Norway": "Oslo", "Pakistan": "Islamabad", "Peru": "Lima",
    "Poland": "Warsaw", "Portugal": "Lisbon", "Romania": "Bucharest", "Russia": "Moscow", "Serbia": "Belgrade",
    "South Korea": "Seoul", "Spain": "Madrid", "Sweden": "Stockholm", "Switzerland": "Bern", "Thailand": "Bangkok",
    "Turkey": "Ankara", "Ukraine": "Kyiv", "Venezuela": "Caracas", "Vietnam": "Hanoi",
}  # fmt: skip
JOBS = "baker driver nurse singer farmer pilot cook painter".split()
ROOMS = (
    "attic bathroom bedroom cellar garage garden hall kitchen library lobby nursery office pantry"
    " studio".split()
)
DEVICES = "lamp radio fan heater camera speaker screen kettle alarm pump".split()
THINGS = "apples coins books eggs".split()
OPERATIONS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}
UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen"
).split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()


@dataclass(frozen=True, slots=True)
class Task:
    """A task. ``pairs`` returns every question with its answer; ``is_right(reply, answer)``
    decides the reward."""

    instruction: str
    """The system message; empty = none, so that the chat template's own applies."""
    shots: tuple[Pair, ...]
    pairs: Callable[[], list[Pair]]
    is_right: Callable[[str, str], bool]
    first: frozenset[str] = frozenset()
    """Answers of the rows that come first, so that a few rows show right and wrong replies; empty =
    any."""


def in_words(number: int) -> str:
    """A number from 0 to 999 in words, without "and".

    >>> in_words(342), in_words(705), in_words(90)
    ('three hundred forty-two', 'seven hundred five', 'ninety')
    """
    if number < 20:
        return UNITS[number]
    if number < 100:
        return TENS[number // 10] + (f"-{UNITS[number % 10]}" if number % 10 else "")
    remainder = f" {in_words(number % 100)}" if number % 100 else ""
    return f"{UNITS[number // 100]} hundred{remainder}"


def is_equal(reply: str, answer: str) -> bool:
    """Whether the reply is the answer, apart from white space around it."""
    return reply.strip() == answer


_FENCED = re.compile(r"```(?:json)?[ \t\r]*\n(.*)\n[ \t\r]*```", re.DOTALL)


def is_equal_json(reply: str, answer: str) -> bool:
    """Whether the whole reply, or its fenced block, is JSON of the same value: order and spaces are
    free.

    >>> is_equal_json('{"age": 31, "name": "Tim"}', '{"name": "Tim", "age": 31}'), is_equal_json("Tim", '"Tim"')
    (True, False)
    """
    fenced = _FENCED.fullmatch(reply.strip())
    try:
        return bool(json.loads(fenced[1] if fenced else reply) == json.loads(answer))
    except (ValueError, RecursionError):
        return False


def names_the_capital(reply: str, answer: str) -> bool:
    """Whether the reply names the capital and no other capital of the list: a list of guesses is
    not an answer.

    >>> names_the_capital("The capital is Paris.", "Paris"), names_the_capital("Rome, Paris, Bern", "Paris")
    (True, False)
    """
    plain = unicodedata.normalize("NFKD", reply).encode("ascii", "ignore").decode()  # Bogotá
    capitals = {
        capital
        for capital in CAPITALS.values()
        if re.search(rf"\b{capital}\b", plain, re.IGNORECASE)
    }
    return capitals == {answer}


def _people() -> list[Pair]:
    sentences = (
        "{name} is {age} years old and works as a {job}.",
        "My friend {name}, a {job}, is {age}.",
        "The {job} {name} turned {age} today.",
        "{name} became a {job} and is now {age} years old.",
    )
    people = [
        {"name": name, "age": age, "job": job}
        for name in FIRST_NAMES
        for age in range(5, 81)
        for job in JOBS
    ]
    answers = [json.dumps(person) for person in people]
    return [
        (sentence.format_map(person), answer)
        for sentence in sentences
        for person, answer in zip(people, answers, strict=True)
    ]


def _commands() -> list[Pair]:
    sentences = (
        "Turn {state} the {device} in the {room}.",
        "Please switch the {room} {device} {state}.",
        "I want the {room} {device} to be {state}.",
        "Can you turn {state} the {device} in the {room}?",
        "Switch the {device} in the {room} {state}, please.",
    )
    return [
        (sentence.format(state=state, device=device, room=room), f"set({room}, {device}, {state})")
        for sentence in sentences
        for state in ("on", "off")
        for device in DEVICES
        for room in ROOMS
    ]


def _calculations() -> list[Pair]:
    return [
        (f"What is {in_words(a)} {word} {in_words(b)}?", f"CALC({a}{sign}{b})")
        for a in range(2, 61)
        for b in range(2, 61)
        for word, sign in OPERATIONS.items()
    ]


def _stories() -> list[Pair]:
    stories = (
        (
            "{name} has {a} {things} and gets {b} more. How many {things}?",
            lambda a, b: f"CALC({a}+{b})",
        ),
        (
            "{name} has {sum} {things} and loses {b}. How many are left?",
            lambda a, b: f"CALC({a + b}-{b})",
        ),
        (
            "{name} buys {a} boxes with {b} {things} each. How many {things}?",
            lambda a, b: f"CALC({a}*{b})",
        ),
        (
            "{name} shares {a} {things} among {b} friends. How many for each?",
            lambda a, b: f"CALC({a}/{b})",
        ),
    )
    return [
        (story.format(name=name, things=things, a=a, b=b, sum=a + b), call(a, b))
        for story, call in stories
        for name in FIRST_NAMES[::8]
        for things in THINGS
        for a in range(2, 61)
        for b in range(2, 21)
    ]


TASKS: dict[str, Task] = {
    "capitals": Task(
        "",
        (),
        lambda: [
            (f"What is the capital of {country}?", capital) for country, capital in CAPITALS.items()
        ],
        names_the_capital,
        first=frozenset(
            {"Cairo", "Copenhagen", "Canberra", "Vienna", "Ottawa", "Beijing", "Santiago", "Havana"}
        ),
    ),
    "json": Task(
        "Write the name, the age and the job as JSON.",
        (
            (
                "Tim is 31 years old and works as a cook.",
                '{"name": "Tim", "age": 31, "job": "cook"}',
            ),
            ("The pilot Eve turned 52 today.", '{"name": "Eve", "age": 52, "job": "pilot"}'),
        ),
        _people,
        is_equal_json,
    ),
    "names": Task(
        "Write the last name first.",
        (("Tim Adams", "Adams, Tim"), ("Eve Wood", "Wood, Eve"), ("Max Long", "Long, Max")),
        lambda: [
            (f"{first} {last}", f"{last}, {first}") for first in FIRST_NAMES for last in LAST_NAMES
        ],
        is_equal,
    ),
    "numbers": Task(
        "Write the number in digits.",
        (
            ("three hundred forty-two", "342"),
            ("seven hundred five", "705"),
            ("five hundred twelve", "512"),
            ("two hundred sixty", "260"),
        ),
        lambda: [(in_words(number), str(number)) for number in range(100, 1000)],
        is_equal,
    ),
    "calculator": Task(
        "Write the call of the calculator.",
        (
            ("What is twelve plus seven?", "CALC(12+7)"),
            ("What is forty minus eight?", "CALC(40-8)"),
            ("What is six times twenty-nine?", "CALC(6*29)"),
            ("What is thirty divided by five?", "CALC(30/5)"),
        ),
        _calculations,
        is_equal,
    ),
    "stories": Task(
        "Write the call of the calculator.",
        (
            ("Tim has 12 coins and gets 7 more. How many coins?", "CALC(12+7)"),
            ("Eve has 40 eggs and loses 8. How many are left?", "CALC(40-8)"),
            ("Max buys 6 boxes with 9 books each. How many books?", "CALC(6*9)"),
            ("Liz shares 30 apples among 5 friends. How many for each?", "CALC(30/5)"),
        ),
        _stories,
        is_equal,
    ),
    "commands": Task(
        "Write the command.",
        (
            ("Turn on the lamp in the attic.", "set(attic, lamp, on)"),
            ("Please switch the hall radio off.", "set(hall, radio, off)"),
            ("I want the kitchen fan to be on.", "set(kitchen, fan, on)"),
        ),
        _commands,
        is_equal,
    ),
}
