r"""Text functions: split reasoning from the rest of a reply, extract answers in ``\boxed{…}`` or
after ``####``, the prompts that request them, key checks.

Run time is linear in the text. ``rubrics`` compare answers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from verifiers.errors import MissingKeyError

BOXED_SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
"""Requests the format that ``extract_boxed_answer`` reads."""

THINK_BOXED_SYSTEM_PROMPT = (
    "Think step-by-step inside <think>...</think> tags.     Then, give your final answer inside"
    " \\boxed{}."
)
"""The same for models that reason inside tags; the spaces are those of the prompt that older
results were made with."""

# an opening box, or a box of one token without braces; LaTeX escapes that are not braces ("\\" and
# "\{"); or a plain brace
_BRACES = re.compile(
    r"\\(?:boxed|fbox)(?:\s{0,9}\{|\s{0,9}(?P<token>[-+]?\d+(?:[.,]\d+)*|[a-zA-Z](?=\s{0,9}(?:[$.,;)\\]|\Z))"
    r"|\\[dt]?frac\d\d|\\(?!boxed|fbox)[a-zA-Z]{1,20}(?:\{[^{}\n]{0,99}\}){0,2}))"
    r"|\\\\(?!boxed|fbox)|\\[{}]|[{}]"
)


OPEN, CLOSE = "<think>", "</think>"
_TAGS = {
    OPEN: CLOSE,
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<seed:think>": "</seed:think>",
}
"""What opens reasoning -> what closes it: most models; Mistral's, Moonshot's, ByteDance's."""
_SPACE = re.compile(r"\s*")
_FENCE = re.compile(r"^ {0,3}```", re.MULTILINE)
_LINE_END = re.compile(r"[ \t\r]*(\n|\Z)")


def split_reasoning(text: str, opened: bool = False) -> tuple[str, str]:
    """Return (reasoning, the rest) of a reply. Parsers, judges, rewards of format, code blocks and
    the search for tool calls read the rest.

    Reasoning stands in ``<think>`` (or ``[THINK]``) blocks at the start. ``opened``: the prompt
    already ends with ``<think>``, as in some templates; a closing tag without an opening one tells so too. A block
    that is cut is all reasoning. A closing tag within a line of a fenced block is code.

    >>> split_reasoning("<think>two and two</think>It is 4.")
    ('two and two', 'It is 4.')
    >>> split_reasoning("two and two</think>It is 4."), split_reasoning("It is 4.")
    (('two and two', 'It is 4.'), ('', 'It is 4.'))
    >>> split_reasoning("two and", opened=True)
    ('two and', '')
    """
    start = _after_space(text, 0)
    begun = text.startswith(tuple(_TAGS), start)
    at_start = (tag for tag in _TAGS if text.startswith(tag, start))
    opening = next(at_start, None) or next((tag for tag in _TAGS if _TAGS[tag] in text), OPEN)
    closing = _TAGS[opening]
    position = start + len(opening) if begun else 0
    thoughts: list[str] = []
    while (end := _closing_tag(text, position, closing)) >= 0:
        thoughts.append(text[position:end].strip())
        position = _after_space(text, end + len(closing))
        if not text.startswith(opening, position):
            return "\n".join(filter(None, thoughts)), text[position:]
        position += len(opening)
    if not (thoughts or begun or opened):
        return "", text
    return "\n".join(filter(None, [*thoughts, text[position:].strip()])), ""


def _after_space(text: str, position: int) -> int:
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]


def _closing_tag(text: str, position: int, closing: str) -> int:
    """Where the reasoning from ``position`` on is closed; -1 if it is not."""
    in_fence, begin = False, position
    while (end := text.find(closing, begin)) >= 0:
        in_fence ^= sum(1 for _ in _FENCE.finditer(text, begin, end)) % 2 == 1
        begin = end + len(closing)
        if not in_fence or _LINE_END.match(text, begin):
            return end
    return -1


def extract_boxed_answer(text: str, strict: bool = False) -> str:
    r"""Return the content of the last balanced ``\boxed{…}`` or ``\fbox{…}``, or the token of
    ``\boxed 4``; without a box the whole text, or ``""`` when ``strict``.

    >>> extract_boxed_answer(r"so \boxed{1}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> extract_boxed_answer("it is 5"), extract_boxed_answer("it is 5", strict=True)
    ('it is 5', '')
    """
    open_braces: list[tuple[int, bool]] = []  # (where the content begins, whether it is a box)
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        brace = match.group()
        if match["token"]:
            last = match.span("token")
        elif brace[-1] == "{" and brace != "\\{":
            open_braces.append((match.end(), brace != "{"))
        elif brace == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and (last is None or start > last[0]):
                last = (start, match.start())
    if last is None:
        return "" if strict else text
    return text[last[0] : last[1]]


def extract_hash_answer(text: str) -> str:
    """Return the text between the first ``####`` and the next, stripped; the text itself without
    the marks.

    >>> extract_hash_answer("6 * 7 = 42\\n#### 42"), extract_hash_answer("42")
    ('42', '42')
    """
    return text.split("####", 2)[1].strip() if "####" in text else text


def strip_non_numeric(text: str) -> str:
    """Return the digits and dots of ``text``, without a sign.

    >>> strip_non_numeric("$1,234.50"), strip_non_numeric("x = -5 m"), strip_non_numeric("none")
    ('1234.50', '5', '')
    """
    return re.sub(r"[^0-9.]", "", text)


def ensure_keys(names: Iterable[str]) -> None:
    """Check that environment variables are set. Raises: ``MissingKeyError`` that names all missing
    variables.

    >>> vf.ensure_keys(["NO_SUCH_KEY"])
    Traceback (most recent call last):
        ...
    verifiers.errors.MissingKeyError: set NO_SUCH_KEY first, for example: export NO_SUCH_KEY=...
    """
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise MissingKeyError(
            f"set {', '.join(missing)} first, for example: export {missing[0]}=...", names=missing
        )
