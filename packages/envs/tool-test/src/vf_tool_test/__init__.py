"""tool-test: call exactly the requested tools with the right arguments, several in one message.

The public interface is ``load_environment``; the README describes rewards and metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import verifiers as vf
from verifiers.runtime.values import Count, check_arguments
from vf_tool_test.tasks import generate_tasks, read_call, share_right
from vf_tool_test.tools import TOOLS

__all__ = ["load_environment"]

MAX_TURNS = 2
"""One for the calls, one to comment on the results; only the first is scored."""


@check_arguments
def load_environment(
    num_train_examples: Count = 1000,
    num_eval_examples: Count = 100,
    min_calls: Count = 1,
    max_calls: Count = 4,
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.Environment:
    """The tool-test environment.

    Args:
        num_train_examples: Training tasks.
        num_eval_examples: Held-out tasks, disjoint from the training tasks and independent of
            num_train_examples.
        min_calls: Minimum number of requested calls.
        max_calls: Maximum number of requested calls, at most 32.
        seed: Determines the tasks; equal arguments give equal tasks on every machine.
        system_prompt: System message of every task. Default: none.

    Raises:
        ConfigError: An invalid argument, by name.
    """
    if min_calls > max_calls:
        raise vf.ConfigError(f"min_calls={min_calls} is above max_calls={max_calls}")
    if max_calls > 32:
        raise vf.ConfigError(f"max_calls={max_calls} is more than 32")
    rows = generate_tasks(num_eval_examples + num_train_examples, min_calls, max_calls, seed)
    return vf.ToolEnv(
        tools=TOOLS,
        max_turns=MAX_TURNS,
        parallel_tool_calls=True,
        dataset=rows[num_eval_examples:],
        eval_dataset=rows[:num_eval_examples],
        system_prompt=system_prompt or None,
        rubric=_make_rubric(),
        oracle=_right_replies,
    )


def _right_replies(row: Mapping[str, Any]) -> list[Any]:
    """The requested calls in one message, then a comment."""
    calls = row["info"]["calls"]
    return [
        [vf.ToolCall(f"call_{n}", call["name"], call["arguments"]) for n, call in enumerate(calls)],
        "Done.",
    ]


def _make_rubric() -> vf.Rubric:
    # Coroutines run on the event loop: they take microseconds, less than a switch to a thread.
    async def calls_right(completion: Any, info: dict[str, Any], parser: vf.Parser) -> float:
        return share_right(info["calls"], _first_calls(completion, parser))

    async def all_right(completion: Any, info: dict[str, Any], parser: vf.Parser) -> float:
        return float(share_right(info["calls"], _first_calls(completion, parser)) == 1.0)

    rubric = vf.Rubric([calls_right], parser=vf.Parser(), success="all_right")
    rubric.add_metric(all_right)
    return rubric


def _first_calls(completion: vf.Messages, parser: vf.Parser) -> list[str | None]:
    """The calls of the first assistant message."""
    replies = parser.get_assistant_messages(completion)
    return [read_call(call) for call in replies[0].get("tool_calls") or ()] if replies else []
