"""A completion as it comes: server-sent events in the shape that OpenAI and vLLM clients read.

A piece is sent as soon as its text cannot change any more: a character is whole, and what stands there does not begin a
stop text. The pieces together are exactly the text of the answer that is not streamed; its token ids and log-probs come
with them. What can only be read of the whole text, tool calls and thoughts, comes in one piece at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from verifiers_trainer.engines.http.chat import BadRequest, ChatFormat
from verifiers_trainer.engines.http.replies import (
    choice_fields,
    completion_text,
    content_logprobs,
    message_of,
    text_logprobs,
    usage_of,
)
from verifiers_trainer.engines.http.tool_calls import ToolCallParser
from verifiers_trainer.engines.http.wire import ChatBody, TextBody
from verifiers_trainer.engines.requests import Alternatives, Generation, GenerationRequest

DONE = b"data: [DONE]\n\n"
_UNFINISHED = "\ufffd"
"""What decoders write for bytes that are no whole character yet."""


def event(content: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + content + b"\n\n"


class StreamedReply:
    """The events of one request; ``requests`` are all its completions in the order of their choices."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        body: ChatBody | TextBody,
        chat: ChatFormat,
        model: str,
        parser: ToolCallParser | None,
    ):
        self._body, self._model = body, model
        self._with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._id, self._created = requests[0].request_id, int(time.time())
        self._kind = "chat.completion.chunk" if isinstance(body, ChatBody) else "text_completion"
        whole = isinstance(body, ChatBody) and (parser is not None or body.separate_reasoning)
        self._choices = [_Choice(index, each, body, chat, parser, whole) for index, each in enumerate(requests)]
        self._finished: list[Generation] = []

    def opening(self) -> Iterator[bytes]:
        """What is known before the first token: whose turn it is."""
        if not isinstance(self._body, ChatBody):
            return
        for choice in self._choices:
            delta = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            shared = {"prompt_token_ids": choice.prompt_ids} if self._body.return_token_ids else {}
            yield self._chunk([{"index": choice.index, **delta}], **shared)

    def token(self, index: int, token: int, logprob: float, best: Alternatives | None) -> Iterator[bytes]:
        """The event, if there is one yet, that a token of a choice leads to."""
        if (piece := self._choices[index].token(token, logprob, best)) is not None:
            yield self._chunk([piece])

    def finish(self, index: int, generation: Generation) -> Iterator[bytes]:
        """What was still held of a choice, and how it ended; after the last of them the usage."""
        yield self._chunk([self._choices[index].finish(generation)])
        self._finished.append(generation)
        if len(self._finished) < len(self._choices):
            return
        if self._with_usage:
            yield self._chunk([], usage=usage_of(self._finished, self._prompt_tokens()))
        yield DONE

    def _prompt_tokens(self) -> int:
        """Of each prompt once, however many choices it has."""
        per_prompt = self._body.n or 1
        return sum(len(choice.prompt_ids) for choice in self._choices[::per_prompt])

    def _chunk(self, choices: list[dict[str, Any]], **shared: Any) -> bytes:
        chunk = {
            "id": self._id,
            "object": self._kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            **({"usage": None} if self._with_usage else {}),
            **shared,
        }
        return event(msgspec.json.encode(chunk))


