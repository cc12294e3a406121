"""Misspelt names are refused in one sentence that says what was meant."""

import pytest

from verifiers.errors import ConfigError
from verifiers.runtime.suggest import check_keywords, close_match, close_matches, closest


def test_a_near_match_needs_four_fifths_of_the_letters():
    assert close_match("max_turn", ["max_turns"]) == "max_turns"
    assert close_match("turns", ["max_turns"]) is None
    assert close_match("turns", ["max_turns"], ratio=0.5) == "max_turns"


def test_case_and_separators_do_not_count():
    assert close_match("Max-Turns", ["max_turns"]) == "max_turns"


def test_several_suggestions_come_nearest_first():
    assert close_matches("gsm8", ["gsm8k", "wordle", "gsm"]) == ["gsm8k", "gsm"]


def test_the_sentence_is_empty_when_nothing_is_similar():
    assert closest("zzz", ["question", "answer"]) == ""


def test_one_error_names_every_unknown_keyword():
    with pytest.raises(ConfigError) as caught:
        check_keywords(["max_turn", "rubric", "colour"], ["max_turns", "rubric"], "WordGame")
    text = str(caught.value)
    assert "'max_turn' (did you mean 'max_turns'?)" in text
    assert "'colour'" in text
    assert "it knows: max_turns, rubric" in text
    assert caught.value.names == ["max_turn", "colour"]


def test_an_error_lists_no_hundred_names():
    with pytest.raises(ConfigError) as caught:
        check_keywords(["colour"], [f"setting_{i}" for i in range(100)], "vf.Many")
    assert str(caught.value) == (
        "vf.Many does not know 'colour'; help(vf.Many) lists the 100 names that it knows"
    )


def test_known_keywords_pass():
    check_keywords(["a"], ["a", "b"], "WordGame")
