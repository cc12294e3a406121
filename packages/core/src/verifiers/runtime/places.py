"""Places in author code: ``file:line`` of an error, for messages. Paths below the working directory
are relative."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


def raised_at(error: BaseException) -> str | None:
    """The innermost line of author code in an error's traceback: ``file:line in function``; None
    without such a line."""
    return last_of_author(traceback.extract_tb(error.__traceback__))


def last_of_author(frames: Iterable[traceback.FrameSummary]) -> str | None:
    """The last frame outside of this package and the standard library: ``file:line in
    function``."""
    author = [
        frame
        for frame in frames
        if not (frame.filename.startswith("<") or is_library(frame.filename))  # generated code
    ]
    if author:
        return f"{short_path(author[-1].filename)}:{author[-1].lineno} in {author[-1].name}"
    return None


def short_path(path: str | os.PathLike[str]) -> str:
    """The path relative to the working directory, when it is below it."""
    relative = os.path.relpath(path)
    return os.fspath(path) if relative.startswith("..") else relative


def is_library(path: str) -> bool:
    """Whether a file belongs to this package or to the standard library, which call the author's
    function."""
    return path.startswith((_PACKAGE, "<frozen")) or (
        path.startswith(_STANDARD_LIBRARY) and "site-packages" not in path
    )
