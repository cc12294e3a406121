"""small-tasks: seven tasks that a model of 135M parameters does about half of the time. One turn,
one exact reward.

The public interface is ``load_environment``; the README describes the tasks, the reward and the
baselines.
"""

from __future__ import annotations

import random
from typing import Annotated, Any

import verifiers as vf
from verifiers.data.text import split_reasoning
from verifiers.runtime.values import Count, MinusOne, Number, check_arguments
from vf_small_tasks.tasks import TASKS

__all__ = ["TASKS", "load_environment"]


@check_arguments
def load_environment(
    task: str = "capitals",
    num_train_examples: Count = 1000,
    num_eval_examples: Count = 100,
    num_shots: Annotated[Number, MinusOne("all")] = -1,
    seed: int = 0,
) -> vf.Environment:
    """The small-tasks environment.

    Args:
        task: "capitals", "json", "names", "numbers", "calculator", "stories" or "commands"; "all"
            cycles through them.
        num_train_examples: Training rows; fewer where a task has fewer.
        num_eval_examples: Held-out rows, disjoint from the training rows; at most half of what a
            task has.
        num_shots: Solved examples before the question; -1 = all that the task has.
        seed: Determines the rows; equal arguments give equal rows on every machine.

    Raises:
        ConfigError: An invalid argument, by name.
    """
    names = list(TASKS) if task == "all" else [task]
    if not set(names) <= set(TASKS):
        raise vf.ConfigError(
            f'task is {task!r}; it must be {", ".join(map(repr, TASKS))} or "all"', key="task"
        )
    counts = (num_eval_examples, num_train_examples)
    held_out, train = zip(*(_split(name, *counts, num_shots, seed) for name in names), strict=True)
    return vf.SingleTurnEnv(
        dataset=_take_turns(train, num_train_examples),
        eval_dataset=_take_turns(held_out, num_eval_examples),
        rubric=vf.Rubric([correct]),
    )


async def correct(completion: vf.Messages, answer: str, task: str) -> float:
    """1 when the reply, after any reasoning, solves the row of this task
    (``TASKS[task].is_right``), else 0."""
    return float(TASKS[task].is_right(split_reasoning(completion[-1].content or "")[1], answer))


def _split(
    name: str, num_held_out: int, num_train: int, num_shots: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The (held-out, training) rows of a task: at most half of its rows are held out."""
    task = TASKS[name]
    shown = {question for question, _ in task.shots}
    pairs = [pair for pair in task.pairs() if pair[0] not in shown]
    random.Random(f"{name} {seed}").shuffle(pairs)
    pairs.sort(key=lambda pair: pair[1] not in task.first)
    cut = min(num_held_out, len(pairs) // 2)
    system = [{"role": "system", "content": task.instruction}] if task.instruction else []
    shots = [
        message
        for question, answer in (task.shots if num_shots == -1 else task.shots[:num_shots])
        for message in (
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        )
    ]
    rows = [
        {
            "prompt": [*system, *shots, {"role": "user", "content": question}],
            "answer": answer,
            "task": name,
        }
        for question, answer in pairs[: cut + num_train]
    ]
    return rows[:cut], rows[cut:]


def _take_turns(tables: tuple[list[dict[str, object]], ...], count: int) -> list[dict[str, object]]:
    """Up to ``count`` rows: the first of each table, then the second of each, and so on."""
    longest = max(map(len, tables))
    return [table[i] for i in range(longest) for table in tables if i < len(table)][:count]
