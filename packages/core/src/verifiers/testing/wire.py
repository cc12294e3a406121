"""The wire formats from the server's side: a request's body as a `ModelRequest`, a `Response` as a body or a stream.

Completions carry token ids and log-probabilities in vLLM's fields, and only when the request asks for them; streams,
responses and messages are written by ``clients.dialects``. This module opens nothing and knows no faults (``server``).
"""

from __future__ import annotations

import json
from typing import Any

from verifiers.clients.dialects import DIALECTS, Dialect
from verifiers.types import Message, ModelRequest, Response

_NOT_SAMPLING = frozenset(("model", "messages", "prompt", "tools"))


def read_request(path: str, body: bytes) -> ModelRequest:
    """The request in a body. Raises: ``ValueError`` when it is no completion request."""
    fields = json.loads(body)
    if (dialect := _dialect(path)) is not None and isinstance(fields, dict):
        return dialect.parse_request(fields).model_request()
    if not isinstance(fields, dict) or not isinstance(fields.get("model"), str):
        raise ValueError("the body must be an object with a model")
    in_chat = path.endswith("/chat/completions")
    given: Any = fields.get("messages" if in_chat else "prompt")
    if in_chat and not (isinstance(given, list) and all(isinstance(message, dict) for message in given)):
        raise ValueError("messages must be a list of objects")
    return ModelRequest(
        prompt=[Message(message) for message in given] if in_chat else given,
        model=fields["model"],
        message_type="chat" if in_chat else "completion",
        tools=fields.get("tools"),
        sampling_args={name: value for name, value in fields.items() if name not in _NOT_SAMPLING},
        seed=fields.get("seed"),
    )


def _dialect(path: str) -> Dialect | None:
    """The dialect of a path, but for completions."""
    name = path.rpartition("/")[2]
    return DIALECTS[name] if name in ("responses", "messages") else None


def answer_body(path: str, body: bytes, response: Response, request: ModelRequest) -> bytes:
    """The answer to a request in its own form: a stream where it asks for one, else JSON."""
    fields = json.loads(body)
    dialect = _dialect(path)
    if dialect is None and path.endswith("/chat/completions") and fields.get("stream"):
        dialect = DIALECTS["chat"]
    if dialect is None:
        return completion_body(response, request)
    call = dialect.parse_request(fields)
    if call.stream:
        return b"".join(dialect.stream_events(response, call))
    return json.dumps(dialect.response_body(response, call)).encode("ascii")


def refusal_body(path: str, status: int, text: str) -> bytes:
    """The JSON body of a refusal in the form of a path."""
    dialect = _dialect(path)
    return error_body(text) if dialect is None else json.dumps(dialect.error_body(status, text)).encode("ascii")


def completion_body(response: Response, request: ModelRequest) -> bytes:
    """The JSON body of one completion."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": response.finish_reason}
    body: dict[str, Any] = {"id": response.id, "created": response.created, "model": response.model}
    in_chat = request.message_type == "chat"
    if in_chat:
        choice["message"] = dict(response.message)
    else:
        choice["text"] = response.text
    if tokens := response.tokens:
        if request.sampling_args.get("return_token_ids"):
            body["prompt_token_ids"] = tokens.prompt_ids.tolist()
            choice["token_ids"] = tokens.completion_ids.tolist()
        if request.sampling_args.get("logprobs"):
            choice["logprobs"] = _logprobs(tokens.completion_ids.tolist(), tokens.completion_logprobs.tolist(), in_chat)
    if response.version >= 0:
        choice["weight_versions"] = [{"version": response.version, "start": 0, "end": response.usage.completion_tokens}]
    usage = response.usage
    body |= {
        "object": "chat.completion" if in_chat else "text_completion",
        "choices": [choice],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        },
    }
    return json.dumps(body).encode("ascii")


def _logprobs(token_ids: list[int], logprobs: list[float], in_chat: bool) -> dict[str, Any]:
    texts = [f"token_id:{token_id}" for token_id in token_ids]
    if not in_chat:
        return {"tokens": texts, "token_logprobs": logprobs}
    return {"content": [{"token": text, "logprob": logprob} for text, logprob in zip(texts, logprobs, strict=True)]}


def models_body(names: list[str]) -> bytes:
    """The JSON body of ``GET /models``."""
    return json.dumps({"object": "list", "data": [{"id": name, "object": "model"} for name in names]}).encode("ascii")


def error_body(text: str, code: str = "") -> bytes:
    """The JSON body of a refusal."""
    return json.dumps({"error": {"message": text, "code": code}}).encode("ascii")


def http_answer(status: int, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """One whole HTTP/1.1 answer."""
    is_stream = body.startswith((b"event:", b"data:"))
    kind = "text/event-stream" if is_stream else "application/json"
    lines = {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} Scripted\r\n{head}\r\n".encode("latin-1") + body
