"""Which requests a server on this machine answers: those to its own names, and of no other web page.

A page of another site that a user of this machine opens can send requests to it. Browsers name the
page in ``Origin``, and whether it is another site's in ``Sec-Fetch-Site``. A page whose name
resolves to 127.0.0.1 (DNS rebinding) is of the same site, but sends its own name as ``Host``.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Sequence
from functools import lru_cache

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]@/\s]+))(?::\d{1,5})?")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@lru_cache  # it asks the resolver
def allowed_hosts(host: str) -> frozenset[str]:
    """The accepted ``Host`` names of a server bound to ``host``; without ports, in lower case."""
    names = {*LOOPBACK, host.lower()}
    if not is_loopback(host):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return frozenset(names)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server bound to ``host``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_named(host: str, names: Collection[str], any_address: bool) -> bool:
    """Whether a ``Host`` header has one of these names, or with ``any_address`` an IP address: DNS
    rebinding needs a name."""
    match = _HOST.fullmatch(host.strip().lower())
    name = (match[1] or match[2]) if match else ""
    if name in names:
        return True
    try:
        return any_address and bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def is_cross_site(site: str | None) -> bool:
    """Whether ``Sec-Fetch-Site`` says that another site's page sent the request."""
    return site in ("cross-site", "same-site")


def is_other_origin(origins: Sequence[str], hosts: Sequence[str]) -> bool:
    """Whether ``Origin`` says that a page of another server sent the request."""
    return bool(origins) and list(origins) != [f"http://{host}" for host in hosts]


def foreign_page(
    hosts: Sequence[str], origins: Sequence[str], site: str | None, bound_to: str
) -> tuple[int, str] | None:
    """(status, reason) of a request to an API that a browser sends for a page; None for all others.

    ``hosts``, ``origins`` and ``site`` are its headers ``Host``, ``Origin`` and ``Sec-Fetch-Site``;
    ``bound_to`` is where the server listens. Programs may name a server on a network as they like.
    """
    is_local = is_loopback(bound_to)
    if (is_local or origins) and not all(
        is_named(host, allowed_hosts(bound_to), not is_local) for host in hosts
    ):
        return 421, f"this server does not answer to the name {hosts[0][:100]!r}"
    if is_cross_site(site):
        return 403, "this server does not answer to pages of other sites"
    if is_other_origin(origins, hosts):
        return 403, f"this server does not answer to pages of {origins[0][:100]!r}"
    return None
