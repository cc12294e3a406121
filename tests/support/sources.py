"""The sources of the project as syntax trees, each parsed once for all rules of the architecture.

Files that use this are one unit of ``support.forks``, so that it holds for ``-n`` too.
"""

import ast
import functools
import gc
from collections.abc import Iterable
from pathlib import Path


def nodes_in(source: str) -> tuple[ast.AST, ...]:
    """Every node of a module's text, the module first."""
    is_collecting = gc.isenabled()
    gc.disable()  # nothing of a tree is garbage, and looking for it takes longer than parsing
    try:
        return tuple(ast.walk(ast.parse(source)))
    finally:
        if is_collecting:
            gc.enable()


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, the module first."""
    return nodes_in(path.read_text(encoding="utf-8"))


def calls_in(nodes: Iterable[ast.AST]) -> list[ast.Call]:
    return [node for node in nodes if isinstance(node, ast.Call)]


@functools.cache
def calls_of(path: Path) -> list[ast.Call]:
    """Every call of a file."""
    return calls_in(nodes_of(path))


def forget() -> None:
    """Drop the trees: a million objects, which every later garbage collection would walk through."""
    nodes_of.cache_clear()
    calls_of.cache_clear()
