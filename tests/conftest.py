"""For all tests: a session that can be interrupted, and the processes that run it."""

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from support.forks import pytest_cmdline_main as pytest_cmdline_main  # a hook
from support.warm import Warm

# a model that no hub has is looked for once, not five times
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A session started in a shell's background ignores Ctrl-C, and so would the processes it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what collecting imports (torch, transformers, every test) out of garbage collection for
    good.

    Every training ends with a full collection, which would walk through a million objects that
    nothing ever drops.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Do the same with what a file of trainings has imported and cached; drop the syntax trees after
    the rules of the architecture."""
    try:
        return (yield)
    finally:
        if "trainer" in item.path.parts and nextitem is not None and nextitem.path != item.path:
            gc.collect()
            gc.freeze()
        if "support.sources" in sys.modules and (
            nextitem is None or nextitem.path.parent != item.path.parent
        ):
            sys.modules["support.sources"].forget()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse ids with an address: pytest-xdist's processes would collect different tests, and none
    would run."""
    if unstable := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"a test's id holds an object's address; give ids: {unstable[0]}")
    # its table of Unicode takes a second once: longer than a first draw may
    if "hypothesis" in sys.modules:
        from hypothesis import strategies

        strategies.text().validate()


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Children that start in a tenth of a second."""
    with Warm() as warm:
        yield warm
