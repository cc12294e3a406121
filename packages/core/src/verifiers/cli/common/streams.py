"""The command's streams: results alone on stdout, errors in one paragraph on stderr, log lines through the display.

Nothing here decides what is an error; it says it, without secrets and control characters.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from verifiers.errors import ConfigError, VerifiersError

if TYPE_CHECKING:
    from verifiers.cli.evaluate.display import Display

UNEXPECTED = 3
"""Exit code of an error that is not one of ours."""
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def fail(error: BaseException, *, command: str, verbose: bool) -> tuple[int, dict[str, Any]]:
    """Say an error in one paragraph that begins with the command's name; (exit code, the JSON object under ``error``).

    ``hint`` of the object lists what may have been meant, where that is known.
    """
    from verifiers.data.messages import escape_control
    from verifiers.runtime.redaction import redacted_text

    known = error if isinstance(error, VerifiersError) else None
    said = str(error) if known else f"unexpected {type(error).__name__}: {error} (-v shows where)"
    message = escape_control(redacted_text(said))
    if verbose:
        print(redacted_text("".join(traceback.format_exception(error))), file=sys.stderr)
    print(f"{command}: {message}", file=sys.stderr)
    suggestions = getattr(error, "suggestions", None)
    hint = ", ".join(suggestions) if suggestions else None
    return known.exit_code if known else UNEXPECTED, {"type": type(error).__name__, "message": message, "hint": hint}


@contextlib.contextmanager
def results_stream(json_only: bool) -> Iterator[TextIO]:
    """Where results go. With ``json_only`` whatever else is printed to stdout, by anybody, goes to stderr."""
    if not json_only:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(os.dup(kept), "w", encoding="utf-8") as out:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield out
        finally:
            out.flush()
            os.dup2(kept, 1)
            os.close(kept)


@contextlib.contextmanager
def logging_to(display: Display, verbose: bool, quiet: bool) -> Iterator[None]:
    """Show the messages of the ``verifiers`` logger from the level that was asked for. Raises: ``ConfigError``."""
    from verifiers.cli.evaluate.display import LogHandler

    named = os.environ.get("VF_LOG_LEVEL", "").upper()
    if named and named not in LOG_LEVELS:
        raise ConfigError(f"VF_LOG_LEVEL is {named!r}; it must be one of {', '.join(LOG_LEVELS)}")
    logger, handler = logging.getLogger("verifiers"), LogHandler(display)
    level = "DEBUG" if verbose else "ERROR" if quiet else named or "WARNING"
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
