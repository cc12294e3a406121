"""``ExactClient``: sends prompts as token ids, so that one conversation is one sample
(``history="exact"``).

Guarantee: each prompt of a conversation begins with exactly the ids of the turn before
(``exact.history``), however the chat template would render that turn now; the environment receives
chat messages, as over the chat route. Tool calls and, with ``separate_reasoning``, reasoning are
parsed here, because the text route of a server parses neither.

It wraps another core ``Client`` whose endpoint accepts token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verifiers.clients.payload import MAX_TOKENS_ALIASES, chat_messages
from verifiers.clients.protocol import Client, shows_tools
from verifiers.data.images import data_url
from verifiers.errors import ConfigError, ModelRefused, OverlongPromptError
from verifiers.types import ModelRequest, Response
from verifiers_trainer.engines.exact.history import ExactHistory
from verifiers_trainer.engines.http.chat import (
    OVERLONG,
    BadRequest,
    ChatFormat,
    Tokenizer,
    template_source,
)
from verifiers_trainer.engines.http.replies import message_of_reply
from verifiers_trainer.engines.http.tool_calls import for_tools, resolve_tool_call_parser
from verifiers_trainer.engines.processing import Processing

CHAT_ONLY = ("chat_template_kwargs", "parallel_tool_calls", "separate_reasoning", "tool_choice")
"""Arguments of the chat route that are handled here, because the text route does not have them."""
ALWAYS_RETURNED = ("logprobs", "top_logprobs")
"""Arguments that differ between the two routes; log-probabilities are always returned."""


class ExactClient:
    """A core ``Client`` over ``inner``; ``max_seq_len`` bounds prompt and completion together.
    ``processing``: of a model that sees, whose server takes ``images`` beside token ids."""

    def __init__(
        self,
        inner: Client,
        tokenizer: Tokenizer,
        max_seq_len: int,
        tool_call_parser: str = "auto",
        processing: Processing | None = None,
    ):
        self._inner, self._max_seq_len = inner, max_seq_len
        self._chat = ChatFormat(tokenizer, max_seq_len, processing)
        self._history = ExactHistory(tokenizer, processing)
        self._parse_calls = resolve_tool_call_parser(tool_call_parser, template_source(tokenizer))

    async def complete(self, request: ModelRequest) -> Response:
        """A completion; see ``Client.complete`` for what it raises."""
        if request.message_type == "completion":
            return await self._inner.complete(request)
        sampling, chat_options = _split(request.sampling_args)
        offered = request.tools if chat_options.get("tool_choice") != "none" else None
        messages = chat_messages(request.prompt)
        limit = sampling.get("truncate_prompt_tokens")
        prompt_ids = self._prompt_ids(
            messages,
            offered,
            request.rollout_id,
            chat_options.get("chat_template_kwargs") or {},
            limit is not None,
        )
        num_prompt = min(len(prompt_ids), limit or len(prompt_ids))
        if num_prompt >= self._max_seq_len:
            raise OverlongPromptError(
                f"the prompt has {num_prompt} tokens, and max_seq_len is {self._max_seq_len}"
            )
        if not any(sampling.get(name) is not None for name in MAX_TOKENS_ALIASES):
            # the text route has a small default
            sampling["max_tokens"] = self._max_seq_len - num_prompt
        if images := [data_url(content) for content in self._chat.images_of(messages)]:
            sampling["images"] = images
        if self._chat.special_tags and (offered or chat_options.get("separate_reasoning")):
            sampling.setdefault("skip_special_tokens", False)  # calls are read from the tags
        as_ids: dict[str, Any] = {"prompt": prompt_ids, "message_type": "completion"}
        response = await self._inner.complete(
            replace(request, **as_ids, tools=None, sampling_args=sampling, require_tokens=True)
        )
        tokens = response.tokens
        assert tokens is not None
        message, finish_reason = message_of_reply(
            response.text,
            response.finish_reason,
            for_tools(self._parse_calls, offered) if offered else None,
            response.id,
            self._chat.opens_thought(np.asarray(tokens.prompt_ids)),
            bool(chat_options.get("separate_reasoning")),
        )
        self._history.remember(
            messages, message, tokens.prompt_ids, tokens.completion_ids, request.rollout_id
        )
        return replace(response, message=message, finish_reason=finish_reason)

    async def aclose(self) -> None:
        if (close := getattr(self._inner, "aclose", None)) is not None:
            await close()

    async def shows_tools(self) -> bool | None:
        """Whether the chat template shows the tools of a request; None when unknown."""
        return await shows_tools(self._inner)

    def _prompt_ids(
        self,
        messages: list[Any],
        tools: Sequence[Mapping[str, Any]] | None,
        rollout_id: str | None,
        variables: Mapping[str, object],
        is_truncated: bool,
    ) -> list[int]:
        try:
            prompt_ids = self._history.prompt_ids(messages, tools, rollout_id, variables)
            if prompt_ids is None:
                prompt = self._chat.prompt(
                    json.dumps(messages).encode(),
                    json.dumps(list(tools)).encode() if tools else None,
                    json.dumps(dict(variables)).encode(),
                    is_truncated=is_truncated,
                )
                prompt_ids = prompt.ids.tolist()
        except BadRequest as error:
            if error.code == OVERLONG:
                raise OverlongPromptError(str(error)) from error
            raise ModelRefused(
                f"history='exact' cannot render this conversation: {error}"
            ) from error
        return prompt_ids


def _split(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments of the text route, arguments handled here). Raises ``ConfigError`` for a forced
    call."""
    sampling = {name: value for name, value in arguments.items() if name != "extra_body"}
    sampling.update(arguments.get("extra_body") or {})
    chat_options = {name: sampling.pop(name) for name in CHAT_ONLY if name in sampling}
    for name in ALWAYS_RETURNED:
        sampling.pop(name, None)
    if chat_options.get("tool_choice") not in (None, "auto", "none"):
        raise ConfigError(
            "history='exact' cannot force a tool call"
            f" (tool_choice={chat_options['tool_choice']!r}): use 'auto' or 'none'"
        )
    return sampling, chat_options
