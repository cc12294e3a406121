"""``Step``: one optimizer step, its data and what was measured in it so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.batch import TrainBatch, merged
from verifiers_trainer.algorithm.diagnostics import RatioMeter
from verifiers_trainer.algorithm.packing import PackedRow


@dataclass(slots=True)
class Step:
    """What an optimizer step knows: ``forward_backward`` begins it, ``optim_step`` ends it."""

    batch: TrainBatch
    """The data: the whole batch, or the part of it that any of several updates trains on; of
    several ``forward_backward`` one batch of all."""
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
    logged: dict[str, list[float]] = field(default_factory=dict)
    """What the user's code logged during the step, under any name."""
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """The part of the loss so far that is of each adapter, where roles have their own."""
    loss: float = 0.0
    """The loss so far, the mean over the processes."""
    local_loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    """That of this process."""
    train_s: float = 0.0
    """Seconds of forward and backward passes and comparisons so far."""
    is_whole: bool = True
    """Whether the weights are those of ``global_step``: False while the step is being applied."""

    def extend(self, later: Step) -> None:
        """Add a later ``forward_backward``, whose gradients are added to those of this step."""
        self.batch = merged([self.batch, later.batch])
        self.rows = [*self.rows, *later.rows]
        self.meter.extend(later.meter)
        self.loss, self.local_loss = self.loss + later.loss, self.local_loss + later.local_loss
        for adapter, loss in later.losses.items():
            self.losses[adapter] = self.losses.get(adapter, 0) + loss
        self.train_s += later.train_s
        # the tokens of a batch are numbered by themselves
        self.keeps_tokens, self.row_logprobs = False, []

    def count_loss(self, row: PackedRow, loss: torch.Tensor) -> None:
        """Add the loss of a row to that of its adapter, if rows have adapters of their own."""
        if row.adapter is not None:
            number = int(row.adapter[0])
            self.losses[number] = self.losses.get(number, 0) + loss

    def of_roles(self, roles: Sequence[str]) -> dict[str, float]:
        """The metrics of each role with an adapter of its own that the step trains."""
        numbers = {}
        for number, loss in self.losses.items():
            of_role = self.meter.of_adapter(number).summary()
            numbers[f"loss/{roles[number]}"] = float(loss)
            numbers[f"entropy/{roles[number]}"] = of_role["entropy"]
        return numbers

    @property
    def is_update(self) -> bool:
        """Whether anything is trained: without a token that carries loss, momentum alone would move
        the weights."""
        return self.batch.num_tokens > 0

    @property
    def metrics(self) -> dict[str, Any]:
        """All metrics, those of the batch too; of what was logged several times the mean."""
        means = {name: fmean(values) for name, values in self.logged.items()}
        return {**self.batch.stats, **self.numbers, **means}

    def log(self, logs: Mapping[str, object]) -> None:
        """Add metrics of the user's code. *Raises* ConfigError for a value that is not one
        number."""
        for name, value in logs.items():
            self.logged.setdefault(name, []).append(number_of(name, value))


def number_of(name: str, value: Any) -> float:
    """A metric as a number. *Raises* ConfigError for a value that is not one number."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the metric {name!r} is {value!r:.80}, and a metric is one number: {error}", key=name
        ) from error
