"""Print sample prompts and completions. Control characters of model text are escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence

from verifiers.data.messages import render_text
from verifiers.runtime.terminal import escape_control


def print_prompt_completions_sample(
    prompts: Sequence[object],
    completions: Sequence[object],
    errors: Sequence[object] | None = None,
    rewards: Sequence[float] = (),
    step: int = 0,
    num_samples: int = 1,
) -> None:
    """Print the first ``num_samples`` rollouts as a table of prompt, completion (or error) and
    reward.

    Example::

        vf.print_prompt_completions_sample(results.prompt, results.completion, results.error, results.reward, step=3)
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"Step {step}", show_lines=True, expand=True)
    for heading, ratio in (("Prompt", 3), ("Completion", 4), ("Reward", 1)):
        table.add_column(heading, ratio=ratio, overflow="fold")
    for index in range(min(num_samples, len(prompts))):
        completion = Text(render_text(completions[index]))
        if errors is not None and index < len(errors) and errors[index] is not None:
            completion.append("\n" + escape_control(_error_text(errors[index])), style="red")
        reward = rewards[index] if index < len(rewards) else None
        table.add_row(Text(render_text(prompts[index])), completion, Text(_reward_text(reward)))
    Console().print(table)


def _error_text(error: object) -> str:
    if isinstance(error, dict):
        return f"{error.get('error')}: {error.get('message')}"
    return f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)


def _reward_text(reward: float | None) -> str:
    if reward is None:
        return ""
    return "unknown" if math.isnan(reward) else f"{reward:.3f}"
