"""Scripted models that a check plays an environment with: silence, plain text, an echo, and a well-formed answer.

They stand for what a model does before it has learned anything, and for what it should do: the last one gives the
row's ``answer`` in the format that the parser and the prompt ask for, after it has called every tool once. They need
no model, and the same request always gets the same reply.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from verifiers.data.examples import Example
from verifiers.data.messages import message_text
from verifiers.data.tool_examples import example_arguments
from verifiers.environments.base import Environment
from verifiers.parsers import ThinkParser, XMLParser
from verifiers.testing.replies import last_user_text, to_message
from verifiers.types import Messages, ModelRequest, Response, ToolCall, Usage

PLAIN_TEXT = "I do not know the answer to this."
_TAG = re.compile(r"<([A-Za-z][\w-]*)>")
_CHARS_PER_TOKEN = 4

Policy = Callable[[Environment, Example, ModelRequest], Any]


class ScriptedPolicy:
    """A ``Client`` that answers every request of one example by a policy."""

    model = "scripted"

    def __init__(self, policy: Policy, env: Environment, example: Example):
        self._policy, self._env, self._example = policy, env, example
        self._num_messages = self._num_chars = 0

    async def complete(self, request: ModelRequest) -> Response:
        """The policy's reply, with token counts estimated from the text."""
        await asyncio.sleep(0)  # a conversation without an end must leave the loop time to stop it
        message, reason = to_message(self._policy(self._env, self._example, request))
        self._count(request.prompt)
        told = len(message_text(message)) + len(json.dumps(message.tool_calls or ""))
        return Response(
            message, reason, Usage(self._num_chars // _CHARS_PER_TOKEN, told // _CHARS_PER_TOKEN + 1), model=self.model
        )

    def _count(self, prompt: Messages) -> None:
        """Add what is new in the prompt to the estimate; an author who rewrites the conversation gets a rough one."""
        if isinstance(prompt, str):
            self._num_chars = len(prompt)
        else:
            self._num_chars += sum(len(message_text(message)) for message in prompt[self._num_messages :])
            self._num_messages = len(prompt)


def silence(env: Environment, example: Example, request: ModelRequest) -> str:
    """Nothing."""
    return ""


def plain_text(env: Environment, example: Example, request: ModelRequest) -> str:
    """A sentence without any format."""
    return PLAIN_TEXT


def echo(env: Environment, example: Example, request: ModelRequest) -> str:
    """The last user message."""
    return last_user_text(request)


def answer(env: Environment, example: Example, request: ModelRequest) -> str | list[ToolCall]:
    """A call of each tool, one per turn; then the row's answer in the format that is asked for."""
    called = 0 if isinstance(request.prompt, str) else sum(bool(m.get("tool_calls")) for m in request.prompt)
    if request.tools and called < len(request.tools):
        function = request.tools[called].get("function") or request.tools[called]
        arguments = example_arguments(function.get("parameters") or {})
        return [ToolCall(f"call_{called}", function["name"], json.dumps(arguments))]
    return formatted(env, example, _prompt_texts(request))


POLICIES: dict[str, Policy] = {"silence": silence, "plain text": plain_text, "echo": echo, "answer": answer}
"""By name, in the order they are played."""


def formatted(env: Environment, example: Example, prompt_texts: Sequence[str]) -> str:
    r"""The row's answer as the parser wants it; else in the tags, or the ``\boxed{}``, that the prompt speaks of."""
    given = example.row["answer"]
    text = given if isinstance(given, str) else json.dumps(given, default=str)
    parser = env.parser
    if isinstance(parser, XMLParser):
        return parser.format(**{name: text for name in parser.get_fields()})
    shown = "\n".join(prompt_texts)
    if r"\boxed" in shown:
        text = rf"\boxed{{{text}}}"
    elif tags := [tag for tag in dict.fromkeys(_TAG.findall(shown)) if f"</{tag}>" in shown]:
        text = "\n".join(f"<{tag}>\n{text}\n</{tag}>" for tag in tags)
    return f"<think>\nI know this.\n</think>\n\n{text}" if isinstance(parser, ThinkParser) else text


def _prompt_texts(request: ModelRequest) -> list[str]:
    return [request.prompt] if isinstance(request.prompt, str) else [message_text(m) for m in request.prompt]
