"""``PolicyClient``: the policy in training as a client, for code that runs rollouts itself.

    completion, state = env.rollout(client=trainer.client, model=trainer.model, prompt=…, answer=…)

It requests token ids, replaces the requested model by the served policy, defaults to training's
sampling arguments, and stores the sampled tokens of each message, so that training on a completion
of these messages uses exactly these tokens. It also offers ``.chat.completions.create`` and
``.completions.create``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verifiers.clients.protocol import Client, shows_tools
from verifiers.errors import ConfigError
from verifiers.rollouts.turn import Turn
from verifiers.types import ModelRequest, Response

if TYPE_CHECKING:
    from verifiers_trainer.engines.protocol import Engine

MAX_REMEMBERED = 65_536
"""Number of messages whose tokens are stored; the oldest are dropped first."""


class PolicyClient:
    """A core ``Client`` of a running engine that wraps ``client``."""

    def __init__(
        self, engine: Engine, client: Client, sampling_args: Mapping[str, object], seed: int
    ):
        self._engine, self._client = engine, client
        self._sampling_args, self._seed = dict(sampling_args), seed
        self._count = itertools.count()
        self._sampled: OrderedDict[int, tuple[object, Turn]] = OrderedDict()
        """By ``id`` of the message; the reference keeps the id unique."""

    @property
    def model(self) -> str:
        """The served name of the policy."""
        return self._engine.served_model

    async def complete(self, request: ModelRequest) -> Response:
        """A completion by the present policy; see ``Client.complete`` for what it raises."""
        if request.seed is not None:
            seed = request.seed
        else:
            seed = (self._seed * 1_000_003 + next(self._count)) % 2**31
        sampling = {**self._sampling_args, **request.sampling_args}
        response = await self._client.complete(
            replace(
                request, model=self.model, require_tokens=True, seed=seed, sampling_args=sampling
            )
        )
        self._remember(response)
        return response

    async def aclose(self) -> None:
        if (close := getattr(self._client, "aclose", None)) is not None:
            await close()

    async def shows_tools(self) -> bool | None:
        """Whether the chat template shows the tools of a request; None when unknown."""
        return await shows_tools(self._client)

    def _remember(self, response: Response) -> None:
        tokens = response.tokens
        assert tokens is not None
        turn = Turn(
            tokens.prompt_ids,
            tokens.completion_ids,
            tokens.completion_logprobs,
            tokens.version,
            response.finish_reason == "length",
        )
        self._sampled[id(response.message)] = (response.message, turn)
        while len(self._sampled) > MAX_REMEMBERED:
            self._sampled.popitem(last=False)

    def turns_of(
        self, completion: Sequence[Any], source: str = "the completion"
    ) -> tuple[Turn, ...]:
        """The turns of a completion as sampled.

        Raises ``ConfigError`` when this client did not sample any of its assistant messages.
        """
        if isinstance(completion, str):
            raise ConfigError(
                f"{source} is text, whose tokens are not known: return Group objects with turns"
            )
        turns = []
        for number, message in enumerate(completion):
            if message.get("role") != "assistant":
                continue
            if (entry := self._sampled.get(id(message))) is None:
                raise ConfigError(
                    f"message {number} of {source} was not sampled through trainer.client, so its"
                    " tokens are not known: run it with env.rollout(client=self.client, …), and"
                    " return its messages"
                )
            turns.append(entry[1])
        return tuple(turns)

    @property
    def chat(self) -> Any:
        """``client.chat.completions.create(…)``: the result, or an awaitable in an event loop."""
        return self._sdk().chat

    @property
    def completions(self) -> Any:
        """``client.completions.create(…)``, as ``chat``."""
        return self._sdk().completions

    def _sdk(self) -> Any:
        import openai

        try:
            asyncio.get_running_loop()
            kind: Any = openai.AsyncOpenAI
        except RuntimeError:
            kind = openai.OpenAI
        return kind(base_url=self._engine.base_url, api_key=self._engine.api_key)
