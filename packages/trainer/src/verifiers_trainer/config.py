"""``RLConfig``: every setting of a training run, checked all at once before any work.

Only fields that change what happens are here. A field says its unit and its range; ``resolve`` reports every violated
rule in one ``ConfigError`` with the nearest valid values. Nothing is checked finally at construction, so a setting
that is changed afterwards (``config.temperature = 0.7``) is honoured.

This module imports transformers (for ``TrainingArguments``) but runs nothing.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from verifiers.errors import ConfigError
from verifiers.suggest import check_keywords
from verifiers_trainer.advantages import ADVANTAGES
from verifiers_trainer.aggregation import AGGREGATIONS
from verifiers_trainer.losses import LOSSES


@dataclass
class _RLFields(TrainingArguments):
    # --- what transformers already has, with other defaults -----------------------------------------------------
    output_dir: str | None = None
    """Folder of the run; default ``outputs/<run_name or the time>``."""
    learning_rate: float | None = None
    """Default 1e-5 with LoRA, else 1e-6."""
    lr_scheduler_type: str = "constant"
    max_steps: int = 500
    """Optimizer steps."""
    max_grad_norm: float = 1.0
    logging_steps: float = 1
    save_strategy: str = "steps"
    save_steps: float = 50
    eval_strategy: str = "no"
    eval_steps: float | None = 50
    report_to: Any = "none"

    # --- model --------------------------------------------------------------------------------------------------
    model_init_kwargs: dict[str, Any] | None = None
    """For ``from_pretrained`` when the model is given as a name."""
    disable_dropout: bool = True
    """Dropout makes sampler and trainer disagree for no reason; with True every dropout is 0."""
    use_lora: bool = True
    """Train a LoRA adapter when the model has none and no ``peft_config`` is given."""
    lora_rank: int = 8
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: list[str] | str | None = None
    """None: every linear layer but the head."""

    # --- batch --------------------------------------------------------------------------------------------------
    rollouts_per_example: int = 16
    """Siblings of one example, the group whose mean reward is the baseline."""
    batch_size: int = 512
    """Rollouts per optimizer step; a multiple of ``rollouts_per_example`` and of ``micro_batch_size``."""
    micro_batch_size: int = 8
    """Rollouts of the longest length that one forward pass should hold; sets ``micro_batch_tokens``."""
    micro_batch_tokens: int | None = None
    """Tokens of one packed row; default max(longest sample, 1024)."""
    packing: bool = True
    """Pack samples end to end into rows; False gives each sample a row of its own."""
    max_seq_len: int = 2048
    """Tokens of one conversation; longer rollouts carry no loss and are never cut."""
    shuffle_dataset: bool = True

    # --- sampling -----------------------------------------------------------------------------------------------
    max_tokens: int | None = None
    """Tokens per turn; None = what is left of ``max_seq_len``."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    sampling_args: dict[str, Any] = field(default_factory=dict)
    """Further sampling arguments of every request."""

    # --- objective ----------------------------------------------------------------------------------------------
    loss: Any = "cispo"
    """A name of ``losses.LOSSES``, ``"package.module:function"``, or a function."""
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Parameters of the loss, over the ones below."""
    ratio_cap: float = 5.0
    ratio_floor: float = 0.0
    mask_ratio_low: float = 0.125
    mask_ratio_high: float = 8.0
    """Tokens whose ratio of probabilities lies outside [mask_ratio_low, mask_ratio_high] carry no loss."""
    epsilon: float = 0.2
    epsilon_high: float | None = None
    """None: as ``epsilon``."""
    delta: float | None = None
    dual_clip: float | None = None
    advantage: Any = "mean"
    """A name of ``advantages.ADVANTAGES``, ``"package.module:function"``, or a function."""
    aggregation: str = "token_mean"

    # --- pipeline -----------------------------------------------------------------------------------------------
    max_off_policy_steps: int = 1
    """How many optimizer steps older than the trained policy a token may be; 0 = synchronous."""
    max_concurrent: int = 1024
    """Rollouts in flight."""
    generation_timeout: float = 600.0
    """Seconds to wait for the rollouts of one optimizer step."""
    rollout_timeout: float | None = None
    """Seconds for one rollout; None = ``generation_timeout``."""
    zero_variance: str = "drop"
    """Groups of equal rewards: "drop" and sample others, or "keep" with weight 0."""
    oversample: float = 2.0
    """At most this many times ``batch_size`` rollouts are generated for one step."""
    min_group_fraction: float = 0.75
    """Share of siblings with a known reward that a group needs."""
    max_error_fraction: float = 0.5
    """Share of failed rollouts, over the last four batches, above which training stops."""
    no_signal_steps: int = 8
    """Consecutive batches without any group of differing rewards before training stops; 0 = only warn."""
    deterministic: bool = False
    """Two runs of one seed are identical bit for bit on the same machine; slower generation."""

    # --- which tokens carry loss --------------------------------------------------------------------------------
    mask_env_responses: bool = True
    """Tokens that the policy did not sample carry no loss."""
    mask_truncated_completions: bool = False
    """Rollouts cut by a length limit carry no loss."""

    # --- inference ----------------------------------------------------------------------------------------------
    embedded_mode: str = "auto"
    """How the embedded engine decodes: auto, padded, continuous, deterministic."""
    embedded_threads: int | None = None
    """Threads of torch's CPU kernels, for the whole process."""

    # --- evaluation ---------------------------------------------------------------------------------------------
    eval_num_examples: int = 64
    """-1 = all."""
    eval_rollouts_per_example: int = 1
    eval_sampling_args: dict[str, Any] = field(default_factory=dict)

    # --- logging ------------------------------------------------------------------------------------------------
    run_name: str | None = None
    log_completions: bool = True
    """Write every step's rollouts to ``completions/step-<n>.jsonl``."""

    def __post_init__(self) -> None:
        if self.output_dir is None:
            self.output_dir = str(Path("outputs") / (self.run_name or time.strftime("train-%Y%m%d-%H%M%S")))
        if self.report_to in (None, "none", "auto"):
            self.report_to = []
        if self.learning_rate is None:
            self.learning_rate = 1e-5 if self.use_lora else 1e-6
        if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
            self.use_cpu, self.bf16, self.fp16 = True, False, False
        super().__post_init__()


