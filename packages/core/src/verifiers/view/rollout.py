"""Convert one rollout for display: its messages in order, the numbers of each model turn, and its
scores.

Returns plain JSON values without markup. Only ``data:`` URLs of raster formats, and references to
images beside the rows, are passed on as images; any other address stays text, so that viewing a
rollout sends no request to other hosts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NotRequired, TypedDict

from verifiers.data.media import properly_named
from verifiers.data.messages import field, message_text
from verifiers.data.text import split_reasoning
from verifiers.results.rows import ALWAYS, DISK_FIELDS, FIELDS, RolloutOutput, json_ready
from verifiers.results.texts import ended_by
from verifiers.rollouts.declaration import EMPTY
from verifiers.rollouts.values import reported
from verifiers.storage.images import stored_name

IMAGE = re.compile(r"data:image/(?:png|jpeg|gif|webp|avif|bmp);base64,[A-Za-z0-9+/=\s]*")
"""URLs that are displayed as images."""
Pieces = Callable[[Sequence[int]], list[str]]
"""Token ids -> the text of each."""
PREVIEW_CHARS = 240
CONVERTED = frozenset(
    "prompt completion metrics tool_defs token_usage is_truncated is_completed".split()
)
"""Fields of a saved rollout that the page has under other names."""
PLACED = frozenset(
    "example_id task answer info reward advantage error stop_condition timing".split()
)
"""Those that have a place of their own on the page; any other is listed below them, where it says
something."""
SOMETIMES_SAVED = ("sibling", "attempts", "group", "trained", "excluded")
_OF_TRAINED_TURNS: tuple[
    Literal["policy_logprobs", "old_logprobs", "mask", "advantage", "weight", "reward"], ...
] = ("policy_logprobs", "old_logprobs", "mask", "advantage", "weight", "reward")
MAIN_ROLES = (None, "main")
"""Roles of the turns of an agent's own conversation."""


class Part(TypedDict):
    """A content part of a message: ``text`` of a text, and of the ``address`` of an image that is not
    displayed; ``url`` of an ``image``; ``value`` of any ``other``."""

    type: str
    text: NotRequired[str]
    url: NotRequired[str]
    value: NotRequired[object]


class Call(TypedDict):
    """A tool call."""

    id: object
    name: str
    arguments: object


