"""Calls the methods that a subclass of the trainer may write, with as much of what is known as they ask for.

A hook may name any of ``epoch step prompts completions states answers`` as parameters, or none of them. What a hook
returned is classified here; ``custom_batches`` and ``rewards`` use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.batch import Group


def is_overridden(trainer: Any, base: type, *names: str) -> bool:
    """Whether a method of one of these names is not that of ``base``, in a subclass or on the object itself."""
    return any(name in vars(trainer) or getattr(type(trainer), name) is not getattr(base, name) for name in names)


def call(hook: Callable[..., Any], known: Mapping[str, Any]) -> Any:
    """What ``hook`` returns, called with those of ``known`` that its parameters name.

    Raises ``ConfigError`` when it requires another parameter.

    >>> call(lambda step, epoch=3: (epoch, step), {"step": 7, "epoch": 0, "states": []})
    (0, 7)
    """
    positional: list[Any] = []
    named: dict[str, Any] = {}
    parameters = inspect.signature(hook).parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            taken = {p.name for p in parameters}
            named |= {name: value for name, value in known.items() if name not in taken}
        elif parameter.name in known:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(known[parameter.name])
            else:
                named[parameter.name] = known[parameter.name]
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            raise ConfigError(
                f"{getattr(hook, '__qualname__', hook)} requires {parameter.name!r}, which the trainer does not know; "
                f"it gives {', '.join(known) or 'nothing'}"
            )
    return hook(*positional, **named)


def holds_rollouts(batch: Any) -> bool:
    """Whether ``get_batch`` returned finished rollouts: groups, or (prompts, completions, rewards)."""
    if isinstance(batch, tuple) and len(batch) == 3:
        return True
    return isinstance(batch, Sequence) and bool(batch) and all(isinstance(member, Group) for member in batch)
