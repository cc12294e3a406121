"""Every story's answer, found again from the text of the question alone, by another way than the
story's own."""

import re
from collections import Counter
from fractions import Fraction
from itertools import count

import pytest

from vf_gsm8k.generator import generate_rows
from vf_gsm8k.problem import STORIES, is_held_out

FRACTIONS = {"half": 2, "third": 3, "quarter": 4, "fifth": 5, "sixth": 6}


def one_less(question, position):
    """What is left of one after the fraction at that place of the text is taken away."""
    return 1 - Fraction(1, FRACTIONS[re.findall("|".join(FRACTIONS), question)[position]])


def first(condition, start=1):
    """The smallest whole number for which the condition holds: solving by trying."""
    return next(n for n in count(start) if condition(n))


def film(hour, minute, length, pause):
    clock = [hour, minute]
    for _ in range(length + pause):
        clock[1] += 1
        if clock[1] == 60:
            clock = [clock[0] + 1, 0]
    return clock[1]


def days_of_reading(pages, slow, days, quick):
    read = day = 0
    while read < pages:
        day += 1
        read += slow if day <= days else quick
    return day


def hours_until_caught(slow, start, fast):
    return first(lambda h: fast * h >= slow * (h + start))


SOLVERS = {
    # money
    "change": lambda n, q: n[2] - sum([n[1]] * n[0]),
    "two_kinds_of_tickets": lambda n, q: sum([n[0]] * n[2] + [n[1]] * n[3]),
    "bake_sale_profit": lambda n, q: -n[3] + n[0] * n[1] * n[2],
    "saving_up": lambda n, q: first(lambda w: n[1] + w * n[2] - w * n[3] >= n[0]),
    "discount": lambda n, q: Fraction(100 - n[1], 100) * n[0] - n[2],
    "overtime": lambda n, q: n[0] * (n[1] * n[2] + 2 * n[3]),
    "shared_bill": lambda n, q: n[1] + n[2] + Fraction(n[3], n[0]),
    "coins": lambda n, q: 5 * (5 * n[0] + 2 * n[1] + n[2]),
    "cheaper_by_the_box": lambda n, q: Fraction(n[3], n[1]) * (n[0] * n[1] - n[2]),
    # pace
    "two_legs_of_a_trip": lambda n, q: sum([n[1]] * n[0] + [n[3]] * n[2]),
    "moving_apart": lambda n, q: n[0] * n[2] + n[1] * n[2],
    "catching_up": lambda n, q: hours_until_caught(*n),
    "minutes_of_practice": lambda n, q: Fraction(sum([n[0]] * 5 + [n[1]] * 2) * n[2], 60),
    "machines": lambda n, q: Fraction(n[1], n[0] * n[2]) * n[3] * n[4],
    "tank_with_a_leak": lambda n, q: first(lambda m: n[1] + m * n[2] - m * n[3] >= n[0]),
    "reading_a_book": lambda n, q: days_of_reading(*n),
    "end_of_the_film": lambda n, q: film(*n),
    "laps": lambda n, q: Fraction(n[1] * 1000 * n[2], n[0]),
    # shares
    "fraction_of_the_rest": lambda n, q: n[0] * one_less(q, 0) * one_less(q, 1),
    "percent_of_a_group": lambda n, q: n[0] * (1 - 2 * Fraction(n[1], 100)) - n[2],
    "ratio": lambda n, q: Fraction(n[1], n[1] + n[2]) * n[0] - n[3],
    "ages": lambda n, q: (n[0] + n[2]) + (n[0] * n[1] + n[2]),
    "missing_score": lambda n, q: first(lambda s: Fraction(sum(n[:3]) + s, 4) == n[3], 0),
    "recipe": lambda n, q: Fraction(n[1], n[0]) * n[2] - n[3],
    "backwards": lambda n, q: first(lambda x: x * n[0] - n[1] == n[2]),
    "growing": lambda n, q: n[0] * (2 if "doubles" in q else 3) ** n[1] - n[2],
    "votes": lambda n, q: first(lambda w: w + (w - n[2]) == n[0] - n[1]),
    # amounts
    "packing": lambda n, q: first(lambda bags: (bags + 1) * n[3] > n[0] * n[1] - n[2]),
    "buses": lambda n, q: first(lambda b: b * n[3] >= n[0] * n[1] + n[2]),
    "fence": lambda n, q: len(posts(n[0], n[1], n[2])) * n[3],
    "path_around_a_pool": lambda n, q: 2 * n[2] * (n[0] + n[1] + 2 * n[2]),
    "chain_of_comparisons": lambda n, q: n[0] + 2 * n[0] * n[1] - n[2],
    "legs": lambda n, q: first(lambda four: 4 * four + 2 * (n[0] - four) == n[1]),
    "theatre_rows": lambda n, q: sum(n[0] + n[1] * row for row in range(n[2])) - n[3],
    "cutting_a_rope": lambda n, q: (100 * n[0] - n[1]) % n[2],
    "stock": lambda n, q: n[0] + n[3] - sum([n[1]] * n[2]),
    "choosing_clothes": lambda n, q: (n[0] - (1 if "One shirt" in q else 2)) * n[1] * n[2],
}


