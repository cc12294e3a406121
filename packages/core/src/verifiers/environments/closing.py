"""The end of an environment: its ``@teardown`` handlers run once, when it is closed or when the interpreter ends.

``Closes`` is the part of ``Environment`` that does this. Nothing is registered before the environment has started a
rollout, and no signal handler is installed.
"""

from __future__ import annotations

import atexit
import logging
from typing import Any

from verifiers.rollouts.decorators import decorated
from verifiers.runtime.sync_async import blocking, maybe_await


class Closes:
    """``close``, ``aclose`` and the context managers."""

    rubric: Any
    logger: logging.Logger
    _torn_down = False

    def close(self) -> None:
        """Run the ``@teardown`` handlers of the environment and its rubric, once."""
        blocking(self.aclose)

    async def aclose(self) -> None:
        """``close`` as a coroutine. Raises the first handler's failure, after all have run."""
        if self._torn_down:
            return
        self._torn_down = True
        _STARTED.pop(id(self), None)
        failures = []
        for name, handler, _ in decorated(self, "teardown"):
            try:
                await maybe_await(handler())
            except Exception as error:  # noqa: BLE001 - the other handlers run first; it is logged, then raised
                self.logger.warning("teardown %s failed: %s: %s", name, type(error).__name__, error)
                failures.append(error)
        await self.rubric.teardown()
        if failures:
            raise failures[0]

    def close_at_exit(self) -> None:
        """See to it that the handlers run when the interpreter ends; asked for by an environment's first rollout."""
        if not self._torn_down and id(self) not in _STARTED and decorated(self, "teardown"):
            if not _STARTED:
                atexit.register(_close_started)
            _STARTED[id(self)] = self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


_STARTED: dict[int, Closes] = {}
"""Environments with ``@teardown`` handlers that have started a rollout and were not closed, by ``id``."""


def _close_started() -> None:
    for env in list(_STARTED.values()):
        try:
            env.close()
        except Exception as error:  # noqa: BLE001 - nobody is left to catch it; it is logged
            env.logger.warning("closing at exit failed: %s: %s", type(error).__name__, error)
