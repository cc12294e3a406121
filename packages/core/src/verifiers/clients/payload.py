"""Convert a `ModelRequest` to the arguments of an OpenAI-compatible endpoint.

The promise: every argument is sent under the name that the endpoint expects, ``None`` is never
sent, the seed of the request takes precedence, and arguments for several completions or a stream
are refused before sending. A history is sent in a form that servers take (`sendable`); the messages
of the rollout stay as they were sampled.

This module does not normalize messages (they arrive as dicts) and sends nothing.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from verifiers.clients.reply import message_of
from verifiers.data.media import properly_named
from verifiers.errors import ConfigError
from verifiers.runtime.decoding import check_values, decode_message
from verifiers.types import ModelRequest, Response

if TYPE_CHECKING:
    from verifiers.types import Messages

LIMIT_NAMES = ("max_completion_tokens", "max_tokens")
"""Names of the limit of tokens in chat completions, the newer first."""
MAX_TOKENS_ALIASES = ("max_tokens", "max_completion_tokens", "max_new_tokens")

RAW_ARGUMENTS = "_arguments"
"""Key of tool arguments that are no JSON object."""
BLANK = "blank text"
"""In what an endpoint refused: messages without a visible character."""
EMPTY_TEXT = "(empty)"
"""Sent for them there."""
NULL = "null content"
"""In what an endpoint refused: calls without a text, whose content is null; "" is sent there."""
AS_RECEIVED = "messages as received"
"""In what an endpoint refused: replies in the form in which it wrote them (content parts, arguments
that are objects); the plain messages are sent there."""
REASONING = "reasoning_content"
"""In what an endpoint does not read: the name of reasoning, which it calls ``reasoning``."""

OPENAI_ARGUMENTS = frozenset(
    "audio best_of echo frequency_penalty logit_bias logprobs max_completion_tokens max_tokens"
    " metadata modalities parallel_tool_calls prediction presence_penalty prompt_cache_key"
    " reasoning_effort response_format safety_identifier seed service_tier stop store suffix"
    " temperature tool_choice top_logprobs top_p user verbosity web_search_options".split()
)
"""Sampling arguments of the OpenAI API. All others are specific to an engine and are sent in
``extra_body``."""
NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "min_tokens": (0,),
}
"""Values at which a sampling argument changes nothing, by its name; the first is sent where a
server is to use no default of its own."""


def explicit(name: str, value: float | None) -> float | None:
    """The value to send of a sampling argument, so that the server uses no default of its own.

    >>> explicit("top_k", None), explicit("top_k", 0), explicit("top_p", 0.9)
    (-1, -1, 0.9)
    """
    neutral = NEUTRAL.get(name, ())
    return neutral[0] if neutral and (value is None or value in neutral) else value


def left_to_server(sampling_args: Mapping[str, Any], base_url: str | None) -> list[str]:
    """The arguments of a request that decide the sampled distribution and that it leaves out, so
    that the server's defaults apply: those of OpenAI's API, or for vLLM and its like those of the
    model's ``generation_config.json``.

    >>> left_to_server({"temperature": 0, "top_p": None}, "http://127.0.0.1:8000/v1")
    ['top_p', 'top_k', 'min_p', 'repetition_penalty']
    >>> left_to_server({}, "https://api.openai.com/v1")
    ['temperature', 'top_p']
    """
    sent = {**sampling_args, **(sampling_args.get("extra_body") or {})}
    is_openai = "//api.openai.com" in (base_url or "")
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return [
        name
        for name in names
        if sent.get(name) is None and (name in OPENAI_ARGUMENTS or not is_openai)
    ]


def split_arguments(
    request: ModelRequest, max_tokens_name: str
) -> tuple[dict[str, object], dict[str, object]]:
    """Return (arguments of the OpenAI API, extra body); ``max_tokens_name`` is the name of the
    token limit.

    Raises: ``ConfigError`` for unsupported or contradictory arguments.
    """
    standard: dict[str, object] = {}
    extra: dict[str, object] = {}
    limit = None
    for name, value in request.sampling_args.items():
        if value is None or name == "extra_body":
            continue
        if name in MAX_TOKENS_ALIASES:
            if limit is not None and limit != value:
                raise ConfigError(
                    f"sampling_args have two limits of tokens, {limit} and {value}: keep max_tokens"
                )
            limit = value
        elif name in OPENAI_ARGUMENTS:
            standard[name] = value
        elif name not in ("stream", "n"):
            extra[name] = value
    extra.update(request.sampling_args.get("extra_body") or {})
    for arguments in (request.sampling_args, extra):
        if arguments.get("n") not in (None, 1):
            raise _unsupported(arguments, "n", "ask for several rollouts per example")
        if arguments.get("stream"):
            raise _unsupported(arguments, "stream", "completions are read as a whole")
    if limit is not None:
        standard[max_tokens_name] = limit
    if request.seed is not None:
        standard["seed"] = request.seed
    if request.require_tokens or extra.get("return_tokens_as_token_ids"):
        standard["logprobs"] = standard.get("logprobs") or (
            1 if request.message_type == "completion" else True
        )
        extra["return_token_ids"] = True
    if request.message_type != "completion" and has_audio(request.prompt):
        standard["modalities"] = ["text"]
    return standard, extra


def _unsupported(arguments: Mapping[str, object], name: str, instead: str) -> ConfigError:
    return ConfigError(
        f"sampling_args[{name!r}]={arguments[name]!r} is not supported: {instead}", key=name
    )


def to_body(
    request: ModelRequest, max_tokens_name: str, without: Collection[str] = frozenset()
) -> bytes:
    """Return the JSON body of a request. Raises: ``ConfigError`` for an argument that JSON cannot
    store."""
    return encode(to_fields(request, max_tokens_name, without))


def to_fields(
    request: ModelRequest, max_tokens_name: str, without: Collection[str] = frozenset()
) -> dict[str, Any]:
    """Return the fields of the body of a request; ``without``: see `sendable`."""
    standard, extra = split_arguments(request, max_tokens_name)
    body: dict[str, object] = {"model": request.model}
    if request.message_type == "completion":
        body["prompt"] = request.prompt
    else:
        body["messages"] = sendable(request, without)
        if request.tools:
            body["tools"] = request.tools
    body.update(standard)
    body.update(extra)
    return body


def chat_messages(prompt: Any) -> list[Any]:
    """Return the prompt as a list of messages; text becomes one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def limit_name(without: Collection[str], is_older: bool = False) -> str:
    """Return the name of the limit of tokens: the newer, or the older for what knows it alone, and
    the other where an endpoint refused that one."""
    preferred, instead = LIMIT_NAMES[::-1] if is_older else LIMIT_NAMES
    return instead if preferred in without and instead not in without else preferred


