"""Names, plain types, limits and defaults of the settings, read from source: importing ``transformers`` takes seconds.

``fields`` and ``transformers.TrainingArguments`` define the settings; a test compares. Types that are not built from
plain ones (numbers, text, tables, lists) read as ``Any``; limits and defaults that are not literals are left out.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verifiers.runtime.syntax import parse_python
from verifiers_trainer.settings.limits import Between, OneOf, Unsupported

_LIMITS: dict[str, Any] = {"Between": Between, "OneOf": OneOf, "Unsupported": Unsupported}
_PLAIN: dict[str, Any] = {"bool": bool, "dict": dict, "float": float, "int": int, "list": list, "str": str}


@functools.cache
def names() -> frozenset[str]:
    """Every field of ``RLConfig``."""
    return frozenset(hints())


@functools.cache
def hints() -> dict[str, Any]:
    """Field of ``RLConfig`` -> its type, or ``Any``."""
    spec = importlib.util.find_spec("transformers")  # finds, does not import
    assert spec is not None
    assert spec.submodule_search_locations is not None
    inherited = _fields_of(Path(spec.submodule_search_locations[0], "training_args.py"), "TrainingArguments")
    return inherited | _fields_of(_FIELDS, "RLFields")


@functools.cache
def limits() -> dict[str, list[Between | OneOf | Unsupported]]:
    """Field of ``RLConfig`` -> the markers that limit its values."""
    lines = _lines_of(_FIELDS, "Inherited") | _lines_of(_FIELDS, "RLFields")
    return {name: list(_limits_of(line.annotation)) for name, line in lines.items()}


@functools.cache
def defaults() -> dict[str, Any]:
    """Field of the project's own -> its default."""
    found = {}
    for name, line in _lines_of(_FIELDS, "RLFields").items():
        if line.value is not None:
            with contextlib.suppress(ValueError):
                found[name] = _literal(line.value)
    return found


_FIELDS = Path(__file__).with_name("fields.py")


def _fields_of(file: Path, class_name: str) -> dict[str, Any]:
    return {name: _type_of(line.annotation) for name, line in _lines_of(file, class_name).items()}


@functools.cache
def _lines_of(file: Path, class_name: str) -> dict[str, ast.AnnAssign]:
    """Field -> its line in the class."""
    tree = parse_python(file.read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    return {
        node.target.id: node
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_")
        if "ClassVar" not in ast.unparse(node.annotation)
    }


def _limits_of(annotation: ast.expr) -> Iterator[Between | OneOf | Unsupported]:
    for call in ast.walk(annotation):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _LIMITS:
            with contextlib.suppress(ValueError):  # arguments that are no literals: names of another module
                words = [_literal(argument) for argument in call.args]
                keywords = {str(one.arg): _literal(one.value) for one in call.keywords}
                yield _LIMITS[call.func.id](*words, **keywords)


def _literal(node: ast.expr) -> Any:
    """The value of a literal, ``math.inf``, or a power of two of them. *Raises* ValueError for another expression."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_literal(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _literal(node.left) ** _literal(node.right)
    return math.inf if ast.unparse(node) == "math.inf" else ast.literal_eval(node)


def _type_of(annotation: ast.expr) -> Any:
    match annotation:
        case ast.Constant(value=None):
            return None
        case ast.Name(id=name) if name in _PLAIN:
            return _PLAIN[name]
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[first, *_])):
            return _type_of(first)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            one, other = _type_of(left), _type_of(right)
            return Any if Any in (one, other) else one | other
    return Any
