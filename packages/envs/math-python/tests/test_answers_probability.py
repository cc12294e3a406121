"""The answers of the topic probability, computed: by sympy where it solves the problem, else by
trying everything."""

from fractions import Fraction
from functools import cache
from itertools import combinations, permutations, product

import pytest
import sympy as sp

from vf_math_python.written import problems

DIE = range(1, 7)
t, u = sp.symbols("t u", real=True)


def share(cases, condition):
    """The share of equally likely cases that meet the condition."""
    cases = list(cases)
    return sp.Rational(sum(map(bool, map(condition, cases))), len(cases))


def mean(cases, value):
    cases = list(cases)
    return sp.Rational(sum(map(value, cases)), len(cases))


def coupons(kinds):
    """Mean number of draws from the equations of the states."""
    states = sp.symbols(f"e0:{kinds + 1}")
    equations = [states[kinds]] + [
        states[k]
        - 1
        - sp.Rational(k, kinds) * states[k]
        - sp.Rational(kinds - k, kinds) * states[k + 1]
        for k in range(kinds)
    ]
    return sp.solve(equations, states)[states[0]]


def tosses_until(pattern):
    """Mean number of tosses: a state is the longest beginning of the pattern that has just been
    tossed."""

    def after(text):
        return next(
            k for k in range(min(len(text), len(pattern)), -1, -1) if text.endswith(pattern[:k])
        )

    states = sp.symbols(f"e0:{len(pattern) + 1}")
    equations = [states[-1]] + [
        states[k] - 1 - (states[after(pattern[:k] + "H")] + states[after(pattern[:k] + "T")]) / 2
        for k in range(len(pattern))
    ]
    return sp.solve(equations, states)[states[0]]


def four_suits():
    """Card by card, by how many suits of the rest are still missing."""
    return sp.prod(
        sp.Rational(13 * missing, 52 - drawn) for drawn, missing in enumerate((4, 3, 2, 1))
    )


def broken_stick():
    """Two cuts at t < u: every piece is shorter than a half; twice that area, for the
    two orders."""
    half = sp.Rational(1, 2)
    return 2 * sp.integrate(sp.integrate(1, (u, half, t + half)), (t, 0, half))


def fair_game(start, goal):
    states = sp.symbols(f"p0:{goal + 1}")
    equations = [states[0], states[goal] - 1]
    equations += [states[k] - (states[k - 1] + states[k + 1]) / 2 for k in range(1, goal)]
    return sp.solve(equations, states)[states[start]]


def meeting(wait):
    """The square of arrivals without its two corners."""
    return 1 - 2 * sp.integrate(sp.integrate(1, (u, t + wait, 1)), (t, 0, 1 - wait))


def hands_with_two_aces():
    @cache
    def chance(aces, non_aces, wanted, cards):
        if cards == 0:
            return Fraction(wanted == 0)
        probability = Fraction(0)
        if aces and wanted:
            probability += Fraction(aces, aces + non_aces) * chance(
                aces - 1, non_aces, wanted - 1, cards - 1
            )
        return probability + Fraction(non_aces, aces + non_aces) * chance(
            aces, non_aces - 1, wanted, cards - 1
        )

    return sp.Rational(chance(4, 48, 2, 5))


def walk_home(steps):
    return share(product((1, -1), repeat=steps), lambda walk: sum(walk) == 0)


def series(wins, losses=0, won=0):
    if won == wins or losses == wins:
        return Fraction(won == wins)
    win, loss = series(wins, losses, won + 1), series(wins, losses + 1, won)
    return Fraction(3, 5) * win + Fraction(2, 5) * loss


CHECKS = {
    "two-dice-at-least-nine": lambda: share(product(DIE, DIE), lambda two: sum(two) >= 9),
    "three-heads": lambda: share(product("HT", repeat=5), lambda tosses: tosses.count("H") == 3),
    "two-of-one-colour": lambda: share(
        combinations("r" * 5 + "b" * 7, 2), lambda two: two[0] == two[1]
    ),
    "waiting-for-a-six": lambda: sp.solve(t - 1 - sp.Rational(5, 6) * t, t)[0],
    "all-six-faces": lambda: coupons(6),
    "larger-of-two-dice": lambda: mean(product(DIE, DIE), max),
    "four-suits": four_suits,
    "positive-test": lambda: (lambda ill, well: ill / (ill + well))(
        sp.Rational(1, 100) * sp.Rational(95, 100), sp.Rational(99, 100) * sp.Rational(2, 100)
    ),
    "no-fixed-point": lambda: share(
        permutations(range(5)), lambda order: all(i != p for i, p in enumerate(order))
    ),
    "broken-stick": broken_stick,
    "divisible-by-two-three-or-five": lambda: share(
        range(1, 1001), lambda k: 0 in (k % 2, k % 3, k % 5)
    ),
    "fair-game-to-ten": lambda: fair_game(3, 10),
    "meeting": lambda: meeting(sp.Rational(1, 4)),
    "two-aces": hands_with_two_aces,
    "different-values": lambda: mean(product(DIE, repeat=4), lambda four: len(set(four))),
    "two-heads-in-a-row": lambda: tosses_until("HH"),
    "head-tail-head": lambda: tosses_until("HTH"),
    "three-dice-ten": lambda: share(product(DIE, repeat=3), lambda three: sum(three) == 10),
    "all-white-balls": lambda: mean(combinations(range(1, 8), 3), max),
    "back-at-the-origin": lambda: walk_home(8),
    "letters-of-banana": lambda: share(
        set(permutations("BANANA")), lambda word: "AA" not in "".join(word)
    ),
    "even-given-at-least-four": lambda: share(range(4, 11), lambda k: k % 2 == 0),
    "real-roots": lambda: share(product(DIE, DIE), lambda two: two[0] ** 2 >= 4 * two[1]),
    "best-of-seven": lambda: sp.Rational(series(4)),
    "pair-of-socks": lambda: share(
        combinations([1, 1, 2, 2, 3, 3, 4, 4, 5, 5], 4), lambda four: len(set(four)) < 4
    ),
}


def test_every_problem_of_the_topic_is_computed():
    assert CHECKS.keys() == problems("probability").keys()
    assert len(CHECKS) >= 25


@pytest.mark.parametrize("name", CHECKS)
def test_the_answer_is_what_the_computation_gives(name, is_answer):
    value = CHECKS[name]()
    assert is_answer("probability", name, value)
    assert not is_answer("probability", name, value + 1)  # the comparison can fail
