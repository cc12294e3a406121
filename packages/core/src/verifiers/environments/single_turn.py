"""``SingleTurnEnv``: one prompt, one completion, one score."""

from __future__ import annotations

from typing import Unpack

from verifiers.environments.keywords import ConversationOptions
from verifiers.environments.multi_turn import MultiTurnEnv
from verifiers.errors import ConfigError
from verifiers.rollouts.state import State
from verifiers.runtime.signatures import spell_out
from verifiers.types import Messages


def check_one_turn(max_turns: int) -> None:
    """*Raises* ConfigError for another number of turns than 1."""
    if max_turns != 1:
        raise ConfigError(
            f"max_turns is {max_turns!r}, but a SingleTurnEnv has one turn; write a MultiTurnEnv"
        )


class SingleTurnEnv(MultiTurnEnv):
    """An environment of one turn; ``env_response`` is never called. Parameters are those of
    ``Environment``.

    >>> import verifiers as vf
    >>> env = vf.SingleTurnEnv(dataset=[{"question": "2 + 2?", "answer": "4"}])
    >>> env.train_table[0].row["prompt"]
    [{'role': 'user', 'content': '2 + 2?'}]
    """

    @spell_out(ConversationOptions, MultiTurnEnv.__init__)
    def __init__(self, *, max_turns: int = 1, **parameters: Unpack[ConversationOptions]):
        check_one_turn(max_turns)
        super().__init__(max_turns=1, **parameters)

    def env_response(self, messages: Messages, state: State, **_: object) -> Messages:
        """*Raises* NotImplementedError: there is no second turn."""
        raise NotImplementedError(f"{type(self).__name__} has one turn and no env_response")
