"""What did not happen in the rollouts of a run: a wrong setting often shows as a lack of ability.

Replies that the token limit cut, tool calls that arrived as text, replies in which the parser found
nothing. A rate that concerns most rollouts is a warning with its fix; the others are numbers of the
summary, and 0 is silent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verifiers.data.messages import field, message_text
from verifiers.data.tool_schema import defined_name
from verifiers.parsers.parser import Parser, is_plain

if TYPE_CHECKING:
    from verifiers.rollouts.rollout import Rollout

FIRST = 8
"""Rollouts after which a run looks for the first time."""
MOST = 0.5
"""Share of the rollouts from which on a count is a warning."""
CALL_MARKS = (
    "<tool_call>|<function=|<function_call>|<\\|python_tag\\|>|\\[TOOL_CALLS\\]"
    "|<\\|channel\\|>commentary to=|<invoke name=|<\\|tool_call"
)
"""How chat templates of common models write a tool call."""


@dataclass
class Coverage:
    """Counts over finished rollouts. ``tools``: names of the declared tools; ``parser`` reads
    answers, and a parser that takes any text counts nothing.

    >>> coverage = Coverage(tools=("add",))
    >>> text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    >>> coverage.add({"completion": [{"role": "assistant", "content": text}], "is_truncated": False})
    >>> coverage.counts()
    {'rollouts': 1, 'truncated': 0, 'unparsed': None, 'without_calls': 1, 'calls_as_text': 1}
    """

    tools: Sequence[str] = ()
    parser: Parser | None = None
    rollouts: int = 0
    truncated: int = 0
    """Rollouts that a limit of tokens or time cut."""
    unparsed: int = 0
    """Rollouts whose last reply has nothing for the parser."""
    without_calls: int = 0
    """Rollouts without a tool call, though tools are declared."""
    calls_as_text: int = 0
    """Those of them with a text that looks like a call."""

    def __post_init__(self) -> None:
        if is_plain(self.parser):
            self.parser = None

    def add(self, rollout: Mapping[str, Any]) -> None:
        """Count a finished rollout: a row or a state, with ``completion`` and ``is_truncated``. An
        unfinished rollout, which has an error, is not counted."""
        if rollout.get("error") is not None and not rollout.get("completion"):
            return
        completion = rollout.get("completion") or []
        messages = [] if isinstance(completion, str) else completion
        self.rollouts += 1
        self.truncated += bool(rollout.get("is_truncated"))
        if self.parser is not None:
            self.unparsed += _is_unparsed(self.parser, completion)
        if self.tools and not any(field(message, "tool_calls") for message in messages):
            self.without_calls += 1
            self.calls_as_text += looks_like_call(messages, self.tools)

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from the ``counts`` of an earlier session of the run."""
        for name, count in (saved or {}).items():
            if isinstance(count, int) and name in self.counts():
                setattr(self, name, count)

    def counts(self) -> dict[str, int | None]:
        """The counts as a JSON object; None if nothing could be counted."""
        return {
            "rollouts": self.rollouts,
            "truncated": self.truncated,
            "unparsed": None if self.parser is None else self.unparsed,
            "without_calls": self.without_calls if self.tools else None,
            "calls_as_text": self.calls_as_text if self.tools else None,
        }

    def warnings(self, max_tokens: object = None) -> dict[str, str]:
        """Count -> a sentence with the fix, for each that concerns most rollouts."""
        sentences = {
            "truncated": f"rollouts were cut by a limit{_limit(max_tokens)}",
            "calls_as_text": (
                "rollouts have tool calls as text and none that was read: start the server with its"
                " parser for this model's calls (vLLM: --enable-auto-tool-choice"
                " --tool-call-parser), or set tool_call_parser"
            ),
            "unparsed": (
                f"replies have nothing for {type(self.parser).__name__}: ask for its format in the"
                " system prompt (parser.get_format_str()), or use a parser of the format that the"
                " model writes"
            ),
        }
        counts = {name: getattr(self, name) for name in sentences}
        if self.unparsed <= self.truncated:  # a reply that was cut lacks its end
            del counts["unparsed"]
        return {
            name: f"{count} of {self.rollouts} {sentences[name]}"
            for name, count in counts.items()
            if count and count >= MOST * self.rollouts
        }


def looks_like_call(messages: Iterable[object], tools: Iterable[str]) -> bool:
    """Whether a reply has the text of a call, in a common format or of one of these tools."""
    names = "|".join(map(re.escape, tools))
    pattern = re.compile(rf'{CALL_MARKS}|"name"\s*:\s*"(?:{names})"' if names else CALL_MARKS)
    return any(
        field(message, "role") == "assistant" and pattern.search(message_text(message)) is not None
        for message in messages
    )


def has_call_as_text(rollout: Rollout) -> bool:
    """Whether tools were declared to a rollout, none was called, and a reply looks like a call."""
    messages = rollout.completion or []
    if not rollout.tool_defs or isinstance(messages, str):
        return False
    if any(field(message, "tool_calls") for message in messages):
        return False
    return looks_like_call(messages, map(defined_name, rollout.tool_defs))


def _limit(max_tokens: object) -> str:
    value = f" (max_tokens {max_tokens})" if max_tokens else ""
    return f"{value}, so their rewards say little: raise max_tokens (vf-eval -t)"


def _is_unparsed(parser: Parser, completion: object) -> bool:
    try:
        return parser.parse_answer(completion) in (None, "")
    except Exception:  # noqa: BLE001 - an author's parser; scoring reports what it raises
        return False


def coverage_lines(
    counts: Mapping[str, Any] | None, max_tokens: object
) -> Iterator[tuple[str, str]]:
    """(name, value) of the lines of a summary, for ``Coverage.counts``; nothing if all is well.

    >>> list(coverage_lines({"rollouts": 6, "truncated": 6, "unparsed": 0}, 48))
    [('truncated', '6 of 6 (max_tokens 48)')]
    """
    counts = counts or {}
    total = counts.get("rollouts") or 0
    if counts.get("truncated"):
        limit = f" (max_tokens {max_tokens})" if max_tokens else ""
        yield "truncated", f"{counts['truncated']} of {total}{limit}"
    if counts.get("unparsed"):
        yield "unparsed", f"the parser found nothing in {counts['unparsed']} of {total}"
    if total and counts.get("without_calls") == total:
        text = counts["calls_as_text"]
        yield "tools", "never called" + (f"; {text} of {total} have calls as text" if text else "")
