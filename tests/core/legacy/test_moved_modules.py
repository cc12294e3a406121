"""Module paths of version 0.2.0: each is imported as the module that has its contents now."""

import importlib
import subprocess
import sys

import pytest

from verifiers.legacy.moved import MOVED
from verifiers.runtime.distributions import packages
from verifiers_trainer.legacy import MOVED as MOVED_IN_TRAINER

PATHS = [("verifiers", *pair) for pair in MOVED.items()] + [
    ("verifiers_trainer", *pair) for pair in MOVED_IN_TRAINER.items()
]
PEERS = {"integrations.harbor": "harbor", "integrations.inspect_sandbox": "inspect_ai"}
"""Modules that only their peer imports, and that import it."""


@pytest.mark.parametrize(
    ("package", "old", "new"), PATHS, ids=[f"{package}.{old}" for package, old, _ in PATHS]
)
def test_an_old_path_is_the_module_of_the_new_one(package, old, new):
    if package == "verifiers_trainer":
        pytest.importorskip("torch", reason="needs the trainer")
    if old in PEERS:
        pytest.importorskip(PEERS[old], reason="its peer imports it")
    home = new if new.split(".")[0] in {"verifiers", *packages()} else f"{package}.{new}"

    imported = importlib.import_module(f"{package}.{old}")

    assert imported is importlib.import_module(home)
    assert imported.__spec__.name == imported.__name__ == home


def test_names_can_be_imported_from_old_paths_in_every_form():
    code = "\n".join(
        (
            "from verifiers.journal import Journal",
            "from verifiers import runner",
            "import verifiers.sandbox.inside.frames as frames",
            "from verifiers.rubrics.workers import workers",
            "import verifiers.dual; verifiers.dual.maybe_await",
            "print(Journal.__module__, runner.__name__, frames.__name__)",
        )
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert done.stdout.split() == [
        "verifiers.storage.journal",
        "verifiers.runs.runner",
        "verifiers.sandbox.guest.frames",
    ]


def test_an_old_path_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"verifiers\.journals"):
        importlib.import_module("verifiers.journals")
