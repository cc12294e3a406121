"""Configure the ``verifiers`` logger. Importing the package configures no logging; programs call
``setup_logging``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from verifiers.errors import ConfigError

LOGGER = "verifiers"
HANDLER = "verifiers-stderr"
"""Name of the handler added here; other handlers are unchanged."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def setup_logging(
    level: str | None = None, log_format: str | None = None, date_format: str | None = None
) -> None:
    """Write the ``verifiers`` logger's messages to stderr; ``level`` defaults to ``VF_LOG_LEVEL``,
    then INFO.

    *Raises* ConfigError for an unknown level.

    Example::

        vf.setup_logging("DEBUG")  # or set VF_LOG_LEVEL and leave the level out
    """
    name = (level or os.environ.get("VF_LOG_LEVEL") or "INFO").upper()
    if name not in logging.getLevelNamesMapping():
        raise ConfigError(
            f"unknown log level {name!r}; use DEBUG, INFO, WARNING or ERROR (VF_LOG_LEVEL)",
            key="level",
        )
    logger = logging.getLogger(LOGGER)
    handler = logging.StreamHandler()
    handler.name = HANDLER
    handler.setFormatter(logging.Formatter(log_format or FORMAT, date_format or "%H:%M:%S"))
    for old in [h for h in logger.handlers if h.name == HANDLER]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(name)
    logger.propagate = False


@contextmanager
def log_level(level: str | int) -> Iterator[None]:
    """Set the level of the ``verifiers`` logger for the duration of a ``with`` block.

    >>> with vf.log_level("DEBUG"):
    ...     logging.getLogger("verifiers").isEnabledFor(logging.DEBUG)
    True
    """
    logger = logging.getLogger(LOGGER)
    before = logger.level
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    try:
        yield
    finally:
        logger.setLevel(before)


def quiet_verifiers() -> AbstractContextManager[None]:
    """Log only warnings and errors for the duration of a ``with`` block.

    >>> with vf.quiet_verifiers():
    ...     logging.getLogger("verifiers.runner").isEnabledFor(logging.INFO)
    False
    """
    return log_level("WARNING")
