"""``TokenClient``: an OpenAI-shaped client over an engine that takes token ids and gives token ids.

Promise: the environment sees chat, the engine sees ids, and the ids that were sampled are the ids that are kept; text
is only ever made of them, never turned back into them. It is a core ``Client`` (``complete``), and answers
``.chat.completions.create`` and ``.completions.create`` for code that wants an ``AsyncOpenAI``. It samples nothing
itself and adds no sampling argument of its own.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from verifiers.errors import ConfigError, MalformedResponse, ModelError, OverlongPromptError, VerifiersError
from verifiers.types import Message, ModelRequest, Response, ResponseTokens, ToolCall, Usage
from verifiers_trainer.engines.exact.history import ExactHistory
from verifiers_trainer.engines.http.chat import BadRequest, ChatFormat
from verifiers_trainer.engines.http.tool_calls import ToolCallParser, resolve_tool_call_parser

log = logging.getLogger(__name__)

Generate = Callable[[list[int], dict[str, Any]], "Awaitable[Sequence[Any]] | Sequence[Any]"]
"""(prompt ids, sampling) -> (token ids, log-probs, finish reason), maybe awaited; a fourth value is the version."""
SAMPLING = frozenset(
    "max_tokens temperature top_p top_k min_p min_tokens stop stop_token_ids seed repetition_penalty "
    "presence_penalty frequency_penalty logit_bias ignore_eos".split()
)
"""What is handed to the engine."""
ASKED_ANYWAY = frozenset(
    "n stream logprobs top_logprobs return_token_ids return_tokens_as_token_ids return_weight_versions "
    "parallel_tool_calls tool_choice user metadata".split()
)
"""What asks for what this client does anyway, or for nothing of the sampling."""
LENGTHS = ("max_completion_tokens", "max_new_tokens")
_warned: set[str] = set()


class TokenClient:
    """A client over ``generate``.

    tokenizer: renders messages and tools with its chat template, and decodes.
    tool_call_parser: "auto" (what the chat template teaches), a name, a function from text to (text, calls), or
        None; used when tools are offered.
    reasoning_parser: a function from text to (reasoning, text), as ``split_reasoning``; None leaves it in the content.
    history: "render" renders the whole conversation each turn; "exact" keeps the sampled ids as the prefix and
        renders what is new, so a rollout never forks (the model then sees its earlier reasoning again).
    max_seq_len: a prompt this long is refused, which the environment sees as a prompt that is too long.
    """

    def __init__(
        self,
        generate: Generate,
        tokenizer: Any,
        *,
        model: str = "policy",
        base_url: str = "http://token-client.invalid/v1",
        api_key: str = "none",
        tool_call_parser: str | ToolCallParser | None = "auto",
        reasoning_parser: Callable[[str], tuple[str, str]] | None = None,
        history: Literal["render", "exact"] = "render",
        max_seq_len: int | None = None,
    ):
        if history not in ("render", "exact"):
            raise ConfigError(f'history is {history!r}; it must be "render" or "exact"', key="history")
        self.model, self.base_url, self.api_key = model, base_url, api_key
        self.tokenizer, self._generate = tokenizer, generate
        self._chat = ChatFormat(tokenizer)
        template = getattr(tokenizer, "chat_template", None)
        self._parse_calls = resolve_tool_call_parser(tool_call_parser, template)
        self._parse_reasoning = reasoning_parser
        self._history = ExactHistory(tokenizer) if history == "exact" else None
        self._max_seq_len = max_seq_len
        self._count = 0
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create_chat))
        self.completions = SimpleNamespace(create=self._create_text)

    async def aclose(self) -> None:
        """Nothing is held open."""

    async def close(self) -> None:
        """As ``aclose``."""

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """The ids of a conversation, ready for the answer. *Raises* ConfigError when the template refuses it."""
        try:
            rendered = self._chat.prompt_ids(
                json.dumps(list(messages)).encode(), json.dumps(list(tools)).encode() if tools else None
            )
        except BadRequest as error:
            raise ConfigError(str(error)) from error
        return rendered.tolist()

    async def complete(self, request: ModelRequest) -> Response:
        """One completion; see ``Client.complete``. What ``generate`` raises is this rollout's ``ModelError``."""
        prompt_ids = self._ids_of(request)
        if self._max_seq_len is not None and len(prompt_ids) >= self._max_seq_len:
            raise OverlongPromptError(f"the prompt has {len(prompt_ids)} tokens, the limit is {self._max_seq_len}")
        try:
            made = self._generate(list(prompt_ids), self._sampling(request))
            made = await made if inspect.isawaitable(made) else made
        except VerifiersError:
            raise
        except Exception as error:  # whatever the peer raises is mapped and chained
            raise ModelError(f"the engine failed: {type(error).__name__}: {error}") from error
        return self._response(request, prompt_ids, made)

    def _ids_of(self, request: ModelRequest) -> list[int]:
        if request.message_type == "completion":
            return self._chat.encode(str(request.prompt)).tolist()
        messages: Any = request.prompt
        if self._history is not None:
            known = self._history.prompt_ids(messages, request.tools, request.rollout_id)
            if known is not None:
                return known
        return self.prompt_ids(messages, request.tools)

    def _sampling(self, request: ModelRequest) -> dict[str, Any]:
        given = {k: v for k, v in request.sampling_args.items() if k != "extra_body"}
        given.update(request.sampling_args.get("extra_body") or {})
        for name in LENGTHS:
            if given.get(name) is not None:
                given.setdefault("max_tokens", given[name])
            given.pop(name, None)
        if request.seed is not None:
            given["seed"] = request.seed
        if given.get("n", 1) != 1 or given.get("stream"):
            raise ConfigError("a TokenClient gives one whole completion: no n above 1, no stream")
        for name in sorted(given.keys() - SAMPLING - ASKED_ANYWAY - _warned):
            _warned.add(name)
            log.warning("the engine behind this client has no sampling argument %r; it is left out", name)
        return {name: value for name, value in given.items() if name in SAMPLING and value is not None}

    def _response(self, request: ModelRequest, prompt_ids: list[int], made: Sequence[Any]) -> Response:
        token_ids, logprobs, finish = made[:3]
        if logprobs is None or len(logprobs) != len(token_ids):
            raise MalformedResponse(
                f"the engine gave {len(token_ids)} token ids and {'no' if logprobs is None else len(logprobs)} "
                "log-probabilities; training needs one for each",
                field="completion_logprobs",
            )
        version = int(made[3]) if len(made) > 3 and made[3] is not None else -1
        self._count += 1
        message, finish = self._message(list(token_ids), str(finish or "stop"), request)
        if self._history is not None and request.message_type != "completion":
            self._history.remember(request.prompt, message, prompt_ids, list(token_ids), request.rollout_id)
        tokens = ResponseTokens(
            np.asarray(prompt_ids, np.int32), np.asarray(token_ids, np.int32), np.asarray(logprobs, np.float32), version
        )
        usage = Usage(len(prompt_ids), len(token_ids))
        return Response(message, finish, usage, tokens, version, model=self.model, id=f"cmpl-{self._count}")

    def _message(self, token_ids: list[int], finish: str, request: ModelRequest) -> tuple[Message, str]:
        text = self._chat.decode(token_ids)
        finish = "length" if finish in ("length", "max_tokens") else finish
        reasoning = ""
        if self._parse_reasoning is not None:
            reasoning, text = self._parse_reasoning(text)
        around, calls = self._parse_calls(text) if self._parse_calls and request.tools else (text, [])
        message = Message(role="assistant", content=around or (None if calls else ""))
        if calls:
            message["tool_calls"] = [
                ToolCall(f"call-{self._count}-{index}", call["name"], call["arguments"])
                for index, call in enumerate(calls)
            ]
            finish = "tool_calls" if finish == "stop" else finish
        if reasoning:
            message["reasoning_content"] = reasoning
        return message, finish

    # --- as an OpenAI client --------------------------------------------------------------------------------------

    async def _create_chat(self, *, messages: Sequence[Any], model: str = "", tools: Any = None, **args: Any) -> Any:
        from openai.types.chat import ChatCompletion

        rollout_id = (args.pop("extra_headers", None) or {}).get("X-Session-ID")
        args.pop("timeout", None)
        request = ModelRequest(list(messages), model or self.model, "chat", tools, args, rollout_id=rollout_id)
        response = await self.complete(request)
        said = dict(response.message)
        return ChatCompletion.model_validate(_envelope("chat.completion", response, {"message": said}))

    async def _create_text(self, *, prompt: str, model: str = "", **args: Any) -> Any:
        from openai.types import Completion

        args.pop("extra_headers", None)
        response = await self.complete(ModelRequest(prompt, model or self.model, "completion", None, args))
        return Completion.model_validate(_envelope("text_completion", response, {"text": response.text}))


