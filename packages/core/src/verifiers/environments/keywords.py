"""The parameters of environments, for constructors of subclasses and for commands: generated from
the constructors of ``Environment`` and ``MultiTurnEnv`` by ``python docs/reference_pages.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from verifiers.runtime.values import option

if TYPE_CHECKING:
    from verifiers.data.sources import DatasetLike
    from verifiers.parsers import Parser
    from verifiers.rollouts.branching import Branching
    from verifiers.rubrics import Rubric

Oracle = Callable[[Mapping[str, Any]], Any]
"""``oracle(row)``: replies that solve the row, as ``testing.ScriptedClient`` takes them."""


class RunDefaults(TypedDict, total=False):
    """Parameters of every environment that are defaults of its runs."""

    rollouts_per_example: int | None
    max_concurrent: int | None
    max_workers: int | None
    branching: Branching | Mapping[str, Any] | None


class RowOptions(RunDefaults, total=False):
    """Parameters of ``Environment`` that say how its rows are read and run."""

    few_shot: Sequence[Mapping[str, object]] | None
    sampling_args: Mapping[str, object] | None
    message_type: str
    tool_defs: Sequence[Mapping[str, object]] | None
    env_id: str | None
    env_args: Mapping[str, object] | None
    map_kwargs: Mapping[str, object] | None
    max_seq_len: int | None
    interleaved_rollouts: bool
    score_rollouts: bool
    pass_threshold: float | None
    oracle: Oracle | None
    question_key: str
    answer_key: str


class DataOptions(RowOptions, total=False):
    """Parameters of ``Environment`` that say what its rows are, and how they are read and run."""

    dataset: DatasetLike | None
    eval_dataset: DatasetLike | None


class EnvironmentOptions(DataOptions, total=False):
    """The parameters of ``Environment`` but ``timeout_seconds``."""

    system_prompt: str | None
    parser: Parser | None
    rubric: Rubric | None


class ConversationOptions(EnvironmentOptions, total=False):
    """The parameters of ``MultiTurnEnv`` but ``max_turns``."""

    timeout_seconds: float | None
    max_total_completion_tokens: int


class MultiTurnOptions(ConversationOptions, total=False):
    """The parameters of ``MultiTurnEnv``."""

    max_turns: int


@dataclass(frozen=True)
class EnvironmentFlags:
    """Parameters that a command has too; None leaves them to the environment."""

    max_seq_len: int | None = option(None, "Tokens of a conversation after which a rollout ends.")
    max_turns: int | None = option(None, "Model calls of a rollout; -1 = no limit.")
