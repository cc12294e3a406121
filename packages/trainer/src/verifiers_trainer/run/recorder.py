"""``StepRecorder``: collects the numbers of each optimizer step and writes them.

``metrics.jsonl`` and the completions always get them; trackers get the same by the loop's own log events. Recording
changes neither loss nor batch.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verifiers_trainer.algorithm.batch import TrainBatch
from verifiers_trainer.distributed import deepspeed
from verifiers_trainer.run.context import TrainingRun
from verifiers_trainer.run.metrics_files import MetricsFile, print_completions, write_completions
from verifiers_trainer.run.trackers import Trackers

log = logging.getLogger(__name__)

PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "L40S": 362e12, "A100": 312e12}
"""Dense bf16 operations per second of a device, by a part of its name, as its maker states them."""


class StepRecorder:
    """The numbers of the step being trained, under the names of ``metrics.jsonl``; rank 0 alone writes files."""

    def __init__(self, run: TrainingRun, trackers: Sequence[str] = ()):
        self.run = run
        self.file = MetricsFile(run.folder)
        self.trackers = Trackers(trackers if run.ranks.is_main else ())
        self.batch: TrainBatch | None = None
        """The batch of the newest step."""
        self.numbers: dict[str, Any] = {}
        """Of the newest step, beside those of its batch."""
        self.warns = True
        """Whether numbers out of order are logged and marked (``alarm/*``)."""
        self._between_steps: dict[str, float] = {}
        """Seconds of evaluations and checkpoints since the last step; the next step's line has them."""
        self._began = 0.0
        self._alarms: set[str] = set()
        self._evaluation: Mapping[str, float] | None = None

    @property
    def last_step(self) -> dict[str, Any]:
        """The numbers of the newest step, as in ``metrics.jsonl``."""
        return {**(self.batch.stats if self.batch else {}), **self.numbers}

    def begin(self) -> None:
        """Training begins: the first step's time counts from now."""
        self._began = time.perf_counter()

    def spent(self, name: str, seconds: float) -> None:
        """Note the time of something between two steps: ``spent("time/checkpoint", 0.8)``."""
        self._between_steps[name] = seconds

    def finish_step(self, step: int) -> None:
        """Write the line of ``step``, which is also the policy version, and its completions."""
        assert self.batch is not None
        settings, batch = self.run.settings, self.batch
        now = time.perf_counter()
        self.numbers |= {"time/step": now - self._began, **self._between_steps}
        self.numbers["throughput/generated_tokens_per_s"] = batch.stats["tokens/completion"] / self.numbers["time/step"]
        self.numbers |= device_numbers(self.run.model, self.numbers["throughput/train_tokens_per_s"])
        self._began, self._between_steps = now, {}
        if self.warns:
            self._warn(step)
        self.file.write(step, step, self.last_step)
        if settings.log_completions:
            write_completions(self.run.folder, step, batch, settings.log_unique_prompts)
            if settings.num_completions_to_print and step % settings.logging_steps == 0:
                print_completions(batch, step, settings.num_completions_to_print, settings.log_unique_prompts)

    def record_evaluation(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Write an evaluation's line; False, and nothing is written, when it is the one that was written last."""
        if metrics is self._evaluation:
            return False
        self._evaluation = metrics
        self.spent("time/eval", metrics.get("eval_runtime", 0.0))
        if self.run.ranks.is_main:
            self.file.write(step, step, metrics)
        return True

    def _warn(self, step: int) -> None:
        """Log what is out of order, once for as long as it is."""
        found = alarms(self.last_step)
        for name in found.keys() - self._alarms:
            log.warning("step %d: %s", step, found[name])
        self._alarms = set(found)
        self.numbers |= {f"alarm/{name}": 1 for name in found}


def device_numbers(model: torch.nn.Module, tokens_per_s: float) -> dict[str, float]:
    """``memory/peak`` in bytes and, for a device that is known, ``throughput/mfu``; nothing without CUDA."""
    if not torch.cuda.is_available():
        return {}
    counts = [(deepspeed.size(parameter).numel(), parameter.requires_grad) for parameter in model.parameters()]
    parameters, trained = sum(n for n, _ in counts), sum(n for n, is_trained in counts if is_trained)
    share = flops_utilisation(parameters, trained, tokens_per_s, torch.cuda.get_device_name())
    numbers = {"memory/peak": float(torch.cuda.max_memory_allocated())}
    return numbers if share is None else numbers | {"throughput/mfu": share}


def flops_utilisation(parameters: int, trained: int, tokens_per_s: float, device: str) -> float | None:
    """Share of a device's peak that training uses; None for a device whose peak is not known here.

    A token costs two operations for each parameter forwards, two backwards, and two more for each that is trained
    (Kaplan et al. 2020, arXiv 2001.08361); attention over the context is not counted. Rows and rollouts of one process.
    """
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)
    return None if peak is None else (4 * parameters + 2 * trained) * tokens_per_s / peak


def alarms(numbers: Mapping[str, Any]) -> dict[str, str]:
    """What is out of order in a step's numbers: alarm name -> one sentence."""
    total = numbers.get("rollouts/generated", 0) or math.nan
    groups = (numbers.get("groups/live", 0) + numbers.get("groups/dead", 0)) or math.nan
    rules = {
        "mismatch": (
            numbers.get("sampler/mismatch_kl", math.nan) > 0.05,
            "sampler and trainer disagree about tokens of the same weights (sampler/mismatch_kl above 0.05)",
        ),
        "ratio": (
            numbers.get("ratio/kept", math.nan) < 0.5,
            "more than half of the tokens are too far from the policy that sampled them (ratio/kept below 0.5): lower "
            "the learning rate or max_off_policy_steps",
        ),
        "dead_groups": (
            numbers.get("groups/dead", 0) / groups > 0.8,
            "more than 80 % of the groups have equal rewards: the task is too easy or too hard for this model",
        ),
        "errors": (numbers.get("rollouts/errors", 0) / total > 0.1, "more than 10 % of the rollouts failed"),
        "fill": (
            numbers.get("packing/rows", 0) > 1 and numbers.get("packing/fill", math.nan) < 0.7,
            "rows are less than 70 % full (packing/fill): raise micro_batch_tokens",
        ),
        "waiting": (
            numbers.get("time/wait_generation", 0) > 0.8 * numbers.get("time/step", math.inf),
            "more than 80 % of the step was spent waiting for rollouts",
        ),
    }
    return {name: sentence for name, (holds, sentence) in rules.items() if holds}
