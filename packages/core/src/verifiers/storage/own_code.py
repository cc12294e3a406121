"""Hashes of what a user programs into a run: a loss, an advantage, reward functions, subclasses.

Each object has a digest of its own bytecode and of what it names in its own module, so that a
message can name the function that changed; its module's file, and what that imports beside itself,
have those of ``source_code``. A script that is run has no file here, only the objects: it usually
holds more than they need.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Iterable, Iterator, Mapping

from verifiers.runtime.json import canonical_json
from verifiers.storage.described import PYTHON, STABLE_MODULES, code_hash, defaults_of, describe
from verifiers.storage.source_code import module_name, source_hashes

FRAMEWORKS = STABLE_MODULES | {"accelerate", "datasets", "numpy", "peft", "torch", "transformers"}
"""Modules that are no user's, by their first name; versions are recorded elsewhere."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def own_code(objects: Mapping[str, Iterable[object]]) -> dict[str, str]:
    """Name -> hash of the users' among some objects, by role, and of their source files.

    Names are ``role qualname`` and the labels of ``source_code.source_hashes``; hashes of objects
    begin with the version of Python, whose bytecode they are of.
    """
    of_users = [
        (role, _unwrapped(value))
        for role, values in objects.items()
        for value in values
        if is_of_user(value)
    ]
    digests = {f"{role} {name_of(value)}": code_digest(value) for role, value in of_users}
    return digests | source_hashes(value for _, value in of_users)


def is_of_user(value: object) -> bool:
    """Whether a function, a class, or an instance's class is a user's, not a framework's."""
    return (module_name(value) or "builtins").partition(".")[0] not in FRAMEWORKS


def name_of(value: object) -> str:
    """The qualified name of a function or a class, or of an instance's class."""
    value = _unwrapped(value)
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)


def code_digest(value: object) -> str:
    """Hash of the bytecode, defaults and bound values of a function, or of the members of a class;
    with functions, classes and numbers of its own module that it names. No line counts."""
    parts: list[object] = []
    _read(_unwrapped(value), parts, set())
    return f"{PYTHON}:{hashlib.sha256(canonical_json(parts)).hexdigest()[:16]}"


def _unwrapped(value: object) -> object:
    while isinstance(value, functools.partial | types.MethodType):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return value


def _read(value: object, parts: list[object], seen: set[int]) -> None:
    """Append what decides the behaviour of ``value`` to ``parts``, in the order of its code."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        for function in (value.fget, value.fset, value.fdel):
            _read(function, parts, seen)
        return
    value = _unwrapped(value)
    if isinstance(value, _PLAIN) or (
        isinstance(value, tuple | frozenset) and all(isinstance(v, _PLAIN) for v in value)
    ):
        parts.append(describe(value))
        return
    if id(value) in seen or not is_of_user(value):
        return
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        _read_function(value, parts, seen)
    elif isinstance(value, type):
        for cls in filter(is_of_user, value.__mro__):
            for name, member in sorted(vars(cls).items()):
                if not name.startswith("__") or callable(member):
                    parts.append(name)
                    _read(member, parts, seen)
    else:
        _read(type(value), parts, seen)
        if dataclasses.is_dataclass(value):
            parts.append(describe(value))


def _read_function(function: types.FunctionType, parts: list[object], seen: set[int]) -> None:
    parts.append(code_hash(function.__code__))
    for name, default in sorted(defaults_of(function).items()):
        parts.append(name)
        _read(default, parts, seen)
    for cell in function.__closure__ or ():
        try:
            _read(cell.cell_contents, parts, seen)
        except ValueError:  # an unbound name
            continue
    _read(getattr(function, "__wrapped__", None), parts, seen)
    for name in sorted(set(_names(function.__code__)) & function.__globals__.keys()):
        value = function.__globals__[name]
        is_plain = isinstance(value, (*_PLAIN, tuple, frozenset)) and not name.startswith("__")
        if is_plain or module_name(value) == function.__module__:
            parts.append(name)
            _read(value, parts, seen)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
