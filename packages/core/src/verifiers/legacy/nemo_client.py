"""``NeMoRLChatCompletionsClient``: chat completions of a NeMo RL server through an ``AsyncOpenAI``,
step by step.

NeMo Gym's agent for environments of this library subclasses it and overrides
``get_native_response``, through which every call passes. NeMo RL's server puts token ids and
log-probabilities on the message (``prompt_token_ids``, ``generation_token_ids``,
``generation_log_probs``); they are kept exactly as sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers.clients.attributes import read_completion
from verifiers.clients.payload import chat_messages
from verifiers.clients.protocol import ClientConfig
from verifiers.clients.reply import to_response
from verifiers.data.messages import field
from verifiers.legacy.template_client import TemplateClient
from verifiers.types import ModelRequest, Response, ResponseTokens, Tool

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


class NeMoRLChatCompletionsClient(TemplateClient):
    """A client over an ``AsyncOpenAI``, which ``client`` is; a ``ClientConfig`` makes a client.

    *Raises* as ``TemplateClient``.
    """

    def setup_client(self, config: ClientConfig) -> Any:
        """An ``AsyncOpenAI`` with the settings; the SDK reads the key of the variable that they
        name."""
        import os

        from openai import AsyncOpenAI

        return AsyncOpenAI(
            base_url=config.api_base_url,
            api_key=os.environ.get(config.api_key_var) or "none",
            timeout=config.timeout,
            max_retries=config.max_retries,
            default_headers=dict(config.extra_headers) or None,
        )

    async def to_native_prompt(self, messages: object) -> tuple[object, dict[str, object]]:
        """Messages in the wire format."""
        return chat_messages(messages), {}

    async def to_native_tool(self, tool: Tool) -> Any:
        """The wire format, which a tool has."""
        return dict(tool)

    async def get_native_response(
        self,
        prompt: object,
        model: str,
        sampling_args: Mapping[str, object],
        tools: object = None,
        **kwargs: object,
    ) -> Any:
        """One ``chat.completions.create``; ``extra_headers`` of ``kwargs`` are sent."""
        arguments = {name: value for name, value in sampling_args.items() if value is not None}
        if kwargs.get("extra_headers"):
            arguments["extra_headers"] = kwargs["extra_headers"]
        if tools:
            arguments["tools"] = tools
        return await self.client.chat.completions.create(model=model, messages=prompt, **arguments)

    async def from_native_response(self, response: object) -> Response:
        """The response, with the tokens of the message where it has all three fields."""
        read = to_response(read_completion(response), ModelRequest([], ""), repr(self))
        choices = field(response, "choices")
        values = [field(field(choices[0], "message"), name) for name in TOKEN_FIELDS]
        if all(isinstance(value, list) for value in values) and len(values[1]) == len(values[2]):
            return read.model_copy(update={"tokens": ResponseTokens(*values)})
        return read
