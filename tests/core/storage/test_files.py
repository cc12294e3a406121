"""A file that this library writes is never another one: links that appear and vanish while it
writes lead nowhere."""

import contextlib
import os
import subprocess
import sys

import pytest

from verifiers.errors import ConfigError
from verifiers.storage.files import LOCK_NAME, HeldFile, atomic_write
from verifiers.storage.journal import Journal

PLANT = """
import contextlib, os, sys
link, victim = sys.argv[1:]
print("ready", flush=True)
while True:
    with contextlib.suppress(OSError):
        os.symlink(victim, link)
        os.unlink(link)
"""


@pytest.fixture
def victim(tmp_path):
    """A file elsewhere that belongs to the user, and is not of the run."""
    file = tmp_path / "elsewhere" / "keys"
    file.parent.mkdir()
    file.write_bytes(b"precious")
    return file


@contextlib.contextmanager
def planting(link, victim):
    """Another process makes and removes a link as fast as it can."""
    command = [sys.executable, "-c", PLANT, str(link), str(victim)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


def temporary(path):
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def test_links_that_come_and_go_where_a_file_is_written_lead_nowhere(tmp_path, victim):
    path, failed = tmp_path / "metadata.json", 0
    with planting(temporary(path), victim):
        for number in range(200):
            try:
                atomic_write(path, b"%d" % number)
            except OSError:  # the other process was there first, or took the file away
                failed += 1
    assert victim.read_bytes() == b"precious"
    assert failed < 200
    temporary(path).unlink(missing_ok=True)
    atomic_write(path, b"last")
    assert (path.is_symlink(), path.read_bytes()) == (False, b"last")


def test_opened_by_name_alone_a_planted_link_empties_the_file_it_leads_to(tmp_path, victim):
    """Negative control: the flags of ``open(path, "wb")``."""
    link = temporary(tmp_path / "metadata.json")
    link.symlink_to(victim)
    os.close(os.open(link, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
    assert victim.read_bytes() == b""


def test_a_planted_link_and_the_rest_of_a_killed_process_are_replaced(tmp_path, victim):
    path = tmp_path / "metadata.json"
    temporary(path).symlink_to(victim)
    atomic_write(path, b"first")
    temporary(path).write_bytes(b"half of")  # by a killed process that had this pid
    atomic_write(path, b"second")
    assert (path.read_bytes(), victim.read_bytes()) == (b"second", b"precious")


def test_a_journal_or_a_lock_that_is_a_link_is_refused_by_name(tmp_path, victim):
    for name in ("results.jsonl", LOCK_NAME):
        (tmp_path / name).symlink_to(victim)
        with pytest.raises(ConfigError, match=f"{name} is a symbolic link"):
            HeldFile(tmp_path / name)
    with pytest.raises(ConfigError, match="is a symbolic link"):
        Journal.open(tmp_path / "results.jsonl")
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["results.jsonl", LOCK_NAME])
def test_a_pipe_in_the_place_of_a_file_to_write_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="it is no regular file; remove it or name another"):
        HeldFile(tmp_path / name)
