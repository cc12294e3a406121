"""Older utility functions: formatted datasets, messages, parsed responses, error chains."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from verifiers.clients.attributes import read_completion
from verifiers.clients.reply import to_response
from verifiers.data.examples import Table
from verifiers.data.messages import (
    as_mapping,
    field,
    normalize_chat,
    normalize_message,
    strip_nones,
)
from verifiers.errors import VerifiersError
from verifiers.rollouts.error_info import ErrorInfo, error_chain
from verifiers.rollouts.state import TrajectoryStepTokens
from verifiers.types import Message, Messages, ModelRequest, Response

if TYPE_CHECKING:
    from datasets import Dataset

    from verifiers.data.sources import DatasetLike


def format_dataset(
    dataset: DatasetLike,
    system_prompt: str | None = None,
    few_shot: Sequence[Mapping[str, object]] | None = None,
    question_key: str = "question",
    answer_key: str = "answer",
    map_kwargs: Mapping[str, object] | None = None,
) -> Dataset:
    """A ``datasets.Dataset`` with prompts and ids, as environments build it; ``map_kwargs`` have no
    effect."""
    parameters = {"system_prompt": system_prompt, "few_shot": few_shot}
    return Table.of(dataset, question_key=question_key, answer_key=answer_key, **parameters).to_hf()


def sanitize_tool_calls(messages: Iterable[object] | str) -> object:
    """The messages with each tool call as a JSON string, for a dataset column; plain text
    unchanged."""
    if isinstance(messages, str):
        return messages
    return [_with_json_calls(message) for message in normalize_chat(messages)]


def strip_nones_from_content(messages: Iterable[Mapping[str, object]] | str) -> object:
    """The messages without None-valued keys in their content parts; plain text unchanged."""
    if isinstance(messages, str):
        return messages
    return [{**message, "content": strip_nones(message.get("content"))} for message in messages]


class HasChoices(Protocol):
    """A completion of OpenAI's library, or a ``Response``, for type checkers."""

    @property
    def choices(self) -> Sequence[Any]: ...


async def parse_response_messages(response: HasChoices, message_type: str = "chat") -> Messages:
    """The completion: a list of one message, or text in completion mode."""
    choice = response.choices[0]
    if message_type == "completion":
        return response.text if isinstance(response, Response) else choice.text
    return [normalize_message(choice.message)]


async def parse_response_message(response: object) -> Messages:
    """The completion: a list of one assistant message."""
    message = field(response, "message") or field(field(response, "choices")[0], "message")
    return [normalize_message({"role": "assistant", **as_mapping(message, "a message")})]


async def parse_response_tokens(
    response: object, message_type: str | int | None = "chat", max_seq_len: int | None = None
) -> TrajectoryStepTokens | None:
    """The tokens of a response, ours or an OpenAI object, as stored in a step; None without tokens.

    With ``max_seq_len`` (also as second argument) they are cut at their end, which ``is_truncated``
    says, and ``overlong_prompt`` where the prompt alone is longer.
    """
    if isinstance(message_type, int):
        max_seq_len = message_type
    if not isinstance(response, Response):
        response = to_response(read_completion(response), ModelRequest([], ""), "the response")
    tokens = response.tokens
    if tokens is None:
        return None
    arrays = tokens.prompt_ids, tokens.completion_ids, tokens.completion_logprobs
    recorded = TrajectoryStepTokens(*arrays, tokens.version, response.finish_reason == "length")
    if max_seq_len is None or recorded.num_tokens <= max_seq_len:
        return recorded
    room = max(0, max_seq_len - len(recorded["prompt_ids"]))
    return TrajectoryStepTokens(
        recorded["prompt_ids"][:max_seq_len],
        recorded["completion_ids"][:room],
        recorded["completion_logprobs"][:room],
        is_truncated=True,
        overlong_prompt=len(recorded["prompt_ids"]) > max_seq_len,
    )


async def parse_is_truncated(response: HasChoices, message_type: str = "chat") -> bool:
    """Whether the completion was truncated at its length limit."""
    return bool(response.choices[0].finish_reason == "length")


def get_error_chain(
    error: BaseException, parent_type: type[BaseException] | None = None
) -> list[BaseException]:
    """The exception and its causes, outermost first; with ``parent_type`` only the leading causes
    of that class."""
    chain = error_chain(error)
    if parent_type is None:
        return chain
    return list(itertools.takewhile(lambda link: isinstance(link, parent_type), chain))


def get_vf_error_chain(error: BaseException) -> list[BaseException]:
    """The leading errors of this package in the chain of an error."""
    return get_error_chain(error, VerifiersError)


class ErrorChain:
    """An exception and its causes, outermost first; ``in`` tests for a class, as in ``except``.

    Two chains of the same classes are equal.
    """

    def __init__(
        self,
        error: BaseException,
        build_error_chain: Callable[[BaseException], list[BaseException]] = get_error_chain,
    ):
        self.root_error = error
        self.chain = build_error_chain(error)

    def __contains__(self, cls: object) -> bool:
        return isinstance(cls, type) and any(isinstance(link, cls) for link in self.chain)

    def __iter__(self) -> Iterator[BaseException]:
        return iter(self.chain)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ErrorChain) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __repr__(self) -> str:
        return " -> ".join(map(repr, self.chain))

    def __str__(self) -> str:
        return " -> ".join(type(link).__name__ for link in self.chain)


def error_info(error: BaseException) -> ErrorInfo:
    """An error as saved rollouts hold it."""
    return ErrorInfo.of(error)


def error_type_name(error: object) -> str:
    """The class of an error, also of an error that was saved."""
    return str(error.get("error")) if isinstance(error, Mapping) else type(error).__name__


def _with_json_calls(message: Message) -> dict[str, object]:
    copy = dict(message)
    if calls := message.get("tool_calls"):
        copy["tool_calls"] = [json.dumps(call) for call in calls]
    return copy
