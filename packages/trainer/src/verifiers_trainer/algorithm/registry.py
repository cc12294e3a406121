"""Resolve a name, an import path or a function to a function: how settings select losses and advantages."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from verifiers.errors import ConfigError
from verifiers.runtime.suggest import SIMILAR, close_match

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Mapping[str, Callable[..., Any]]):
    """Named functions of one kind; ``kind`` is the word its errors use, for example "loss".

    >>> greetings = Registry("greeting")
    >>> @greetings.register("hello")
    ... def hello(name):
    ...     return f"hello {name}"
    >>> greetings.resolve("hello")("Ada"), greetings.resolve("math:sqrt")(9.0), list(greetings)
    ('hello Ada', 3.0, ['hello'])
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._functions: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def register(self, name: str) -> Callable[[F], F]:
        """A decorator that registers a function under ``name``. *Raises* ConfigError when the name is taken."""

        def add(function: F) -> F:
            if name in self._functions:
                raise ConfigError(f"{self.kind} {name!r} is already registered; choose another name")
            self._functions[name] = function
            return function

        return add

    def resolve(self, choice: str | Callable[..., Any]) -> Callable[..., Any]:
        """The function for a registered name, for "package.module:function", or ``choice`` itself if callable.

        *Raises* ConfigError for an unknown name (with the nearest one) and for a path that cannot be imported.
        """
        if callable(choice):
            return choice
        if choice in self._functions:
            return self._functions[choice]
        if ":" in choice:
            return self._import(choice)
        near = close_match(choice, self._functions, SIMILAR)
        hint = f"did you mean {near!r}?" if near else f"known: {', '.join(self._functions)}"
        raise ConfigError(f"unknown {self.kind} {choice!r}; {hint} (or give 'package.module:function')")

    def _import(self, path: str) -> Callable[..., Any]:
        module_name, _, attribute = path.partition(":")
        try:
            function = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"cannot load the {self.kind} {path!r}: {error}") from error
        if not callable(function):
            raise ConfigError(f"the {self.kind} {path!r} is not callable")
        return function


def check_parameters(kind: str, name: str, function: Callable[..., Any], parameters: Mapping[str, Any]) -> None:
    """Raise ConfigError when ``parameters`` has a keyword that ``function`` does not take."""
    allowed = keyword_parameters(function)
    if allowed is not None and (unknown := sorted(parameters.keys() - allowed)):
        takes = ", ".join(sorted(allowed)) or "no parameters"
        raise ConfigError(f"{kind} {name!r} has no parameter {', '.join(unknown)}; it takes {takes}")


def keyword_parameters(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the keyword-only parameters of ``function``; None when it accepts any (``**kwargs``)."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
