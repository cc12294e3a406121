"""``MultiTurnEnv``: the model and the environment take turns until a stop condition holds.

Subclasses write ``env_response`` and, where they want, ``setup_state`` and methods marked ``@vf.stop``,
``@vf.setup``, ``@vf.cleanup``. The loop that calls them is ``verifiers.rollout.play``; this module says only when it
stops and what the next prompt is.
"""

from __future__ import annotations

from typing import Any

from verifiers.decorators import stop
from verifiers.dual import maybe_await
from verifiers.environments.base import Environment
from verifiers.messages import normalize_messages
from verifiers.state import State
from verifiers.types import Messages


class MultiTurnEnv(Environment):
    """An environment of several turns.

    ``max_turns`` and ``max_total_completion_tokens`` bound a rollout; -1 sets no bound here, and the run's own guards
    hold (``rollout_timeout_s``, 1,000 turns). ``timeout_seconds`` is a time limit that is part of the task.
    """

    def __init__(
        self,
        max_turns: int = -1,
        timeout_seconds: float | None = None,
        max_total_completion_tokens: int = -1,
        **parameters: Any,
    ):
        self.max_turns = max_turns
        super().__init__(timeout_seconds=timeout_seconds, **parameters)
        self.max_total_completion_tokens = max_total_completion_tokens

    # --- what an author writes ----------------------------------------------------------------------------------

    def setup_state(self, state: State, **_: Any) -> Any:
        """Prepare ``state`` before the first turn; a returned mapping becomes the state. Sync or async."""
        return None

    def env_response(self, messages: Messages, state: State, **_: Any) -> Any:
        """The environment's answer to the conversation so far: messages, one message, text, or nothing."""
        raise NotImplementedError(f"{type(self).__name__} must define env_response(self, messages, state)")

    def render_completion(self, state: State) -> Any:
        """Set ``state["completion"]``: everything after the initial prompt."""
        trajectory = state["trajectory"]
        final = state["final_env_response"]
        empty: Any = [] if self.message_type == "chat" else ""
        completion = trajectory[-1].conversation()[len(state["prompt"]) :] if trajectory else empty
        if final is not None:
            completion = completion + normalize_messages(final, self.message_type)
        state["completion"] = completion

    async def get_prompt_messages(self, state: State) -> Messages:
        """The next prompt: the input prompt, later the conversation so far and the environment's response."""
        if not state["trajectory"]:
            return state["prompt"]
        conversation = state["trajectory"][-1].conversation()
        shown = list(conversation) if isinstance(conversation, list) else conversation
        response = await maybe_await(self.env_response(shown, state))
        if isinstance(response, tuple):  # (messages, state), the oldest spelling
            response, replaced = response
            if replaced is not state:
                state.update(replaced)
        if response is None or state["final_env_response"] is not None:
            return conversation
        return conversation + normalize_messages(response, self.message_type)

    # --- when it stops ------------------------------------------------------------------------------------------

    @stop(priority=100)
    def has_error(self, state: State) -> bool:
        return state["error"] is not None

    @stop
    def prompt_too_long(self, state: State) -> bool:
        return state["prompt_too_long"]

    @stop
    def max_seq_len_reached(self, state: State) -> bool:
        if self.max_seq_len is None or not state["trajectory"]:
            return False
        return _num_tokens(state) >= self.max_seq_len

    @stop
    def max_turns_reached(self, state: State) -> bool:
        return 0 < self.max_turns <= len(state["trajectory"])

    @stop
    def max_total_completion_tokens_reached(self, state: State) -> bool:
        cap = self.max_total_completion_tokens
        return 0 < cap <= state["usage"].get("output_tokens", 0)

    @stop
    def has_final_env_response(self, state: State) -> bool:
        return state["final_env_response"] is not None


TRUNCATING = frozenset(
    ("prompt_too_long", "max_seq_len_reached", "max_total_completion_tokens_reached", "timeout_reached")
)
"""Stop conditions that cut a rollout short: they set ``is_truncated``."""


def _num_tokens(state: State) -> int:
    tokens = state["trajectory"][-1]["tokens"]
    if tokens is not None:
        return len(tokens["prompt_ids"]) + len(tokens["completion_ids"])
    usage = state["usage"]
    return usage.get("final_input_tokens", 0) + usage.get("final_output_tokens", 0)
