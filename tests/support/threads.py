"""That code leaves no thread behind, whatever threads of other tests end meanwhile."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_new_thread(limit_s: float = 0.0) -> Iterator[None]:
    """*Raises* ``AssertionError`` when a thread that the block started is alive ``limit_s`` after
    its end.

    A library's thread that has done its work (asyncio's for a child's end) may still be returning
    when the block ends.
    """
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + limit_s
    while (threads := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not threads, f"threads left: {sorted(thread.name for thread in threads)}"
