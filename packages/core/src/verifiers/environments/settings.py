"""``Settings``: the part of an environment that changes its parameters after construction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from verifiers import compat
from verifiers.environments.keywords import RunDefaults
from verifiers.errors import ConfigError
from verifiers.rollouts.branching import Branching
from verifiers.runtime.suggest import close_match

OPTIONAL_ATTRIBUTES = tuple(RunDefaults.__annotations__)


F = TypeVar("F", bound=Callable[..., None])


def recorded(setter: F) -> F:
    """A setter of one value that ``changes`` has too, so that a worker's environment gets it."""
    name = setter.__name__.removeprefix("set_")

    @functools.wraps(setter)
    def set_and_record(self: Settings, *value: object, **keywords: object) -> None:
        setter(self, *value, **keywords)
        (self.changes[name],) = (*value, *keywords.values())

    return cast(F, set_and_record)  # ``wraps`` keeps the signature


class Settings:
    """A base class of ``Environment``: ``set_kwargs`` and the setters that it calls."""

    changes: dict[str, object]
    max_seq_len: int | None
    max_concurrent: int
    max_workers: int | None
    branching: Branching | None
    max_total_completion_tokens: int
    interleaved_rollouts: bool
    score_rollouts: bool

    def _renamed(self, keywords: RunDefaults, tool_defs: object) -> dict[str, Any]:
        """The keywords beside the parameters, under their present names."""
        further: dict[str, object] = {**keywords}
        if tool_defs is not None:
            further["tool_defs"] = tool_defs
        return compat.rename(further, compat.ENVIRONMENT_PARAMETERS, type(self).__name__)

    def set_kwargs(self, **settings: object) -> None:
        """Change settings: ``set_<name>(value)`` when there is such a method, else an attribute of
        that name."""
        self.changes.update(settings)
        for name, value in settings.items():
            if (setter := self._setter(name)) is not None:
                setter(value)
                continue
            if name not in self.__dict__ and name not in OPTIONAL_ATTRIBUTES:
                cls: object = type(self)
                parameters = compat.parameters_of(cls)
                if name not in parameters and (match := close_match(name, parameters)):
                    raise ConfigError(
                        f"{type(self).__name__} has no parameter {name!r}; did you mean {match!r}?",
                        key=name,
                    )
                if callable(getattr(type(self), name, None)) or isinstance(
                    getattr(type(self), name, None), property
                ):
                    raise ConfigError(
                        f"{name!r} is a method of {type(self).__name__}; use another name", key=name
                    )
            setattr(self, name, value)

    def _setter(self, name: str) -> Callable[[object], None] | None:
        return getattr(self, f"set_{name}", None)

    def _changed_names(self) -> Iterable[str]:
        return [name for name in self.changes if name in vars(self)]

    @recorded
    def set_max_seq_len(self, max_seq_len: int | None) -> None:
        """Bound the tokens of a conversation."""
        self.max_seq_len = max_seq_len

    @recorded
    def set_interleaved_rollouts(self, interleaved_rollouts: bool) -> None:
        """Has no effect, accepted for older callers: recorded token ids are always those of the
        server."""
        self.interleaved_rollouts = interleaved_rollouts

    @recorded
    def set_score_rollouts(self, score_rollouts: bool) -> None:
        """Turn scoring on or off; without scoring, rewards stay unknown."""
        self.score_rollouts = score_rollouts

    @recorded
    def set_concurrency(self, concurrency: int) -> None:
        """Set the default of ``max_concurrent`` for runs."""
        self.max_concurrent = concurrency

    @recorded
    def set_branching(self, branching: Branching | Mapping[str, Any] | None) -> None:
        """Fork rollouts at a turn. *Raises* ConfigError for fields that it has not."""
        self.branching = Branching.of(branching)

    @recorded
    def set_max_workers(self, max_workers: int | None) -> None:
        """Bound the threads that run synchronous rewards and tools; None = 32. *Raises* ConfigError
        below 1."""
        if max_workers is not None and (not isinstance(max_workers, int) or max_workers < 1):
            raise ConfigError(
                f"max_workers is {max_workers!r}; it must be at least 1, or None", key="max_workers"
            )
        self.max_workers = max_workers

    @recorded
    def set_max_total_completion_tokens(self, max_total_completion_tokens: int) -> None:
        """Bound the completion tokens of a rollout, over all its turns; -1 = no bound."""
        self.max_total_completion_tokens = max_total_completion_tokens
