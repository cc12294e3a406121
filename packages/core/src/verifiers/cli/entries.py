"""Which evaluations a command line asks for, each with all its settings, and everything wrong with that at once.

Imports the environments that are named, to check the arguments of their loaders; builds none, contacts nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from verifiers.cli.arguments import CommandLine
from verifiers.cli.options import EvalSettings, contradictions, layered
from verifiers.cli.toml_args import Entry, read_files
from verifiers.errors import ConfigError, UsageError, VerifiersError


def resolve(line: CommandLine) -> list[tuple[str, EvalSettings]]:
    """The evaluations a command line asks for, each with all its settings.

    Precedence, high to low: flags, dotted keys, ``[[eval]]``, the file's top level, the environment's own defaults.
    Raises: ``ConfigError`` that names everything wrong, or the one error there is.
    """
    from verifiers.cli.planning import defaults_of, from_run, offer_folder

    file = read_files(line.files)
    problems: list[str | VerifiersError] = [*line.problems, *file.problems]
    if file.entries and line.targets:
        problems.append(f"{line.targets[0]!r} and the [[eval]] of a file both say what to evaluate; give one of them")
    entries = file.entries or [Entry(env_id) for env_id in line.targets]
    if not entries and not problems:
        problems.append(_nothing_to_evaluate(line))
    resolved: list[tuple[str, EvalSettings]] = []
    for entry in entries:
        given = layered(layered(layered(file.common, entry.given), line.dotted), line.given)
        try:
            offer_folder(entry.env_id, given.get("env_dir_path", EvalSettings().env_dir_path))
            defaults, check_arguments = defaults_of(entry.env_id, problems)
            given = layered(defaults, given)
            check_arguments(given.get("env_args", {}))
            settings = from_run(EvalSettings(**given), given)
        except UsageError as error:
            problems.append(error)
            settings = EvalSettings(**given)
        problems += contradictions(settings)
        resolved.append((entry.env_id, settings))
    raise_together(problems)
    return resolved


def raise_together(problems: Sequence[str | VerifiersError]) -> None:
    """One error as it is; several as one ``ConfigError`` with a line for each."""
    texts = list(dict.fromkeys(map(str, problems)))
    if len(texts) == 1 and isinstance(problems[0], VerifiersError):
        raise problems[0]
    if texts:
        lines = texts[0] if len(texts) == 1 else "".join(f"\n  {text}" for text in texts)
        raise ConfigError(lines if len(texts) == 1 else f"{len(texts)} things to correct:{lines}", names=texts)


def _nothing_to_evaluate(line: CommandLine) -> str:
    from verifiers.registry import list_environments

    if line.files:
        return f"{', '.join(line.files)} has no [[eval]]: add one with an env_id, or name an environment"
    installed = ", ".join(info.id for info in list_environments()) or "none; vf-install installs one"
    hint = f" (--resume took {line.given['resume']!r} for its folder)" if line.given.get("resume") else ""
    return f"name an environment: vf-eval ENV_ID{hint}; installed: {installed}"
