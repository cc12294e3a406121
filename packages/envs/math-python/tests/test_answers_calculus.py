"""The answers of the topic calculus, computed: by sympy where it solves the problem, else by trying
everything."""

import pytest
import sympy as sp
from sympy import E, Rational, cos, diff, exp, integrate, limit, log, oo, pi, sin, sqrt

from vf_math_python.written import problems

x, y, n = sp.symbols("x y n", positive=True)
r = sp.Symbol("r", real=True)


def slope_of_curve(equation, at):
    a, b = sp.symbols("a b", real=True)
    curve = equation(a, b)
    return (-diff(curve, a) / diff(curve, b)).subs({a: at[0], b: at[1]})


def growth():
    f = sp.Function("f")
    return sp.simplify(sp.dsolve(f(r).diff(r) - 2 * f(r), f(r), ics={f(0): 3}).rhs.subs(r, log(2)))


def line_at(f, at):
    return f.subs(x, at) - at * diff(f, x).subs(x, at)


CHECKS = {
    "integral-of-a-quadratic": lambda: integrate(3 * x**2 - 2 * x + 1, (x, 0, 2)),
    "derivative-of-a-product": lambda: diff(x**3 * exp(2 * x), x).subs(x, 1),
    "limit-of-a-sine": lambda: limit(sin(3 * r) / (5 * r), r, 0),
    "greatest-value-of-a-cubic": lambda: sp.maximum(r**3 - 6 * r**2 + 9 * r, r, sp.Interval(0, 5)),
    "between-parabola-and-line": lambda: integrate(
        r + 2 - r**2, (r, *sorted(sp.solve(r**2 - r - 2, r)))
    ),
    "integral-of-the-logarithm": lambda: integrate(log(x), (x, 1, E)),
    "compound-limit": lambda: limit((1 + 2 / n) ** n, n, oo),
    "taylor-coefficient": lambda: diff(exp(r) * cos(r), r, 4).subs(r, 0) / 24,
    "limit-of-a-cosine": lambda: limit((1 - cos(r)) / r**2, r, 0),
    "least-sum-with-reciprocal": lambda: sp.minimum(x + 16 / x, x, sp.Interval.open(0, oo)),
    "integration-by-parts": lambda: integrate(x * exp(x), (x, 0, 1)),
    "integral-of-sine-squared": lambda: integrate(sin(x) ** 2, (x, 0, pi / 2)),
    "inflection-point": lambda: sp.solve(diff(r**3 - 9 * r**2 + 5 * r + 2, r, 2), r)[0],
    "solid-of-revolution": lambda: integrate(pi * sqrt(x) ** 2, (x, 0, 4)),
    "second-derivative": lambda: diff(log(r**2 + 1), r, 2).subs(r, 2),
    "length-of-a-curve": lambda: integrate(
        sqrt(1 + diff(Rational(2, 3) * x ** Rational(3, 2), x) ** 2), (x, 0, 3)
    ),
    "integral-to-infinity": lambda: integrate(x**2 * exp(-x), (x, 0, oo)),
    "tangent-line": lambda: line_at(x**3 - x, 2),
    "largest-open-box": lambda: sp.maximum(r * (12 - 2 * r) ** 2, r, sp.Interval(0, 6)),
    "limit-of-a-difference": lambda: limit(sqrt(x**2 + 6 * x) - x, x, oo),
    "integral-of-a-rational-function": lambda: integrate(1 / (1 + x**2), (x, 0, 1)),
    "mean-value-of-sine": lambda: integrate(sin(x), (x, 0, pi)) / pi,
    "implicit-derivative": lambda: slope_of_curve(lambda a, b: a**2 + a * b + b**2 - 7, (1, 2)),
    "growth-equation": growth,
    "integral-of-an-absolute-value": lambda: (
        integrate(4 - r**2, (r, 0, 2)) + integrate(r**2 - 4, (r, 2, 3))
    ),
}


def test_every_problem_of_the_topic_is_computed():
    assert CHECKS.keys() == problems("calculus").keys()
    assert len(CHECKS) >= 25


@pytest.mark.parametrize("name", CHECKS)
def test_the_answer_is_what_the_computation_gives(name, is_answer):
    value = CHECKS[name]()
    assert is_answer("calculus", name, value)
    assert not is_answer("calculus", name, value + 1)  # the comparison can fail