def sendable(request: ModelRequest, without: Collection[str] = frozenset()) -> list[Any]:
    """Return the history of a request as every server of chat completions takes it.

    What a server wrote goes back to it as it was (``AssistantMessage.received``), unless an author
    changed the message. vLLM and llama.cpp parse the arguments of all earlier calls and refuse text that is no JSON
    object, which goes under ``RAW_ARGUMENTS``; OpenAI refuses names of tools that a model made up
    of other characters; vendors refuse blank text beside other parts. Fields of a reply that are
    not known here (``reasoning_details``) are sent back as they came.

    ``without``: what this endpoint refused (`refused_in_history`): names of fields of messages and
    calls, ``NULL`` contents, ``BLANK`` texts, messages ``AS_RECEIVED``. A message that needs no
    change is the same object.
    """
    prompt = chat_messages(request.prompt)
    offered = {(tool.get("function") or tool).get("name") for tool in request.tools or ()}
    messages = [
        _sendable_message(
            message if AS_RECEIVED in without else as_received(message), offered, without
        )
        for message in prompt
    ]
    return prompt if all(map(operator.is_, messages, prompt)) else messages


def _sendable_message(
    message: Any, offered: Collection[object], without: Collection[str]
) -> object:
    changes: dict[str, object] = {}
    if calls := message.get("tool_calls"):
        sent = [_sendable_call(call, offered, without) for call in calls]
        if not all(map(operator.is_, sent, calls)):
            changes["tool_calls"] = sent
    content = message.get("content")
    if isinstance(content, list):
        parts = [properly_named(part) for part in content if not is_blank(part)]
        if len(parts) < len(content) or not all(map(operator.is_, parts, content)):
            content = changes["content"] = parts or ""
    if not without:
        return {**message, **changes} if changes else message
    if NULL in without and calls and content is None:
        content = changes["content"] = ""
    is_bare = not calls or NULL in without
    if BLANK in without and is_bare and not (content and str(content).strip()):
        changes["content"] = EMPTY_TEXT
    fields = {**message, **changes}
    if REASONING in without and "reasoning" not in without and REASONING in fields:
        fields.setdefault("reasoning", fields[REASONING])
    return {name: value for name, value in fields.items() if name not in without}


def reasoning_name(response: Response) -> frozenset[str]:
    """Return {``REASONING``} after a reply whose reasoning has the other name alone, else {}."""
    received = getattr(response.message, "received", None)
    is_other = (
        isinstance(received, Mapping) and "reasoning" in received and REASONING not in received
    )
    return frozenset((REASONING,)) if is_other else frozenset()


def as_received(message: Any) -> Any:
    """Return a message of the model as the server wrote it, with the ids that its calls have in the
    conversation; the message itself where an author changed it, or the server wrote just that."""
    received = getattr(message, "received", None)
    if not isinstance(received, Mapping):
        return message
    again, calls = message_of(received, "the server"), message.get("tool_calls") or ()
    for call, current in zip(again.get("tool_calls") or (), calls, strict=False):
        call["id"] = current["id"]
    if again != message:
        return message
    written = {**received, "role": "assistant"}
    if not calls:
        written["content"] = received.get("content") or ""
    else:
        pairs = zip(received["tool_calls"], calls, strict=True)
        written["tool_calls"] = [_received_call(call, current) for call, current in pairs]
    return written


