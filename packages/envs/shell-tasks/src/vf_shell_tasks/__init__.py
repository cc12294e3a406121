"""shell-tasks: twenty small tasks in Harbor's format, done in a sandbox, with ``bash`` or by an
agent program, and checked in another.

The public interface is ``load_environment`` and ``TASKS``; the README describes the tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import verifiers as vf

__all__ = ["TASKS", "load_environment"]

TASKS = Path(__file__).with_name("tasks")
"""The task folders, as ``harbor run --path`` takes them too."""
IMAGE = "buildpack-deps:bookworm"
"""The image that the tasks name; this machine's system programs stand in its place."""
PROGRAMS = {"git": ("git-restore", "git-merge"), "make": ("makefile",)}
"""Program that not every machine has -> the tasks that need it."""


def load_environment(
    agent: str | None = None,
    only: Sequence[str] | None = None,
    max_turns: int = 20,
    sandbox: str = "auto",
) -> vf.Environment:
    """The shell-tasks environment: an evaluation set, and no training set.

    Args:
        agent: None for the model with the tool bash; an agent program, such as "codex"; "oracle"
            runs each task's solution, "nop" does nothing.
        only: Names of the tasks; None for all.
        max_turns: Most turns of a rollout.
        sandbox: The sandbox; it must have a root of its own, as bubblewrap has.

    Raises:
        ConfigError: An invalid argument, by name; a program that is missing here, with the tasks
            that need it; at the first rollout an agent program that is not installed, with the
            command that installs it.
    """
    for program, tasks in PROGRAMS.items():
        needed = [name for name in tasks if only is None or name in only]
        if needed and not Path("/usr/bin", program).exists():
            raise vf.ConfigError(
                f"{' and '.join(needed)} need the program {program}, which is not in /usr/bin:"
                " install it, or name other tasks with only=[…]"
            )
    return vf.HarborEnv(
        eval_path=TASKS,
        agent=agent,
        only=only,
        images={IMAGE: "host"},
        max_turns=max_turns,
        sandbox=sandbox,
    )
