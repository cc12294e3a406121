"""``PipelineThread``: the pipeline on an event loop in a thread, with blocking calls for the
trainer's thread.

Every wait ends when no rollout has finished for ``generation_timeout`` seconds, and its error names
the cause: the rollouts, or the line of an environment's code that blocks the event loop.
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
SNAPSHOT_S = 5.0
"""Seconds that a loop may take for a snapshot of a run that ends."""
BLOCKED = "code of the environment blocks the event loop of all rollouts"


class PipelineThread:
    """Runs ``pipeline``: ``start`` before ``next_batch``, ``close`` at the end."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.thread = LoopThread("verifiers-pipeline")

    def start(self, version: int = 0, state: PipelineState | None = None) -> None:
        """Start generating; ``state`` continues an earlier pipeline."""
        self.thread.start()
        self._wait(self.pipeline.open(version, state), "the pipeline has not started")

    def next_batch(self) -> TrainBatch | None:
        """The next batch, as soon as its rollouts are finished; None when the task is solved.

        Raises the error of a failed pipeline at once, ``GenerationStalled`` when no rollout has
        finished for ``generation_timeout`` seconds, ``NoLearningSignal`` and ``TooManyFaults`` as
        ``Pipeline.next_batch`` does.
        """
        started = time.monotonic()
        batch = self._wait(self.pipeline.next_batch(), "no rollout has finished")
        if batch is not None:
            batch.stats["time/wait_generation"] = time.monotonic() - started
        return batch

    def set_version(self, version: int, served: int | None = None) -> None:
        """Set the trained policy version and the ``served`` version; start the groups
        that this allows."""
        self._wait(
            self.pipeline.advance(version, version if served is None else served),
            "the pipeline does not answer",
        )

    def settle(self) -> None:
        """Wait until all groups that may run at this version have finished (deterministic mode,
        before a step)."""
        self._wait(self.pipeline.settle(), "the rollouts of this policy version have not finished")

    @property
    def state(self) -> PipelineState:
        """The pipeline's own state, which changes."""
        return self.pipeline.state

    def snapshot(self) -> PipelineState:
        """The pipeline's present state; running groups are requeued, or in deterministic mode
        finished first."""
        if self.pipeline.config.deterministic:
            self.settle()
        return self._wait(self.pipeline.snapshot(), "the pipeline does not answer")

    def last_state(self) -> PipelineState:
        """The state of a run that ends: as ``snapshot``, but waits for nothing, and works when the
        loop is blocked."""
        if not self.thread.is_running:
            return self.pipeline.copy_state()
        try:
            return self.thread.wait(self.pipeline.snapshot(), SNAPSHOT_S, TimeoutError)
        except TimeoutError:
            return self.pipeline.copy_state()

    def close(self) -> None:
        """Cancel running rollouts and stop the thread; idempotent."""
        if not self.thread.is_running:
            return
        self.pipeline.closing = True  # from this thread: the loop may be blocked
        try:
            self.thread.wait(
                self.pipeline.close(), CLOSE_S, lambda: TimeoutError(self.pipeline.waiting_for())
            )
        except TimeoutError as error:
            log.warning("rollouts could not be stopped within %g s: %s", CLOSE_S, error)
        finally:
            self.thread.stop()

    def _wait(self, work: Coroutine[object, object, object], problem: str) -> Any:
        """Run ``work`` on the pipeline's loop and return its result; ``problem`` begins the message
        of a time-out."""
        timeout_s = self.pipeline.config.generation_timeout

        def stalled() -> GenerationStalled:
            location = self.thread.where_blocked()
            awaited = (
                self.pipeline.waiting_for() if location is None else f"{BLOCKED} at {location}"
            )
            return GenerationStalled(
                f"{problem} for {timeout_s:g} s: {awaited}. Raise generation_timeout, or find out"
                " why they take so long",
                waiting_for=awaited,
                elapsed_s=timeout_s,
            )

        return self.thread.wait(
            work, timeout_s, stalled, progressed=lambda: self.pipeline.progressed
        )
