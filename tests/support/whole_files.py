"""How pytest-xdist shares out the tests: a file stays with one process, and the longest are begun first.

pytest-xdist's own way gives every process tests of every file, so each makes what a file shares (a server, a browser, a
process to fork from), and the last minute belongs to whatever the last folder holds.
"""

from __future__ import annotations

import functools
from pathlib import Path

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ROOT = Path(__file__).parents[2]
ONE_BROWSER = "tests/view"
FORKED = "child_context"
"""Files with this word fork trainings from a process that has imported torch, which takes six CPU seconds."""

LONGEST_FIRST = (
    FORKED,
    ONE_BROWSER,
    "tests/docs/test_blocks.py",
    "tests/faults/test_journal_faults.py",
    "tests/faults/test_resume.py",
    "tests/typing/test_type_checkers.py",
    "tests/cli/test_vf_install.py",
)
"""Units of ten seconds and more. An omission costs a longer end, nothing else."""


@functools.cache
def unit_of(file: str) -> str:
    """The file, or what it shares with others."""
    if file.startswith(f"{ONE_BROWSER}/"):
        return ONE_BROWSER
    return FORKED if FORKED in (ROOT / file).read_text(encoding="utf-8") else file


def rank(test: str) -> int:
    """The place of a test's unit; equal ones stay in the order of their folders."""
    unit = unit_of(test.partition("::")[0])
    return LONGEST_FIRST.index(unit) if unit in LONGEST_FIRST else len(LONGEST_FIRST)


class WholeFiles(LoadFileScheduling):
    """Hands out whole units in the order of collection, which `rank` has sorted."""

    def schedule(self) -> None:
        self.config.option.loadscopereorder = False  # by the number of tests, which says little
        super().schedule()

    def remove_node(self, node: WorkerController) -> str | None:
        """Take back what a process had left when it died; the test it died of has failed, and is not begun again.

        *Returns* that test.
        """
        left = {scope: unit for scope, unit in self.assigned_work[node].items() if not all(unit.values())}
        crashed = next((test for unit in left.values() for test, is_done in unit.items() if not is_done), None)
        if crashed is not None:
            left[self._split_scope(crashed)][crashed] = True
        self.assigned_work[node] = {scope: unit for scope, unit in left.items() if not all(unit.values())}
        super().remove_node(node)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        if node in self.registered_collections:  # the replacement of a process that died is still collecting
            super()._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid.partition("::")[0])
