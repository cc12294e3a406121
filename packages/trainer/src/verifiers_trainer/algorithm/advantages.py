"""Turn the rewards of groups into advantages: how much better a rollout was than its siblings.

Pure numpy, float64, no configuration object. A reward of NaN is *unknown*: it leaves the mean, the
deviation and the batch, and its advantage is NaN. A dead group (`is_dead`) has no signal: all its
advantages are NaN, or 0 with ``keep_dead``. NaN always means "not trained". The pipeline decides
what happens to dead groups (replaced, or trained with 0).

Shapes: ``rewards_G`` is a list with one array [n] per group; for "gdpo" [n, F], one column per
reward function; for "environment" the advantages that the environment computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.registry import (
    Registry,
    call,
    check_parameters,
    name_and_position,
)

EPSILON = 1e-4
"""Added to every standard deviation before dividing by it."""

ADVANTAGES = Registry("advantage")
AdvantageFunction = Callable[..., list[np.ndarray]]
register_advantage = ADVANTAGES.register


def is_known(values: np.ndarray) -> np.ndarray:
    """bool [n], which of the values [n] or rows [n, F] hold no NaN."""
    unknown = np.isnan(values)
    return ~(unknown if values.ndim == 1 else unknown.any(axis=1))


def compares_siblings(function: AdvantageFunction) -> bool:
    """Whether an advantage compares the rollouts of a group: not if its object, an author's too,
    declares ``compares = False``."""
    return bool(getattr(function, "compares", True))


def has_too_few(
    values: np.ndarray,
    min_group_fraction: float = 0.75,
    advantage: str | AdvantageFunction = "mean",
) -> bool:
    """True when fewer than max(2, ceil(min_group_fraction·G)) values are known: a baseline needs
    two.

    ``values`` is [G], or [G, F], of which a row with any NaN is unknown. For the ``advantage``
    "none" a single known value is enough; for "environment", whose numbers are advantages, there is
    no minimum of two.
    """
    function = ADVANTAGES.resolve(advantage)
    num_known = int(is_known(np.asarray(values, dtype=np.float64)).sum())
    if not compares_siblings(function):
        return num_known == 0
    least = 1 if function is environment else 2
    return num_known < max(least, math.ceil(min_group_fraction * len(values)))


def is_dead(
    values: np.ndarray,
    min_group_fraction: float = 0.75,
    advantage: str | AdvantageFunction = "mean",
) -> bool:
    """True when a group has no signal: it `has_too_few` known values, or all of them are equal.

    Equal means bit for bit, before anything is subtracted: their mean may differ from them by
    rounding. For the ``advantage`` "none" equal values are a signal too, for "environment" those
    that are not all 0.

    >>> is_dead(np.array([1.0, 0.0, np.nan, 0.0])), is_dead(np.array([1.0, 1.0]))
    (False, True)
    """
    function = ADVANTAGES.resolve(advantage)
    if has_too_few(values, min_group_fraction, function):
        return True
    values = np.asarray(values, dtype=np.float64)
    live = values[is_known(values)]
    differ = live.any() if function is environment else (live != live[0]).any()
    return compares_siblings(function) and not differ


def compute_advantages(
    choice: str | AdvantageFunction,
    rewards_G: Sequence[np.ndarray],
    *,
    lengths_G: Sequence[np.ndarray] | None = None,
    min_group_fraction: float = 0.75,
    weights_G: Sequence[np.ndarray] | None = None,
    keep_dead: bool = False,
    **parameters: object,
) -> list[np.ndarray]:
    """Advantages [n] per group, NaN for unknown rewards and throughout dead groups.

    ``choice`` is a registered name, "package.module:function" or a function ``(rewards_G,
    lengths_G, *, ...)`` that sees live groups and known rewards only. ``keep_dead`` gives 0 to the
    known rewards of groups that are dead for being equal; the function then sees those groups too,
    so that they count in statistics of the batch. ``lengths_G`` counts the trained tokens of each
    rollout ("opo" needs it), ``weights_G`` [F] weighs the columns of a group ("gdpo"). *Raises*
    ConfigError for an unknown name or parameter.

    >>> compute_advantages("mean", [np.array([1.0, 0.0, np.nan, 0.5])])
    [array([ 0.5, -0.5,  nan,  0. ])]
    """
    function = ADVANTAGES.resolve(choice)
    check_parameters("advantage", str(choice), function, parameters)
    rewards = [np.asarray(group, dtype=np.float64) for group in rewards_G]
    known_G = [is_known(group) for group in rewards]
    is_dead_G = [is_dead(group, min_group_fraction, function) for group in rewards]
    live = [g for g in range(len(rewards)) if not is_dead_G[g]]
    advantages = [np.full(len(group), np.nan) for group in rewards]
    used = live
    if keep_dead:
        too_few = [has_too_few(group, min_group_fraction, function) for group in rewards]
        used = [g for g in range(len(rewards)) if not too_few[g]]
        for g in used:
            advantages[g][known_G[g]] = of_equals(function)
    if live:
        if weights_G is not None:
            parameters["weights_G"] = [weights_G[g] for g in used]
        lengths = None
        if lengths_G is not None:
            lengths = [np.asarray(lengths_G[g], dtype=np.float64)[known_G[g]] for g in used]
        used_G = [rewards[g][known_G[g]] for g in used]
        computed = call("advantage", function, used_G, lengths, **parameters)
        computed = one_per_rollout(computed, function, used_G)
        for g, values in zip(used, computed, strict=True):
            if g in live:
                advantages[g][known_G[g]] = values
    return advantages


def one_per_rollout(
    computed: Any, function: AdvantageFunction, rewards_G: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The advantages of a function. *Raises* ConfigError for another form than an array [n] for
    each group: one number would broadcast, and train something else."""
    expected = [len(group) for group in rewards_G]
    try:
        arrays = [np.asarray(group, dtype=np.float64) for group in computed]
        shapes = sorted({str(list(array.shape)) for array in arrays})
        returned = f"{len(arrays)} arrays of the shapes {', '.join(shapes)}"
        if [array.shape for array in arrays] == [(n,) for n in expected]:
            return arrays
    except (TypeError, ValueError, RuntimeError):
        returned = f"a {type(computed).__name__} that is no list of arrays"
    sizes = ", ".join(map(str, sorted(set(expected))))
    raise ConfigError(
        f"the advantage {name_and_position(function)} returned {returned} for {len(expected)} groups"
        f" of {sizes} rollouts: return a list with an array for each group, one number for each of"
        " its rollouts",
        key="advantage",
    )


