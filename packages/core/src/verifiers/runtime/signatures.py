"""Keywords behind ``**options``: listed as parameters for ``help()`` and editors, or set as
attributes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from verifiers.compat import parameters_of
from verifiers.errors import ConfigError
from verifiers.runtime.suggest import check_keywords, close_match

F = TypeVar("F", bound=Callable[..., Any])


def spell_out(
    options: type[object], defaults: Mapping[str, object] | Callable[..., object]
) -> Callable[[F], F]:
    """Decorate a function that takes ``**options: Unpack[options]``: its signature lists the keys
    as parameters.

    ``options`` is the TypedDict. ``defaults`` maps keys to default values, or is a function whose
    signature has them. Calls are not affected.

    >>> from typing import TypedDict, Unpack
    >>> class Limits(TypedDict, total=False):
    ...     seconds: float
    >>> @spell_out(Limits, {"seconds": 60.0})
    ... def wait(name: str, **limits: Unpack[Limits]) -> None: ...
    >>> list(inspect.signature(wait).parameters), inspect.signature(wait).parameters["seconds"].default
    (['name', 'seconds'], 60.0)
    """
    if not isinstance(defaults, Mapping):
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(defaults).parameters.items()
        }
    keys = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name),
            annotation=getattr(
                annotation, "__forward_arg__", annotation
            ),  # text, like the other annotations
        )
        for name, annotation in options.__annotations__.items()
    ]

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        by_name = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*by_name, *keys])  # type: ignore[attr-defined]
        return function

    return decorate


def set_extra_attributes(target: object, keywords: Mapping[str, object]) -> None:
    """Set the keywords of a subclass that are no parameters as attributes of ``target``.

    *Raises* ConfigError for an unknown keyword of a class of this library; of a subclass for a
    keyword that resembles a parameter, unless the subclass declares it, and for a keyword that
    would hide a method or property.
    """
    cls: type = type(target)
    parameters = parameters_of(cls)
    if keywords and cls.__module__.partition(".")[0] == "verifiers":
        check_keywords(keywords, parameters, cls.__name__)
    for name, value in keywords.items():
        if name not in parameters and (near := close_match(name, parameters)):
            raise ConfigError(
                f"{cls.__name__} has no parameter {name!r}; did you mean {near!r}?", key=name
            )
        member = getattr(cls, name, None)
        if callable(member) or isinstance(member, property):
            raise ConfigError(
                f"{name!r} would hide {cls.__name__}.{name}; choose another name", key=name
            )
        setattr(target, name, value)
