"""``StepRecorder``: collects and writes the metrics of each optimizer step.

It writes ``metrics.jsonl`` and the completions; trackers receive the same metrics through the
loop's log events.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from verifiers.checks.audit.certificate import non_solution_reward
from verifiers.data.token_texts import TokenTexts
from verifiers.errors import RunError
from verifiers.parsers import Parser
from verifiers.results.coverage import Coverage
from verifiers.storage.proof import ALARM
from verifiers_trainer.algorithm.batch import Group
from verifiers_trainer.distributed import deepspeed
from verifiers_trainer.distributed.devices import sheet_of
from verifiers_trainer.run.collapse_watch import CollapseWatch
from verifiers_trainer.run.context import TrainingRun
from verifiers_trainer.run.metrics_files import (
    MetricsFile,
    append_dropped,
    print_completions,
    read_metrics,
    write_completions,
)
from verifiers_trainer.run.proof import token_uses
from verifiers_trainer.run.reward_monitor import RewardMonitor
from verifiers_trainer.run.step import Step, number_of
from verifiers_trainer.run.token_records import token_records
from verifiers_trainer.run.trackers import Trackers

log = logging.getLogger(__name__)


class StepRecorder:
    """The metrics of the present step, under the names of ``metrics.jsonl``; rank 0 alone writes
    files."""

    def __init__(self, run: TrainingRun, trackers: Sequence[str] = ()):
        self.run = run
        self.file = MetricsFile(run.folder)
        self.trackers = Trackers(trackers if run.ranks.is_main else ())
        self.warns = True
        """Whether abnormal metrics are logged and marked (``alarm/*``)."""
        self._texts: TokenTexts | None = None
        """Made with the first step whose tokens are written."""
        self._between_steps: dict[str, float] = {}
        """Seconds of evaluations and checkpoints since the last step, written with the next."""
        self._began = 0.0
        self._times = {"time/wait_generation": 0.0, "time/step": 0.0}
        """Seconds of the present batch so far: all of its wait is in the first of its steps."""
        self._batch_times: Mapping[str, float] = {}
        """The same of the newest whole batch."""
        self._alarms: set[str] = set()
        self._evaluation: Mapping[str, float] | None = None
        self.monitor = RewardMonitor(run)
        self._hacking: dict[str, str] = {}
        """The behaviours that the newest whole batch showed."""
        self.collapse: CollapseWatch | None = None
        """Of a run with a teacher."""
        if run.settings.teacher is not None:
            self.collapse = CollapseWatch()
        self._collapsed = ""
        self._non_solution = non_solution_reward(run.env)

    @property
    def keeps_tokens(self) -> bool:
        """Whether the numbers of single tokens are written."""
        settings = self.run.settings
        return bool(settings.log_completions and settings.log_tokens and self.run.ranks.is_main)

    def begin(self) -> None:
        """Start the clock of the first step."""
        self._began = time.perf_counter()

    def resume(self, step: int) -> None:
        """Go on after ``step`` of the run whose file this is."""
        self.file.resume(step)
        lines = read_metrics(self.file.path) if self.file.path.is_file() else []
        self.monitor.resume(lines)
        if self.collapse is not None:
            for line in lines:
                if line["step"] % self.run.settings.steps_per_batch == 0:
                    self._collapsed = self.collapse.sentence(line["step"], line)

    def spent(self, name: str, seconds: float) -> None:
        """Record the time of work between two steps: ``spent("time/checkpoint", 0.8)``."""
        self._between_steps[name] = seconds

    def finish_step(self, number: int, step: Step) -> None:
        """Write the metrics of the ``number``-th step, which is also the policy version, and its
        completions."""
        settings, batch = self.run.settings, step.batch
        now = time.perf_counter()
        step.numbers |= {"time/step": now - self._began, **self._between_steps}
        step.numbers |= token_uses(batch, number - 1)
        is_first_pass = batch.stats.get("batch/pass", 1) == 1
        generated = batch.stats.get("tokens/completion", 0) if is_first_pass else 0
        step.numbers["throughput/generated_tokens_per_s"] = generated / step.numbers["time/step"]
        step.numbers |= device_numbers(
            self.run.model, step.numbers["throughput/train_tokens_per_s"]
        )
        self._began, self._between_steps = now, {}
        if self._non_solution is not None:
            step.numbers["reward/non_solution"] = self._non_solution
        behaviours: dict[tuple[int, int], list[str]] = {}
        if self.warns and self.monitor.is_on and number % settings.steps_per_batch == 0:
            numbers, behaviours = self.monitor.measure(batch.whole_batch)
            step.numbers |= numbers
        if self.warns:
            self.warn(number, step)
        self.file.write(number, number, step.metrics)
        if settings.log_completions:
            write_completions(
                self.run.folder,
                number,
                batch,
                settings.log_unique_prompts,
                self._token_records(step),
                behaviours,
            )
            if number % settings.logging_steps == 0:
                first = [replace(group, rollouts=group.rollouts[:1]) for group in batch.groups]
                self.trackers.log_completions(
                    number, first if settings.log_unique_prompts else batch.groups
                )
            if settings.num_completions_to_print and number % settings.logging_steps == 0:
                print_completions(
                    batch, number, settings.num_completions_to_print, settings.log_unique_prompts
                )

    def require_no_collapse(self) -> None:
        """Raise ``RunError`` where the policy has collapsed, unless ``collapse`` is "warn"."""
        if self._collapsed and self.run.settings.collapse == "stop":
            raise RunError(self._collapsed)

    def _token_records(self, step: Step) -> dict[tuple[int, int], list[dict[str, object]]]:
        if not step.keeps_tokens:
            return {}
        self._texts = self._texts or TokenTexts(self.run.tokenizer)
        rank, limit = self.run.ranks.rank, self.run.settings.log_tokens
        return token_records(step.batch, rank, step.row_logprobs, limit, self._texts)

    def record_dropped(
        self, step: int, groups: Sequence[Group], numbers: Mapping[str, float]
    ) -> None:
        """Keep groups that no step counts, and the ``numbers`` of a batch without any signal before
        ``step``."""
        settings = self.run.settings
        if numbers:
            self.file.write(step - 1, step - 1, numbers)
        if settings.log_completions:
            append_dropped(self.run.folder, step, groups, settings.log_unique_prompts)

    def record(self, step: int, metrics: Mapping[str, object]) -> None:
        """Write a line with metrics of the user's code after ``step``."""
        numbers = {name: number_of(name, value) for name, value in metrics.items()}
        if numbers and self.run.ranks.is_main:
            self.file.write(step, step, numbers)

    def record_evaluation(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Write an evaluation's metrics and return True; return False when they are the last
        metrics written."""
        if metrics is self._evaluation:
            return False
        self._evaluation = metrics
        self.spent("time/eval", metrics.get("eval_runtime", 0.0))
        if self.run.ranks.is_main:
            self.file.write(step, step, metrics)
        return True

    def warn(self, number: int, step: Step) -> None:
        """Log each abnormal metric once for as long as it stays abnormal; times and counts are of a
        whole batch."""
        numbers = step.metrics
        self._times = {name: value + numbers.get(name, 0.0) for name, value in self._times.items()}
        if number % self.run.settings.steps_per_batch == 0:
            self._batch_times, self._times = self._times, dict.fromkeys(self._times, 0.0)
            if self.monitor.is_on:
                self._hacking = self.monitor.look(numbers)
            if self.collapse is not None:
                self._collapsed = self.collapse.sentence(number, numbers)
        counts = {
            name: value
            for name, value in step.batch.whole_batch.stats.items()
            if name.startswith(("groups/", "rollouts/"))
        }
        if self.run.settings.component != "rl":
            # what is imitated may be as long as it is, and in another format
            counts |= {"rollouts/truncated": 0, "rollouts/unparsed": 0}
        numbers = {**numbers, **counts, "time/wait_generation": 0.0, **self._batch_times}
        active = alarms(numbers, self.run.env.parser)
        active |= self._hacking
        if self._collapsed:
            active["collapse"] = self._collapsed
        for name in active.keys() - self._alarms:
            log.warning("step %d: %s", number, active[name])
        self._alarms = set(active)
        step.numbers |= {f"alarm/{name}": 1 for name in active}


def device_numbers(model: torch.nn.Module, tokens_per_s: float) -> dict[str, float]:
    """``memory/peak`` (bytes) and, for a device of ``DATA_SHEETS``, ``throughput/mfu``; empty
    without CUDA."""
    if not torch.cuda.is_available():
        return {}
    counts = [
        (deepspeed.size(parameter).numel(), parameter.requires_grad)
        for parameter in model.parameters()
    ]
    parameters = sum(n for n, _ in counts)
    trained = sum(n for n, is_trained in counts if is_trained)
    share = flops_utilisation(parameters, trained, tokens_per_s, torch.cuda.get_device_name())
    numbers = {"memory/peak": float(torch.cuda.max_memory_allocated())}
    return numbers if share is None else numbers | {"throughput/mfu": share}


def flops_utilisation(
    parameters: int, trained: int, tokens_per_s: float, device: str
) -> float | None:
    """Model FLOPs utilisation of one process, in [0, 1]; None for a device that is not in
    ``DATA_SHEETS``.

    A token costs two operations per parameter in the forward pass, two in the backward pass, and
    two more per trained parameter (Kaplan et al. 2020, arXiv 2001.08361); attention over the
    context is not counted.
    """
    sheet = sheet_of(device)
    return None if sheet is None else (4 * parameters + 2 * trained) * tokens_per_s / sheet.flops


def alarms(numbers: Mapping[str, Any], parser: Parser | None = None) -> dict[str, str]:
    """Abnormal metrics of a step: alarm name -> one sentence. ``parser``: the environment's."""
    total = numbers.get("rollouts/generated", 0) or math.nan
    groups = (numbers.get("groups/live", 0) + numbers.get("groups/dead", 0)) or math.nan
    rules = {
        "mismatch": (
            numbers.get("sampler/disagreement", math.nan) > ALARM,
            (
                "sampler and trainer disagree about tokens of the same weights by more than twice"
                " what rounding explains (sampler/disagreement above 2)"
            ),
        ),
        "ratio": (
            numbers.get("ratio/kept", math.nan) < 0.5,
            (
                "more than half of the tokens are too far from the policy that sampled them"
                " (ratio/kept below 0.5): lower the learning rate or max_off_policy_steps"
            ),
        ),
        "dead_groups": (
            numbers.get("groups/dead", 0) / groups > 0.8,
            (
                "more than 80 % of the groups have equal rewards: the task is too easy or too hard"
                " for this model"
            ),
        ),
        "errors": (
            numbers.get("rollouts/errors", 0) / total > 0.1,
            "more than 10 % of the rollouts failed",
        ),
        "fill": (
            numbers.get("packing/rows", 0) > 1 and numbers.get("packing/fill", math.nan) < 0.7,
            "packed rows are less than 70 % full (packing/fill): raise micro_batch_tokens",
        ),
        "no_context": (
            numbers.get("teacher/with_context", math.nan) == 0,
            (
                "teacher_context gave no rollout of the batch a context: the teacher reads what the"
                " policy reads, and a policy learns nothing from itself then"
            ),
        ),
        "waiting": (
            numbers.get("time/wait_generation", 0) > 0.8 * numbers.get("time/step", math.inf),
            "more than 80 % of the step was spent waiting for rollouts",
        ),
    }
    abnormal = {name: sentence for name, (holds, sentence) in rules.items() if holds}
    return abnormal | Coverage.of_metrics(numbers).warnings(parser=parser)
