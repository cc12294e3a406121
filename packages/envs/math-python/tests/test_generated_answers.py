"""The answers of the generated problems, computed again from their numbers by another way than the
generator's."""

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations, count, product

import pytest
import sympy as sp

from vf_math_python.generator import generate_rows
from vf_math_python.kinds import KINDS, latex

x = sp.Symbol("x")


def first(condition, start=1):
    return next(n for n in count(start) if condition(n))


def paths(right, up, avoid):
    table = {}
    for i, j in product(range(right + 1), range(up + 1)):
        ways = 1 if (i, j) == (0, 0) else table.get((i - 1, j), 0) + table.get((i, j - 1), 0)
        table[i, j] = 0 if (i, j) == avoid else ways
    return table[right, up]


def by_convolution(parts, values, total):
    counts = Counter({0: 1})
    for _ in range(parts):
        sums = Counter()
        for s, ways in counts.items():
            for value in values:
                sums[s + value] += ways
        counts = sums
    return counts[total]


def recurrence(a, b, first_term, second, n, modulus):
    power = sp.Matrix([[a, b], [1, 0]]) ** (n - 1)
    return (power * sp.Matrix([second, first_term]))[0] % modulus


def different(kinds, draws):
    """Over all sequences, counted by how many different numbers they have."""
    counts = {0: 1}
    for _ in range(draws):
        counts = {
            d: counts.get(d, 0) * d + counts.get(d - 1, 0) * (kinds - d + 1)
            for d in range(min(draws, kinds) + 1)
        }
    return Fraction(sum(d * ways for d, ways in counts.items()), kinds**draws)


def same_colour(red, blue, green, drawn):
    balls = "r" * red + "b" * blue + "g" * green
    hands = list(combinations(balls, drawn))
    return Fraction(sum(len(set(hand)) == 1 for hand in hands), len(hands))


def quadrilateral(*numbers):
    return abs(sp.Polygon(*[tuple(numbers[i : i + 2]) for i in range(0, 8, 2)]).area)


def root_powers(p, q, r, power):
    companion = sp.Matrix([[0, 0, -r], [1, 0, -q], [0, 1, -p]])
    return (companion**power).trace()


def polynomial(a, b, c, at):
    p = sp.interpolate([(t, a * t * t + b * t + c) for t in (1, 2, 3)], x)
    return p.subs(x, at)


def in_circle(square, cx):
    reach = range(-60, 61)
    return sum((i + cx) ** 2 + j * j <= square for i in reach for j in reach)


SOLVERS = {
    "power_remainder": lambda b, e, m: b**e % m,
    "divisor_sum": lambda n: sum(d for d in range(1, n + 1) if n % d == 0),
    "two_congruences": lambda m, n, a, b: first(lambda t: t % m == a and t % n == b),
    "coprime_count": lambda top, n: sum(math.gcd(t, n) == 1 for t in range(1, top + 1)),
    "factorial_zeros": lambda n, index: sp.multiplicity(
        (2, 3, 5, 7, 11, 13)[index], math.factorial(n)
    ),
    "digit_sum": lambda b, e: sum(b**e // 10**i % 10 for i in range(200)),
    "collatz_steps": lambda n: collatz(n),
    "paths_around_a_point": lambda right, up, i, j: paths(right, up, (i, j)),
    "bounded_sums": lambda parts, bound, total: by_convolution(parts, range(bound + 1), total),
    "subsets_with_a_sum": (
        lambda size, total: sp.Poly(
            sp.prod(1 + x**k for k in range(1, size + 1)), x
        ).coeff_monomial(x**total)
    ),
    "dice_sum": lambda dice, index, total: Fraction(
        by_convolution(dice, range(1, (4, 6, 8, 10)[index] + 1), total),
        (4, 6, 8, 10)[index] ** dice,
    ),
    "different_draws": different,
    "same_colour": same_colour,
    "binomial_coefficient": (
        lambda a, b, power, k: sp.Poly((a * x + b) ** power, x).coeff_monomial(x**k)
    ),
    "quadratic_through_points": polynomial,
    "determinant": lambda *n: sp.Matrix(3, 3, n).det(),
    "powers_of_roots": root_powers,
    "recurrence": recurrence,
    "area_of_a_quadrilateral": quadrilateral,
    "triangle_area": lambda a, b, c: sp.Triangle(sss=(a, b, c)).area,
    "lattice_points_in_a_circle": in_circle,
    "polynomial_integral": lambda a, b, c, low, high: sp.integrate(
        a * x**2 + b * x + c, (x, low, high)
    ),
}


def collatz(number):
    return 0 if number == 1 else 1 + collatz(number // 2 if number % 2 == 0 else 3 * number + 1)


def value_of(answer):
    """Of the LaTeX that the generator writes: integers, fractions and roots."""
    text = answer.replace("\\frac{", "((").replace("}{", ")/(").replace("\\sqrt{", "*sqrt(")
    text = text.replace("}", ")").replace("((*", "((").replace("(*sqrt", "(sqrt")
    text = text.removeprefix("*") + ")" * (text.count("(") - text.count(")"))
    return sp.sympify(text, rational=True)


@pytest.fixture(scope="module")
def rows():
    number = len(KINDS)
    return generate_rows(25 * number, seed=3, held_out=False) + generate_rows(
        10 * number, seed=3, held_out=True
    )


def test_every_kind_has_a_second_way():
    assert SOLVERS.keys() == KINDS.keys()
    assert len(KINDS) >= 20


@pytest.mark.parametrize("name", KINDS)
def test_the_answer_is_the_same_by_another_way(rows, name):
    mine = [row for row in rows if row["info"]["name"] == name]
    assert len(mine) == 35
    assert len({row["answer"] for row in mine}) >= 10
    for row in mine:
        value = sp.sympify(SOLVERS[name](*row["info"]["numbers"]))
        assert sp.simplify(value_of(row["answer"]) - value) == 0, row


def test_the_numbers_of_a_problem_stand_in_its_text(rows):
    for row in rows:
        if row["info"]["name"] in (
            "two_congruences",
            "paths_around_a_point",
            "triangle_area",
            "same_colour",
        ):
            assert all(str(number) in row["question"] for number in row["info"]["numbers"]), row


def test_fractions_are_reduced():
    assert (latex(Fraction(4, 6)), latex(Fraction(-1, 2)), latex(-3)) == (
        "\\frac{2}{3}",
        "-\\frac{1}{2}",
        "-3",
    )
