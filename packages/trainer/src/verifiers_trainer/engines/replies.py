"""Responses of the endpoint, as bytes: a finished generation in the shape OpenAI and vLLM clients read."""

from __future__ import annotations

import time
from itertools import accumulate
from typing import Any

import msgspec

from verifiers_trainer.engines.chat import ChatFormat, ToolCallParser
from verifiers_trainer.engines.requests import Generation
from verifiers_trainer.engines.wire import ChatBody, GenerateBody, TextBody, version_spans


def chat_reply(
    generation: Generation, body: ChatBody, chat: ChatFormat, model: str, parser: ToolCallParser | None
) -> bytes:
    """A ``chat.completion``; with a ``parser``, calls found in the text become ``tool_calls``."""
    text = completion_text(generation, body, chat)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    finish_reason: str = generation.finish_reason
    if parser is not None:
        around, calls = parser(text)
        if calls:
            finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
            message["content"] = around or None
            message["tool_calls"] = [
                {"id": f"call-{generation.request.request_id}-{index}", "type": "function", "function": call}
                for index, call in enumerate(calls)
            ]
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
    if body.logprobs:
        entries = zip(_pieces(generation, body, chat), generation.logprobs.tolist(), strict=True)
        choice["logprobs"] = {
            "content": [
                {"token": piece, "logprob": logprob, "bytes": None, "top_logprobs": []} for piece, logprob in entries
            ]
        }
    reply = _envelope("chat.completion", generation, choice, body, model)
    if body.return_token_ids:
        reply["prompt_token_ids"] = generation.request.prompt_ids.tolist()
    return msgspec.json.encode(reply)


def text_reply(generation: Generation, body: TextBody, chat: ChatFormat, model: str) -> bytes:
    """A ``text_completion``."""
    choice: dict[str, Any] = {
        "index": 0,
        "text": completion_text(generation, body, chat),
        "finish_reason": generation.finish_reason,
        "logprobs": None,
    }
    if body.logprobs is not None and body.logprobs is not False:
        pieces = _pieces(generation, body, chat)
        logprobs = generation.logprobs.tolist()
        offsets = [0, *accumulate(len(piece) for piece in pieces)][:-1]
        choice["logprobs"] = {
            "tokens": pieces,
            "token_logprobs": logprobs,
            "top_logprobs": [{piece: logprob} for piece, logprob in zip(pieces, logprobs, strict=True)],
            "text_offset": offsets,
        }
    if body.return_token_ids:
        choice["prompt_token_ids"] = generation.request.prompt_ids.tolist()
    return msgspec.json.encode(_envelope("text_completion", generation, choice, body, model))


def completion_text(generation: Generation, body: GenerateBody, chat: ChatFormat) -> str:
    """The text without what ended it: neither the stop token nor the stop text and what follows."""
    params = generation.request.params
    token_ids = generation.token_ids.tolist()
    if token_ids and token_ids[-1] in params.stop_token_ids:
        token_ids.pop()
    text = chat.decode(token_ids, skip_special_tokens=body.skip_special_tokens is not False)
    if generation.stopped_by_text:
        found = [position for stop in params.stop if (position := text.find(stop)) >= 0]
        text = text[: min(found, default=len(text))]
    return text


def _envelope(kind: str, generation: Generation, choice: dict, body: GenerateBody, model: str) -> dict[str, Any]:
    """The fields both kinds share; ``choice`` is completed with what the request asks to be returned."""
    if body.return_token_ids:
        choice["token_ids"] = generation.token_ids.tolist()
    if body.return_weight_versions:
        choice["weight_versions"] = version_spans(generation.versions)
    prompt_tokens, completion_tokens = len(generation.request.prompt_ids), len(generation.token_ids)
    return {
        "id": generation.request.request_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _pieces(generation: Generation, body: GenerateBody, chat: ChatFormat) -> list[str]:
    token_ids = generation.token_ids.tolist()
    if body.return_tokens_as_token_ids:
        return [f"token_id:{token}" for token in token_ids]
    return [chat.piece(token) for token in token_ids]
