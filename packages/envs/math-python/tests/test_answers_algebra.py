"""The answers of the topic algebra, computed: by sympy where it solves the problem, else by trying
everything."""

import math

import pytest
import sympy as sp

from vf_math_python.written import problems

x, y, k = sp.symbols("x y k", real=True)


def real_roots(equation):
    return sp.solveset(equation, x, sp.S.Reals)


def interpolated(points, at):
    return sp.interpolate(points, x).subs(x, at)


def function_of_the_reciprocal():
    at, inverse = sp.symbols("at inverse")
    solved = sp.solve(
        [at + 2 * inverse - 3 * 4, inverse + 2 * at - sp.Rational(3, 4)], [at, inverse]
    )
    return solved[at]


def three_symmetric_equations():
    a, b, c = sp.symbols("a b c")
    solutions = sp.solve([a + b + c - 6, a**2 + b**2 + c**2 - 14, a * b * c - 6], [a, b, c])
    (value,) = {sp.simplify(sum(root**3 for root in solution)) for solution in solutions}
    return value


def even_coefficients():
    terms = sp.Poly(sp.expand((3 * x - 2 * y) ** 7), x, y).terms()
    return sum(coefficient for (power, _), coefficient in terms if power % 2 == 0)


def endless_square_root():
    value = 0.0
    for _ in range(60):
        value = (12 + value) ** 0.5
    return round(value, 9)


def roots_of(polynomial):
    return sp.Poly(polynomial, x).all_roots()


def product_over_roots_of_unity():
    w = sp.exp(2 * sp.pi * sp.I / 5)
    return round(complex(sp.prod(1 - w**power for power in range(1, 5)).evalf(30)).real, 9)


CHECKS = {
    "cubes-of-roots": lambda: sp.expand(sum(root**3 for root in roots_of(x**2 - 7 * x + 3))),
    "fifth-power-sum": lambda: sp.simplify(
        (lambda r: r**5 + 1 / r**5)(max(sp.solve(x + 1 / x - 5, x)))
    ),
    "two-absolute-values": lambda: sum(real_roots(sp.Abs(2 * x - 5) + sp.Abs(x + 1) - 12)),
    "two-square-roots": lambda: sum(sp.solve(sp.sqrt(x + 7) + sp.sqrt(x - 5) - 6, x)),
    "cubic-through-four-points": lambda: interpolated([(1, 1), (2, 4), (3, 9), (4, 22)], 6),
    "three-symmetric-equations": three_symmetric_equations,
    "three-logarithms": lambda: next(
        n for n in range(2, 1000) if abs(sum(math.log(n, b) for b in (2, 4, 8)) - 11) < 1e-9
    ),
    "quartic-and-absolute-value": lambda: sum(
        sp.Poly(x**4 - 5 * x**2 + 4 - sign * x, x).count_roots(*bounds)
        for sign, bounds in ((1, (0, None)), (-1, (None, 0)))
    ),
    "remainder-of-a-high-power": (
        lambda: sp.rem(sp.Poly(x**100, x), sp.Poly(x**2 - 3 * x + 2, x)).eval(3)
    ),
    "sum-from-product-and-squares": lambda: max(
        a + b for a, b in sp.solve([x * y - 16, x**2 + y**2 - 68], [x, y])
    ),
    "least-weighted-squares": lambda: sp.minimum((x**2 + 4 * (5 - x) ** 2), x),
    "function-three-times": lambda: (lambda f: f(f(f(sp.Integer(2)))))(
        lambda t: (2 * t + 3) / (t - 1)
    ),
    "function-of-the-reciprocal": function_of_the_reciprocal,
    "coefficients-of-even-powers": even_coefficients,
    "endless-square-root": endless_square_root,
    "conjugate-square-roots": lambda: (
        sp.sqrtdenest(sp.sqrt(11 + 6 * sp.sqrt(2))) + sp.sqrtdenest(sp.sqrt(11 - 6 * sp.sqrt(2)))
    ),
    "three-by-three-determinant": lambda: sp.Matrix([[2, 1, 3], [0, 4, 1], [5, 2, 6]]).det(),
    "no-real-solutions": lambda: sum(n * n - 4 * (n + 8) < 0 for n in range(-100, 101)),
    "complex-square-root": lambda: (lambda z: sp.re(z) + sp.im(z))(sp.sqrt(5 + 12 * sp.I)),
    "product-over-roots-of-unity": product_over_roots_of_unity,
    "exponential-quadratic": lambda: sum(sp.solve(4**x - 6 * 2**x + 8, x)),
    "reciprocals-of-roots": lambda: sum(1 / root for root in roots_of(x**3 - 4 * x**2 + x + 6)),
    "product-from-sum": lambda: sp.simplify(
        (lambda pair: pair[0] * pair[1])(
            sp.solve([x + y - 5, x**2 - x * y + y**2 - 7], [sp.Symbol("x", real=True), y])[0]
        )
    ),
    "inverse-of-a-cubic": lambda: sum(real_roots(x**3 + x - 30)),
    "sign-of-a-product": lambda: sum((n - 3) * (n - 5) * (n + 2) < 0 for n in range(-10, 11)),
}


def test_every_problem_of_the_topic_is_computed():
    assert CHECKS.keys() == problems("algebra").keys()
    assert len(CHECKS) >= 25


@pytest.mark.parametrize("name", CHECKS)
def test_the_answer_is_what_the_computation_gives(name, is_answer):
    value = CHECKS[name]()
    assert is_answer("algebra", name, value)
    assert not is_answer("algebra", name, value + 1)  # the comparison can fail
