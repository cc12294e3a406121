"""kuhn-poker: its rules, its exact numbers against independent computations, and what each player
is shown."""

import random
from itertools import product

import pytest

import verifiers as vf
from verifiers.testing import ScriptedClient, run_rollout_sync
from vf_kuhn_poker import PolicyClient, load_environment, rules, view, words_of

# --- the exact numbers ----------------------------------------------------------------------------


def table(first, second):
    """The value to the first player, by Kuhn's table of endings: written apart from the package."""
    value = 0.0
    for mine, theirs in ((1, 0), (2, 0), (0, 1), (2, 1), (0, 2), (1, 2)):
        bets, calls = first["JQK"[mine]][1], first["JQK"[mine] + "pb"][1]
        their_bets, their_calls = second["JQK"[theirs] + "p"][1], second["JQK"[theirs] + "b"][1]
        win = 1 if mine > theirs else -1
        value += bets * (their_calls * 2 * win + (1 - their_calls))
        value += (1 - bets) * (
            (1 - their_bets) * win + their_bets * (calls * 2 * win - (1 - calls))
        )
    return value / 6


def brute_force_exploitability(policy):
    """NashConv / 2 over the 64 pure strategies of each player, with ``table`` alone."""
    pure = [dict(zip("abcdef", moves, strict=True)) for moves in product((0, 1), repeat=6)]

    def strategy(moves, nodes):
        return {node: (1 - move, move) for node, move in zip(nodes, moves.values(), strict=True)}

    first_nodes = ["J", "Q", "K", "Jpb", "Qpb", "Kpb"]
    second_nodes = ["Jp", "Qp", "Kp", "Jb", "Qb", "Kb"]
    best_first = max(table(strategy(moves, first_nodes), policy) for moves in pure)
    best_second = min(table(policy, strategy(moves, second_nodes)) for moves in pure)
    return (best_first - best_second) / 2


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.25, 1 / 3])
def test_an_equilibrium_cannot_be_exploited_and_is_worth_the_value_of_the_game(alpha):
    policy = rules.equilibrium(alpha)
    assert rules.exploitability(policy) == pytest.approx(0, abs=1e-12)
    assert (
        rules.game_value((policy, policy)) == pytest.approx(-1 / 18) == pytest.approx(rules.VALUE)
    )


def test_uniform_play_has_the_known_exploitability():
    # NashConv 11/12, as others report
    assert rules.exploitability(rules.uniform()) == pytest.approx(11 / 24)


def test_random_policies_agree_with_the_brute_force():
    rng = random.Random(0)
    for _ in range(20):
        bets = {node: rng.random() for node in rules.NODES}
        policy = {node: (1 - bet, bet) for node, bet in bets.items()}
        assert rules.game_value((policy, policy)) == pytest.approx(table(policy, policy))
        assert rules.exploitability(policy) == pytest.approx(brute_force_exploitability(policy))


def test_replies_that_are_no_move_lose_two_chips():
    fold = {node: (0.0, 0.0) for node in rules.NODES}
    assert rules.game_value((fold, rules.uniform())) == -2
    assert rules.exploitability(fold) == pytest.approx(2.0)
    perfect = rules.equilibrium(1 / 3)
    worse = {node: (0.9 * passes, 0.9 * bets) for node, (passes, bets) in perfect.items()}
    assert rules.exploitability(worse) > 0.05


def test_no_other_alpha_is_an_equilibrium():
    with pytest.raises(ValueError, match="0 <= alpha <= 1/3"):
        rules.equilibrium(0.4)


# --- the environment ------------------------------------------------------------------------------


def hand(deal, replies, **options):
    env = load_environment(**options)
    row = next(e.row for e in env.eval_table if e.row["info"]["deal"] == deal)
    client = ScriptedClient(replies)
    return run_rollout_sync(env, client, row), client


@pytest.mark.parametrize(
    ("deal", "words", "letters", "chips"),
    [
        ("KQ", ["check", "check"], "pp", 1),
        ("KQ", ["bet", "call"], "bb", 2),
        ("JQ", ["bet", "fold"], "bp", 1),
        ("JQ", ["check", "bet", "call"], "pbb", -2),
        ("KJ", ["check", "bet", "fold"], "pbp", -1),
        ("KJ", ["call"], "x", -2),
        ("KJ", ["check", "raise"], "px", 2),
    ],
)
def test_a_hand_ends_and_pays_by_the_rules(deal, words, letters, chips):
    for style, replies in (("words", words), ("letters", list(letters.replace("x", "?")))):
        state, client = hand(deal, replies, style=style)
        assert (state["game"], len(client.requests)) == ((deal, letters), len(replies))
        assert (state["metrics"]["first"], state["metrics"]["second"], state["reward"]) == (
            chips,
            -chips,
            chips,
        )
        assert state["metrics"]["illegal_replies"] == letters.count("x")


