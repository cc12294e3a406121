"""``Step``: one optimizer step, its data and what was measured in it so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from verifiers_trainer.algorithm.batch import TrainBatch
from verifiers_trainer.algorithm.diagnostics import RatioMeter
from verifiers_trainer.algorithm.packing import PackedRow


@dataclass(slots=True)
class Step:
    """What a training step knows; the trainer fills it from top to bottom of ``RLTrainer.step``."""

    batch: TrainBatch
    """The data: the whole batch, or the part of it that any of several updates trains on."""
    rows: list[PackedRow]
    """Those of this process."""
    meter: RatioMeter
    """How far the trained policy is from the policy that sampled, over the tokens of the step."""
    keeps_tokens: bool = False
    """Whether ``row_logprobs`` are kept."""
    row_logprobs: list[torch.Tensor] = field(default_factory=list)
    """log π [T] of each row of this process."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Metrics under the names of ``metrics.jsonl``, without those of the batch."""
    is_whole: bool = True
    """Whether the weights are those of ``global_step``: False while the step is being applied."""

    @property
    def is_update(self) -> bool:
        """Whether anything is trained: without a token that carries loss, momentum alone would move
        the weights."""
        return self.batch.num_tokens > 0

    @property
    def metrics(self) -> dict[str, Any]:
        """All metrics, those of the batch too."""
        return {**self.batch.stats, **self.numbers}
