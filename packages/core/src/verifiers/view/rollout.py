"""One rollout as the page shows it: its messages in order, each model turn with its numbers, and how it was scored.

Everything is plain JSON values; nothing here is markup. An image is passed on only as a ``data:`` URL of a raster
format, as it stands in the message; any other address stays text, so that reading a rollout calls nobody.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers.data.messages import field, message_text
from verifiers.results.rows import DISK_FIELDS, FIELDS, RolloutOutput, json_ready

IMAGE = re.compile(r"data:image/(?:png|jpeg|gif|webp|avif|bmp);base64,[A-Za-z0-9+/=\s]*")
"""What is shown as an image."""
Pieces = Callable[[Sequence[int]], list[str]]
"""Token ids -> the text of each."""
PREVIEW_CHARS = 240
_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)


def page(row: RolloutOutput, weights: Mapping[str, float], pieces: Pieces | None = None) -> dict[str, Any]:
    """The rollout's page. ``weights``: of the reward functions; ``pieces`` gives tokens their texts."""
    steps = [_step(step, pieces) for step in row.get("trajectory") or [] if isinstance(step, Mapping)]
    _spend(steps)
    messages = _messages(row["prompt"], "prompt") + _messages(row["completion"], "completion")
    _assign(messages, steps)
    metrics = {name: value for name, value in row["metrics"].items()}
    shown = {*FIELDS, *DISK_FIELDS, *metrics, "trajectory", "crc32", "write_part"}
    made = {
        "example_id": row["example_id"],
        "sibling": row.get("sibling"),
        "attempts": row.get("attempts"),
        "task": row["task"],
        "answer": row["answer"],
        "info": row["info"],
        "messages": messages,
        "steps": steps,
        "reward": row["reward"],
        "advantage": row["advantage"],
        "scores": [_score(name, value, weights) for name, value in metrics.items()],
        "error": row["error"],
        "stop_condition": row["stop_condition"],
        "is_truncated": bool(row["is_truncated"]),
        "timing": row["timing"],
        "usage": row["token_usage"],
        "tools": row["tool_defs"],
        "more": {name: value for name, value in row.items() if name not in shown},
    }
    ready: dict[str, Any] = json_ready(made)
    return ready


def preview(prompt: object, completion: object) -> dict[str, str]:
    """The line of a rollout in a table: its newest question before it began, and its last reply."""
    return {"question": _last(prompt, "user"), "reply": _last(completion, "assistant")}


def _last(messages: Any, role: str) -> str:
    """A line of the newest message of a role that has text."""
    if isinstance(messages, str):
        return _line(messages)
    for message in reversed(messages or []):
        if field(message, "role") == role:
            if text := _line(_THOUGHT.sub("", message_text(message)[: 40 * PREVIEW_CHARS], count=1)):
                return text
            if calls := field(message, "tool_calls"):
                return _line(" ".join(_call_text(call) for call in calls))
    return ""


def _call_text(call: object) -> str:
    function = field(call, "function") or call
    return f"{field(function, 'name')}({field(function, 'arguments') or ''})"


def _line(text: str) -> str:
    return " ".join(text[: 8 * PREVIEW_CHARS].split())[:PREVIEW_CHARS]


def _score(name: str, value: float, weights: Mapping[str, float]) -> dict[str, Any]:
    """A metric; where it is a reward function, also its weight and its part of the reward."""
    weight = weights.get(name)
    return {"name": name, "value": value, "weight": weight, "part": None if weight is None else weight * value}


def _messages(messages: Any, place: str) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        role = "assistant" if place == "completion" else "text"
        return [{"role": role, "place": place, "parts": [{"type": "text", "text": messages}]}] if messages else []
    return [_message(message, place) for message in messages or []]


def _message(message: object, place: str) -> dict[str, Any]:
    made: dict[str, Any] = {"role": str(field(message, "role") or "?"), "place": place}
    made["parts"] = _parts(field(message, "content"))
    if thought := field(message, "reasoning_content") or _thinking(field(message, "thinking_blocks")):
        made["reasoning"] = str(thought)
    if calls := field(message, "tool_calls"):
        made["calls"] = [_call(call) for call in calls]
    for name in ("tool_call_id", "name"):
        if given := field(message, name):
            made[name] = str(given)
    return made


def _call(call: object) -> dict[str, Any]:
    function = field(call, "function") or call
    arguments = field(function, "arguments")
    return {"id": field(call, "id"), "name": str(field(function, "name") or ""), "arguments": arguments}


def _thinking(blocks: object) -> str:
    if not isinstance(blocks, list):
        return ""
    texts = (field(block, "thinking") for block in blocks)
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _parts(content: object) -> list[dict[str, Any]]:
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_part(part) for part in (content if isinstance(content, list) else [content])]


def _part(part: object) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = field(part, "type")
    if kind == "text" and isinstance(field(part, "text"), str):
        return {"type": "text", "text": field(part, "text")}
    if kind == "image_url":
        address = field(part, "image_url")
        url = address if isinstance(address, str) else field(address, "url")
        if isinstance(url, str) and IMAGE.fullmatch(url):
            return {"type": "image", "url": url}
        return {"type": "address", "text": str(url)}
    return {"type": "other", "value": json_ready(part)}


def _step(step: Mapping[str, Any], pieces: Pieces | None) -> dict[str, Any]:
    """The numbers of one model turn; ``logprobs`` in nats, one for each sampled token."""
    made: dict[str, Any] = {
        "truncated": bool(step.get("is_truncated")),
        "reward": step.get("reward"),
        "text": _step_text(step.get("completion")),
        "timing": step.get("timing"),
    }
    tokens = step.get("tokens")
    if isinstance(tokens, Mapping):
        prompt_ids, ids = tokens.get("prompt_ids") or (), tokens.get("completion_ids") or ()
        made |= {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(ids),
            "ids": list(ids),
            "logprobs": list(tokens.get("completion_logprobs") or ()),
            "policy_version": tokens.get("version"),
        }
        if pieces is not None and ids:
            made["pieces"] = pieces(ids)
    return made


def _step_text(completion: Any) -> str:
    if isinstance(completion, str):
        return completion
    return message_text(completion[0]) if completion else ""


def _spend(steps: list[dict[str, Any]]) -> None:
    """Milliseconds of each turn from the clock readings that the steps hold (sums since the rollout began)."""
    before: Mapping[str, Any] = {}
    for step in steps:
        timing = step.pop("timing")
        if isinstance(timing, Mapping):
            for name in ("model_ms", "env_ms"):
                now, then = timing.get(name), before.get(name, 0.0)
                step[name] = now - then if isinstance(now, int | float) else None
            before = timing


def _assign(messages: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    """Give each message that a step sampled the step's number; a step whose message was changed later has none."""
    sampled = [m for m in messages if m["place"] == "completion" and m["role"] == "assistant"]
    if len(sampled) == len(steps):
        for number, message in enumerate(sampled):
            message["step"] = number
        return
    number = 0
    for message in sampled:
        text = "\n".join(part["text"] for part in message["parts"] if part["type"] == "text")
        for candidate in range(number, len(steps)):
            if steps[candidate]["text"] == text:
                message["step"], number = candidate, candidate + 1
                break