class _Choice:
    """What of one completion was sent, and what is held."""

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        body: ChatBody | TextBody,
        chat: ChatFormat,
        parser: ToolCallParser | None,
        whole: bool,
    ):
        self.index, self.prompt_ids = index, request.prompt_ids.tolist()
        self._request, self._body, self._chat, self._parser, self._whole = request, body, chat, parser, whole
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._best: list[Alternatives] = []
        self._text, self._sent = "", 0
        """The text that stands, and how many of its characters were sent."""
        self._first, self._next = 0, 0
        """Tokens from ``_next`` on are not in ``_text``; decoding begins at ``_first``, where the words before help."""
        self._taken = 0
        """How many tokens were sent."""
        self._offset = 0
        """Of the next token in the text of a text completion's log-probs."""

    def token(self, token: int, logprob: float, best: Alternatives | None) -> dict[str, Any] | None:
        """The choice of the next event; None while nothing can be said."""
        self._tokens.append(token)
        self._logprobs.append(logprob)
        if best is not None:
            self._best.append(best)
        if self._whole:
            return None
        self._read()
        end = len(self._text) - self._held()
        if end <= self._sent:
            return None
        piece, self._sent = self._text[self._sent : end], end
        arrays = np.array(self._tokens, np.int32), np.array(self._logprobs, np.float32)
        so_far = Generation(self._request, *arrays, alternatives=self._best)
        said: dict[str, Any] = {"index": self.index, "finish_reason": None, **self._tokens_of(so_far)}
        return {**said, "delta": {"content": piece}} if isinstance(self._body, ChatBody) else {**said, "text": piece}

    def finish(self, generation: Generation) -> dict[str, Any]:
        """The choice of the last event. Its text follows on what was sent; raises BadRequest where it cannot."""
        said = {**choice_fields(self.index, generation, self._body), **self._tokens_of(generation)}
        if self._whole and isinstance(self._body, ChatBody):
            opened = self._body.separate_reasoning and self._chat.opens_thought(self._request.prompt_ids)
            message, said["finish_reason"] = message_of(generation, self._body, self._chat, self._parser, opened)
            message.pop("role")
            for number, call in enumerate(message.get("tool_calls", ())):
                call["index"] = number
            return {**said, "delta": message}
        text = completion_text(generation, self._body, self._chat)
        if not text.startswith(self._text[: self._sent]):
            raise BadRequest("this tokenizer reads tokens differently one by one; ask without stream", status=500)
        rest = text[self._sent :]
        return {**said, "delta": {"content": rest}} if isinstance(self._body, ChatBody) else {**said, "text": rest}

    def _read(self) -> None:
        """Take into the text what the new tokens spell, once they are whole characters."""
        skip = self._body.skip_special_tokens is not False
        known = self._chat.decode(self._tokens[self._first : self._next], skip_special_tokens=skip)
        now = self._chat.decode(self._tokens[self._first :], skip_special_tokens=skip)
        if len(now) <= len(known) or now.endswith(_UNFINISHED):
            return
        self._text += now[len(known) :]
        self._first, self._next = self._next, len(self._tokens)

    def _held(self) -> int:
        """How many characters at the end may turn out to begin a stop text."""
        longest = 0
        for stop in self._request.params.stop:
            most = min(len(stop) - 1, len(self._text) - self._sent)
            longest = max(longest, next((n for n in range(most, 0, -1) if self._text.endswith(stop[:n])), 0))
        return longest

    def _tokens_of(self, generation: Generation) -> dict[str, Any]:
        """Ids and log-probs of the tokens that were not sent yet."""
        begin, self._taken = self._taken, len(generation.token_ids)
        part = Generation(
            generation.request,
            generation.token_ids[begin:],
            generation.logprobs[begin:],
            alternatives=generation.alternatives[begin:],
        )
        said: dict[str, Any] = {"token_ids": part.token_ids.tolist()} if self._body.return_token_ids else {}
        said["logprobs"] = None
        if isinstance(self._body, ChatBody):
            if self._body.logprobs:
                said["logprobs"] = {"content": content_logprobs(part, self._body, self._chat)}
        elif self._body.wants_logprobs:
            told = text_logprobs(part, None, self._body, self._chat)
            told["text_offset"] = [self._offset + offset for offset in told["text_offset"]]
            self._offset += sum(map(len, told["tokens"]))
            said["logprobs"] = told
        if begin == 0 and self._body.return_token_ids and not isinstance(self._body, ChatBody):
            said["prompt_token_ids"] = self.prompt_ids
        return said
