"""Which parts of an objective go together, and which schedules make sense, each rule a sentence that says what to do.

As ``rules``, of which these are the ones about anchors, corrections, the reference, credit and what changes over time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from verifiers_trainer.algorithm.losses import LOSSES, loss_parameters

ANCHORED_ON_SAMPLER = frozenset("cispo masked_is importance_sampling dppo_tv dppo_kl ipo".split())
"""Losses in ρ = π/μ: the gap between trainer and sampler is in them already."""
ANCHORED_ON_BATCH = frozenset("ppo gspo sapo vespo dro".split())
"""Losses in r, which is π/o with anchor="recomputed" and ρ otherwise."""
SEQUENCE_CORRECTIONS = ("sequence_mask_cap", "geo_mask", "opsm_delta")
CREDITED = ("mean", "none")
"""Advantages that credit per turn is defined for."""


def check_anchor(config: Any, world_size: int) -> list[str]:
    """Anchor, corrections, and parameters that the loss would not look at."""
    name = config.loss if isinstance(config.loss, str) and config.loss in LOSSES else None
    found = []
    if config.tis_cap is not None and name in ANCHORED_ON_SAMPLER:
        found.append(
            f"tis_cap weighs tokens by o/μ, and the loss {name!r} weighs them by π/μ already, so the gap to the "
            "sampler would count twice: leave tis_cap out, or use ppo, gspo, sapo, vespo or dro with "
            "anchor='recomputed'"
        )
    elif config.tis_cap is not None and config.anchor == "sampler":
        found.append(
            "tis_cap weighs tokens by o/μ, and with anchor='sampler' the ratio of the loss is π/μ, so the gap to the "
            "sampler would count twice: set anchor='recomputed', or leave tis_cap out"
        )
    drops = any(getattr(config, correction) is not None for correction in SEQUENCE_CORRECTIONS)
    unread = name is not None and name not in ANCHORED_ON_BATCH and config.tis_cap is None and not drops
    if config.anchor == "recomputed" and unread:
        found.append(
            f"anchor is 'recomputed', and the loss {name!r} compares with the sampler only, so nothing would read it: "
            f"leave it out, or use {', '.join(sorted(ANCHORED_ON_BATCH))}"
        )
    return found + _check_unread(config, name) + _check_geo_mask(config.geo_mask)


def _check_unread(config: Any, name: str | None) -> list[str]:
    found = []
    taken = None if name is None else loss_parameters(name)
    for parameter in ("delta", "dual_clip"):
        value = getattr(config, parameter)
        if value is not None and name is not None and (name != "ppo" or parameter not in (taken or ())):
            own = ", its own delta is a parameter in loss_kwargs" if parameter in (taken or ()) else ""
            found.append(f"{parameter} is {value!r}, a bound of the loss 'ppo', and the loss is {name!r}{own}")
    return found


def _check_geo_mask(pair: Any) -> list[str]:
    if pair is None:
        return []
    numbers = isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(n, int | float) for n in pair)
    if not numbers or not 0 < pair[0] < 1 < pair[1]:
        return [f"geo_mask is {pair!r}; it must be two numbers on both sides of 1, such as (0.99, 1.01)"]
    return []


def check_reference(config: Any, world_size: int) -> list[str]:
    """Settings of the reference that ask for one without a penalty."""
    if config.sync_ref_model and config.is_given("sync_ref_model") and config.beta == 0:
        return ["sync_ref_model=True and beta is 0: without a penalty there is no reference; set beta, or leave it out"]
    return []


def check_iterations(config: Any, world_size: int) -> list[str]:
    """Runs end where a batch does: a checkpoint in the midst of one could not be continued as it was."""
    n, steps = config.num_iterations, config.max_steps
    by_epochs = config.is_given("num_train_epochs") and not config.is_given("max_steps")
    if by_epochs or not all(isinstance(value, int) and value > 0 for value in (n, steps)) or steps % n == 0:
        return []
    near = f"{steps // n * n} or {(steps // n + 1) * n}" if steps > n else f"{n}"
    return [f"max_steps {steps} is not a multiple of num_iterations = {n}: a batch would be left half used; use {near}"]


def check_credit(config: Any, world_size: int) -> list[str]:
    """Credit per turn."""
    if config.credit == "turn" and config.advantage not in CREDITED:
        return [
            f"credit='turn' compares returns of turns with the mean of the siblings', and advantage is "
            f"{config.advantage!r}: use {' or '.join(map(repr, CREDITED))}"
        ]
    if config.credit != "turn" and config.gamma != 1.0:
        return [f"gamma is {config.gamma!r}, which discounts from turn to turn: it needs credit='turn'"]
    return []


def check_schedules(config: Any, world_size: int) -> list[str]:
    """Difficulties, reward weights and shares."""
    found = _check_difficulties(config.difficulty_schedule)
    weights = config.reward_weights_schedule
    if weights is not None and not _is_weights_schedule(weights):
        found.append(
            f"reward_weights_schedule is {weights!r}; it must map epochs, or 'default', to a list of weights or to "
            "weights by name"
        )
    shares = config.env_weights
    if shares is not None and (not shares or not all(_positive(share) for share in shares.values())):
        found.append(f"env_weights is {shares!r}; it must map names of environments to numbers above 0")
    if shares is not None and config.difficulty_schedule is not None:
        found.append("env_weights and difficulty_schedule both decide which example comes next: give one of them")
    return found


def _check_difficulties(schedule: Any) -> list[str]:
    if schedule is None:
        return []
    pairs = (
        isinstance(schedule, list | tuple)
        and schedule
        and all(isinstance(entry, list | tuple) and len(entry) == 2 and _positive(entry[0]) for entry in schedule)
    )
    if not pairs:
        return [f"difficulty_schedule is {schedule!r}; it must be pairs (epoch, difficulty) with epochs above 0"]
    epochs = [entry[0] for entry in schedule]
    if any(later <= earlier for earlier, later in itertools.pairwise(epochs)):
        return [f"difficulty_schedule has epochs {', '.join(f'{e:g}' for e in epochs)}; they must rise"]
    return []


def _is_weights_schedule(schedule: Any) -> bool:
    return (
        isinstance(schedule, Mapping)
        and bool(schedule)
        and all(key == "default" or str(key).isdecimal() for key in schedule)
        and all(isinstance(weights, Mapping | list | tuple) and weights for weights in schedule.values())
    )


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


OBJECTIVE_CHECKS = (check_anchor, check_reference, check_iterations, check_credit, check_schedules)
