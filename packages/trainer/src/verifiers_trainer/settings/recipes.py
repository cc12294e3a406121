"""Recipes: settings that belong together, each named for the method, with its source.

The setting ``recipe`` takes the values of a row of ``RECIPES`` in place of the defaults; a setting
that the caller gives wins. docs/train/recipes.md shows the table, with what each was measured to
reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings with the source of the method."""

    settings: Mapping[str, Any]
    source: str


RECIPES: Mapping[str, Recipe] = {
    "policy_gradient": Recipe(
        {"loss": "cispo", "advantage": "mean_std"}, "MiniMax-M1, arXiv 2506.13585, equation 4"
    ),
    "clipped_updates": Recipe(
        {
            "loss": "ppo",
            "epsilon_high": 0.28,
            "advantage": "mean_std",
            "updates_per_batch": 4,
            "num_iterations": 2,
        },
        "PPO, arXiv 1707.06347, algorithm 1, with clip-higher of DAPO, arXiv 2503.14476",
    ),
    "best_of_group": Recipe(
        {"loss": "reinforce", "advantage": "best", "updates_per_batch": 4, "num_iterations": 2},
        "RAFT, arXiv 2304.06767: rejection sampling; here from groups with a signal alone",
    ),
    "trl": Recipe(
        {
            "loss": "dapo",
            "advantage": "mean_std",
            "beta": 0.0,
            "sync_ref_model": False,
            "max_off_policy_steps": 0,
            "zero_variance": "keep",
            "disable_dropout": False,
            "mask_truncated_completions": False,
            "max_grad_norm": 1.0,
            "max_completion_len": 512,
        },
        "the defaults of GRPOConfig in TRL 1.16",
    ),
}
"""By the value of the setting ``recipe``."""

NAMES = frozenset(name for recipe in RECIPES.values() for name in recipe.settings)
"""Every setting that some recipe has a value for."""


def settings_of(recipe: str | None) -> Mapping[str, Any]:
    """Return the settings of a recipe; none without a recipe, or for an unknown name.

    >>> settings_of("best_of_group")["advantage"], settings_of(None)
    ('best', {})
    """
    return RECIPES[recipe].settings if recipe is not None and recipe in RECIPES else {}
