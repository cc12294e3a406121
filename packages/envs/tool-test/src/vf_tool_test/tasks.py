"""Tasks (sets of requested calls) and the score of a model's calls. Pure functions.

A call is a dict ``{"name": …, "arguments": {…}}``.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verifiers.errors import ConfigError
from vf_tool_test.tools import TOOLS, draw_arguments

MAX_MISSES = 1000
"""Consecutive repeated tasks after which the settings are considered exhausted."""


def generate_tasks(
    count: int, min_calls: int, max_calls: int, seed: int
) -> list[dict[str, object]]:
    """``count`` rows with different sets of calls: ``question``, ``answer`` (the calls as JSON) and
    ``info["calls"]``.

    *Raises* ConfigError when the settings allow fewer.
    """
    rng = random.Random(f"tool-test/{min_calls}/{max_calls}/{seed}")
    rows: dict[str, dict[str, Any]] = {}
    misses = 0
    while len(rows) < count:
        calls = _draw_calls(rng.randint(min_calls, max_calls), rng)
        key = "\n".join(sorted(map(call_key, calls)))
        misses = misses + 1 if key in rows else 0
        rows.setdefault(
            key, {"question": ask(calls), "answer": json.dumps(calls), "info": {"calls": calls}}
        )
        if misses > MAX_MISSES:
            raise ConfigError(
                f"{count} examples are more than the {len(rows)} different tasks of these settings"
            )
    return list(rows.values())


def _draw_calls(count: int, rng: random.Random) -> list[dict[str, object]]:
    """Distinct calls; a tool may occur more than once."""
    calls: dict[str, dict[str, Any]] = {}
    while len(calls) < count:
        name = rng.choice(TOOLS).__name__
        call = {"name": name, "arguments": draw_arguments(name, rng)}
        calls.setdefault(call_key(call), call)
    return list(calls.values())


def ask(calls: Sequence[Mapping[str, Any]]) -> str:
    """The user message of a task.

    >>> print(ask([{"name": "add", "arguments": {"a": 1, "b": 2}}]))
    Make exactly this tool call:
    1. add with a = 1, b = 2
    """
    lines = [
        f"{number}. {call['name']} with "
        + ", ".join(f"{name} = {json.dumps(value)}" for name, value in call["arguments"].items())
        for number, call in enumerate(calls, 1)
    ]
    head = (
        "Make exactly this tool call:"
        if len(calls) == 1
        else "Make exactly these tool calls, all in one message:"
    )
    return "\n".join([head, *lines])


def call_key(call: Mapping[str, object]) -> str:
    """Identity of a call: the tool and the JSON values of the arguments; 3 and 3.0 are equal.

    >>> call_key({"name": "add", "arguments": {"b": 2.0, "a": 1}})
    'add {"a": 1, "b": 2}'
    """
    return f"{call['name']} {json.dumps(_plain(call['arguments']), sort_keys=True)}"


def _plain(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _plain(member) for name, member in value.items()}
    return [_plain(member) for member in value] if isinstance(value, list) else value


def read_call(tool_call: Mapping[str, Any]) -> str | None:
    """The key of a model's call; None when its arguments are not a JSON object."""
    function = tool_call.get("function") or tool_call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return None
    if isinstance(arguments, dict):
        return call_key({"name": function["name"], "arguments": arguments})
    return None


def share_right(requested: Iterable[Mapping[str, object]], actual: Sequence[str | None]) -> float:
    """Number of matching calls over the larger of requested and actual calls, so that surplus calls
    lower the score.

    >>> share_right([{"name": "f", "arguments": {}}], ["f {}", None])
    0.5
    """
    expected: Counter[str | None] = Counter(map(call_key, requested))
    observed = Counter(actual)
    return (expected & observed).total() / max(expected.total(), observed.total())
