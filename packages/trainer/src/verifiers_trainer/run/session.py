"""``Session``: what a trainer remembers from ``train`` or ``open`` to ``close``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from verifiers.errors import WeightSyncError
from verifiers_trainer.algorithm.batch import TrainBatch
from verifiers_trainer.pipeline.schedule import PipelineState
from verifiers_trainer.run.step import Step


@dataclass(slots=True)
class Session:
    """Each begins with a new object, so that nothing is left of the one before; the last stays to
    be read when it has ended."""

    start: PipelineState = field(default_factory=PipelineState)
    """The position in the data at which it begins."""
    resumed_from: Path | None = None
    """The checkpoint that it continues."""
    is_own_loop: bool = False
    """Whether ``open`` began it, and not ``train``."""
    is_open: bool = False
    """Whether model, optimizer and engine are ready for a step."""
    newest: Step | None = None
    """The newest step."""
    open_step: Step | None = None
    """The step whose metrics are not written yet, which takes what is logged."""
    loss_before: Mapping[str, object] = field(default_factory=dict)
    """The state of the loss before the open step."""
    whole_batch: TrainBatch | None = None
    """The batch that was drawn last."""
    drawn_at: int | None = None
    """The policy version at which ``next_batch`` was called last."""
    num_sampled: int = 0
    """Groups that ``sample`` has begun at the present policy version."""
    push_error: WeightSyncError | None = None
    """Why the newest weights did not reach the engine: raised when the step is whole."""
    ends_on_every_rank: bool = False
    """Whether the error that ends it is raised on every rank, so that all can save together."""
    at_close: ExitStack = field(default_factory=ExitStack)
    """What ``open`` began and ``close`` ends."""

    @property
    def step(self) -> Step:
        """The newest step, for what is called within it."""
        assert self.newest is not None
        return self.newest

    def close(self) -> None:
        """No step is open and no verb may follow; the newest step stays."""
        self.is_open, self.open_step = False, None
        self.at_close.close()
