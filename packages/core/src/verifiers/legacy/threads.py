"""Older ``verifiers.utils.thread_utils``: objects of one thread, and pools whose size follows a
run's concurrency."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

_LOCAL = threading.local()
_EXECUTORS: dict[str, tuple[Any, Callable[[int], int]]] = {}


def get_thread_local_storage() -> threading.local:
    """The storage that the functions of this module share; each thread sees its own attributes."""
    return _LOCAL


def get_or_create_thread_attr(
    key: str, factory: Callable[..., object], *args: object, **kwargs: object
) -> Any:
    """The object of this thread under ``key``, made by ``factory(*args, **kwargs)``
    on first use."""
    if not hasattr(_LOCAL, key):
        setattr(_LOCAL, key, factory(*args, **kwargs))
    return getattr(_LOCAL, key)


def get_or_create_thread_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this thread, made on first use; a closed loop is replaced."""
    loop: asyncio.AbstractEventLoop = get_or_create_thread_attr("loop", asyncio.new_event_loop)
    if loop.is_closed():
        loop = _LOCAL.loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def register_executor(
    name: str,
    executor: ThreadPoolExecutor | ProcessPoolExecutor,
    scaling_fn: Callable[[int], int] | None = None,
) -> None:
    """Let ``scale_executors`` set the workers of a pool: to the concurrency, or to
    ``scaling_fn(concurrency)``."""
    _EXECUTORS[name] = executor, scaling_fn or int


def unregister_executor(name: str) -> None:
    """Forget a pool; a name that is not known is ignored."""
    _EXECUTORS.pop(name, None)


def scale_executors(concurrency: int) -> int:
    """Set the most workers of every registered pool; returns ``concurrency``."""
    for executor, scale in _EXECUTORS.values():
        executor._max_workers = scale(concurrency)  # the pools have no public setter
    return concurrency


def shutdown_executors() -> None:
    """Shut every registered pool down, without waiting, and forget it."""
    for executor, _ in _EXECUTORS.values():
        executor.shutdown(wait=False)
    _EXECUTORS.clear()
