"""What the constructor of a trainer is given: two names for one thing, settings made final, an environment that trains.

Everything wrong is a ``ConfigError`` before any work. The rules among settings are ``rules``'; what is done with model
and tokenizer is ``preparation``'s.
"""

from __future__ import annotations

from typing import Any

from verifiers.environments.base import Environment
from verifiers.errors import ConfigError
from verifiers_trainer.config import RLConfig
from verifiers_trainer.losses import loss_parameters


def either(first: str, a: Any, second: str, b: Any) -> Any:
    """The one of two spellings that was given. Raises ``ConfigError`` when both were, with different values."""
    if a is not None and b is not None and a is not b:
        raise ConfigError(f"{second} is another name of {first}; give one of them")
    return a if a is not None else b


def settled(given: RLConfig | None) -> RLConfig:
    """A private copy of the settings (or of the defaults), checked together."""
    settings = given if given is not None else RLConfig()
    if not isinstance(settings, RLConfig):
        raise ConfigError(f"args must be an RLConfig, not {type(settings).__name__}")
    settings = settings.private_copy()
    settings.resolve(settings.world_size)
    if settings.world_size > 1:
        raise ConfigError(f"training runs in one process for now, and this is one of {settings.world_size}")
    settings._n_gpu = min(settings.n_gpu, 1)  # of several devices the first: the model is never replicated
    return settings


def check_environment(env: Any) -> None:
    """Raise ``ConfigError`` unless it is an environment with a reward function."""
    if not isinstance(env, Environment):
        raise ConfigError(f"env must be an environment or the id of one, not {type(env).__name__}")
    if not env.get_reward_funcs():
        raise ConfigError(f"the environment {name_of(env)} has no reward function: nothing to train on")


def name_of(env: Environment) -> str:
    """Its id, or what kind of environment it is."""
    return env.env_id or type(env).__name__


def loss_parameters_of(settings: RLConfig) -> dict[str, Any]:
    """The parameters that the chosen loss takes, explicit ``loss_kwargs`` last."""
    taken = loss_parameters(settings.loss)
    named = settings.loss_parameters()
    return {name: value for name, value in named.items() if taken is not None and name in taken} | settings.loss_kwargs
