"""Format an ``ExecResult`` as the text that the model reads.

This module runs no code. ``ToolEnv`` bounds the length (``max_tool_result_chars``).
"""

from __future__ import annotations

from verifiers.sandbox import ExecResult

NO_OUTPUT = "(no output)"
_LIMITS = {
    "memory": "the memory limit was reached",
    "cpu": "the limit of CPU time was reached",
    "file": "the limit of file sizes was reached",
    "processes": "the limit of processes was reached",
    "killed": "the process was ended suddenly",
}


def command_text(result: ExecResult, timeout_s: float) -> str:
    r"""Format the result of a command: stdout, a ``stderr:`` block, a non-zero exit code, and a
    note of any limit.

    >>> command_text(ExecResult(stdout="a\n", stderr="b\n", exit_code=2), 30)
    'a\nstderr:\nb\n(exit code 2)'
    >>> command_text(ExecResult(exit_code=0), 30)
    '(no output)'
    """
    parts = [*_streams(result), result.error or ""]
    if result.exit_code and not result.error:
        parts.append(f"(exit code {result.exit_code})")
    parts.append(_notice(result, timeout_s, "all of its processes were ended"))
    return _joined(parts)


def python_text(result: ExecResult, number: int, timeout_s: float) -> str:
    r"""Format the result of Python code: its output, then the traceback or ``Out[number]: `` and
    the last value.

    >>> python_text(ExecResult(stdout="hi\n", value="42"), 3, 30)
    'hi\nOut[3]: 42'
    >>> python_text(ExecResult(timed_out=True, limit="wall"), 1, 30)
    '(stopped after 30 s, the time limit of one call; all variables are gone)'
    """
    value = "" if result.value is None else f"Out[{number}]: {result.value}"
    notice = _notice(result, timeout_s, "all variables are gone")
    return _joined([*_streams(result), result.error or "", value, notice])


def has_failed(result: ExecResult) -> bool:
    """Return whether a call counts as an error: an exception, a failing command, a time-out or a
    limit."""
    limit = result.limit not in (None, "output")
    return bool(result.error or result.exit_code or result.timed_out or limit)


def _streams(result: ExecResult) -> list[str]:
    stderr = result.stderr.rstrip("\n")
    return [result.stdout.rstrip("\n"), f"stderr:\n{stderr}" if stderr else ""]


def _notice(result: ExecResult, timeout_s: float, loss: str) -> str:
    notes = []
    if result.timed_out:
        notes.append(f"(stopped after {timeout_s:g} s, the time limit of one call; {loss})")
    elif result.limit == "killed":
        notes.append(f"({_LIMITS['killed']}; {loss})")
    elif result.limit in _LIMITS:
        notes.append(f"({_LIMITS[result.limit]})")
    if result.truncated:
        notes.append("(output was cut: it is longer than one call may print)")
    return "\n".join(notes)


def _joined(parts: list[str]) -> str:
    return "\n".join(part for part in parts if part) or NO_OUTPUT