def served_generate(base_url: str, api_key: str, model: str) -> Generate:
    """Token-in/token-out over an OpenAI endpoint that takes token ids as a prompt and returns them (vLLM, ours)."""
    from verifiers.clients.http import OpenAIChatCompletionsClient

    client = OpenAIChatCompletionsClient(base_url=base_url, api_key=api_key)

    async def generate(prompt_ids: list[int], sampling: dict[str, Any]) -> Sequence[Any]:
        asked = {"return_weight_versions": True, **sampling}
        prompt: Any = prompt_ids
        request = ModelRequest(prompt, model, "completion", sampling_args=asked, require_tokens=True)
        response = await client.complete(request)
        assert response.tokens is not None
        tokens = response.tokens
        return (
            tokens.completion_ids.tolist(),
            tokens.completion_logprobs.tolist(),
            response.finish_reason,
            tokens.version,
        )

    return generate


def _envelope(kind: str, response: Response, said: dict[str, Any]) -> dict[str, Any]:
    """The fields of an OpenAI answer, with vLLM's names for the token data."""
    assert response.tokens is not None
    ids, logprobs = response.tokens.completion_ids.tolist(), response.tokens.completion_logprobs.tolist()
    entries = [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in zip(ids, logprobs, strict=True)
    ]
    both = {"content": entries} if kind == "chat.completion" else {"token_logprobs": logprobs}
    finish = response.finish_reason
    choice = {"index": 0, "finish_reason": finish, "logprobs": both, "token_ids": ids, **said}
    usage = {"prompt_tokens": response.usage.prompt_tokens, "completion_tokens": response.usage.completion_tokens}
    return {
        "id": response.id,
        "object": kind,
        "created": 0,
        "model": response.model,
        "choices": [choice],
        "usage": usage | {"total_tokens": response.usage.total_tokens},
        "prompt_token_ids": response.tokens.prompt_ids.tolist(),
        "weight_version": response.version,
    }
