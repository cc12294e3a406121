"""Streamed completions: server-sent events in the format of OpenAI and vLLM.

A piece is sent once its text is final: its characters are complete, and it does not begin a stop
text. The pieces together equal the text of the response without streaming, with its token ids and
log-probs. Tool calls and reasoning, which need the whole text, are sent in one piece at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from verifiers.clients.dialects import sse
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

DONE = sse.event(b"[DONE]")
_UNFINISHED = "\ufffd"
"""The replacement character that decoders write for an incomplete character."""


class StreamedReply:
    """The events of a request; ``requests`` are all its completions, in the order of choices."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        body: ChatBody | TextBody,
        chat: ChatFormat,
        model: str,
        parser: ToolCallParser | None,
    ):
        self._body, self._model = body, model
        self._with_usage = body.stream_options is not None and bool(
            body.stream_options.include_usage
        )
        self._id, self._created = requests[0].request_id, int(time.time())
        self._kind = "chat.completion.chunk" if isinstance(body, ChatBody) else "text_completion"
        is_unsplit = isinstance(body, ChatBody) and (parser is not None or body.separate_reasoning)
        self._choices = [
            _Choice(index, each, body, chat, parser, is_unsplit)
            for index, each in enumerate(requests)
        ]
        self._finished: list[Generation] = []

    def opening(self) -> Iterator[bytes]:
        """The events before the first token: the assistant's role."""
        if not isinstance(self._body, ChatBody):
            return
        for choice in self._choices:
            delta = {
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            shared = {"prompt_token_ids": choice.prompt_ids} if self._body.return_token_ids else {}
            yield self._chunk([{"index": choice.index, **delta}], **shared)

    def token(
        self, index: int, token: int, logprob: float, best: Alternatives | None
    ) -> Iterator[bytes]:
        """The event of a choice's new token, if its text is final."""
        if (piece := self._choices[index].token(token, logprob, best)) is not None:
            yield self._chunk([piece])

    def finish(self, index: int, generation: Generation) -> Iterator[bytes]:
        """The rest of a choice and its finish reason; after the last choice the usage."""
        yield self._chunk([self._choices[index].finish(generation)])
        self._finished.append(generation)
        if len(self._finished) < len(self._choices):
            return
        if self._with_usage:
            first_of_prompts = self._choices[:: self._body.n or 1]
            num_prompt = sum(len(choice.prompt_ids) for choice in first_of_prompts)
            yield self._chunk([], usage=usage_of(self._finished, num_prompt))
        yield DONE

    def _chunk(self, choices: list[Mapping[str, object]], **shared: object) -> bytes:
        chunk = {
            "id": self._id,
            "object": self._kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            **({"usage": None} if self._with_usage else {}),
            **shared,
        }
        return sse.event(chunk)


class _Choice:
    """The progress of a streamed completion."""

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        body: ChatBody | TextBody,
        chat: ChatFormat,
        parser: ToolCallParser | None,
        is_unsplit: bool,
    ):
        self.index, self.prompt_ids = index, request.prompt_ids.tolist()
        self._request = request
        self._body = body
        self._chat = chat
        self._parser = parser
        self._is_unsplit = is_unsplit
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._best: list[Alternatives] = []
        self._text, self._sent = "", 0
        """The decoded text, and the number of characters sent."""
        self._first, self._next = 0, 0
        """Tokens from ``_next`` on are not in ``_text``; decoding begins at ``_first``."""
        self._num_sent = 0
        """Number of tokens sent."""
        self._offset = 0
        """Text offset of the next token in a text completion's log-probs."""

    def token(self, token: int, logprob: float, best: Alternatives | None) -> dict[str, Any] | None:
        """The choice of the next event; None while no text is final."""
        self._tokens.append(token)
        self._logprobs.append(logprob)
        if best is not None:
            self._best.append(best)
        if self._is_unsplit:
            return None
        self._read()
        end = len(self._text) - self._num_withheld()
        if end <= self._sent:
            return None
        piece, self._sent = self._text[self._sent : end], end
        arrays = np.array(self._tokens, np.int32), np.array(self._logprobs, np.float32)
        so_far = Generation(self._request, *arrays, alternatives=self._best)
        fields = {"index": self.index, "finish_reason": None, **self._tokens_of(so_far)}
        return fields | self._as_text(piece)

    def finish(self, generation: Generation) -> dict[str, Any]:
        """The choice of the last event, with the remaining text. Raises BadRequest when the sent
        text is no prefix."""
        fields = choice_fields(self.index, generation, self._body) | self._tokens_of(generation)
        if self._is_unsplit and isinstance(self._body, ChatBody):
            opened = self._chat.opens_thought(self._request.prompt_ids)
            message, fields["finish_reason"] = message_of(
                generation, self._body, self._chat, self._parser, opened
            )
            message.pop("role")
            for number, call in enumerate(message.get("tool_calls", ())):
                call["index"] = number
            return {**fields, "delta": message}
        text = completion_text(generation, self._body, self._chat)
        if not text.startswith(self._text[: self._sent]):
            raise BadRequest(
                "this tokenizer decodes tokens one by one to another text; use stream=false",
                status=500,
            )
        return fields | self._as_text(text[self._sent :])

    def _as_text(self, piece: str) -> dict[str, Any]:
        is_chat = isinstance(self._body, ChatBody)
        return {"delta": {"content": piece}} if is_chat else {"text": piece}

    def _read(self) -> None:
        """Decode new tokens into the text once they are complete characters."""
        skip = self._body.skip_special_tokens is not False
        before = self._chat.decode(self._tokens[self._first : self._next], skip_special_tokens=skip)
        text = self._chat.decode(self._tokens[self._first :], skip_special_tokens=skip)
        if len(text) <= len(before) or text.endswith(_UNFINISHED):
            return
        self._text += text[len(before) :]
        self._first, self._next = self._next, len(self._tokens)

    def _num_withheld(self) -> int:
        """Number of characters at the end that may begin a stop text."""
        return max(
            (
                size
                for stop in self._request.params.stop
                for size in range(1, min(len(stop), len(self._text) - self._sent + 1))
                if self._text.endswith(stop[:size])
            ),
            default=0,
        )

    def _tokens_of(self, generation: Generation) -> dict[str, Any]:
        """Ids and log-probs of the tokens not sent yet."""
        begin, self._num_sent = self._num_sent, len(generation.token_ids)
        part = Generation(
            generation.request,
            generation.token_ids[begin:],
            generation.logprobs[begin:],
            alternatives=generation.alternatives[begin:],
        )
        fields: dict[str, Any] = {"logprobs": None}
        if self._body.return_token_ids:
            fields["token_ids"] = part.token_ids.tolist()
        if isinstance(self._body, ChatBody):
            if self._body.logprobs:
                fields["logprobs"] = {"content": content_logprobs(part, self._body, self._chat)}
        elif self._body.wants_logprobs:
            logprobs = text_logprobs(part, None, self._body, self._chat)
            logprobs["text_offset"] = [self._offset + offset for offset in logprobs["text_offset"]]
            self._offset += sum(map(len, logprobs["tokens"]))
            fields["logprobs"] = logprobs
        if begin == 0 and self._body.return_token_ids and not isinstance(self._body, ChatBody):
            fields["prompt_token_ids"] = self.prompt_ids
        return fields
