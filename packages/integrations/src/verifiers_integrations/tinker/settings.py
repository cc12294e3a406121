"""``TinkerConfig``: the settings of a run on a Tinker service, all checked together.

Settings with the meaning of a setting of ``RLConfig`` have its name and default. Settings with a
default of the service (learning rate, rank of the adapter, other optimizer settings) are omitted
from requests unless set.
"""

from __future__ import annotations

import functools
import time
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from verifiers.errors import ConfigError
from verifiers.runtime.suggest import check_keywords
from verifiers.runtime.values import Range, describe, fits, parts
from verifiers.storage.identity import Free
from verifiers_trainer.algorithm.advantages import ADVANTAGES
from verifiers_trainer.settings.batch_rules import UNCOMPARED
from verifiers_trainer.settings.fields import (
    ALARMS,
    LOGGING,
    PLACEMENT,
    RUN_LENGTH,
    SAVING,
    SPEED,
    TIMEOUTS,
    Aggregation,
    Count,
    plain,
)

Positive = Annotated[float, Range(gt=0.0)]


@dataclass(frozen=True, slots=True)
class TinkerConfig:
    """Settings of ``TinkerTrainer``. *Raises* ``ConfigError`` with every problem."""

    component: ClassVar[str] = "rl"
    """The service has policy-gradient losses only."""
    teacher: ClassVar[str | None] = None
    model: str = ""
    """Base model, by its name at the service."""
    base_url: Annotated[str | None, PLACEMENT] = None
    """URL of the service; None = the hosted service."""
    tokenizer: str | None = None
    """Name or folder; None = that of the model at the service."""
    output_dir: Annotated[str | None, PLACEMENT] = None
    """Folder of the run; default ``outputs/tinker-<time>``."""
    lora_rank: Count | None = None
    """None: the service's default."""
    learning_rate: Positive | None = None
    """None: the SDK's default."""
    adam: dict[str, Any] = field(default_factory=dict)
    """Further fields of the SDK's ``AdamParams``: beta1, beta2, eps, weight_decay,
    grad_clip_norm."""
    loss: Literal["importance_sampling", "ppo", "cispo"] = "importance_sampling"
    loss_config: dict[str, float] = field(default_factory=dict)
    """The service's ``loss_fn_config``; empty: its defaults."""

    rollouts_per_example: Count = 16
    batch_size: Count = 512
    """Rollouts per optimizer step."""
    max_steps: Annotated[Count, RUN_LENGTH] = 500
    max_seq_len: Count = 2048
    max_tokens: Count | None = None
    """Maximum tokens of a turn; None = the remainder of ``max_seq_len``."""
    temperature: float = 1.0
    """Only 1.0: the service returns log-probabilities of the unprocessed distribution."""
    history: Literal["render", "exact"] = "render"
    tool_call_parser: str | None = "hermes"
    seed: int = 42
    shuffle_dataset: bool = True

    advantage: Any = "mean"
    """As in ``RLConfig``: a name, ``"mine.py:function"``, a function, or a class with a state."""
    aggregation: Aggregation = "token_mean"
    """Normalisation of the sum over tokens that the service minimises; applied to the
    advantages."""
    max_off_policy_steps: int = 1
    max_concurrent: Annotated[Count, SPEED] = 1024
    generation_timeout: Annotated[Positive, TIMEOUTS] = 600.0
    rollout_timeout: Annotated[float | None, TIMEOUTS] = None
    zero_variance: Literal["drop", "keep"] = "drop"
    oversample: float = 2.0
    min_group_fraction: float = 0.75
    max_error_fraction: Annotated[float, ALARMS] = 0.5
    no_signal_steps: Annotated[int | None, ALARMS] = None
    overlong: Literal["mask", "drop"] = "mask"
    mask_truncated_completions: bool = False
    zero_truncated_completions: bool = False

    save_steps: Annotated[Count, SAVING] = 50
    save_total_limit: Annotated[int | None, SAVING] = None
    """Maximum number of local checkpoint folders; states saved at the service are not deleted."""
    log_completions: Annotated[bool, LOGGING] = True

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
            raise ConfigError(
                f"{len(problems)} setting(s) of the training cannot be used:\n{listed}"
            )
        if self.output_dir is None:
            object.__setattr__(
                self, "output_dir", f"outputs/tinker-{time.strftime('%Y%m%d-%H%M%S')}"
            )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> TinkerConfig:
        """Create a configuration from a mapping. *Raises* ``ConfigError`` for unknown names."""
        if "api_key" in settings:
            raise ConfigError(
                "the key is read from TINKER_API_KEY only, not from a file: remove api_key"
            )
        check_keywords(settings, _hints(), "a Tinker run")
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
        return {"temperature": self.temperature} | (
            {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        )

    def decisive(self) -> dict[str, object]:
        """Return the settings that must match when a run is resumed."""
        free = {
            name
            for name, hint in _hints().items()
            if any(isinstance(part, Free) for part in parts(hint))
        }
        names = (name for name in _hints() if name not in free)
        return {name: plain(getattr(self, name)) for name in names}

    def problems(self) -> list[str]:
        """Return every violated rule as a sentence."""
        problems = [
            f"{name} must be {describe(hint)}, not {getattr(self, name)!r}"
            for name, hint in _hints().items()
            if any(
                isinstance(part, Range) or typing.get_origin(part) is Literal
                for part in parts(hint)
            )
            and not fits(getattr(self, name), hint)
        ]
        try:
            ADVANTAGES.resolve(self.advantage)
        except ConfigError as error:
            problems.append(f"advantage cannot be used: {error}")
        if not self.model:
            problems.append(
                "model is missing: the service's name of the base model, for example Qwen/Qwen3-8B"
            )
        if self.temperature != 1.0:
            problems.append(
                f"temperature is {self.temperature:g}; Tinker's log-probabilities are those of"
                " temperature 1.0, so the ratio to another distribution would be wrong: use 1.0"
            )
        if not problems and self.batch_size % self.rollouts_per_example:
            size = self.rollouts_per_example
            near = max(size, self.batch_size // size * size)
            problems.append(
                f"batch_size is {self.batch_size}, not a multiple of rollouts_per_example ({size}):"
                f" use {near}"
            )
        if self.rollouts_per_example == 1 and self.advantage not in UNCOMPARED:
            problems.append(
                "rollouts_per_example is 1: an advantage compares siblings: use at least 2"
            )
        return problems


@functools.cache
def _hints() -> dict[str, object]:
    """Setting -> its annotation."""
    hints = typing.get_type_hints(TinkerConfig, include_extras=True)
    return {name: hint for name, hint in hints.items() if typing.get_origin(hint) is not ClassVar}