def _received_call(call: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, object]:
    """A call as received, with the parts that no server does without."""
    fields_set = {name: value for name, value in call.items() if value is not None}
    if "function" not in fields_set:
        return {**current}
    arguments = fields_set["function"].get("arguments")
    function = {**current["function"], **fields_set["function"]}
    if not arguments:
        function["arguments"] = current["function"]["arguments"]
    return {**current, **fields_set, "id": current["id"], "function": function}


def _sendable_call(call: Any, offered: Collection[object], without: Collection[str]) -> object:
    function = call.get("function") or call
    arguments, name = function.get("arguments"), function.get("name") or ""
    is_known = name in offered or _TOOL_NAME.fullmatch(name)
    sent = {
        "name": name if is_known else re.sub(r"[^a-zA-Z0-9_-]+", "_", name)[:64] or "_",
        "arguments": (
            sendable_arguments(arguments)
            if isinstance(arguments, str)
            else arguments
            if isinstance(arguments, Mapping) and "function" in call
            else json.dumps(arguments or {})
        ),
    }
    refused = call.keys() & without
    if is_known and sent["arguments"] == arguments and not refused:
        return call
    call = {name: value for name, value in call.items() if name not in refused}
    return {**call, "function": {**function, **sent}} if "function" in call else {**call, **sent}


@functools.lru_cache(maxsize=4096)
def sendable_arguments(text: str) -> str:
    """Return tool arguments as the text of a JSON object; each text of a history is read once."""
    try:
        check_values(text)
        if isinstance(msgspec.json.decode(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    return json.dumps({RAW_ARGUMENTS: text})


def is_blank(part: Any) -> bool:
    """Return whether a content part is text without a visible character."""
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    return is_text and not str(part.get("text") or "").strip()


def refused_in_history(
    status: int, answer: str, request: ModelRequest, without: Collection[str] = frozenset()
) -> str | None:
    """Return what an error answer refuses in the history that was sent ``without`` some parts:
    ``BLANK``, a field that another server added to its reply, ``NULL``, or messages
    ``AS_RECEIVED``; None for another failure."""
    is_refusal = status in (400, 422) or (status == 500 and _SPEAKS_OF_NULL.search(answer))
    if not is_refusal or request.message_type == "completion":
        return None
    if BLANK not in without and _REFUSES_BLANK.search(answer):
        return BLANK
    messages, words = sendable(request, without), set(re.findall(r"\w+", answer))
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    fields = {name for message in messages for name in message} - _FIELDS
    fields |= {name for call in calls for name in call} - _CALL_FIELDS
    if refused := sorted(fields & words):
        return str(refused[0])
    has_null = any(m.get("tool_calls") and m.get("content") is None for m in messages)
    if has_null and ("content" in words or _SPEAKS_OF_NULL.search(answer)):
        return NULL
    is_changed = AS_RECEIVED not in without and any(
        as_received(message) is not message for message in chat_messages(request.prompt)
    )
    if is_changed and words & {"content", "messages", "tool_calls", "arguments"}:
        return AS_RECEIVED
    return None


def arguments_object(arguments: str) -> dict[str, object]:
    """Return tool arguments as an object; text that is none is put under ``RAW_ARGUMENTS``.

    >>> arguments_object('{"a": 1}'), arguments_object("[1")
    ({'a': 1}, {'_arguments': '[1'})
    """
    try:
        value = decode_message(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {RAW_ARGUMENTS: arguments}


def has_audio(prompt: Messages) -> bool:
    """Return whether any message has an ``input_audio`` part."""
    if isinstance(prompt, str):
        return False
    contents = (message.get("content") for message in prompt)
    return any(
        isinstance(part, Mapping) and part.get("type") == "input_audio"
        for content in contents
        if isinstance(content, list)
        for part in content
    )


def encode(body: Mapping[str, object]) -> bytes:
    """Encode as JSON; a lone surrogate, which a model may write, is escaped."""
    try:
        return _ENCODER.encode(body)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(body, enc_hook=_plain)).encode("ascii")
    except (TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"the model call cannot be written as JSON: {error}") from error


def _plain(value: object) -> Any:
    """Convert numpy scalars and arrays and pydantic objects to JSON types."""
    for name in ("tolist", "model_dump"):
        if callable(convert := getattr(value, name, None)):
            return convert()
    raise TypeError(f"{type(value).__name__} has no JSON form")


_TOOL_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")
_FIELDS = frozenset(("role", "content", "tool_calls", "tool_call_id", "name", "refusal"))
"""Fields of messages that every server knows."""
_CALL_FIELDS = frozenset(("id", "type", "function", "name", "arguments"))
"""Fields of calls that every server knows."""
_SPEAKS_OF_NULL = re.compile(r"\b(null|none|nil|NoneType)\b", re.IGNORECASE)
_REFUSES_BLANK = re.compile(
    r"(must|cannot|can't|may|should) (not )?be (non.?)?(empty|blank)|must contain non-whitespace"
    r"|must have either content or tool_calls",
    re.IGNORECASE,
)
_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