def of_equals(choice: str | AdvantageFunction) -> float:
    """The advantage in a kept group of equal rewards: 0; NaN with "best", which trains none."""
    return math.nan if ADVANTAGES.resolve(choice) is best else 0.0


# --- the estimators: live groups and known rewards only -------------------------------------------


@register_advantage("mean")
def mean(rewards_G: list[np.ndarray], lengths_G: object = None) -> list[np.ndarray]:
    """R - mean of the group. Source: Dr. GRPO, arXiv 2503.20783."""
    return [r - r.mean() for r in rewards_G]


@register_advantage("mean_std")
def mean_std(rewards_G: list[np.ndarray], lengths_G: object = None) -> list[np.ndarray]:
    """(R - mean)/(std + 1e-4), sample deviation of the group. Source: GRPO, arXiv 2402.03300."""
    return [_z_score(r) for r in rewards_G]


@register_advantage("batch_std")
def batch_std(rewards_G: list[np.ndarray], lengths_G: object = None) -> list[np.ndarray]:
    """(R - mean)/(std + 1e-4) with one sample deviation, that of the centred rewards of all live
    groups.

    Source: ScaleRL, arXiv 2510.13786.
    """
    centred = mean(rewards_G)
    deviation = np.concatenate(
        [c for c, r in zip(centred, rewards_G, strict=True) if (r != r[0]).any()]
    ).std(ddof=1)
    return [c / (deviation + EPSILON) for c in centred]


