"""Where two rollouts of an example part: the first difference in the order in which things happen.

A pure comparison of two finished rollouts that have their turns (``state_columns=["trajectory"]``).
Times and token counts are no difference; an error is compared by its class, since its text may
name a folder or a process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from verifiers.results.rows import encoded_output
from verifiers.rollouts.transcript import Transcript
from verifiers.runtime.terminal import escape_control

NUM_BEFORE, NUM_SHOWN = 40, 400
"""Characters of a long text that are shown before the first character that differs, and in all."""
REL_TOLERANCE = 1e-9
"""Sums in another order are equal."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What was saved, and what happens now."""

    what: str
    """``tools``, ``prompt``, ``tool result``, ``reply``, ``turns``, ``completion``, ``stop
    condition``, ``error``, ``metric`` or ``reward``."""
    saved: Any
    """JSON values; None where there was nothing."""
    now: Any
    turn: int | None = None
    """The turn, counted from 1."""
    message: int | None = None
    """The message of its prompt, or of the completion, counted from 1; None for text."""
    name: str | None = None
    """The metric, or the tool."""

    def to_json(self) -> dict[str, Any]:
        """The fields, and the sentence that names them."""
        return asdict(self) | {"sentence": self.sentence()}

    def sentence(self) -> str:
        """Where it is.

        >>> Difference("tool result", None, None, turn=2, message=4, name="add").sentence()
        "the first difference is a tool result, 'add', in message 4 of the prompt of turn 2"
        """
        where = {
            "tools": "in the tools that the model is offered",
            "turns": "in the number of turns",
            "stop condition": "in why it ended",
            "error": "in its error",
            "metric": f"in the metric {self.name!r}",
            "reward": "in the reward",
        }.get(self.what)
        if where is None:
            messages = "the completion" if self.turn is None else f"the prompt of turn {self.turn}"
            if self.what == "reply":
                messages = f"the reply of turn {self.turn}"
            where = messages if self.message is None else f"message {self.message} of {messages}"
            name = f", {self.name!r}," if self.name else ""
            where = (
                f"a tool result{name} in {where}" if self.what == "tool result" else f"in {where}"
            )
        return f"the first difference is {where}"

    def __str__(self) -> str:
        saved, now = _around(self.saved, self.now)
        return escape_control(f"{self.sentence()}\n  saved  {saved}\n  now    {now}")


def first_difference(
    saved: Mapping[str, object],
    now: Mapping[str, object],
    *,
    num_asked: int | None = None,
    unscored: Sequence[str] = (),
) -> Difference | None:
    """The first difference of two rollouts with turns, None if there is none.

    ``num_asked``: replies that the second asked for, where its last was not given;
    ``unscored``: metrics, and ``reward``, that are not compared.
    """
    before, after = _plain(saved), _plain(now)
    difference = _of_values("tools", before["tool_defs"] or [], after["tool_defs"] or [])
    if difference is not None:
        return difference
    turns = list(zip(_turns(saved), _turns(now), strict=False))
    for turn, ((prompt, reply), (prompt_now, reply_now)) in enumerate(turns, 1):
        difference = _of_messages("prompt", prompt, prompt_now, turn)
        difference = difference or _of_messages("reply", reply, reply_now, turn)
        if difference is not None:
            return difference
    num_saved, num_now = len(_turns(saved)), max(len(_turns(now)), num_asked or 0)
    if num_saved != num_now:
        return Difference("turns", num_saved, _ended(num_now, after))
    for what, key in (("completion", "completion"), ("stop condition", "stop_condition")):
        compare = _of_messages if what == "completion" else _of_values
        if (difference := compare(what, before[key], after[key])) is not None:
            return difference
    errors = before["error"] or {}, after["error"] or {}
    if errors[0].get("error") != errors[1].get("error"):
        return Difference("error", _error_text(before["error"]), _error_text(after["error"]))
    return _of_scores(saved, now, unscored)


def _plain(rollout: Mapping[str, object]) -> dict[str, Any]:
    names = ("tool_defs", "completion", "stop_condition", "error")
    return encoded_output({name: rollout.get(name) for name in names})


def _turns(rollout: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """(prompt as sent, reply) of each turn, as JSON values."""
    turns = Transcript(rollout["trajectory"]).turns
    plain = encoded_output({"turns": [[turn.prompt, turn.completion] for turn in turns]})
    return [(prompt, reply) for prompt, reply in plain["turns"]]


def _of_values(what: str, saved: object, now: object) -> Difference | None:
    return None if saved == now else Difference(what, saved, now)


def _of_messages(
    what: str, saved: object, now: object, turn: int | None = None
) -> Difference | None:
    if saved == now:
        return None
    if not isinstance(saved, list) or not isinstance(now, list):
        return Difference(what, saved, now, turn)
    for number, (message, message_now) in enumerate(zip_longest(saved, now), 1):
        if message != message_now:
            results = [
                each for each in (message, message_now) if (each or {}).get("role") == "tool"
            ]
            if not results:
                return Difference(what, message, message_now, turn, number)
            name = _tool_name(saved[: number - 1], results[0].get("tool_call_id"))
            return Difference("tool result", message, message_now, turn, number, name)
    return None


def _tool_name(messages: Sequence[Mapping[str, Any]], call_id: object) -> str | None:
    """The tool of the call that a message answers."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            if call.get("id") == call_id:
                return str(call["function"]["name"]) if "function" in call else call.get("name")
    return None


def _of_scores(
    saved: Mapping[str, Any], now: Mapping[str, Any], unscored: Sequence[str]
) -> Difference | None:
    metrics, metrics_now = saved.get("metrics") or {}, now.get("metrics") or {}
    for name in [*metrics, *(name for name in metrics_now if name not in metrics)]:
        before, after = metrics.get(name), metrics_now.get(name)
        if name not in unscored and not _is_equal(before, after):
            return Difference("metric", _number(before), _number(after), name=name)
    before, after = saved.get("reward"), now.get("reward")
    if "reward" not in unscored and not _is_equal(before, after):
        return Difference("reward", _number(before), _number(after))
    return None


def _is_equal(before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return before is after
    return math.isclose(before, after, rel_tol=REL_TOLERANCE) or (
        before != before and after != after
    )


def _number(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "unknown" if math.isnan(value) else str(value)


def _ended(num_turns: int, rollout: Mapping[str, Any]) -> str:
    """The number of turns, and why there are no more."""
    reasons = (rollout["stop_condition"], _error_text(rollout["error"]))
    return "; ".join([str(num_turns), *(reason for reason in reasons if reason)])


def _error_text(error: Mapping[str, object] | None) -> str | None:
    return None if error is None else f"{error.get('error')}: {error.get('message')}"


def _around(saved: object, now: object) -> tuple[str, str]:
    """Both values as text; of long ones what is around the first character that differs."""
    texts = [_value_text(value) for value in (saved, now)]
    if max(map(len, texts)) <= NUM_SHOWN:
        return texts[0], texts[1]
    pairs = enumerate(zip_longest(*texts))
    start = max(0, next((index for index, (x, y) in pairs if x != y), 0) - NUM_BEFORE)
    excerpts = [
        f"{'…' if start else ''}{text[start : start + NUM_SHOWN]}{'…' if text[start + NUM_SHOWN :] else ''}"
        for text in texts
    ]
    return excerpts[0], excerpts[1]


def _value_text(value: object) -> str:
    """A value for a reader: text as it is, nothing as a dash, else JSON."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
