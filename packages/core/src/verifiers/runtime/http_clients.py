"""Every HTTP client of this product, made by one of two functions, so that one rule holds for all.

A server on loopback is never reached through a proxy, whatever the variables of the process say:
the proxy would be asked for itself, and would get the key. A redirect is not followed with a key
that belongs to another address. A connection on which anything came without a request is not used
again: it would be the answer to the next request. A certificate that is not accepted is no reason
to start a server: `tls_fault` says what mends it. The clients of vendors' own packages are not ours.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import select
import ssl
import urllib.request
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from http.client import HTTPResponse

    import aiohttp
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.client_reqrep import ConnectionKey
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

PROXY_VARIABLES = "HTTP_PROXY HTTPS_PROXY ALL_PROXY http_proxy https_proxy all_proxy".split()


def is_loopback_url(url: str) -> bool:
    """Whether the host of the URL is this machine.

    >>> [is_loopback_url(url) for url in ("http://127.0.0.1:8000/v1", "ws://[::1]/x", "http://a.localhost", "http://a")]
    [True, True, True, False]
    """
    try:
        host = (urlsplit(url).hostname or "").removesuffix(".")
    except ValueError:
        return False
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def header_value(value: str, what: str) -> str:
    """A key as a header has it: without the line end of a mounted file. *Raises* ConfigError, which
    does not quote it, for characters that no key has.

    >>> header_value("tok-1\\n", "the key")
    'tok-1'
    """
    value = value.strip()
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{what} contains characters that are not valid in a key: copy it again")
    return value


CA_VARIABLE = "SSL_CERT_FILE"
"""Names the file of authorities, for OpenSSL, and so for every client here and those of vendors."""
_TIME_CODES, _NAME_CODES = (9, 10), (62, 63, 64)
"""``X509_V_ERR_…`` of OpenSSL: not yet valid, expired; another host name, mail or IP address."""
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL")


def tls_fault(error: BaseException | None) -> str:
    """Why a server is not trusted, with the correction, from an error or what it came from; "" for
    another error, and for a handshake that may succeed when it is repeated."""
    seen: set[int] = set()
    pending: list[object] = [error]
    while pending:
        cause = pending.pop()
        if not isinstance(cause, BaseException) or id(cause) in seen:
            continue
        seen.add(id(cause))
        if isinstance(cause, ssl.SSLError) and (sentence := _tls_sentence(cause)):
            return sentence
        links = ("os_error", "certificate_error", "reason", "__context__", "__cause__")
        pending += [getattr(cause, name, None) for name in links]
    return ""


def _tls_sentence(error: ssl.SSLError) -> str:
    if not isinstance(error, ssl.SSLCertVerificationError):
        words = f"{getattr(error, 'reason', '')} {error}".upper().replace(" ", "_")
        is_plain = any(name in words for name in _NO_TLS)
        return "it does not speak TLS there: write http:// in its URL" if is_plain else ""
    if not hasattr(error, "verify_code"):  # aiohttp's class of this name, which holds the error
        return ""
    code, words = error.verify_code, error.verify_message.rstrip(".")
    if code in _TIME_CODES:
        correction = "renew it, or set the clock of this machine"
    elif code in _NAME_CODES:
        correction = "write the URL with a name that is in the certificate"
    else:
        file = os.environ.get(CA_VARIABLE)
        correction = (
            f"name a PEM file with the certificate of its authority (CA) in {CA_VARIABLE}, beside the"
            f" authorities of other servers{f'; it names {file}' if file else ''}"
        )
    return f"its certificate is not accepted ({words}): {correction}"


def open_session(
    url: str,
    *,
    uses_proxy: bool = True,
    connector: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> aiohttp.ClientSession:
    """A session for the server at ``url``; ``options`` are those of ``aiohttp.ClientSession``,
    ``connector`` those of its ``aiohttp.TCPConnector``.

    The proxy is that of the environment, for a server on another machine and where ``uses_proxy``.
    """
    import aiohttp

    uses_proxy = uses_proxy and any(name in os.environ for name in PROXY_VARIABLES)
    return aiohttp.ClientSession(
        trust_env=uses_proxy and not is_loopback_url(url),
        connector=_connector_class()(**connector),
        **options,
    )


@functools.cache
def _connector_class() -> type[aiohttp.TCPConnector]:
    import aiohttp

    class Connector(aiohttp.TCPConnector):
        """Its kept connections are silent."""

        async def _get(self, key: ConnectionKey, traces: list[Trace]) -> Connection | None:
            for protocol, _ in self._conns.get(key, ()):
                if _has_surplus(protocol):
                    protocol.close()  # and is then passed over
            return await super()._get(key, traces)

    return Connector


def _has_surplus(protocol: ResponseHandler) -> bool:
    """Whether a server has sent more than was asked for, or has closed the connection."""
    if protocol.should_close or protocol.transport is None:
        return True
    opened = protocol.transport.get_extra_info("socket")
    if opened is None or not hasattr(select, "poll"):
        return False
    waiting = select.poll()
    waiting.register(opened, select.POLLIN)
    return bool(waiting.poll(0))


def open_url(request: str | urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """``urlopen``: a blocking request; redirects are errors. *Raises* OSError."""
    url = request if isinstance(request, str) else request.full_url
    handlers: list[Any] = [_NoRedirects()]
    if is_loopback_url(url):
        handlers.append(urllib.request.ProxyHandler({}))
    answer: HTTPResponse = urllib.request.build_opener(*handlers).open(request, timeout=timeout_s)
    return answer


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """It would send the headers, with the key, to the other address."""

    def redirect_request(self, *_: object) -> None:
        return None
