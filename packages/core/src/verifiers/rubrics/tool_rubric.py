"""``ToolRubric``: metrics that count the tool calls of a completion; they do not affect the reward.

Tool environments count their calls themselves (``Environment.monitor_rubric``); this rubric is for
completions from other sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Unpack

from verifiers.data.messages import field
from verifiers.data.tool_schema import tool_name
from verifiers.rubrics.rubric import Rubric, RubricOptions
from verifiers.runtime.signatures import spell_out


class ToolRubric(Rubric):
    """Metrics ``total_tool_calls`` and, for each of ``tools``, ``<tool>_calls``; further parameters
    are ``Rubric``'s.

    Args:
        tools: The tools of the environment; each adds a metric.

    >>> def search(query: str) -> str: ...
    >>> ToolRubric([search]).get_reward_func_names()
    ['total_tool_calls', 'search_calls']
    """

    @spell_out(RubricOptions, Rubric.__init__)
    def __init__(
        self,
        tools: Sequence[Callable[..., object]] | None = None,
        **parameters: Unpack[RubricOptions],
    ):
        super().__init__(**parameters)
        self.tools = list(tools or ())
        for name in (None, *map(tool_name, self.tools)):
            self.add_metric(count_metric(name))


def called_names(messages: Iterable[object] | str | None) -> Iterator[str]:
    """The function name of each tool call in the assistant messages, in order; plain
    text has none."""
    for message in () if isinstance(messages, str) else messages or ():
        if field(message, "role") == "assistant":
            for call in field(message, "tool_calls") or ():
                yield field(field(call, "function") or call, "name") or ""


def count_calls(messages: Iterable[object] | str | None, tool: str | None = None) -> float:
    """Number of tool calls in the messages: all, or those of ``tool``."""
    return float(sum(tool is None or name == tool for name in called_names(messages)))


def metric_name(tool: str | None) -> str:
    """``<tool>_calls``, or ``total_tool_calls`` for all tools."""
    return "total_tool_calls" if tool is None else f"{tool}_calls"


def count_metric(tool: str | None) -> Callable[..., float]:
    """The metric that counts the calls of a tool in a completion; None: of all tools."""

    def count(completion: Iterable[object] | str | None) -> float:
        return count_calls(completion, tool)

    count.__name__ = metric_name(tool)
    return count
