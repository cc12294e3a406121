"""Shell completion with click: flags, their choices, environment ids, paths.

    eval "$(_VF_EVAL_COMPLETE=bash_source vf-eval)"        # bash; zsh_source and fish_source for the others

Imports no environment: ids come from the metadata of installed distributions.
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


def begin(command: Callable[[], click.Command], name: str) -> None:
    """Begin the command ``name``: it prints any text. If the shell calls it for its completion
    script or for completions, print them and exit."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    variable = f"_{name.replace('-', '_').upper()}_COMPLETE"
    if instruction := os.environ.get(variable):
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(command(), {}, name, variable, instruction))


def how_to(name: str) -> str:
    """The line about completion in ``--help``; it is not wrapped, so that it can be copied."""
    return (
        f'\b\nCompletion in bash: eval "$(_{name.replace("-", "_").upper()}_COMPLETE=bash_source'
        f' {name})"'
    )


def environments(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Installed environment ids, also behind commas; paths when no id matches."""
    from verifiers.environments.registry import list_environments

    before, comma, prefix = incomplete.rpartition(",")
    listed = set(before.split(",")) if comma else set()
    ids = [info.id for info in list_environments() if info.id not in listed]
    offers = items(f"{before}{comma}{env_id}" for env_id in ids if env_id.startswith(prefix))
    return offers or paths(context, parameter, incomplete)


def paths(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files and folders, listed by the shell."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def words(allowed: Sequence[str]) -> Completer:
    """A completer for the words ``allowed``."""

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return items(word for word in allowed if word.startswith(incomplete))

    return complete


def items(values: Iterable[str]) -> list[CompletionItem]:
    """Completion items of click."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(value) for value in values]
