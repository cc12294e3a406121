"""Check a command line of ``vf-train`` before torch and transformers are imported, which takes many seconds.

Names of settings, plain types, the model's folder, the environment and its arguments. ``plan`` checks everything again
with what the imports add: ranges, combinations, and the environment as it is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verifiers.cli.common.reader import raise_together
from verifiers.environments import registry
from verifiers.errors import UsageError, VerifiersError
from verifiers_trainer.cli.settings import TrainSettings, read_settings
from verifiers_trainer.cli.sources import read_words
from verifiers_trainer.policy.loading import missing_folder


def check_first(words: Sequence[str]) -> None:
    """*Raises* ``ConfigError`` that lists every problem."""
    assignments, problems = read_words(words)
    settings, more = read_settings(assignments, without_transformers=True)
    found: list[str | VerifiersError] = [*problems, *more]
    if missing := missing_folder(settings.model):
        found.append(f"{settings.places['model']}: {missing}")
    found += [f"{settings.places['env.id']}: {error}" for error in _environment_errors(settings)]
    raise_together(found)


def _environment_errors(settings: TrainSettings) -> Iterator[UsageError]:
    tables: list[tuple[str, Mapping[str, Any]]] = [(table.id, table.args) for table in settings.mixture]
    for env_id, args in tables or ([(settings.env_id, settings.env_args)] if settings.env_id else []):
        try:
            registry.check_arguments(env_id, registry.import_loader(env_id, registry.find(env_id)), args)
        except UsageError as error:
            yield error
