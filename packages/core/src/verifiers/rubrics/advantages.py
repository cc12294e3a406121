"""Advantages: how much better a rollout is than the other rollouts of its group. Pure functions.

The default is the reward minus the group's mean reward. A rubric with an ``@advantage`` method
computes its own.

*Source*: Liu et al. 2025, "Understanding R1-Zero-Like Training" (Dr. GRPO): centred, not divided by
the deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def centered_advantages(rewards: Sequence[float]) -> list[float]:
    """Each reward minus the mean of the group's known rewards; an unknown reward (NaN) gives NaN.

    ``rewards`` has shape [G], one per rollout of the group. A single known reward gives 0.0.

    >>> centered_advantages([1.0, 0.0, math.nan])
    [0.5, -0.5, nan]
    """
    numbers = [reward for reward in rewards if not math.isnan(reward)]
    center = math.fsum(numbers) / len(numbers) if numbers else math.nan
    return [reward - center for reward in rewards]
