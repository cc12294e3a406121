"""Values that older code awaits and newer code does not: both work.

Hooks, and the results of ``evaluate``, were coroutines in older versions. The present results are
plain values; the classes and methods of ``legacy.classes`` get the forms below, so that an
``await`` in front of them stays harmless.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from verifiers.legacy.usage import StateUsageTracker

T = TypeVar("T")


class Done:
    """Return value of a synchronous hook that was a coroutine in older versions; awaiting it is
    optional.

    Both ``await super().has_error(state)`` and ``super().has_error(state)`` work: it is as true as
    its value.
    """

    __slots__ = ("value",)

    def __init__(self, value: object = None):
        self.value: Any = value

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self.value

    def __bool__(self) -> bool:
        return bool(self.value)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == (other.value if isinstance(other, Done) else other))

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


def started(work: Coroutine[Any, Any, T]) -> Done | Awaitable[T]:
    """``Done`` of a coroutine that ends without waiting, else a coroutine that continues it.

    For a method that is a coroutine and that older code calls without ``await``.
    """
    try:
        awaited = work.send(None)
    except StopIteration as end:
        return Done(end.value)
    return _continued(work, awaited)


@types.coroutine
def _continued(work: Coroutine[object, object, T], awaited: object) -> Generator[Any, Any, T]:
    """The rest of a coroutine that has yielded ``awaited``."""
    while True:
        try:
            sent = yield awaited
        except BaseException as error:  # noqa: BLE001  a cancellation: passed into the coroutine that waits
            step = functools.partial(work.throw, error)
        else:
            step = functools.partial(work.send, sent)
        try:
            awaited = step()
        except StopIteration as end:
            value: T = end.value
            return value


class Finished:
    """What a blocking call returns is also a coroutine that has ended:
    ``asyncio.run(env.evaluate(…))`` works."""

    __slots__ = ()

    def send(self, value: object) -> NoReturn:
        raise StopIteration(self)

    def throw(self, *error: Any) -> NoReturn:
        raise error[1] if len(error) > 1 and error[1] is not None else error[0]

    def close(self) -> None:
        """Nothing: it has ended."""

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self


class FinishedTuple(tuple[Any, ...], Finished):
    """A tuple as ``Finished``."""

    __slots__ = ()


def finish_states(module: ModuleType) -> None:
    """Give states the methods of ``Finished``, and their older keys."""
    _make_finished(module.State)
    module.State.OLDER = {"usage_tracker": lambda state: StateUsageTracker(state.record.usage)}


def finish_results(module: ModuleType) -> None:
    """Give results the methods of ``Finished``, and a constructor that takes columns."""
    _make_finished(module.GenerateOutputs)

    def of_columns(*arguments: Any) -> object:
        from verifiers.legacy.columns import results_of_columns  # late: it imports the results

        return results_of_columns(*arguments)

    module.GenerateOutputs.of_columns = staticmethod(of_columns)


def _make_finished(cls: type) -> None:
    for name in ("send", "throw", "close", "__await__"):
        setattr(cls, name, getattr(Finished, name))


class AwaitableToo:
    """A synchronous method whose results may also be awaited by who asks an object, or ``super()``,
    for the method.

    Who asks the class, as the loop does for stop conditions, gets the method alone.
    """

    def __init__(self, method: Callable[..., object]):
        functools.update_wrapper(self, method)
        self._method = method

    def __get__(self, owner: object, cls: type | None = None) -> Callable[..., object]:
        return self._method if owner is None else types.MethodType(self, owner)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        result = self._method(*args, **kwargs)
        return result if hasattr(result, "__await__") else Done(result)
