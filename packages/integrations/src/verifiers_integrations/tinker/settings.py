"""``TinkerConfig``: the settings of a run on a Tinker service, all checked together.

A setting with the meaning of a setting of ``RLConfig`` has its name, default and limits, from its
line. A setting of ``RLConfig`` that is none here has its default there, for the pipeline that both
have in common. Settings with a default of the service (learning rate, rank of the adapter, other
optimizer settings) are omitted from requests unless set.
"""

from __future__ import annotations

import functools
import time
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from verifiers.cli.common.reader import Fields
from verifiers.errors import ConfigError
from verifiers.runtime.suggest import check_keywords
from verifiers.runtime.values import Positive, parts
from verifiers.storage.identity import Free
from verifiers.types import SamplingArgs
from verifiers_trainer.algorithm.advantages import ADVANTAGES
from verifiers_trainer.settings.batch_rules import UNCOMPARED
from verifiers_trainer.settings.compat import RENAMED
from verifiers_trainer.settings.fields import (
    DECLARED,
    PLACEMENT,
    RUN_LENGTH,
    SAVING,
    Count,
    Settings,
    plain,
    problem_of,
)

OF_TRAINER = Settings()


@dataclass(frozen=True, slots=True, kw_only=True)
class AsInTrainer:
    """Settings that mean what they mean in ``RLConfig``, whose lines have their limits, texts and
    rules of resuming."""

    rollouts_per_example: int = OF_TRAINER.rollouts_per_example
    batch_size: int = OF_TRAINER.batch_size
    max_seq_len: int = OF_TRAINER.max_seq_len
    max_tokens: int | None = OF_TRAINER.max_tokens
    seed: int = 42
    shuffle_dataset: bool = OF_TRAINER.shuffle_dataset
    advantage: Any = OF_TRAINER.advantage
    aggregation: str = OF_TRAINER.aggregation
    max_off_policy_steps: int = OF_TRAINER.max_off_policy_steps
    max_concurrent: int = OF_TRAINER.max_concurrent
    generation_timeout: float = OF_TRAINER.generation_timeout
    rollout_timeout: float | None = OF_TRAINER.rollout_timeout
    zero_variance: Literal["drop", "keep"] = OF_TRAINER.zero_variance
    oversample: float = OF_TRAINER.oversample
    min_group_fraction: float = OF_TRAINER.min_group_fraction
    max_error_fraction: float = OF_TRAINER.max_error_fraction
    no_signal_steps: int | None = OF_TRAINER.no_signal_steps
    overlong: Literal["mask", "drop"] = OF_TRAINER.overlong
    mask_truncated_completions: bool = OF_TRAINER.mask_truncated_completions
    zero_truncated_completions: bool = OF_TRAINER.zero_truncated_completions
    save_total_limit: int | None = None
    """Local folders; states saved at the service are not deleted."""
    log_completions: bool = OF_TRAINER.log_completions


@dataclass(frozen=True, slots=True)
class TinkerConfig(AsInTrainer):
    """Settings of ``TinkerTrainer``. *Raises* ``ConfigError`` with every problem."""

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
    adam: dict[str, object] = field(default_factory=dict)
    """Further fields of the SDK's ``AdamParams``: beta1, beta2, eps, weight_decay,
    grad_clip_norm."""
    loss: Literal["importance_sampling", "ppo", "cispo"] = "importance_sampling"
    loss_config: dict[str, float] = field(default_factory=dict)
    """The service's ``loss_fn_config``; empty: its defaults."""
    max_steps: Annotated[Count, RUN_LENGTH] = OF_TRAINER.max_steps
    temperature: float = 1.0
    """Only 1.0: the service returns log-probabilities of the unprocessed distribution."""
    history: Literal["render", "exact"] = "render"
    tool_call_parser: str | None = "hermes"
    save_steps: Annotated[Count, SAVING] = 50

    component: ClassVar[str] = "rl"
    """The service has policy-gradient losses only."""
    steps_per_batch: ClassVar[int] = 1
    packing: ClassVar[bool] = False
    share_prompts: ClassVar[bool] = False
    """A datum of the service is one sample."""
    teacher_prompts: ClassVar[None] = None
    """The service has no teacher."""
    adapter_roles: ClassVar[tuple[str, ...]] = ()
    """It trains one adapter in all roles."""
    micro_batch_tokens: ClassVar[int] = 1
    world_size: ClassVar[int] = 1

    def __getattr__(self, name: str) -> Any:
        """A setting of ``RLConfig`` that is none here; Python calls this for missing attributes."""
        try:
            return getattr(OF_TRAINER, name)
        except AttributeError:
            raise AttributeError(f"TinkerConfig has no setting {name!r}") from None

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
        check_keywords(settings, fields().hints, "a Tinker run")
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

    def sampling(self) -> SamplingArgs:
        """The sampling arguments of every training request."""
        return {"temperature": self.temperature} | (
            {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        )

    def decisive(self) -> dict[str, object]:
        """Return the settings that must match when a run is resumed."""
        return {
            name: plain(getattr(self, name))
            for name, hint in fields().hints.items()
            if not any(isinstance(part, Free) for part in parts(hint))
        }

    def problems(self) -> list[str]:
        """Return every violated rule as a sentence."""
        problems = [
            problem
            for name, hint in fields().hints.items()
            if (problem := problem_of(name, getattr(self, name), hint))
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
def fields() -> Fields:
    """The settings, with their annotations and other names."""
    hints = {
        name: DECLARED[name] if name in AsInTrainer.__annotations__ else hint
        for name, hint in typing.get_type_hints(TinkerConfig, include_extras=True).items()
        if typing.get_origin(hint) is not ClassVar
    }
    return Fields(hints, {alias: name for alias, name in RENAMED.items() if name in hints})
