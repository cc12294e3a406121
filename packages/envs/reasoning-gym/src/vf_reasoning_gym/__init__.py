"""reasoning-gym: generated problems with a verifiable answer, by the generators of Reasoning Gym.

The public interface is ``load_environment``; problems are generated and scored by
``vf.ReasoningGymEnv``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import verifiers as vf

__all__ = ["DEFAULT_GENERATORS", "load_environment"]

DEFAULT_GENERATORS = (
    "chain_sum",
    "leg_counting",
    "number_sorting",
    "spell_backward",
    "time_intervals",
)
"""Short problems of several kinds, all independent of Python's hash seed."""


def load_environment(
    gym: str | Sequence[str | Mapping[str, object]] = DEFAULT_GENERATORS,
    num_train_examples: int = 1000,
    num_eval_examples: int = 100,
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.Environment:
    """The reasoning-gym environment.

    Args:
        gym: A generator's name, a list of names, or a list of {"name", "weight", "config"} to mix
            them unevenly.
        num_train_examples: Training problems.
        num_eval_examples: Held-out problems, which follow the training problems in the generator's
            sequence.
        seed: Determines the problems.
        system_prompt: Default: an instruction that names the tags. "" sends none.

    Raises:
        ConfigError: An invalid argument, by name; or Reasoning Gym is not installed.
    """
    return vf.ReasoningGymEnv(
        gym=gym if isinstance(gym, str) else list(gym),
        num_train_examples=num_train_examples,
        num_eval_examples=num_eval_examples,
        seed=seed,
        system_prompt=system_prompt,
        parser=vf.XMLParser(["answer"], last=True),
    )
