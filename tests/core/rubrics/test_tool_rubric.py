"""``ToolRubric``: tool calls of a completion as metrics without weight."""

import math

import pytest

from verifiers.errors import ConfigError
from verifiers.rubrics import Rubric
from verifiers.rubrics.tool_rubric import ToolRubric, count_calls
from verifiers.types import AssistantMessage, ToolCall, ToolMessage


def search(query: str): ...


def read(page: str): ...


COMPLETION = [
    AssistantMessage(tool_calls=[ToolCall("1", "search", {}), ToolCall("2", "read", {})]),
    ToolMessage("found", "1"),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "3", "function": {"name": "search"}}],
    },
    AssistantMessage("done"),
]


async def test_calls_are_counted_in_total_and_by_tool():
    score = await ToolRubric([search, read]).score_rollout(
        prompt=[], completion=COMPLETION, answer="", state={}
    )
    assert score["metrics"] == {"total_tool_calls": 3.0, "search_calls": 2.0, "read_calls": 1.0}
    assert math.isnan(score["reward"])  # metrics alone are no reward


async def test_its_metrics_stand_beside_rewards_and_weigh_nothing():
    def right(completion):
        return 1.0

    rubric = ToolRubric([search], funcs=[right], weights=[0.5])
    score = await rubric.score_rollout(prompt=[], completion=COMPLETION, answer="", state={})
    assert score["reward"] == 0.5
    assert rubric.get_reward_weights() == [0.5, 0.0, 0.0]
    assert isinstance(rubric, Rubric)


@pytest.mark.parametrize(
    "completion", ["text", [], None, [{"role": "user", "content": "x", "tool_calls": [{}]}]]
)
def test_a_completion_without_calls_counts_none(completion):
    assert count_calls(completion) == 0.0


def test_tools_that_cannot_be_tools_are_refused():
    with pytest.raises(ConfigError, match="cannot be called"):
        ToolRubric([lambda x: x])
    with pytest.raises(ConfigError, match="two reward functions are named 'search_calls'"):
        ToolRubric([search, search])
