"""Whoever has cost least is next."""

from __future__ import annotations

import pytest

from verifiers.errors import ModelRefused
from verifiers_trainer.tinker_server.queues import FairQueue


def served(queue, costs, number):
    owners = []
    for _ in range(number):
        owner, _ = queue.take(is_waiting=False)
        queue.charge(owner, costs[owner])
        owners.append(owner)
    return owners


def test_owners_share_what_is_spent_and_not_the_number_of_items():
    queue = FairQueue(100)
    queue.put("many", list(range(90)))
    queue.put("few", list(range(30)))
    owners = served(queue, {"many": 1.0, "few": 3.0}, 40)
    assert abs(owners.count("many") - 30) <= 1
    # the control: in order of arrival the first forty are of one owner
    assert owners[:90].count("few") > 0


def test_who_was_away_has_saved_nothing():
    queue = FairQueue(1000)
    queue.put("early", list(range(500)))
    served(queue, {"early": 1.0}, 400)
    queue.put("late", list(range(100)))
    owners = served(queue, {"early": 1.0, "late": 1.0}, 20)
    assert owners.count("early") == 10


def test_items_of_an_owner_keep_their_order():
    queue = FairQueue(10)
    for item in "abc":
        queue.put("one", [item])
    assert [queue.take(is_waiting=False)[1] for _ in range(3)] == ["a", "b", "c"]
    assert queue.take(is_waiting=False) is None


def test_more_than_may_wait_are_refused():
    queue = FairQueue(3)
    queue.put("one", [1, 2])
    queue.check_room("one", 1)
    queue.check_room("two", 3)
    with pytest.raises(ModelRefused, match="2 requests of this client wait, and 3 may") as refused:
        queue.check_room("one", 2)
    assert refused.value.status == 429
    assert sorted(queue.close()) == [1, 2]
    assert queue.take(is_waiting=True) is None


def test_items_are_taken_out():
    queue = FairQueue(5)
    queue.put("one", [1, 2, 3])
    assert queue.remove("one", {2, 9}) == {2}
    assert queue.remove("other", {1}) == set()
    assert sorted(queue.close()) == [1, 3]
