"""``Heartbeat``: end this process when another rank has died or was stopped, even from inside a
collective.

DDP, FSDP2 and DeepSpeed wait inside collectives that nothing in Python can interrupt, up to
``ddp_timeout``. gloo wakes them when the connection to a dead process closes; not for a stopped
process or an unreachable machine, and aborting its group does not wake them either. So a thread of
each rank counts up a key of the launcher's key-value store and reads that of the next rank: a few
requests a beat, whatever the number of ranks. Who sees no beat for ``timeout_s`` seconds publishes
which rank is lost. The waits of ``Ranks`` then raise that; a process that is still blocked in a
collective ``GRACE_S`` later is ended, without a clean-up. Acknowledged rollouts and whole
checkpoints are on the disk by then.

A rank that computes for long, or hangs in its own code, is not lost: its thread beats on, and
``ddp_timeout`` is the bound. Tried with gloo on the CPU; with NCCL it works on the same store, and
was not tried.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

GRACE_S = 5.0
"""Seconds from the loss of a rank until a process that is blocked in a collective is ended."""
EXIT_CODE = 3
"""That of a command whose run could not continue."""
_WAITING = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}")
"""Folders of the code that waits for other ranks: torch, and this package's exchanges."""


class Heartbeat:
    """Signs of life of ``rank``, and the watch over the next rank, from construction until
    ``stop``.

    ``store``: torch's; ``block``: a number of this use of it, the same on all ranks;
    ``publish(store, message)`` tells all ranks of a loss.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        timeout_s: float,
        *,
        block: int,
        publish: Callable[[Any, str], None],
    ):
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self._store, self._publish = store.clone(), publish
        self._store.set_timeout(timedelta(seconds=timeout_s))
        self._next = (rank + 1) % world
        self._key = f"beat/{block}/"
        self._stopped = threading.Event()
        self._every_s = min(5.0, timeout_s / 10)
        self._unanswered_s = self._silent_s = 0.0
        self._beats, self._has_left = 0, False
        self._lost: str | None = None
        self._main = threading.get_ident()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._beat, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the beats; the rank that watches this rank expects none from now on."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(GRACE_S)  # not for ever: the process that holds the store may be stopped

    def _beat(self) -> None:
        """Beat, and note what the store answers; this thread alone waits for the store."""
        own_key, next_key, published = f"{self._key}{self.rank}", f"{self._key}{self._next}", False
        try:
            while not self._stopped.is_set():
                self._store.add(own_key, 1)
                beats = self._store.add(next_key, 0)
                # before its first beat a rank may still be on its way here
                if beats != self._beats:
                    self._beats, self._silent_s = beats, 0.0
                self._has_left = self._has_left or self._store.check([f"{next_key}/left"])
                self._unanswered_s = 0.0
                if self._lost is not None and not published:
                    self._publish(self._store, self._lost)
                    published = True
                self._stopped.wait(self._every_s)
            self._store.set(f"{own_key}/left", "1")
        except RuntimeError:
            # the process that holds the store has ended, and with it every wait for it
            self._stopped.set()

    def _watch(self) -> None:
        """Count the seconds of silence, without any call that may block; end the process that
        cannot end itself."""
        before, blocked_s = time.monotonic(), 0.0
        while not self._stopped.wait(self._every_s):
            now = time.monotonic()
            # the time in which this process was stopped is no silence
            waited = min(now - before, 2 * self._every_s)
            before = now
            self._unanswered_s += waited
            if self._beats and not self._has_left and self._unanswered_s <= 3 * self._every_s:
                self._silent_s += waited
            if self._lost is None:
                self._lost = self._loss()
            blocked_s = blocked_s + waited if self._lost and self._is_blocked() else 0.0
            if blocked_s > GRACE_S:
                self._end()

    def _loss(self) -> str | None:
        seconds = f"for {self.timeout_s:g} s (rank_timeout)"
        if self._silent_s > self.timeout_s:
            return (
                f"rank {self._next} of {self.world} has given no sign of life {seconds}: it was"
                " killed or stopped"
            )
        if self._unanswered_s > self.timeout_s:
            return (
                f"the store of the launcher has not answered rank {self.rank} of {self.world}"
                f" {seconds}: the process that holds it, rank 0 or torchrun, was killed or stopped"
            )
        return None

    def _is_blocked(self) -> bool:
        """Whether the training thread is inside torch or an exchange; rank 0 may be writing a
        checkpoint instead."""
        frame = sys._current_frames().get(self._main)
        return frame is not None and frame.f_code.co_filename.startswith(_WAITING)

    def _end(self) -> None:
        where = f"rank {self.rank} waits for it in a collective, and ends"
        sys.stderr.write(f"verifiers: {self._lost}; {where}\n")
        sys.stderr.flush()
        os._exit(EXIT_CODE)
