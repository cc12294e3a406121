"""Decode the body of a provider's response to a `Response`, without SDK objects.

The promise: bytes are decoded once, straight into the required fields; token ids and
log-probabilities are stored exactly as sampled or not at all: never cut, never re-encoded. A body
that is not a completion raises a ``MalformedResponse`` that names the field, never a KeyError.

HTTP is in ``http`` and retries are in ``retry``.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, repeat
from typing import Any

import msgspec
import numpy as np

from verifiers.errors import EmptyModelResponseError, MalformedResponse, ModelUnavailable
from verifiers.runtime.decoding import MAX_REPLY_VALUES, check_depth, check_values, decode_message
from verifiers.types import (
    AssistantMessage,
    ModelRequest,
    Response,
    ResponseTokens,
    ToolCall,
    Usage,
)

TOKEN_FIELDS = frozenset(("prompt_ids", "completion_ids", "completion_logprobs"))
"""Values of ``MalformedResponse.field`` for incomplete token data."""

LEAST_LOGPROB = -9999.0
"""OpenAI's value for a token of probability 0; JSON has no infinity."""
_ROUNDING = 1e-3
"""How far above 0 rounding may bring the log-probability of a certain token, in nats."""
_MAX_IDS = 2**31

_ID_PREFIX = "token_id:"
"""Of a token that the server names by its id."""
_TEXT, _NUMBERS = frozenset((str,)), frozenset((int, float))
WITHHELD = frozenset(
    "content_filter content_filtered filtered refusal safety prohibited_content sensitive blocklist"
    " recitation spii language image_safety guardrail_intervened guardrails moderation".split()
)
"""Finish reasons of a reply that a filter of the server cut."""
TRUNCATED = WITHHELD | frozenset(
    "length max_tokens max_output_tokens max_new_tokens max_completion_tokens max_length"
    " model_length token_limit context_length context_length_exceeded context_window_exceeded"
    " model_context_window_exceeded max_context_length max_prompt_tokens repetition"
    " repetition_truncation".split()
)
"""Finish reasons of a reply that a limit cut; another attempt is cut again."""
INTERRUPTED = frozenset(
    "abort aborted cancelled canceled error unknown network_error internal_error server_error"
    " insufficient_system_resource overloaded timeout timed_out disconnect interrupted incomplete"
    " failed pause_turn compaction load unload preempted other malformed_function_call"
    " unexpected_tool_call finish_reason_unspecified null none".split()
)
"""Finish reasons of a reply that the server broke off; another attempt may be whole."""
CALLING = frozenset("tool_calls tool_call function_call function_calls tool_use".split())
COMPLETE = CALLING | frozenset(
    "stop end end_turn stop_sequence stop_token stop_str eos eos_token end_of_text completed"
    " complete finish finished done success normal".split()
)
"""Finish reasons of a reply that the model ended. A word in none of these tables counts as
interrupted: who reads a part of an answer as the whole of it scores it wrongly."""
FINISH_REASON = "finish_reason"
"""Value of ``MalformedResponse.field`` for a reason in none of the tables."""

_STATUS_OF = {
    "invalid_request_error": 400,
    "invalid_prompt": 400,
    "context_length_exceeded": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "timeout_error": 504,
    "overloaded_error": 529,
}


class StreamedError(Exception):
    """An error in an answer, or in a stream, that began with status 200.

    ``status`` is the HTTP status that the same failure has otherwise.
    """

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


OF_ANOTHER_FORM = (AttributeError, LookupError, TypeError)
"""Raised where a field holds another type than its API says."""


@contextmanager
def reading_answer(dialect: str, where: str) -> Iterator[None]:
    """Raises: ``MalformedResponse`` for a field of another type in the answer of ``where``."""
    try:
        yield
    except (*OF_ANOTHER_FORM, ArithmeticError, ValueError) as error:  # numbers beyond all bounds
        raise MalformedResponse(
            f"{where} answered 200, but not in the form of the {dialect} API: {error}"
        ) from error


_OF_RESPONSE = frozenset("tokens finish_reason is_truncated audio".split())
"""Fields that older clients put into a message; not of the conversation."""
_READ_FIELDS = _OF_RESPONSE | frozenset(
    "role content tool_calls function_call reasoning reasoning_content".split()
)
"""Fields of a reply that are read. The rest is kept and sent back: some vendors refuse the next turn
without it (``reasoning_details``, signatures)."""


