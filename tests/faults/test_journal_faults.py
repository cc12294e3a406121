"""Promise: a row acknowledged is on disk. It survives kill -9, a torn tail, a full disk; damage is
found, never read.

The journal alone, as every run uses it; whole runs are in ``test_resume.py``.
"""

import json
import os
import random
import shutil
from collections import Counter
from contextlib import ExitStack

import pytest

import verifiers as vf
from support.small_envs import single_turn
from verifiers.errors import JournalError, RunBusy
from verifiers.runtime.failpoints import armed
from verifiers.storage.journal import Journal, read_journal
from verifiers.testing import ScriptedClient

FAILPOINTS = "journal.before_write journal.after_write journal.after_fsync".split()


def keys(path):
    return [row["key"] for row in read_journal(path)]


def written(path, *appends):
    with Journal.open(path) as journal:
        for rows in appends:
            journal.append_sync(rows)
    return path.read_bytes()


def numbered(start, stop):
    return [{"key": key} for key in range(start, stop)]


# --- hostile text ---------------------------------------------------------------------------------


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


def test_a_model_that_says_such_text_is_saved_and_read_back_word_for_word(tmp_path):
    texts = list(TORTURE.values())
    client = ScriptedClient(lambda request: texts[int(request.prompt[-1]["content"].split()[0])])
    single_turn(len(texts)).evaluate(client, "m", results_path=tmp_path)
    assert [c[-1]["content"] for c in vf.load_results(tmp_path)["completions"]] == texts


def test_a_metric_that_is_no_number_is_a_scoring_error_and_null_on_disk(tmp_path):
    def broken(completion):
        return float("nan")

    rubric = vf.Rubric(funcs=[broken, lambda answer: 1.0], weights=[0.0, 1.0])
    results = single_turn(1, rubric=rubric).evaluate(
        ScriptedClient("x"), "m", results_path=tmp_path
    )
    assert (results["errors"][0].error, results["errors"][0].where) == ("ScoringError", "broken")
    (row,) = read_journal(tmp_path / "results.jsonl")
    assert row["metrics"]["broken"] is None
    assert b"NaN" not in (tmp_path / "results.jsonl").read_bytes()


def test_without_the_check_a_metric_that_is_no_number_is_no_json():
    """Negative control: Python writes what other readers refuse."""
    assert json.dumps({"metric": float("nan")}) == '{"metric": NaN}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        json.dumps({"metric": float("nan")}, allow_nan=False)


def test_without_ascii_the_same_text_breaks_readers_or_is_lost():
    """Negative control: what the historical way of writing does to this text."""
    as_text = json.dumps({"text": TORTURE["line separator"]}, ensure_ascii=False)
    assert len(as_text.splitlines()) > 1
    with pytest.raises(UnicodeEncodeError):
        json.dumps(TORTURE["lone surrogate"], ensure_ascii=False).encode()


# --- cuts and damage ------------------------------------------------------------------------------


def test_cut_at_every_byte_the_exact_prefix_is_recovered_and_the_next_row_starts_a_line(tmp_path):
    appends = [{"key": 0}, {"key": 1, "text": "\u2028"}, numbered(2, 5), {"key": 5}]
    data = written(tmp_path / "whole.jsonl", *appends)
    ends = [i + 1 for i, byte in enumerate(data) if byte == 0x0A]
    # the three rows count together
    whole_after = {0: 0, ends[0]: 1, ends[1]: 2, ends[4]: 5, ends[5]: 6}
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
    """Negative control: append after a torn tail."""
    path = tmp_path / "results.jsonl"
    data = written(path, {"key": 0}, {"key": 1})
    path.write_bytes(data[:-5])
    with open(path, "ab") as file:
        file.write(data.split(b"\n")[0] + b"\n")
    with pytest.raises(JournalError):
        keys(path)


def test_rows_appended_one_by_one_are_not_recovered_together(tmp_path):
    """Negative control of the group in the cut test: three separate appends leave two of three."""
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
    """Negative control."""
    data = written(tmp_path / "results.jsonl", {"key": 0, "n": 1234})
    damaged = data.replace(b"1234", b"1235")
    assert json.loads(damaged)["n"] == 1235


def test_a_row_missing_from_a_write_in_the_middle_is_damage(tmp_path):
    path = tmp_path / "results.jsonl"
    lines = written(path, numbered(0, 3), {"key": 3}).splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1] + lines[2:]))
    with pytest.raises(JournalError, match=r"results\.jsonl:2"):
        Journal.open(path)


