"""Request checks and response headers that protect the server against other web sites and against
model text.

* Only ``GET`` and ``HEAD`` are allowed, and ``POST`` to ``/api/label`` of a server that only this
  machine reaches. It needs the page's own ``Origin`` and a token that only the page can read, so
  that no page of another site can write.
* The ``Host`` header must name this machine. This stops DNS rebinding: a page of another site whose
  name resolves to 127.0.0.1 sends its own name as the host.
* Requests of pages of other sites (``Sec-Fetch-Site``, ``Origin``) are refused, except navigation by
  a link.
* The content security policy allows only scripts, styles, fonts and images of this server, and
  images from ``data:`` URLs: model text can neither execute nor send requests to others.

There are no passwords: every local user of this machine can read the served runs, and label them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verifiers.runtime.origins import LOOPBACK, is_cross_site, is_named, is_other_origin

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
WRITES, TOKEN_HEADER = "/api/label", "x-vf-view"
"""The one path that writes, and the header of its token."""


class Guard:
    """ASGI middleware that enforces the rules of this module.

    ``any_address``: also accept IP addresses as ``Host``, for a server that is open to the network;
    DNS rebinding
    needs a name. ``token``: what a request that writes must hold; None: nothing is written.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Iterable[str] = LOOPBACK,
        any_address: bool = False,
        token: str | None = None,
    ):
        self.app = app
        self.token = token
        self.hosts = frozenset(hosts)
        self.any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(scope)
        answer: ASGIApp = self.app if refusal is None else refusal
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        writes = scope["method"] == "POST" and scope["path"] == WRITES and self.token is not None
        if scope["method"] not in ("GET", "HEAD") and not writes:
            return PlainTextResponse("vf-view is read-only\n", 405)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not is_named(hosts[0], self.hosts, self.any_address):
            return PlainTextResponse("vf-view answers to the name of this machine only\n", 421)
        if writes and not self._may_write(headers, hosts[0]):
            return PlainTextResponse("vf-view is labelled by its own page only\n", 403)
        is_link = (
            headers.get("sec-fetch-mode") == "navigate"
            and headers.get("sec-fetch-dest") == "document"
        )
        is_foreign = is_cross_site(headers.get("sec-fetch-site")) and not is_link
        if is_foreign or is_other_origin(headers.getlist("origin"), hosts):
            return PlainTextResponse("vf-view answers its own page only\n", 403)
        return None

    def _may_write(self, headers: Headers, host: str) -> bool:
        assert self.token is not None
        origins, tokens = headers.getlist("origin"), headers.getlist(TOKEN_HEADER)
        return (
            origins == [f"http://{host}"]
            and headers.get("sec-fetch-site", "same-origin") == "same-origin"
            and headers.get("content-type") == "application/json"
            and len(tokens) == 1
            and secrets.compare_digest(tokens[0].encode(), self.token.encode())
        )
