"""The journal: what was acknowledged is there after kills, cuts, flips and failing disks (reliability rows 1 to 7)."""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest

from support.kill import run_child
from verifiers.encoding import UNSERIALIZABLE
from verifiers.errors import ConfigError, JournalError, RunBusy, UsageError
from verifiers.failpoints import armed
from verifiers.journal import Journal, read_journal

FAILPOINTS = "journal.before_write journal.after_write journal.after_fsync journal.before_ack".split()


def keys(path):
    return [row["key"] for row in read_journal(path)]


def written(path, *appends):
    with Journal.open(path) as journal:
        for rows in appends:
            journal.append_sync(rows)
    return path.read_bytes()


def numbered(start, stop):
    return [{"key": key} for key in range(start, stop)]


# --- rows -------------------------------------------------------------------------------------------------------


async def test_rows_come_back_in_order_without_the_journals_own_keys(tmp_path):
    path = tmp_path / "results.jsonl"
    with Journal.open(path) as journal:
        await journal.append({"key": 1, "reward": 0.5})
        await journal.append([{"key": 2}, {"key": 3}])
        await journal.append([])
    assert list(read_journal(path)) == [{"key": 1, "reward": 0.5}, {"key": 2}, {"key": 3}]
    assert list(json.loads(path.read_bytes().split(b"\n")[1])) == ["key", "write_part", "crc32"]


TORTURE = {
    "next line": "a\u0085b",
    "line separator": "a\u2028b\u2029c",
    "nul and controls": "\x00\x01\x1b[31m\x7f\r\n\v\f\x1c",
    "lone surrogate": "\ud800 and \udfff",
    "astral": "😀 汉字 é",
    "quotes": 'a"b\\c/\\u0041',
    "looks like a checksum": ',"crc32":1}\n,"write_part":[1,2]',
    "5 MB": "x\u2028" * 2_500_000,
}


@pytest.mark.parametrize("name", TORTURE)
def test_any_text_round_trips_and_splits_at_line_feeds_only(tmp_path, name):
    path, text = tmp_path / "results.jsonl", TORTURE[name]
    data = written(path, {"key": 1, "text": text, text[:20]: 1}, {"key": 2})
    assert list(read_journal(path)) == [{"key": 1, "text": text, text[:20]: 1}, {"key": 2}]
    assert data.isascii()
    assert data.count(b"\n") == 2
    assert len(data.decode("ascii").splitlines()) == 2


def test_without_ascii_the_same_text_breaks_readers_or_is_lost():
    """The twin: what the historical way of writing does to this text."""
    as_text = json.dumps({"text": TORTURE["line separator"]}, ensure_ascii=False)
    assert len(as_text.splitlines()) > 1
    with pytest.raises(UnicodeEncodeError):
        json.dumps(TORTURE["lone surrogate"], ensure_ascii=False).encode()


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


# --- cuts and damage --------------------------------------------------------------------------------------------


def test_cut_at_every_byte_the_exact_prefix_is_recovered_and_the_next_row_starts_a_line(tmp_path):
    appends = [{"key": 0}, {"key": 1, "text": "\u2028"}, numbered(2, 5), {"key": 5}]
    data = written(tmp_path / "whole.jsonl", *appends)
    ends = [i + 1 for i, byte in enumerate(data) if byte == 0x0A]
    whole_after = {0: 0, ends[0]: 1, ends[1]: 2, ends[4]: 5, ends[5]: 6}  # the three rows count together
    path = tmp_path / "cut.jsonl"
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        end = max(e for e in whole_after if e <= size)
        expected = list(range(whole_after[end]))
        assert keys(path) == expected, size
        assert path.stat().st_size == size, "a reader must not change the file"
        recovered = []
        with Journal.open(path, on_row=recovered.append) as journal:
            assert [row["key"] for row in recovered] == expected, size
            assert (journal.num_recovered, journal.cut_bytes) == (len(expected), size - end)
            assert path.read_bytes() == data[:end]
            if size % 7 == 0:  # an fsync each
                journal.append_sync({"key": 99})
        assert keys(path) == expected + [99] * (size % 7 == 0), size


def test_without_cutting_the_next_row_is_lost_with_the_torn_one(tmp_path):
    """The twin: append after a torn tail."""
    path = tmp_path / "results.jsonl"
    data = written(path, {"key": 0}, {"key": 1})
    path.write_bytes(data[:-5])
    with open(path, "ab") as file:
        file.write(data.split(b"\n")[0] + b"\n")
    with pytest.raises(JournalError):
        keys(path)


