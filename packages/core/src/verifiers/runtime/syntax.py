"""Parse Python source, from any thread."""

from __future__ import annotations

import ast
import threading

_LOCK = threading.Lock()
_ATTEMPTS = 100


def parse_python(source: str | bytes, filename: str = "<unknown>") -> ast.Module:
    """``ast.parse``, also where several threads parse at once. *Raises* SyntaxError; ValueError
    (null bytes).

    Before CPython 3.11.9 and 3.12.3 the depth counter of the tree's constructor is shared by all
    threads, and ``ast.parse`` raises SystemError when two of them construct trees
    (https://github.com/python/cpython/issues/106905).
    """
    with _LOCK:
        for _ in range(_ATTEMPTS):
            try:
                return ast.parse(source, filename)  # noqa: TID251
            except SystemError:  # a thread of another library parses without the lock
                continue
        return ast.parse(source, filename)  # noqa: TID251
