"""The answers of the topic combinatorics, computed: by sympy where it solves the problem, else by
trying everything."""

from collections import Counter
from functools import cache
from itertools import combinations, groupby, pairwise, permutations, product

import pytest
import sympy as sp

from vf_math_python.written import problems

x = sp.Symbol("x")


def anagrams(word):
    """One letter after another: the arrangements that begin with each of the letters left."""

    @cache
    def count(counts):
        return (
            sum(
                count(tuple(n - (i == j) for j, n in enumerate(counts)))
                for i, n in enumerate(counts)
                if n
            )
            or 1
        )

    return count(tuple(Counter(word).values()))


def paths_around(forbidden, end):
    @cache
    def count(right, up):
        if (right, up) == forbidden or min(right, up) < 0:
            return 0
        return 1 if (right, up) == (0, 0) else count(right - 1, up) + count(right, up - 1)

    return count(*end)


def derangements(size):
    return sum(
        all(position != item for position, item in enumerate(order))
        for order in permutations(range(size))
    )


def full_houses():
    # 4 of the 13 ranks: 4 * 3 ordered pairs
    deck = [(rank, suit) for rank in range(4) for suit in range(4)]
    hands = combinations(deck, 5)
    num_hands = sum(sorted(Counter(rank for rank, _ in hand).values()) == [2, 3] for hand in hands)
    return num_hands * (13 * 12) // (4 * 3)


@cache
def tilings(columns):
    return 1 if columns < 2 else tilings(columns - 1) + tilings(columns - 2)


def crossings(size):
    chords = [pair for pair in combinations(range(size), 2)]
    return sum(a < c < b < d for (a, b), (c, d) in product(chords, chords))


def distinct_parts(total):
    return sum(
        sum(parts) == total
        for size in range(1, 5)
        for parts in combinations(range(1, total + 1), size)
    )


def change(total, coins):
    ways = [1] + [0] * total
    for coin in coins:
        for amount in range(coin, total + 1):
            ways[amount] += ways[amount - coin]
    return ways[total]


def round_tables():
    # Ada is 0, Ben is 1
    seatings = ((0, *permutation) for permutation in permutations(range(1, 6)))
    return sum(1 not in (order[1], order[-1]) for order in seatings)


def matched(size):
    def is_matched(signs):
        heights = [sum(signs[: i + 1]) for i in range(len(signs))]
        return min(heights) >= 0 and heights[-1] == 0

    return sum(map(is_matched, product((1, -1), repeat=2 * size)))


def colourings_up_to_rotation():
    turned = {min(c[i:] + c[:i] for i in range(4)) for c in product(range(3), repeat=4)}
    return len(turned)


def groups(people, number):
    """Partitions: colourings whose colours appear in order."""
    firsts = (tuple(dict.fromkeys(colours)) for colours in product(range(number), repeat=people))
    return sum(order == tuple(range(number)) for order in firsts)


def is_self_inverse(f):
    return all(f[f[i]] == i for i in range(len(f)))


CHECKS = {
    "letters-of-mississippi": lambda: anagrams("MISSISSIPPI"),
    "letters-of-mathematics": lambda: anagrams("MATHEMATICS"),
    "gifts-for-three-children": lambda: sum(
        len(set(assignment)) == 3 for assignment in product(range(3), repeat=5)
    ),
    "paths-around-a-point": lambda: paths_around((3, 2), (6, 4)),
    "hats-mixed-up": lambda: derangements(6),
    "four-numbers-with-sum-twelve": lambda: sum(
        sum(three) <= 12 for three in product(range(13), repeat=3)
    ),
    "no-two-consecutive": lambda: sum(not n & n >> 1 for n in range(2**12)),
    "increasing-digits": lambda: sum(
        all(a < b for a, b in pairwise(str(n))) for n in range(1000, 10000)
    ),
    "full-houses": full_houses,
    "dominoes": lambda: tilings(10),
    "crossing-diagonals": lambda: crossings(10),
    "committee": lambda: sum(
        sum(card < 7 for card in four) >= 2 for four in combinations(range(13), 4)
    ),
    "distinct-parts": lambda: distinct_parts(10),
    "changing-half-a-dollar": lambda: change(50, (1, 5, 10, 25)),
    "round-table": round_tables,
    "no-three-ones": lambda: sum("111" not in f"{n:010b}" for n in range(2**10)),
    "central-trinomial": lambda: sp.Poly((1 + x + x**2) ** 8, x).coeff_monomial(x**8),
    "rectangles-in-a-grid": lambda: sum(
        (7 - width) * (7 - height) for width in range(1, 7) for height in range(1, 7)
    ),
    "parentheses": lambda: matched(6),
    "coloured-squares": colourings_up_to_rotation,
    "three-groups": lambda: groups(6, 3),
    "rooks-off-the-diagonal": lambda: derangements(8),
    "numbers-with-a-seven": lambda: sum("7" in str(n) for n in range(1, 1001)),
    "neighbouring-letters-differ": lambda: sum(
        len(list(groupby(w))) == 5 for w in product("ABC", repeat=5)
    ),
    "self-inverse-functions": lambda: sum(map(is_self_inverse, product(range(5), repeat=5))),
}


def test_every_problem_of_the_topic_is_computed():
    assert CHECKS.keys() == problems("combinatorics").keys()
    assert len(CHECKS) >= 25


@pytest.mark.parametrize("name", CHECKS)
def test_the_answer_is_what_the_computation_gives(name, is_answer):
    value = CHECKS[name]()
    assert is_answer("combinatorics", name, value)
    assert not is_answer("combinatorics", name, value + 1)  # the comparison can fail