def test_rows_appended_one_by_one_are_not_recovered_together(tmp_path):
    """The twin of the group in the cut test: three separate appends leave two of three."""
    path = tmp_path / "results.jsonl"
    path.write_bytes(written(path, *numbered(0, 3))[:-1])
    assert keys(path) == [0, 1]
    path.unlink()
    path.write_bytes(written(path, numbered(0, 3))[:-1])
    assert keys(path) == []


def test_every_flipped_byte_is_found_with_its_line_and_the_file_is_left_alone(tmp_path):
    path = tmp_path / "results.jsonl"
    data = written(path, {"key": 0, "n": 1234}, numbered(1, 3), {"key": 3})
    last_line = data[:-1].rindex(b"\n") + 1
    for at in range(last_line):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(JournalError, match=r"results\.jsonl:\d") as raised:
            Journal.open(path)
        assert raised.value.line == data[:at].count(b"\n") + 1
        assert raised.value.exit_code == 3
        with pytest.raises(JournalError):
            keys(path)
        assert path.read_bytes() == damaged


def test_without_the_checksum_a_flipped_digit_is_read_as_another_number(tmp_path):
    """The twin."""
    data = written(tmp_path / "results.jsonl", {"key": 0, "n": 1234})
    damaged = data.replace(b"1234", b"1235")
    assert json.loads(damaged)["n"] == 1235


def test_a_row_missing_from_a_write_in_the_middle_is_damage(tmp_path):
    path = tmp_path / "results.jsonl"
    lines = written(path, numbered(0, 3), {"key": 3}).splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1] + lines[2:]))
    with pytest.raises(JournalError, match=r"results\.jsonl:2"):
        Journal.open(path)


# --- failing disks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", FAILPOINTS)
@pytest.mark.parametrize("fault", ["raise", "ENOSPC"])
async def test_after_one_failed_write_or_fsync_nothing_more_is_taken_and_the_acknowledged_stay(tmp_path, place, fault):
    path = tmp_path / "results.jsonl"
    with armed(f"{place}:3:{fault}"), Journal.open(path) as journal:
        await journal.append({"key": 0})
        await journal.append(numbered(1, 3))
        for key in (3, 4):  # the fault happens once; a second fsync would succeed and promise what it cannot know
            with pytest.raises(JournalError, match="acknowledged") as raised:
                await journal.append({"key": key})
            assert isinstance(raised.value.__cause__, OSError)
        with pytest.raises(JournalError):
            journal.append_sync({"key": 5})
        assert keys(path) == [0, 1, 2]
    with Journal.open(path) as journal:
        await journal.append({"key": 3})
    assert keys(path) == [0, 1, 2, 3]


async def test_without_the_fault_the_same_rows_are_taken(tmp_path):
    """The twin: the check above can fail."""
    with armed("journal.after_write:9:raise"), Journal.open(tmp_path / "results.jsonl") as journal:
        for key in range(4):
            await journal.append({"key": key})
    assert keys(tmp_path / "results.jsonl") == [0, 1, 2, 3]


FULL_DISK = """
import resource, sys
from verifiers.errors import JournalError
from verifiers.journal import Journal
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
with Journal.open(sys.argv[1]) as journal:
    for key in range(1000):
        try:
            journal.append_sync({"key": key, "text": "x" * 300})
        except JournalError as error:
            print("stopped", error.exit_code)
            break
        print(key)
"""


def test_on_a_full_disk_every_acknowledged_row_is_readable(tmp_path):
    """A real short write: the system takes part of a row, then refuses the rest."""
    path = tmp_path / "results.jsonl"
    ended = run_child(FULL_DISK, path)
    assert ended.lines[-1] == "stopped 3", ended.stderr
    assert list(map(str, keys(path))) == ended.lines[:-1]
    assert len(ended.lines) > 20
    assert path.read_bytes().endswith(b"\n")


# --- kills ------------------------------------------------------------------------------------------------------

