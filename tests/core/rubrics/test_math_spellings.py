r"""Answers as models end and dress them: punctuation, spaces, fonts, percent signs, words, boxes."""

from __future__ import annotations

import pytest

from verifiers.rubrics.math_verification import MathVerifier, Outcome

EQUAL = [
    ("42", r"\text{42.}"),
    ("42", "42~"),
    ("42", "42\\ "),
    ("42", "42~."),
    ("42", r"42\quad"),
    ("42", "42。"),
    ("42", r"42~\text{cm}"),
    ("42", r"\mathbf{42}~\text{km/h}"),
    ("42", r"\boldsymbol{42}"),
    ("42", r"\bm{42}"),
    ("42", r"{\bf 42}"),
    ("42", r"{\rm 42}"),
    ("42", r"\boxed {42}"),
    ("42", "\\boxed\n{42}"),
    ("42", r"\fbox{42}"),
    ("x+1", r"\boldsymbol{x+1}"),
    (r"\frac12", r"\boldsymbol{\frac{1}{2}}"),
    ("12.5", r"12.5\%"),
    ("12.5", "12.5 %."),
    (r"12.5\%", "12.5"),
    (r"12.5\%", "0.125"),
    ("0.125", r"12.5\%"),
    ("50", r"50\%"),
    ("0.5", r"50\%"),
    ("1000", r"1{,}000~"),
    ("14-i", "14.0-1.0i"),
    (r"1-\frac{1}{\mathrm{e}}", r"1-\frac1e"),
    (r"\binom52", "10"),
    ("north", r"\text{north}"),
]
DIFFERENT = [
    ("42", "43~"),
    ("42", "42!"),
    ("42", r"\boldsymbol{43}"),
    ("12.5", r"1.25\%"),
    ("12.5", r"12.5\%, 13\%"),
    ("50", r"5\%"),
    ("0.5", r"5\%"),
    (r"5\%", "500"),
    ("x+0.5", "x+1"),
    ("14-i", "14.0-2.0i"),
    (r"\binom52", "5"),
]


@pytest.fixture(scope="module")
def verifier():
    pytest.importorskip("math_verify")
    return MathVerifier(timeout_seconds=20, max_workers=1)


async def test_an_answer_is_read_however_it_is_dressed(verifier):
    outcomes = {pair: await verifier.compare(*pair) for pair in EQUAL}
    assert [pair for pair, outcome in outcomes.items() if outcome is not Outcome.EQUAL] == []


async def test_another_answer_stays_another(verifier):
    """Negative control."""
    outcomes = {pair: await verifier.compare(*pair) for pair in DIFFERENT}
    assert [pair for pair, outcome in outcomes.items() if outcome is not Outcome.DIFFERENT] == []


async def test_a_word_that_is_no_mathematics_is_not_judged_wrong(verifier):
    assert await verifier.compare("north", r"\text{south}") is Outcome.UNREADABLE_GOLD
