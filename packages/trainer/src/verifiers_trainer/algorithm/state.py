"""The state of an algorithm that remembers more than one batch, such as a running baseline.

Its one home is the object that computes the advantage or the loss::

    class RunningBaseline:
        mean, count = 0.0, 0

        def __call__(self, rewards_G, lengths_G=None):
            advantages = [rewards - self.mean for rewards in rewards_G]
            for rewards in rewards_G:
                self.count += len(rewards)
                self.mean += (rewards - self.mean).sum() / self.count
            return advantages

        def state(self):
            return {"mean": self.mean, "count": self.count}

        def load(self, saved):
            self.mean, self.count = saved["mean"], saved["count"]

and one line selects it: ``advantage = "mine.py:RunningBaseline"``. A run has one such object. Every
checkpoint has its ``state()``, JSON values, and a run that is resumed continues with ``load()``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol, TypeGuard, runtime_checkable

from verifiers_trainer.algorithm.registry import Registry

STATEFUL = ("advantage", "loss")
"""Settings whose object may have a state."""


@runtime_checkable
class Stateful(Protocol):
    """An advantage or a loss with a state, of JSON values."""

    def state(self) -> Mapping[str, Any]: ...

    def load(self, saved: Mapping[str, object]) -> None: ...


def object_of(registry: Registry, choice: object) -> object:
    """A new object of the class that ``choice`` is or names; ``choice`` itself for a function, an
    object, or another name."""
    function = choice
    if isinstance(choice, str) and (choice in registry or ":" in choice):
        function = registry.resolve(choice)
    return function() if isinstance(function, type) else choice


def state_of(settings: object, names: Sequence[str] = STATEFUL) -> dict[str, object]:
    """A copy of the state of each part of the algorithm that has one, by its setting."""
    parts = {name: getattr(settings, name, None) for name in names}
    return {name: deepcopy(dict(p.state())) for name, p in parts.items() if has_state(p)}


def load_state(settings: object, saved: Mapping[str, Any]) -> None:
    """Give each part of the algorithm what ``state_of`` had of it; parts without a state are
    skipped."""
    for name, state in saved.items():
        if has_state(part := getattr(settings, name, None)):
            part.load(state)


def has_state(part: object) -> TypeGuard[Stateful]:
    """Whether ``part`` is an object with a state, and no class of such objects."""
    return isinstance(part, Stateful) and not isinstance(part, type)
