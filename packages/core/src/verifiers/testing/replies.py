"""The next reply of a scripted model, from any accepted type of script.

A reply is text, an assistant message, one tool call or a list of them, a `Response`, or an
exception (raised). Replies come as one text, a list (in order, cycled unless ``strict``), a mapping
from the last user text to a reply (``"*"`` for any other text), or a function of the request, which
may be async.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers.data.messages import last_text
from verifiers.errors import ConfigError
from verifiers.types import Message, ModelRequest, Response, ToolCall


class Replies:
    """The replies of a script in turn."""

    def __init__(self, replies: object, strict: bool = False):
        if not isinstance(replies, str | Mapping | Sequence) and not callable(replies):
            raise ConfigError(
                "replies must be text, a list, a mapping or a function, not"
                f" {type(replies).__name__}"
            )
        if isinstance(replies, Sequence) and not replies and not isinstance(replies, str):
            raise ConfigError("replies must not be empty")
        self._replies = replies
        self._strict = strict
        self._turn = itertools.count()

    async def next(self, request: ModelRequest) -> object:
        """The reply to this request. Raises: ``ConfigError`` when the script has none."""
        replies = self._replies
        if isinstance(replies, str):
            return replies
        if isinstance(replies, Mapping):
            text = last_user_text(request)
            if text not in replies and "*" not in replies:
                raise ConfigError(f"the script has no reply to {text!r} and no '*'")
            return replies.get(text, replies.get("*"))
        if isinstance(replies, Sequence):
            turn = next(self._turn)
            if self._strict and turn >= len(replies):
                raise ConfigError(
                    f"the script has {len(replies)} replies, and this is request {turn + 1}"
                )
            return replies[turn % len(replies)]
        reply = replies(request)
        return await reply if inspect.isawaitable(reply) else reply


def last_user_text(request: ModelRequest) -> str:
    """The text of the last user message, or the prompt in completion mode; "" without any."""
    return last_text(request.prompt, "user") or ""


def to_message(reply: object) -> tuple[Message, str]:
    """(assistant message, finish reason) of a reply that is no `Response` and no exception."""
    if isinstance(reply, str):
        return Message(role="assistant", content=reply), "stop"
    if isinstance(reply, ToolCall) or (isinstance(reply, Mapping) and "function" in reply):
        reply = [reply]
    if isinstance(reply, Mapping):
        fields = {"role": "assistant", "content": None, **reply}
        has_calls = bool(fields.get("tool_calls"))
        reason = fields.pop("finish_reason", None) or ("tool_calls" if has_calls else "stop")
        if fields["content"] is None and not has_calls:
            fields["content"] = ""
        return Message(fields), reason
    if isinstance(reply, Sequence):
        calls = [ToolCall.from_wire(call) for call in reply]
        return Message(role="assistant", content=None, tool_calls=calls), "tool_calls"
    raise ConfigError(
        f"a reply must be text, a message, tool calls, a Response or an exception, not {reply!r}"
    )


def as_error(reply: object) -> BaseException | None:
    """The exception a reply stands for, or None."""
    if isinstance(reply, type) and issubclass(reply, BaseException):
        return reply()
    return reply if isinstance(reply, BaseException) else None


ErrorScript = Mapping[int, Any] | Callable[[ModelRequest], Any] | None


def scripted_error(
    errors: ErrorScript, call_number: int, request: ModelRequest
) -> BaseException | None:
    """The exception that a script of errors holds for this call (0 is the first), or None."""
    if errors is None:
        return None
    return as_error(errors.get(call_number) if isinstance(errors, Mapping) else errors(request))


def response_of(reply: object, request: ModelRequest, call_number: int) -> Response:
    """The `Response` of a reply, without tokens."""
    if isinstance(reply, Response):
        return reply
    message, reason = to_message(reply)
    return Response(message, reason, model=request.model, id=f"scripted-{call_number}")