@register_advantage("batch_reward_std")
def batch_reward_std(rewards_G: list[np.ndarray], lengths_G: object = None) -> list[np.ndarray]:
    """(R - mean)/(std + 1e-4) with one sample deviation, that of all rewards of the batch.

    Source: Lite-PPO, arXiv 2508.08221; ``scale_rewards="batch"`` of TRL.
    """
    deviation = np.concatenate(rewards_G).std(ddof=1)
    return [c / (deviation + EPSILON) for c in mean(rewards_G)]


@register_advantage("rloo")
def rloo(rewards_G: list[np.ndarray], lengths_G: object = None) -> list[np.ndarray]:
    """(R - mean)·n/(n-1): the baseline is the mean of the others. Source: leave-one-out REINFORCE,
    arXiv 2402.14740."""
    return [(r - r.mean()) * len(r) / (len(r) - 1) for r in rewards_G]


@register_advantage("max_rl")
def max_rl(rewards_G: list[np.ndarray], lengths_G: object = None) -> list[np.ndarray]:
    """(R - mean)/mean. Defined for rewards >= 0: a mean of zero or less gives zeros, never a
    reversed sign.

    Source: MaxRL, maximum-likelihood reinforcement learning.
    """
    return [(r - r.mean()) / r.mean() if r.mean() > 0 else np.zeros_like(r) for r in rewards_G]


@register_advantage("opo")
def opo(rewards_G: list[np.ndarray], lengths_G: list[np.ndarray] | None = None) -> list[np.ndarray]:
    """R - Σ len·R / Σ len, the baseline of least variance when gradients grow with length.

    Source: OPO, arXiv 2505.23585. *Raises* ConfigError without lengths.
    """
    if lengths_G is None:
        raise ConfigError(
            "advantage 'opo' weighs rewards by length; pass lengths_G, one array per group"
        )
    return [r - (n * r).sum() / n.sum() for r, n in zip(rewards_G, lengths_G, strict=True)]


@register_advantage("gdpo")
def gdpo(
    rewards_G: list[np.ndarray],
    lengths_G: object = None,
    *,
    weights: Sequence[float] | None = None,
    weights_G: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """A z-score in the group for each reward function, their weighted sum, then a z-score over the
    batch.

    Rewards are [n, F]; ``weights`` [F] apply to all groups, ``weights_G`` to one group each; all 1
    when None. Source: GDPO, group reward-decoupled normalisation.
    """
    if any(r.ndim != 2 for r in rewards_G):
        raise ConfigError("advantage 'gdpo' needs rewards [n, F], one column per reward function")
    if weights_G is None:
        weights_G = [
            np.ones(r.shape[1]) if weights is None else np.asarray(weights, np.float64)
            for r in rewards_G
        ]
    sums = [
        _z_score(r) @ function_weights
        for r, function_weights in zip(rewards_G, weights_G, strict=True)
    ]
    batch = np.concatenate(sums)
    return [(s - batch.mean()) / (batch.std(ddof=1) + EPSILON) for s in sums]


@register_advantage("best")
def best(rewards_G: list[np.ndarray], lengths_G: object = None) -> list[np.ndarray]:
    """1 for the siblings with the best reward of their group; the others are not trained (NaN).

    With the loss "reinforce" that is cross-entropy on the best answers: rejection sampling, as RAFT
    has it (arXiv 2304.06767), from groups with a signal alone.
    """
    return [np.where(r == r.max(), 1.0, np.nan) for r in rewards_G]


@dataclass(frozen=True, slots=True)
class Minus:
    """R minus one number for all groups, so that a single rollout has an advantage too."""

    baseline: float
    compares: ClassVar[bool] = False

    def __call__(self, rewards_G: list[np.ndarray], lengths_G: object = None) -> list[np.ndarray]:
        return [r - self.baseline for r in rewards_G]


none = register_advantage("none")(Minus(0.0))
"""R itself: no baseline, and so no dead groups."""


@register_advantage("environment")
def environment(advantages_G: list[np.ndarray], lengths_G: object = None) -> list[np.ndarray]:
    """The environment's own advantages, by its rubric's ``@vf.advantage`` method, unchanged."""
    return list(advantages_G)


def _z_score(rewards: np.ndarray) -> np.ndarray:
    return (rewards - rewards.mean(axis=0)) / (rewards.std(axis=0, ddof=1) + EPSILON)
