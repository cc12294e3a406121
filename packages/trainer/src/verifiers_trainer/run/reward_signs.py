"""What the sampled rollouts of a step show of a reward that is paid without solving the task: pure
functions of rollouts, without a model call or a reward function.

``signs_of`` reads the rollouts into arrays, ``numbers_of`` makes the metrics ``hacking/*`` of them.
When such a number is a warning is said in ``reward_watch``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verifiers.checks.audit.recognition import Recogniser, touches_grading
from verifiers.data.examples import Example
from verifiers.rollouts.rollout import Rollout
from verifiers.rubrics.scoring import SUCCESS
from verifiers_trainer.algorithm.group import Group

PAID = 0.9
"""Share of what a solution earns from which a rollout counts as paid like one."""
LEAST_EXAMPLES = 3
"""Different examples that have the same reply from which it does not look at its example."""


@dataclass(frozen=True, slots=True)
class Signs:
    """The rollouts of a step, N of them; unknown values are NaN."""

    reward_N: np.ndarray
    right_N: np.ndarray
    """1 where the reply is the row's answer, 0 where not; by the metric ``success`` if the rows
    have no answer."""
    solved_N: np.ndarray
    """The metric ``success``."""
    tokens_N: np.ndarray
    """Sampled tokens."""
    group_N: np.ndarray
    """Index of the group."""
    parts: Mapping[str, np.ndarray]
    """Weighted reward function -> its part of each reward [N]."""
    cheap_N: np.ndarray
    """Name of the cheap reply that it is; "" for none."""
    copied_N: np.ndarray
    grading_N: np.ndarray
    answers_N: np.ndarray
    """The text in the answer's place."""

    def masks(self, solution: float) -> dict[str, np.ndarray]:
        """Metric of a behaviour -> bool [N]: the rollouts that show it and are paid, right ones
        only where the behaviour is wrong in itself. ``solution``: what a solution earns."""
        paid = (self.reward_N >= PAID * solution) & (self.reward_N > 0)
        wrong = paid & (self.right_N != 1)
        return {
            "hacking/cheap_replies": wrong & (self.cheap_N != ""),
            "hacking/copied": wrong & self.copied_N,
            "hacking/grading": paid & self.grading_N,
            "hacking/same_reply": wrong & self._is_repeated(),
        }

    def _is_repeated(self) -> np.ndarray:
        """bool [N]: whether rollouts of other examples have the same text in the answer's place."""
        groups: dict[str, set[int]] = {"": set()}
        for text, group in zip(self.answers_N, self.group_N, strict=True):
            if text:  # the empty text is a cheap reply
                groups.setdefault(text, set()).add(group)
        return np.array([len(groups[text]) >= LEAST_EXAMPLES for text in self.answers_N], bool)


def signs_of(
    groups: Sequence[Group],
    recogniser_of: Callable[[Mapping[str, object]], Recogniser],
    example_of: Callable[[Group], Example],
) -> Signs:
    """The signs of the rollouts of ``groups``; those of a failed rollout are unknown.

    recogniser_of: of the environment of a row. example_of: the example of a group.
    """
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
    names = sorted({name for group in groups for name, weight in group.weights.items() if weight})
    answers, right, cheap, copied = [], [], [], []
    for group, rollout in pairs:
        recogniser, example = recogniser_of(rollout.row), example_of(group)
        has_ended = rollout.completion is not None and rollout.error is None
        answer = recogniser.answer_of(rollout) if has_ended else None
        answers.append(answer or "")
        right.append(_is_right(recogniser.is_right(example, answer), rollout))
        cheap.append(recogniser.name_of(example, answer) if has_ended else "")
        copied.append(recogniser.copies(example, answer))
    return Signs(
        np.array([rollout.reward for _, rollout in pairs], np.float64),
        np.array(right, np.float64),
        np.array([rollout.metrics.get(SUCCESS, math.nan) for _, rollout in pairs], np.float64),
        np.array([rollout.num_sampled for _, rollout in pairs], np.float64),
        np.array([group.index for group, _ in pairs], np.int64),
        {
            name: np.array(
                [
                    group.weights.get(name, 0.0) * rollout.metrics.get(name, math.nan)
                    for group, rollout in pairs
                ],
                np.float64,
            )
            for name in names
        },
        np.array(cheap, object),
        np.array(copied, bool),
        np.array([touches_grading(rollout.completion) for _, rollout in pairs], bool),
        np.array(answers, object),
    )


