"""Trackers (wandb, trackio, tensorboard) get a training run's numbers without being able to disturb it.

Each tracker is transformers' own reporting callback, run on a thread of this object behind a bounded queue. A tracker
that is not installed, raises or hangs is dropped with one warning, and training continues; none asks for a login.
``metrics.jsonl`` (``metrics_files``) holds the same numbers and does not depend on any of this.
"""

from __future__ import annotations

import copy
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

log = logging.getLogger(__name__)

QUEUE_SIZE = 256
CLOSE_S = 10.0
FACTORIES: dict[str, Callable[[], TrainerCallback]] = {}
"""Trackers beside those that transformers knows: name -> what makes the callback."""


class Trackers(TrainerCallback):
    """Forwards the loop's events to ``names``; a thread per tracker, started when training begins."""

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self._running: list[_Worker] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.close()
        self._running = [_Worker(name) for name in self.names]
        self._send("on_train_begin", args, state, control, others)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self._send("on_log", args, state, control, {**others, "logs": dict(logs or {})})

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._send("on_train_end", args, state, control, others)
        self.close()

    def close(self) -> None:
        """Give every tracker a few seconds for what it still has; calling it again does nothing."""
        running, self._running = self._running, []
        for worker in running:
            worker.close()

    def _send(self, event: str, args: Any, state: Any, control: Any, others: dict[str, Any]) -> None:
        for worker in self._running:
            worker.put((event, args, copy.copy(state), copy.copy(control), others))


class _Worker:
    """Runs one tracker on its own thread."""

    def __init__(self, name: str):
        self.name = name
        self.gave_up = False
        self._queue: queue.Queue[Any] = queue.Queue(QUEUE_SIZE)
        self._thread = threading.Thread(target=self._run, name=f"verifiers-{name}", daemon=True)
        self._thread.start()

    def put(self, event: Any) -> None:
        if self.gave_up:
            return
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._give_up(f"it has not taken the last {QUEUE_SIZE} events")

    def close(self) -> None:
        self.put(None)
        if not self.gave_up:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self._give_up(f"it does not come to an end within {CLOSE_S:g} s")

    def _run(self) -> None:
        try:
            tracker = _make(self.name)
            while (event := self._queue.get()) is not None and not self.gave_up:
                name, args, state, control, others = event
                getattr(tracker, name)(args, state, control, **others)
        except BaseException as error:  # noqa: BLE001 - an error of a tracker is logged once and must not stop training
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        if not self.gave_up:
            self.gave_up = True
            log.warning("%s gets no more numbers: %s. metrics.jsonl has them all", self.name, reason)


def _make(name: str) -> TrainerCallback:
    if name in FACTORIES:
        return FACTORIES[name]()
    if name == "wandb" and not (
        {"WANDB_API_KEY", "WANDB_MODE"} & os.environ.keys() or (Path.home() / ".netrc").exists()
    ):
        log.warning("wandb has no API key, so its run is kept offline (wandb sync uploads it)")
        os.environ["WANDB_MODE"] = "offline"
    return get_reporting_integration_callbacks([name])[0]()
