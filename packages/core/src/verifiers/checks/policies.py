"""Scripted policies that a check runs an environment with: silence, plain text, an echo, and a
well-formed answer.

The first three imitate an untrained model. The fourth calls every tool once and then replies with
the example's ``answer`` in the format that the parser and the prompt ask for. An environment with
an oracle has a fifth, its solution. The same request always gets the same reply.
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
    """A ``Client`` that replies to every request of an example with a policy."""

    model = "scripted"

    def __init__(self, policy: Policy, env: Environment, example: Example):
        self._policy, self._env, self._example = policy, env, example
        self._num_messages = self._num_chars = 0

    async def complete(self, request: ModelRequest) -> Response:
        """The policy's reply, with token counts estimated from the text."""
        # yield to the event loop, so that an endless conversation can be cancelled
        await asyncio.sleep(0)
        message, reason = to_message(self._policy(self._env, self._example, request))
        self._count(request.prompt)
        reply_chars = len(message_text(message)) + len(json.dumps(message.tool_calls or ""))
        usage = Usage(self._num_chars // _CHARS_PER_TOKEN, reply_chars // _CHARS_PER_TOKEN + 1)
        return Response(message, reason, usage, model=self.model)

    def _count(self, prompt: Messages) -> None:
        """Add the prompt's new messages to the estimate; it is rough when an environment rewrites
        the conversation."""
        if isinstance(prompt, str):
            self._num_chars = len(prompt)
        else:
            new = prompt[self._num_messages :]
            self._num_chars += sum(len(message_text(message)) for message in new)
            self._num_messages = len(prompt)


def answer(env: Environment, example: Example, request: ModelRequest) -> str | list[ToolCall]:
    """A call of each tool, one per turn; then the example's answer in the expected format."""
    messages = [] if isinstance(request.prompt, str) else request.prompt
    called = sum(bool(message.get("tool_calls")) for message in messages)
    if request.tools and called < len(request.tools):
        function = request.tools[called].get("function") or request.tools[called]
        arguments = example_arguments(function.get("parameters") or {})
        return [ToolCall(f"call_{called}", function["name"], json.dumps(arguments))]
    texts = [request.prompt] if isinstance(request.prompt, str) else map(message_text, messages)
    return formatted(env, example, list(texts))


def solution(env: Environment, example: Example, request: ModelRequest) -> object:
    """The reply of the environment's oracle."""
    assert env.oracle is not None
    number = _num_replies(request.prompt) - _num_replies(example.row["prompt"])
    return oracle_reply(env.oracle(example.row), request, number)


def oracle_reply(replies: object, request: ModelRequest, number: int) -> object:
    """The ``number``-th reply of what an oracle returned; a list repeats its last reply."""
    if callable(replies):
        return replies(request)
    if isinstance(replies, list | tuple):
        return replies[min(number, len(replies) - 1)] if replies else ""
    return replies


def _num_replies(messages: Messages) -> int:
    if isinstance(messages, str):
        return 0
    return sum(message["role"] == "assistant" for message in messages)


POLICIES: dict[str, Policy] = {
    "silence": lambda env, example, request: "",
    "plain text": lambda env, example, request: PLAIN_TEXT,
    "echo": lambda env, example, request: last_user_text(request),
    "answer": answer,
}


def policies_of(env: Environment) -> dict[str, Policy]:
    """Name -> policy, in the order in which they are run."""
    return POLICIES if env.oracle is None else {**POLICIES, "solution": solution}


def formatted(env: Environment, example: Example, prompt_texts: Sequence[str]) -> str:
    r"""The example's answer in the parser's format; else in the tags, or the ``\boxed{}``, that the
    prompt mentions."""
    reference = example.row["answer"]
    text = reference if isinstance(reference, str) else json.dumps(reference, default=str)
    parser = env.parser
    if isinstance(parser, XMLParser):
        return parser.format(**{name: text for name in parser.get_fields()})
    prompt = "\n".join(prompt_texts)
    if r"\boxed" in prompt:
        text = rf"\boxed{{{text}}}"
    elif tags := [tag for tag in dict.fromkeys(_TAG.findall(prompt)) if f"</{tag}>" in prompt]:
        text = "\n".join(f"<{tag}>\n{text}\n</{tag}>" for tag in tags)
    return f"<think>\nI know this.\n</think>\n\n{text}" if isinstance(parser, ThinkParser) else text
