"""Call the methods that a subclass of the trainer overrides, with the arguments that their
parameters name.

A hook may name any of ``epoch step prompts completions states answers`` as parameters.
``custom_batches`` and ``rewards`` call hooks through this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.batch import Group


def is_overridden(trainer: object, base: type, *names: str) -> bool:
    """Whether a subclass or the object itself overrides one of these methods of ``base``."""
    return any(
        name in vars(trainer) or getattr(type(trainer), name) is not getattr(base, name)
        for name in names
    )


def call(hook: Callable[..., object], arguments: Mapping[str, object]) -> Any:
    """Call ``hook`` with those of ``arguments`` that its parameters name, and return its result.

    Raises ``ConfigError`` when it requires another parameter.

    >>> call(lambda step, epoch=3: (epoch, step), {"step": 7, "epoch": 0, "states": []})
    (0, 7)
    """
    positional, keywords = arguments_for(hook, arguments)
    return hook(*positional, **keywords)


def arguments_for(
    hook: Callable[..., object], arguments: Mapping[str, object]
) -> tuple[list[object], dict[str, object]]:
    """The positional arguments and the keywords of ``call``, with its errors."""
    positional: list[object] = []
    keywords: dict[str, object] = {}
    parameters = inspect.signature(hook).parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            parameter_names = {p.name for p in parameters}
            keywords |= {
                name: value for name, value in arguments.items() if name not in parameter_names
            }
        elif parameter.name in arguments:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(arguments[parameter.name])
            else:
                keywords[parameter.name] = arguments[parameter.name]
        elif (
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        ):
            raise ConfigError(
                f"{getattr(hook, '__qualname__', hook)} requires {parameter.name!r}, which the"
                f" trainer does not provide; it provides {', '.join(arguments) or 'nothing'}"
            )
    return positional, keywords


def holds_rollouts(batch: object) -> bool:
    """Whether ``get_batch`` returned finished rollouts: groups, or (prompts,
    completions, rewards)."""
    if isinstance(batch, tuple) and len(batch) == 3:
        return True
    return (
        isinstance(batch, Sequence)
        and bool(batch)
        and all(isinstance(member, Group) for member in batch)
    )
