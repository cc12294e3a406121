"""A queue that serves its owners fairly: the owner that has cost least is next.

Each owner has an account of what was spent on its items. ``take`` gives the oldest item of the
waiting owner with the smallest account. Who was away has saved nothing: its account begins at that
of the owner who was served last (start-time fair queueing, Goyal, Vin and Cheng 1996).
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

from verifiers.errors import ModelRefused

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Filled and emptied by any thread; `check_room` bounds the items of one owner."""

    def __init__(self, max_items: int):
        self._max_items = max_items
        self._changed = threading.Condition()
        self._items: dict[str, deque[Item]] = {}
        self._spent: dict[str, float] = {}
        self._served_at = 0.0
        """The account of the owner who was served last, at that time."""
        self._is_closed = False

    def check_room(self, owner: str, number: int) -> None:
        """*Raises* ModelRefused if so many more items of an owner may not wait."""
        with self._changed:
            num_waiting = len(self._items.get(owner, ()))
        if num_waiting + number > self._max_items:
            raise ModelRefused(
                f"{num_waiting} requests of this client wait, and {self._max_items} may: send more"
                " when some are answered",
                status=429,
            )

    def put(self, owner: str, items: list[Item]) -> None:
        """Add items, without a bound."""
        with self._changed:
            if owner not in self._items:
                self._items[owner] = deque()
                self._spent[owner] = max(self._spent.get(owner, 0.0), self._served_at)
            self._items[owner].extend(items)
            self._changed.notify_all()

    def take(self, *, is_waiting: bool) -> tuple[str, Item] | None:
        """(owner, item) that is next; None when the queue is closed, or nothing is there unless
        ``is_waiting`` for it."""
        with self._changed:
            while not self._is_closed:
                if self._items:
                    owner = min(self._items, key=lambda each: self._spent[each])
                    self._served_at = self._spent[owner]
                    item = self._items[owner].popleft()
                    if not self._items[owner]:
                        del self._items[owner]
                    return owner, item
                if not is_waiting:
                    break
                self._changed.wait()
            return None

    def charge(self, owner: str, cost: float) -> None:
        """Add to what was spent on an owner."""
        with self._changed:
            self._spent[owner] = self._spent.get(owner, 0.0) + cost

    def remove(self, owner: str, items: set[Item]) -> set[Item]:
        """Take items out that still wait; return them."""
        with self._changed:
            waiting = self._items.get(owner, deque())
            removed = {item for item in waiting if item in items}
            remaining = deque(item for item in waiting if item not in removed)
            if remaining:
                self._items[owner] = remaining
            else:
                self._items.pop(owner, None)
            return removed

    def close(self) -> list[Item]:
        """End every ``take``; return what waits."""
        with self._changed:
            self._is_closed = True
            waiting = [item for items in self._items.values() for item in items]
            self._items.clear()
            self._changed.notify_all()
            return waiting
