"""Nothing in the tree names the machine it was written on."""

import os
import re
from pathlib import Path

import pytest

from support.import_graph import REPOSITORY

SKIPPED = {
    ".git",
    ".venv",
    ".hypothesis",
    "node_modules",
    "__pycache__",
    "outputs",
    "build",
    "dist",
}
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".json",
    ".yaml",
    ".yml",
    ".cfg",
    ".html",
    ".js",
    ".css",
    ".sh",
    ".lock",
    "",
}
ROOTS = "|".join(("work", "root", "home/[a-z]+", "Users/[A-Za-z]+", "mnt", "workspace"))
MACHINE_PATH = re.compile(rf"(?<![\w.~)}}\]-])/(?:{ROOTS})/[\w.-]+")


def is_skipped(name):
    return name in SKIPPED or name.endswith(("_cache", ".egg-info"))


def texts():
    for folder, folders, files in os.walk(REPOSITORY):
        folders[:] = sorted(name for name in folders if not is_skipped(name))
        for path in (Path(folder, name) for name in sorted(files) if not is_skipped(name)):
            if path.suffix in TEXT and path.is_file() and path.stat().st_size < 2**20:
                yield path, path.read_text(encoding="utf-8", errors="replace")


def test_no_path_of_a_machine():
    paths = [
        f"{path.relative_to(REPOSITORY)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for path, text in texts()
        for match in MACHINE_PATH.finditer(text)
    ]
    assert paths == []


@pytest.mark.parametrize("root", ["work", "root", "home/ann", "Users/Ann"])
def test_such_a_path_would_be_found(root):
    """Negative control."""
    assert MACHINE_PATH.search(f"see /{root}/main for it")
    assert not MACHINE_PATH.search(f"https://example.org/{root}/main")
