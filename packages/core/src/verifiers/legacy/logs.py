"""Older ``verifiers.utils.logging_utils``: numbers and long texts for people, and
records as JSON."""

from __future__ import annotations

import datetime
import functools
import json
import logging

TIME_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
SIZE_UNITS = ("KB", "MB", "GB")


def print_time(time_s: float) -> str:
    """Seconds as the two largest units: ``500ms``, ``5s``, ``1h 1m``.

    >>> print_time(3661), print_time(0.5)
    ('1h 1m', '500ms')
    """
    if time_s < 1:
        return f"{time_s * 1000:.0f}ms"
    remaining_s = round(time_s)
    parts: list[str] = []
    if time_s < 60:
        return f"{remaining_s}s"
    for unit, seconds in TIME_UNITS:
        count, remaining_s = divmod(remaining_s, seconds)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
    return " ".join(filter(None, parts[:2]))


def print_size(num_bytes: float) -> str:
    """Bytes in the largest unit up to GB, by powers of 1024.

    >>> print_size(2048), print_size(5)
    ('2.0 KB', '5 bytes')
    """
    if num_bytes < 1024:
        return f"{num_bytes:g} bytes"
    for unit in SIZE_UNITS:
        num_bytes /= 1024
        if num_bytes < 1024 or unit == SIZE_UNITS[-1]:
            break
    return f"{num_bytes:.1f} {unit}"


def truncate(s: str, limit: int = 200) -> str:
    """At most ``limit`` characters, ``...`` after what was cut."""
    return s if len(s) <= limit else f"{s[:limit]}..."


@functools.cache
def log_once(logger: logging.Logger, level: int, msg: str) -> None:
    """Log a message unless this logger logged it at this level before."""
    logger.log(level, msg)


def warning_once(logger: logging.Logger, msg: str) -> None:
    """``log_once`` at the level of warnings."""
    log_once(logger, logging.WARNING, msg)


class JsonFormatter(logging.Formatter):
    """A JSON object a record: ``timestamp level name message module function line``,
    ``exception`` where there is any."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "timestamp": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(),
            "level": record.levelname,
            "name": record.name,
            "message": record.getMessage(),
            "module": record.module,
            "function": record.funcName,
            "line": record.lineno,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)
