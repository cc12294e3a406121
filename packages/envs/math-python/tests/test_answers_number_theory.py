"""The answers of the topic number theory, computed: by sympy where it solves the problem, else by
trying everything."""

import math
from itertools import count

import pytest
import sympy as sp

from vf_math_python.written import problems


def first(condition, start=1):
    return next(n for n in count(start) if condition(n))


def digits(number, base=10):
    while number:
        number, digit = divmod(number, base)
        yield digit


def divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


CHECKS = {
    "sum-of-divisors": lambda: sum(divisors(360)),
    "divisors-of-a-factorial": lambda: sp.divisor_count(math.factorial(10)),
    "last-three-digits": lambda: 7**2023 % 1000,
    "three-remainders": lambda: first(lambda n: (n % 3, n % 5, n % 7) == (2, 3, 2)),
    "power-modulo-thirteen": lambda: 3**100 % 13,
    "zeros-of-a-factorial": lambda: first(lambda n: math.factorial(2023) % 10**n != 0, 490) - 1,
    "gcd-of-mersenne-numbers": lambda: math.gcd(2**30 - 1, 2**42 - 1),
    "coprime-to-thirty": lambda: sum(math.gcd(n, 30) == 1 for n in range(1, 1001)),
    "digits-of-a-power-of-two": lambda: sum(digits(2**50)),
    "largest-prime-factor": lambda: max(sp.factorint(3**12 - 1)),
    "two-unit-fractions": lambda: sum((12 * n) % (n - 12) == 0 for n in range(13, 12 * 13 + 1)),
    "modular-inverse": lambda: first(lambda n: 17 * n % 101 == 1),
    "composite-values": lambda: sum(not sp.isprime(n * n + n + 41) for n in range(100)),
    "sum-of-factorials": lambda: sum(map(math.factorial, range(1, 51))) % 15,
    "fifteen-divisors": lambda: first(lambda n: len(divisors(n)) == 15),
    "sum-of-primes": lambda: sum(n for n in range(2, 60) if len(divisors(n)) == 2),
    "digits-in-base-seven": lambda: sum(digits(2023, 7)),
    "square-divisors": lambda: sum(6**8 % (n * n) == 0 for n in range(1, 6**4 + 1)),
    "square-roots-of-one": lambda: sum(n * n % 105 == 1 for n in range(105)),
    "linear-equation": lambda: sum((400 - 11 * n) % 7 == 0 for n in range(1, 37)),
    "order-of-two": lambda: first(lambda n: (2**n - 1) % 127 == 0),
    "totient": lambda: sum(math.gcd(n, 2024) == 1 for n in range(1, 2025)),
    "threes-in-a-factorial": lambda: first(lambda n: math.factorial(100) % 3**n != 0) - 1,
    "factorial-divisible-by-a-thousand": lambda: first(lambda n: math.factorial(n) % 1000 == 0),
    "palindromic-primes": lambda: sum(
        sp.isprime(n) and str(n) == str(n)[::-1] for n in range(100, 1000)
    ),
}


def test_every_problem_of_the_topic_is_computed():
    assert CHECKS.keys() == problems("number_theory").keys()
    assert len(CHECKS) >= 25


@pytest.mark.parametrize("name", CHECKS)
def test_the_answer_is_what_the_computation_gives(name, is_answer):
    value = CHECKS[name]()
    assert is_answer("number_theory", name, value)
    assert not is_answer("number_theory", name, value + 1)  # the comparison can fail
