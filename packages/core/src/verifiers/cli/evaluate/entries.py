"""Resolve a command line to its evaluations, each with all its settings; all problems are reported
at once.

Imports the named environments to check the arguments of their loaders, unless settings are only
printed; builds none, sends no request.
"""

from __future__ import annotations

from collections.abc import Mapping

from verifiers.cli.common.reader import Fields, raise_together
from verifiers.cli.evaluate.arguments import CommandLine
from verifiers.cli.evaluate.options import SHARED, EvalSettings, Evaluation, contradictions, layered
from verifiers.cli.evaluate.toml_args import Entry, read_files
from verifiers.errors import UsageError, VerifiersError


def resolve(line: CommandLine) -> list[Evaluation]:
    """The evaluations of a command line, each with all its settings; one for each combination of an
    ablation.

    Precedence, high to low: flags, dotted keys, ``[[eval]]`` or sweep over fixed keys of
    ``[[ablation]]``, the file's top level, the run of ``--resume``, the environment's defaults.
    *Raises* ``ConfigError`` that lists all problems, or the only error unchanged.
    """
    from verifiers.cli.evaluate.planning import defaults_of, from_run

    file = read_files(line.files)
    problems: list[str | VerifiersError] = [*line.problems, *file.problems]
    if file.entries and line.targets:
        problems.append(
            f"{line.targets[0]!r} and the entries of a file both name evaluations; give one of them"
        )
    entries = file.entries or [Entry(env_id) for env_id in line.targets]
    if not entries and not problems:
        problems.append(_nothing_to_evaluate(line))
    common = layered(file.common, line.flags)
    shared = {name: common[name] for name in SHARED if common.get(name) is not None}
    resolved: list[Evaluation] = []
    for entry in entries:
        values = layered(layered(layered(file.common, entry.settings), line.dotted), line.flags)
        try:
            env_dir = values.get("env_dir_path", EvalSettings().env_dir_path)
            defaults, check_arguments = defaults_of(entry.env_id, env_dir, problems)
            if values.keys() & {"until_half_width", "until_decided"}:
                defaults = {**defaults, "num_examples": -1}  # the run decides how many it needs
            explicit, values = values, layered(defaults, values)
            if not line.command.dump_config:  # printing runs no code that a file names
                check_arguments(values.get("env_args", {}))
            settings = from_run(_settings(values), explicit)
        except UsageError as error:
            problems.append(error)
            settings = _settings(values)
        problems += contradictions(settings)
        evaluation = Evaluation(entry.env_id, settings, _combination(entry, settings), shared)
        # a flag that overrides a swept key makes combinations equal
        if not entry.swept or evaluation not in resolved:
            resolved.append(evaluation)
    raise_together(problems)
    return resolved


def _settings(values: Mapping[str, object]) -> EvalSettings:
    return EvalSettings(**Fields.of(EvalSettings).by_name(values))


def _combination(entry: Entry, settings: EvalSettings) -> dict[str, object]:
    """The values of the keys that the entry's ablation varies."""
    values: dict[str, object] = {}
    for name in entry.swept:
        table, _, member = name.partition(".")
        value = getattr(settings, Fields.of(EvalSettings).attributes[table])
        if not member or member in value:
            values[name] = value[member] if member else value
    return values


def _nothing_to_evaluate(line: CommandLine) -> str:
    from verifiers.environments.registry import list_environments

    if line.files:
        files, advice = ", ".join(line.files), "add one with an env_id, or name an environment"
        return f"{files} has neither [[eval]] nor [[ablation]]: {advice}"
    ids = ", ".join(info.id for info in list_environments())
    installed = ids or "none; vf-install installs one"
    resume = line.flags.get("resume")
    hint = f" (--resume took {resume!r} for its folder)" if resume else ""
    return f"name an environment: vf-eval ENV_ID{hint}; installed: {installed}"
