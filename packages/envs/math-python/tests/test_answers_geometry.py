"""The answers of the topic geometry, computed: by sympy where it solves the problem, else by trying
everything."""

import pytest
import sympy as sp
from sympy import (
    Circle,
    Ellipse,
    Line,
    Point,
    Polygon,
    Rational,
    RegularPolygon,
    Triangle,
    cos,
    pi,
    sin,
    sqrt,
)

from vf_math_python.written import problems

t = sp.Symbol("t", real=True)


def triangle(a, b, c):
    return Triangle(sss=(a, b, c))


def chord(radius, distance):
    first, second = Circle(Point(0, 0), radius).intersection(
        Line(Point(distance, 0), Point(distance, 1))
    )
    return first.distance(second)


def ring_of_a_square(side):
    square = RegularPolygon(Point(0, 0), side / sqrt(2), 4)
    return square.circumcircle.area - square.incircle.area


def volume(*corners):
    """A sixth of the box spanned by the edges from the first corner."""
    base, *corners_left = (sp.Matrix(corner) for corner in corners)
    return sp.Abs(sp.Matrix.hstack(*(corner - base for corner in corners_left)).det()) / 6


def inner_lattice_points(*corners):
    """Point by point, by the sides of the edges."""
    inside = 0
    for px in range(13):
        for py in range(10):
            sides = [
                (bx - ax) * (py - ay) - (by - ay) * (px - ax)
                for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1], strict=True)
            ]
            inside += all(side > 0 for side in sides) or all(side < 0 for side in sides)
    return inside


def common_tangent(small, large):
    """Both circles stand on the line; the distance of their centres is the sum of the radii."""
    solutions = sp.solve(t**2 + (large - small) ** 2 - (large + small) ** 2, t)
    return max(solutions)


def median(a, b, c):
    shape = triangle(b, a, c)  # the side of length b lies on the axis
    left, right, top = shape.vertices
    return left.midpoint(right).distance(top) if left.distance(right) == b else None


def cone(radius, slant):
    height = sqrt(slant**2 - radius**2)
    return sp.integrate(pi * (radius * (1 - t / height)) ** 2, (t, 0, height))


def cyclic_area(a, b, c, d):
    """Two triangles on the diagonal whose opposite angles add up to a straight angle."""
    cosine = sp.solve(a**2 + b**2 - 2 * a * b * t - (c**2 + d**2 + 2 * c * d * t), t)[0]
    return (a * b + c * d) * sqrt(1 - cosine**2) / 2


def trapezoid(long, short, left, right):
    """Height and foot from the two legs; the foot of the left leg is at the origin."""
    foot, height = sp.symbols("foot height", real=True)
    gap = long - short
    solutions = sp.solve(
        [foot**2 + height**2 - left**2, (gap - foot) ** 2 + height**2 - right**2], [foot, height]
    )
    return (long + short) * max(height for _, height in solutions) / 2


def clock(hour, minute):
    apart = abs(Rational(hour * 60 + minute, 2) - 6 * minute)
    return min(apart, 360 - apart)


def distances(side):
    """From a point that is no centre to the three sides."""
    a, b, c = Point(0, 0), Point(side, 0), Point(Rational(side, 2), side * sqrt(3) / 2)
    inside = Point(Rational(side, 3), Rational(side, 5))
    return sp.simplify(sum(Line(*pair).distance(inside) for pair in ((a, b), (b, c), (c, a))))


CHECKS = {
    "inscribed-circle": lambda: triangle(13, 14, 15).inradius,
    "circumscribed-circle": lambda: triangle(13, 14, 15).circumradius,
    "area-of-a-pentagon": lambda: abs(Polygon((0, 0), (6, 1), (8, 5), (3, 7), (-1, 4)).area),
    "chord": lambda: chord(10, 6),
    "distance-to-a-line": (
        lambda: Line(5 * t - 12 * sp.Symbol("y") + 7, x="t", y="y").distance(Point(3, 4))
    ),
    "regular-hexagon": lambda: RegularPolygon(Point(0, 0), 4, 6).area,
    "ring-of-a-square": lambda: ring_of_a_square(6),
    "regular-tetrahedron": lambda: volume(*(sp.Matrix(v) * 3 / sqrt(2) for v in TETRAHEDRON)),
    "diagonal-of-a-box": lambda: Point(0, 0, 0).distance(Point(3, 4, 12)),
    "third-side": lambda: Point(7, 0).distance(Point(8 * cos(pi / 3), 8 * sin(pi / 3))),
    "lattice-points-in-a-triangle": lambda: inner_lattice_points((0, 0), (12, 0), (0, 9)),
    "circle-through-three-points": lambda: Circle(Point(0, 0), Point(8, 0), Point(0, 6)).area,
    "common-tangent": lambda: common_tangent(4, 9),
    "angle-of-a-polygon": lambda: 180 - Rational(360, 15),
    "median": lambda: median(13, 14, 15),
    "altitude-to-the-hypotenuse": lambda: Line(Point(8, 0), Point(0, 15)).distance(Point(0, 0)),
    "cone": lambda: cone(3, 5),
    "reflection": lambda: sum(Point(2, 5).reflect(Line(Point(0, -1), Point(1, 0)))),
    "tetrahedron-in-space": lambda: volume((0, 0, 0), (1, 2, 3), (4, 0, 1), (2, 5, 0)),
    "ball-in-a-cube": lambda: sp.integrate(pi * (1 - t**2), (t, -1, 1)) / 8,
    "clock-hands": lambda: clock(3, 40),
    "cyclic-quadrilateral": lambda: cyclic_area(5, 6, 7, 8),
    "trapezoid": lambda: trapezoid(20, 10, 6, 8),
    "foci-of-an-ellipse": lambda: (lambda foci: foci[0].distance(foci[1]))(
        Ellipse(Point(0, 0), 5, 3).foci
    ),
    "distances-in-an-equilateral-triangle": lambda: distances(10),
}
TETRAHEDRON = ((1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1))  # edges of 2 * sqrt(2)


def test_every_problem_of_the_topic_is_computed():
    assert CHECKS.keys() == problems("geometry").keys()
    assert len(CHECKS) >= 25


@pytest.mark.parametrize("name", CHECKS)
def test_the_answer_is_what_the_computation_gives(name, is_answer):
    value = CHECKS[name]()
    assert is_answer("geometry", name, value)
    assert not is_answer("geometry", name, value + 1)  # the comparison can fail
