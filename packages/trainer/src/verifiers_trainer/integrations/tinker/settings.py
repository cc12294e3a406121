"""``TinkerConfig``: the settings of a run on a Tinker service, checked all at once.

Names are those of ``RLConfig`` where they mean the same, with its defaults. What the service has a default for
(learning rate, rank of the adapter, the optimizer's other numbers) is left to the service unless given here.
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
"""What may differ when a run is resumed: it decides neither what is sampled nor what is minimised."""


@dataclass(frozen=True, slots=True)
class TinkerConfig:
    """Settings of ``TinkerTrainer``. Raises ``ConfigError`` with every problem at once."""

    model: str = ""
    """Base model, by the service's name for it."""
    base_url: str | None = None
    """Of the service; None is the hosted one."""
    tokenizer: str | None = None
    """Name or folder; None asks the service which one the model has."""
    output_dir: str | None = None
    """Folder of the run; default ``outputs/tinker-<the time>``."""
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
    """Tokens per turn; None = what is left of ``max_seq_len``."""
    temperature: float = 1.0
    """Only 1.0: the service gives the model's own log-probabilities."""
    history: str = "render"
    tool_call_parser: str | None = "hermes"
    seed: int = 42
    shuffle_dataset: bool = True

    advantage: str = "mean"
    aggregation: str = "token_mean"
    """What the sum over tokens that the service minimises is divided by; it scales the advantages."""
    max_off_policy_steps: int = 1
    max_concurrent: int = 1024
    generation_timeout: float = 600.0
    rollout_timeout: float | None = None
    zero_variance: str = "drop"
    oversample: float = 2.0
    min_group_fraction: float = 0.75
    max_error_fraction: float = 0.5
    no_signal_steps: int = 8
    overlong: str = "mask"
    mask_truncated_completions: bool = False
    zero_truncated_completions: bool = False

    save_steps: int = 50
    save_total_limit: int | None = None
    """Checkpoint folders to keep here; the service's saved states are left to the service."""
    log_completions: bool = True

    num_iterations: ClassVar[int] = 1
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
        """Of a mapping. Raises ``ConfigError`` for names that there are none of, with the nearest one."""
        if "api_key" in settings:
            raise ConfigError("the key is read from TINKER_API_KEY alone, never from a file: remove api_key from it")
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
        """What must be equal for a run to be resumed."""
        return {name: value for name, value in asdict(self).items() if name not in FREE}

    def problems(self) -> list[str]:
        """Every violated rule as a sentence."""
        found = [f"{name} is {getattr(self, name)!r}; it must be positive" for name in POSITIVE if self._negative(name)]
        choices = CHOICES | {"advantage": tuple(ADVANTAGES), "aggregation": tuple(AGGREGATIONS)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                found.append(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        if not self.model:
            found.append("model is missing: the service's name of the base model, for example Qwen/Qwen3-8B")
        if self.temperature != 1.0:
            found.append(
                f"temperature is {self.temperature:g}; Tinker's log-probabilities are those of temperature 1.0, and a "
                "ratio to another distribution means nothing: use 1.0"
            )
        if not found and self.batch_size % self.rollouts_per_example:
            size = self.rollouts_per_example
            near = max(size, self.batch_size // size * size)
            found.append(f"batch_size is {self.batch_size}, no multiple of rollouts_per_example ({size}): try {near}")
        if self.rollouts_per_example == 1 and self.advantage != "none":
            found.append("rollouts_per_example is 1: an advantage compares siblings, so take at least 2")
        return found

    def _negative(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and not value > 0
