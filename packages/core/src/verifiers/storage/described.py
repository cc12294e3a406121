"""Any value as JSON, for identities: equal for equal values on every machine and in every process.

A function has a hash of its bytecode. There is no memory address and no secret in what is returned,
and nothing here ever raises.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import math
import os
import re
import sys
import types
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, get_args

from verifiers.compat import SAVED_PACKAGES
from verifiers.runtime.json import canonical_json
from verifiers.runtime.redaction import digested, is_secret_name

CODE = "code"
"""Section of a configuration with the hashes of source files, and key of a function's code hash."""
MAX_STORED_CHARS = 10_000
"""Longer arguments (a corpus, a word list) are stored as hashes; prompts are shorter."""

_FREE = re.compile(r"\bFree\(")
PYTHON = f"{sys.implementation.name}-{sys.version_info.major}.{sys.version_info.minor}"
in_progress: ContextVar[tuple[int, ...]] = ContextVar("verifiers_identity", default=())


@dataclass(frozen=True, slots=True)
class Free:
    """Mark a constructor parameter that a resumed run may change: ``Annotated[int | None,
    Free("only how fast")]``.

    Every other parameter belongs to the identity. An annotated class attribute marks a keyword that
    no constructor names.

    >>> from typing import Annotated
    >>> class Lenient(vf.Parser):
    ...     def __init__(self, tolerance: float, cache_size: Annotated[int, Free("only how fast")] = 8):
    ...         super().__init__()
    >>> Lenient(0.1).identity() == Lenient(0.1, cache_size=99).identity(), Lenient(0.2).identity()["tolerance"]
    (True, 0.2)
    """

    reason: str


def is_free(annotation: object) -> bool:
    """Whether an annotation has a ``Free`` mark; text is searched: its names may not resolve."""
    if isinstance(annotation, str):
        return _FREE.search(annotation) is not None
    return any(isinstance(mark, Free) for mark in get_args(annotation))


def type_name(cls: object) -> str:
    """``module.qualname``; ``verifiers.Name`` for the library itself, whose modules may move."""
    module = getattr(cls, "__module__", None)
    name: str = getattr(cls, "__qualname__", type(cls).__qualname__)
    top = str(module or "").partition(".")[0]
    if top in SAVED_PACKAGES:
        return f"{SAVED_PACKAGES[top]}.{name}"
    return name if module in (None, "builtins") else f"{module}.{name}"


def describe_members(members: Mapping[str, object]) -> dict[str, object]:
    """``describe`` each value; what has the name of a secret becomes a digest."""
    secret_names = set(filter(is_secret_name, members))
    described: dict[str, object] = {}
    for name, value in members.items():
        plain = value if name in secret_names and _is_json(value) else describe(value)
        described[name] = digested({name: plain})[name] if name in secret_names else plain
    return described


def _is_json(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(member) for key, member in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return isinstance(value, str | int | float | None) and not isinstance(value, enum.Enum)


def describe(value: object) -> Any:
    """Convert a value to JSON: equal for equal values in every process, without addresses and
    secrets. Never raises.

    A component becomes its identity, a function its name and a hash of its bytecode, a class its
    name, and a value without a stable representation the name of its type.

    >>> describe({"pattern": re.compile("a+"), "api_key": "x", "at": float("inf"), "kind": int})
    {'pattern': {'pattern': 'a+', 'flags': 32}, 'api_key': '*** bbdf3fb6', 'at': 'inf', 'kind':
    {'type': 'int'}}
    >>> describe(object())
    {'class': 'object'}
    """
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if type(value) is str:
        return _text(value)
    active = in_progress.get()
    if id(value) in active:  # a component that contains itself
        return {"class": type_name(type(value))}
    token = in_progress.set((*active, id(value)))
    try:
        return _described(value)
    except Exception:  # noqa: BLE001  an author's object may raise anything; describe its type
        return {"class": type_name(type(value))}
    finally:
        in_progress.reset(token)


def _described(value: object) -> object:
    if isinstance(value, enum.Enum):
        return f"{type_name(type(value))}.{value.name}"
    if isinstance(value, str | int | float):  # a subclass
        return describe(next(base for base in (str, int, float) if isinstance(value, base))(value))
    if isinstance(value, bytes | bytearray):
        return {"sha256": hashlib.sha256(value).hexdigest()[:16], "size_bytes": len(value)}
    if isinstance(value, os.PathLike):
        return _text(os.fsdecode(value))
    if isinstance(value, re.Pattern):
        return {"pattern": describe(value.pattern), "flags": value.flags}
    if isinstance(value, type):
        return {"type": type_name(value)}
    if callable(identity_method := getattr(type(value), "identity", None)):
        identity = identity_method(value)
        if isinstance(identity, Mapping):
            package = str(getattr(identity_method, "__module__", "")).partition(".")[0]
            return identity if package in SAVED_PACKAGES else _plain(identity)
    if (function := _function(value)) is not None:
        return function
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if not is_free(field.type)]
        members = {field.name: getattr(value, field.name) for field in fields}
        return {"class": type_name(type(value))} | describe_members(members)
    if isinstance(value, Mapping):
        members = {_key(key): member for key, member in value.items()}
        return _bounded(describe_members(members), len(value))
    if isinstance(value, list | tuple):
        return _bounded(list(map(describe, value)), len(value))
    if isinstance(value, AbstractSet):
        return _bounded(sorted(map(describe, value), key=canonical_json), len(value))
    if isinstance(value, range | complex) or type_name(type(value)) in _NUMBERS_AND_TIMES:
        return str(value)
    model_name = getattr(value, "name_or_path", None)  # a tokenizer or a model in this process
    by_name = {"name_or_path": model_name} if isinstance(model_name, str) else {}
    return {"class": type_name(type(value))} | by_name


