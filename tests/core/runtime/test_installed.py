"""Entry points are read again when the metadata of any installed distribution changes, and only
then."""

import os
import sys
import time
from pathlib import Path

import importlib_metadata
import pytest

from verifiers.runtime import installed
from verifiers.runtime.installed import Broken, entry_points

GROUP = "verifiers.test_installed"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on the path, with one distribution that offers ``one``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "first", "one = module:function")
    return tmp_path


@pytest.fixture
def num_reads(monkeypatch):
    """How often a list of entry points has been read and parsed, as a function."""
    reads = []
    read_text = importlib_metadata.PathDistribution.read_text

    def counted(self, name):
        reads.append(name)
        return read_text(self, name)

    monkeypatch.setattr(importlib_metadata.PathDistribution, "read_text", counted)
    return lambda: reads.count("entry_points.txt")


def install(folder: Path, name: str, line: str, age_s: float = 60) -> Path:
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    for file, text in (
        ("METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"),
        ("entry_points.txt", f"[{GROUP}]\n{line}\n"),
    ):
        rewrite(about / file, text, age_s)
    return about


def rewrite(file: Path, text: str, age_s: float = 30) -> None:
    file.write_text(text)
    written = time.time() - age_s
    os.utime(file, (written, written))


def names() -> set[str]:
    return {
        entry.name if isinstance(entry, Broken) else entry[0].name for entry in entry_points(GROUP)
    }


def test_unchanged_metadata_is_read_once(folder, num_reads):
    assert names() == {"one"}
    before = num_reads()
    assert before > 0
    assert names() == {"one"}
    assert num_reads() == before


def test_a_new_a_changed_a_damaged_and_a_removed_distribution_are_seen(folder):
    assert names() == {"one"}
    second = install(folder, "second", "two = module:function")
    assert names() == {"one", "two"}
    # in place, and of the same size
    rewrite(second / "entry_points.txt", f"[{GROUP}]\nsix = module:function\n")
    assert names() == {"one", "six"}
    rewrite(second / "METADATA", "", 20)
    assert [entry.name for entry in entry_points(GROUP) if isinstance(entry, Broken)] == ["six"]
    for file in second.iterdir():
        file.unlink()
    second.rmdir()
    assert names() == {"one"}


def test_a_folder_that_leaves_the_path_takes_its_entry_points_along(folder, monkeypatch):
    assert names() == {"one"}
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != str(folder)])
    assert names() == set()


def test_a_file_that_was_written_a_moment_ago_is_not_kept(folder, num_reads, monkeypatch):
    # on a busy machine 50 ms pass between two lines
    monkeypatch.setattr(installed, "_YOUNG_NS", 20 * 10**9)
    file = install(folder, "second", "two = module:function", age_s=0) / "entry_points.txt"
    written = file.stat().st_mtime_ns
    assert names() == {"one", "two"}
    file.write_text(f"[{GROUP}]\nsix = module:function\n")
    os.utime(file, ns=(written, written))  # within one tick of the file system's clock
    assert names() == {"one", "six"}


def test_negative_control_without_the_rule_of_age_the_old_list_stays(folder, monkeypatch):
    monkeypatch.setattr(installed, "_YOUNG_NS", -1)
    file = install(folder, "second", "two = module:function", age_s=0) / "entry_points.txt"
    written = file.stat().st_mtime_ns
    assert names() == {"one", "two"}
    file.write_text(f"[{GROUP}]\nsix = module:function\n")
    os.utime(file, ns=(written, written))
    assert names() == {"one", "two"}
