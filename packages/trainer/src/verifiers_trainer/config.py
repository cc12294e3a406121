"""``RLConfig``: every setting of a training run, checked all at once before any work.

Only fields that change what happens are here; of those inherited from transformers, the ones this trainer cannot
honour are refused. ``resolve`` reports every violated rule in one ``ConfigError`` with the nearest valid values.
Nothing is decided finally at construction, so a setting that is changed afterwards (``config.temperature = 0.7``) is
honoured, and so is what follows from it. The rules are in ``rules``.

This module imports transformers (for ``TrainingArguments``) but runs nothing.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from verifiers.errors import ConfigError
from verifiers.suggest import check_keywords
from verifiers_trainer.rules import CHECKS, choice_problem

log = logging.getLogger(__name__)

CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")
"""Two names of one switch: transformers' older and newer one."""

OBJECTIVES = {
    "grpo": ("ppo", "sequence_mean"),  # arXiv 2402.03300
    "bnpo": ("ppo", "token_mean"),
    "dapo": ("ppo", "token_mean"),  # arXiv 2503.14476; its clip-higher is epsilon_high = 0.28
    "dr_grpo": ("ppo", "constant_length"),  # arXiv 2503.20783
    "gspo": ("gspo", "sequence_mean"),  # arXiv 2507.18071
}
"""Names of the field that mean a loss and an aggregation together; a given ``aggregation`` wins."""


@dataclass
class _RLFields(TrainingArguments):
    # --- what transformers already has, with other defaults -----------------------------------------------------
    output_dir: str | None = None
    """Folder of the run; default ``outputs/<run_name or the time>``."""
    learning_rate: float | None = None  # type: ignore[assignment]
    """Default 1e-5 with LoRA, else 1e-6."""
    lr_scheduler_type: str = "constant"
    max_steps: int = 500
    """Optimizer steps; -1, or giving ``num_train_epochs`` alone, counts them from passes over the examples."""
    bf16: bool | None = None  # type: ignore[assignment]
    """Compute in bfloat16; None = where an accelerator can. Without one everything is float32."""
    max_grad_norm: float = 1.0
    logging_steps: float = 1
    save_strategy: str = "steps"
    save_steps: float = 50
    eval_strategy: str = "no"
    eval_steps: float | None = 50
    report_to: Any = "none"
    """Trackers that get every step's numbers: wandb, trackio, tensorboard, a list of them, none, or auto:
    wandb where it is installed and configured."""

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
    """Rollouts of the longest length that one forward pass holds: with packing, the tokens of a row are bounded by
    ``micro_batch_size`` x ``max_seq_len`` (and by 1024, on a CPU 512, where attention has no kernel for them)."""
    micro_batch_tokens: int | None = None
    """Tokens of one packed row, instead of what follows from ``micro_batch_size``; a longer sample stands alone."""
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
    """A name of ``losses.LOSSES`` or ``OBJECTIVES``, ``"package.module:function"``, or a function."""
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
    zero_truncated_completions: bool = False
    """Rollouts cut by a length limit get the reward 0, whatever the rubric says of them."""
    require_increasing_context: bool = False
    """Refuse a chat template that rewrites earlier turns, instead of warning: with it every turn of a multi-turn
    rollout is a sample of its own."""

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
    eval_required: bool = False
    """Whether an evaluation that fails ends the training; otherwise it is reported and training goes on."""

    # --- logging ------------------------------------------------------------------------------------------------
    run_name: str | None = None
    log_completions: bool = True
    """Write every step's rollouts to ``completions/step-<n>.jsonl``."""

    def __post_init__(self) -> None:
        if self.output_dir is None:
            self.output_dir = str(Path("outputs") / (self.run_name or time.strftime("train-%Y%m%d-%H%M%S")))
        self._set_precision()
        if self.report_to is None:
            self.report_to = "none"
        if self.learning_rate is None:
            self.learning_rate = 1e-5 if self.use_lora else 1e-6
        super().__post_init__()

    def _set_precision(self) -> None:
        """Half precision where an accelerator has it, float32 elsewhere, with a warning if more was asked for."""
        if self.use_cpu or not (torch.cuda.is_available() or torch.backends.mps.is_available()):
            if self.bf16 or self.fp16:
                log.warning("no accelerator is used, so training computes in float32, not in bf16 or fp16")
            self.use_cpu, self.bf16, self.fp16 = True, False, False
        elif self.bf16 is None:
            self.bf16 = not self.fp16 and torch.cuda.is_available() and torch.cuda.is_bf16_supported()


class RLConfig(_RLFields):
    """Settings of ``RLTrainer``; also takes every field of ``transformers.TrainingArguments``.

    Raises ``ConfigError`` at once for unknown names, with the nearest known one.
    """

    @functools.wraps(_RLFields.__init__)  # type: ignore[misc]
    def __init__(self, **settings: Any):
        check_keywords(settings, field_names(), "RLConfig")
        given = set(settings)
        for name in ("eval_strategy", "save_strategy"):  # transformers refuses these itself, without their names
            if name in settings and (problem := choice_problem(name, settings[name])):
                raise ConfigError(problem)
        old, new = CHECKPOINTING
        if old in settings:
            settings.setdefault(new, settings[old])
        try:
            super().__init__(**settings)
        except ValueError as error:  # transformers' own checks
            raise ConfigError(str(error)) from error
        self._given = given

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in field_names() and "_given" in self.__dict__:
            self._given.add(name)
            if name in CHECKPOINTING:
                self.__dict__.update(dict.fromkeys(CHECKPOINTING, value))

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output_dir or "outputs")

    def private_copy(self) -> RLConfig:
        """A copy that can be changed without changing this one."""
        copied = copy.copy(self)
        copied._given = set(self._given)
        return copied

    def is_given(self, name: str) -> bool:
        """Whether the caller set this field, at construction or afterwards."""
        return name in self._given

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
        """Settle what follows from other settings, and check everything together.

        Raises ``ConfigError`` naming every violated rule and how to mend it.
        """
        self._derive()
        problems = [problem for check in CHECKS for problem in check(self, world_size)]
        if problems:
            listed = "\n".join(f"  - {problem}" for problem in problems)
            raise ConfigError(f"{len(problems)} setting(s) of the training cannot be used:\n{listed}")

    def _derive(self) -> None:
        """Decide again what was not given, and may follow from what was changed since construction."""
        derived: dict[str, Any] = {}
        if not self.is_given("learning_rate"):
            derived["learning_rate"] = 1e-5 if self.use_lora else 1e-6
        if not self.is_given("output_dir") and self.run_name:
            derived["output_dir"] = str(Path("outputs") / self.run_name)
        if isinstance(self.loss, str) and self.loss in OBJECTIVES:
            derived["loss"], aggregation = OBJECTIVES[self.loss]
            if not self.is_given("aggregation"):
                derived["aggregation"] = aggregation
        self.__dict__.update(derived)
        self._set_precision()
        self.mixed_precision = "bf16" if self.bf16 else "fp16" if self.fp16 else "no"

    def steps_for(self, num_examples: int) -> int:
        """Optimizer steps of the run: ``max_steps``, unless passes over the examples were asked for."""
        by_epochs = self.is_given("num_train_epochs") and not self.is_given("max_steps")
        if self.max_steps > 0 and not by_epochs:
            return self.max_steps
        return max(1, math.ceil(self.num_train_epochs * num_examples * self.rollouts_per_example / self.batch_size))


@functools.cache
def field_names() -> frozenset[str]:
    """Every name that ``RLConfig`` takes."""
    return frozenset(f.name for f in fields(_RLFields) if f.init)
