"""Groups that are being played, and what they wait for, in words."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from verifiers.runs.runner import Progress
from verifiers_trainer.pipeline.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Flight:
    """A group that is being played."""

    started: float
    """On the monotonic clock."""
    version: int
    """The policy version when it was begun; none of its tokens is older."""
    task: asyncio.Task[None]
    progress: Progress
    """Its rollouts, to say what they wait for; those that other processes play are not seen."""


def describe(running: Mapping[int, Flight], schedule: Schedule) -> str:
    """What a wait for these groups, by their indices, waits for: how many there are, and what the oldest waits for."""
    flights = list(running.items())
    if not flights:
        return "nothing is running, and the finished groups do not fill a batch"
    index, oldest = min(flights, key=lambda entry: entry[1].started)
    states = [state for _, state in list(oldest.progress.running.values()) if state is not None]
    awaited = Counter(state.waiting_for or "its turn" for state in states if state["reward"] is None)
    waiting = ", ".join(f"{count} for {what}" for what, count in awaited.most_common())
    return (
        f"{len(flights)} group(s) are running, the oldest for {time.monotonic() - oldest.started:.0f} s (example "
        f"{schedule.example(index).example_id}, begun at policy version {oldest.version}; of its rollouts wait "
        f"{waiting or 'none'})"
    )
