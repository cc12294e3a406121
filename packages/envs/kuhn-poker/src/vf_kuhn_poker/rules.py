"""The rules of Kuhn poker, and exact best responses: no model, no environment.

Three cards (jack, queen, king), one for each player; each puts one chip in the pot. The first
player passes or bets one chip; the second answers; after pass and bet the first answers once more.
To pass against a bet is to fold, to bet against a bet is to call. At a showdown the higher card
takes the pot. Source: H. W. Kuhn, "A simplified two-person poker", 1950.

A **node** is what a player knows when it acts: its card and the moves so far, ``"K"``, ``"Qpb"``;
there are 12. A **policy** maps each node to the probabilities of pass and bet; what is missing from
1 is the probability of a reply
that is no move, which loses two chips at once: more than a fold, so that it is never a way to fold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations, product

CARDS = "JQK"
"""From low to high."""
PASS, BET, FORFEIT = "p", "b", "x"
ENDINGS = ("pp", "pbp", "pbb", "bp", "bb")
DEALS = tuple("".join(deal) for deal in permutations(CARDS, 2))
"""The six equally likely deals: the first player's card, then the second's."""
NODES = tuple(card + moves for moves in ("", "pb", "p", "b") for card in CARDS)
"""The 12 nodes: those of the first player ("J", "Jpb", ...), then those of the second ("Jp", "Jb",
...)."""
VALUE = -1 / 18
"""Chips that the first player wins on average where both players are optimal."""

Policy = Mapping[str, tuple[float, float]]
"""Node -> probabilities of (pass, bet)."""


def to_move(moves: str) -> int | None:
    """The player who acts after ``moves``: 0 or 1; None at the end of the game.

    >>> to_move(""), to_move("p"), to_move("pb"), to_move("bb")
    (0, 1, 0, None)
    """
    return None if moves in ENDINGS or FORFEIT in moves else len(moves) % 2


def payoff(deal: str, moves: str) -> int:
    """Chips that the first player wins with ``deal`` when the game ended with ``moves``.

    >>> payoff("KQ", "bb"), payoff("KQ", "pbp"), payoff("JQ", "pp"), payoff("JQ", "px")
    (2, -1, -1, 2)
    """
    if moves[-1] == FORFEIT or moves in ("pbp", "bp"):  # the player who acted last gives up
        chips = 2 if moves[-1] == FORFEIT else 1
        return chips if len(moves) % 2 == 0 else -chips
    stake = 2 if moves.endswith(BET) else 1
    return stake if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -stake


def game_value(policies: tuple[Policy, Policy]) -> float:
    """Chips that the first player wins on average; ``policies`` are those of the first and of the
    second player."""
    return sum(_value(deal, "", policies) for deal in DEALS) / len(DEALS)


def best_response_value(policy: Policy, responder: int) -> float:
    """The most chips that player ``responder`` (0 or 1) can win on average against ``policy`` of
    the other player.

    Goes through the 64 pure policies of the responder; against a fixed policy one of them is a best
    response.
    """
    sign = 1 if responder == 0 else -1
    return max(
        sign * game_value((pure, policy) if responder == 0 else (policy, pure))
        for pure in _pure_policies(responder)
    )


def exploitability(first: Policy, second: Policy | None = None) -> float:
    """Chips a game that best responses win beyond the game's value, averaged over the two seats; 0
    at an equilibrium.

    ``second`` is the second player's policy, by default the same object: one policy in both seats.

    >>> round(exploitability(uniform()), 4), round(exploitability(equilibrium(1 / 3)), 4)
    (0.4583, 0.0)
    """
    second = first if second is None else second
    return (best_response_value(second, 0) + best_response_value(first, 1)) / 2


def uniform() -> Policy:
    """Pass and bet equally often at every node."""
    return dict.fromkeys(NODES, (0.5, 0.5))


def equilibrium(alpha: float) -> Policy:
    """The equilibrium in which the first player bets a jack with probability ``alpha``, from 0 to
    1/3.

    *Raises* ValueError for another ``alpha``.
    """
    if not 0 <= alpha <= 1 / 3:
        raise ValueError(f"alpha is {alpha}; the equilibria of Kuhn poker have 0 <= alpha <= 1/3")
    bet = {"J": alpha, "Q": 0.0, "K": 3 * alpha, "Jpb": 0.0, "Qpb": alpha + 1 / 3, "Kpb": 1.0}
    bet |= {"Jp": 1 / 3, "Qp": 0.0, "Kp": 1.0, "Jb": 0.0, "Qb": 1 / 3, "Kb": 1.0}
    return {node: (1 - probability, probability) for node, probability in bet.items()}


def _value(deal: str, moves: str, policies: tuple[Policy, Policy]) -> float:
    player = to_move(moves)
    if player is None:
        return payoff(deal, moves)
    passes, bets = policies[player][deal[player] + moves]
    forfeits = max(0.0, 1 - passes - bets)
    branches = ((PASS, passes), (BET, bets), (FORFEIT, forfeits))
    return sum(
        probability * _value(deal, moves + move, policies)
        for move, probability in branches
        if probability
    )


def _pure_policies(player: int) -> Iterator[Policy]:
    nodes = NODES[6 * player : 6 * player + 6]
    for moves in product(((1.0, 0.0), (0.0, 1.0)), repeat=len(nodes)):
        yield dict(zip(nodes, moves, strict=True))