class RLConfig(_RLFields):
    """Settings of ``RLTrainer``; also takes every field of ``transformers.TrainingArguments``.

    Raises ``ConfigError`` at once for unknown names, with the nearest known one.
    """

    @functools.wraps(_RLFields.__init__)
    def __init__(self, **settings: Any):
        check_keywords(settings, field_names(), "RLConfig")
        super().__init__(**settings)

    def sampling(self) -> dict[str, Any]:
        """The sampling arguments of every training request."""
        named = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": None if self.top_p == 1.0 else self.top_p,
            "top_k": self.top_k if self.top_k and self.top_k > 0 else None,
            "min_p": self.min_p or None,
            "repetition_penalty": None if self.repetition_penalty == 1.0 else self.repetition_penalty,
        }
        return {name: value for name, value in named.items() if value is not None} | self.sampling_args

    def loss_parameters(self) -> dict[str, Any]:
        """Every parameter a registered loss may take, by the loss's own name for it."""
        return {
            "ratio_cap": self.ratio_cap,
            "ratio_floor": self.ratio_floor,
            "mask_ratio_low": self.mask_ratio_low,
            "mask_ratio_high": self.mask_ratio_high,
            "epsilon_low": self.epsilon,
            "epsilon_high": self.epsilon if self.epsilon_high is None else self.epsilon_high,
            "delta": self.delta,
            "dual_clip": self.dual_clip,
        }

    def resolve(self, world_size: int = 1) -> None:
        """Check everything together. Raises ``ConfigError`` naming every violated rule and how to mend it."""
        problems = [problem for check in CHECKS for problem in check(self, world_size)]
        if problems:
            listed = "\n".join(f"  - {problem}" for problem in problems)
            raise ConfigError(f"{len(problems)} setting(s) of the training cannot be used:\n{listed}")


@functools.cache
def field_names() -> tuple[str, ...]:
    """Every name that ``RLConfig`` takes."""
    return tuple(f.name for f in fields(_RLFields) if f.init)


def _check_batch(config: RLConfig, world_size: int) -> list[str]:
    found = []
    group, batch, per_device = config.rollouts_per_example, config.batch_size, config.micro_batch_size
    if group < 2 and config.advantage != "none":
        found.append(f"rollouts_per_example is {group}: a group baseline needs at least 2 siblings")
    for divisor, said in ((group, "rollouts_per_example"), (per_device * world_size, "micro_batch_size x processes")):
        if divisor > 0 and batch % divisor:
            below, above = batch // divisor * divisor, (batch // divisor + 1) * divisor
            near = f"{below} or {above}" if below else f"{above}"
            found.append(f"batch_size {batch} is not divisible by {said} = {divisor}; the nearest that are: {near}")
    return found


RANGES: dict[str, tuple[float, float]] = {
    "temperature": (1e-6, 2.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "min_group_fraction": (1e-9, 1.0),
    "max_error_fraction": (0.0, 1.0),
    "oversample": (1.0, 1000.0),
    "max_off_policy_steps": (0, 16),
    "micro_batch_size": (1, 1e9),
    "batch_size": (1, 1e9),
    "max_seq_len": (2, 1e9),
    "max_steps": (1, 1e12),
    "max_concurrent": (1, 1e9),
    "lora_rank": (1, 1e6),
    "lora_dropout": (0.0, 0.999),
    "generation_timeout": (1e-3, 1e9),
}
"""Field -> smallest and largest value allowed."""

CHOICES: dict[str, tuple[str, ...]] = {
    "aggregation": tuple(AGGREGATIONS),
    "zero_variance": ("drop", "keep"),
    "embedded_mode": ("auto", "padded", "continuous", "deterministic"),
}


def _check_ranges(config: RLConfig, world_size: int) -> list[str]:
    found = []
    for name, (low, high) in RANGES.items():
        value = getattr(config, name)
        if not isinstance(value, (int, float)) or not low <= value <= high:
            found.append(f"{name} is {value!r}; it must lie in [{low:g}, {high:g}]")
    for name, allowed in CHOICES.items():
        if getattr(config, name) not in allowed:
            found.append(f"{name} is {getattr(config, name)!r}; it must be one of {', '.join(allowed)}")
    return found


def _check_objective(config: RLConfig, world_size: int) -> list[str]:
    found = []
    for name, registry in (("loss", LOSSES), ("advantage", ADVANTAGES)):
        try:
            registry.resolve(getattr(config, name))
        except ConfigError as error:
            found.append(str(error))
    if not config.mask_ratio_low < 1 < config.mask_ratio_high:
        found.append(
            f"mask_ratio_low {config.mask_ratio_low} and mask_ratio_high {config.mask_ratio_high} must lie on both sides of 1"
        )
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if config.delta is not None and config.delta <= 1 + high:
        found.append(f"delta is {config.delta}; it must be above 1 + epsilon_high = {1 + high:g}")
    if config.deterministic and config.embedded_mode not in ("auto", "deterministic"):
        found.append(f"deterministic=True needs embedded_mode='deterministic', not {config.embedded_mode!r}")
    return found


CHECKS = (_check_batch, _check_ranges, _check_objective)
