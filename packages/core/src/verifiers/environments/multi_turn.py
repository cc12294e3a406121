"""``MultiTurnEnv``: the model and the environment take turns until a stop condition holds.

Subclasses define ``env_response`` and optionally ``setup_state`` and methods marked ``@vf.stop``,
``@vf.setup``, ``@vf.cleanup``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

from verifiers.data.messages import normalize_messages
from verifiers.environments.base import Environment
from verifiers.environments.keywords import EnvironmentOptions
from verifiers.rollouts.author_code import Hook, calls_env_response, defaults, maybe_await, stop
from verifiers.rollouts.loop import is_completed
from verifiers.rollouts.state import State
from verifiers.runtime.signatures import spell_out
from verifiers.runtime.values import Flag
from verifiers.types import Messages


class MultiTurnEnv(Environment):
    """An environment of several turns.

    Args:
        max_turns: Model calls after which a rollout ends; -1 = no limit here, and the limits of the
            run apply (``rollout_timeout_s``, 1,000 turns).
        max_total_completion_tokens: Sampled tokens after which a rollout ends; -1 = no limit.

    >>> from verifiers.testing import ScriptedClient
    >>> class Guess(vf.MultiTurnEnv):
    ...     def env_response(self, messages, state):
    ...         return "higher" if int(messages[-1].content) < int(state["answer"]) else "lower"
    ...     @vf.stop
    ...     def found(self, state):
    ...         return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][0].content == state["answer"]
    >>> env = Guess(dataset=[{"question": "A number to 8?", "answer": "3"}])
    >>> results = env.evaluate(ScriptedClient(["4", "2", "3"]), "m")
    >>> results["stop_conditions"], [message.content for message in results["completions"][0]]
    (['found'], ['4', 'lower', '2', 'higher', '3'])
    """

    @spell_out(EnvironmentOptions, Environment.__init__)
    def __init__(
        self,
        max_turns: Annotated[int, Flag("Model calls of a rollout; -1 = no limit.")] = -1,
        timeout_seconds: float | None = None,
        max_total_completion_tokens: int = -1,
        **parameters: Unpack[EnvironmentOptions],
    ):
        self.max_turns = max_turns
        super().__init__(timeout_seconds=timeout_seconds, **parameters)
        self.max_total_completion_tokens = max_total_completion_tokens
        self.monitor_rubric.add_metric(num_turns)

    # --- methods to override ----------------------------------------------------------------------

    @defaults
    def env_response(self, messages: Messages, state: State) -> Any:
        """Return the response to the conversation so far: messages, one message, text, or None."""
        raise NotImplementedError(
            f"{type(self).__name__} must define env_response(self, messages, state)"
        )

    def render_completion(self, state: State) -> Any:
        """Set ``state["completion"]``: everything after the initial prompt."""
        trajectory = state.record.transcript
        final = state["final_env_response"]
        empty: Any = [] if self.message_type == "chat" else ""
        completion = (
            trajectory[-1].conversation()[len(state.record.row["prompt"]) :]
            if trajectory
            else empty
        )
        if final is not None:
            completion = completion + normalize_messages(final, self.message_type)
        state.record.completion = completion

    @calls_env_response
    async def get_prompt_messages(self, state: State) -> Messages:
        """The next prompt: the input prompt, later the conversation so far and the environment's
        response."""
        conversation: Messages
        if not state.record.transcript:
            conversation = state.record.row["prompt"][:]
            return conversation
        conversation = state.record.transcript[-1].conversation()
        with Hook(state, "env_response", timing=None):
            response = await maybe_await(self.env_response(conversation[:], state))
            if isinstance(response, tuple):
                response = _without_state(response, state)
            if response is None or state["final_env_response"] is not None:
                return conversation
            messages: Any = normalize_messages(response, self.message_type)
            extended: Messages = conversation + messages
            return extended

    # --- stop conditions --------------------------------------------------------------------------

    is_completed = is_completed

    @stop(priority=100)
    def has_error(self, state: State) -> Any:
        return state.record.error is not None

    @stop
    def prompt_too_long(self, state: State) -> Any:
        return bool(state["prompt_too_long"])

    @stop
    def max_seq_len_reached(self, state: State) -> Any:
        if self.max_seq_len is None or not state.record.transcript or state["prompt_too_long"]:
            return False
        turn, usage = state.record.transcript.turns[-1], state.record.usage
        num_tokens: int = usage.get("final_input_tokens", 0) + usage.get("final_output_tokens", 0)
        return (turn.num_tokens if turn.has_tokens else num_tokens) >= self.max_seq_len

    @stop
    def max_turns_reached(self, state: State) -> Any:
        return 0 < self.max_turns <= len(state.record.transcript)

    @stop
    def max_total_completion_tokens_reached(self, state: State) -> Any:
        cap = self.max_total_completion_tokens
        return 0 < cap <= state.record.usage.get("output_tokens", 0)

    @stop
    def has_final_env_response(self, state: State) -> Any:
        return state["final_env_response"] is not None


def num_turns(state: State) -> float:
    """Number of model calls of the rollout."""
    return float(len(state.record.transcript))


def _without_state(response: tuple[object, ...], state: State) -> object:
    """Return the messages of ``(messages, state)``, the oldest signature; another tuple is a list
    of messages."""
    last = response[-1] if len(response) == 2 else None
    if not isinstance(last, Mapping) or (not isinstance(last, State) and "role" in last):
        return list(response)
    if last is not state:
        state.update(last)
    return response[0]
