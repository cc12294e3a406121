"""What tokens cost, where somebody said so: prices of an endpoint, and the cost of what was read and sampled there.

Prices come from the endpoint registry or a `ClientConfig`; none is built in, because they change. A cost that cannot
be known is None, never 0. Judges and tools have clients, and costs, of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PRICE_FIELDS = ("usd_per_million_input_tokens", "usd_per_million_output_tokens")


def prices_of(client: Any) -> dict[str, float] | None:
    """The prices of a client by ``PRICE_FIELDS``; None when one is missing, or its endpoints have different ones.

    >>> from verifiers.clients import ClientConfig, as_client
    >>> config = ClientConfig(usd_per_million_input_tokens=0.4, usd_per_million_output_tokens=1.6)
    >>> prices_of(as_client(config))
    {'usd_per_million_input_tokens': 0.4, 'usd_per_million_output_tokens': 1.6}
    """
    members = getattr(client, "members", None)
    if members is not None:
        first, *others = [prices_of(member) for member, _ in members]
        return first if all(other == first for other in others) else None
    config = getattr(client, "config", None)
    prices = {name: getattr(config, name, None) for name in PRICE_FIELDS}
    known = {name: float(price) for name, price in prices.items() if price is not None}
    return known if len(known) == len(PRICE_FIELDS) else None


def cost_usd(prices: Mapping[str, float] | None, outputs: Iterable[Mapping[str, Any]]) -> float | None:
    """US dollars for the tokens of all rollouts; None without prices, or when one came to its end uncounted.

    >>> prices = {"usd_per_million_input_tokens": 2.0, "usd_per_million_output_tokens": 8.0}
    >>> cost_usd(prices, [{"error": None, "token_usage": {"input_tokens": 1000, "output_tokens": 500}}])
    0.006
    """
    if not prices:
        return None
    total = 0.0
    for output in outputs:
        usage = output["token_usage"] or {}
        if not usage.get("input_tokens") and output["error"] is None:
            return None
        counts = usage.get("input_tokens") or 0, usage.get("output_tokens") or 0
        total += sum(count * prices[name] for count, name in zip(counts, PRICE_FIELDS, strict=True)) / 1e6
    return total
