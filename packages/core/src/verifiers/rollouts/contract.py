"""What a rollout needs of an environment: ``RolloutEnvironment``, implemented by
``environments.Environment``.

Dependencies point one way: the loop and the runner depend on this protocol, environments on the
loop and the runner. ``runs.runner.RunEnvironment`` adds what scoring and storing need.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from verifiers.rollouts.state import State
    from verifiers.types import Messages, Response


class LoadedFrom(NamedTuple):
    """How an environment was loaded, so that another process can load it again."""

    load: Callable[..., Any]
    """``load(env_id, **env_args)``; an importable function."""
    env_id: str
    env_args: dict[str, Any]


class RolloutEnvironment(Protocol):
    """The methods that the loop calls, in the order of a rollout; those that return ``Any`` may be
    sync or async."""

    logger: logging.Logger
    message_type: str
    """``"chat"`` or ``"completion"``."""
    tool_defs: list[Any]
    max_turns: int
    timeout_seconds: float | None

    def for_row(self, row: Mapping[str, Any]) -> RolloutEnvironment:
        """The environment that runs this row: itself, or a member of an ``EnvGroup``."""
        ...

    def close_at_exit(self) -> None:
        """Run the ``@teardown`` handlers when the interpreter ends, unless the environment is
        closed earlier."""
        ...

    def setup_state(self, state: State) -> Any:
        """Prepare the state before the first turn."""
        ...

    def as_prompt(self, messages: object, /) -> Messages:
        """Convert messages in any accepted format to a prompt."""
        ...

    def get_prompt_messages(self, state: State) -> Any:
        """The next prompt, as messages."""
        ...

    async def get_model_response(self, state: State, prompt: Messages) -> Response:
        """A completion. *Raises* ModelError, OverlongPromptError."""
        ...

    def add_model_response(
        self, state: State, prompt_messages: Messages, response: Response
    ) -> Any:
        """Append the turn to the trajectory."""
        ...

    def render_completion(self, state: State) -> Any:
        """Set ``state["completion"]`` at the end."""
        ...
