"""Batches from a subclass's ``get_batch``: rows to run rollouts of, or finished rollouts.

The pipeline runs the rollouts of rows as usual (``CustomRows`` replaces the schedule). Finished
rollouts are drawn on the trainer's thread when the step needs them (``CustomRollouts`` replaces the
pipeline): the present policy sampled them, and their number is the batch size. The first batch
selects the kind.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verifiers.data.examples import Example, examples_from
from verifiers.data.row_format import RowFormat
from verifiers.environments.base import Environment
from verifiers.errors import ConfigError, DatasetError
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.state import State
from verifiers.rollouts.status import Status
from verifiers.rollouts.transcript import Transcript
from verifiers.rollouts.turn import Turn
from verifiers.runs.rollout import RunContext
from verifiers_trainer.algorithm.batch import Group, TrainBatch, build
from verifiers_trainer.pipeline import curriculum, rewards, subclass_hooks
from verifiers_trainer.pipeline.curriculum import RewardWeights
from verifiers_trainer.pipeline.health import SignalMeter
from verifiers_trainer.pipeline.mixture import MixtureSchedule
from verifiers_trainer.pipeline.offline import OfflineRollouts
from verifiers_trainer.pipeline.pipeline import DecideRewards, Pipeline, RecordDropped
from verifiers_trainer.pipeline.schedule import (
    PipelineState,
    Schedule,
    amid_batch,
    forget_batch,
)
from verifiers_trainer.pipeline.thread import PipelineThread
from verifiers_trainer.settings.config import RLConfig

log = logging.getLogger(__name__)

WITHOUT_PIPELINE = {
    "batch/short": 0,
    "batch/fill": 1.0,
    "groups/dropped_stale": 0,
    "staleness/mean": 0.0,
    "staleness/max": 0,
    "time/pack": 0.0,
}
"""Values of the pipeline's metrics in a step without a pipeline."""
DRAWING_METHODS = ("get_batch", "sample_batch", "current_rows", "get_current_difficulty")
"""Methods of a trainer that select the rows of a step."""
Draw = Callable[[int], Any]
"""The batch of the n-th step, as ``get_batch`` returns it."""
TurnsOf = Callable[[Any, str], tuple[Turn, ...]]
"""(completion, its name in an error) -> its turns, as the policy sampled them."""


def open_batches(
    env: Environment,
    examples: Sequence[Example],
    context: RunContext,
    settings: RLConfig,
    steps_per_epoch: int,
    *,
    draw: Draw | None = None,
    first_step: int = 0,
    at_hand: bool = False,
    turns_of: TurnsOf,
    compute_rewards: Callable[..., object] | None = None,
    record_dropped: RecordDropped | None = None,
    no_prompt_fits: str = "",
) -> BatchSource:
    """Create the source of each step's batch, without starting it.

    draw: returns the data of each step, from ``first_step`` on; at_hand: a run is resumed within a
    batch of finished rollouts that ``draw`` returned, which its checkpoint has; None takes the
    examples in order, or by
    ``env_weights``. compute_rewards: a hook that replaces the rubric's rewards; None keeps them.
    no_prompt_fits: as of ``SignalMeter``.
    Raises ``ConfigError`` for settings that contradict each other or the rows.
    """
    schedule: Schedule | None = None
    if settings.difficulty_schedule:
        rows = [example.row for example in examples]
        curriculum.check_difficulties(rows, settings.difficulty_schedule, settings.difficulty_key)
    if draw is not None:
        if at_hand:
            return CustomRollouts(draw, turns_of, settings, None, record_dropped)
        first = draw(first_step)
        if subclass_hooks.holds_rollouts(first):
            return CustomRollouts(draw, turns_of, settings, (first_step, first), record_dropped)
        custom = schedule = CustomRows(draw, env.row_format, examples, settings)
        custom.put(first_step, first)
    elif settings.env_weights:
        schedule = MixtureSchedule(
            env, examples, settings.env_weights, settings.seed, settings.shuffle_dataset
        )
    decide = _decide_rewards(env, settings, steps_per_epoch, compute_rewards)
    return PipelineThread(
        Pipeline(env, examples, context, settings, schedule, decide, record_dropped, no_prompt_fits)
    )


