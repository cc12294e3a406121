"""Older utility functions: concurrency limits, formatted datasets, messages, parsed responses, error chains."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from verifiers.data.examples import Table
from verifiers.data.messages import normalize_chat, normalize_message, strip_nones
from verifiers.results.rows import error_chain
from verifiers.rollouts.state import TrajectoryStepTokens, record_tokens
from verifiers.types import Message, Messages, Response


async def maybe_semaphore(limit: int | None = None) -> AbstractAsyncContextManager[Any]:
    """A semaphore of ``limit`` slots, or one that never blocks for None and numbers below 1."""
    return asyncio.Semaphore(limit) if limit is not None and limit > 0 else nullcontext()


def format_dataset(
    dataset: Any,
    system_prompt: str | None = None,
    few_shot: Sequence[Mapping[str, Any]] | None = None,
    question_key: str = "question",
    answer_key: str = "answer",
    map_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """A ``datasets.Dataset`` with prompts and ids, as environments build it; ``map_kwargs`` have no effect."""
    parameters = {"system_prompt": system_prompt, "few_shot": few_shot}
    return Table.of(dataset, question_key=question_key, answer_key=answer_key, **parameters).to_hf()


def sanitize_tool_calls(messages: Any) -> Any:
    """The messages with each tool call as a JSON string, for a dataset column; plain text unchanged."""
    if isinstance(messages, str):
        return messages
    return [_with_json_calls(message) for message in normalize_chat(messages)]


def strip_nones_from_content(messages: Any) -> Any:
    """The messages without None-valued keys in their content parts; plain text unchanged."""
    if isinstance(messages, str):
        return messages
    return [{**message, "content": strip_nones(message.get("content"))} for message in messages]


async def parse_response_messages(response: Any, message_type: str = "chat") -> Messages:
    """The completion: a list of one message, or text in completion mode."""
    choice = response.choices[0]
    if message_type == "completion":
        return response.text if isinstance(response, Response) else choice.text
    return [normalize_message(choice.message)]


async def parse_response_tokens(
    response: Response, message_type: str = "chat", max_seq_len: int | None = None
) -> TrajectoryStepTokens | None:
    """The response's tokens as stored in a step, None without tokens; ids are never truncated to ``max_seq_len``."""
    is_truncated = await parse_is_truncated(response, message_type)
    recorded: TrajectoryStepTokens | None = record_tokens(response.tokens, is_truncated, None)
    return recorded


async def parse_is_truncated(response: Any, message_type: str = "chat") -> bool:
    """Whether the completion was truncated at its length limit."""
    return bool(response.choices[0].finish_reason == "length")


class ErrorChain:
    """An exception and its causes, outermost first; ``in`` tests for a class, as in ``except``."""

    def __init__(self, error: BaseException):
        self.root_error = error
        self.chain = error_chain(error)

    def __contains__(self, cls: object) -> bool:
        return isinstance(cls, type) and any(isinstance(link, cls) for link in self.chain)

    def __iter__(self) -> Iterator[BaseException]:
        return iter(self.chain)

    def __repr__(self) -> str:
        return " -> ".join(map(repr, self.chain))

    def __str__(self) -> str:
        return " -> ".join(type(link).__name__ for link in self.chain)


def get_vf_error_chain(error: BaseException) -> ErrorChain:
    """The chain of an error."""
    return ErrorChain(error)


def _with_json_calls(message: Message) -> dict[str, Any]:
    copy = dict(message)
    if calls := message.get("tool_calls"):
        copy["tool_calls"] = [json.dumps(call) for call in calls]
    return copy
