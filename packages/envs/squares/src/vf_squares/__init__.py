"""squares: say the colour, the number or the place of squares in a picture.

The public interface is ``load_environment``; the README describes rewards and metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import verifiers as vf
from verifiers.runtime.values import Count, check_arguments
from vf_squares.pictures import KINDS, generate_tasks, picture

__all__ = ["load_environment"]

MIN_SIZE, MAX_SIZE = 24, 1024
ASKS_FOR_A_LOOK = "Call look to see the picture. "


@check_arguments
def load_environment(
    num_train_examples: Count = 1000,
    num_eval_examples: Count = 100,
    kinds: Sequence[str] = KINDS,
    turns: Count = 1,
    size: Count = 96,
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.Environment:
    """The squares environment.

    Args:
        num_train_examples: Training tasks.
        num_eval_examples: Held-out tasks, disjoint from the training tasks and independent of
            num_train_examples.
        kinds: What is asked for: colour, count, position.
        turns: 1, the picture is in the question; or 2, the model calls a tool that returns it.
        size: Width and height of a picture in pixels, 24 to 1024.
        seed: Determines the tasks; equal arguments give equal pixels on every machine.
        system_prompt: System message of every task. Default: none.

    Raises:
        ConfigError: An invalid argument, by name.
    """
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if unknown := [kind for kind in kinds if kind not in KINDS] or ([""] if not kinds else []):
        raise vf.ConfigError(f"kinds={unknown[0]!r} is not one of {', '.join(KINDS)}", key="kinds")
    if turns not in (1, 2):
        raise vf.ConfigError(f"turns={turns} is neither 1 nor 2", key="turns")
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise vf.ConfigError(f"size={size} is not {MIN_SIZE} to {MAX_SIZE}", key="size")
    tasks = generate_tasks(num_eval_examples + num_train_examples, kinds, seed)
    rows = [_row(task, turns, size) for task in tasks]
    common: dict[str, Any] = {
        "dataset": rows[num_eval_examples:],
        "eval_dataset": rows[:num_eval_examples],
        "system_prompt": system_prompt or None,
        "rubric": vf.Rubric([right], parser=vf.MaybeThinkParser(), success="right"),
    }
    if turns == 1:
        return vf.SingleTurnEnv(**common, oracle=lambda row: row["answer"])
    return LookEnv(**common, max_turns=2, oracle=_looks_and_answers)


def _row(task: Mapping[str, Any], turns: int, size: int) -> dict[str, Any]:
    info = task["info"] | {"size": size}
    if turns == 2:
        return task | {"question": ASKS_FOR_A_LOOK + task["question"], "info": info}
    prompt = [vf.UserMessage([vf.image_part(drawn(info)), vf.TextContentPart(task["question"])])]
    return {"prompt": prompt, "answer": task["answer"], "info": info}


def drawn(info: Mapping[str, Any]) -> Any:
    """The picture of a row, by its ``info``."""
    return picture(info["squares"], info["background"], info["size"])


class LookEnv(vf.StatefulToolEnv):
    """The picture is the answer of the tool ``look``."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.add_tool(look, args_to_skip=["info"])

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Any, state: vf.State, **_: Any
    ) -> dict[str, Any]:
        """Give the tool the squares of the row."""
        return {**tool_args, "info": state["info"]}


async def look(info: dict[str, Any]) -> Any:
    """Look at the picture.

    Args:
        info: What the picture shows; the environment fills it in.
    """
    return drawn(info)


def _looks_and_answers(row: Mapping[str, Any]) -> list[Any]:
    return [[vf.ToolCall("call_0", "look", {})], row["answer"]]


async def right(completion: Any, answer: str, parser: vf.Parser) -> float:
    """1 when the reply is the answer and nothing else; capitals and a full stop do not count."""
    reply = parser.parse_answer(completion) or ""
    return float(" ".join(reply.lower().split()).strip(".!\"'") == answer)
