"""What did not happen in the rollouts of a run: a wrong setting often shows as a lack of ability.

Replies that the token limit cut, tool calls that failed or arrived as text, replies in which the
parser found nothing, unknown rewards, groups with equal rewards. A rate that concerns most rollouts
is a warning with its fix; the others are numbers of the summary, and 0 is silent. Evaluations count
all of their rollouts, and trainings those of each batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verifiers.data.messages import field, message_text
from verifiers.data.tool_schema import defined_name
from verifiers.parsers.parser import is_plain
from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.values import number

FIRST = 8
"""Rollouts after which a run looks for the first time."""
MOST = 0.5
"""Share of the rollouts from which on a count is a warning."""
CALL_MARKS = (
    *("<arg_key>", "<tool_call>", "<function=", "<function_call>", "<|python_tag|>"),
    *("[TOOL_CALLS]", "to=functions.", "<invoke name=", "<|tool_call", "<｜tool▁call"),
    *("<tool_calls>", "<TOOLCALL>", "<|START_ACTION|>", "<|action_start|>", "```tool_code"),
)
"""How chat templates write a tool call: GLM, Hermes and Qwen, Qwen3-Coder, functionary, Llama,
Mistral, gpt-oss (harmony), MiniMax, Granite and Kimi, DeepSeek, Jamba, Nemotron, Command, InternLM,
Gemma."""
FAILED_REQUESTS = {
    "refused_for_rate": "refused for their rate (429)",
    "server_errors": "answered by an error of the server (5xx)",
    "refused": "refused (another 4xx)",
    "unanswered": "without an answer (no connection, or out of time)",
    "unusable": "answered by no completion",
}
"""Kind of a failed request -> what the summary says of it."""
IN_METRICS = {
    "rollouts": "rollouts/generated",
    "truncated": "rollouts/truncated",
    "unparsed": "rollouts/unparsed",
    "without_calls": "rollouts/without_calls",
    "calls_as_text": "rollouts/calls_as_text",
    "unscored": "reward/unscored",
    "equal_groups": "groups/dead",
    "different_groups": "groups/live",
}
"""Count -> its name in ``metrics.jsonl``."""


@dataclass
class Coverage:
    """Counts over finished rollouts.

    >>> text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    >>> completion = [{"role": "assistant", "content": text}]
    >>> tools = [{"type": "function", "function": {"name": "add"}}]
    >>> coverage = Coverage()
    >>> coverage.add(Rollout(completion=completion, tool_defs=tools, reward=0.0))
    >>> coverage.calls_as_text, coverage.counts()["unparsed"]
    (1, None)
    """

    rollouts: int = 0
    truncated: int = 0
    """Rollouts that a limit of tokens or time cut."""
    unscored: int = 0
    """Rollouts whose scoring failed."""
    parsed: int = 0
    """Rollouts of environments whose parser needs a format."""
    unparsed: int = 0
    """Those of them in which the parser found nothing."""
    with_tools: int = 0
    """Rollouts to which tools were declared."""
    without_calls: int = 0
    """Those of them without a tool call."""
    calls_as_text: int = 0
    """Those of these with a text that looks like a call."""
    tool_calls: int = 0
    tool_errors: int = 0
    """Tool calls that failed."""
    requests: int = 0
    """Requests to the model that were answered, or failed; judges' are not counted."""
    refused_for_rate: int = 0
    """Those of them that the server refused for their rate (429)."""
    server_errors: int = 0
    refused: int = 0
    unanswered: int = 0
    """Those without a connection, or out of time."""
    unusable: int = 0
    """Those answered by something else than a completion."""
    begun_again: int = 0
    """Attempts at rollouts that an error ended and that were begun again."""
    tool_error = ""
    """Tool and text of the newest of them."""
    error = None
    """What left the newest unknown reward unknown."""

    def add(self, rollout: Rollout, attempts: int = 1) -> None:
        """Count a finished rollout, which was begun ``attempts`` times."""
        counts = counts_of(
            rollout.completion,
            error=rollout.error,
            reward=rollout.reward,
            is_truncated=rollout.is_truncated,
            is_unparsed=rollout.is_unparsed,
            tool_defs=rollout.tool_defs,
            tool_errors=rollout.tool_errors,
            failed_requests=rollout.failed_requests,
            attempts=attempts,
        )
        self.add_counts(counts)
        if counts.get("unscored"):
            self.error = rollout.error
        self.tool_error = next(iter(rollout.tool_errors), self.tool_error)

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Add the ``counts_of`` a finished rollout."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    @classmethod
    def of(cls, rollouts: Iterable[Rollout]) -> Coverage:
        """The counts of these rollouts."""
        coverage = cls()
        for rollout in rollouts:
            coverage.add(rollout)
        return coverage

    @classmethod
    def of_metrics(cls, numbers: Mapping[str, Any]) -> Coverage:
        """The counts of a line of ``metrics.jsonl``; failures of scoring are not among them."""
        names = ("truncated", "unparsed", "without_calls", "calls_as_text")
        counts = {name: numbers.get(IN_METRICS[name], 0) for name in names}
        total = numbers.get(IN_METRICS["rollouts"], 0)
        return cls(rollouts=total, parsed=total, with_tools=total, **counts)

    def metrics(self) -> dict[str, float]:
        """The counts under their names in ``metrics.jsonl``."""
        return {
            metric: getattr(self, name)
            for name, metric in IN_METRICS.items()
            if metric.startswith("rollouts/")
        }

    def counts(self) -> dict[str, int | None]:
        """The counts as a JSON object; None if nothing could be counted."""
        uncounted = [] if self.parsed else ["unparsed"]
        if not self.with_tools:
            uncounted += ["without_calls", "calls_as_text", "tool_calls", "tool_errors"]
        return asdict(self) | dict.fromkeys(uncounted)

    def warnings(self, max_tokens: object = None, parser: object = None) -> dict[str, str]:
        """Count -> a sentence with the fix, for each that concerns most rollouts. ``parser``: the
        environment's."""
        limit = f" (max_tokens {max_tokens})" if max_tokens else ""
        is_group = parser is None or is_plain(parser)  # each member has a parser
        name = "the environment's parser" if is_group else type(parser).__name__
        rules = {
            "truncated": (
                self.rollouts,
                f"rollouts were cut by a limit{limit}, so their rewards say little: raise"
                " max_tokens (vf-eval -t, --trainer.args.max_tokens)",
            ),
            "calls_as_text": (
                self.with_tools,
                "rollouts have tool calls as text and none that was read: start the server with its"
                " parser for this model's calls (vLLM: --enable-auto-tool-choice"
                " --tool-call-parser), or set tool_call_parser",
            ),
            "tool_errors": (self.tool_calls, f"tool calls failed: {self.tool_error}"),
            "unparsed": (
                self.parsed,
                f"replies have nothing for {name}: ask for its format in the system prompt"
                " (parser.get_format_str()), or use a parser of the format that the model writes",
            ),
            "unscored": (
                self.rollouts,
                "rollouts have no known reward"
                + (f": {ErrorInfo.of(self.error).text}" if self.error is not None else ""),
            ),
        }
        if self.unparsed <= self.truncated:  # a reply that was cut lacks its end
            del rules["unparsed"]
        return {
            kind: f"{count} of {total} {sentence}"
            for kind, (total, sentence) in rules.items()
            if (count := getattr(self, kind)) and count >= MOST * total
        }


