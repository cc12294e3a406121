"""Check a command line of ``vf-train`` before torch and transformers are imported, which takes many
seconds.

Names of settings, plain types, ranges, the sizes of the batch, the model's folder, the environment
and its arguments. ``plan`` checks everything again with what the imports add: losses, other
combinations, and the environment as it is built.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

from verifiers.cli.common.reader import raise_together
from verifiers.environments import registry
from verifiers.errors import UsageError, VerifiersError
from verifiers_trainer.cli.settings import TrainSettings, read_settings
from verifiers_trainer.cli.sources import read_words
from verifiers_trainer.policy.loading import missing_folder
from verifiers_trainer.settings import compat
from verifiers_trainer.settings.batch_rules import check_batch
from verifiers_trainer.settings.fields import Settings, problem_of


def check_first(words: Sequence[str], imports: bool = True) -> None:
    """``imports``: whether the environment may be imported, to check its arguments. *Raises*
    ``ConfigError`` that lists every problem."""
    assignments, problems = read_words(words)
    settings, more = read_settings(assignments)
    problems_found: list[str | VerifiersError] = [*problems, *more]
    problems_found += map(settings.at, _value_problems(settings))
    if missing := missing_folder(settings.model):
        problems_found.append(f"{settings.locations['model']}: {missing}")
    if imports:
        errors = _environment_errors(settings)
        problems_found += [f"{settings.locations['env.id']}: {error}" for error in errors]
    raise_together(problems_found)


def _value_problems(settings: TrainSettings) -> list[str]:
    """Values outside their limits, and sizes of a batch that do not fit each other; not those of
    GRPO, which derives them from other settings."""
    if settings.algorithm != "rl":
        return []
    problems = [
        problem for name, value in settings.config.items() if (problem := problem_of(name, value))
    ]
    if "recipe" in settings.config or settings.locations.keys() & compat.GRPO_NAMES:
        return (
            problems  # the values of a recipe, and of other spellings, are read with transformers
        )
    if (
        "loss" in settings.config
        and not {"rollouts_per_example", "advantage"} <= settings.config.keys()
    ):
        return problems  # a loss has defaults for them: imitated rollouts have no siblings
    world_size = os.environ.get("WORLD_SIZE", "")
    config = SimpleNamespace(**{**dataclasses.asdict(Settings()), **settings.config}, batch_is="")
    return problems + check_batch(config, int(world_size) if world_size.isdecimal() else 1)


def _environment_errors(settings: TrainSettings) -> Iterator[UsageError]:
    for table in settings.environments:
        try:
            loader = registry.import_loader(table.id, registry.find(table.id))
            registry.check_arguments(table.id, loader, table.args)
        except UsageError as error:
            yield error
