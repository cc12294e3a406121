"""Before the first request: does the endpoint have the model, and how many connections may be open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verifiers.runs.notices import Notices
from verifiers.runs.options import DEFAULT_CONCURRENCY, RunOptions

if TYPE_CHECKING:
    from verifiers.clients.protocol import Client


async def preflight(client: Client, model: str, options: RunOptions, notices: Notices) -> None:
    """Ask the endpoint for its models, and warn when they lack ``model``. *Raises* as the
    ``preflight`` of the client."""
    ask = getattr(client, "preflight", None)
    if options.preflight and ask is not None and (note := await ask(model)):
        await notices.warn(note)


async def num_at_a_time(
    client: Client, num_pending: int, options: RunOptions, notices: Notices
) -> int:
    """Rollouts in flight: those of the options, or as many as this process may open connections,
    with a warning."""
    most = DEFAULT_CONCURRENCY if options.max_concurrent == -1 else options.max_concurrent
    limit = min(most, num_pending)
    if getattr(client, "preflight", None) is None:  # it opens no connections
        return limit
    from verifiers.clients.http import connection_room, open_file_limit

    room = connection_room()
    if limit <= room:
        return limit
    await notices.warn(
        f"{room} rollouts run at a time instead of {limit}: this process may open"
        f" {open_file_limit()} files; raise the limit (ulimit -n) or lower max_concurrent"
    )
    return room
