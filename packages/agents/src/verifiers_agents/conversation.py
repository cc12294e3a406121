"""What one rollout of an agent has said so far: which calls continue which, and in which role.

Agents write the history of each call anew. They serialise tool arguments again, drop reasoning,
move marks for caches and strip spaces; the model's tokens are still those that it sampled.
``Conversation.restored`` therefore replaces each message of a prompt that means the same as a known
message, after a prefix that means the same, by the known message. A message that the agent really
changed stays as the agent wrote it, and so does everything after it.

Roles say what a call was for: ``main`` (the agent's own conversation), ``subagent`` (another
conversation, whose result the main conversation reads), ``summary`` (what the main conversation is
replaced by) and ``side`` (a title, a topic: no tools). They are known when the rollout is over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verifiers.data.messages import canonical_arguments, message_text
from verifiers.types import Message

Role = Literal["main", "subagent", "summary", "side"]
ROLES: tuple[Role, ...] = ("main", "subagent", "summary", "side")
MIN_QUOTED = 12
"""Characters that a completion must have to be recognised where another conversation quotes it."""


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """A finished call."""

    prompt: Sequence[Message]
    answer: Message
    tools: frozenset[str]
    """Names of the tools that were offered."""
    continues: int | None
    """The latest call whose prompt and answer begin this prompt."""


class Conversation:
    """The calls of a rollout in order.

    >>> conversation = Conversation()
    >>> call = vf.ToolCall("c1", "add", '{"a":1,"b":2}')
    >>> conversation.add([vf.UserMessage("1 + 2?")], vf.AssistantMessage(None, [call]), ["add"])
    >>> again = vf.AssistantMessage(None, [vf.ToolCall("c1", "add", '{"b": 2, "a": 1}')])
    >>> conversation.restored([vf.UserMessage("1 + 2?"), again])[1].tool_calls[0].arguments
    '{"a":1,"b":2}'
    """

    def __init__(self) -> None:
        self.calls: list[FinishedCall] = []
        self._messages: dict[str, Message] = {}
        self._ends: dict[str, int] = {}

    def restored(self, messages: Sequence[Message]) -> list[Message]:
        """The prompt with every message that is known, in the words in which it is known."""
        restored, digest, is_known = list(messages), "", True
        for index, message in enumerate(messages):
            digest = _digest(digest, message)
            is_known = is_known and digest in self._messages
            if is_known:
                restored[index] = self._messages[digest]
        return restored

    def add(
        self,
        prompt: Sequence[Message],
        answer: Message,
        tools: Iterable[str] = (),
        echo: Message | None = None,
    ) -> None:
        """Add a call. ``echo``: the answer as the agent's dialect gives it back, where that differs
        in meaning."""
        digest, continues = "", None
        for message in prompt:
            digest = _digest(digest, message)
            self._messages.setdefault(digest, message)
            continues = self._ends.get(digest, continues)
        for written in (answer, answer if echo is None else echo):
            end = _digest(digest, written)
            self._messages[end] = answer
            self._ends[end] = len(self.calls)
        self.calls.append(FinishedCall(prompt, answer, frozenset(tools), continues))

    @property
    def num_rewrites(self) -> int:
        """How often the agent rewrote its main conversation, or dropped a reply of it, so that later
        calls do not continue its newest call."""
        roles = self.roles()
        main = [number for number, role in enumerate(roles) if role == "main"]
        continued = [self.calls[number].continues for number in main[1:]]
        return sum(before != now for before, now in zip(main, continued, strict=False))

    def roles(self) -> list[Role]:
        """The role of each call so far."""
        threads = self._threads()
        first = next((t for t in threads if self.calls[t[0]].tools), threads[0] if threads else [])
        roles: list[Role] = ["side"] * len(self.calls)
        if not first:
            return roles
        main = self.calls[first[0]]
        system = _instructions(main.prompt)
        for thread in threads:
            start = self.calls[thread[0]]
            if thread is first:
                role: Role = "main"
            elif main.tools and not start.tools:
                role = "side"
            elif thread[0] > first[-1] and _instructions(start.prompt) == system:
                role = "main"  # the agent rewrote its history and went on
            else:
                role = "subagent" if main.tools else "main"
            for number in thread:
                roles[number] = role
        for number in range(len(self.calls)):
            if self._is_summary(number, roles):
                roles[number] = "summary"
        return roles

    def _threads(self) -> list[list[int]]:
        """Numbers of the calls of each conversation; a second continuation of a call is a thread
        of its own."""
        threads: list[list[int]] = []
        for number, call in enumerate(self.calls):
            for thread in threads:
                if call.continues is not None and thread[-1] == call.continues:
                    thread.append(number)
                    break
            else:
                threads.append([number])
        return threads

    def _is_summary(self, number: int, roles: Sequence[Role]) -> bool:
        """Whether a later start of the main conversation quotes this answer, instead of continuing
        it."""
        answer = message_text(self.calls[number].answer).strip()
        if len(answer) < MIN_QUOTED or any(call.continues == number for call in self.calls):
            return False
        later = zip(self.calls[number + 1 :], roles[number + 1 :], strict=True)
        starts = (call for call, role in later if role == "main" and call.continues is None)
        return any(answer in message_text(message) for call in starts for message in call.prompt)


def _instructions(prompt: Sequence[Message]) -> str:
    """The system messages at the start of a prompt."""
    texts = []
    for message in prompt:
        if message.get("role") != "system":
            break
        texts.append(message_text(message))
    return "\n".join(texts)


def _digest(before: str, message: Mapping[str, Any]) -> str:
    """A digest of a conversation up to this message, equal for what means the same."""
    role = message.get("role")
    text = message_text(message)
    content = message.get("content")
    # of a text these would be its characters
    parts = content if isinstance(content, list | tuple) else ()
    attachments = [
        part for part in parts if isinstance(part, Mapping) and part.get("type") != "text"
    ]
    fields = [
        before,
        role,
        text.strip() if role == "assistant" else text,
        [
            {name: value for name, value in part.items() if name != "cache_control"}
            for part in attachments
        ],
        message.get("tool_call_id"),
        [_call(call) for call in message.get("tool_calls") or ()],
    ]
    return hashlib.blake2b(
        json.dumps(fields, default=str, sort_keys=True).encode(), digest_size=16
    ).hexdigest()


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or call
    return [call.get("id"), function.get("name"), canonical_arguments(function.get("arguments"))]
