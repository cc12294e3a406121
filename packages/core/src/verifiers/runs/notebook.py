"""A progress bar under the cell of a notebook, for runs that no other display follows."""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from types import ModuleType
from typing import Any

from verifiers.results.rows import RolloutOutput
from verifiers.runs.options import RunOptions

EVERY_S = 0.25
"""Seconds between updates of the bar."""


def with_notebook_progress(options: RunOptions) -> RunOptions:
    """The options with a progress bar, inside a notebook and without callbacks of the caller; else
    unchanged."""
    if options.on_start is not None or options.on_progress is not None or not in_notebook():
        return options
    bar = NotebookProgress()
    return replace(options, on_start=bar.start, on_progress=bar.update)


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookProgress:
    """The bar: rollouts done, their mean reward, failures, and the time left."""

    def __init__(self) -> None:
        self._total = self._done = self._failed = 0
        self._rewards: list[float] = []
        self._started = self._next = time.monotonic()
        self._handle: Any = None

    def start(self, num_pending: int) -> None:
        """Show the bar; called before the first rollout."""
        self._total = num_pending
        if num_pending:
            self._handle = _ipython().display(_ipython().HTML(self.html()), display_id=True)

    def update(self, outputs: Sequence[RolloutOutput], metadata: object) -> None:
        """Count rollouts that just became durable."""
        self._done += len(outputs)
        self._failed += sum(output["error"] is not None for output in outputs)
        self._rewards += [
            output["reward"] for output in outputs if not math.isnan(output["reward"])
        ]
        now = time.monotonic()
        if self._handle is not None and (now >= self._next or self._done >= self._total):
            self._next = now + EVERY_S
            self._handle.update(_ipython().HTML(self.html()))

    def html(self) -> str:
        """The bar as HTML."""
        words = [f"{self._done} of {self._total} rollouts"]
        if self._rewards:
            words.append(f"reward {sum(self._rewards) / len(self._rewards):.3g}")
        if self._failed:
            words.append(f"{self._failed} failed")
        if 0 < self._done < self._total:
            seconds = (time.monotonic() - self._started) / self._done * (self._total - self._done)
            words.append(f"{seconds:.0f} s left")
        return (
            f"<progress value='{self._done}' max='{self._total}'></progress>"
            f" {escape(', '.join(words))}"
        )


def _ipython() -> ModuleType:
    """``IPython.display``, which a kernel has loaded; it has no types."""
    return importlib.import_module("IPython.display")
