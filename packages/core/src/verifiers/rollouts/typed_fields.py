"""The types of a rollout's fields, for type checkers: generated from their declaration in
``rollouts.rollout`` by ``python docs/reference_pages.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    from verifiers.rollouts.error_info import ErrorInfo
    from verifiers.rollouts.transcript import Transcript
    from verifiers.rollouts.values import Timing


class SavedFields:
    """The fields of a saved rollout."""

    example_id: Any
    prompt: Any
    answer: Any
    task: str
    info: dict[str, Any]
    trajectory: Transcript
    reward: float
    metrics: dict[str, float]
    completion: Any
    advantage: float | None
    role_rewards: dict[str, float]
    turn_sum: str
    turn_sum_weight: float | None
    tool_errors: list[str]
    is_unparsed: bool | None
    not_applicable: list[str]
    fork: dict[str, Any] | None
    failed_requests: dict[str, int]
    tool_defs: list[Any] | None
    timing: dict[str, float]
    token_usage: dict[str, int] | None
    stop_condition: str | None
    error: ErrorInfo | None
    is_truncated: bool
    is_completed: bool


class ResultColumns:
    """The columns of results, one value per rollout."""

    example_ids: list[Any]
    example_id: list[Any]
    prompts: list[Any]
    prompt: list[Any]
    answers: list[Any]
    answer: list[Any]
    tasks: list[str]
    task: list[str]
    infos: list[dict[str, Any]]
    info: list[dict[str, Any]]
    rewards: list[float]
    reward: list[float]
    completions: list[Any]
    completion: list[Any]
    advantages: list[float | None]
    advantage: list[float | None]
    tool_defs: list[list[Any] | None]
    timings: list[dict[str, float]]
    timing: list[dict[str, float]]
    token_usages: list[dict[str, int] | None]
    token_usage: list[dict[str, int] | None]
    stop_conditions: list[str | None]
    stop_condition: list[str | None]
    errors: list[ErrorInfo | None]
    error: list[ErrorInfo | None]
    is_truncated: list[bool]
    is_completed: list[bool]
    metrics: dict[str, list[float]]


class StateKeys:
    """The reserved keys of a state."""

    if TYPE_CHECKING:

        @overload
        def __getitem__(self, key: Literal["trajectory"], /) -> Transcript: ...

        @overload
        def __getitem__(self, key: Literal["reward"], /) -> float: ...

        @overload
        def __getitem__(self, key: Literal["metrics"], /) -> dict[str, float]: ...

        @overload
        def __getitem__(self, key: Literal["completion"], /) -> Any: ...

        @overload
        def __getitem__(self, key: Literal["advantage"], /) -> float | None: ...

        @overload
        def __getitem__(self, key: Literal["trajectory_id"], /) -> str: ...

        @overload
        def __getitem__(self, key: Literal["model"], /) -> str: ...

        @overload
        def __getitem__(self, key: Literal["sampling_args"], /) -> Any: ...

        @overload
        def __getitem__(self, key: Literal["tool_defs"], /) -> Any: ...

        @overload
        def __getitem__(self, key: Literal["timing"], /) -> Timing: ...

        @overload
        def __getitem__(self, key: Literal["usage"], /) -> dict[str, Any]: ...

        @overload
        def __getitem__(self, key: Literal["stop_condition"], /) -> str | None: ...

        @overload
        def __getitem__(self, key: Literal["error"], /) -> Any: ...

        @overload
        def __getitem__(self, key: Literal["is_truncated"], /) -> bool: ...

        @overload
        def __getitem__(self, key: Literal["is_completed"], /) -> bool: ...

        @overload
        def __getitem__(self, key: str, /) -> Any: ...

        def __getitem__(self, key: str, /) -> Any: ...