class Entry(msgspec.Struct, gc=False):
    """A sampled token of ``logprobs.content``."""

    logprob: Any = None
    token: Any = None
    id: Any = None


class Logprobs(msgspec.Struct, gc=False):
    content: list[Entry] | None = None
    tokens: list[Any] | None = None
    token_logprobs: list[Any] | None = None


class Choice(msgspec.Struct):
    message: dict[str, object] | None = None
    text: str | None = None
    finish_reason: str | None = None
    error: Any = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None  # [C]
    prompt_token_ids: list[int] | None = None  # [P]
    weight_versions: object = None
    weight_version: object = None


class Completion(msgspec.Struct):
    """Fields read from a response of ``/chat/completions`` or ``/completions``; all others are
    skipped."""

    choices: list[Choice] | None = None
    id: Any = None
    model: Any = None
    created: object = None
    usage: dict[str, object] | None = None
    error: Any = None
    prompt_token_ids: list[int] | None = None  # [P]
    weight_versions: Any = None
    weight_version: Any = None


_DECODER = msgspec.json.Decoder(Completion)
_SKIPPED = re.compile(
    rb'"(?:top_logprobs|bytes)":\s*\[(?:[^\[\]"]|"(?:[^"\\]|\\.)*+"|\[[^\[\]"]*+\])*+\]'
)
"""Arrays of a reply that are not decoded, and are longer than all the rest of it."""


