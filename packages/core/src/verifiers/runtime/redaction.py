"""Remove secrets from text that leaves the process: error messages, tracebacks, saved columns.

``***`` replaces the values of environment variables whose name contains KEY, TOKEN, SECRET or PASSWORD, the values of
authorisation headers, and text that matches an API key pattern. Other secrets are not detected, and model text is not
searched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
MIN_SECRET_CHARS = 8
"""Shorter values of such variables ("1", "true") are not secrets; replacing them would corrupt the text."""
_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_HEADERS = frozenset(("authorization", "proxy-authorization", "x-api-key", "api-key", "api_key", "cookie"))
_PATTERNS = (
    re.compile(r"(?i)((?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic)\s+)?)[^\s'\",}]+"),
    re.compile(r"(?i)(\bbearer\s+)[\w.~+/=-]{8,}"),
    re.compile(r"(?i)((?:x-)?api[-_]key['\"]?\s*[:=]\s*['\"]?)[^\s'\",}]+"),
    re.compile(r"()\bsk-[\w-]{16,}"),
)


def redacted_text(text: str) -> str:
    """The text with secrets replaced by ``***``.

    >>> redacted_text("headers: {'Authorization': 'Bearer abc123'}")
    "headers: {'Authorization': 'Bearer ***'}"
    """
    for name, value in os.environ.items():
        if len(value) >= MIN_SECRET_CHARS and value in text and any(part in name.upper() for part in _NAMES):
            text = text.replace(value, HIDDEN)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


def redacted(value: Any) -> Any:
    """A JSON value with the contents of authorisation headers and key fields replaced, at any depth.

    >>> redacted({"extra_headers": {"Authorization": "Bearer abc"}, "temperature": 0.5})
    {'extra_headers': {'Authorization': '***'}, 'temperature': 0.5}
    """
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if str(key).lower() in _HEADERS and isinstance(member, str) else redacted(member)
            for key, member in value.items()
        }
    return [redacted(member) for member in value] if isinstance(value, list | tuple) else value
