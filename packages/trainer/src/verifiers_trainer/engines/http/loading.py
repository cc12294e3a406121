"""What answers on the port of an endpoint while its model is loaded: 503, which clients repeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from verifiers.clients.serving import Answer, ModelServer
from verifiers.errors import EndpointUnreachable, ModelRefused


class LoadingServer(ModelServer):
    """Refuses every request until it is stopped."""

    thread_name = "vf-loading"

    def __init__(self, host: str, port: int):
        super().__init__()
        self.host, self.port = host, port

    async def listen(self, runner: web.ServerRunner) -> None:
        await web.TCPSite(runner, self.host, self.port).start()

    async def respond(self, request: web.BaseRequest) -> Answer:
        raise ModelRefused("the model is still being loaded", status=503)


@contextmanager
def said_while_loading(host: str, port: int) -> Iterator[None]:
    """Within the block, requests are told that the model is being loaded; not on port 0, whose
    number no client has. *Raises* EndpointUnreachable if the address cannot be used."""
    server = LoadingServer(host, port)
    if port:
        try:
            server.start()
        except OSError as error:
            raise EndpointUnreachable(f"the endpoint did not start: {error}") from error
    try:
        yield
    finally:
        server.stop()