WORKERS = """
import asyncio, sys
from verifiers.journal import Journal
path, plan, num_workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

async def worker(journal, owed):
    for key in owed:
        row = {"key": key, "text": "long" * 500}
        await journal.append(row)
        print(key)

async def main():
    durable = set()
    with Journal.open(path, on_row=lambda row: durable.add(row["key"])) as journal:
        owed = iter([key for key in range(plan) if key not in durable])
        await asyncio.gather(*(worker(journal, owed) for _ in range(num_workers)))
    print("complete")

asyncio.run(main())
"""


def run_with_kills(path, kills, plan=200, num_workers=16):
    """Run the plan to its end through ``kills``; every acknowledgement must be kept and given once."""
    acknowledged = Counter()
    for kill in [*kills, {}]:
        ended = run_child(WORKERS, path, plan, num_workers, **kill)
        acknowledged.update(map(int, (line for line in ended.lines if line != "complete")))
        found = Counter(keys(path)) if path.exists() else Counter()
        assert not acknowledged.keys() - found.keys(), "acknowledged, and not on disk"
        assert not kill or ended.killed or ended.lines[-1] == "complete", ended.stderr
        if kill.get("failpoint"):
            assert ended.killed, ended.stderr
    assert ended.lines[-1] == "complete", ended.stderr
    assert found == Counter(range(plan)), "each row once"
    assert set(acknowledged.values()) <= {1}, "done again although acknowledged"


@pytest.mark.parametrize("place", [*FAILPOINTS, "journal.open", "journal.finish"])
def test_killed_at_a_failpoint_the_run_resumes_without_loss_or_repetition(tmp_path, place):
    at_pass = 3 if place in FAILPOINTS else 1
    run_with_kills(tmp_path / "results.jsonl", [{"failpoint": f"{place}:{at_pass}"}])


def test_killed_at_random_times_the_run_resumes_without_loss_or_repetition(tmp_path):
    draw = random.Random(7)
    run_with_kills(tmp_path / "results.jsonl", [{"kill_after_lines": draw.randint(1, 40)} for _ in range(4)])


@pytest.mark.slow
def test_killed_at_random_times_many_rounds(tmp_path):
    draw = random.Random(11)
    kills = [{"kill_after_lines": draw.randint(1, 80)} for _ in range(25)]
    run_with_kills(tmp_path / "results.jsonl", kills, plan=3000, num_workers=64)


ACKNOWLEDGES_TOO_EARLY = WORKERS.replace("await journal.append(row)", "asyncio.ensure_future(journal.append(row))")


def test_without_waiting_for_the_disk_a_kill_loses_acknowledged_rows(tmp_path):
    """The twin: print before the append returns, and the same kill loses rows."""
    path = tmp_path / "results.jsonl"
    ended = run_child(ACKNOWLEDGES_TOO_EARLY, path, 200, 16, failpoint="journal.before_write:1")
    assert ended.killed
    assert ended.lines
    assert keys(path) == []


# --- one writer, many readers -----------------------------------------------------------------------------------


def test_a_second_opener_is_refused_and_the_first_goes_on(tmp_path):
    path = tmp_path / "results.jsonl"
    with Journal.open(path) as journal:
        with pytest.raises(RunBusy, match="being written by") as raised:
            Journal.open(path)
        assert raised.value.exit_code == 2
        journal.append_sync({"key": 0})
        with open(path, "ab"):  # the twin: without the lock nothing stops a second writer
            pass
    with Journal.open(path) as journal:
        journal.append_sync({"key": 1})
    assert keys(path) == [0, 1]


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
    """The twin: flock alone outlives its owner in a child."""
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


# --- concurrency ------------------------------------------------------------------------------------------------


async def test_1024_writers_each_get_their_acknowledgement_and_share_the_fsyncs(tmp_path, monkeypatch):
    path, commits = tmp_path / "results.jsonl", []
    monkeypatch.setattr("verifiers.journal.sync_file", lambda fd: (commits.append(fd), os.fdatasync(fd)))

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
        threads = [threading.Thread(target=lambda n=n: asyncio.run(append_some(n * 50))) for n in range(3)]
        threads.append(threading.Thread(target=lambda: [journal.append_sync({"key": key}) for key in range(150, 200)]))
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


# --- opening and closing ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("spec", ["journal.open", "journal.open:0", "journal.open:x", ":1", "journal.open:1:EWHAT"])
def test_a_misspelt_failpoint_is_refused(spec):
    with pytest.raises(ConfigError, match="VF_FAILPOINT"), armed(spec):
        pass