# --- failing disks --------------------------------------------------------------------------------


@pytest.mark.parametrize("failpoint", FAILPOINTS)
@pytest.mark.parametrize("fault", ["raise", "ENOSPC"])
async def test_after_one_failed_write_or_fsync_nothing_more_is_taken_and_the_acknowledged_stay(
    tmp_path, failpoint, fault
):
    path = tmp_path / "results.jsonl"
    with armed(f"{failpoint}:3:{fault}"), Journal.open(path) as journal:
        await journal.append({"key": 0})
        await journal.append(numbered(1, 3))
        # the fault happens once; a second fsync would succeed and promise what it cannot know
        for key in (3, 4):
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
    """Negative control: the check above can fail."""
    with armed("journal.after_write:9:raise"), Journal.open(tmp_path / "results.jsonl") as journal:
        for key in range(4):
            await journal.append({"key": key})
    assert keys(tmp_path / "results.jsonl") == [0, 1, 2, 3]


async def test_a_failed_fsync_is_never_asked_again(tmp_path, monkeypatch):
    """After EIO the kernel forgets the dirty pages: a second fsync says yes, and the bytes are not
    there."""
    asked = []

    def third_fails(fd):
        asked.append(fd)
        if len(asked) == 3:
            raise OSError(5, "Input/output error")
        os.fdatasync(fd)

    path = tmp_path / "results.jsonl"
    with Journal.open(path) as journal:
        monkeypatch.setattr("verifiers.storage.journal.sync_file", third_fails)
        await journal.append({"key": 0})
        await journal.append({"key": 1})
        for key in (2, 3):
            with pytest.raises(JournalError, match="Input/output error") as caught:
                await journal.append({"key": key})
        assert caught.value.exit_code == 3
        assert len(asked) == 3
    assert keys(path) == [0, 1]
    with open(path) as again:
        third_fails(again.fileno())  # negative control: who asks again is told that all is well


FULL_DISK = """
import resource, sys
from verifiers.errors import JournalError
from verifiers.storage.journal import Journal
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


def test_on_a_full_disk_every_acknowledged_row_is_readable(warm, tmp_path):
    """A real short write: the system takes part of a row, then refuses the rest."""
    path = tmp_path / "results.jsonl"
    ended = warm.run(FULL_DISK, path)
    assert ended.lines[-1] == "stopped 3", ended.stderr
    assert list(map(str, keys(path))) == ended.lines[:-1]
    assert len(ended.lines) > 20
    assert path.read_bytes().endswith(b"\n")


# --- kills ----------------------------------------------------------------------------------------

WORKERS = """
import asyncio, sys
from verifiers.storage.journal import Journal
path, plan, num_workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

async def worker(journal, pending):
    for key in pending:
        row = {"key": key, "text": "long" * 500}
        await journal.append(row)
        print(key)

async def main():
    durable = set()
    with Journal.open(path, on_row=lambda row: durable.add(row["key"])) as journal:
        pending = iter([key for key in range(plan) if key not in durable])
        await asyncio.gather(*(worker(journal, pending) for _ in range(num_workers)))
    print("complete")

