"""The queue in front of a generation loop: decides when waiting requests join the running batch.

Joining costs a prefill and a copy of the batch's cache, so an idle loop waits a few milliseconds
for more requests after the first, and a busy loop admits requests when they are many or have waited
long enough.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from verifiers_trainer.engines.requests import GenerationRequest

_QUIET_S = 0.002
_GATHER_S = 0.020
_PATIENCE_S = 0.015


class Inbox:
    """Filled by any thread, emptied by the generation thread."""

    def __init__(self, *, gather: bool = True) -> None:
        self._gather = gather
        self._arrived = threading.Condition()
        self._waiting: deque[tuple[float, GenerationRequest]] = deque()
        self._aborted: set[str] = set()
        self._closed = False

    def put(self, request: GenerationRequest) -> bool:
        """Queue a request; False once closed."""
        with self._arrived:
            if self._closed:
                return False
            self._waiting.append((time.monotonic(), request))
            self._arrived.notify()
            return True

    def abort(self, request_id: str) -> None:
        """Forget a waiting request, or report a running request through ``take_aborted``."""
        with self._arrived:
            remaining = deque(entry for entry in self._waiting if entry[1].request_id != request_id)
            if len(remaining) == len(self._waiting):
                self._aborted.add(request_id)
            self._waiting = remaining

    def take_aborted(self) -> set[str]:
        if not self._aborted:
            return self._aborted
        with self._arrived:
            aborted, self._aborted = self._aborted, set()
            return aborted

    def take(
        self, running: int, admit: Callable[[GenerationRequest], bool]
    ) -> list[GenerationRequest] | None:
        """Requests to join now, oldest first, while ``admit`` returns True; None when the loop must
        end.

        Blocks only when no row is running.
        """
        with self._arrived:
            if not running:
                self._arrived.wait_for(lambda: self._waiting or self._closed)
                deadline = time.monotonic() + (_GATHER_S if self._gather else 0.0)
                while not self._closed and time.monotonic() < deadline:
                    if not self._arrived.wait(timeout=_QUIET_S):
                        break
            if self._closed:
                return None
            is_busy = running and 4 * len(self._waiting) < running
            if is_busy and self._waiting and time.monotonic() < self._waiting[0][0] + _PATIENCE_S:
                return []
            joining: list[GenerationRequest] = []
            while self._waiting and admit(self._waiting[0][1]):
                joining.append(self._waiting.popleft()[1])
            return joining

    def close(self) -> list[GenerationRequest]:
        """Reject further requests and end the loop; return the waiting requests."""
        with self._arrived:
            self._closed = True
            remaining = [request for _, request in self._waiting]
            self._waiting.clear()
            self._arrived.notify_all()
            return remaining
