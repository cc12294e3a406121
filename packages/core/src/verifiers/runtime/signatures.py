"""Signatures for ``help()`` and editors: the keys of a TypedDict behind ``**options`` are listed as parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def spell_out(options: type[Any], defaults: Mapping[str, Any] | Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a function that takes ``**options: Unpack[options]``: its signature lists the keys as parameters.

    ``options`` is the TypedDict. ``defaults`` maps keys to default values, or is a function whose signature has them.
    Calls are not affected.

    >>> from typing import TypedDict, Unpack
    >>> class Limits(TypedDict, total=False):
    ...     seconds: float
    >>> @spell_out(Limits, {"seconds": 60.0})
    ... def wait(name: str, **limits: Unpack[Limits]) -> None: ...
    >>> list(inspect.signature(wait).parameters), inspect.signature(wait).parameters["seconds"].default
    (['name', 'seconds'], 60.0)
    """
    if not isinstance(defaults, Mapping):
        defaults = {name: parameter.default for name, parameter in inspect.signature(defaults).parameters.items()}
    keys = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name),
            annotation=getattr(annotation, "__forward_arg__", annotation),  # text, like the other annotations
        )
        for name, annotation in options.__annotations__.items()
    ]

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*named, *keys])  # type: ignore[attr-defined]
        return function

    return decorate
