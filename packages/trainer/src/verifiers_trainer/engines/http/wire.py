"""The JSON of the endpoint, with vLLM's fields in requests and responses.

Unknown fields and unsupported values are rejected: a silently ignored sampling parameter would make
the recorded log-probs wrong.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from verifiers.runtime.decoding import check_values
from verifiers_trainer.engines.http.chat import BadRequest, overlong
from verifiers_trainer.engines.requests import SamplingParams

_NEUTRAL: dict[str, tuple] = {
    "best_of": (None, 1),
    "suffix": (None,),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "parallel_tool_calls": (None, True),
    "reasoning_effort": (None,),
}
"""Fields of the protocol that are accepted only with these values."""

_MAX_CHOICES = 128
_MAX_ALTERNATIVES = 20
_SEEDS = random.SystemRandom()


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``stream_options`` of a request."""

    include_usage: bool | None = None


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields common to chat and text completions."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    n: int | None = None
    min_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    extra_body: dict[str, msgspec.Raw] | None = None
    """More fields of the body, which some proxies nest; the body's own win."""
    # Labels without effect.
    user: Any = None
    metadata: Any = None
    store: object = None
    request_id: object = None
    cache_salt: object = None
    priority: Any = None


class ChatBody(GenerateBody, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: msgspec.Raw
    tools: msgspec.Raw = msgspec.Raw(b"null")
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: msgspec.Raw = msgspec.Raw(b"null")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    separate_reasoning: bool = False
    """SGLang's name: take a ``<think>`` block out of the content, into ``reasoning_content``."""
    # Accepted with the neutral values above only.
    response_format: Any = None
    tool_choice: Any = None
    parallel_tool_calls: object = None
    reasoning_effort: object = None

    @property
    def alternatives(self) -> int:
        return self.top_logprobs or 0


class TextBody(GenerateBody, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/completions``; the prompt is text or token ids, or a list of either."""

    prompt: str | list[Any]
    images: list[str] | None = None
    """The data URLs of the images whose placeholders a prompt of token ids has."""
    logprobs: int | bool | None = None
    echo: bool = False
    best_of: Any = None
    suffix: object = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False

    @property
    def alternatives(self) -> int:
        return 0 if self.logprobs is None or isinstance(self.logprobs, bool) else self.logprobs


_Body = TypeVar("_Body", ChatBody, TextBody)
_DECODERS: dict[type, msgspec.json.Decoder] = {
    kind: msgspec.json.Decoder(kind) for kind in (ChatBody, TextBody)
}


def decode_body(content: bytes, kind: type[_Body]) -> _Body:
    """The parsed body. Raises BadRequest for a field that is unknown, mistyped or unsupported."""
    try:
        check_values(content)
        body = _DECODERS[kind].decode(content)
        if body.extra_body:
            fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
            del fields["extra_body"]
            body = _DECODERS[kind].decode(msgspec.json.encode({**body.extra_body, **fields}))
    except msgspec.ValidationError as error:
        text = str(error)
        if "unknown field" in text:
            field = text.split("`")[1]
            raise BadRequest(
                f"the parameter {field!r} is not supported by the embedded engine", field
            ) from error
        raise BadRequest(
            text, text.rsplit("$.", 1)[-1].rstrip("`") if "$." in text else None
        ) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadRequest(f"the body cannot be read as JSON: {error}") from error
    for field, allowed in _NEUTRAL.items():
        if (value := getattr(body, field, None)) not in allowed:
            choices = " or ".join(repr(choice) for choice in allowed if choice is not None)
            raise BadRequest(
                f"{field}={value!r} is not supported by the embedded engine; use"
                f" {choices or 'leaving it out'}",
                field,
            )
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream=true", "stream_options")
    for field in ("prompt_logprobs", "echo"):
        value = getattr(body, field, None)
        if body.stream and value is not None and value is not False:  # 0 is a request too
            raise BadRequest(f"{field} cannot be streamed; use stream=false", field)
    return body


def sampling_params(
    body: ChatBody | TextBody,
    eos_token_ids: tuple[int, ...],
    room: int,
    vocabulary: int,
    never: Sequence[int] = (),
) -> list[SamplingParams]:
    """The sampling parameters of the ``n`` choices of a request with ``room`` tokens left in its
    context; ``never`` are ids that may not be sampled.

    The choice at index i has the seed ``seed + i``, as in vLLM; the prompt's log-probs are computed
    for the first alone. Raises BadRequest for a value out of range.
    """
    limit = getattr(body, "max_completion_tokens", None)
    limit = body.max_tokens if limit is None else limit
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    _check_ranges(body, limit, stop, vocabulary)
    ends = () if body.ignore_eos else eos_token_ids
    max_tokens = room if limit is None else min(limit, room)
    least = body.min_tokens or 0
    _check("min_tokens", least, 0 <= least <= max_tokens, f"at most max_tokens, here {max_tokens}")
    first = SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=_SEEDS.getrandbits(63) if body.seed is None else body.seed,
        stop=stop,
        stop_token_ids=tuple(dict.fromkeys([*ends, *(body.stop_token_ids or ())])),
        min_tokens=least,
        logit_bias=(*(body.logit_bias or {}).items(), *((token, -math.inf) for token in never)),
        top_logprobs=body.alternatives,
        prompt_logprobs=_prompt_alternatives(body),
    )
    siblings = [
        replace(first, seed=first.seed + index, prompt_logprobs=None)
        for index in range(1, body.n or 1)
    ]
    return [first, *siblings]


def _prompt_alternatives(body: ChatBody | TextBody) -> int | None:
    """Number of alternatives to report for each prompt token; None without prompt log-probs."""
    counts = [] if body.prompt_logprobs is None else [body.prompt_logprobs]
    if isinstance(body, TextBody) and body.echo and body.wants_logprobs:
        counts.append(body.alternatives)
    return max(counts, default=None)


def _check_ranges(
    body: ChatBody | TextBody, max_tokens: int | None, stop: tuple[str, ...], vocabulary: int
) -> None:
    tops = f"from 0 to {_MAX_ALTERNATIVES}"
    field = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
    bias = body.logit_bias or {}
    _check("n", body.n, 1 <= _or(body.n, 1) <= _MAX_CHOICES, f"from 1 to {_MAX_CHOICES}")
    _check("max_tokens", max_tokens, max_tokens is None or max_tokens >= 1, "at least 1")
    _check("temperature", body.temperature, (body.temperature or 0.0) >= 0, "0 or more")
    _check("top_p", body.top_p, body.top_p is None or 0 < body.top_p <= 1, "in (0, 1]")
    _check("top_k", body.top_k, body.top_k is None or body.top_k >= -1, "-1 (off) or at least 1")
    _check("min_p", body.min_p, 0 <= (body.min_p or 0.0) <= 1, "in [0, 1]")
    repetition, count = body.repetition_penalty, body.prompt_logprobs
    _check("repetition_penalty", repetition, _or(repetition, 1.0) > 0, "above 0")
    for name in ("presence_penalty", "frequency_penalty"):
        _check(name, getattr(body, name), abs(getattr(body, name) or 0.0) <= 2, "in [-2, 2]")
    _check("stop", body.stop, all(stop), "without empty texts")
    _check(field, body.alternatives, 0 <= body.alternatives <= _MAX_ALTERNATIVES, tops)
    _check("prompt_logprobs", count, 0 <= (count or 0) <= _MAX_ALTERNATIVES, tops)
    are_known = all(0 <= token < vocabulary for token in bias)
    _check("logit_bias", bias, are_known, "of token ids of this model")
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs=true", "top_logprobs")


def fit_prompt(prompt_ids: np.ndarray, body: GenerateBody, max_seq_len: int) -> np.ndarray:
    """The prompt, truncated where the request asks for it, with room for at least one token.

    Raises BadRequest, in the wording clients recognise as a context-length error, when it does not
    fit.
    """
    if (limit := body.truncate_prompt_tokens) is not None:
        _check("truncate_prompt_tokens", limit, limit == -1 or limit >= 1, "-1 or at least 1")
        side = _or(body.truncation_side, "left")
        _check("truncation_side", side, side in ("left", "right"), "'left' or 'right'")
        limit = max_seq_len - 1 if limit == -1 else limit
        prompt_ids = prompt_ids[-limit:] if side == "left" else prompt_ids[:limit]
    if len(prompt_ids) == 0:
        raise BadRequest("the prompt is empty", "prompt")
    if len(prompt_ids) >= max_seq_len:
        raise overlong(len(prompt_ids), max_seq_len)
    return prompt_ids


def _or(value: object, default: object) -> Any:
    return default if value is None else value


def _check(field: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise BadRequest(f"{field}={value!r} is out of range: it must be {allowed}", field)
