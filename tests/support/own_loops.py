"""Training by ``train``, and by a loop of one's own in the trainer's verbs, also on the ranks of a
test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from support import split, zero_runs
from support.training import metrics_of, small_trainer
from verifiers.errors import ConfigError
from verifiers_trainer.distributed import fsdp
from verifiers_trainer.trainer import RLTrainer

LAUNCHED = {"": lambda: None, "fsdp2": split.as_launched} | {
    f"zero{stage}": lambda stage=stage: zero_runs.as_launched(zero_stage=stage)
    for stage in (1, 2, 3)
}
"""What the launcher sets, by the way in which the ranks share the model."""


def own_loop(trainer: RLTrainer, until: int, parts: int = 1) -> None:
    """Steps up to policy version ``until``; the rows of a batch in ``parts`` of nearly equal size."""
    while trainer.policy_version < until:
        batch = trainer.next_batch()
        assert batch is not None
        if parts == 1:
            trainer.forward_backward(batch)
        else:
            rows = batch.rows_R[trainer.ranks.rank]
            for number in range(parts):
                start, end = (len(rows) * n // parts for n in (number, number + 1))
                trainer.forward_backward(rows[start:end])
        trainer.optim_step()


def untimed(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run that do not depend on the machine."""
    measured = ("time", "throughput", "alarm")
    return [
        {name: value for name, value in line.items() if not name.startswith(measured)}
        for line in metrics_of(folder)
    ]


def on_rank(folder: str, shared: str = "", parts: int = 0, **settings: Any) -> dict[str, Any]:
    """Train by a loop that takes the rows in ``parts``, or by ``train`` with 0 of them; the whole
    weights, and on rank 0 the metrics."""
    LAUNCHED[shared]()
    trainer = small_trainer(Path(folder), **settings)
    trainer.args.ddp_timeout = 60
    if parts:
        own_loop(trainer, trainer.args.max_steps, parts)
    else:
        trainer.train()
    trainer.model.eval()
    weights = split.digest(dict(fsdp.whole_tensors(trainer.model, trained_only=True)))
    trainer.close()
    trainer.ranks.gather([0.0], "the end")  # the store ends with rank 0's process
    return {"weights": weights, "metrics": untimed(Path(folder)) if trainer.ranks.is_main else []}


def other_numbers_of_rows(folder: str, **settings: Any) -> str:
    """What is said where rank 1 gives a row less."""
    trainer = small_trainer(Path(folder), **settings)
    batch = trainer.next_batch()
    assert batch is not None
    rows = batch.rows_R[trainer.ranks.rank]
    try:
        trainer.forward_backward(rows[int(os.environ["RANK"]) :])
    except ConfigError as error:
        return str(error)
    return ""
