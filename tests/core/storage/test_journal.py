"""The journal: rows, readers, writers at once, opening and closing. Kills, cuts and failing disks:
``faults/``."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest

from verifiers.errors import ConfigError, RunBusy, UsageError
from verifiers.runtime.failpoints import armed
from verifiers.runtime.json import UNSERIALIZABLE
from verifiers.storage.journal import Journal, read_journal


def keys(path):
    return [row["key"] for row in read_journal(path)]


def written(path, *appends):
    with Journal.open(path) as journal:
        for rows in appends:
            journal.append_sync(rows)
    return path.read_bytes()


def numbered(start, stop):
    return [{"key": key} for key in range(start, stop)]


# --- rows -----------------------------------------------------------------------------------------


async def test_rows_come_back_in_order_without_the_journals_own_keys(tmp_path):
    path = tmp_path / "results.jsonl"
    with Journal.open(path) as journal:
        await journal.append({"key": 1, "reward": 0.5})
        await journal.append([{"key": 2}, {"key": 3}])
        await journal.append([])
    assert list(read_journal(path)) == [{"key": 1, "reward": 0.5}, {"key": 2}, {"key": 3}]
    assert list(json.loads(path.read_bytes().split(b"\n")[1])) == ["key", "write_part", "crc32"]


def test_a_row_is_never_lost_for_what_its_values_are(tmp_path):
    class Stubborn:
        def tolist(self):
            raise RuntimeError("no")

    endless = []
    endless.append(endless)
    row = {
        "key": 1,
        "nan": float("nan"),
        "nested": {"inf": [float("inf"), 1.0]},
        "ids": np.array([[1, 2]], np.int32),
        "scalar": np.float32(0.5),
        "flag": np.bool_(True),
        "object": object(),
        "stubborn": [Stubborn()],
        "tuple keys": {(1, 2): 3, None: 4},
        "endless": endless,
        "error": ValueError("x"),
        "big": 2**80,
    }
    for extra in ({}, {"surrogate": "\ud800"}):  # the fast way and the careful way
        path = tmp_path / f"{len(extra)}.jsonl"
        written(path, row | extra)
        (back,) = read_journal(path)
        assert back == {
            "key": 1,
            "nan": None,
            "nested": {"inf": [None, 1.0]},
            "ids": [[1, 2]],
            "scalar": 0.5,
            "flag": True,
            "object": {UNSERIALIZABLE: "object"},
            "stubborn": [{UNSERIALIZABLE: "Stubborn"}],
            "tuple keys": {"(1, 2)": 3, "None": 4},
            "endless": {UNSERIALIZABLE: "list"},
            "error": {UNSERIALIZABLE: "ValueError"},
            "big": 2**80,
            **extra,
        }


@pytest.mark.parametrize("row", [{}, {"crc32": 1}, {"key": 1, "write_part": [1, 2]}])
async def test_a_row_the_journal_could_not_give_back_is_refused(tmp_path, row):
    with Journal.open(tmp_path / "results.jsonl") as journal:
        with pytest.raises(UsageError, match="crc32"):
            await journal.append(row)
        await journal.append({"key": 1})
    assert keys(tmp_path / "results.jsonl") == [1]


# --- one writer, many readers ---------------------------------------------------------------------


def test_readers_get_the_durable_rows_while_another_process_writes(tmp_path):
    path = tmp_path / "results.jsonl"
    with Journal.open(path) as journal:
        for key in range(5):
            journal.append_sync({"key": key})
            assert keys(path) == list(range(key + 1))
        with open(path, "ab") as file:
            file.write(b'{"key":5,"half')
        assert keys(path) == [0, 1, 2, 3, 4]


def test_a_forked_child_neither_keeps_the_lock_nor_writes(tmp_path):
    """A child that outlives a killed parent must not block the resumed run."""
    path = tmp_path / "results.jsonl"
    journal = Journal.open(path)
    hold, report = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        try:
            journal.append_sync({"key": 99})
        except UsageError:
            os.write(report[1], b"refused")
        os.read(hold[0], 1)
        os._exit(0)
    try:
        assert os.read(report[0], 100) == b"refused"
        with pytest.raises(RunBusy):  # closing the child's copy leaves the parent's lock in place
            Journal.open(path)
        journal.append_sync({"key": 0})
        journal.close()
        with Journal.open(path) as again:  # although the child is still alive
            again.append_sync({"key": 1})
    finally:
        os.write(hold[1], b".")
        os.waitpid(child, 0)
        for end in (*hold, *report):
            os.close(end)
    assert keys(path) == [0, 1]


def test_a_plain_lock_is_kept_by_a_forked_child(tmp_path):
    """Negative control: flock alone outlives its owner in a child."""
    code = """