def _decide_rewards(
    env: Environment, settings: RLConfig, steps_per_epoch: int, hook: Callable[..., object] | None
) -> DecideRewards | None:
    """The function that replaces the rewards of a finished group, called with its index; None keeps
    the rubric's."""

    def position(index: int) -> dict[str, int]:
        return epoch_and_step(
            index * settings.rollouts_per_example // settings.batch_size, steps_per_epoch
        )

    if hook is not None:
        if settings.advantage == "environment":
            raise ConfigError(
                "compute_rewards changes rewards after the environment computed its advantages of"
                " them: set advantage='mean', or another that the trainer computes"
            )
        if settings.reward_weights_schedule:
            raise ConfigError(
                "compute_rewards and reward_weights_schedule both set the rewards: use one of them"
            )

        async def by_hook(index: int, states: Sequence[State]) -> None:
            await rewards.decide(hook, states, position(index))

        return by_hook
    if settings.reward_weights_schedule:
        weights = RewardWeights(env, settings.reward_weights_schedule)

        async def by_schedule(index: int, states: Sequence[State]) -> Mapping[str, float]:
            epoch = position(index)["epoch"]
            weights.decide(epoch, states)
            return weights.weights_of(epoch, states[0])

        return by_schedule
    return None


def epoch_and_step(step: int, steps_per_epoch: int) -> dict[str, int]:
    """The pass over the data of a step of the run, and the step's index in the pass.

    >>> epoch_and_step(7, 3)
    {'epoch': 2, 'step': 1}
    """
    epoch, step = divmod(step, steps_per_epoch)
    return {"epoch": epoch, "step": step}


def sample_rows(rows: Sequence[object], step: int, config: RLConfig) -> list[Any]:
    """The part of ``rows`` for the ``step``-th step: pass after pass, each shuffled by (seed,
    pass)."""
    if not rows:
        raise DatasetError(f"there are no rows to sample the batch of step {step} from")
    count = config.batch_size // config.rollouts_per_example
    sampled = []
    for position in range(step * count, (step + 1) * count):
        epoch, position = divmod(position, len(rows))
        order = list(range(len(rows)))
        if config.shuffle_dataset:
            random.Random(f"{config.seed}:{epoch}").shuffle(order)
        sampled.append(rows[order[position]])
    return sampled


class CustomRows(Schedule):
    """The rows that ``draw`` returns for each step, in order; those of step n are groups n·P to
    (n+1)·P - 1.

    Groups without a learning signal are replaced from the rows of later steps, which are then drawn
    earlier.
    """

    may_skip = False  # every row that a subclass draws is used

    def __init__(
        self, draw: Draw, row_format: RowFormat, examples: Sequence[Example], config: RLConfig
    ):
        super().__init__(examples, config.seed, shuffle=False)
        self._draw, self._row_format = draw, row_format
        self._per_step = config.batch_size // config.rollouts_per_example
        self._steps: dict[int, list[Example]] = {}
        self._warned = False

    def put(self, step: int, rows: Iterable[Any]) -> None:
        """Use ``rows`` for a step: rows after the P-th are ignored, fewer than P are repeated."""
        try:
            examples = examples_from(list(rows), self._row_format)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"get_batch returned {type(rows).__name__}, not rows of the dataset: {error}"
            ) from error
        if not examples:
            raise DatasetError("get_batch returned no rows: there is nothing to train on")
        if len(examples) != self._per_step and not self._warned:
            self._warned = True
            log.warning(
                "get_batch returned %d rows, and a step takes %d", len(examples), self._per_step
            )
        self._steps[step] = examples

    def example(self, index: int) -> Example:
        step, position = divmod(index, self._per_step)
        if step not in self._steps:
            self.put(step, self._draw(step))
            self._steps = {n: rows for n, rows in self._steps.items() if n > step - 64}
        rows = self._steps[step]
        return rows[position % len(rows)]

    def seed_of(self, index: int) -> int:
        return self.seed * 1_000_003 + index  # a row may be drawn several times in a pass


