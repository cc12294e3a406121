"""``RoleClient``: each role of an environment asks for its own adapter, which has the role's name at
the endpoint, and ``adapter_name`` in peft and in files.
"""

from __future__ import annotations

from dataclasses import replace

from verifiers.clients.protocol import Client, shows_tools
from verifiers.types import ModelRequest, Response

PREFIX = "role-"
"""Beginning of an adapter's name in peft: with a hyphen it is the name of no module, which peft
would take for the adapter's."""


def adapter_name(role: str) -> str:
    """The name in peft of a role's adapter, and of its folder."""
    return f"{PREFIX}{role}"


class RoleClient:
    """A core ``Client`` over ``inner``, whose endpoint serves an adapter for each role. A request
    of no role keeps its model. To a run the adapters are one model, the policy."""

    def __init__(self, inner: Client):
        self._inner = inner

    async def complete(self, request: ModelRequest) -> Response:
        """A completion; see ``Client.complete`` for what it raises."""
        if request.role is None:
            return await self._inner.complete(request)
        response = await self._inner.complete(replace(request, model=request.role))
        return replace(response, model=request.model)

    async def aclose(self) -> None:
        if (close := getattr(self._inner, "aclose", None)) is not None:
            await close()

    async def shows_tools(self) -> bool | None:
        """Whether the chat template shows the tools of a request; None when unknown."""
        return await shows_tools(self._inner)
