"""What the tests of the written answers share."""

import pytest
import sympy


@pytest.fixture(scope="session")
def is_answer():
    """``is_answer(topic, name, value)``: whether a problem's LaTeX answer is this sympy value,
    exactly."""
    from math_verify import LatexExtractionConfig, parse

    from vf_math_python.written import problems

    config = [LatexExtractionConfig(boxed_match_priority=0)]

    def compare(topic, name, value):
        written = problems(topic)[name]["answer"]
        parsed = parse(
            f"\\boxed{{{written}}}", config, fallback_mode="no_fallback", parsing_timeout=None
        )[0]
        parsed = sympy.sympify(parsed).subs(sympy.Symbol("e"), sympy.E)
        return sympy.simplify(parsed - sympy.nsimplify(sympy.sympify(value), rational=False)) == 0

    return compare
