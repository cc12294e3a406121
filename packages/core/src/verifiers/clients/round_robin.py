"""Several endpoints behind one client: each new rollout is assigned to the next endpoint.

The fixed assignment keeps the prefix of a conversation in the cache of a server. There is no
failover: a request to an endpoint that is down is retried there.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from verifiers.clients.protocol import Client, headers_from_state, shows_tools
from verifiers.errors import ConfigError
from verifiers.runtime.json import canonical_json
from verifiers.storage.described import describe, type_name
from verifiers.storage.identity import Identified
from verifiers.types import ModelRequest, Response

NUM_REMEMBERED = 65_536


class RoundRobinClient(Identified):
    """``members``: (client, model name that replaces the request's, or None) in turn."""

    def __init__(self, members: Sequence[tuple[Client, str | None]]):
        if not members:
            raise ConfigError("a list of clients must not be empty")
        self.members = tuple(members)
        self._next = itertools.cycle(self.members)
        self._home: OrderedDict[str, tuple[Client, str | None]] = OrderedDict()

    def identity(self) -> dict[str, object]:
        """Identity of the distinct members, sorted: their number affects speed only."""
        members = [{"client": describe(client), "model": model} for client, model in self.members]
        different = {canonical_json(member): member for member in members}
        return {
            "class": type_name(type(self)),
            "members": [different[key] for key in sorted(different)],
        }

    @property
    def model(self) -> str | None:
        """The first member's model name, if it has a name."""
        client, model = self.members[0]
        return model or getattr(client, "model", None)

    async def complete(self, request: ModelRequest) -> Response:
        """Return one completion of the member assigned to the rollout, or of the next member."""
        client, model = self._member(request.rollout_id)
        if model is not None:
            request = replace(request, model=model)
        if request.headers and (
            foreign := self.headers_from_state.keys() - headers_from_state(client).keys()
        ):
            headers = {
                name: value for name, value in request.headers.items() if name not in foreign
            }
            request = replace(request, headers=headers)
        return await client.complete(request)

    @property
    def headers_from_state(self) -> dict[str, str]:
        """Header -> key of the state, of all members; each receives those of its settings only."""
        return {
            name: key
            for client, _ in self.members
            for name, key in headers_from_state(client).items()
        }

    async def aclose(self) -> None:
        """Close the resources of every member in the running loop."""
        for client, _ in self.members:
            if close := getattr(client, "aclose", None):
                await close()

    async def preflight(self, model: str | None = None, timeout_s: float = 10.0) -> str | None:
        """Run the ``preflight`` of every member; return the first warning, if any."""
        warnings = [
            await check(member_model or model, timeout_s)
            for client, member_model in self.members
            if (check := getattr(client, "preflight", None))
        ]
        return next(filter(None, warnings), None)

    def check_key(self) -> None:
        """Check the keys of all members. *Raises* MissingKeyError."""
        for client, _ in self.members:
            if check := getattr(client, "check_key", None):
                check()

    async def shows_tools(self) -> bool | None:
        """Return False if the model of any member is shown no tools, True if all are, None if
        unknown."""
        results = [await shows_tools(client) for client, _ in self.members]
        return False if False in results else None if None in results else True

    def _member(self, rollout_id: str | None) -> tuple[Client, str | None]:
        if rollout_id is None:
            return next(self._next)
        member = self._home.get(rollout_id)
        if member is None:
            member = self._home[rollout_id] = next(self._next)
            if len(self._home) > NUM_REMEMBERED:
                self._home.popitem(last=False)
        return member