def value_of(sum_of_numbers):
    """A sum as it is written in a step, calculated with fractions."""
    return eval(re.sub(r"\d+", r"Fraction(\g<0>)", sum_of_numbers), {"Fraction": Fraction})


def posts(length, width, gap):
    """Where the posts stand: the points of the edge at multiples of the gap."""
    along = {(x, y) for x in range(0, length + 1, gap) for y in (0, width)}
    return along | {(x, y) for x in (0, length) for y in range(0, width + 1, gap)}


@pytest.fixture(scope="module")
def rows():
    return generate_rows(37 * 40, seed=5, held_out=False) + generate_rows(
        37 * 10, seed=5, held_out=True
    )


def test_there_are_at_least_25_stories_and_each_has_a_solver():
    assert len(STORIES) >= 25
    assert SOLVERS.keys() == STORIES.keys()


@pytest.mark.parametrize("name", STORIES)
def test_the_answer_follows_from_the_text(rows, name):
    told = [row for row in rows if row["info"]["story"] == name]
    assert len(told) >= 40
    for row in told:
        numbers = [int(digits) for digits in re.findall(r"\d+", row["question"])]
        assert SOLVERS[name](numbers, row["question"]) == int(row["answer"]), row


def test_the_answers_are_not_negative_and_vary_within_each_story(rows):
    assert all(int(row["answer"]) >= 0 for row in rows)
    for name in STORIES:
        answers = Counter(row["answer"] for row in rows if row["info"]["story"] == name)
        assert len(answers) >= 10, name
        assert max(answers.values()) <= 0.25 * sum(answers.values()), name


def test_every_equation_of_a_solution_is_true_and_the_last_step_ends_in_the_answer(rows):
    checked = 0
    for row in rows:
        *steps, last, boxed = row["solution"].split("\n")
        assert last.split()[-1] == row["answer"]
        assert boxed == f"\\boxed{{{row['answer']}}}"
        for step in (*steps, last):
            for equation in re.findall(r"[\d(][-\d +*/()]* = [\d(][-\d +*/()]*", step):
                left, right = map(value_of, equation.split("="))
                assert left == right, step
                checked += 1
    assert checked > 3 * len(rows)


def test_the_texts_read_well(rows):
    for row in rows:
        text = row["question"]
        assert text.endswith("?")
        assert text == text.strip()
        assert "  " not in text
        assert not re.search(r"\b1 (?!to\b)[a-z]+s\b", text), text  # no plural after a one
        assert not re.search(r"\{|\}|None", text)


def test_training_and_held_out_problems_never_share_a_story_with_its_numbers():
    keys = [
        {
            (row["info"]["story"], tuple(row["info"]["numbers"]))
            for seed in (0, 1)
            for row in generate_rows(3000, seed, held)
        }
        for held in (False, True)
    ]
    assert not keys[0] & keys[1]
    assert all(is_held_out(*key) for key in keys[1])
    assert not any(is_held_out(*key) for key in keys[0])


def test_without_the_rule_two_seeds_would_share_problems():
    """The twin: the space of numbers is small enough that chance alone would not keep the sets
    apart."""
    seeds = [
        {
            (row["info"]["story"], tuple(row["info"]["numbers"]))
            for row in generate_rows(6000, seed, False)
        }
        for seed in (0, 1)
    ]
    assert seeds[0] & seeds[1]
