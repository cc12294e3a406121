"""kuhn-poker: the smallest poker, for two players. Self-play, or play against a fixed opponent.

The public interface is ``load_environment``; ``rules`` has the game, its equilibria and the exact
exploitability of a policy.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import verifiers as vf
from verifiers.runtime.values import Count, check_arguments
from vf_kuhn_poker.rules import (
    BET,
    DEALS,
    FORFEIT,
    NODES,
    PASS,
    Policy,
    equilibrium,
    payoff,
    to_move,
    uniform,
)

__all__ = ["KuhnPoker", "PolicyClient", "load_environment", "view", "words_of"]

SEATS = ("first", "second")
OPPONENTS: Mapping[str, Policy] = {"uniform": uniform(), "equilibrium": equilibrium(1 / 3)}
NAMES = {"J": "jack", "Q": "queen", "K": "king"}
RULES = """\
You play Kuhn poker. There are three cards: jack, queen and king. You and your opponent have put one chip in the pot \
and have one card each. The higher card takes the pot at a showdown. Who folds loses its chip; a bet and a call are \
one more chip each. A reply that is none of the moves offered loses two chips. Reply with one word."""


@check_arguments
def load_environment(
    opponent: Any = "policy",
    opponent_model: str | None = None,
    seat: str = "first",
    style: str = "words",
    num_train_examples: Count = 60,
    num_eval_examples: Count = 60,
) -> vf.Environment:
    """The kuhn-poker environment.

    Args:
        opponent: "policy": self-play, both seats are the model and both are trained. "uniform" and
            "equilibrium" play the other seat by a fixed policy; anything else is a client, such as
            the name of an endpoint.
        opponent_model: The model of an opponent that is a client.
        seat: The model's seat against an opponent: "first" or "second".
        style: "words": the rules, and moves such as "check". "letters": the card and the moves as
            one letter each, for a model that learns the game from nothing.
        num_train_examples: Training rows; they repeat the six deals in turn.
        num_eval_examples: Evaluation rows, in the same way.

    Raises:
        ConfigError: An invalid argument, by name.
    """
    for name, value, choices in (("seat", seat, SEATS), ("style", style, ("words", "letters"))):
        if value not in choices:
            raise vf.ConfigError(
                f'{name} is {value!r}; it must be "{choices[0]}" or "{choices[1]}"', key=name
            )
    roles = [vf.Role(name) for name in SEATS]
    if opponent != "policy":
        is_scripted = isinstance(opponent, str) and opponent in OPPONENTS
        client = PolicyClient(OPPONENTS[opponent]) if is_scripted else opponent
        opponent_seat = 1 - SEATS.index(seat)
        roles[opponent_seat] = vf.Role(SEATS[opponent_seat], client=client, model=opponent_model)
    return KuhnPoker(
        roles,
        style=style,
        dataset=_rows(num_train_examples, "train"),
        eval_dataset=_rows(num_eval_examples, "eval"),
        rubric=vf.Rubric([illegal_replies], weights=[0.0]),
    )


class KuhnPoker(vf.TwoPlayerEnv):
    """Kuhn poker; the game object is (deal, moves)."""

    def __init__(self, *args: Any, style: str = "words", **parameters: Any):
        super().__init__(*args, system_prompt=RULES if style == "words" else None, **parameters)
        self.style = style

    def new_game(self, row: Mapping[str, Any]) -> tuple[str, str]:
        return row["info"]["deal"], ""

    def to_move(self, game: tuple[str, str]) -> int | None:
        return to_move(game[1])

    def observation(self, game: tuple[str, str], player: int) -> vf.Messages:
        deal, moves = game
        return [view(deal[player], moves, self.style)[-1]]

    def move(self, game: tuple[str, str], player: int, text: str) -> tuple[str, str]:
        deal, moves = game
        if self.style == "words":
            text = {word: move for move, word in words_of(moves).items()}.get(
                text.strip(" \n.!*`'\"").lower(), ""
            )
        return deal, moves + (text if text in (PASS, BET) else FORFEIT)

    def payoff(self, game: tuple[str, str]) -> float:
        return float(payoff(*game))


def view(card: str, moves: str, style: str = "letters") -> list[vf.Message]:
    """The messages of the player who acts after ``moves`` with ``card``: the card, and the moves as
    they came.

    >>> view("Q", "pb")
    [{'role': 'user', 'content': 'Q'}, {'role': 'assistant', 'content': 'p'}, {'role': 'user',
    'content': 'b'}]
    >>> view("Q", "b", "words")
    [{'role': 'user', 'content': 'Your card is the queen. Your opponent bets. Do you fold or
    call?'}]
    """
    start = len(moves) % 2  # the second player's first view has one move
    if len(moves) > 1:
        reply = words_of(moves[:-2])[moves[-2]] if style == "words" else moves[-2]
        last = moves[-1] if style == "letters" else f"{_opponent_move(moves)}{_question(moves)}"
        return [*view(card, moves[:-2], style), vf.AssistantMessage(reply), vf.UserMessage(last)]
    if style == "letters":
        return [vf.UserMessage(card + moves)]
    return [
        vf.UserMessage(
            f"Your card is the {NAMES[card]}."
            f" {_opponent_move(moves) if start else ''}{_question(moves)}"
        )
    ]


def words_of(moves: str) -> dict[str, str]:
    """The words for pass and bet after ``moves``."""
    return {PASS: "fold", BET: "call"} if moves.endswith(BET) else {PASS: "check", BET: "bet"}


def _opponent_move(moves: str) -> str:
    return f"Your opponent {words_of(moves[:-1])[moves[-1]]}s. "


def _question(moves: str) -> str:
    words = words_of(moves)
    return f"Do you {words[PASS]} or {words[BET]}?"


async def illegal_replies(state: vf.State) -> float:
    """Replies that are no move."""
    return float(state["game"][1].count(FORFEIT))


class PolicyClient:
    """Plays by a policy: the node is read off the prompt, the move is drawn with the request's
    seed."""

    def __init__(self, policy: Policy):
        self.policy = policy

    def identity(self) -> dict[str, object]:
        """The probabilities, which are all that distinguishes two of these clients."""
        return {
            "class": "PolicyClient",
            "policy": {node: list(moves) for node, moves in self.policy.items()},
        }

    async def complete(self, request: vf.ModelRequest) -> vf.Response:
        """A move."""
        assert isinstance(request.prompt, list)
        texts = tuple(
            message["content"] for message in request.prompt if message["content"] != RULES
        )
        card, moves, style = PROMPTS[texts]
        rng = random.Random(None if request.seed is None else f"{request.seed}:{card}{moves}")
        move = PASS if rng.random() < self.policy[card + moves][0] else BET
        return vf.Response(vf.AssistantMessage(words_of(moves)[move] if style == "words" else move))


PROMPTS = {
    tuple(message["content"] for message in view(node[0], node[1:], style)): (
        node[0],
        node[1:],
        style,
    )
    for node in NODES
    for style in ("words", "letters")
}
"""Texts of a prompt -> card, moves and style."""


def _rows(count: int, split: str) -> list[dict[str, Any]]:
    deals = [DEALS[number % len(DEALS)] for number in range(count)]
    return [
        {
            "question": f"{NAMES[deal[0]]} against {NAMES[deal[1]]}",
            "info": {"deal": deal, "hand": f"{split} {n}"},
        }
        for n, deal in enumerate(deals)
    ]
