"""The flags of a command, made of the dataclasses that declare its settings, and the settings made
of its flags.

A field is a setting: its annotation the allowed values, its `Option` help and flags. Click parses
the flags and prints the help; values are checked by the annotations, as in files.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import click

from verifiers.cli.common.completion import Completer, paths, words
from verifiers.cli.common.reader import Assignment, Fields, accept
from verifiers.runtime.values import Form, Option, parts


def click_options(owner: type) -> list[click.Option]:
    """The options of a command line, of a dataclass of settings."""
    fields = Fields.of(owner)
    defaults = {line.name: line.default for line in dataclasses.fields(owner)}
    return [
        _option(key, fields.hints[key], fields.options[key], defaults[name])
        for key, name in fields.attributes.items()
    ]


def _option(key: str, hint: object, option: Option, default: object) -> click.Option:
    kinds, meaning = list(parts(hint)), option.help
    declared = [*option.long(key).split(), key]
    if bool in kinds:
        return click.Option(declared, is_flag=True, default=None, help=meaning)
    if isinstance(default, str | int | float) and not meaning.endswith("]."):
        text = f"{default:g}" if isinstance(default, float) else default
        meaning = f"{meaning.rstrip('.')} [{text}]."
    form = next((kind for kind in kinds if isinstance(kind, Form)), None)
    choices = next(
        (typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is typing.Literal), ()
    )
    plain = "|".join(choices) or ("TEXT" if str in kinds else "N" if int in kinds else "X")
    metavar = option.metavar or (form.metavar if form is not None else plain)
    if metavar.startswith("["):  # the flag may stand without a value
        return click.Option(
            declared, is_flag=False, flag_value="", default=None, metavar=metavar, help=meaning
        )
    offered = form.words if form is not None else choices
    completer: Completer | None = words(offered) if offered else None
    return click.Option(
        declared,
        type=str,
        multiple=form is not None and form.repeats,
        default=None,
        metavar=metavar,
        help=meaning,
        shell_complete=paths if _is_path(key, metavar) else completer,
    )


def _is_path(key: str, metavar: str) -> bool:
    return key.rpartition("_")[2] in ("path", "dir") or metavar in ("DIR", "FILE")


def read_flags(owner: type, typed: Mapping[str, object], problems: list[str]) -> dict[str, Any]:
    """Checked values by key, of the settings that click found; appends to ``problems``."""
    fields, values = Fields.of(owner), {}
    for key in fields.attributes:
        if (value := typed[key]) is None or value == ():
            continue
        text = value if isinstance(value, str) else None
        setting = Assignment((key,), value, spelling(owner, key), text)
        try:
            values[key] = accept(setting, fields.hints[key])
        except ValueError as error:
            problems.append(f"{setting.location} {error}")
    return values


def spelling(owner: type, key: str) -> str:
    """The long flag of a setting."""
    flags = Fields.of(owner).options[key].long(key).split()
    return next(flag.partition("/")[0] for flag in flags if flag.startswith("--"))