import fcntl, os, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""
    path = tmp_path / "plain.lock"
    with subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        parent.stdout.readline()
        parent.wait(20)
        with pytest.raises(RunBusy):
            Journal.open(path)
        parent.stdin.close()


# --- concurrency ----------------------------------------------------------------------------------


async def test_1024_writers_each_get_their_acknowledgement_and_share_the_fsyncs(
    tmp_path, monkeypatch
):
    path, commits = tmp_path / "results.jsonl", []
    monkeypatch.setattr(
        "verifiers.storage.journal.sync_file", lambda fd: (commits.append(fd), os.fdatasync(fd))
    )

    async def writer(number):
        for turn in range(3):
            await journal.append({"key": [number, turn]})

    with Journal.open(path) as journal:
        await asyncio.gather(*map(writer, range(1024)))
    assert Counter(map(tuple, keys(path))) == Counter((n, t) for n in range(1024) for t in range(3))
    assert len(commits) < 300, "one fsync must serve many writers"


async def test_a_cancelled_wait_costs_nobody_anything(tmp_path):
    path = tmp_path / "results.jsonl"
    with Journal.open(path) as journal:
        waits = [asyncio.create_task(journal.append({"key": key})) for key in range(100)]
        await asyncio.sleep(0)
        for wait in waits[::2]:
            wait.cancel()
        outcomes = await asyncio.gather(*waits, return_exceptions=True)
    assert outcomes[1::2] == [None] * 50
    assert {type(outcome) for outcome in outcomes[::2]} == {asyncio.CancelledError}
    assert sorted(keys(path)) == list(range(100))


def test_threads_and_event_loops_share_one_journal(tmp_path):
    path = tmp_path / "results.jsonl"

    async def append_some(first):
        await asyncio.gather(*(journal.append({"key": key}) for key in range(first, first + 50)))

    async def left_behind():  # its loop is closed before the acknowledgement comes
        append = asyncio.ensure_future(journal.append({"key": 200}))
        await asyncio.sleep(0)
        assert not append.done()

    with Journal.open(path) as journal:
        threads = [
            threading.Thread(target=lambda n=n: asyncio.run(append_some(n * 50))) for n in range(3)
        ]
        threads.append(
            threading.Thread(
                target=lambda: [journal.append_sync({"key": key}) for key in range(150, 200)]
            )
        )
        threads.append(threading.Thread(target=lambda: asyncio.run(left_behind())))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(keys(path)) == list(range(201))


async def test_a_lone_writer_does_not_wait_for_company(tmp_path):
    with Journal.open(tmp_path / "results.jsonl", linger_s=0.05) as journal:
        await journal.append({"key": 0})
        started = time.perf_counter()
        for key in range(1, 41):
            await journal.append({"key": key})
        assert time.perf_counter() - started < 2  # forty times linger_s, were it waited for


# --- opening and closing --------------------------------------------------------------------------


def test_a_constructor_and_a_close_leave_nothing_behind(tmp_path):
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    Journal(tmp_path / "never.jsonl").close()
    assert os.listdir(tmp_path) == []
    with Journal.open(tmp_path / "results.jsonl") as journal:
        assert threading.active_count() == threads + 1
    journal.close()
    with pytest.raises(UsageError, match="closed"):
        journal.append_sync({"key": 0})
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, descriptors)


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        Journal.open(tmp_path / "absent" / "results.jsonl")
    with pytest.raises(ConfigError, match=r"0\.05"):
        Journal.open(tmp_path / "results.jsonl", linger_s=1.0)


@pytest.mark.parametrize(
    "spec", ["journal.open", "journal.open:0", "journal.open:x", ":1", "journal.open:1:EWHAT"]
)
def test_a_misspelt_failpoint_is_refused(spec):
    with pytest.raises(ConfigError, match="VF_FAILPOINT"), armed(spec):
        pass
