"""``vf-eval``: how many rows are needed, and runs that stop when they are decided."""

import re

import pytest

from support.eval_command import last_word, odd_only
from verifiers.testing import FakeServer

MANY = ("toy", "-a", '{"num_rows": 300}', "-m", "m", "-A")


def test_until_half_width_takes_as_many_rows_as_it_needs(vf_eval):
    with FakeServer(odd_only, models=["m"]) as server:
        words = (*MANY, "-b", server.url, "-r", "1", "-c", "4", "--until-half-width", "0.2")
        run = vf_eval(*words, "--json").json["runs"][0]
        text = vf_eval(*words).out
        few = vf_eval(*words, "-n", "9")
    assert 20 < run["num_rollouts"] == run["num_examples"] < 150
    assert "note         decided after" in text
    assert "9 (9 examples × 1)" in few.out
    assert "warning: not decided with all 9 examples" in few.err


def test_until_decided_compares_with_a_saved_run(vf_eval):
    with FakeServer(odd_only, models=["m"]) as bad, FakeServer(last_word, models=["m"]) as good:
        base = vf_eval(*MANY, "-b", bad.url, "-n", "-1", "-r", "1", "--json").json["runs"][0][
            "path"
        ]
        ran = vf_eval(*MANY, "-b", good.url, "-r", "1", "-c", "4", "--until-decided", base)
        used = good.count
    assert ran.code == 0
    assert f"the difference to {base} is between" in ran.out
    assert used < 150


def test_detect_says_how_many_rows_show_a_difference_and_sends_nothing(vf_eval):
    with FakeServer(odd_only, models=["m"]) as server:
        words = (*MANY, "-b", server.url)
        assumed = vf_eval(*words, "--detect", "0.1").out
        assert server.count == 0
        saved = vf_eval(*words, "-n", "-1", "-r", "2", "--json").json["runs"][0]["path"]
        measured = vf_eval(*words, "--detect", "0.1").out
        assert server.count == 600
    assert "assumed for a reward of 0 or 1" in assumed
    assert re.search(r"\n +1    199 … 39[45]\n", assumed)
    assert f"0.501 between rows, 0.000 between rollouts of a row; from {saved}" in measured
    assert re.search(r"\n +1    2 … 39[5-8]\n", measured)


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (("--detect", "0"), "must be a difference above 0"),
        (("--until-half-width", "0.1", "--reward-range", "1"), "must be two numbers"),
        (("--until-half-width", "0"), "--until-half-width must be a number above 0"),
        (("--until-decided", "nowhere"), "nowhere"),
    ],
)
def test_wrong_numbers_are_refused(vf_eval, words, because):
    with FakeServer(odd_only, models=["m"]) as server:
        ran = vf_eval(*MANY, "-b", server.url, *words)
        assert (ran.code, server.count) == (2, 0)
    assert because in ran.paragraph
