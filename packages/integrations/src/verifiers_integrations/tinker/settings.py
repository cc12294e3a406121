"""``TinkerConfig``: the settings of a run on a Tinker service, all checked together.

Settings with the meaning of a setting of ``RLConfig`` have its name and default. Settings with a default of the service
(learning rate, rank of the adapter, other optimizer settings) are omitted from requests unless set.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from verifiers.errors import ConfigError
from verifiers.runtime.suggest import check_keywords
from verifiers_trainer.algorithm.advantages import ADVANTAGES
from verifiers_trainer.algorithm.aggregation import AGGREGATIONS
from verifiers_trainer.settings.limits import UNCOMPARED

LOSSES = ("importance_sampling", "ppo", "cispo")
CHOICES: dict[str, tuple[str, ...]] = {
    "loss": LOSSES,
    "overlong": ("mask", "drop"),
    "zero_variance": ("drop", "keep"),
    "history": ("render", "exact"),
}
POSITIVE = (
    *("rollouts_per_example", "batch_size", "max_seq_len", "max_steps", "max_concurrent", "generation_timeout"),
    *("save_steps", "max_tokens", "lora_rank", "learning_rate"),
)
FREE = frozenset("base_url output_dir max_steps save_steps save_total_limit".split()) | frozenset(
    "max_concurrent generation_timeout rollout_timeout log_completions max_error_fraction no_signal_steps".split()
)
"""Settings that may change when a run is resumed: they affect neither sampling nor the loss."""


@dataclass(frozen=True, slots=True)
class TinkerConfig:
    """Settings of ``TinkerTrainer``. *Raises* ``ConfigError`` with every problem."""

    component: ClassVar[str] = "rl"
    """The service has policy-gradient losses only."""
    teacher: ClassVar[str | None] = None
    model: str = ""
    """Base model, by its name at the service."""
    base_url: str | None = None
    """URL of the service; None = the hosted one."""
    tokenizer: str | None = None
    """Name or folder; None = that of the model at the service."""
    output_dir: str | None = None
    """Folder of the run; default ``outputs/tinker-<time>``."""
    lora_rank: int | None = None
    """None: the service's default."""
    learning_rate: float | None = None
    """None: the SDK's default."""
    adam: dict[str, Any] = field(default_factory=dict)
    """Further fields of the SDK's ``AdamParams``: beta1, beta2, eps, weight_decay, grad_clip_norm."""
    loss: str = "importance_sampling"
    loss_config: dict[str, float] = field(default_factory=dict)
    """The service's ``loss_fn_config``; empty: its defaults."""

    rollouts_per_example: int = 16
    batch_size: int = 512
    """Rollouts per optimizer step."""
    max_steps: int = 500
    max_seq_len: int = 2048
    max_tokens: int | None = None
    """Maximum tokens of one turn; None = the remainder of ``max_seq_len``."""
    temperature: float = 1.0
    """Only 1.0: the service returns log-probabilities of the unprocessed distribution."""
    history: str = "render"
    tool_call_parser: str | None = "hermes"
    seed: int = 42
    shuffle_dataset: bool = True

    advantage: str = "mean"
    aggregation: str = "token_mean"
    """Normalisation of the sum over tokens that the service minimises; applied to the advantages."""
    max_off_policy_steps: int = 1
    max_concurrent: int = 1024
    generation_timeout: float = 600.0
    rollout_timeout: float | None = None
    zero_variance: str = "drop"
    oversample: float = 2.0
    min_group_fraction: float = 0.75
    max_error_fraction: float = 0.5
    no_signal_steps: int | None = None
    overlong: str = "mask"
    mask_truncated_completions: bool = False
    zero_truncated_completions: bool = False

    save_steps: int = 50
    save_total_limit: int | None = None
    """Maximum number of local checkpoint folders; states saved at the service are not deleted."""
    log_completions: bool = True

    updates_per_batch: ClassVar[int] = 1
    steps_per_batch: ClassVar[int] = 1
    negative_advantage_weight: ClassVar[float] = 1.0
    deterministic: ClassVar[bool] = False
    stale_policy: ClassVar[str] = "wait"
    credit: ClassVar[str] = "rollout"
    gamma: ClassVar[float] = 1.0
    max_completion_len: ClassVar[int | None] = None
    mask_env_responses: ClassVar[bool] = True
    packing: ClassVar[bool] = False
    share_prompts: ClassVar[bool] = False
    """A datum of the service is one sample."""
    skip_solved: ClassVar[bool] = False
    num_env_workers: ClassVar[int] = 0
    env_worker_backend: ClassVar[str] = "process"
    max_concurrent_scoring: ClassVar[int | None] = None
    max_concurrent_tools: ClassVar[int | None] = None
    micro_batch_tokens: ClassVar[int] = 1
    world_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if problems := self.problems():
            listed = "\n".join(f"  - {problem}" for problem in problems)
            raise ConfigError(f"{len(problems)} setting(s) of the training cannot be used:\n{listed}")
        if self.output_dir is None:
            object.__setattr__(self, "output_dir", f"outputs/tinker-{time.strftime('%Y%m%d-%H%M%S')}")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> TinkerConfig:
        """Create a configuration from a mapping. *Raises* ``ConfigError`` for unknown names."""
        if "api_key" in settings:
            raise ConfigError("the key is read from TINKER_API_KEY only, not from a file: remove api_key")
        check_keywords(settings, [one.name for one in fields(cls)], "a Tinker run")
        return cls(**settings)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        assert self.output_dir is not None
        return Path(self.output_dir)

    @property
    def num_groups(self) -> int:
        """Groups per optimizer step."""
        return self.batch_size // self.rollouts_per_example

    def sampling(self) -> dict[str, Any]:
        """The sampling arguments of every training request."""
        return {"temperature": self.temperature} | ({} if self.max_tokens is None else {"max_tokens": self.max_tokens})

    def decisive(self) -> dict[str, Any]:
        """Return the settings that must match when a run is resumed."""
        return {name: value for name, value in asdict(self).items() if name not in FREE}

    def problems(self) -> list[str]:
        """Return every violated rule as a sentence."""
        problems = [
            f"{name} is {getattr(self, name)!r}; it must be positive"
            for name in POSITIVE
            if self._is_not_positive(name)
        ]
        choices = CHOICES | {"advantage": tuple(ADVANTAGES), "aggregation": tuple(AGGREGATIONS)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                problems.append(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        if not self.model:
            problems.append("model is missing: the service's name of the base model, for example Qwen/Qwen3-8B")
        if self.temperature != 1.0:
            problems.append(
                f"temperature is {self.temperature:g}; Tinker's log-probabilities are those of temperature 1.0, so "
                "the ratio to another distribution would be wrong: use 1.0"
            )
        if not problems and self.batch_size % self.rollouts_per_example:
            size = self.rollouts_per_example
            near = max(size, self.batch_size // size * size)
            problems.append(
                f"batch_size is {self.batch_size}, not a multiple of rollouts_per_example ({size}): use {near}"
            )
        if self.rollouts_per_example == 1 and self.advantage not in UNCOMPARED:
            problems.append("rollouts_per_example is 1: an advantage compares siblings: use at least 2")
        return problems

    def _is_not_positive(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and not value > 0
