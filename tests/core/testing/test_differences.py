"""The first difference of two rollouts: what comes first is named, and equal rollouts have none."""

import copy
import math

import pytest

from verifiers.rollouts.transcript import Transcript
from verifiers.testing.differences import NUM_SHOWN, first_difference

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
USER = {"role": "user", "content": "2 + 3?"}
ASKS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "5", "tool_call_id": "c1"}
SAYS = {"role": "assistant", "content": "It is 5"}
ROLLOUT = {
    "tool_defs": None,
    "completion": [ASKS, RESULT, SAYS],
    "stop_condition": "max_turns_reached",
    "error": None,
    "metrics": {"right": 1.0, "length": 7.0},
    "reward": 1.0,
}


def rollout(turns=(([USER], [ASKS]), ([USER, ASKS, RESULT], [SAYS])), **changes):
    steps = [
        {"prompt": copy.deepcopy(p), "completion": copy.deepcopy(c), "response": None}
        for p, c in turns
    ]
    return {**copy.deepcopy(ROLLOUT), **changes, "trajectory": Transcript.from_json(steps)}


def test_equal_rollouts_have_none():
    assert first_difference(rollout(), rollout()) is None


@pytest.mark.parametrize(
    ("changes", "what", "turn", "message", "name"),
    [
        ({"tool_defs": [{"name": "sub"}]}, "tools", None, None, None),
        ({"turns": [([SAYS], [ASKS])]}, "prompt", 1, 1, None),
        ({"turns": [([USER, USER], [ASKS])]}, "prompt", 1, 2, None),
        ({"turns": [([USER], [SAYS])]}, "reply", 1, 1, None),
        (
            {"turns": [([USER], [ASKS]), ([USER, ASKS, {**RESULT, "content": "6"}], [SAYS])]},
            *("tool result", 2, 3, "add"),
        ),
        ({"turns": [([USER], [ASKS])]}, "turns", None, None, None),
        ({"completion": [ASKS, RESULT]}, "completion", None, 3, None),
        ({"stop_condition": "solved"}, "stop condition", None, None, None),
        ({"error": {"error": "ToolError", "message": "no"}}, "error", None, None, None),
        ({"metrics": {"right": 1.0, "length": 8.0}}, "metric", None, None, "length"),
        ({"metrics": {"right": 1.0}}, "metric", None, None, "length"),
        ({"metrics": {**ROLLOUT["metrics"], "new": 0.0}}, "metric", None, None, "new"),
        ({"metrics": {"right": math.nan, "length": 7.0}}, "metric", None, None, "right"),
        ({"reward": 0.5}, "reward", None, None, None),
    ],
)
def test_what_differs_is_named(changes, what, turn, message, name):
    found = first_difference(rollout(), rollout(**changes))
    assert (found.what, found.turn, found.message, found.name) == (what, turn, message, name)
    assert found.to_json()["sentence"] in str(found)
    reverse = first_difference(rollout(**changes), rollout())
    assert (reverse.what, reverse.saved, reverse.turn) == (what, found.now, turn) or what == "turns"


def test_what_happens_first_is_named_and_not_what_follows_from_it():
    later = rollout(turns=[([SAYS], [ASKS])], stop_condition="solved", reward=0.0)
    assert first_difference(rollout(), later).what == "prompt"


def test_times_counts_texts_of_errors_and_the_order_of_sums_are_no_difference():
    failed = {"error": "ToolError", "message": "in /tmp/a1", "traceback": "x"}
    before = rollout(error=failed, timing={"total_ms": 1}, metrics={"right": 0.1 + 0.2})
    after = rollout(error={**failed, "message": "in /tmp/b2"}, metrics={"right": 0.3})
    assert first_difference(before, after) is None
    unknown = {"metrics": {"right": math.nan}, "reward": math.nan}
    assert first_difference(rollout(**unknown), rollout(**unknown)) is None


def test_a_reply_that_was_asked_for_and_not_given_is_a_turn():
    found = first_difference(rollout(), rollout(), num_asked=3)
    assert (found.what, found.saved, found.now) == ("turns", 2, "3; max_turns_reached")


def test_scores_that_cannot_be_compared_are_left_out():
    other = rollout(metrics={"right": 0.0, "length": 7.0}, reward=0.0)
    assert first_difference(rollout(), other, unscored=["right", "reward"]) is None
    assert first_difference(rollout(), other, unscored=["right"]).what == "reward"


def test_of_long_texts_the_place_is_shown_and_no_control_character():
    texts = ["a" * 3 * NUM_SHOWN + end for end in ("left\x1b[31m", "right")]
    found = first_difference(*(rollout([(text, "x")], completion="x") for text in texts))
    assert found.turn == 1
    assert found.message is None
    assert "left" in str(found)
    assert "right" in str(found)
    assert "\x1b" not in str(found)
    assert len(str(found)) < NUM_SHOWN
