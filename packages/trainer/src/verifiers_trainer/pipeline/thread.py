"""``PipelineThread``: the pipeline on an event loop in a thread, with blocking calls for the trainer's thread.

Every wait is bounded by ``generation_timeout``, and its error names what was awaited: the rollouts, or the line of an
environment's code that blocks the event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine
from typing import Any

from verifiers.errors import GenerationStalled
from verifiers_trainer.algorithm.batch import TrainBatch
from verifiers_trainer.engines.loop_thread import LoopThread
from verifiers_trainer.pipeline.pipeline import Pipeline
from verifiers_trainer.pipeline.schedule import PipelineState

log = logging.getLogger(__name__)

CLOSE_S = 30.0
BLOCKED = "all rollouts stand still, because code of the environment blocks their event loop"


class PipelineThread:
    """Runs ``pipeline``: ``start`` before ``next_batch``, ``close`` at the end."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.thread = LoopThread("verifiers-pipeline")

    def start(self, version: int = 0, state: PipelineState | None = None) -> None:
        """Begin generating; ``state`` continues an earlier pipeline."""
        self.thread.start()
        self._wait(self.pipeline.open(version, state), "the pipeline has not started")

    def next_batch(self) -> TrainBatch:
        """The next batch, as soon as its rollouts are finished.

        Raises the error of a failed pipeline at once, ``GenerationStalled`` after ``generation_timeout`` seconds
        without a batch, ``NoLearningSignal`` and ``TooManyFaults`` when going on makes no sense.
        """
        started = time.monotonic()
        batch = self._wait(self.pipeline.next_batch(), "no batch")
        batch.stats["time/wait_generation"] = time.monotonic() - started
        return batch

    def set_version(self, version: int, served: int | None = None) -> None:
        """The trainer has made policy ``version``, and ``served`` samples now; begin what that allows."""
        self._wait(
            self.pipeline.advance(version, version if served is None else served), "the pipeline does not answer"
        )

    def settle(self) -> None:
        """Wait until everything that may run at this version has finished (deterministic mode, before a step)."""
        self._wait(self.pipeline.settle(), "the rollouts of this policy version have not finished")

    def snapshot(self) -> PipelineState:
        """The pipeline's state at this moment, in which running groups are to be run again.

        In deterministic mode they are finished first.
        """
        if self.pipeline.config.deterministic:
            self.settle()
        return self._wait(self.pipeline.snapshot(), "the pipeline does not answer")

    def close(self) -> None:
        """Cancel what runs and end the thread; calling it again does nothing."""
        if not self.thread.is_running:
            return
        self.pipeline.closing = True  # from this thread: the loop may be blocked
        try:
            self.thread.wait(self.pipeline.close(), CLOSE_S, lambda: TimeoutError(self.pipeline.waiting_for()))
        except TimeoutError as error:
            log.warning("rollouts could not be stopped within %g s: %s", CLOSE_S, error)
        finally:
            self.thread.stop()

    def _wait(self, work: Coroutine[Any, Any, Any], problem: str) -> Any:
        """What ``work`` returns on the pipeline's loop; ``problem`` begins the error when it takes too long."""
        timeout_s = self.pipeline.config.generation_timeout

        def stalled() -> GenerationStalled:
            place = self.thread.where_blocked()
            awaited = self.pipeline.waiting_for() if place is None else f"{BLOCKED} at {place}"
            return GenerationStalled(
                f"{problem} after {timeout_s:g} s: {awaited}. Raise generation_timeout, or look at why they take "
                "so long",
                waiting_for=awaited,
                elapsed_s=timeout_s,
            )

        return self.thread.wait(work, timeout_s, stalled)
