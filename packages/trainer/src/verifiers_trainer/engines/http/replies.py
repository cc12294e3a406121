"""Responses of the endpoint, as bytes: finished generations in the format of OpenAI and vLLM."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from verifiers.clients.reply import LEAST_LOGPROB, version_spans
from verifiers.data.text import split_reasoning
from verifiers.types import Message, ToolCall
from verifiers_trainer.engines.http.chat import ChatFormat
from verifiers_trainer.engines.http.tool_calls import ToolCallParser
from verifiers_trainer.engines.http.wire import ChatBody, GenerateBody, TextBody
from verifiers_trainer.engines.requests import Alternatives, Generation, PromptLogprobs


def chat_reply(
    generations: Sequence[Generation],
    body: ChatBody,
    chat: ChatFormat,
    model: str,
    parser: ToolCallParser | None,
) -> bytes:
    """A ``chat.completion`` with a choice for each generation; ``parser`` turns calls in the text
    to ``tool_calls``."""
    first = generations[0]
    opened = chat.opens_thought(first.request.prompt_ids)
    choices = []
    for index, generation in enumerate(generations):
        message, finish_reason = message_of(generation, body, chat, parser, opened)
        choice = {
            **choice_fields(index, generation, body),
            "message": message,
            "finish_reason": finish_reason,
        }
        if body.logprobs:
            choice["logprobs"] = {"content": content_logprobs(generation, body, chat)}
        choices.append(choice)
    num_prompt = len(first.request.prompt_ids)
    reply = _envelope("chat.completion", generations, choices, model, num_prompt)
    if body.return_token_ids:
        reply["prompt_token_ids"] = first.request.prompt_ids.tolist()
    if body.prompt_logprobs is not None:
        reply["prompt_logprobs"] = _prompt_logprobs(first, chat)
    return msgspec.json.encode(reply)


def text_reply(
    prompts: Sequence[Sequence[Generation]], body: TextBody, chat: ChatFormat, model: str
) -> bytes:
    """A ``text_completion``: the choices of the first prompt, then those of the next."""
    choices: list[dict[str, object]] = []
    for siblings in prompts:
        ids = siblings[0].request.prompt_ids.tolist()
        if body.echo:
            echoed = chat.decode(ids, skip_special_tokens=body.skip_special_tokens is not False)
        else:
            echoed = ""
        for generation in siblings:
            text = echoed + completion_text(generation, body, chat)
            choice = {**choice_fields(len(choices), generation, body), "text": text}
            if body.wants_logprobs:
                choice["logprobs"] = text_logprobs(
                    generation, siblings[0].prompt_logprobs, body, chat
                )
            if body.return_token_ids:
                choice["prompt_token_ids"] = ids
            if body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = _prompt_logprobs(siblings[0], chat)
            choices.append(choice)
    flat = [generation for siblings in prompts for generation in siblings]
    prompt_tokens = sum(len(siblings[0].request.prompt_ids) for siblings in prompts)
    return msgspec.json.encode(_envelope("text_completion", flat, choices, model, prompt_tokens))


def completion_text(
    generation: Generation, body: GenerateBody, chat: ChatFormat, with_tags: bool = False
) -> str:
    """The text without the stop token, or the stop text and what follows it.

    ``include_stop_str_in_output`` keeps the stop text, ``with_tags`` the tags of reasoning and
    calls that are special tokens.
    """
    params = generation.request.params
    token_ids = generation.token_ids.tolist()
    if token_ids and token_ids[-1] in params.stop_token_ids:
        token_ids.pop()
    if with_tags and body.skip_special_tokens is not False:
        text = chat.decode_with_tags(token_ids)
    else:
        text = chat.decode(token_ids, skip_special_tokens=body.skip_special_tokens is not False)
    stop = generation.stop_text
    if stop is None:
        return text
    # Stop texts before min_tokens are ignored, so with min_tokens the last occurrence ended it,
    # otherwise the first.
    position = text.rfind(stop) if params.min_tokens else text.find(stop)
    end = position + (len(stop) if body.include_stop_str_in_output else 0)
    return text[:end] if position >= 0 else text


def message_of(
    generation: Generation,
    body: ChatBody,
    chat: ChatFormat,
    parser: ToolCallParser | None,
    opened: bool,
) -> tuple[dict[str, Any], str]:
    """The assistant's message and its finish reason."""
    message, reason = message_of_reply(
        completion_text(generation, body, chat, parser is not None or body.separate_reasoning),
        generation.finish_reason,
        parser,
        generation.request.request_id,
        opened,
        body.separate_reasoning,
    )
    if body.separate_reasoning:
        message.setdefault("reasoning_content", None)
    return message, reason


def message_of_reply(
    text: str,
    finish_reason: str,
    parser: ToolCallParser | None,
    call_id: str,
    opened: bool,
    separate_reasoning: bool,
) -> tuple[Message, str]:
    """As `message_of_text`. ``opened``: the prompt ends inside a ``<think>`` block, so a reply that
    is cut there is all reasoning, with the calls that it drafts."""
    thought, spoken = split_reasoning(text, opened)
    if separate_reasoning:
        return message_of_text(spoken, finish_reason, parser, call_id, thought)
    parser = None if opened and not spoken else parser
    return message_of_text(text, finish_reason, parser, call_id)


