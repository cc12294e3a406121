"""The answers of the topic sequences, computed: by sympy where it solves the problem, else by
trying everything."""

import math
from itertools import accumulate, count

import pytest
import sympy as sp

from vf_math_python.written import problems

n = sp.Symbol("n", integer=True, positive=True)


def fibonacci(number):
    values = [1, 1]
    while len(values) < number:
        values.append(values[-1] + values[-2])
    return values


def repeated(step, start, times):
    for _ in range(times):
        start = step(start)
    return start


def arithmetic_sum():
    a, d = sp.symbols("a d")
    solution = sp.solve([a + 2 * d - 11, a + 7 * d - 31], [a, d])
    return sum(solution[a] + k * solution[d] for k in range(20))


def two_before(step, first, second, number):
    """The term with the given index, counted from 0."""
    pair = (first, second)
    for _ in range(number):
        pair = (pair[1], step(*pair))
    return pair[0]


def collatz(number):
    steps = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps


def last_of_circle(people, every):
    circle = list(range(1, people + 1))
    position = 0
    while len(circle) > 1:
        position = (position + every - 1) % len(circle)
        circle.pop(position)
    return circle[0]


CHECKS = {
    "multiples-of-three-or-five": lambda: sum(k for k in range(1, 201) if k % 3 == 0 or k % 5 == 0),
    "telescoping-sum": lambda: sum(sp.Rational(1, k * (k + 1)) for k in range(1, 100)),
    "sum-of-fibonacci-numbers": lambda: sum(fibonacci(20)),
    "doubling-plus-three": lambda: repeated(lambda a: 2 * a + 3, 1, 9),
    "sum-of-squares": lambda: sum(k * k for k in range(1, 31)),
    "alternating-geometric-series": lambda: sp.summation(
        12 * sp.Rational(-2, 3) ** (n - 1), (n, 1, sp.oo)
    ),
    "series-with-growing-numerators": lambda: sp.summation(n / 3**n, (n, 1, sp.oo)),
    "arithmetic-sequence": arithmetic_sum,
    "digits-to-a-hundred": lambda: sum(int(digit) for k in range(1, 101) for digit in str(k)),
    "differences-of-neighbours": lambda: two_before(lambda a, b: b - a, 2, 5, 2023),
    "sum-of-cubes": lambda: sum(k**3 for k in range(1, 16)),
    "weighted-powers-of-two": lambda: sum(k * 2**k for k in range(1, 11)),
    "two-term-recurrence": lambda: two_before(lambda a, b: 5 * b - 6 * a, 1, 4, 8),
    "number-of-terms": lambda: len(range(7, 304, 4)),
    "integer-parts-of-roots": lambda: sum(math.isqrt(k) for k in range(1, 101)),
    "binomial-sum": lambda: sum(math.comb(10, k) * 2**k for k in range(11)),
    "alternating-squares": lambda: sum((-1) ** (k + 1) * k * k for k in range(1, 21)),
    "telescoping-series": lambda: sp.limit(
        sp.summation(1 / (n**2 - 1), (n, 2, sp.Symbol("m"))), sp.Symbol("m"), sp.oo
    ),
    "three-n-plus-one": lambda: collatz(27),
    "digit-of-a-long-number": lambda: int("".join(map(str, range(1, 500)))[999]),
    "even-fibonacci-numbers": lambda: sum(f for f in fibonacci(30) if f < 1000 and f % 2 == 0),
    "last-one-standing": lambda: last_of_circle(41, 3),
    "telescoping-product": lambda: sp.prod(1 - sp.Rational(1, k * k) for k in range(2, 51)),
    "triangular-number-with-many-divisors": lambda: next(
        triangle for triangle in accumulate(count(1)) if sp.divisor_count(triangle) > 50
    ),
    "squaring-minus-two": lambda: repeated(lambda a: a * a - 2, 3, 3),
}


def test_every_problem_of_the_topic_is_computed():
    assert CHECKS.keys() == problems("sequences").keys()
    assert len(CHECKS) >= 25


@pytest.mark.parametrize("name", CHECKS)
def test_the_answer_is_what_the_computation_gives(name, is_answer):
    value = CHECKS[name]()
    assert is_answer("sequences", name, value)
    assert not is_answer("sequences", name, value + 1)  # the comparison can fail