_NUMBERS_AND_TIMES = frozenset(
    "decimal.Decimal fractions.Fraction datetime.datetime datetime.date datetime.timedelta"
    " uuid.UUID".split()
)


def _text(text: str) -> object:
    text = digested(text)
    if len(text) <= MAX_STORED_CHARS:
        return text
    return _hashed(text.encode("utf-8", "surrogatepass"), len(text))


def _plain(identity: object) -> Any:
    """Convert the result of an ``identity()`` to JSON; an author's may contain anything."""
    if isinstance(identity, Mapping):
        return {_key(key): _plain(member) for key, member in identity.items()}
    if isinstance(identity, list):
        return [_plain(member) for member in identity]
    return describe(identity)


def _key(key: object) -> str:
    return key if isinstance(key, str) else str(describe(key))


def _bounded(members: object, length: int) -> object:
    """The members, or their hash if they are long."""
    if not length:
        return members
    encoded = canonical_json(members)
    return members if len(encoded) <= MAX_STORED_CHARS else _hashed(encoded, length)


def _hashed(content: bytes, length: int) -> dict[str, object]:
    return {"sha256": hashlib.sha256(content).hexdigest()[:16], "length": length}


# --- functions ------------------------------------------------------------------------------------


def _function(value: object) -> dict[str, object] | None:
    """A callable's name, code hash and bound values; None if it is not a function."""
    if isinstance(value, functools.partial):
        bound = {"args": describe(value.args), "keywords": describe(value.keywords)}
        return {"function": "functools.partial", "of": describe(value.func)} | {
            k: v for k, v in bound.items() if v
        }
    if isinstance(value, types.MethodType):
        described = _function(value.__func__) or {"function": type_name(value.__func__)}
        return described | {"of": describe(value.__self__)}
    if isinstance(
        value, types.BuiltinFunctionType | types.MethodWrapperType | types.MethodDescriptorType
    ):
        return {"function": type_name(value)}
    wrapped = getattr(value, "__wrapped__", None)
    if not isinstance(value, types.FunctionType):
        return None if wrapped is None else {"function": type_name(value), "of": describe(wrapped)}
    if value.__module__ is None or value.__module__.partition(".")[0] not in STABLE_MODULES:
        # its code tells it from others; a script is the module __main__ when it is run, and has its
        # name when imported
        code = f"{PYTHON}:{code_hash(value.__code__)}"
        described = {"function": value.__qualname__, "code": code}
    else:
        described = {"function": type_name(value)}
    closure = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    bound_names = {
        "defaults": defaults_of(value),
        "closure": {name: _content(cell) for name, cell in closure},
    }
    for name, members in bound_names.items():
        if members:
            described[name] = describe_members(members)
    return described | ({"of": describe(wrapped)} if wrapped is not None else {})


STABLE_MODULES = sys.stdlib_module_names | set(SAVED_PACKAGES)
"""Modules without code hashes: a resumed run may use another Python or library version."""


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    values = function.__defaults__ or ()
    num_parameters = function.__code__.co_argcount
    names = function.__code__.co_varnames[num_parameters - len(values) : num_parameters]
    return dict(zip(names, values, strict=True)) | (function.__kwdefaults__ or {})


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # an unbound name
        return None


@functools.lru_cache(maxsize=1024)
def code_hash(code: types.CodeType) -> str:
    """16 hex digits of the hash of a function's bytecode, constants and names, not its place."""
    content = repr(_code_content(code)).encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()[:16]


def _code_content(code: types.CodeType) -> tuple[object, ...]:
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    constants = tuple(map(_constant, code.co_consts))
    return code.co_code, code.co_exceptiontable, names, counts, constants


def _constant(value: object) -> object:
    if isinstance(value, types.CodeType):
        return _code_content(value)
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    if isinstance(value, frozenset):  # its order depends on the process
        return sorted(repr(_constant(member)) for member in value)
    return type(value).__name__, value
