"""Batches that a subclass chooses by its own ``get_batch``: rows to play, or rollouts that it played itself.

Rows are played by the pipeline like any others (``ChosenRows`` stands in for the schedule). Rollouts are taken as they
come, on the trainer's thread, when the step needs them (``ChosenRollouts`` stands in for the pipeline): the present
policy sampled them, and their number is the batch size. Which of the two it is, the first batch tells.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verifiers.data.examples import Example, RowFormat, examples_from
from verifiers.errors import ConfigError, DatasetError
from verifiers.rollouts.state import State
from verifiers.types import Rollout, Turn
from verifiers_trainer.algorithm.batch import Group, TrainBatch, build
from verifiers_trainer.pipeline import curriculum, rewards, subclass_hooks
from verifiers_trainer.pipeline.curriculum import RewardWeights
from verifiers_trainer.pipeline.mixture import MixtureSchedule
from verifiers_trainer.pipeline.orchestrator import Orchestrator
from verifiers_trainer.pipeline.schedule import PipelineState, Schedule
from verifiers_trainer.run.meters import SignalMeter
from verifiers_trainer.settings.config import RLConfig

log = logging.getLogger(__name__)

NOTHING_ELSE = {
    "batch/short": 0,
    "groups/dropped_stale": 0,
    "staleness/mean": 0.0,
    "staleness/max": 0,
    "time/pack": 0.0,
}
"""What the pipeline would count, where there is none."""

CHOOSING = ("get_batch", "sample_batch", "current_rows", "get_current_difficulty")
"""Methods that decide which rows a step takes."""
Draw = Callable[[int], Any]
"""The batch of the n-th step, as ``get_batch`` gives it."""
TurnsOf = Callable[[Any, str], tuple[Turn, ...]]


def open_pipeline(trainer: Any, base: type) -> Orchestrator | ChosenRollouts:
    """What gives the trainer its batches; ``base`` is the class whose methods are no subclass's."""
    settings, schedule = trainer.args, None
    mixed: MixtureSchedule | None = None
    if settings.difficulty_schedule:
        rows = [example.row for example in trainer.examples]
        curriculum.check_difficulties(rows, settings.difficulty_schedule, settings.difficulty_key)
    if settings.difficulty_schedule or subclass_hooks.is_overridden(trainer, base, *CHOOSING):
        draw, step = functools.partial(_draw, trainer), trainer.first_draw
        first = draw(step)
        if subclass_hooks.holds_rollouts(first):
            return ChosenRollouts(draw, trainer.client.turns_of, settings, (step, first))
        schedule = ChosenRows(draw, trainer.env.row_format, trainer.examples, settings)
        schedule.put(step, first)
    elif settings.env_weights:
        mixed = MixtureSchedule(
            trainer.env, trainer.examples, settings.env_weights, settings.seed, settings.shuffle_dataset
        )
    decide: Any = None
    if subclass_hooks.is_overridden(trainer, base, "compute_rewards"):
        if settings.reward_weights_schedule:
            raise ConfigError("compute_rewards and reward_weights_schedule both decide the rewards: use one of them")
        decide = functools.partial(_decide, trainer)
    elif settings.reward_weights_schedule:
        weights = RewardWeights(trainer.env, settings.reward_weights_schedule)
        decide = functools.partial(_weigh, trainer, weights)
    return Orchestrator(trainer.env, trainer.examples, trainer.run_context(), settings, schedule or mixed, decide)


def _draw(trainer: Any, step: int) -> Any:
    trainer._drawn = step
    return subclass_hooks.call(trainer.get_batch, _place(trainer, step))


async def _decide(trainer: Any, index: int, states: Sequence[State]) -> None:
    step = index * trainer.args.rollouts_per_example // trainer.args.batch_size
    await rewards.decide(trainer.compute_rewards, states, _place(trainer, step))


async def _weigh(trainer: Any, weights: RewardWeights, index: int, states: Sequence[State]) -> Mapping[str, float]:
    epoch = _place(trainer, index * trainer.args.rollouts_per_example // trainer.args.batch_size)["epoch"]
    weights.decide(epoch, states)
    return weights.weights_of(epoch, states[0])


def current_rows(trainer: Any) -> list[Any]:
    """The rows of the difficulty that the trainer is at, in the step whose batch is being chosen."""
    rows = [example.row for example in trainer.examples]
    difficulty = subclass_hooks.call(trainer.get_current_difficulty, _place(trainer, trainer._drawn))
    return curriculum.rows_of(rows, difficulty, trainer.args.difficulty_key)


def _place(trainer: Any, step: int) -> dict[str, int]:
    """The pass that a step belongs to, and its number in the pass."""
    epoch, step = divmod(step, trainer.num_steps_per_epoch)
    return {"epoch": epoch, "step": step}


def sample_rows(rows: Sequence[Any], step: int, config: RLConfig) -> list[Any]:
    """The rows that the ``step``-th step takes from ``rows``: pass after pass, each shuffled by (seed, pass)."""
    if not rows:
        raise DatasetError(f"there are no rows to sample the batch of step {step} from")
    count = config.batch_size // config.rollouts_per_example
    sampled = []
    for place in range(step * count, (step + 1) * count):
        epoch, place = divmod(place, len(rows))
        order = list(range(len(rows)))
        if config.shuffle_dataset:
            random.Random(f"{config.seed}:{epoch}").shuffle(order)
        sampled.append(rows[order[place]])
    return sampled


class ChosenRows(Schedule):
    """The rows that ``draw`` gives for each step, in their order; the n-th step's are groups n·P to (n+1)·P - 1.

    Groups that teach nothing are replaced from the rows of the steps to come, so those are asked for earlier.
    """

    may_skip = False  # whoever chooses the rows wants them played

    def __init__(self, draw: Draw, row_format: RowFormat, examples: Sequence[Example], config: RLConfig):
        super().__init__(examples, config.seed, shuffle=False)
        self._draw, self._row_format = draw, row_format
        self._per_step = config.batch_size // config.rollouts_per_example
        self._steps: dict[int, list[Example]] = {}
        self._said = False

    def put(self, step: int, rows: Any) -> None:
        """Use ``rows`` for a step: those after the P-th are left out, fewer are played several times."""
        try:
            found = examples_from(list(rows), self._row_format)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"get_batch returned {type(rows).__name__}, not rows of the dataset: {error}") from error
        if not found:
            raise DatasetError("get_batch returned no rows: there is nothing to train on")
        if len(found) != self._per_step and not self._said:
            self._said = True
            log.warning("get_batch returned %d rows, and a step takes %d", len(found), self._per_step)
        self._steps[step] = found

    def example(self, index: int) -> Example:
        step, place = divmod(index, self._per_step)
        if step not in self._steps:
            self.put(step, self._draw(step))
            self._steps = {n: rows for n, rows in self._steps.items() if n > step - 64}
        rows = self._steps[step]
        return rows[place % len(rows)]

    def seed_of(self, index: int) -> int:
        return self.seed * 1_000_003 + index  # a row may come several times in a pass


