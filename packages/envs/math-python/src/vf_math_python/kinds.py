"""Kinds of generated problems: each function samples numbers, formulates a problem and computes its
answer.

A kind returns None when the sampled numbers are inconsistent, and is then called again. The numbers
identify a problem of its kind. Answers are LaTeX: an integer, a fraction or a root in simplest
form.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import product

Problem = tuple[str, str]
"""Question and answer."""


class Draw:
    """Samples integers and records them."""

    def __init__(self, generator: random.Random):
        self._generator = generator
        self.numbers: list[int] = []

    def number(self, low: int, high: int) -> int:
        """An integer from ``low`` to ``high`` inclusive."""
        self.numbers.append(self._generator.randint(low, high))
        return self.numbers[-1]


Kind = Callable[[Draw], Problem | None]
KINDS: dict[str, Kind] = {}
"""Name -> kind."""


def kind(function: Kind) -> Kind:
    """Register a kind under its name."""
    KINDS[function.__name__] = function
    return function


def latex(value: int | Fraction) -> str:
    r"""An integer or a fraction.

    >>> latex(Fraction(-3, 6)), latex(Fraction(4, 2))
    ('-\\frac{1}{2}', '2')
    """
    value = Fraction(value)
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def signed(coefficient: int, symbol: str) -> str:
    """A term of a sum after the first.

    >>> signed(-3, "x"), signed(1, "x"), signed(-2, "")
    (' - 3x', ' + x', ' - 2')
    """
    size = "" if abs(coefficient) == 1 and symbol else str(abs(coefficient))
    return f" {'-' if coefficient < 0 else '+'} {size}{symbol}"


def _not_zero(*numbers: int) -> bool:
    return all(numbers)


# --- number theory --------------------------------------------------------------------------------


@kind
def power_remainder(d: Draw) -> Problem | None:
    base, exponent, modulus = d.number(2, 60), d.number(40, 900), d.number(11, 300)
    return f"What is the remainder when ${base}^{{{exponent}}}$ is divided by {modulus}?", str(
        pow(base, exponent, modulus)
    )


@kind
def divisor_sum(d: Draw) -> Problem | None:
    number = d.number(100, 9000)
    total = sum(
        n + number // n if n * n != number else n
        for n in range(1, math.isqrt(number) + 1)
        if number % n == 0
    )
    return f"What is the sum of all positive divisors of {number}?", str(total)


@kind
def two_congruences(d: Draw) -> Problem | None:
    first, second = d.number(5, 60), d.number(5, 60)
    a, b = d.number(1, 59), d.number(1, 59)
    if first >= second or math.gcd(first, second) != 1 or a >= first or b >= second:
        return None
    solution = (a + first * ((b - a) * pow(first, -1, second) % second)) % (first * second)
    return (
        (
            f"What is the smallest positive integer that leaves the remainder {a} when divided by"
            f" {first} and the remainder {b} when divided by {second}?"
        ),
        str(solution),
    )


@kind
def coprime_count(d: Draw) -> Problem | None:
    top, number = d.number(50, 3000), d.number(6, 210)
    primes = [
        p
        for p in range(2, number + 1)
        if number % p == 0 and all(p % q for q in range(2, math.isqrt(p) + 1))
    ]
    if len(primes) < 2:
        return None
    count = 0
    for signs in product((0, 1), repeat=len(primes)):
        chosen = [p for p, used in zip(primes, signs, strict=True) if used]
        count += (-1) ** len(chosen) * (top // math.prod(chosen))
    return (
        (
            f"How many of the integers from 1 to {top} have no common factor with {number} other"
            " than 1?"
        ),
        str(count),
    )


@kind
def factorial_zeros(d: Draw) -> Problem | None:
    number, prime = d.number(50, 4000), (2, 3, 5, 7, 11, 13)[d.number(0, 5)]
    power, count = prime, 0
    while power <= number:
        count, power = count + number // power, power * prime
    return f"What is the largest integer $n$ for which ${prime}^n$ divides ${number}!$?", str(count)


@kind
def digit_sum(d: Draw) -> Problem | None:
    base, exponent = d.number(2, 40), d.number(15, 90)
    return f"What is the sum of the decimal digits of ${base}^{{{exponent}}}$?", str(
        sum(map(int, str(base**exponent)))
    )


@kind
def collatz_steps(d: Draw) -> Problem | None:
    number, steps = d.number(5, 5000), 0
    value = number
    while value != 1:
        value, steps = (value // 2 if value % 2 == 0 else 3 * value + 1), steps + 1
    return (
        (
            f"Begin with {number}. Halve an even number; replace an odd number $n$ by $3n + 1$."
            " After how many steps is 1 reached for the first time?"
        ),
        str(steps),
    )


# --- counting and probability ---------------------------------------------------------------------


@kind
def paths_around_a_point(d: Draw) -> Problem | None:
    right, up, x, y = d.number(4, 11), d.number(4, 11), d.number(1, 10), d.number(1, 10)
    if x >= right or y >= up:
        return None
    through = math.comb(x + y, x) * math.comb(right - x + up - y, right - x)
    return (
        (
            f"A path from $(0, 0)$ to $({right}, {up})$ goes one unit right or one unit up in each"
            f" step. How many such paths do not pass through $({x}, {y})$?"
        ),
        str(math.comb(right + up, right) - through),
    )


@kind
def bounded_sums(d: Draw) -> Problem | None:
    parts, bound, total = d.number(3, 6), d.number(3, 9), d.number(5, 30)
    if total > parts * bound - 2:
        return None
    count = sum(
        (-1) ** k * math.comb(parts, k) * math.comb(total - k * (bound + 1) + parts - 1, parts - 1)
        for k in range(parts + 1)
        if total >= k * (bound + 1)
    )
    return (
        (
            f"In how many ways can {total} be written as an ordered sum of {parts} integers, each"
            f" from 0 to {bound}?"
        ),
        str(count),
    )


@kind
def subsets_with_a_sum(d: Draw) -> Problem | None:
    size, total = d.number(8, 18), d.number(12, 60)
    ways = [1] + [0] * total
    for element in range(1, size + 1):
        for amount in range(total, element - 1, -1):
            ways[amount] += ways[amount - element]
    if ways[total] < 5:
        return None
    return (
        f"How many subsets of $\\{{1, 2, \\ldots, {size}\\}}$ have elements with the sum {total}?",
        str(ways[total]),
    )


@kind
def dice_sum(d: Draw) -> Problem | None:
    dice, sides, total = d.number(2, 4), (4, 6, 8, 10)[d.number(0, 3)], d.number(5, 34)
    counts = {0: 1}
    for _ in range(dice):
        counts = {
            s: sum(counts.get(s - face, 0) for face in range(1, sides + 1))
            for s in range(dice * sides + 1)
        }
    if counts.get(total, 0) < 2:
        return None
    return (
        (
            f"{dice} fair dice, each with the numbers 1 to {sides}, are thrown. What is the"
            f" probability that their sum is {total}?"
        ),
        latex(Fraction(counts[total], sides**dice)),
    )


@kind
def different_draws(d: Draw) -> Problem | None:
    kinds, draws = d.number(3, 15), d.number(2, 6)
    return (
        (
            f"{draws} times a number from 1 to {kinds} is drawn at random and put back. What is the"
            " expected number of different numbers that are drawn?"
        ),
        latex(kinds * (1 - Fraction(kinds - 1, kinds) ** draws)),
    )


@kind
def same_colour(d: Draw) -> Problem | None:
    red, blue, green, drawn = d.number(2, 12), d.number(2, 12), d.number(2, 12), d.number(2, 3)
    total = math.comb(red + blue + green, drawn)
    return (
        (
            f"A bag holds {red} red, {blue} blue and {green} green balls. {drawn} of them are drawn"
            " at once. What is the probability that they all have the same colour?"
        ),
        latex(Fraction(sum(math.comb(n, drawn) for n in (red, blue, green)), total)),
    )


# --- algebra, sequences and geometry --------------------------------------------------------------


@kind
def binomial_coefficient(d: Draw) -> Problem | None:
    a, b, power, k = d.number(2, 6), d.number(-7, 7), d.number(5, 11), d.number(1, 10)
    if not _not_zero(b) or k >= power:
        return None
    answer = math.comb(power, k) * a**k * b ** (power - k)
    return (
        (
            f"What is the coefficient of $x^{{{k}}}$ in the expansion of"
            f" $({a}x{signed(b, '')})^{{{power}}}$?"
        ),
        str(answer),
    )


@kind
def quadratic_through_points(d: Draw) -> Problem | None:
    a, b, c, at = d.number(-6, 6), d.number(-9, 9), d.number(-9, 9), d.number(4, 20)
    if not _not_zero(a):
        return None
    at_1, two, three, there = (a * x * x + b * x + c for x in (1, 2, 3, at))
    return (
        (
            f"A polynomial $P$ of degree at most 2 has $P(1) = {at_1}$, $P(2) = {two}$ and $P(3) ="
            f" {three}$. What is $P({at})$?"
        ),
        str(there),
    )


@kind
def determinant(d: Draw) -> Problem | None:
    rows = [[d.number(-9, 9) for _ in range(3)] for _ in range(3)]
    (a, b, c), (e, f, g), (h, i, j) = rows
    value = a * (f * j - g * i) - b * (e * j - g * h) + c * (e * i - f * h)
    if value == 0:
        return None
    shown = ["$(" + ", ".join(map(str, row)) + ")$" for row in rows]
    return (
        (
            f"What is the determinant of the matrix with the rows {shown[0]}, {shown[1]} and"
            f" {shown[2]}?"
        ),
        str(value),
    )


@kind
def powers_of_roots(d: Draw) -> Problem | None:
    p, q, r, power = d.number(-6, 6), d.number(-6, 6), d.number(-6, 6), d.number(3, 7)
    if not _not_zero(p, q, r):
        return None
    sums = [3, -p, p * p - 2 * q]  # Newton's identities for x^3 + p x^2 + q x + r
    while len(sums) <= power:
        sums.append(-p * sums[-1] - q * sums[-2] - r * sums[-3])
    terms = signed(p, "x^2") + signed(q, "x") + signed(r, "")
    return (
        (
            f"The complex roots of $x^3{terms} = 0$ are $a$, $b$ and $c$. What is $a^{power} +"
            f" b^{power} + c^{power}$?"
        ),
        str(sums[power]),
    )


@kind
def recurrence(d: Draw) -> Problem | None:
    a = d.number(2, 7)
    b = d.number(-5, 5)
    first = d.number(0, 9)
    second = d.number(1, 9)
    n = d.number(20, 200)
    modulus = d.number(50, 999)
    if not _not_zero(b):
        return None
    now, then = first, second
    for _ in range(n):
        now, then = then, a * then + b * now
    step = f"{a}a_{{n-1}}{signed(b, 'a_{n-2}')}"
    return (
        (
            f"Let $a_0 = {first}$, $a_1 = {second}$ and $a_n = {step}$ for $n \\ge 2$. What is the"
            f" remainder, from 0 to {modulus - 1}, when $a_{{{n}}}$ is divided by {modulus}?"
        ),
        str(now % modulus),
    )


@kind
def area_of_a_quadrilateral(d: Draw) -> Problem | None:
    corners = [
        (d.number(0, 12), d.number(-9, -1)),
        (d.number(8, 20), d.number(0, 9)),
        (d.number(0, 12), d.number(10, 20)),
        (d.number(-9, -1), d.number(0, 9)),
    ]
    twice = sum(
        ax * by - ay * bx
        for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1], strict=True)
    )
    turns = zip(corners, corners[1:] + corners[:1], corners[2:] + corners[:2], strict=True)
    if any(
        (bx - ax) * (cy - by) <= (by - ay) * (cx - bx) for (ax, ay), (bx, by), (cx, cy) in turns
    ):
        return None  # convex, so that the order is the order around it
    shown = [f"$({x}, {y})$" for x, y in corners]
    return (
        (
            f"What is the area of the quadrilateral with the vertices {shown[0]}, {shown[1]},"
            f" {shown[2]} and {shown[3]}, in this order?"
        ),
        latex(Fraction(twice, 2)),
    )


@kind
def triangle_area(d: Draw) -> Problem | None:
    a, b, c = d.number(4, 30), d.number(4, 30), d.number(4, 30)
    if not (a <= b <= c < a + b):
        return None
    sixteen = (a + b + c) * (-a + b + c) * (a - b + c) * (a + b - c)
    outside = max(n for n in range(1, math.isqrt(sixteen) + 1) if sixteen % (n * n) == 0)
    inside, factor = sixteen // (outside * outside), Fraction(outside, 4)
    if inside == 1:
        return None
    top = "" if factor.numerator == 1 else str(factor.numerator)
    root = f"{top}\\sqrt{{{inside}}}"
    answer = root if factor.denominator == 1 else f"\\frac{{{root}}}{{{factor.denominator}}}"
    return f"What is the area of a triangle with sides {a}, {b} and {c}?", answer


@kind
def lattice_points_in_a_circle(d: Draw) -> Problem | None:
    square, cx = d.number(20, 900), d.number(-9, 9)
    reach = math.isqrt(square)
    count = sum(2 * math.isqrt(square - x * x) + 1 for x in range(-reach, reach + 1))
    return (
        (
            "How many points $(x, y)$ with integer coordinates satisfy"
            f" $(x{signed(cx, '') if cx else ''})^2 + y^2 \\le {square}$?"
        ),
        str(count),
    )


@kind
def polynomial_integral(d: Draw) -> Problem | None:
    a = d.number(1, 9)
    b = d.number(-9, 9)
    c = d.number(-9, 9)
    low = d.number(-4, 2)
    high = d.number(3, 7)
    if not _not_zero(b, c):
        return None

    @cache
    def antiderivative(x: int) -> Fraction:
        return Fraction(a * x**3, 3) + Fraction(b * x * x, 2) + c * x

    lead = "" if a == 1 else str(a)
    return (
        f"What is $\\int_{{{low}}}^{{{high}}} ({lead}x^2{signed(b, 'x')}{signed(c, '')})\\,dx$?",
        latex(antiderivative(high) - antiderivative(low)),
    )
