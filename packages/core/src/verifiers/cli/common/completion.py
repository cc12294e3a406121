"""Completion in the shell, by click's own mechanism: flags, their words, environment ids, paths.

    eval "$(_VF_EVAL_COMPLETE=bash_source vf-eval)"        # bash; zsh_source and fish_source for the others

Nothing is imported of an environment: ids are read from the metadata of what is installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def answer_the_shell(command: Callable[[], click.Command], name: str) -> None:
    """When the shell calls ``name`` for its script or for completions, print them and exit."""
    variable = f"_{name.replace('-', '_').upper()}_COMPLETE"
    instruction = os.environ.get(variable)
    if instruction:
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(command(), {}, name, variable, instruction))


def how_to(name: str) -> str:
    """The sentence of ``--help``."""
    return f'Completion in bash: eval "$(_{name.replace("-", "_").upper()}_COMPLETE=bash_source {name})"'


def environments(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Installed environment ids, also the last of several behind commas; paths where no id fits."""
    from verifiers.environments.registry import list_environments

    before, comma, begun = incomplete.rpartition(",")
    taken = set(before.split(",")) if comma else set()
    ids = [info.id for info in list_environments() if info.id not in taken]
    offers = items(f"{before}{comma}{env_id}" for env_id in ids if env_id.startswith(begun))
    return offers or paths(context, parameter, incomplete)


def paths(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Whatever files and folders the shell finds."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def words(allowed: Sequence[str]) -> Completer:
    """One of ``allowed``."""

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return items(word for word in allowed if word.startswith(incomplete))

    return complete


def items(values: Iterable[str]) -> list[CompletionItem]:
    """Words to offer, as click wants them."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(value) for value in values]
