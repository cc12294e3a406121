"""``TokenClient``: an OpenAI-compatible client over an engine that takes and returns token ids.

The environment sees chat messages, the engine token ids. Sampled ids are stored unchanged; text is
decoded from them and never tokenised again. It is a core ``Client`` (``complete``), and has
``.chat.completions.create`` and ``.completions.create`` for code that expects an ``AsyncOpenAI``.
It adds no sampling arguments.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from verifiers.clients.dialects.chat import completion_body
from verifiers.clients.reply import token_fault
from verifiers.errors import (
    ConfigError,
    MalformedResponse,
    ModelError,
    OverlongPromptError,
    VerifiersError,
)
from verifiers.types import Message, ModelRequest, Response, ResponseTokens, Usage
from verifiers_trainer.engines.exact.history import ExactHistory
from verifiers_trainer.engines.http.chat import BadRequest, ChatFormat
from verifiers_trainer.engines.http.replies import message_of_text
from verifiers_trainer.engines.http.tool_calls import (
    ToolCallParser,
    for_tools,
    resolve_tool_call_parser,
)

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Generate = Callable[[list[int], dict[str, Any]], "Awaitable[Sequence[Any]] | Sequence[Any]"]
"""(prompt ids, sampling) -> (token ids, log-probs, finish reason[, policy version]), or an
awaitable of it; the version is one number, or one per token."""
SAMPLING = frozenset(
    "max_tokens temperature top_p top_k min_p min_tokens stop stop_token_ids seed"
    " repetition_penalty presence_penalty frequency_penalty logit_bias ignore_eos".split()
)
"""Sampling arguments passed to the engine."""
ACCEPTED = frozenset(
    "n stream logprobs top_logprobs return_token_ids return_tokens_as_token_ids"
    " return_weight_versions parallel_tool_calls tool_choice user metadata".split()
)
"""Arguments accepted without effect: always on, or unrelated to sampling."""
RETURNED = ("return_token_ids", "logprobs", "return_weight_versions")
"""Token data in the answers of the OpenAI interface."""
LENGTHS = ("max_completion_tokens", "max_new_tokens")
_warned: set[str] = set()


class TokenClient:
    """A client over ``generate``.

    tokenizer: renders messages and tools with its chat template, and decodes.
    tool_call_parser: "auto" (the format of the chat template), a name, a function from text to
        (text, calls), or None; used when the request has tools.
    reasoning_parser: a function from text to (reasoning, text), as ``split_reasoning``; None keeps
    all in the content.
    history: "render" renders the whole conversation each turn; "exact" keeps the sampled ids as the
        prefix and renders only new messages, so a rollout never forks (the model then sees its
        earlier reasoning again).
    max_seq_len: longer prompts, and prompts of this length, raise ``OverlongPromptError``.
    """

    def __init__(
        self,
        generate: Generate,
        tokenizer: PreTrainedTokenizerBase,
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
            raise ConfigError(
                f'history is {history!r}; it must be "render" or "exact"', key="history"
            )
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
        """Do nothing; the client holds no resources."""

    async def close(self) -> None:
        """See ``aclose``."""

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> list[int]:
        """Render a conversation with the generation prompt. *Raises* ConfigError when the template
        rejects it."""
        try:
            rendered = self._chat.prompt_ids(
                json.dumps(list(messages)).encode(),
                json.dumps(list(tools)).encode() if tools else None,
            )
        except BadRequest as error:
            raise ConfigError(str(error)) from error
        return rendered.tolist()

    async def complete(self, request: ModelRequest) -> Response:
        """Sample one completion; see ``Client.complete``. *Raises* ModelError from errors of
        ``generate``."""
        prompt_ids = self._ids_of(request)
        if self._max_seq_len is not None and len(prompt_ids) >= self._max_seq_len:
            raise OverlongPromptError(
                f"the prompt has {len(prompt_ids)} tokens, the limit is {self._max_seq_len}"
            )
        try:
            output = self._generate(list(prompt_ids), self._sampling(request))
            output = await output if inspect.isawaitable(output) else output
        except VerifiersError:
            raise
        except Exception as error:  # engines of peers raise any type
            raise ModelError(f"the engine failed: {type(error).__name__}: {error}") from error
        return self._response(request, prompt_ids, output)

    def _ids_of(self, request: ModelRequest) -> list[int]:
        if request.message_type == "completion":
            return self._chat.encode(str(request.prompt)).tolist()
        messages: Any = request.prompt
        if self._history is not None:
            prompt_ids = self._history.prompt_ids(messages, request.tools, request.rollout_id)
            if prompt_ids is not None:
                return prompt_ids
        return self.prompt_ids(messages, request.tools)

    def _sampling(self, request: ModelRequest) -> dict[str, object]:
        args = {k: v for k, v in request.sampling_args.items() if k != "extra_body"}
        args.update(request.sampling_args.get("extra_body") or {})
        for name in LENGTHS:
            if args.get(name) is not None:
                args.setdefault("max_tokens", args[name])
            args.pop(name, None)
        if request.seed is not None:
            args["seed"] = request.seed
        if args.get("n", 1) != 1 or args.get("stream"):
            raise ConfigError(
                "a TokenClient returns one whole completion: n must be 1, and stream off"
            )
        for name in sorted(args.keys() - SAMPLING - ACCEPTED - _warned):
            _warned.add(name)
            log.warning("the engine of this client has no sampling argument %r; ignored", name)
        return {
            name: value for name, value in args.items() if name in SAMPLING and value is not None
        }

    def _response(
        self, request: ModelRequest, prompt_ids: list[int], output: Sequence[Any]
    ) -> Response:
        token_ids, logprobs, finish = output[:3]
        if logprobs is None or len(logprobs) != len(token_ids):
            raise MalformedResponse(
                f"the engine returned {len(token_ids)} token ids and"
                f" {'no' if logprobs is None else len(logprobs)} log-probabilities; training needs"
                " one for each",
                field="completion_logprobs",
            )
        ids = np.asarray(prompt_ids, np.int32), np.asarray(token_ids, np.int32)
        sampler_logprobs = np.asarray(logprobs, np.float32)
        if fault := token_fault(*ids, sampler_logprobs):
            field, reason = fault
            raise MalformedResponse(
                f"the engine answered without usable {field}: {reason}", field=field
            )
        version = output[3] if len(output) > 3 and output[3] is not None else -1
        version = np.asarray(version) if np.ndim(version) else int(version)
        self._count += 1
        message, finish = self._message(list(token_ids), str(finish or "stop"), request)
        if self._history is not None and request.message_type != "completion":
            self._history.remember(
                request.prompt, message, prompt_ids, list(token_ids), request.rollout_id
            )
        tokens = ResponseTokens(*ids, sampler_logprobs, version)
        usage = Usage(len(prompt_ids), len(token_ids))
        oldest = int(np.min(version))
        return Response(
            message, finish, usage, tokens, oldest, model=self.model, id=f"cmpl-{self._count}"
        )

    def _message(
        self, token_ids: list[int], finish: str, request: ModelRequest
    ) -> tuple[Message, str]:
        text = self._chat.decode(token_ids)
        finish = "length" if finish in ("length", "max_tokens") else finish
        reasoning = ""
        if self._parse_reasoning is not None:
            reasoning, text = self._parse_reasoning(text)
        parser = for_tools(self._parse_calls, request.tools) if request.tools else None
        return message_of_text(text, finish, parser, str(self._count), reasoning)

    # --- OpenAI interface -------------------------------------------------------------------------

    async def _create_chat(
        self,
        *,
        messages: Sequence[object],
        model: str = "",
        tools: Sequence[Mapping[str, object]] | None = None,
        **args: Any,
    ) -> object:
        from openai.types.chat import ChatCompletion

        rollout_id = (args.pop("extra_headers", None) or {}).get("X-Session-ID")
        args.pop("timeout", None)
        request = ModelRequest(
            list(messages), model or self.model, "chat", tools, args, rollout_id=rollout_id
        )
        response = await self.complete(request)
        return ChatCompletion.model_validate(completion_body(response, True, RETURNED))

    async def _create_text(self, *, prompt: str, model: str = "", **args: object) -> object:
        from openai.types import Completion

        args.pop("extra_headers", None)
        response = await self.complete(
            ModelRequest(prompt, model or self.model, "completion", None, args)
        )
        return Completion.model_validate(completion_body(response, False, RETURNED))


def served_generate(base_url: str, api_key: str, model: str) -> Generate:
    """Return token-in/token-out over an OpenAI endpoint that takes and returns token ids, such as
    vLLM."""
    from verifiers.clients.http import OpenAIChatCompletionsClient

    client = OpenAIChatCompletionsClient(base_url=base_url, api_key=api_key)

    async def generate(prompt_ids: list[int], sampling: Mapping[str, object]) -> Sequence[Any]:
        args = {"return_weight_versions": True, **sampling}
        prompt: Any = prompt_ids
        request = ModelRequest(prompt, model, "completion", sampling_args=args, require_tokens=True)
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
