"""kuhn-poker: the smallest poker, for two players. Self-play, or play against a fixed opponent.

The public interface is ``load_environment``; ``rules`` has the game, its equilibria and the exact exploitability of a
policy, ``policies`` reads a model's exact policy.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import verifiers as vf
from vf_kuhn_poker.rules import BET, CARDS, DEALS, FORFEIT, PASS, Policy, equilibrium, payoff, to_move, uniform

__all__ = ["KuhnPoker", "PolicyClient", "load_environment", "view"]

SEATS = ("first", "second")
OPPONENTS: Mapping[str, Policy] = {"uniform": uniform(), "equilibrium": equilibrium(1 / 3)}


def load_environment(
    opponent: Any = "policy",
    opponent_model: str | None = None,
    seat: str = "first",
    num_train_examples: int = 60,
    num_eval_examples: int = 60,
) -> vf.Environment:
    """The kuhn-poker environment.

    Args:
        opponent: "policy": self-play, both seats are the model and both are trained. "uniform" and "equilibrium" play
            the other seat by a fixed policy; anything else is a client, such as the name of an endpoint.
        opponent_model: The model of an opponent that is a client.
        seat: The model's seat against an opponent: "first" or "second".
        num_train_examples: Training rows; they repeat the six deals in turn.
        num_eval_examples: Evaluation rows, likewise.

    Raises:
        ConfigError: An invalid argument, by name.
    """
    if seat not in SEATS:
        raise vf.ConfigError(f'seat is {seat!r}; it must be "first" or "second"', key="seat")
    for name, value in (("num_train_examples", num_train_examples), ("num_eval_examples", num_eval_examples)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise vf.ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1", key=name)
    roles = [vf.Role(name) for name in SEATS]
    if opponent != "policy":
        is_scripted = isinstance(opponent, str) and opponent in OPPONENTS
        client = PolicyClient(OPPONENTS[opponent]) if is_scripted else opponent
        other = 1 - SEATS.index(seat)
        roles[other] = vf.Role(SEATS[other], client=client, model=opponent_model)
    return KuhnPoker(
        roles,
        dataset=_rows(num_train_examples),
        eval_dataset=_rows(num_eval_examples),
        rubric=vf.Rubric([illegal_replies], weights=[0.0]),
    )


class KuhnPoker(vf.TwoPlayerEnv):
    """Kuhn poker; the game object is (deal, moves)."""

    def new_game(self, row: Mapping[str, Any]) -> tuple[str, str]:
        return row["info"]["deal"], ""

    def to_move(self, game: tuple[str, str]) -> int | None:
        return to_move(game[1])

    def observation(self, game: tuple[str, str], player: int) -> vf.Messages:
        deal, moves = game
        return [view(deal[player], moves)[-1]]

    def move(self, game: tuple[str, str], player: int, text: str) -> tuple[str, str]:
        deal, moves = game
        return deal, moves + (text if text in (PASS, BET) else FORFEIT)

    def payoff(self, game: tuple[str, str]) -> float:
        return float(payoff(*game))


def view(card: str, moves: str) -> list[vf.Message]:
    """The prompt of the player who acts after ``moves`` with ``card``: its card, and the moves since its last one.

    >>> view("Q", "pb")
    [{'role': 'user', 'content': 'Q'}, {'role': 'assistant', 'content': 'p'}, {'role': 'user', 'content': 'b'}]
    """
    if len(moves) < 2:
        return [vf.UserMessage(card + moves)]
    return [vf.UserMessage(card), vf.AssistantMessage(moves[0]), vf.UserMessage(moves[1])]


async def illegal_replies(state: vf.State) -> float:
    """Replies that are no move."""
    return float(state["game"][1].count(FORFEIT))


class PolicyClient:
    """Plays by a policy: the node is read off the prompt, the move is drawn with the request's seed."""

    def __init__(self, policy: Policy):
        self.policy = policy

    def identity(self) -> dict[str, Any]:
        """The probabilities, which are all that distinguishes two of these clients."""
        return {"class": "PolicyClient", "policy": {node: list(moves) for node, moves in self.policy.items()}}

    async def complete(self, request: vf.ModelRequest) -> vf.Response:
        """One move."""
        node = "".join(str(message["content"]) for message in request.prompt)
        rng = random.Random(None if request.seed is None else f"{request.seed}:{node}")
        passes, _ = self.policy[node]
        return vf.Response(vf.AssistantMessage(PASS if rng.random() < passes else BET))


def _rows(count: int) -> list[dict[str, Any]]:
    deals = [DEALS[number % len(DEALS)] for number in range(count)]
    return [{"question": "", "info": {"deal": deal}} for deal in deals]
