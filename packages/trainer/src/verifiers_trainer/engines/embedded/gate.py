"""Lets any thread pause a loop between two steps.

``pause`` waits for the present step at most, and a waiting pause always precedes the next step;
with a plain lock the loop could starve it. A step that can be aborted and repeated polls
``is_pause_pending``, which shortens the wait.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class GateClosed(Exception):
    """Ends the loop; raised in place of its next step."""


class StepGate:
    """One thread runs ``step`` blocks, others block them by ``pause``; pauses may overlap."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holders = 0
        self._stepping = False
        self._closed = False
        self.num_pauses = 0
        """Pauses begun so far: what they protect is unchanged while it is."""

    @property
    def is_pause_pending(self) -> bool:
        """Whether a pause is held or waiting; read without the lock, from inside a step."""
        return self._holders > 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the block once no pause is held; raises GateClosed, also while waiting."""
        with self._changed:
            self._changed.wait_for(lambda: self._holders == 0 or self._closed)
            if self._closed:
                raise GateClosed
            self._stepping = True
        try:
            yield
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Block steps inside the context; entering waits for the present step."""
        with self._changed:
            self._holders += 1
            self.num_pauses += 1
            try:
                self._changed.wait_for(lambda: not self._stepping)
            except BaseException:  # an interrupted wait holds nothing; raised again
                self._holders -= 1
                raise
        try:
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """End the loop at its next step, even during a pause."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
