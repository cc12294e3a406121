"""Values against annotations: types are exact, ranges hold at their ends, and refusals say what is
allowed."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import ValidationError

from verifiers.errors import ConfigError
from verifiers.runtime.values import (
    FINITE,
    Flag,
    Form,
    MinusOne,
    Range,
    adapter,
    check_arguments,
    checked,
    convert,
    describe,
    fits,
    parts,
)

Count = Annotated[int, Range(ge=1)]
Share = Annotated[float, Range(ge=0.0, le=1.0)]
Above = Annotated[float, Range(gt=0.0, le=FINITE, noun="a number above 0")]
All = Annotated[int, Range(ge=1), MinusOne("all")]


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1, Count),
        (0.0, Share),
        (1, Share),
        (np.float64(0.5), Share),
        (-1, All),
        (3, All | None),
        (None, Count | None),
        (math.inf, Annotated[float, Range(ge=0.0)]),
        ("a", Literal["a", "b"]),
        (["a"], list[str] | str),
        ({"a": [1]}, Mapping[str, Any]),
        (print, Any),
    ],
)
def test_a_value_that_is_allowed_is_converted_to_an_equal_one(value, hint):
    assert fits(value, hint)
    assert convert(value, hint) == value


@pytest.mark.parametrize(
    ("value", "hint", "said"),
    [
        (0, Count, "must be a whole number of at least 1, not 0"),
        (2.0, Count, "must be a whole number of at least 1, not 2.0"),
        (True, Count, "must be a whole number of at least 1, not True"),
        (None, Count, "must be a whole number of at least 1, not None"),
        (1.5, Share, "must be a number from 0 to 1, not 1.5"),
        (math.nan, Share, "must be a number from 0 to 1, not nan"),
        (math.nan, Annotated[float, Range()], "must be a number, not nan"),
        (math.inf, Above, "must be a number above 0, not inf"),
        (-2, All, "must be a whole number of at least 1, or -1 for all, not -2"),
        (-1, Count, "must be a whole number of at least 1, not -1"),
        ("c", Literal["a", "b"] | None, "must be one of a, b, not 'c'"),
        ("", Annotated[str, Range(min_length=1)], "must be a text that is not empty, not ''"),
        (1, bool, "must be true or false, not 1"),
        ([1], list[str] | str | None, r"must be a list or a text, not \[1\]"),
        (3, dict[str, Any], "must be a table, not 3"),
        (
            -1,
            Annotated[int, Range(0, le=10**6)],
            "must be a whole number from 0 to 1000000, not -1",
        ),
        (0.0, Annotated[float, Range(1e-6, le=2.0)], "must be a number from 1e-06 to 2, not 0.0"),
        (-1.0, Annotated[float, Range(0.0, le=FINITE)], "must be a number of at least 0, not -1.0"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_what_is(value, hint, said):
    assert not fits(value, hint)
    with pytest.raises(ValueError, match=f"^{said}$"):
        convert(value, hint)


def test_an_argument_can_be_none_and_a_file_cannot_say_it():
    with pytest.raises(ValueError, match=r"^must be a whole number of at least 1, not 0$"):
        convert(0, Count | None)
    with pytest.raises(
        ConfigError, match=r"^n must be a whole number of at least 1, or None, not 0$"
    ):
        checked("n", 0, Count | None)
    assert checked("n", None, Count | None) is None


def test_a_notation_reads_the_value():
    assert convert(
        "1,2", Annotated[tuple[str, ...], Form("A,B", lambda text: tuple(text.split(",")))]
    ) == ("1", "2")
    seconds = convert(60, Annotated[float, Form("SECONDS", float)])
    assert (seconds, type(seconds)) == (60.0, float)


def test_what_is_in_an_annotation_is_found_below_unions_and_marks():
    assert list(parts(Annotated[Count | Literal["auto"] | None, "mark"])) == [
        *("mark", Range(ge=1), int, Literal["auto"]),
        type(None),
    ]
    assert (
        describe(Annotated[Count | Literal["auto"], "mark"])
        == "a whole number of at least 1 or one of auto"
    )
    assert describe(type(print)) == "another value"


def test_arguments_are_checked_against_the_signature():
    @check_arguments
    def rows(count: Count, order: Literal["as is", "drawn"] = "as is", source: Any = None) -> int:
        return count

    assert rows(2) == rows(count=2, source=object()) == 2
    for arguments, sentence in (
        ({"count": True}, "count must be a whole number of at least 1, not True"),
        ({"count": 1, "order": "any"}, "order must be one of as is, drawn, not 'any'"),
    ):
        with pytest.raises(ConfigError, match=f"^{sentence}$"):
            rows(**arguments)
    with pytest.raises(TypeError, match="count"):
        rows()
    assert rows.__wrapped__(0) == 0  # without the check


def upper(value):
    return str(value).upper()


HINTS = [
    Count,
    Share,
    Above,
    All | None,
    Count | None,
    Annotated[float, Range()],
    Annotated[int, Range(ge=0, le=2), Flag("help")] | str,
    Annotated[str, Range(min_length=1)],
    Annotated[str, Form("X", upper)] | str,
    float | int,
    Share | int,
    bool | None,
    str,
    Literal["a", "b"] | Count,
    Literal[1, True],
    list[str] | str,
    Any,
]


@pytest.mark.parametrize("hint", HINTS, ids=describe)
def test_a_plain_value_is_read_as_pydantic_reads_it(hint):
    """Also with no look at the value before, which is there so that pydantic need not be imported."""
    values = [None, True, False, -1, 0, 1, 2, 3, 10**30, -0.0, 0.5, 1.0, math.inf, math.nan]
    for value in [*values, "", "a", "c", b"a", ["a"], np.float64(0.5), np.int64(1)]:
        try:
            expected = adapter(hint).validate_python(value)
        except ValidationError:
            with pytest.raises(ValueError, match=r"^must be "):
                convert(value, hint)
            continue
        read = convert(value, hint)
        assert read is value or (type(read), repr(read)) == (type(expected), repr(expected))
        assert read == expected or math.isnan(value)


CALL = """
import sys
import verifiers.runtime.values as values
from typing import Literal

@values.check_arguments
def load(count: values.Count, limit: values.Limit | None, unit: Literal["a", "b"]): ...

load(3, {limit}, "a")
print("pydantic" in sys.modules)
"""


@pytest.mark.parametrize(("limit", "is_loaded"), [("0.5", "False"), ("1", "True")])
def test_plain_arguments_are_checked_without_pydantic(limit, is_loaded):
    """A whole number for a fraction is converted."""
    code = CALL.format(limit=limit)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == is_loaded
