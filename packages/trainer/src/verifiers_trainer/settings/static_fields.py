"""Names and plain types of all settings, read from source: importing ``transformers`` for them takes seconds.

``fields`` and ``transformers.TrainingArguments`` define the settings; a test compares. Types that are not built from
plain ones (numbers, text, tables, lists) read as ``Any``; markers are not read.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Any

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
    return inherited | _fields_of(Path(__file__).with_name("fields.py"), "RLFields")


def _fields_of(file: Path, class_name: str) -> dict[str, Any]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    return {
        node.target.id: _type_of(node.annotation)
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_")
        if "ClassVar" not in ast.unparse(node.annotation)
    }


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
