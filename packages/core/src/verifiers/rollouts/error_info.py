"""``ErrorInfo``: a failure as data, without secrets."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.errors import ScoringError, VerifiersError, message_of
from verifiers.runtime.redaction import redacted_text
from verifiers.types import AttributeDict

MAX_MESSAGE_CHARS = 4_000
MAX_TRACEBACK_CHARS = 16_000


class ErrorInfo(AttributeDict):
    """A failure as data: ``error message error_chain_repr error_chain_str where retryable attempts
    traceback``.

    >>> vf.ErrorInfo.of(vf.ToolCallError("there is no tool 'ad'")).message
    "there is no tool 'ad'"
    """

    if TYPE_CHECKING:
        error: str
        message: str
        error_chain_repr: str
        error_chain_str: str
        where: str | None
        retryable: bool
        attempts: Any
        traceback: str | None

    @classmethod
    def of(cls, error: object) -> ErrorInfo:
        """From an exception, its mapping as read from disk, or the text that older
        versions wrote."""
        if isinstance(error, Mapping):
            odd = [n for n in _TEXTS if not isinstance(error.get(n), str | None)]
            return cls(error, **{name: str(error[name]) for name in odd})
        # it was raised in another process
        if (recorded := getattr(error, "recorded", None)) is not None:
            return cls(recorded)
        if not isinstance(error, BaseException):
            name, _, message = str(error).partition(": ")
            if not name.isidentifier():
                name, message = str(error).split("(", 1)[0], str(error)
            blank = dict.fromkeys(("error_chain_repr", "error_chain_str", "where", "traceback"))
            text = redacted_text(message, MAX_MESSAGE_CHARS)
            return cls(blank, error=name, message=text, retryable=False, attempts=0)
        chain = error_chain(error)
        attempts = getattr(error, "attempts", None)
        return cls(
            error=type(error).__name__,
            message=redacted_text(message_of(error), MAX_MESSAGE_CHARS),
            error_chain_repr=redacted_text(" -> ".join(map(_repr, chain)), MAX_MESSAGE_CHARS),
            error_chain_str=" -> ".join(type(link).__name__ for link in chain),
            where=_where(error),
            retryable=bool(getattr(error, "retryable", False)),
            attempts=attempts if isinstance(attempts, int) else len(attempts or ()),
            traceback=redacted_text(
                "".join(traceback.format_exception(error)), MAX_TRACEBACK_CHARS
            ),
        )

    @property
    def text(self) -> str:
        """``ClassName: message``."""
        return f"{self.get('error') or 'unknown'}: {self.get('message') or ''}"

    @property
    def cause_and_place(self) -> str:
        """The innermost class and where it was raised: ``ValueError in right (sums.py:12)``."""
        where = self.get("where") or ""
        is_of_author = where and " in " not in where  # else it is a frame: "file:line in function"
        return f"{self.cause} in {where}" if is_of_author else self.cause

    @property
    def is_scoring_error(self) -> bool:
        """Whether only a reward function failed, not the rollout itself."""
        return self.get("error") == ScoringError.__name__

    @property
    def author_line(self) -> str | None:
        """``"sums.py:12"``: the deepest line of the first exception's traceback in the author's
        code; None without such a line.

        Frames of this product, of Python's library and of installed packages do not count.
        """
        innermost = (
            (self.get("traceback") or "")
            .split("\nDuring handling of ")[0]
            .split("\nThe above exception ")[0]
        )
        frames = [frame for frame in _FRAME.findall(innermost) if not _IS_LIBRARY.search(frame[0])]
        return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else None

    @property
    def cause(self) -> str:
        """Class name of the innermost exception."""
        chain = self.get("error_chain_str") or self.get("error") or "unknown"
        return chain.rsplit(" -> ", 1)[-1]


_TEXTS = ("error", "message", "error_chain_repr", "error_chain_str", "where", "traceback")


def error_chain(error: BaseException) -> list[BaseException]:
    """The exception and its chain of causes, outermost first."""
    chain: dict[int, BaseException] = {}
    link: BaseException | None = error
    while link is not None and id(link) not in chain:
        chain[id(link)] = link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return list(chain.values())


def _repr(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:  # noqa: BLE001 - an author's __repr__ may raise anything
        return f"{type(error).__name__}({message_of(error)!r})"


_FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)
_IS_LIBRARY = re.compile(r"/(site-packages|dist-packages|python3\.\d+|src/verifiers(_\w+)?)/|<")
"""Paths of frames that are not the author's code, on whatever machine wrote them."""


def _where(error: BaseException) -> str | None:
    """The function or hook that failed, with the author's file and line where they are known, else
    the innermost frame."""
    facts = error.facts if isinstance(error, VerifiersError) else {}
    names = (facts[fact] for fact in ("function", "hook", "waiting_for") if facts.get(fact))
    if name := next(names, None):
        has_line = facts.get("file") and facts.get("line")
        return f"{name} ({facts['file']}:{facts['line']})" if has_line else str(name)
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else None
