"""Resolve a name, an import path or a function: how settings select losses and advantages."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from verifiers.errors import ConfigError, UsageError, VerifiersError
from verifiers.runtime.importing import import_source
from verifiers.runtime.places import raised_at, short_path
from verifiers.runtime.suggest import SIMILAR, close_match, closest

F = TypeVar("F", bound=Callable[..., Any])
_imports: ContextVar[bool] = ContextVar("verifiers_trainer_imports", default=True)


class Registry(dict[str, Callable[..., Any]]):
    """Named functions of a kind; ``kind`` is the word its errors use, for example "loss".

    >>> greetings = Registry("greeting")
    >>> @greetings.register("hello")
    ... def hello(name):
    ...     return f"hello {name}"
    >>> greetings.resolve("hello")("Ada"), greetings.resolve("math:sqrt")(9.0), list(greetings)
    ('hello Ada', 3.0, ['hello'])
    """

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def register(self, name: str) -> Callable[[F], F]:
        """A decorator: register a function under ``name``. *Raises* ConfigError if it is taken."""

        def add(function: F) -> F:
            if name in self:
                raise ConfigError(
                    f"{self.kind} {name!r} is already registered; choose another name"
                )
            self[name] = function
            return function

        return add

    def resolve(
        self, choice: str | Callable[..., object], presets: Iterable[str] = ()
    ) -> Callable[..., Any]:
        """The function for a registered name, for "package.module:function", or ``choice`` itself
        if callable.

        "file.py:function" is a file in the working folder or in a folder on the path. *Raises*
        ConfigError for an unknown name (with the nearest, ``presets`` included) and for a path that cannot be
        imported.
        """
        if callable(choice):
            return choice
        if choice in self:
            return self[choice]
        if ":" in choice:
            return self._import(choice)
        near = close_match(choice, [*presets, *self], SIMILAR)
        hint = f"did you mean {near!r}?" if near else f"known: {', '.join(self)}"
        raise ConfigError(
            f"unknown {self.kind} {choice!r}; {hint} (or give 'package.module:function' or"
            " 'file.py:function')"
        )

    def _import(self, path: str) -> Callable[..., object]:
        if not _imports.get():
            return _not_imported
        module_name, _, attribute = path.rpartition(":")
        try:
            if module_name.endswith(".py"):
                module = _load_file(module_name)
            else:
                module = importlib.import_module(module_name)
        except Exception as error:
            # the author's module may raise anything; chained, and its text shown
            location = raised_at(error)
            if isinstance(error, SyntaxError) and error.filename:
                location = f"{short_path(error.filename)}:{error.lineno}"
            at = f" ({location})" if location else ""
            raise ConfigError(
                f"cannot load the {self.kind} {path!r}: {type(error).__name__}: {error}{at}"
            ) from error
        function = getattr(module, attribute, None)
        if function is None:
            hint = closest(attribute, vars(module))
            raise ConfigError(
                f"cannot load the {self.kind} {path!r}: {module_name} has no {attribute!r}{hint}"
            )
        if not callable(function):
            raise ConfigError(f"the {self.kind} {path!r} is not callable")
        return function


@contextmanager
def importing_nothing() -> Iterator[None]:
    """Within it, paths of functions are not looked at: settings are printed, not used."""
    token = _imports.set(False)
    try:
        yield
    finally:
        _imports.reset(token)


def _not_imported(*_: object, **__: object) -> object:
    raise UsageError("this function was not imported, as the settings are printed alone")


def _load_file(name: str) -> ModuleType:
    folders = ["", *sys.path]
    files = [file for file in (Path(folder, name) for folder in folders) if file.is_file()]
    if not files:
        raise FileNotFoundError(f"there is no file {name} in the working folder or on the path")
    file = files[0].resolve()
    return import_source(file, file.stem, file.parent)


def check_parameters(
    kind: str, name: str, function: Callable[..., object], parameters: Mapping[str, object]
) -> None:
    """Raise ConfigError when ``parameters`` has a keyword that ``function`` does not take."""
    allowed = keyword_parameters(function)
    if allowed is not None and (unknown := sorted(parameters.keys() - allowed)):
        takes = ", ".join(sorted(allowed)) or "no parameters"
        raise ConfigError(
            f"{kind} {name!r} has no parameter {', '.join(unknown)}; it takes {takes}"
        )


def keyword_parameters(function: Callable[..., object]) -> frozenset[str] | None:
    """Names of the keyword-only parameters of ``function``, of a class those of calling its
    object; None with ``**kwargs``."""
    if isinstance(function, type):
        function = function.__call__
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def call(
    kind: str, function: Callable[..., object], *arguments: object, **parameters: object
) -> Any:
    """The value of a loss or advantage. *Raises* ConfigError, with file and line."""
    try:
        return function(*arguments, **parameters)
    except VerifiersError:
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not the function's fault
            raise
        frame = error.__traceback__
        location = raised_at(error) if frame is not None and frame.tb_next is not None else None
        raise ConfigError(
            f"the {kind} {name_and_position(function)} raised {type(error).__name__}: {error}"
            + (f" (at {location})" if location else ""),
            key=kind,
        ) from error


def name_and_position(function: Callable[..., object]) -> str:
    """For messages: ``'my_loss' (losses.py:12)``."""
    called = function if hasattr(function, "__name__") else type(function).__call__
    code = getattr(called, "__code__", None)
    position = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(function, '__name__', type(function).__name__)!r}{position}"