class ChosenRollouts:
    """What ``draw`` gives for each step as a batch; has the methods of ``Orchestrator``."""

    def __init__(self, draw: Draw, turns_of: TurnsOf, config: RLConfig, first: tuple[int, Any]):
        self._draw, self._turns_of, self.config = draw, turns_of, config
        self._first: tuple[int, Any] | None = first
        self.state = PipelineState()
        self.version = 0
        self._signal = SignalMeter(config)

    def start(self, version: int = 0, state: PipelineState | None = None) -> None:
        self.version, self.state = version, state or self.state

    def next_batch(self) -> TrainBatch:
        """The rollouts of the next step. Raises ``NoLearningSignal`` as the pipeline does."""
        while True:
            started = time.monotonic()
            groups = self._next_groups()
            waited = time.monotonic() - started
            largest = max(len(group.rollouts) for group in groups)
            settings = copy.copy(self.config)
            settings.__dict__["rollouts_per_example"] = largest
            batch = build(groups, [], settings, settings.world_size)
            if batch.num_tokens:
                self._signal.note_batch()
                self.state.delivered += 1
                batch.stats.update(NOTHING_ELSE, **{"time/wait_generation": waited})
                return batch
            self._signal.note_nothing(groups)

    def _next_groups(self) -> list[Group]:
        per_step = self.config.batch_size // self.config.rollouts_per_example
        step = self.state.next_index // per_step
        self.state.next_index += per_step  # as the pipeline counts, whatever the hook returns
        if self._first is not None and self._first[0] == step:
            batch, self._first = self._first[1], None
        else:
            batch = self._draw(step)
        groups = groups_of(batch, self._turns_of, self.state.base)
        self.state.base += len(groups)
        return groups

    def set_version(self, version: int, served: int | None = None) -> None:
        self.version = version

    def settle(self) -> None:
        """Nothing runs beside the trainer."""

    def snapshot(self) -> PipelineState:
        return replace(self.state)

    def close(self) -> None:
        """There is nothing to stop."""


def groups_of(batch: Any, turns_of: TurnsOf, first_index: int = 0) -> list[Group]:
    """The groups of ``get_batch``'s (prompts, completions, rewards), siblings one after another, or its own groups.

    They are numbered from ``first_index``.

    Raises ``ConfigError`` when the numbers do not fit.
    """
    if isinstance(batch, Sequence) and batch and all(isinstance(member, Group) for member in batch):
        return [replace(group, index=first_index + place) for place, group in enumerate(batch)]
    if not (isinstance(batch, tuple) and len(batch) == 3):
        raise ConfigError(f"get_batch returned {type(batch).__name__} after prompts, completions and rewards before")
    prompts, completions, rewards = batch
    if not len(prompts) or len(completions) % len(prompts) or len(rewards) != len(completions):
        raise ConfigError(
            f"get_batch returned {len(prompts)} prompts, {len(completions)} completions and {len(rewards)} rewards: it "
            "needs as many completions for each prompt, those of one prompt together, and a reward for each"
        )
    size = len(completions) // len(prompts)
    return [
        Group(
            first_index + index,
            _row(prompt).get("example_id", index),
            tuple(
                _rollout(prompt, completions[n], rewards[n], turns_of(completions[n], f"completion {n}"))
                for n in range(index * size, (index + 1) * size)
            ),
        )
        for index, prompt in enumerate(prompts)
    ]


def _rollout(prompt: Any, completion: Any, reward: float | None, turns: tuple[Turn, ...]) -> Rollout:
    row = _row(prompt)
    return Rollout(
        turns=turns,
        reward=math.nan if reward is None else float(reward),
        is_truncated=any(turn.is_truncated for turn in turns),
        text={"prompt": row.get("prompt", prompt), "completion": completion, "answer": row.get("answer", "")},
    )


def _row(prompt: Any) -> Mapping[str, Any]:
    return prompt if isinstance(prompt, Mapping) else {}
