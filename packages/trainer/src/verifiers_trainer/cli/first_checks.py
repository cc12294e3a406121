"""Check a command line of ``vf-train`` before torch and transformers are imported, which takes many seconds.

Names of settings, plain types, ranges, the sizes of the batch, the model's folder, the environment and its arguments.
``plan`` checks everything again with what the imports add: losses, other combinations, and the environment as it is
built.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verifiers.cli.common.reader import raise_together
from verifiers.environments import registry
from verifiers.errors import UsageError, VerifiersError
from verifiers_trainer.cli.settings import TrainSettings, read_settings
from verifiers_trainer.cli.sources import read_words
from verifiers_trainer.policy.loading import missing_folder
from verifiers_trainer.settings import compat, static_fields
from verifiers_trainer.settings.limits import check_batch


def check_first(words: Sequence[str]) -> None:
    """*Raises* ``ConfigError`` that lists every problem."""
    assignments, problems = read_words(words)
    settings, more = read_settings(assignments, without_transformers=True)
    found: list[str | VerifiersError] = [*problems, *more]
    found += [f"{_place(settings, problem)}{problem}" for problem in _value_problems(settings)]
    if missing := missing_folder(settings.model):
        found.append(f"{settings.places['model']}: {missing}")
    found += [f"{settings.places['env.id']}: {error}" for error in _environment_errors(settings)]
    raise_together(found)


def _place(settings: TrainSettings, problem: str) -> str:
    place = settings.places.get(problem.split(" ", 1)[0])
    return f"{place}: " if place else ""


def _value_problems(settings: TrainSettings) -> list[str]:
    """Values outside their limits, and sizes of a batch that do not fit each other; not those of GRPO, which derives
    them from other settings."""
    if settings.algorithm != "rl":
        return []
    limits = static_fields.limits()
    problems = [limit.problem(name, value) for name, value in settings.config.items() for limit in limits.get(name, ())]
    found = [problem for problem in problems if problem is not None]
    if "recipe" in settings.config or settings.places.keys() & compat.GRPO_NAMES:
        return found  # the values of a recipe, and of other spellings, are read with transformers
    if "loss" in settings.config and not {"rollouts_per_example", "advantage"} <= settings.config.keys():
        return found  # a loss has defaults for them: imitated rollouts have no siblings
    world_size = os.environ.get("WORLD_SIZE", "")
    return found + check_batch(_Given(settings.config), int(world_size) if world_size.isdecimal() else 1)


class _Given:
    """The settings of a file, with defaults, as ``check_batch`` reads them."""

    batch_is = ""

    def __init__(self, given: Mapping[str, Any]):
        self.__dict__.update({**static_fields.defaults(), **given})
        self._given = given

    def __getattr__(self, name: str) -> Any:  # for a type checker: the attributes are the settings
        raise AttributeError(name)


def _environment_errors(settings: TrainSettings) -> Iterator[UsageError]:
    tables: list[tuple[str, Mapping[str, Any]]] = [(table.id, table.args) for table in settings.mixture]
    for env_id, args in tables or ([(settings.env_id, settings.env_args)] if settings.env_id else []):
        try:
            registry.check_arguments(env_id, registry.import_loader(env_id, registry.find(env_id)), args)
        except UsageError as error:
            yield error