asyncio.run(main())
"""


def run_with_kills(warm, path, kills, plan=200, num_workers=16):
    """Run the plan to its end through ``kills``; every acknowledgement must be kept
    and given once."""
    acknowledged = Counter()
    for kill in [*kills, {}]:
        ended = warm.run(WORKERS, path, plan, num_workers, **kill)
        acknowledged.update(map(int, (line for line in ended.lines if line != "complete")))
        counts = Counter(keys(path)) if path.exists() else Counter()
        assert not acknowledged.keys() - counts.keys(), "acknowledged, and not on disk"
        assert not kill or ended.killed or ended.lines[-1] == "complete", ended.stderr
        if kill.get("failpoint"):
            assert ended.killed, ended.stderr
    assert ended.lines[-1] == "complete", ended.stderr
    assert counts == Counter(range(plan)), "each row once"
    assert set(acknowledged.values()) <= {1}, "done again although acknowledged"


@pytest.mark.parametrize("failpoint", [*FAILPOINTS, "journal.open", "journal.finish"])
def test_killed_at_a_failpoint_the_run_resumes_without_loss_or_repetition(
    warm, tmp_path, failpoint
):
    at_pass = 3 if failpoint in FAILPOINTS else 1
    run_with_kills(warm, tmp_path / "results.jsonl", [{"failpoint": f"{failpoint}:{at_pass}"}])


def test_killed_at_random_times_the_run_resumes_without_loss_or_repetition(warm, tmp_path):
    draw = random.Random(7)
    run_with_kills(
        warm,
        tmp_path / "results.jsonl",
        [{"kill_after_lines": draw.randint(1, 40)} for _ in range(4)],
    )


@pytest.mark.slow
def test_killed_at_random_times_many_rounds(warm, tmp_path):
    draw = random.Random(11)
    kills = [{"kill_after_lines": draw.randint(1, 80)} for _ in range(25)]
    run_with_kills(warm, tmp_path / "results.jsonl", kills, plan=3000, num_workers=64)


ACKNOWLEDGES_TOO_EARLY = WORKERS.replace(
    "await journal.append(row)", "asyncio.ensure_future(journal.append(row))"
)


def test_without_waiting_for_the_disk_a_kill_loses_acknowledged_rows(warm, tmp_path):
    """Negative control: print before the append returns, and the same kill loses rows."""
    path = tmp_path / "results.jsonl"
    ended = warm.run(ACKNOWLEDGES_TOO_EARLY, path, 200, 16, failpoint="journal.before_write:1")
    assert ended.killed
    assert ended.lines
    assert keys(path) == []


# --- one writer


def test_a_second_opener_is_refused_and_the_first_goes_on(tmp_path):
    path = tmp_path / "results.jsonl"
    with Journal.open(path) as journal:
        with pytest.raises(RunBusy, match="being written by") as raised:
            Journal.open(path)
        assert raised.value.exit_code == 2
        journal.append_sync({"key": 0})
    with Journal.open(path) as journal:
        journal.append_sync({"key": 1})
    assert keys(path) == [0, 1]


def test_without_the_lock_two_writers_do_the_same_row_twice(tmp_path, monkeypatch):
    """Negative control."""
    monkeypatch.setattr("verifiers.storage.files.fcntl.flock", lambda *_: None)
    path = tmp_path / "results.jsonl"
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(Journal.open(path)).append_sync({"key": 0})
    assert keys(path) == [0, 0]


# --- other programs -------------------------------------------------------------------------------


def deleted(path):
    path.unlink()


def replaced(path):
    os.replace(path, path.with_name("moved"))
    path.write_bytes(b"")


def cut(path):
    os.truncate(path, 10)


def write_around(path, fault, last=True):
    with Journal.open(path) as journal:
        journal.append_sync(numbered(0, 3))
        fault()
        if not last:
            journal.append_sync({"key": 3})


@pytest.mark.parametrize("last", [False, True], ids=["in the middle", "after the last row"])
@pytest.mark.parametrize("fault", [deleted, replaced, cut])
def test_a_journal_that_another_program_takes_away_is_an_error(tmp_path, fault, last):
    path = tmp_path / "results.jsonl"
    with pytest.raises(JournalError, match=f"{path} was {fault.__name__}"):
        write_around(path, lambda: fault(path), last)
    if fault is deleted:
        assert keys(path) == [0, 1, 2]
        with Journal.open(path) as journal:
            assert journal.num_recovered == 3


def test_a_journal_whose_folder_is_gone_is_an_error(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(JournalError, match=r"was deleted by another program .*No such file"):
        write_around(folder / "results.jsonl", lambda: shutil.rmtree(folder))


SCORED, TO_DELETE = [], []


def deletes(state):
    if len(SCORED) == 2:
        TO_DELETE.pop().unlink()
    SCORED.append(state["example_id"])
    return 1.0


def test_a_run_whose_journal_is_deleted_ends_with_an_error_and_continues_with_every_row(tmp_path):
    """It ended as complete, with results that no file had."""
    path = tmp_path / "run" / "results.jsonl"
    TO_DELETE.append(path)
    env = single_turn(4, rubric=vf.Rubric(funcs=[deletes]))
    options = {"results_path": path.parent, "max_concurrent": 1}
    with pytest.raises(JournalError, match="it was written again with every acknowledged row"):
        env.evaluate(ScriptedClient("x"), "m", **options)
    results = env.evaluate(ScriptedClient("x"), "m", **options)
    assert len(results.outputs) == 4
    assert len({row["example_id"] for row in read_journal(path)}) == 4
    assert len(SCORED) == 5  # the third was not acknowledged, and is scored again