def counts_of(
    completion: object,
    *,
    error: object,
    reward: object,
    is_truncated: object,
    is_unparsed: object,
    tool_defs: Sequence[Mapping[str, object]] | None,
    tool_errors: Sequence[str],
    failed_requests: Mapping[str, int],
    attempts: float | None,
) -> dict[str, int]:
    """What ``Coverage`` counts of a finished rollout, running or saved: the counts that are not 0.

    Of a rollout that an error ended before it had a completion only the requests are counted.
    """
    messages = completion if isinstance(completion, list) else []
    replies = [message for message in messages if field(message, "role") == "assistant"]
    num_replies = len(replies) if messages else int(bool(completion))
    failed = {kind: failed_requests.get(kind, 0) for kind in FAILED_REQUESTS}
    counts = failed | {
        "requests": num_replies + sum(failed.values()),
        "begun_again": int(max(0.0, again)) if (again := number(attempts) - 1) == again else 0,
    }
    if error is None or completion:
        calls = [field(message, "tool_calls") for message in messages]
        num_calls = sum(len(of_message) for of_message in calls if isinstance(of_message, list))
        counts |= {
            "rollouts": 1,
            "truncated": int(bool(is_truncated)),
            "parsed": int(is_unparsed is not None),
            "unparsed": int(is_unparsed is True),
            "unscored": int(error is not None and math.isnan(number(reward))),
        }
        if tool_defs:
            counts |= {
                "with_tools": 1,
                "tool_calls": num_calls,
                "tool_errors": len(tool_errors),
                "without_calls": int(not num_calls),
            }
            if not num_calls:
                names = map(defined_name, tool_defs)
                counts["calls_as_text"] = int(looks_like_call(messages, names))
    return {name: count for name, count in counts.items() if count}


def looks_like_call(messages: Iterable[object], tools: Iterable[str]) -> bool:
    """Whether a reply has the text of a call, in a common format or of one of these tools.

    >>> looks_like_call([{"role": "assistant", "content": "I run `add(a=1, b=2)`."}], ["add"])
    True
    """
    names = "|".join(map(re.escape, tools))
    marks = "|".join(map(re.escape, CALL_MARKS))
    of_tools = rf'|"name"\s*:\s*"(?:{names})"|\b(?:{names})\(' if names else ""
    pattern = re.compile(marks + of_tools)
    return any(
        field(message, "role") == "assistant" and pattern.search(message_text(message)) is not None
        for message in messages
    )


def counts_in_metrics(lines: Iterable[Mapping[str, object]]) -> dict[str, int]:
    """The counts of a training: sums over the lines of ``metrics.jsonl``."""
    counts = dict.fromkeys(IN_METRICS, 0)
    for line in lines:
        for name, metric in IN_METRICS.items():
            if isinstance(value := line.get(metric), int | float) and math.isfinite(value):
                counts[name] += int(value)
    return counts | {"groups": counts["equal_groups"] + counts.pop("different_groups")}


def coverage_lines(
    counts: Mapping[str, object] | None, max_tokens: object = None
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
        parsed = counts.get("parsed") or total
        yield "unparsed", f"the parser found nothing in {counts['unparsed']} of {parsed}"
    if counts.get("tool_errors"):
        yield "tool errors", f"{counts['tool_errors']} of {counts['tool_calls']} calls failed"
    failed = [
        f"{counts[kind]:,} {text}" for kind, text in FAILED_REQUESTS.items() if counts.get(kind)
    ]
    if failed:
        yield "requests", f"{counts['requests']:,}, of which {', '.join(failed)}"
    if counts.get("begun_again"):
        yield "begun again", f"{counts['begun_again']} × a rollout that an error had ended"
    with_tools = counts.get("with_tools") or total
    if total and counts.get("without_calls") == with_tools:
        text = counts["calls_as_text"]
        as_text = f"; {text} of {with_tools} have calls as text" if text else ""
        yield "tools", f"never called{as_text}"
    if (groups := counts.get("groups")) and counts.get("equal_groups") == groups:
        yield "groups", f"equal rewards in each of {groups}: there is nothing to learn from them"
