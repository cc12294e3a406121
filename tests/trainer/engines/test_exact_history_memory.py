"""How much ``history="exact"`` remembers: tokens are counted where they are held, and the oldest
are forgotten."""

import random

import numpy as np
import pytest

from verifiers_trainer.engines.exact import history as exact_history
from verifiers_trainer.engines.exact.history import ExactHistory
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer

LIMIT = 2_000


def said(role, content):
    return {"role": role, "content": content}


class Talks:
    """Conversations that are held at the same time, each going on from one of its own answers."""

    def __init__(self, count, seed=0):
        self.history, self.order = ExactHistory(build_tiny_tokenizer()), random.Random(seed)
        self.told = {
            f"r{number}": [([said("user", f"q{number}")], [1, 2, 3])] for number in range(count)
        }
        """Of each rollout the points that it may go on from: messages, ids."""

    def go_on(self, rollout):
        """One more answer; now and then from an earlier point, or the same answer again."""
        points = self.told[rollout]
        messages, ids = self.order.choice(points[-2:])
        answer = said("assistant", f"a{self.order.randint(0, 3)}")
        sampled = list(range(self.order.randint(1, 60)))
        self.history.remember(messages, answer, ids, sampled, rollout)
        points.append(([*messages, answer, said("user", "and?")], [*ids, *sampled, 7, 8]))
        return [*messages, answer, said("user", "and?")], [*ids, *sampled]


def held(history):
    """Tokens that the known answers keep in memory, each array once."""
    num_ids = {}
    for answer in history._answers.values():
        while answer is not None:
            num_ids[id(answer.new)] = len(answer.new)
            answer = answer.before
    return sum(num_ids.values())


@pytest.mark.parametrize("seed", range(3))
def test_tokens_in_memory_are_bounded_whoever_holds_them(monkeypatch, seed):
    monkeypatch.setattr(exact_history, "MAX_TOKENS", LIMIT)
    talks, uncounted = Talks(20, seed), 0
    for _ in range(600):
        messages, ids = talks.go_on(talks.order.choice(list(talks.told)))
        assert talks.history.num_tokens == held(talks.history) <= LIMIT
        uncounted = max(
            uncounted,
            held(talks.history) - sum(len(a.new) for a in talks.history._answers.values()),
        )
    # held by answers that go on from forgotten ones: counting the known would not do
    assert uncounted > LIMIT / 4
    rollout = next(name for name, points in talks.told.items() if points[-1][0] == messages)
    assert talks.history.prompt_ids(messages, None, rollout)[: len(ids)] == ids


def test_an_answer_larger_than_all_that_may_be_kept_is_kept_alone(monkeypatch):
    monkeypatch.setattr(exact_history, "MAX_TOKENS", 10)
    history = ExactHistory(build_tiny_tokenizer())
    for number in range(3):
        history.remember(
            [said("user", f"q{number}")], said("assistant", "a"), [1] * 8, [2] * 8, None
        )
        assert (len(history._answers), history.num_tokens) == (1, 16)


def test_by_number_alone_long_answers_would_have_no_bound(monkeypatch):
    assert 4 * exact_history.MAX_TOKENS <= 2**29
    monkeypatch.setattr(exact_history, "MAX_TOKENS", 2**20)
    history, ids = ExactHistory(build_tiny_tokenizer()), np.zeros(10_000, np.int32)
    for number in range(400):
        history.remember([said("user", f"q{number}")], said("assistant", "a"), ids, ids[:1], None)
    kept = len(history._answers)
    assert kept < 400 < exact_history.MAX_REMEMBERED
    assert 2**20 - 10_001 < history.num_tokens == kept * 10_001 <= 2**20
