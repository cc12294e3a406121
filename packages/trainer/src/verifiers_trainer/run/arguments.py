"""What the constructor of a trainer is given: two names for one thing, settings made final, an environment that trains.

Everything wrong is a ``ConfigError`` before any work. The rules among settings are ``rules``'; what is done with model
and tokenizer is ``preparation``'s.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

from verifiers.data.examples import Example, examples_from
from verifiers.environments.base import Environment
from verifiers.environments.registry import load_environment
from verifiers.errors import ConfigError, DatasetError
from verifiers_trainer.algorithm.losses import loss_parameters
from verifiers_trainer.pipeline.mixture import joined
from verifiers_trainer.settings.config import RLConfig


def either(first: str, a: Any, second: str, b: Any) -> Any:
    """The one of two spellings that was given. Raises ``ConfigError`` when both were, with different values."""
    if a is not None and b is not None and a is not b:
        raise ConfigError(f"{second} is another name of {first}; give one of them")
    return a if a is not None else b


def server_of(client: Any) -> str | None:
    """The address of the server that a client stands for: a URL, an OpenAI client, or one of core's; None for none.

    Raises ``ConfigError`` for anything else: policies are sampled by a server that the weights can be sent to.
    """
    if client is None:
        return None
    url = client if isinstance(client, str) else getattr(client, "base_url", None)
    if not url:
        raise ConfigError(
            f"client is {type(client).__name__}, which has no base_url: give a vLLM server's URL, or a client of it"
        )
    return str(url)


def settled(given: RLConfig | None, default: type[RLConfig] = RLConfig, **chosen: Any) -> RLConfig:
    """A private copy of the settings (or of the defaults), with what else was ``chosen``, checked together."""
    settings = given if given is not None else default()
    if not isinstance(settings, RLConfig):
        raise ConfigError(f"args must be an RLConfig, not {type(settings).__name__}")
    settings = settings.private_copy()
    for name, value in chosen.items():
        if value is not None:
            setattr(settings, name, value)
    settings.resolve(settings.world_size)
    settings._n_gpu = min(settings.n_gpu, 1)  # of several devices the first: the model is never replicated
    return settings


def environment_of(given: Any) -> Any:
    """The environment that is given by its id or as it is; of a list, one group of all of them."""
    if isinstance(given, str):
        return load_environment(given)
    if isinstance(given, list | tuple):
        return joined([environment_of(member) for member in given])
    return given


def check_environment(env: Any, num_workers: int = 0) -> None:
    """Raise ``ConfigError`` unless it is an environment with a reward function, and one that workers can build."""
    if env is None:
        raise ConfigError("env is missing: give an environment, or the id of one, to train in")
    if not isinstance(env, Environment):
        raise ConfigError(f"env must be an environment or the id of one, not {type(env).__name__}")
    if not env.get_reward_funcs():
        raise ConfigError(f"the environment {name_of(env)} has no reward function: nothing to train on")
    if num_workers and env.loaded_from is None:
        raise ConfigError(
            f"num_env_workers is {num_workers}: a worker builds its environment by id, and this "
            f"{type(env).__name__} was made by hand; give its id, or use num_env_workers=0"
        )


def examples_of(env: Any, dataset: Any = None) -> list[Example]:
    """What is trained on: the rows of ``dataset``, or those of the environment.

    Raises ``DatasetError`` when there are none.
    """
    if dataset is not None:
        table: Any = examples_from(dataset, env.row_format)
    else:
        table = env.train_table if env.train_table is not None else env.eval_table
    if not len(table):
        raise DatasetError(f"the dataset of {name_of(env)} is empty: nothing to train on")
    return list(table)


def slot(limit: int | None) -> Any:
    """What bounds how many do something at a time."""
    return nullcontext() if limit is None else asyncio.Semaphore(limit)


def name_of(env: Environment) -> str:
    """Its id, or what kind of environment it is."""
    return env.env_id or type(env).__name__


def loss_parameters_of(settings: RLConfig) -> dict[str, Any]:
    """The parameters that the chosen loss takes, explicit ``loss_kwargs`` last."""
    taken = loss_parameters(settings.loss)
    named = settings.loss_parameters()
    return {name: value for name, value in named.items() if taken is not None and name in taken} | settings.loss_kwargs
