"""Classify HTTP error responses of providers as exceptions of ``errors``.

The promise: every status and message maps to exactly one class, the text names the endpoint and the
correction, and contains no key or header value (`Endpoint.redact`).

This module sends nothing and repeats nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from verifiers.clients.reply import excerpt
from verifiers.clients.retry import parse_retry_after
from verifiers.errors import (
    AuthenticationFailed,
    EndpointUnreachable,
    ModelNotFound,
    ModelRefused,
    ModelUnavailable,
    OverlongPromptError,
    RateLimited,
    VerifiersError,
)

_OVERLONG = re.compile(
    r"""maximum\ context\ length | context_length_exceeded | context\ length\ exceeded | exceed_context_size
    | exceeds?\ the\ (available\ |model'?s?\ )*(maximum\ )?context
    | context\ (window|size|length)\ (is\ )?(exceeded|limit|of)
    | (longer|larger|greater|more)\ than\ the\ (model'?s\ )?(maximum\ )?(context|model\ length|allowed\ tokens)
    | (prompt|input|message|messages|request)\ (is|are|was)\ too\ long | prompt_too_long
    | reduce\ the\ length\ of\ the | too\ many\ (input\ |prompt\ )?tokens | inputs?`?\ (must\ have\ less|tokens\ \+)
    | token\ count.{0,40}exceeds\ the\ max | tokens.{0,60}exceeds?\ (the\ )?(token\ |model\ )?(limit|maximum)
    | must\ be\ at\ least\ 1,\ got\ -\d | string_above_max_length | exceeds?\ max(imum)?[_ ](model|input|context|seq)
    """,
    re.IGNORECASE | re.VERBOSE,
)
_LIMIT_ALONE_TOO_LARGE = (
    re.compile(
        r"is too large: (?P<requested>\d+).*?maximum context length is (?P<room>\d+)",
        re.IGNORECASE | re.DOTALL,
    ),
    re.compile(
        r"context length is (?P<room>\d+).*?(?P<requested>\d+) in the completion",
        re.IGNORECASE | re.DOTALL,
    ),
)
_UNKNOWN_MODEL = re.compile(
    r"model_not_found |"
    r" model.{0,200}(does\ not\ exist|not\ found|not\ exist|is\ not\ available|not\ served)"
    r" | (not\ a\ valid|unknown|invalid|no\ such)\ model",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_UNKNOWN_ARGUMENT = re.compile(
    r"unsupported|not supported|unrecogni[sz]ed|unknown|unexpected|not permitted|not"
    r" allowed|forbidden|extra|invalid",
    re.IGNORECASE,
)
_QUOTA = re.compile(
    r"insufficient_quota|exceeded your current quota|billing_hard_limit", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The description of an endpoint in error messages."""

    url: str
    """The base URL without secrets."""
    key_name: str
    """The source of the key, for example "the variable OPENAI_API_KEY"."""
    api_key_var: str | None = None
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def redact(self, text: str) -> str:
        """The text without any key or secret header value."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def is_overlong(text: str) -> bool:
    """Return whether an error text reports a prompt longer than the context."""
    return bool(_OVERLONG.search(text)) and not limit_alone_too_large(text)


def limit_alone_too_large(text: str) -> bool:
    """Return whether an error text reports that max_tokens alone is as long as the context or
    longer."""
    return any(
        (m := pattern.search(text)) and int(m["requested"]) >= int(m["room"])
        for pattern in _LIMIT_ALONE_TOO_LARGE
    )


def refuses_argument(status: int, body: bytes, name: str) -> bool:
    """Return whether a response reports that the endpoint does not support this argument."""
    if status not in (400, 422):
        return False
    text = excerpt(body, 2000)
    return name in text and bool(_UNKNOWN_ARGUMENT.search(text)) and not is_overlong(text)


def failure(
    status: int,
    body: bytes,
    endpoint: Endpoint,
    model: str,
    retry_after: tuple[str | None, str | None] = (None, None),
) -> VerifiersError:
    """Return the error of a response with a status other than 200.

    ``retry_after``: the headers retry-after-ms and Retry-After.
    """
    text = endpoint.redact(excerpt(body, 2000))
    detail = f": {text[:300]}" if text else ""
    url = endpoint.url
    facts = {"url": url, "status": status, "body": text}
    retry_after_s = parse_retry_after(*retry_after)
    if status == 429:
        if quota := _QUOTA.search(text):
            message = f"{url} reports that the quota of its account is used up{detail}"
        else:
            wait = f", asking to wait {retry_after_s:g} s" if retry_after_s is not None else ""
            message = f"{url} limits the rate of requests (HTTP 429{wait}){detail}"
        return RateLimited(
            message, retry_after_s=retry_after_s, limit="quota" if quota else None, **facts
        )
    if status in (408, 409) or status >= 500:
        return ModelUnavailable(
            f"{url} failed with HTTP {status}{detail}", retry_after_s=retry_after_s, **facts
        )
    if status in (401, 403):
        message = f"{url} refused the key in {endpoint.key_name} (HTTP {status}){detail}"
        return AuthenticationFailed(message, api_key_var=endpoint.api_key_var, **facts)
    if status in (400, 413, 422) and is_overlong(text):
        return OverlongPromptError(
            f"the prompt does not fit the context of {model}{detail}", model=model, **facts
        )
    if status in (400, 404, 422) and _UNKNOWN_MODEL.search(text):
        return ModelNotFound(
            f"{url} does not serve the model {model!r}{detail}", model=model, **facts
        )
    if status in (404, 405):
        message = (
            f"{url} has no completions endpoint (HTTP {status}): correct the base URL, which"
            " usually ends in /v1"
        )
        return EndpointUnreachable(message, **facts)
    if status < 400:
        return EndpointUnreachable(
            f"{url} redirects (HTTP {status}): use the final URL as base URL", **facts
        )
    if limit_alone_too_large(text):
        return ModelRefused(
            f"max_tokens alone fills the context of {model}, lower it{detail}", **facts
        )
    return ModelRefused(f"{url} refused the request (HTTP {status}){detail}", **facts)
