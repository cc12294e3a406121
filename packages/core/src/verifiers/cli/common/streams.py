"""Output streams of a command: only results on stdout, an error as one paragraph on stderr.

Secrets are redacted and control characters escaped.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

from verifiers.errors import ConfigError, VerifiersError
from verifiers.runtime.redaction import redacted_text
from verifiers.runtime.terminal import escape_control

EXIT_CODES = {
    0: "done",
    1: "a check found something",
    2: "something to correct",
    3: "it failed",
    130: "interrupted",
    143: "ended by SIGTERM",
}
"""What the exit code of every command means."""
HAS_FINDINGS, UNEXPECTED, INTERRUPTED = 1, 3, 130
EPILOG = f"Exit codes: {', '.join(f'{code} {means}' for code, means in EXIT_CODES.items())}."


class CheckFailed(ConfigError):
    """A check ran, and found what its message says (``names``)."""

    exit_code = HAS_FINDINGS


def fail(error: BaseException, *, command: str, verbose: bool) -> tuple[int, dict[str, Any]]:
    """Print an error, prefixed with the command's name; returns (exit code, the JSON object under
    ``error``).

    ``hint`` in the object lists suggestions for a misspelled name, or is null.
    """
    if isinstance(error, VerifiersError):
        code, text = error.exit_code, str(error)
    else:
        # late: it loads numpy, which most errors do not need
        from verifiers.rollouts.error_info import ErrorInfo

        line = ErrorInfo.of(error).author_line
        location = f" at {line} (-v shows the traceback)" if line else " (-v shows where)"
        code, text = UNEXPECTED, f"unexpected {type(error).__name__}: {error}{location}"
    message = escape_control(redacted_text(text))
    if verbose:
        print(redacted_text("".join(traceback.format_exception(error))), file=sys.stderr)
    print(f"{command}: {message}", file=sys.stderr)
    hint = ", ".join(getattr(error, "suggestions", None) or ()) or None
    return code, {"type": type(error).__name__, "message": message, "hint": hint}


def discard_stdout() -> None:
    """Once its reader has closed stdout: the flush at the interpreter's end does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextlib.contextmanager
def results_stream(json_only: bool) -> Iterator[TextIO]:
    """The stream of the results. With ``json_only`` any other output to stdout goes to stderr."""
    if not json_only:
        yield sys.stdout
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(os.dup(stdout), "w", encoding="utf-8") as out:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield out
        finally:
            out.flush()
            os.dup2(stdout, 1)
            os.close(stdout)
