"""Completions of a vLLM server, each with the policy version that really sampled it.

The name to ask for is the one being served when a request is sent. An answer counts only when it is known whose weights
gave it: by the adapter's name, by the versions in the answer, or by the server's label read afterwards. Anything else,
an unknown name or a server that went away, leads to a repair (``engine``) and the request is sent again, so that no
token of other weights is ever returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verifiers.clients.http import OpenAIChatCompletionsClient
from verifiers.errors import ModelNotFound, ModelUnavailable, WeightSyncError
from verifiers.types import ModelRequest, Response
from verifiers_trainer.engines.vllm.control import Server, Serving
from verifiers_trainer.engines.vllm.weights.protocol import run_and_version

if TYPE_CHECKING:
    from verifiers_trainer.engines.vllm.engine import VLLMEngine

MAX_REPAIRS = 3
"""How often one request may lead to a repair."""
MAX_RETRIES = 3


class VersionedClient:
    """A core ``Client`` of one of the engine's servers."""

    def __init__(self, engine: VLLMEngine, server: Server):
        self._engine, self._server = engine, server
        self._client = OpenAIChatCompletionsClient(
            base_url=server.base_url, api_key=server.api_key, max_retries=MAX_RETRIES
        )

    @property
    def base_url(self) -> str:
        return self._server.base_url

    @property
    def model(self) -> str:
        """What the present policy is called here."""
        return self._server.serving.model

    async def complete(self, request: ModelRequest) -> Response:
        """One completion by the policy being served; see ``Client.complete`` for what it raises.

        Raises ``WeightSyncError`` too, when the server does not come back with the right weights in time.
        """
        fault: BaseException | str = ""
        for _ in range(MAX_REPAIRS + 1):
            serving = self._server.serving
            try:
                response = await self._client.complete(self._addressed(request, serving))
                found = await self._engine.sampled_by(self._server, serving, response)
            except (ModelNotFound, ModelUnavailable) as error:
                fault = error
            else:
                if isinstance(found, int):
                    return _stamped(response, found)
                fault = found
            await self._repaired(serving, fault)
        if isinstance(fault, ModelUnavailable):
            raise fault
        raise WeightSyncError(
            f"{self._server.url} has other weights again after {MAX_REPAIRS} repairs ({fault})",
            stage="repairing the server's weights",
            url=self._server.url,
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    def _addressed(self, request: ModelRequest, serving: Serving) -> ModelRequest:
        arguments = self._engine.understood(request.sampling_args)
        return replace(request, model=serving.model, sampling_args=arguments)

    async def _repaired(self, seen: Serving, fault: BaseException | str) -> None:
        if (repair := self._engine.repair(self._server, seen, fault)) is not None:
            await asyncio.shield(asyncio.wrap_future(repair))


def _stamped(response: Response, version: int) -> Response:
    tokens = None if response.tokens is None else replace(response.tokens, version=version)
    return replace(response, version=version, tokens=tokens)


def understood(arguments: Mapping[str, Any], has_spans: bool) -> dict[str, Any]:
    """Sampling arguments as vLLM spells them.

    >>> understood({"temperature": 1.0, "guided_regex": "a+", "return_weight_versions": True}, has_spans=False)
    {'temperature': 1.0, 'structured_outputs': {'regex': 'a+'}}
    """
    spelled = dict(arguments)
    if not has_spans:
        spelled.pop("return_weight_versions", None)
    if (regex := spelled.pop("guided_regex", None)) is not None:
        spelled["structured_outputs"] = {"regex": regex}
    return spelled


def version_in_label(label: str, run: int) -> int | None:
    """The policy version in a server's label, when this run gave it; None otherwise.

    >>> version_in_label("3145735", run=3), version_in_label("3145735", run=4), version_in_label("default", run=3)
    (7, None, None)
    """
    if not label.isdigit():
        return None
    owner, version = run_and_version(int(label))
    return version if owner == run else None
