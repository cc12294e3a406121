"""Files and words of ``vf-train`` -> assignments. Knows the shapes of files; which keys exist is ``settings``'.

Files of vf-rl, of hosted training and of prime-rl are understood. Imports no torch, so that a wrong file is reported
at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verifiers.cli.common import reader
from verifiers.cli.common.reader import Assignment, TomlFile, raise_together
from verifiers.errors import ConfigError
from verifiers_trainer.cli import prime_rl_files

NOTHING_GIVEN = (
    "nothing to train: give a file, as in `vf-train @ configs/vf-train/tiny-cpu.toml`, or --model and --env.id; "
    "`vf-train quickstart` needs neither"
)
SECTIONS = frozenset(
    {("env",), ("env", "args"), ("inference",), ("inference", "args"), ("trainer",), ("trainer", "args")}
    | {("eval",), ("sampling",), ("wandb",), ("checkpoints",)}
)
"""Tables whose keys are settings of their own; any other table is one value."""
PARTS = ("--trainer", "--orchestrator", "--inference")
"""Each before ``@ FILE``: how prime-rl takes a file per part."""
GPUS = {"trainer-gpus": ("trainer", "gpus"), "inference-gpus": ("inference", "gpus")}


def read_toml(path: str) -> list[Assignment]:
    """The settings of one file, in order. *Raises* ``ConfigError``: it cannot be read, or is not TOML."""
    file = TomlFile.read(path)
    document = file.document
    if prime_rl_files.is_prime_rl(document):
        document = prime_rl_files.read_tables((path, document))
    return [Assignment(keys, value, file.place(*keys)) for keys, value in _leaves(document, ())]


def _leaves(table: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in table.items():
        path = (*above, key)
        if path == ("env",) and isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
            value = value[0]  # one [[env]] is [env]
        if path in SECTIONS and isinstance(value, dict):
            yield from _leaves(value, path)
        else:
            yield path, value


def read_arguments(words: Sequence[str]) -> tuple[list[str], list[Assignment], list[str]]:
    """(files, assignments, problems) of the words that are no options, ``--orchestrator @ FILE`` of prime-rl included.

    >>> files, assignments, problems = read_arguments(["@", "x.toml", "--trainer.args.max_steps", "10"])
    >>> files, [(one.key, one.value) for one in assignments], problems
    (['x.toml'], [('trainer.args.max_steps', 10)], [])
    """
    pairs = zip(words, [*words[1:], ""], strict=True)
    # the file behind --orchestrator tells by its keys which part it describes
    read = reader.read_words([w for w, after in pairs if w not in PARTS or after[:1] != "@"], lambda _: True)
    assignments: list[Assignment] = []
    for setting in read.assignments:
        path = GPUS.get(setting.place.removeprefix("--"), setting.path)
        if path in SECTIONS and isinstance(setting.value, dict):
            assignments += [Assignment(keys, value, setting.place) for keys, value in _leaves(setting.value, path)]
        else:
            assignments.append(Assignment(path, setting.value, setting.place, setting.text))
    problems = [
        f"{word}: write @ {word} to read a file"
        if word.endswith(".toml")
        else f"{word!r} is neither @ FILE nor an option"
        for word in read.rest
    ]
    return read.files, assignments, problems + read.problems


def read_words(words: Sequence[str]) -> tuple[list[Assignment], list[str]]:
    """(assignments, problems) of a whole command line.

    *Raises* ``ConfigError`` when a file cannot be read: the rest would be guesswork.
    """
    if not words:
        raise ConfigError(NOTHING_GIVEN)
    files, overrides, problems = read_arguments(words)
    if not files and not overrides:
        raise_together(problems)
    read: list[Assignment] = []
    unreadable: list[str] = []
    for file in files:
        try:
            read += read_toml(file)
        except ConfigError as error:
            unreadable.append(str(error))
    if unreadable:
        raise_together([*unreadable, *problems])
    return [*read, *overrides], problems
