"""Clients that need no model: `ScriptedClient` returns scripted replies; conversations are recorded
and replayed.

They are real ``Client``s, so an environment, a rubric or a run is tested without mocks. None of
them opens a socket (``testing.FakeServer`` does).
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from verifiers.clients.protocol import Client
from verifiers.errors import ConfigError
from verifiers.storage.files import append_lines
from verifiers.testing.replies import ErrorScript, Replies, as_error, response_of, scripted_error
from verifiers.testing.tokenizer import ByteTokenizer
from verifiers.types import Message, ModelRequest, Response, ResponseTokens, ToolCall, Usage


def scripted_logprobs(token_ids: Sequence[int]) -> np.ndarray:
    """The log-probability of each scripted token, float32 [C]: -(id % 7 + 1) / 8, exact in binary.

    >>> scripted_logprobs([7, 8]).tolist()
    [-0.125, -0.25]
    """
    return -((np.asarray(token_ids, dtype=np.int32) % 7 + 1) / 8).astype(np.float32)


def byte_tokens(
    request: ModelRequest, response: Response, tokenizer: ByteTokenizer
) -> ResponseTokens:
    """The tokens of a scripted response; the end token is part of it unless it was cut."""
    if isinstance(request.prompt, str):
        prompt_ids = tokenizer.encode(request.prompt)
    else:
        rendered = tokenizer.apply_chat_template(
            request.prompt, tools=request.tools, add_generation_prompt=True
        )
        prompt_ids = list(rendered)  # type: ignore[arg-type]
    text = tokenizer.render(response.message)
    end = [] if response.finish_reason == "length" else [tokenizer.eos_token_id]
    completion_ids = [*text.encode("utf-8", "surrogatepass"), *end]
    return ResponseTokens(
        np.array(prompt_ids, dtype=np.int32),
        np.array(completion_ids, dtype=np.int32),
        scripted_logprobs(completion_ids),
        response.version,
    )


class ScriptedClient:
    """A `Client` that answers from a script; see ``testing.replies`` for the forms of ``replies``.

    ``tokens``: add ids of `ByteTokenizer` and `scripted_logprobs`. ``delay_s``: pause before each
    answer.
    ``errors``: call number (0 is the first) -> exception, or a function ``(request) -> exception or
    None``.
    ``strict``: a list that runs out is a ``ConfigError`` instead of starting again.

    Example: ``ScriptedClient(["cba"])``, ``ScriptedClient(lambda request:
    request.prompt[-1].content[::-1])``
    """

    def __init__(
        self,
        replies: object,
        *,
        tokens: bool = False,
        delay_s: float = 0,
        errors: ErrorScript = None,
        model: str = "scripted",
        strict: bool = False,
        tokenizer: ByteTokenizer | None = None,
    ):
        self.model = model
        self.requests: list[ModelRequest] = []
        self.in_flight = 0
        self.max_in_flight = 0
        self._replies = Replies(replies, strict)
        self._tokenizer = tokenizer or (ByteTokenizer() if tokens else None)
        self._delay_s = delay_s
        self._errors = errors

    async def complete(self, request: ModelRequest) -> Response:
        """The script's answer. Raises: the scripted error; ``ConfigError`` without a reply."""
        call_number = len(self.requests)
        self.requests.append(request)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            if error := scripted_error(self._errors, call_number, request):
                raise error
            reply = await self._replies.next(request)
            if error := as_error(reply):
                raise error
            return self.finish(response_of(reply, request, call_number), request)
        finally:
            self.in_flight -= 1

    async def aclose(self) -> None:
        """Nothing to close."""

    def finish(self, response: Response, request: ModelRequest) -> Response:
        """The response with token data and usage where the script gave none."""
        if self._tokenizer is None or response.tokens is not None:
            return response
        tokens = byte_tokens(request, response, self._tokenizer)
        usage = Usage(len(tokens.prompt_ids), len(tokens.completion_ids))
        return replace(response, tokens=tokens, usage=usage)


class RecordingClient:
    """Passes calls to ``client`` and appends every answer to the JSONL file ``path`` for
    `ReplayClient`."""

    def __init__(self, client: Client, path: str | Path):
        self.client = client
        self.path = Path(path)
        self.model = getattr(client, "model", None)

    async def complete(self, request: ModelRequest) -> Response:
        """The client's own answer; failures are raised and not recorded."""
        response = await self.client.complete(request)
        line = json.dumps({"request": _request_key(request), "response": _to_plain(response)})
        append_lines(self.path, f"{line}\n".encode("ascii"), is_durable=False)
        return response

    async def aclose(self) -> None:
        """Close the client that is recorded."""
        if close := getattr(self.client, "aclose", None):
            await close()


class ReplayClient:
    """Answers from a file of `RecordingClient`: equal requests in the order of recording."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._answers: dict[str, deque[Response]] = defaultdict(deque)
        self.model = None
        for line in self.path.read_text(encoding="ascii").split("\n"):
            if line:
                record = json.loads(line)
                self._answers[record["request"]].append(_from_plain(record["response"]))
                self.model = self.model or record["response"]["model"]

    async def complete(self, request: ModelRequest) -> Response:
        """The recorded answer; the last answer is given again. Raises: ``ConfigError`` for a
        request never recorded."""
        answers = self._answers.get(_request_key(request))
        if not answers:
            raise ConfigError(
                f"{self.path} has no recording of this request: {str(request.prompt)[-200:]}"
            )
        return answers.popleft() if len(answers) > 1 else answers[0]


def _request_key(request: ModelRequest) -> str:
    """What makes two requests the same call: everything the model sees."""
    seen = [request.prompt, request.model, request.message_type, request.tools]
    sampling = [dict(request.sampling_args), request.seed]
    return json.dumps([*seen, *sampling], sort_keys=True, default=str)


_PLAIN = ("finish_reason", "version", "model", "id", "created")
"""Fields of a response that JSON stores as they are."""


def _to_plain(response: Response) -> dict[str, object]:
    plain = {name: getattr(response, name) for name in _PLAIN}
    plain["message"] = dict(response.message)
    plain["usage"] = [response.usage.prompt_tokens, response.usage.completion_tokens]
    plain["tokens"] = None
    if (tokens := response.tokens) is not None:
        arrays = (tokens.prompt_ids, tokens.completion_ids, tokens.completion_logprobs)
        version = tokens.version if isinstance(tokens.version, int) else tokens.version.tolist()
        plain["tokens"] = [*(array.tolist() for array in arrays), version]
    return plain


def _from_plain(plain: dict[str, Any]) -> Response:
    message, tokens = Message(plain["message"]), None
    if message.tool_calls:
        message["tool_calls"] = [ToolCall.from_wire(call) for call in message.tool_calls]
    if plain["tokens"] is not None:
        prompt_ids, completion_ids, logprobs, version = plain["tokens"]
        tokens = ResponseTokens(
            np.array(prompt_ids, np.int32),
            np.array(completion_ids, np.int32),
            np.array(logprobs, np.float32),
            version if isinstance(version, int) else np.array(version),
        )
    fields = {name: plain[name] for name in _PLAIN}
    return Response(message=message, usage=Usage(*plain["usage"]), tokens=tokens, **fields)