class PageMessage(TypedDict):
    """A message; ``section``: "prompt" or "completion"."""

    role: str
    section: str
    parts: list[Part]
    reasoning: NotRequired[str]
    calls: NotRequired[list[Call]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    step: NotRequired[int]
    """The index of the turn that sampled it."""


class Step(TypedDict):
    """The numbers of a model turn; ``logprobs`` in nats, one per sampled token. Of the turn of a
    trained rollout a single number where all tokens share it."""

    truncated: bool
    text: str
    reward: NotRequired[object]
    role: NotRequired[str]
    prompt_tokens: NotRequired[object]
    completion_tokens: NotRequired[int]
    ids: NotRequired[list[int]]
    logprobs: NotRequired[list[float]]
    pieces: NotRequired[list[str]]
    policy_version: NotRequired[object]
    policy_logprobs: NotRequired[object]
    old_logprobs: NotRequired[object]
    mask: NotRequired[object]
    advantage: NotRequired[object]
    weight: NotRequired[object]
    model_ms: NotRequired[float | None]
    env_ms: NotRequired[float | None]


class Branch(TypedDict):
    """What an agent's calls hold beside its conversation: those of another role, or a history that
    it wrote anew ("rewrite")."""

    role: str
    at: int
    """The index of the message before which it is shown."""
    messages: list[PageMessage]
    """Those that no earlier call of the branch, and no main call before it, has."""


class Score(TypedDict):
    """A metric; for a reward function also its weight and its part of the reward."""

    name: str
    value: float
    weight: float | None
    part: float | None


class Page(TypedDict):
    """A rollout for display."""

    example_id: object
    task: object
    answer: object
    info: object
    reward: float
    advantage: object
    error: dict[str, object] | None
    stop_condition: str | None
    timing: object
    sibling: object
    attempts: object
    group: object
    trained: object
    excluded: object
    ended_by: str | None
    messages: list[PageMessage]
    steps: list[Step]
    scores: list[Score]
    is_truncated: bool
    usage: dict[str, int]
    tools: object
    agent: dict[str, object] | None
    branches: list[Branch]
    more: dict[str, object]
    row: NotRequired[int]


class Preview(TypedDict):
    """A rollout in a table: the prompt's last user message, the last reply, the right answer."""

    question: str
    reply: str
    answer: str


def page(row: RolloutOutput, weights: Mapping[str, float], pieces: Pieces | None = None) -> Page:
    """The content of the rollout's page. ``weights``: of the reward functions; ``pieces``: decodes
    single tokens."""
    trajectory = [step for step in row.get("trajectory") or [] if isinstance(step, Mapping)]
    steps = [_step(step, pieces) for step in trajectory]
    _set_times(steps, trajectory)
    steps += [
        _trained_turn(turn) for turn in row.get("turn_tokens") or [] if isinstance(turn, Mapping)
    ]
    messages = _messages(row["prompt"], "prompt") + _messages(row["completion"], "completion")
    agent = _agent(row)
    main = [n for n, step in enumerate(steps) if agent is None or step.get("role") in MAIN_ROLES]
    _assign(messages, steps, main)
    metrics: Mapping[str, float] = row["metrics"]
    apart = ["group", "trained", "excluded", *(("agent", "files") if agent else ())]
    unshown = ("trajectory", "turn_tokens", "crc32", "write_part")
    columns = {*CONVERTED, *PLACED, *DISK_FIELDS, *metrics, *apart, *unshown}
    content = {
        **{name: row[name] for name in ALWAYS if name not in CONVERTED},
        **{name: row.get(name) for name in SOMETIMES_SAVED},
        "ended_by": ended_by(row["stop_condition"], _num_turns(messages)),
        "messages": messages,
        "steps": steps,
        "scores": [_score(name, value, weights) for name, value in metrics.items()],
        "is_truncated": bool(row["is_truncated"]),
        "usage": reported(row["token_usage"]),
        "tools": row["tool_defs"],
        "agent": agent,
        "branches": [] if agent is None else _branches(trajectory, steps, messages),
        "more": {
            name: value
            for name, value in row.items()
            if name not in columns and (name not in FIELDS or value not in EMPTY)
        },
    }
    ready: Page = json_ready(content)
    return ready


def _num_turns(messages: Sequence[PageMessage]) -> int:
    ends = [m for m in messages if (m["section"], m["role"]) == ("completion", "assistant")]
    return len(ends)


def _agent(row: RolloutOutput) -> dict[str, object] | None:
    """The agent program of the rollout (``AgentEnv``) with its log and files; None without an
    agent."""
    agent = row.get("agent")
    if not isinstance(agent, Mapping) or "ended" not in agent:
        return None
    files = row.get("files")
    return {**agent, "files": dict(files) if isinstance(files, Mapping) else {}}


def preview(
    prompt: Sequence[object] | str | None,
    completion: Sequence[object] | str | None,
    answer: object = None,
) -> Preview:
    """The preview of a rollout."""
    right = "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer)
    return {
        "question": _last(prompt, "user"),
        "reply": _last(completion, "assistant"),
        "answer": _line(right),
    }


def _last(messages: Sequence[object] | str | None, role: str) -> str:
    """One line of the last message of ``role`` that has text or tool calls."""
    if isinstance(messages, str):
        return _line(messages)
    for message in reversed(messages or []):
        if field(message, "role") == role:
            if text := _line(split_reasoning(message_text(message)[: 40 * PREVIEW_CHARS])[1]):
                return text
            if calls := field(message, "tool_calls"):
                return _line(" ".join(_call_text(call) for call in calls))
    return ""


def _call_text(call: object) -> str:
    function = field(call, "function") or call
    return f"{field(function, 'name')}({field(function, 'arguments') or ''})"


def _line(text: str) -> str:
    return " ".join(text[: 8 * PREVIEW_CHARS].split())[:PREVIEW_CHARS]


def _score(name: str, value: float, weights: Mapping[str, float]) -> Score:
    weight = weights.get(name)
    part = None if weight is None else weight * value
    return {"name": name, "value": value, "weight": weight, "part": part}


def _messages(messages: Sequence[object] | str | None, section: str) -> list[PageMessage]:
    if isinstance(messages, str):
        role = "assistant" if section == "completion" else "text"
        if messages:
            return [
                {"role": role, "section": section, "parts": [{"type": "text", "text": messages}]}
            ]
        return []
    return [_message(message, section) for message in messages or []]


def _message(message: object, section: str) -> PageMessage:
    parts = field(message, "content")
    if not isinstance(parts, list):
        parts = [] if parts in (None, "") else [parts]
    content: PageMessage = {
        "role": str(field(message, "role") or "?"),
        "section": section,
        "parts": list(map(_part, parts)),
    }
    blocks = field(message, "thinking_blocks")
    texts = [field(block, "thinking") for block in blocks] if isinstance(blocks, list) else []
    thinking = "\n\n".join(text for text in texts if isinstance(text, str))
    if reasoning := field(message, "reasoning_content") or thinking:
        content["reasoning"] = str(reasoning)
    if calls := field(message, "tool_calls"):
        content["calls"] = [_call(call) for call in calls]
    if call_id := field(message, "tool_call_id"):
        content["tool_call_id"] = str(call_id)
    if name := field(message, "name"):
        content["name"] = str(name)
    return content


def _call(call: object) -> Call:
    function = field(call, "function") or call
    name, arguments = str(field(function, "name") or ""), field(function, "arguments")
    return {"id": field(call, "id"), "name": name, "arguments": arguments}


def _part(part: object) -> Part:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = field(part, "type")
    if kind == "text" and isinstance(field(part, "text"), str):
        return {"type": "text", "text": field(part, "text")}
    if kind == "image_url":
        address = field(properly_named(part), "image_url")
        url = address if isinstance(address, str) else field(address, "url")
        if isinstance(url, str) and (IMAGE.fullmatch(url) or stored_name(url)):
            return {"type": "image", "url": url}
        return {"type": "address", "text": str(url)}
    return {"type": "other", "value": json_ready(part)}


def stored_images(content: Page) -> Iterator[Part]:
    """The parts of a page's messages that refer to images beside the rows."""
    branches = (branch["messages"] for branch in content["branches"])
    for message in chain(content["messages"], *branches):
        for part in message["parts"]:
            if part["type"] == "image" and stored_name(part["url"]):
                yield part


def _step(step: Mapping[str, Any], pieces: Pieces | None) -> Step:
    numbers: Step = {
        "truncated": bool(step.get("is_truncated")),
        "reward": step.get("reward"),
        "text": _step_text(step.get("completion")),
    }
    if role := field(step.get("extras") or {}, "role"):
        numbers["role"] = str(role)
    tokens = step.get("tokens")
    if isinstance(tokens, Mapping):
        prompt_ids, ids = tokens.get("prompt_ids") or (), tokens.get("completion_ids") or ()
        numbers["prompt_tokens"], numbers["completion_tokens"] = len(prompt_ids), len(ids)
        numbers["ids"] = list(ids)
        numbers["logprobs"] = list(tokens.get("completion_logprobs") or ())
        numbers["policy_version"] = tokens.get("version")
        if pieces is not None and ids:
            numbers["pieces"] = pieces(ids)
    sampled = field(step.get("extras") or {}, "logprobs")
    if isinstance(sampled, Mapping) and "pieces" not in numbers:
        texts, logprobs = sampled.get("texts") or (), sampled.get("logprobs") or ()
        numbers["pieces"], numbers["logprobs"] = list(texts), list(logprobs)
        numbers["completion_tokens"] = len(texts)
    return numbers


def _trained_turn(turn: Mapping[str, Any]) -> Step:
    """The numbers of a turn of a trained rollout (``turn_tokens``)."""
    ids, texts = turn.get("completion_ids") or (), turn.get("texts") or ()
    numbers: Step = {
        "truncated": False,
        "text": "".join(map(str, texts)),
        "prompt_tokens": turn.get("prompt_tokens"),
        "completion_tokens": len(ids),
        "ids": list(ids),
        "pieces": list(texts),
        "logprobs": list(turn.get("completion_logprobs") or ()),
        "policy_version": turn.get("version"),
    }
    for name in _OF_TRAINED_TURNS:
        if name in turn:
            numbers[name] = turn[name]
    return numbers


def _step_text(completion: Sequence[object] | str | None) -> str:
    if isinstance(completion, str):
        return completion
    return message_text(completion[0]) if completion else ""


def _set_times(steps: Sequence[Step], trajectory: Sequence[Mapping[str, object]]) -> None:
    """Set the milliseconds of each turn alone; a saved turn has those since the rollout began."""
    before: Mapping[str, object] = {}
    for step, saved in zip(steps, trajectory, strict=True):
        timing = saved.get("timing")
        if isinstance(timing, Mapping):
            step["model_ms"] = _elapsed(before.get("model_ms"), timing.get("model_ms"))
            step["env_ms"] = _elapsed(before.get("env_ms"), timing.get("env_ms"))
            before = timing


def _elapsed(before: object, now: object) -> float | None:
    if not isinstance(now, int | float):
        return None
    return now - before if isinstance(before, int | float) else now


def _assign(messages: list[PageMessage], steps: list[Step], numbers: list[int]) -> None:
    """Set the turn's index on each sampled message, of the turns ``numbers``; a turn whose message
    was changed later matches none."""
    sampled = [m for m in messages if m["section"] == "completion" and m["role"] == "assistant"]
    if len(sampled) == len(numbers):
        for number, message in zip(numbers, sampled, strict=True):
            message["step"] = number
        return
    for message in sampled:
        text = "\n".join(part["text"] for part in message["parts"] if part["type"] == "text")
        for index, number in enumerate(numbers):
            if steps[number]["text"] == text:
                message["step"], numbers = number, numbers[index + 1 :]
                break


def _branches(
    trajectory: list[Mapping[str, Any]], steps: list[Step], messages: list[PageMessage]
) -> list[Branch]:
    """The branches of an agent's conversation, in their order."""
    index_of_step = {
        message["step"]: index for index, message in enumerate(messages) if "step" in message
    }
    at = sum(message["section"] == "prompt" for message in messages)
    main: list[object] = []
    branches: list[Branch] = []
    open_branches: list[tuple[list[object], Branch]] = []
    """The conversation so far, and its branch, of each that a later call may continue."""
    for number, (step, numbers) in enumerate(zip(trajectory, steps, strict=False)):
        role = numbers.get("role") or "main"
        prompt, completion = list(step.get("prompt") or ()), list(step.get("completion") or ())
        if role == "main":
            at = index_of_step.get(number, at)
            if main and not _num_shared(main, prompt):
                history = _messages(prompt, "prompt")
                branches.append({"role": "rewrite", "at": at, "messages": history})
            at += 1
            main = [*prompt, *completion]
            continue
        continued = (each for each in reversed(open_branches) if _num_shared(each[0], prompt))
        new: Branch = {"role": role, "at": at, "messages": []}
        seen, branch = next(continued, (main, new))
        if branch is new:  # interleaved conversations are branches of their own
            branches.append(new)
        else:
            open_branches = [each for each in open_branches if each[1] is not branch]
        branch["messages"] += _messages(prompt[_num_shared(seen, prompt) :], "prompt")
        reply = _messages(completion, "completion")
        branch["messages"] += [{**message, "step": number} for message in reply]
        open_branches.append(([*prompt, *completion], branch))
    return branches


def _num_shared(seen: Sequence[object], prompt: Sequence[object]) -> int:
    """How many messages of a conversation begin the prompt: all of them, or none."""
    return len(seen) if prompt[: len(seen)] == seen else 0