def decode(body: bytes, where: str) -> Completion:
    """Decode a response body. Raises: ``MalformedResponse`` that names ``where``, the endpoint."""
    try:
        if len(body) > MAX_REPLY_VALUES:
            check_values(_SKIPPED.sub(b"", body), MAX_REPLY_VALUES)
        completion = _DECODER.decode(body)
        for choice in completion.choices or ():
            check_depth(choice.message)
    except msgspec.ValidationError as error:
        raise MalformedResponse(
            f"{where} answered 200, but not with a completion: {error}: {excerpt(body)}",
            body=excerpt(body),
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:  # NaN, Infinity and lone surrogates, which providers send and msgspec refuses
            fields = decode_message(body, MAX_REPLY_VALUES, len(body))
            completion = msgspec.convert(fields, Completion)
        except ValueError as error:
            raise malformed(body, where, error) from error
    except (ValueError, RecursionError) as error:
        raise malformed(body, where, error) from error
    if not completion.choices and not completion.error:
        raise MalformedResponse(
            f"{where} answered 200 without choices: {excerpt(body)}",
            field="choices",
            body=excerpt(body),
        )
    return completion


def malformed(body: bytes, where: str, error: ValueError | RecursionError) -> MalformedResponse:
    """The error of a body that cannot be read."""
    what = (
        "an empty body"
        if not body.strip()
        else "a web page"
        if body.lstrip()[:1] == b"<"
        else "no valid JSON"
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
        else f"a body that cannot be read: {error}"
    )
    return MalformedResponse(f"{where} answered 200 with {what}", body=excerpt(body))


def streamed_error(error: object) -> StreamedError:
    """Return the error of an answer or event, whose ``code`` or ``type`` stands for a status; 500 for
    an unknown word.

    >>> streamed_error({"type": "overloaded_error", "message": "Overloaded"}).status
    529
    """
    fields = error if isinstance(error, Mapping) else {}
    code, kind = str(fields.get("code")), str(fields.get("type"))
    is_status = code.isdecimal() and 400 <= int(code) < 600
    status = int(code) if is_status else _STATUS_OF.get(code, _STATUS_OF.get(kind, 500))
    return StreamedError(status, json.dumps({"error": error}, ensure_ascii=False))


def finish_of(message: Mapping[str, object], reason: object, where: str) -> str:
    """Return "stop", "length" or "tool_calls" for the finish reason of a reply; None and "" are no
    reason, and the reply is whole.

    Raises: ``StreamedError`` for an empty reply that a filter withheld; ``ModelUnavailable`` for
    one that the server interrupted; ``MalformedResponse`` for a reason in none of the tables. What
    a filter let pass of an answer is a truncated reply.
    """
    word = str(reason or "stop").strip().lower().replace("-", "_").replace(" ", "_")
    is_empty = not message.get("content") and not message.get("tool_calls")
    if is_empty and word in WITHHELD:
        text = f"the reply was withheld by a content filter (finish reason {reason})"
        raise streamed_error({"message": text, "code": 400})
    if word in TRUNCATED:
        return "length"
    if word in INTERRUPTED:
        raise ModelUnavailable(f"{where} interrupted its reply (finish reason {reason})")
    if word not in COMPLETE:
        raise MalformedResponse(
            f"{where} ended its reply with the finish reason {str(reason)[:80]!r}, which is not"
            " known here: the reply may be a part of the answer, and is not scored",
            field=FINISH_REASON,
        )
    return "tool_calls" if word in CALLING else "stop"


def distinct_ids(ids: Sequence[str], request: ModelRequest) -> list[str]:
    """Return ids for the tool calls of a reply: its own, and new ones for those that are empty or
    repeated.

    New ids are the same for the same reply, and others in every turn: nine letters and digits,
    which every vendor takes.
    """
    distinct: list[str] = []
    for index, call_id in enumerate(ids):
        candidate, attempt = call_id, 0
        while not candidate.strip() or candidate in distinct:
            seed = f"{len(request.prompt)} {index} {call_id} {attempt}"
            candidate, attempt = hashlib.sha256(seed.encode()).hexdigest()[:9], attempt + 1
        distinct.append(candidate)
    return distinct


def excerpt(body: bytes, limit: int = 300) -> str:
    """Return the start of a body as one line of text."""
    return " ".join(body[: 4 * limit].decode("utf-8", "replace").split())[:limit]


def to_response(
    completion: Completion, request: ModelRequest, where: str, raw: object = None
) -> Response:
    """Build the `Response` of a decoded completion.

    Raises: ``MalformedResponse`` without choices, or without complete token data when the request
    requires them (``field`` names what is missing); ``EmptyModelResponseError`` for no content,
    calls and finish reason; ``StreamedError`` for an error instead of a completion.
    """
    with reading_answer("chat", where):
        if error := completion.error or (completion.choices and completion.choices[0].error):
            raise streamed_error(error)
        if not completion.choices:
            raise MalformedResponse(f"{where} answered 200 without choices", field="choices")
        choice = completion.choices[0]
        message = _received_message(choice, request, where)
        finish_reason = finish_of(message, choice.finish_reason, where)
        if choice.finish_reason is None and len(message) == 2 and not message["content"]:
            raise EmptyModelResponseError(
                f"{where} answered 200 with no content, no tool call and no finish reason"
            )
        version, logprobs = _versions(choice, completion), _logprobs(choice.logprobs)
        read_tokens = _tokens(completion, choice, logprobs, version)
        tokens, missing = None, ""
        if isinstance(read_tokens, ResponseTokens):
            tokens = read_tokens
        else:
            name, missing = read_tokens
            if request.require_tokens:
                raise MalformedResponse(
                    f"{where} answered without usable {name}: {missing}", field=name
                )
        return Response(
            message=message,
            finish_reason=finish_reason,
            tokens=tokens,
            tokens_missing=missing,
            token_logprobs=(
                None if request.require_tokens else _by_text(completion, choice.logprobs, logprobs)
            ),
            version=version if isinstance(version, int) else int(version.min()),
            model=completion.model if isinstance(completion.model, str) else request.model,
            id=str(completion.id or ""),
            created=number_of(completion.created),
            usage=_usage(completion.usage),
            raw=raw,
        )


def _received_message(choice: Choice, request: ModelRequest, where: str) -> AssistantMessage:
    """Return the message of a reply, with what the server wrote where that is more."""
    if choice.message is None:
        return AssistantMessage(choice.text or "")
    message = message_of(choice.message, where)
    calls = message.get("tool_calls") or ()
    ids = distinct_ids([call["id"] for call in calls], request)
    for call, call_id in zip(calls, ids, strict=True):
        call["id"] = call_id
    received = {
        name: value
        for name, value in choice.message.items()
        if (name == "content" or not (value is None or value == [] or value == {}))
        and name not in _OF_RESPONSE
    }
    if received != message:
        message.keep_received(received)
    return message


def message_of(body: Mapping[str, object], where: str) -> AssistantMessage:
    """Return a message of a server as authors read it: text, reasoning and calls, each under one
    name, and the fields that are not known here.

    Raises: ``MalformedResponse`` that names ``where`` and the field.
    """
    content, thoughts = body.get("content"), []
    if isinstance(content, list):
        thoughts = [_thought(part) for part in content if _is_thought(part)]
        content = "".join(
            part if isinstance(part, str) else part.get("text") or ""
            for part in content
            if not _is_thought(part)
        )
    if content is not None and not isinstance(content, str):
        raise MalformedResponse(
            f"{where} answered with content that is {type(content).__name__}", field="content"
        )
    calls = body.get("tool_calls")
    message = AssistantMessage(content or "")
    if calls:
        message["content"] = content or None
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise MalformedResponse(
                f"{where} answered with tool calls that are not objects", field="tool_calls"
            )
        message["tool_calls"] = [ToolCall.from_wire(call) for call in calls]
    reasoning = body.get("reasoning_content") or body.get("reasoning") or "".join(thoughts)
    if isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = reasoning
    for name, value in body.items():
        if value and name not in _READ_FIELDS:
            message[name] = value
    return message


def _is_thought(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("thinking", "reasoning")


def _thought(part: Mapping[str, object]) -> str:
    """The text of a part with reasoning: Mistral's holds text parts."""
    thought = part.get("thinking") or part.get("reasoning") or part.get("text") or ""
    if isinstance(thought, list):
        return "".join(
            str(inner.get("text") or "") for inner in thought if isinstance(inner, Mapping)
        )
    return str(thought)


def _usage(usage: Mapping[str, object] | None) -> Usage:
    if not usage:
        return Usage()
    counts = number_of(usage.get("prompt_tokens")), number_of(usage.get("completion_tokens"))
    of_prompt = usage.get("prompt_tokens_details")
    of_completion = usage.get("completion_tokens_details")
    if not of_prompt and not of_completion:
        return Usage(*counts)
    cached, written = count(of_prompt, "cached_tokens"), count(of_prompt, "cache_write_tokens")
    return Usage(*counts, cached, written, count(of_completion, "reasoning_tokens"))


def count(fields: object, *names: str) -> int:
    """Return the count at a path of names, as `number_of` reads it."""
    for name in names:
        fields = fields.get(name) if isinstance(fields, Mapping) else None
    return number_of(fields)


def number_of(value: object) -> int:
    """Return a count of a server; 0 for what is none.

    >>> number_of(12.0), number_of(-5), number_of(1e30), number_of("7"), number_of(float("nan"))
    (12, 0, 0, 0, 0)
    """
    is_count = isinstance(value, int | float) and 0 <= value < 2**53
    return int(value) if is_count else 0  # type: ignore[call-overload]


class Vocabulary:
    """Different texts of tokens, each with a number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()

    def numbers(self, texts: Sequence[str]) -> array[int]:
        """The numbers of these texts, two bytes each where that is enough; new texts are added."""
        with self._lock:  # responses of a model may be read in several threads
            number_of = self._numbers.__getitem__
            try:
                numbers = list(map(number_of, texts))
            except KeyError:  # some are new
                for text in texts:
                    if text not in self._numbers:
                        self._numbers[text] = len(self.texts)
                        self.texts.append(text)
                numbers = list(map(number_of, texts))
        return array(
            "H" if len(self.texts) <= 2**16 or max(numbers, default=0) < 2**16 else "I", numbers
        )


class TokenTexts:
    """The texts of sampled tokens: their numbers in a vocabulary that the responses of a model
    share."""

    __slots__ = ("_numbers", "_vocabulary")

    def __init__(self, texts: Sequence[str], vocabulary: Vocabulary):
        self._numbers, self._vocabulary = vocabulary.numbers(texts), vocabulary

    def tolist(self) -> list[str]:
        return [self._vocabulary.texts[number] for number in self._numbers]


class TokenLogprobs(dict[str, Any]):
    """``{"texts": […], "logprobs": […]}`` of sampled tokens: new lists whenever they are read, held
    in less memory.

    >>> sampled = TokenLogprobs(texts=TokenTexts(["a", "b", "a"], Vocabulary()), logprobs=array("d", [-0.5, -1, -0.5]))
    >>> sampled["texts"], sampled["logprobs"]
    (['a', 'b', 'a'], [-0.5, -1.0, -0.5])
    """

    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        return _listed_values(dict.__getitem__(self, key))

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # overridden, so that dict(self) reads through __getitem__

    def get(self, key: str, default: object = None) -> Any:
        return self[key] if key in self else default

    def pop(self, key: str, *default: object) -> Any:
        return _listed_values(super().pop(key, *default))

    def setdefault(self, key: str, default: object = None) -> Any:
        return _listed_values(super().setdefault(key, default))

    def items(self) -> Any:
        return dict(self).items()

    def values(self) -> Any:
        return dict(self).values()

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __or__(self, other: Mapping[Any, Any]) -> dict[Any, Any]:
        return {**self, **other}

    def __eq__(self, other: object) -> bool:
        return dict(self) == (dict(other) if isinstance(other, TokenLogprobs) else other)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self),)


def _listed_values(value: object) -> object:
    return value.tolist() if isinstance(value, TokenTexts | array) else value


_VOCABULARIES: weakref.WeakValueDictionary[str, Vocabulary] = weakref.WeakValueDictionary()
"""Name of a model -> its vocabulary, for as long as a response refers to it."""


def _logprobs(logprobs: Logprobs | None) -> array[float] | None:
    """The log-probability of each sampled token; None if any is no number."""
    if logprobs is None:
        return array("d")
    content = logprobs.content
    values = (
        (logprobs.token_logprobs or []) if content is None else [entry.logprob for entry in content]
    )
    are_numbers = _NUMBERS.issuperset(map(type, values)) or all(
        isinstance(value, int | float) for value in values
    )
    return array("d", values) if are_numbers else None


def _by_text(
    completion: Completion, logprobs: Logprobs | None, values: array[float] | None
) -> TokenLogprobs | None:
    """The sampled tokens by their texts; None if the server gave none, or names them by their
    ids.

    A rollout holds them for as long as its results are held: each different text is held once, and
    the numbers are those of the token data.
    """
    if logprobs is None or values is None:
        return None
    content = logprobs.content
    texts = (logprobs.tokens or []) if content is None else [entry.token for entry in content]
    if not (0 < len(texts) == len(values) and _TEXT.issuperset(map(type, texts))):
        return None
    if _ID_PREFIX in "\n".join(texts) and any(map(str.startswith, texts, repeat(_ID_PREFIX))):
        return None
    vocabulary = _VOCABULARIES.setdefault(str(completion.model), Vocabulary())
    return TokenLogprobs(texts=TokenTexts(texts, vocabulary), logprobs=values)


def _tokens(
    completion: Completion, choice: Choice, logprobs: array[float] | None, version: int | np.ndarray
) -> ResponseTokens | tuple[str, str]:
    """Return the token data if complete, else (incomplete field, reason)."""
    prompt_ids = (
        completion.prompt_token_ids
        if completion.prompt_token_ids is not None
        else choice.prompt_token_ids
    )
    if prompt_ids is None:
        return "prompt_ids", "prompt_token_ids is absent (does the server know return_token_ids?)"
    completion_ids = (
        choice.token_ids
        if choice.token_ids is not None
        else _ids_in_logprobs(choice.logprobs or Logprobs())
    )
    if completion_ids is None:
        return "completion_ids", "token_ids is absent (does the server know return_token_ids?)"
    if logprobs is None:
        return "completion_logprobs", "a log-probability is not a number"
    try:
        arrays = _int32(prompt_ids), _int32(completion_ids)
    except (ValueError, TypeError, OverflowError) as error:
        return "completion_logprobs", str(error)
    values = np.frombuffer(logprobs) if logprobs else np.empty(0)
    return token_fault(*arrays, values) or ResponseTokens(*arrays, values, version)


def token_fault(
    prompt_ids: np.ndarray,
    completion_ids: np.ndarray,
    logprobs: np.ndarray,
    vocabulary: int = _MAX_IDS,
) -> tuple[str, str] | None:
    """(field, reason) for token data that a model of ``vocabulary`` token ids cannot have sampled;
    None for sound data.

    ``prompt_ids`` int32 [P], ``completion_ids`` int32 [C], ``logprobs`` float [C], nats.
    """
    if not len(prompt_ids):
        return "prompt_ids", "there are none, so nothing conditions the first token"
    if len(logprobs) != len(completion_ids):
        counts = f"{len(logprobs)} log-probabilities for {len(completion_ids)} tokens"
        return "completion_logprobs", counts
    for name, ids in (("prompt_ids", prompt_ids), ("completion_ids", completion_ids)):
        if ids.view(np.uint32).max(initial=0) >= vocabulary:  # as unsigned, -1 is the largest
            wrong = next(token for token in ids.tolist() if not 0 <= token < vocabulary)
            return name, f"{wrong} is no token id (0 to {vocabulary - 1})"
    least, most = logprobs.min(initial=0), logprobs.max(initial=0)
    if least >= LEAST_LOGPROB and most <= _ROUNDING:
        return None
    if not np.isfinite(logprobs).all():
        return "completion_logprobs", "a log-probability is not finite"
    wrong = least if least < LEAST_LOGPROB else most
    return (
        "completion_logprobs",
        f"a log-probability is {wrong:g}, not between {LEAST_LOGPROB:g} and 0",
    )


def _int32(ids: list[int]) -> np.ndarray:
    """The ids as int32, in a third of the time that ``np.array`` takes for a list. *Raises*
    OverflowError.

    A copy, as a view would keep the array and its buffer alive with every turn.
    """
    return np.frombuffer(array("i", ids), np.int32).copy() if ids else np.empty(0, np.int32)


def _ids_in_logprobs(logprobs: Logprobs) -> list[int] | None:
    """Return ids from ``token_id:N`` texts, else from the ``id`` of each entry; None
    if incomplete."""
    entries = logprobs.content
    texts = [entry.token for entry in entries] if entries is not None else logprobs.tokens
    if not texts:
        return None
    if all(
        isinstance(text, str) and text.startswith(_ID_PREFIX) and text[9:].isdecimal()
        for text in texts
    ):
        return [int(text[9:]) for text in texts]
    if entries is not None and all(type(entry.id) is int for entry in entries):
        return [entry.id for entry in entries]
    return None


def version_spans(versions_T: np.ndarray) -> list[dict[str, int]]:
    """Return vLLM's ``weight_versions``, ``[{version, start, end}]`` of a completion's tokens,
    ``end`` exclusive."""
    if not len(versions_T):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(versions_T)) + 1).tolist(), len(versions_T)]
    return [
        {"version": int(versions_T[start]), "start": start, "end": end}
        for start, end in pairwise(cuts)
    ]


def _versions(choice: Choice, completion: Completion) -> int | np.ndarray:
    """The policy version of the completion: one, or int64 [C] where its tokens have different
    versions; -1 without a version.

    Tokens outside of the server's spans ``[{version, start, end}]`` have the oldest of them. A span
    without a number (weights that were not pushed, after a restart) is -1, beside numbered versions
    too.
    """
    for holder in (choice, completion):
        spans = (
            holder.weight_versions if holder.weight_versions is not None else holder.weight_version
        )
        if spans is None:
            continue
        spans = spans if isinstance(spans, list) else [spans]
        plain = [span if isinstance(span, dict) else {"version": span} for span in spans]
        names = [str(span.get("version")) for span in plain]
        numbers = [
            int(name) if name.isdecimal() and len(name) < 20 and int(name) < 2**63 else -1
            for name in names
        ]
        if any(number >= 0 for number in numbers):
            oldest = min(numbers)
            if max(numbers) == oldest:
                return oldest
            ids = choice.token_ids or _ids_in_logprobs(choice.logprobs or Logprobs()) or []
            version = np.full(len(ids), oldest, np.int64)
            starts = [int(span.get("start") or 0) for span in plain]
            for start, number, span in sorted(
                zip(starts, numbers, plain, strict=True), key=lambda run: run[0]
            ):
                version[start : span.get("end")] = number
            return version if ids else oldest
    return -1