class CustomRollouts:
    """The rollouts that ``draw`` returns for each step, as a batch; has the methods of
    ``PipelineThread``."""

    def __init__(
        self,
        draw: Draw,
        turns_of: TurnsOf,
        config: RLConfig,
        first: tuple[int, object] | None,
        record_dropped: RecordDropped | None = None,
    ):
        self._draw, self._turns_of, self.config = draw, turns_of, config
        self._per_step = config.batch_size // config.rollouts_per_example
        self._first = first
        self._in_training: tuple[Group, ...] = ()
        """Groups of the newest batch: saved while some of its optimizer steps are to come."""
        self._goes_on = False
        """Whether the next batch is a batch of which steps were taken, and which was counted."""
        self._record_dropped = record_dropped
        self.state = PipelineState()
        self.version = 0
        self._signal = SignalMeter(config, self.state.signal, may_be_solved=False)

    def start(self, version: int = 0, state: PipelineState | None = None) -> None:
        self.version, self.state = version, state or self.state
        self._signal.signal = self.state.signal
        if self.state.ready:
            self._first, self.state.ready = (self._step, self.state.ready), []
            self.state.in_training, self._goes_on = 0, True
        else:
            forget_batch(self.state, version, self.config)

    @property
    def _step(self) -> int:
        """The step that is drawn next."""
        return self.state.next_index // self._per_step

    def next_batch(self) -> TrainBatch:
        """The rollouts of the next step. Raises ``NoLearningSignal`` as the pipeline does."""
        while True:
            started = time.monotonic()
            groups = self._next_groups()
            waited = time.monotonic() - started
            batch = batch_of(groups, self.config)
            goes_on, self._goes_on = self._goes_on, False
            is_step, numbers = (True, {}) if goes_on else self._signal.note(batch)
            if not is_step and self._record_dropped is not None:
                self._record_dropped(self.version + 1, batch.groups, numbers)
            if numbers:
                self._signal.is_solved()
            if is_step:
                self.state.delivered += 1
                self._in_training = batch.groups
                batch.stats["time/wait_generation"] = waited
                return batch

    def _next_groups(self) -> list[Group]:
        step = self._step
        self.state.next_index += self._per_step  # as the pipeline counts, whatever the hook returns
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
        """No-op: nothing runs in the background."""

    def snapshot(self) -> PipelineState:
        state, ready = replace(self.state, signal=replace(self.state.signal)), self._in_training
        if not amid_batch(state, self.version, self.config):
            return state
        state.next_index = state.next_index - self._per_step
        state.base = state.base - len(ready)
        state.ready, state.in_training = list(ready), len(ready)
        state.delivered -= 1
        return state

    last_state = snapshot

    def close(self) -> None:
        """No-op: nothing runs in the background."""


def batch_of(groups: Sequence[Group], config: RLConfig) -> TrainBatch:
    """The batch of finished rollouts, which are siblings as their groups say."""
    settings = copy.copy(config)
    largest = max((len(group.rollouts) for group in groups), default=1)
    settings.derive(rollouts_per_example=largest)
    batch = build(groups, [], settings, settings.world_size)
    batch.stats.update(WITHOUT_PIPELINE, **{"time/wait_generation": 0.0})
    return batch


def groups_of(batch: object, turns_of: TurnsOf, first_index: int = 0) -> list[Group]:
    """The groups of a ``get_batch`` result: groups, or (prompts, completions, rewards) with
    siblings adjacent.

    They are numbered from ``first_index``. Raises ``ConfigError`` when the lengths do not match.
    """
    if isinstance(batch, Sequence) and batch and all(isinstance(member, Group) for member in batch):
        return [replace(group, index=first_index + offset) for offset, group in enumerate(batch)]
    if not (isinstance(batch, tuple) and len(batch) == 3):
        raise ConfigError(
            f"get_batch returned {type(batch).__name__} after prompts, completions and rewards"
            " before"
        )
    prompts, completions, rewards = batch
    if not len(prompts) or len(completions) % len(prompts) or len(rewards) != len(completions):
        raise ConfigError(
            f"get_batch returned {len(prompts)} prompts, {len(completions)} completions and"
            f" {len(rewards)} rewards: it needs as many completions for each prompt, those of one"
            " prompt together, and a reward for each"
        )
    size = len(completions) // len(prompts)
    return [
        Group(
            first_index + index,
            _row(prompt).get("example_id", index),
            tuple(
                _rollout(
                    prompt, completions[n], rewards[n], turns_of(completions[n], f"completion {n}")
                )
                for n in range(index * size, (index + 1) * size)
            ),
        )
        for index, prompt in enumerate(prompts)
    ]


def _rollout(
    prompt: object, completion: object, reward: float | None, turns: tuple[Turn, ...]
) -> Rollout:
    row = _row(prompt)
    return Rollout(
        Transcript(turns),
        math.nan if reward is None else float(reward),
        status=Status(is_truncated=any(turn.is_truncated for turn in turns)),
        row={"prompt": row.get("prompt", prompt), "answer": row.get("answer", "")},
        completion=completion,
    )


def _row(prompt: object) -> Mapping[str, Any]:
    return prompt if isinstance(prompt, Mapping) else {}


BatchSource = PipelineThread | CustomRollouts | OfflineRollouts
"""Sources of each step's batch: ``start``, ``next_batch``, ``set_version``, ``settle``,
``state``, ``snapshot``, ``last_state``, ``close``."""