def message_of_text(
    text: str, finish_reason: str, parser: ToolCallParser | None, call_id: str, thought: str = ""
) -> tuple[Message, str]:
    """The assistant's message in a completion's text and its finish reason; ids of calls begin with
    ``call_id``."""
    around, calls = parser(text) if parser is not None else (text, [])
    message = Message(role="assistant", content=around or (None if calls else ""))
    if calls:
        message["tool_calls"] = [
            ToolCall(f"call-{call_id}-{index}", call["name"], call["arguments"])
            for index, call in enumerate(calls)
        ]
        finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
    if thought:
        message["reasoning_content"] = thought
    return message, finish_reason


def choice_fields(index: int, generation: Generation, body: GenerateBody) -> dict[str, Any]:
    """Fields of chat and text choices; ``stop_reason`` is the requested stop text or token."""
    token_ids = generation.token_ids.tolist()
    stop_reason: str | int | None = generation.stop_text
    if stop_reason is None and token_ids and token_ids[-1] in (body.stop_token_ids or ()):
        stop_reason = token_ids[-1]
    choice: dict[str, object] = {
        "index": index,
        "finish_reason": generation.finish_reason,
        "stop_reason": stop_reason,
        "logprobs": None,
    }
    if body.return_token_ids:
        choice["token_ids"] = token_ids
    if body.return_weight_versions:
        choice["weight_versions"] = version_spans(generation.versions)
    return choice


def _envelope(
    kind: str,
    generations: Sequence[Generation],
    choices: list[dict],
    model: str,
    prompt_tokens: int,
) -> dict[str, object]:
    return {
        "id": generations[0].request.request_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage_of(generations, prompt_tokens),
    }


def usage_of(generations: Sequence[Generation], prompt_tokens: int) -> dict[str, int]:
    """``usage``: tokens of the prompts, each counted once, and of all completions."""
    completion_tokens = sum(len(generation.token_ids) for generation in generations)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


# --- log-probs ------------------------------------------------------------------------------------


def content_logprobs(
    generation: Generation, body: GenerateBody, chat: ChatFormat
) -> list[dict[str, Any]]:
    """``choices[i].logprobs.content`` of a chat completion."""
    entries = []
    for index, (token, logprob) in enumerate(_pairs(generation.token_ids, generation.logprobs)):
        pairs = []
        if generation.alternatives:
            best = generation.alternatives[index]
            pairs = _pairs(best.token_ids, best.logprobs)
        alternatives = [_entry(*pair, body, chat) for pair in pairs]
        entries.append({**_entry(token, logprob, body, chat), "top_logprobs": alternatives})
    return entries


def _entry(token: int, logprob: float, body: GenerateBody, chat: ChatFormat) -> dict[str, Any]:
    piece = _piece(token, body, chat)
    return {"token": piece, "logprob": max(logprob, LEAST_LOGPROB), "bytes": None}


def text_logprobs(
    generation: Generation, prompt: PromptLogprobs | None, body: TextBody, chat: ChatFormat
) -> dict[str, Any]:
    """``choices[i].logprobs`` of a text completion; an echoed prompt comes first, its first token
    without a value."""
    token_ids, best = generation.token_ids, generation.alternatives
    logprobs: list[float | None] = generation.logprobs.tolist()
    if body.echo and prompt is not None:
        ids = generation.request.prompt_ids
        token_ids = np.concatenate([ids, token_ids])
        logprobs = [None, *prompt.logprobs.tolist(), *logprobs]
        nothing = Alternatives(np.empty(0, np.int32), np.empty(0, np.float32))
        of_prompt = prompt.alternatives or [nothing] * len(prompt.logprobs)
        count = body.alternatives
        best = [
            nothing,
            *(Alternatives(a.token_ids[:count], a.logprobs[:count]) for a in of_prompt),
            *(best or [nothing] * len(generation.token_ids)),
        ]
    pieces = [_piece(token, body, chat) for token in token_ids.tolist()]
    tops: list[dict[str, float] | None] = []
    for index, (piece, logprob) in enumerate(zip(pieces, logprobs, strict=True)):
        pairs_best = _pairs(best[index].token_ids, best[index].logprobs) if best else []
        by_piece = {
            _piece(token, body, chat): max(value, LEAST_LOGPROB) for token, value in pairs_best
        }
        tops.append(None if logprob is None else {**by_piece, piece: logprob})
    offsets = [0, *accumulate(len(piece) for piece in pieces)][:-1]
    values = {"token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
    return {"tokens": pieces, **values}


def _prompt_logprobs(
    generation: Generation, chat: ChatFormat
) -> list[dict[str, dict[str, object]] | None]:
    """vLLM's ``prompt_logprobs``: for each token after the first, ``{id: {logprob, rank,
    decoded_token}}``."""
    scored = generation.prompt_logprobs
    assert scored is not None
    entries: list[dict[str, dict[str, object]] | None] = [None]
    for index, token in enumerate(generation.request.prompt_ids[1:].tolist()):
        ranked = []
        if scored.alternatives:
            best = scored.alternatives[index]
            pairs = _pairs(best.token_ids, best.logprobs)
            ranked = [(*pair, rank) for rank, pair in enumerate(pairs, start=1)]
        ranked.append((token, float(scored.logprobs[index]), int(scored.ranks[index])))
        entries.append(
            {
                str(each): {
                    "logprob": max(logprob, LEAST_LOGPROB),
                    "rank": rank,
                    "decoded_token": chat.piece(each),
                }
                for each, logprob, rank in ranked
            }
        )
    return entries


def _pairs(token_ids: np.ndarray, logprobs: np.ndarray) -> list[tuple[int, float]]:
    return list(zip(token_ids.tolist(), logprobs.tolist(), strict=True))


def _piece(token: int, body: GenerateBody, chat: ChatFormat) -> str:
    return f"token_id:{token}" if body.return_tokens_as_token_ids else chat.piece(token)
