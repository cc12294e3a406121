"""Run Python code cell by cell in one namespace, as a notebook does.

An exception of the code is returned as text, a traceback with source lines. No exception of the
code propagates.
"""

from __future__ import annotations

import ast
import errno
import linecache
import traceback
import types

MAX_TEXT = 100_000
"""Characters of a value or a traceback; the rest is cut."""


class Interpreter:
    def __init__(self) -> None:
        main = types.ModuleType("__main__")
        self.namespace: dict[str, object] = main.__dict__
        self.namespace["__builtins__"] = __builtins__
        self.main = main
        self._cells = 0

    def run(self, code: str) -> tuple[str | None, str | None, str | None]:
        """Run one cell; ``(value, error, limit)``: repr of the trailing expression, traceback,
        limit reached."""
        self._cells += 1
        name = f"<cell {self._cells}>"
        try:
            linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
            value = self._evaluate(code, name)
            return None if value is None else cut(repr(value)), None, None
        except BaseException as error:  # noqa: BLE001  (SystemExit and KeyboardInterrupt of the code must not end the worker)
            return None, _describe(error), _limit(error)

    def _evaluate(self, code: str, name: str) -> object:
        tree = ast.parse(code, name)  # noqa: TID251  the guest does not import this library
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if tree.body:
            exec(compile(tree, name, "exec"), self.namespace)
        if not isinstance(last, ast.Expr):
            return None
        value = eval(compile(ast.Expression(last.value), name, "eval"), self.namespace)
        if value is not None:
            self.namespace["_"] = value
        return value


def cut(text: str) -> str:
    """Truncate to ``MAX_TEXT`` encodable characters and mark the truncation."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}\n[cut: {len(text) - MAX_TEXT} characters more]"


def _describe(error: BaseException) -> str:
    try:
        frame = error.__traceback__
        while frame is not None and not frame.tb_frame.f_code.co_filename.startswith("<cell "):
            frame = frame.tb_next
        return cut("".join(traceback.format_exception(type(error), error, frame)).rstrip("\n"))
    except BaseException:  # noqa: BLE001  (an exception whose ``str`` raises, or out of memory)
        return type(error).__name__


def _limit(error: BaseException) -> str | None:
    """The limit that an exception indicates; None for others."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError):
        return {
            errno.EFBIG: "file",
            errno.ENOSPC: "file",
            errno.ENOMEM: "memory",
            errno.EAGAIN: "processes",
        }.get(error.errno or 0)
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "processes"
    return None
