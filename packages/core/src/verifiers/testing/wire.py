"""The wire formats from the server's side: a request's body as a `ModelRequest`, a `Response` as a
body or a stream.

Completions carry token ids and log-probabilities in vLLM's fields, and only when the request asks
for them; streams, responses and messages are written by ``clients.dialects``. This module opens
nothing and knows no faults (``server``).
"""

from __future__ import annotations

from typing import Any

from verifiers.clients.dialects import DIALECTS, Dialect, chat
from verifiers.clients.payload import encode
from verifiers.runtime.decoding import decode_message
from verifiers.types import Message, ModelRequest, Response

_NOT_SAMPLING = frozenset(("model", "messages", "prompt", "tools"))


def read_request(path: str, body: bytes) -> ModelRequest:
    """The request in a body. Raises: ``ValueError`` when it is no completion request."""
    fields = decode_message(body)
    if (dialect := _dialect(path)) is not None and isinstance(fields, dict):
        return dialect.parse_request(fields).model_request()
    if not isinstance(fields, dict) or not isinstance(fields.get("model"), str):
        raise ValueError("the body must be an object with a model")
    in_chat = path.endswith("/chat/completions")
    content: Any = fields.get("messages" if in_chat else "prompt")
    if in_chat and not (
        isinstance(content, list) and all(isinstance(message, dict) for message in content)
    ):
        raise ValueError("messages must be a list of objects")
    return ModelRequest(
        prompt=[Message(message) for message in content] if in_chat else content,
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
    """The answer to a request in its own form: a stream where it asks for a stream, else JSON."""
    fields = decode_message(body)
    dialect = _dialect(path)
    if dialect is None and path.endswith("/chat/completions") and fields.get("stream"):
        dialect = DIALECTS["chat"]
    if dialect is None:
        token_fields = [name for name, value in request.sampling_args.items() if value] + [
            "return_weight_versions"
        ]
        return encode(
            chat.completion_body(response, path.endswith("/chat/completions"), token_fields)
        )
    call = dialect.parse_request(fields)
    if call.stream:
        return b"".join([*dialect.stream_opening(call), *dialect.stream_rest(response, call)])
    return encode(dialect.response_body(response, call))