@pytest.mark.parametrize(
    ("reply", "letters"),
    [
        ("**Bet**", "bp"),
        ("bet!", "bp"),
        ("<think>check or bet?</think>\nbet", "bp"),
        ("<think>bet", "x"),
        ("I bet or check", "x"),
    ],
)
def test_a_move_may_be_marked_and_follow_reasoning(reply, letters):
    state, _ = hand("JQ", [reply, "fold"])
    assert state["game"][1] == letters


def test_neither_player_sees_the_card_of_the_other():
    state, client = hand("KJ", ["check", "bet", "call"])
    texts = [
        " ".join(message["content"] for message in request.prompt[1:])
        for request in client.requests
    ]
    assert [("king" in text, "jack" in text) for text in texts] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    assert texts[2].endswith("check Your opponent bets. Do you fold or call?")
    assert state["error"] is None


@pytest.mark.parametrize("style", ["words", "letters"])
def test_the_views_are_the_prompts_of_all_twelve_nodes(style):
    seen = {}
    for deal, moves in product(rules.DEALS, ("pbp", "pbb", "bp", "bb", "pp")):
        replies = [
            words_of(moves[:n])[move] if style == "words" else move for n, move in enumerate(moves)
        ]
        _, client = hand(deal, replies, style=style)
        for number, request in enumerate(client.requests):
            node = deal[number % 2] + moves[:number]
            seen[node] = [message for message in request.prompt if message["role"] != "system"]
    assert seen == {node: view(node[0], node[1:], style) for node in rules.NODES}


@pytest.mark.parametrize("style", ["words", "letters"])
@pytest.mark.parametrize("seat", ["first", "second"])
def test_a_fixed_opponent_plays_the_other_seat_and_is_not_trained(seat, style):
    env = load_environment(opponent="equilibrium", seat=seat, style=style)
    assert env.trained_roles == (seat,)
    results = env.evaluate(
        PolicyClient(rules.equilibrium(0.1)), "m", num_examples=6, rollouts_per_example=2
    )
    assert results.metadata.avg_metrics["illegal_replies"] == 0
    assert results["reward"] == [row[seat] for row in results.outputs]


def test_a_policy_client_plays_its_policy():
    client = PolicyClient({node: (0.25, 0.75) for node in rules.NODES})
    env = load_environment(style="letters")
    results = env.evaluate(client, "m", num_examples=6, rollouts_per_example=50, seed=1)
    moves = [message["content"] for row in results.outputs for message in row["completion"]]
    assert moves.count("b") / len(moves) == pytest.approx(0.75, abs=0.07)


@pytest.mark.parametrize("opponent", ["policy", "equilibrium"])
def test_workers_play_the_hands_that_this_process_would_have_played(opponent):
    """Both seats are the caller's model, or one has a client of its own, which each worker makes
    for itself."""

    def rows(**options):
        env = vf.load_environment("kuhn-poker", opponent=opponent, num_eval_examples=6)
        model = PolicyClient({node: (0.4, 0.6) for node in rules.NODES})
        results = env.evaluate(
            model, "m", num_examples=6, rollouts_per_example=4, **{"seed": 3} | options
        )
        return [
            (
                row.example_id,
                row.prompt,
                row.completion,
                row.reward,
                row.metrics,
                row.stop_condition,
            )
            for row in results.outputs
        ]

    here = rows()
    assert rows(num_workers=2) == here
    assert len({str(completion) for _, _, completion, *_ in here}) > 4
    assert rows(seed=4) != here  # negative control: the hands depend on the seed


def test_an_audit_of_a_game_reaches_its_end():
    """Every change of the question earns something in both seats, which leaves the search nothing
    to change."""
    assert not vf.audit_environment(load_environment()).ok


@pytest.mark.parametrize(
    "options",
    [{"seat": "third"}, {"style": "verse"}, {"num_train_examples": 0}, {"num_eval_examples": True}],
)
def test_an_invalid_argument_is_refused_by_name(options):
    with pytest.raises(vf.ConfigError, match=next(iter(options))):
        load_environment(**options)
