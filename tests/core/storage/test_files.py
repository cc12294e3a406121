"""A file that this library writes is never another one: links that appear and vanish while it
writes lead nowhere."""

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from verifiers.errors import ConfigError
from verifiers.runtime.failpoints import armed
from verifiers.storage.files import (
    LOCK_NAME,
    HeldFile,
    append_lines,
    atomic_write,
    remove_leftovers,
    replacing,
    share_modes,
)
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


def write(path, content):
    with replacing(path) as written:
        written.write_bytes(content)


def test_a_file_of_any_writer_replaces_a_link_and_not_what_it_leads_to(tmp_path, victim):
    path = tmp_path / "table.parquet"
    path.symlink_to(victim)
    for name in (".table.parquet.tmp", f".table.parquet.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(victim)
    write(path, b"new")
    assert (path.is_symlink(), path.read_bytes(), victim.read_bytes()) == (
        False,
        b"new",
        b"precious",
    )


def test_no_other_user_may_plant_a_link_where_a_file_is_being_written(tmp_path):
    with replacing(tmp_path / "table") as written:
        assert written.parent.stat().st_mode & 0o077 == 0
        written.write_bytes(b"x")


def write_new(path, fails):
    with replacing(path) as written:
        if path.is_dir():
            written.mkdir()
            (written / "part").write_bytes(b"new")
        else:
            written.write_bytes(b"new")
        if fails:
            raise OSError("full")


@pytest.mark.parametrize("failure", ["the block", "the disk"])
def test_a_failed_writer_leaves_the_old_file_or_folder_and_nothing_beside_it(tmp_path, failure):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_bytes(b"old")
    folder.mkdir()
    (folder / "part").write_bytes(b"old")
    spec = "replacing.before_rename:1:ENOSPC" if failure == "the disk" else ""
    for path in (file, folder):
        with pytest.raises(OSError, match=r"space|full"), armed(spec):
            write_new(path, fails=failure == "the block")
    assert (file.read_bytes(), (folder / "part").read_bytes()) == (b"old", b"old")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_folder_takes_the_place_of_a_folder_of_other_files(tmp_path):
    path = tmp_path / "copy"
    path.mkdir()
    (path / "old").touch()
    with replacing(path) as written:
        written.mkdir()
        (written / "new").touch()
    assert (os.listdir(path), os.listdir(tmp_path)) == (["new"], ["copy"])


def test_what_killed_processes_left_is_removed_and_links_are_not_followed(tmp_path, victim):
    run = tmp_path / "run"
    (run / ".table.x1.tmp").mkdir(parents=True)
    (run / ".table.x1.tmp" / "table").touch()
    (run / ".metadata.json.7.tmp").touch()
    (run / ".planted.tmp").symlink_to(victim.parent)
    (run / "results.jsonl").touch()
    remove_leftovers(run)
    assert (os.listdir(run), victim.read_bytes()) == (["results.jsonl"], b"precious")


WHOLE, TORN = b'{"n": 1}\n', b'{"n": 2, "text": "lin'


def test_a_line_after_a_torn_one_is_read_and_the_torn_one_is_gone(tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_bytes(WHOLE + TORN)
    append_lines(file, b'{"n": 3}\n')
    assert file.read_bytes() == WHOLE + b'{"n": 3}\n'


def test_negative_control_appended_by_name_alone_both_lines_are_lost(tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_bytes(WHOLE + TORN)
    with file.open("ab") as opened:
        opened.write(b'{"n": 3}\n')
    assert len(file.read_bytes().splitlines()) == 2


def test_a_last_line_that_only_lacks_its_end_is_kept(tmp_path):
    file = tmp_path / "labels.jsonl"
    for before, after in ((b"", b""), (WHOLE, WHOLE), (WHOLE[:-1], WHOLE), (TORN, b"")):
        file.write_bytes(before)
        append_lines(file, b"{}\n")
        assert file.read_bytes() == after + b"{}\n"


def test_a_torn_line_of_many_blocks_is_cut(tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_bytes(WHOLE + b'{"text": "' + b"x" * 300_000)
    append_lines(file, b"{}\n")
    assert file.read_bytes() == WHOLE + b"{}\n"


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_bytes(WHOLE)
    with pytest.raises(OSError, match="No space"), armed("append_lines.before_write:1:ENOSPC"):
        append_lines(file, b"{}\n")
    assert file.read_bytes() == WHOLE


def test_no_line_is_appended_through_a_link(tmp_path, victim):
    (tmp_path / "labels.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        append_lines(tmp_path / "labels.jsonl", b"{}\n")
    assert victim.read_bytes() == b"precious"


def test_threads_that_append_at_once_cut_no_line_of_each_other(tmp_path):
    file = tmp_path / "labels.jsonl"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: append_lines(file, b"%d\n" % n, is_durable=False), range(200)))
    assert sorted(map(int, file.read_bytes().splitlines())) == list(range(200))


def test_files_get_the_mode_of_a_new_file_and_links_stay(tmp_path, victim):
    victim.chmod(0o600)
    (tmp_path / "new").write_bytes(b"")
    (tmp_path / "private").write_bytes(b"")
    (tmp_path / "private").chmod(0o600)
    (tmp_path / "link").symlink_to(victim)
    share_modes(tmp_path.iterdir())
    expected = (tmp_path / "new").stat().st_mode
    assert (tmp_path / "private").stat().st_mode == expected != victim.stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"new", "private", "link", "elsewhere"}
