"""Read files and arguments of ``vf-train`` into assignments. ``settings`` checks which keys exist.

Reads files of vf-rl, of hosted training and of prime-rl. Does not import torch, so that an invalid
file is reported immediately.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from verifiers.cli.common import reader
from verifiers.cli.common.reader import Assignment, TomlFile, raise_together
from verifiers.errors import ConfigError
from verifiers_trainer.cli import prime_rl_files
from verifiers_trainer.cli.settings import tables

NO_ARGUMENTS = (
    "nothing to train: give a file, as in `vf-train configs/vf-train/tiny-cpu.toml`, or --model and"
    " --env.id; `vf-train quickstart` needs neither"
)
PARTS = ("--trainer", "--orchestrator", "--inference")
"""Options of prime-rl before ``@ FILE``, one file per component."""
GPUS = {"trainer-gpus": ("trainer", "gpus"), "inference-gpus": ("inference", "gpus")}


def read_toml(path: str) -> list[Assignment]:
    """Read the settings of a file, in order. *Raises* ``ConfigError`` for an unreadable file or
    invalid TOML."""
    file = TomlFile.read(path)
    document = file.document
    if prime_rl_files.is_prime_rl(document):
        document = prime_rl_files.read_tables((path, document))
    return [
        Assignment(keys, value, file.location(*keys))
        for keys, value in _leaves(document, ())
        if keys[0] != "ablation"  # ``ablation`` makes runs of it
    ]


def _leaves(
    table: Mapping[str, object], above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], object]]:
    for key, value in table.items():
        path = (*above, key)
        if (
            path == ("env",)
            and isinstance(value, list)
            and len(value) == 1
            and isinstance(value[0], dict)
        ):
            value = value[0]  # one [[env]] is [env]
        if path in tables() and isinstance(value, dict):
            yield from _leaves(value, path)
        else:
            yield path, value


def read_arguments(words: Sequence[str]) -> tuple[list[str], list[Assignment], list[str]]:
    """Return (files, assignments, problems) of the arguments, ``--orchestrator @ FILE`` of prime-rl
    included.

    >>> files, assignments, problems = read_arguments(["@", "x.toml", "--trainer.args.max_steps", "10"])
    >>> files, [(one.key, one.value) for one in assignments], problems
    (['x.toml'], [('trainer.args.max_steps', 10)], [])
    """
    pairs = zip(words, [*words[1:], ""], strict=False)
    # the keys of the file after --orchestrator identify the component
    arguments = reader.read_words(
        [w for w, after in pairs if w not in PARTS or after[:1] != "@"], lambda _: True
    )
    assignments: list[Assignment] = []
    for setting in arguments.assignments:
        path = GPUS.get(setting.location.removeprefix("--"), setting.path)
        if path in tables() and isinstance(setting.value, dict):
            assignments += [
                Assignment(keys, value, setting.location)
                for keys, value in _leaves(setting.value, path)
            ]
        else:
            assignments.append(Assignment(path, setting.value, setting.location, setting.text))
    alone = [word for word in arguments.remaining if word.endswith(".toml")]
    problems = [
        f"{word!r} is neither a TOML file nor an option"
        for word in arguments.remaining
        if word not in alone
    ]
    files = sorted([*arguments.files, *alone], key=list(words).index) if alone else arguments.files
    return files, assignments, problems + arguments.problems


def make_importable(words: Sequence[str]) -> None:
    """Let settings name modules and files beside the TOML files, and in the working folder: ``loss
    = "mymod:f"``.

    These folders come last on the path, so that they replace no installed module.
    """
    files, _, _ = read_arguments(words)
    for folder in (
        *(str(Path(file).expanduser().resolve().parent) for file in files),
        str(Path.cwd()),
    ):
        if folder not in sys.path:
            sys.path.append(folder)


def read_words(words: Sequence[str]) -> tuple[list[Assignment], list[str]]:
    """Return (assignments, problems) of a command line.

    *Raises* ``ConfigError`` when a file cannot be read, without checking further.
    """
    if not words:
        raise ConfigError(NO_ARGUMENTS)
    files, overrides, problems = read_arguments(words)
    if not files and not overrides:
        raise_together(problems)
    from_files: list[Assignment] = []
    unreadable: list[str] = []
    for file in files:
        try:
            from_files += read_toml(file)
        except ConfigError as error:
            unreadable.append(str(error))
    if unreadable:
        raise_together([*unreadable, *problems])
    return [*from_files, *overrides], problems
