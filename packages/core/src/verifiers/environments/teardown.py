"""``Teardown``: the part of an environment that ends it: its ``@teardown`` handlers run once."""

from __future__ import annotations

import atexit
import logging
from typing import Self

from verifiers.rollouts.author_code import decorated, maybe_await
from verifiers.rubrics import Rubric
from verifiers.runtime.calls import blocking


class Teardown:
    """A base class of ``Environment``: ``close``, at the latest when the interpreter ends."""

    logger: logging.Logger
    rubric: Rubric
    _torn_down = False

    def close(self) -> None:
        """Run the ``@teardown`` handlers of the environment and its rubric, once."""
        blocking(self.aclose)

    async def aclose(self) -> None:
        """``close`` as a coroutine. Raises the failure of the first handler, after all have run."""
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
        """Register the handlers to run at interpreter exit; called by the first rollout of the
        environment."""
        if not self._torn_down and id(self) not in _STARTED and decorated(self, "teardown"):
            if not _STARTED:
                atexit.register(_close_started)
            _STARTED[id(self)] = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


_STARTED: dict[int, Teardown] = {}
"""Environments with ``@teardown`` handlers that have started a rollout and were not closed, by
``id``."""


def _close_started() -> None:
    for env in list(_STARTED.values()):
        try:
            env.close()
        except Exception as error:  # noqa: BLE001 - there is no caller at interpreter exit; it is logged
            env.logger.warning("closing at exit failed: %s: %s", type(error).__name__, error)
