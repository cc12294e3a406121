"""``TwoPlayerEnv``: a two-player game in which one side wins what the other loses, from its rules
alone.

The rules are five methods over a game object of the author's choice; roles, views and rewards
follow from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from verifiers.data.messages import message_text
from verifiers.data.text import split_reasoning
from verifiers.environments.keywords import MultiTurnOptions
from verifiers.environments.multi_agent.env import MultiAgentEnv, Role
from verifiers.errors import ConfigError
from verifiers.rollouts.author_code import setup
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.runtime.signatures import spell_out
from verifiers.types import Message, Messages


class TwoPlayerEnv(MultiAgentEnv):
    """A zero-sum game of two players; subclasses define its rules in five methods.

    ``roles``: the first player, then the second. Each player's reward is its payoff, unknown if
    the rollout ended before the game; ``reward`` is that of the first trained player. ``rubric``
    adds metrics.

    >>> from verifiers.testing import ScriptedClient
    >>> class HigherNumber(vf.TwoPlayerEnv):
    ...     def new_game(self, row): return []
    ...     def to_move(self, game): return len(game) if len(game) < 2 else None
    ...     def observation(self, game, player): return "A digit?"
    ...     def move(self, game, player, text): return [*game, int(text)]
    ...     def payoff(self, game): return float(game[0] > game[1]) - float(game[0] < game[1])
    >>> env = HigherNumber(dataset=[{"question": ""}])
    >>> output = env.evaluate(ScriptedClient(["3", "8"]), "m").outputs[0]
    >>> output.metrics["first"], output.metrics["second"], output.reward
    (-1.0, 1.0, -1.0)
    """

    @spell_out(MultiTurnOptions, MultiAgentEnv.__init__)
    def __init__(
        self,
        roles: Sequence[Role | str] = ("first", "second"),
        trained_roles: Sequence[str] | None = None,
        **parameters: Unpack[MultiTurnOptions],
    ):
        super().__init__(roles, trained_roles, **parameters)
        if len(self.roles) != 2:
            raise ConfigError(
                "a two-player game has two roles: the first player, then the second", key="roles"
            )
        self.players = tuple(self.roles)
        scored = next(iter(self.trained_roles), self.players[0])
        # and may be that of another environment too
        is_given = parameters.get("rubric") is not None
        payoffs = Rubric(parser=self.parser) if is_given else self.rubric
        for player, name in enumerate(self.players):
            payoffs.add_reward_func(_payoff_of(self, player), weight=float(name == scored))
        if is_given:
            self.add_rubric(payoffs)

    # --- methods to override ----------------------------------------------------------------------

    def new_game(self, row: Mapping[str, Any]) -> Any:
        """Return the game object of a row, before the first move."""
        raise NotImplementedError(f"{type(self).__name__} must define new_game(self, row)")

    def to_move(self, game: Any) -> int | None:
        """Return the player who moves, 0 or 1; None when the game is over."""
        raise NotImplementedError(f"{type(self).__name__} must define to_move(self, game)")

    def observation(self, game: Any, player: int) -> Messages | None:
        """Return what ``player`` is shown before its move, beyond what it was shown before."""
        raise NotImplementedError(
            f"{type(self).__name__} must define observation(self, game, player)"
        )

    def move(self, game: Any, player: int, text: str) -> Any:
        """Return the game after the reply ``text``, which may be no legal move; "" when a limit
        truncated it."""
        raise NotImplementedError(
            f"{type(self).__name__} must define move(self, game, player, text)"
        )

    def payoff(self, game: Any) -> float:
        """Return what the first player wins in a game that is over; the second player wins its
        negative."""
        raise NotImplementedError(f"{type(self).__name__} must define payoff(self, game)")

    # --- one rollout ------------------------------------------------------------------------------

    @setup(priority=90)
    def open_game(self, state: State) -> None:
        """Set ``state["game"]``."""
        state["game"] = self.new_game(state)

    def next_role(self, state: State) -> str | None:
        """The role of the player who moves."""
        player = self.to_move(state["game"])
        return None if player is None else self.players[player]

    def observe(self, state: State, role: str) -> Messages | None:
        """What the player is shown: ``observation``."""
        return self.observation(state["game"], self.players.index(role))

    def after_turn(self, state: State, role: str, message: Message) -> None:
        """Make the move of the reply."""
        _, text = split_reasoning(message_text(message))
        text = "" if state["trajectory"][-1]["is_truncated"] else text
        state["game"] = self.move(state["game"], self.players.index(role), text)


def _payoff_of(env: TwoPlayerEnv, player: int) -> Callable[..., float]:
    """The reward function of a player, with the name of its role."""

    def payoff(state: State) -> float:
        if env.to_move(state["game"]) is not None:
            raise ValueError("the rollout ended before the game")
        chips = float(env.payoff(state["game"]))
        return chips if player == 0 else -chips

    payoff.__name__ = env.players[player]
    return payoff