def _is_right(by_answer: bool | None, rollout: Rollout) -> float:
    return rollout.metrics.get(SUCCESS, math.nan) if by_answer is None else float(by_answer)


def solution_reward(groups: Sequence[Group], best: float) -> float:
    """What a solution earns: 1 for each weighted function, or more if the ``best`` reward of the
    run is more. A graded reward pays other replies too, and early in a run none of its rewards is that
    of a solution."""
    sums = (sum(w for w in group.weights.values() if w > 0) for group in groups)
    return max([best, *sums])


def numbers_of(signs: Signs, solution: float) -> dict[str, float]:
    """The metrics of a step; NaN where nothing is known, or nothing was paid.

    solution: What a solution earns.
    """
    is_measured = not np.isnan(signs.solved_N).all()
    unsolved = paid_share(signs.reward_N, signs.solved_N == 0) if is_measured else math.nan
    return {
        **{
            name: paid_share(signs.reward_N, mask_N)
            for name, mask_N in signs.masks(solution).items()
        },
        "hacking/unsolved": unsolved,
        "hacking/right": _mean(signs.right_N),
        "hacking/length": within_groups(signs.tokens_N, signs.reward_N, signs.group_N),
        "hacking/format": format_share(signs),
        "hacking/flat": flatness(signs.parts),
    }


def paid_share(reward_N: np.ndarray, mask_N: np.ndarray) -> float:
    """Share of the positive reward that the rollouts of a mask were paid.

    >>> paid_share(np.array([1.0, 3.0, -1.0, math.nan]), np.array([True, False, True, True]))
    0.25
    """
    positive = np.where(reward_N > 0, reward_N, 0.0)
    total = positive.sum()
    # sums in two orders may round to more than the whole
    return min(1.0, float(positive[mask_N].sum() / total)) if total > 0 else math.nan


def within_groups(x_N: np.ndarray, y_N: np.ndarray, group_N: np.ndarray) -> float:
    """Pearson correlation of two values within the groups, their means taken out; NaN where one of
    them never differs.

    >>> within_groups(np.array([1, 2, 9, 7.0]), np.array([0, 1, 3, 2.0]), np.array([0, 0, 1, 1]))
    0.9486832980505138
    """
    is_known = ~np.isnan(x_N) & ~np.isnan(y_N)
    x, y = x_N[is_known].copy(), y_N[is_known].copy()
    for index in np.unique(group_N[is_known]):
        members = group_N[is_known] == index
        x[members] -= x[members].mean()
        y[members] -= y[members].mean()
    spread = math.sqrt(float((x**2).sum() * (y**2).sum()))
    return float((x * y).sum() / spread) if spread > 1e-12 else math.nan


def format_share(signs: Signs) -> float:
    """Mean reward of the unsolved rollouts over that of the solved ones: near 1 the other functions
    decide what is paid. NaN without both, and with one weighted function."""
    solved, unsolved = signs.solved_N == 1, signs.solved_N == 0
    if not solved.any() or not unsolved.any() or len(signs.parts) < 2:
        return math.nan
    paid = _mean(signs.reward_N[solved])
    return _mean(signs.reward_N[unsolved]) / paid if paid > 0 else math.nan


def flatness(parts: Mapping[str, np.ndarray]) -> float:
    """The largest standard deviation of a weighted reward function over the rollouts, as a share of
    its largest absolute value: 0 when none of them tells rollouts apart any more. NaN without a
    value other than 0."""
    ratios = []
    for values in parts.values():
        finite = values[~np.isnan(values)]
        if finite.size and (largest := float(np.abs(finite).max())) > 0:
            ratios.append(float(finite.std()) / largest)
    return max(ratios, default=math.nan)


def _mean(values: np.ndarray) -> float:
    finite = values[~np.isnan(values)]
    return float(finite.mean()) if finite.size else math.nan
