"""A peer as its recorded shapes: modules built of a contract file, and the comparison of that file
with the real one.

A contract names modules, and in them classes with the ``fields`` that an adapter uses (``bases``
where it subclasses them), enumerations with their ``members``, and functions with their
``parameters``. The double refuses every field that is not in the file, so an adapter cannot use
what was never seen at the peer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import importlib.machinery
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

CONTRACTS = Path(__file__).parents[1] / "integrations" / "contracts"


def contract_of(peer: str) -> dict[str, Any]:
    """The file of a peer."""
    return json.loads((CONTRACTS / f"{peer}.json").read_text(encoding="utf-8"))


class Recorded:
    """An object of a double: what it was made with, by attribute."""

    FIELDS: tuple[str, ...] = ()
    REQUIRED: tuple[str, ...] = ()

    def __init__(self, **fields: Any):
        if unknown := fields.keys() - set(self.FIELDS):
            raise TypeError(f"{type(self).__name__} has no field {sorted(unknown)}")
        if missing := set(self.REQUIRED) - fields.keys():
            raise TypeError(f"{type(self).__name__} needs {sorted(missing)}")
        vars(self).update(dict.fromkeys(self.FIELDS), **fields)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items() if v is not None)})"


def install(monkeypatch: Any, peer: str, **more: Any) -> dict[str, list[Any]]:
    """Put a double of the peer in ``sys.modules``; calls of its functions by name. ``more``
    replaces objects."""
    calls: dict[str, list[Any]] = {}
    for name in [name for name in sys.modules if name.partition(".")[0] == peer]:
        monkeypatch.delitem(sys.modules, name)
    for path, shapes in contract_of(peer)["modules"].items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            _module(monkeypatch, ".".join(parts[:end]))
        for name, shape in shapes.items():
            made = more.get(name) or _made(name, shape, calls)
            setattr(sys.modules[path], name, made)
    return calls


def shapes_of(peer: str, module: str) -> dict[str, Any]:
    """The objects of one module of a peer, made of its contract; for a double that is files on a
    path."""
    shapes = contract_of(peer)["modules"][module]
    return {name: _made(name, shape, {}) for name, shape in shapes.items()}


def _module(monkeypatch: Any, path: str) -> None:
    if path in sys.modules:
        return
    module = ModuleType(path)
    module.__spec__ = importlib.machinery.ModuleSpec(path, None, is_package=True)
    module.__path__ = []
    monkeypatch.setitem(sys.modules, path, module)
    above, _, name = path.rpartition(".")
    if above:
        setattr(sys.modules[above], name, module)


def _made(name: str, shape: dict[str, Any], calls: dict[str, list[Any]]) -> Any:
    if "members" in shape:
        return enum.Enum(name, {member: member.lower() for member in shape["members"]})
    if "fields" in shape:
        fields = tuple(shape["fields"])
        return type(
            name, (Recorded,), {"FIELDS": fields, "REQUIRED": tuple(shape.get("required", ()))}
        )

    def function(*args: Any, **keywords: Any) -> Any:
        if unknown := keywords.keys() - set(shape["parameters"]):
            raise TypeError(f"{name} has no parameter {sorted(unknown)}")
        calls.setdefault(name, []).append((args, keywords))

    return function


def differences(peer: str) -> list[str]:
    """What of the contract the installed peer no longer has: ``field X of Y moved``."""
    problems = []
    for path, shapes in contract_of(peer)["modules"].items():
        try:
            module = importlib.import_module(path)
        except ImportError as error:
            problems.append(f"module {path} moved: {error}")
            continue
        for name, shape in shapes.items():
            real = getattr(module, name, None)
            if real is None:
                problems.append(f"{name} of {path} moved")
                continue
            problems += [
                f"field {field} of {name} moved"
                for field in _wanted(shape)
                if field not in _offered(real)
            ]
    return problems


def _wanted(shape: dict[str, Any]) -> list[str]:
    return [
        *shape.get("fields", ()),
        *shape.get("members", ()),
        *shape.get("parameters", ()),
        *shape.get("methods", ()),
    ]


def _offered(real: Any) -> set[str]:
    names = (
        set(dir(real))
        | set(getattr(real, "model_fields", ()))
        | set(getattr(real, "__annotations__", ()))
    )
    if dataclasses.is_dataclass(real):
        names |= {field.name for field in dataclasses.fields(real)}
    with contextlib.suppress(TypeError, ValueError):  # of a builtin
        names |= set(inspect.signature(real).parameters)
    return names
