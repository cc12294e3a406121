"""The list of runs: every entry as its files are when it is sent, in parts, and afterwards the
entries that changed.

Each change of an entry takes the next number, so a page that has everything up to a number asks for
what came after it. An entry is described once, and anew when ``describe.version`` of its files
differs; that is looked at whenever an entry is sent, and by ``version`` for all entries, some in
each call where there are very many.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TypedDict

from verifiers.view import describe
from verifiers.view.catalog import Catalog, Source
from verifiers.view.describe import RunEntry

MIN_LISTED = 100
"""Entries of a part, at least, however long they take."""
SWEEP_S = 0.1
"""Seconds for which one call of ``version`` may look for changes."""
SEARCH_S = 0.05
"""Seconds for which a part waits for a search for new runs."""


@dataclass(frozen=True, slots=True)
class _Entry:
    source: Source
    number: int
    version: str
    content: RunEntry


class ListPart(TypedDict):
    """Entries of the list."""

    runs: list[RunEntry]
    gone: list[str]
    """Ids of runs that were removed since."""
    seen: int
    """The number of the last change included."""
    next: int | None
    """The same while there is more to ask for, else null."""
    total: int
    """How many runs were found so far."""
    generation: str


class Listing:
    """The entries of a catalog's runs. Thread-safe."""

    def __init__(self, catalog: Catalog):
        self._catalog = catalog
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        """By id, in the order of their numbers."""
        self._gone: dict[str, int] = {}
        """Id of a run that was removed -> the number of that change."""
        self._number = 0
        self._generation = secrets.token_hex(4)
        self._due: deque[str] = deque()
        self._is_searched = False

    def entry(self, source: Source) -> RunEntry:
        """The entry of a run. Raises: ``OSError`` when it was removed."""
        entry = self._entries.get(source.id)
        if entry is None or (entry.source, entry.version) != (source, describe.version(source)):
            return describe.describe(source)
        return entry.content

    def part(self, after: int = 0, budget_s: float = math.inf, generation: str = "") -> ListPart:
        """The entries that are new or changed since change ``after``, 0 for all, for about
        ``budget_s`` seconds.

        ``generation`` is that of an earlier part; changes of another generation are counted anew,
        and all entries returned.
        """
        deadline = time.monotonic() + budget_s
        after = after if generation in ("", self._generation) else 0
        with self._lock:
            least = math.inf if budget_s == math.inf else len(self._entries) + MIN_LISTED
            sources = self._sources(least)
            seen = after
            runs: list[RunEntry] = []
            candidates = [(e.source, e.number) for e in self._entries.values() if e.number > after]
            fresh = [source for run_id, source in sources.items() if run_id not in self._entries]
            is_cut = False
            for source, number in [*candidates, *((source, None) for source in fresh)]:
                if is_cut := len(runs) >= MIN_LISTED and time.monotonic() > deadline:
                    break
                if (entry := self._read(source)) is not None:
                    runs.append(entry.content)
                    seen = entry.number if number is None else number
            if not is_cut:
                seen = self._number
            gone = [run_id for run_id, number in self._gone.items() if number > after > 0]
            more = is_cut or not self._is_searched
            return {
                "runs": runs,
                "gone": gone,
                "seen": seen,
                "next": seen if more else None,
                "total": len(sources),
                "generation": self._generation,
            }

    def version(self) -> str:
        """A token that changes with the list. Looks at the running runs, and at some of the others
        in turn."""
        deadline = time.monotonic() + SWEEP_S
        with self._lock:
            sources = self._sources(0)
            entries = self._entries.values()
            running = [entry.source for entry in entries if entry.content["status"] == "running"]
            if not self._due:
                self._due.extend(self._entries)
            for source in running:
                self._read(source)
            looked = 0
            while self._due and (looked < MIN_LISTED or time.monotonic() < deadline):
                looked += 1
                if (entry := self._entries.get(self._due.popleft())) is not None:
                    self._read(entry.source)
            return f"{self._number}-{len(sources.keys() - self._entries.keys())}"

    def _sources(self, least: float) -> dict[str, Source]:
        """The runs that are known; entries of runs that are no longer there are removed."""
        sources, self._is_searched = self._catalog.sources_known(least, SEARCH_S)
        if self._is_searched:
            for run_id, entry in list(self._entries.items()):
                if sources.get(run_id) != entry.source:
                    self._remove(run_id)
        return sources

    def _read(self, source: Source) -> _Entry | None:
        """The entry of a run as its files are now; None when it was removed."""
        version, latest = describe.version(source), self._entries.get(source.id)
        if latest is not None and latest.version == version:
            return latest
        try:
            content = describe.describe(source)
        except OSError:  # removed since the search
            self._remove(source.id)
            return None
        self._number += 1
        self._entries.pop(source.id, None)
        self._gone.pop(source.id, None)
        entry = self._entries[source.id] = _Entry(source, self._number, version, content)
        return entry

    def _remove(self, run_id: str) -> None:
        if self._entries.pop(run_id, None) is not None:
            self._number += 1
            self._gone[run_id] = self._number
