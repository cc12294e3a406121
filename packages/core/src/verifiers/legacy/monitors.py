"""Older rubrics that only measure: ``MultiTurnMonitorRubric``, ``ToolMonitorRubric`` and
``SandboxMonitorRubric``.

Environments here measure by their own ``monitor_rubric``; these are for code that makes, changes or
subclasses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.environments.multi_turn import num_turns
from verifiers.environments.sandbox import SandboxUse, sandbox_ready_wait_time
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.rubrics.tool_rubric import count_metric, metric_name

if TYPE_CHECKING:
    from verifiers.environments.tool import ToolEnv


class MultiTurnMonitorRubric(Rubric):
    """The metric ``num_turns``; further parameters are those of ``Rubric``."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.add_metric(num_turns)


class SandboxMonitorRubric(Rubric):
    """The metrics ``sandbox_ready_wait_time`` and ``sandbox_command_execution_time``, in seconds.

    The second is the mean of the commands of a rollout, 0 without any; a ``SandboxEnv`` itself
    measures their sum. Further parameters are those of ``Rubric``.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.add_metric(sandbox_ready_wait_time)
        self.add_metric(sandbox_command_execution_time)


def sandbox_command_execution_time(state: State) -> float:
    """Mean seconds of the commands of a rollout; 0 without any."""
    use = state.get("sandbox")
    return use.command_s / use.num_calls if isinstance(use, SandboxUse) and use.num_calls else 0.0


class ToolMonitorRubric(Rubric):
    """The metrics ``total_tool_calls`` and ``<tool>_calls``; further parameters are those of
    ``Rubric``.

    >>> monitor = ToolMonitorRubric(["search"])
    >>> monitor.add_tool_metric("browse")
    >>> monitor.remove_tool_metric("search")
    >>> monitor.tool_names, monitor.get_reward_func_names()
    (['browse'], ['total_tool_calls', 'browse_calls'])
    """

    def __init__(self, tool_names: Sequence[str] | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.tool_names: list[str] = []
        self.measured_by: Rubric = self
        self.measured_by.add_metric(count_metric(None))
        for name in tool_names or ():
            self.add_tool_metric(name)

    def get_tool_call_count_func(self, tool_name: str) -> Callable[..., float]:
        """The function that counts the calls of a tool in a completion."""
        return count_metric(tool_name)

    def add_tool_metric(self, tool_name: str) -> None:
        """Count the calls of a tool; a tool that is counted stays as it is."""
        if tool_name not in self.tool_names:
            self.tool_names.append(tool_name)
            if metric_name(tool_name) not in self.measured_by.get_reward_func_names():
                self.measured_by.add_metric(self.get_tool_call_count_func(tool_name))

    def remove_tool_metric(self, tool_name: str) -> None:
        """Count the calls of a tool no longer; a tool that is not counted is ignored."""
        if tool_name in self.tool_names:
            self.tool_names.remove(tool_name)
            index = self.measured_by.get_reward_func_names().index(metric_name(tool_name))
            del self.measured_by.funcs[index], self.measured_by.weights[index]


def tool_monitor_rubric(env: ToolEnv) -> ToolMonitorRubric:
    """The counts of an environment's tool calls; what is added or removed here is in the rollouts
    that follow."""
    monitor = ToolMonitorRubric()
    monitor.measured_by = env.monitor_rubric
    counted = [
        name for name in env.monitor_rubric.get_reward_func_names() if name != metric_name(None)
    ]
    monitor.tool_names = [
        name.removesuffix(metric_name("")) for name in counted if name.endswith(metric_name(""))
    ]
    return monitor
