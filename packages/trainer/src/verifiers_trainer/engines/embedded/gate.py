"""Lets any thread hold a loop between two of its steps.

The wait for ``pause`` is bounded by the step being computed, and a waiting pause always goes before the next step;
a plain lock would let the loop take it again and again. A step that can be given up and done again asks ``wanted``
on its way, and the wait is shorter still.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class GateClosed(Exception):
    """The loop is to end; raised to it in place of its next step."""


class StepGate:
    """One thread runs ``step`` blocks, others hold them off with ``pause``; pauses may overlap and nest."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holders = 0
        self._stepping = False
        self._closed = False

    @property
    def wanted(self) -> bool:
        """Whether somebody holds a pause or waits for one; asked without the lock, from inside a step."""
        return self._holders > 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Runs the block once nobody holds a pause; raises GateClosed after ``close``, also while it waits."""
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
        """No step runs inside the block; entering waits for the step being computed."""
        with self._changed:
            self._holders += 1
            try:
                self._changed.wait_for(lambda: not self._stepping)
            except BaseException:
                self._holders -= 1
                raise
        try:
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """End the loop at its next step, even one that a pause holds off."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
