"""The results of a large run, which are not held: equal to those in memory, from whatever the
folder holds."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import random
import shutil
import threading
import time
import tracemalloc
from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest

import verifiers as vf
from support.small_envs import add_one, exact, sums
from verifiers.errors import JournalError, ModelUnavailable
from verifiers.results import GenerateOutputs, index_file, load_results, loading, stored
from verifiers.results.columns import Column
from verifiers.results.index import RowIndex
from verifiers.results.index_file import INDEX_NAME, IndexFile
from verifiers.results.stored import StoredOutputs
from verifiers.runs.entry import NUM_SAMPLED
from verifiers.storage.journal import read_journal
from verifiers.testing import ScriptedClient

SIBLINGS = 2


def length(completions):
    """A group function."""
    return [float(len(completions))] * len(completions)


def model(failing=(), wrong=()):
    """Adds one, except to ``wrong``; fails at ``failing``."""

    def answer(request):
        number = int(request.prompt[-1]["content"].split()[0])
        if number in failing:
            raise ModelUnavailable("down")
        return "0" if number in wrong else str(number + 1)

    return ScriptedClient(answer)


def environment(count=8, grouped=False, reverse=False):
    rows = sums(count)[::-1] if reverse else sums(count)
    return vf.SingleTurnEnv(
        dataset=rows, rubric=vf.Rubric(funcs=[exact, length] if grouped else [exact])
    )


def evaluate(folder, env, client, is_large, part_rows=5, **options):
    """A saved run whose rollouts are, or are not, held."""
    with pytest.MonkeyPatch.context() as patch:
        if is_large:
            patch.setattr("verifiers.runs.store.LARGE_PLAN", 0)
            patch.setattr("verifiers.data.examples.MAX_HELD", 0)
            patch.setattr("verifiers.runs.large_store.PART_ROWS", part_rows)
            patch.setattr("verifiers.runs.large_store.READ_EVERY", 2)
            patch.setattr("verifiers.runs.large_store.NUM_COMPARED", 3)
        results = env.evaluate(
            client,
            "m",
            results_path=folder,
            keep_states=False,
            rollouts_per_example=SIBLINGS,
            **options,
        )
    assert type(results) is (StoredOutputs if is_large else GenerateOutputs)
    return results


def content(results):
    """All of some results that does not depend on the time or the folder."""
    facts = {
        name: v
        for name, v in results.metadata.items()
        if name not in ("date", "time", "time_ms", "path_to_save")
    }
    facts["outside_plan"] = sorted(facts["outside_plan"])
    facts["provenance"] = {
        name: v for name, v in facts["provenance"].items() if name not in ("date", "earlier")
    }
    names = set(results.keys()) - {"states", "timings"}
    columns = {name: str(results[name]) for name in names}
    rollouts = [str({**row, "timing": None}) for row in results.rollouts()]
    summary = {
        name: v
        for name, v in results.summary().items()
        if name not in ("path", "seconds", "latency")
    }
    return {**facts, **summary}, columns, rollouts


@pytest.mark.parametrize("seed", range(8))
def test_a_run_returns_what_it_returns_when_it_holds_its_rollouts(tmp_path, seed):
    """Killed in the middle, with failures to be run again, rows in another order, more or fewer of
    them."""
    chance = random.Random(seed)
    grouped, trajectory = chance.random() < 0.5, ["trajectory"] if chance.random() < 0.5 else []
    options = {"retry_errors": chance.random() < 0.5, "state_columns": trajectory}
    options["independent_scoring"] = not grouped and chance.random() < 0.3
    wrong, failing = ({chance.randrange(12) for _ in range(3)} for _ in range(2))
    sessions = [chance.choice((4, 8, 12)) for _ in range(3)]
    folders = [tmp_path / "held", tmp_path / "large"]
    # of the earlier sessions, equal for both folders
    kinds = [chance.random() < 0.5 for _ in sessions[:-1]]
    for number, count in enumerate(sessions[:-1]):
        client = model(failing if number == 0 else (), wrong)
        evaluate(folders[0], environment(count, grouped), client, kinds[number], **options)
    shutil.copytree(*folders)
    client = [model(failing if options["retry_errors"] else (), wrong) for _ in folders]
    last = environment(sessions[-1], grouped, reverse=chance.random() < 0.5)
    held, large = (
        evaluate(folder, last, client[is_large], bool(is_large), **options)
        for is_large, folder in enumerate(folders)
    )
    assert len(client[0].requests) == len(client[1].requests)
    assert content(large) == content(held)
    assert "outputs" not in vars(large), "something read all rollouts"
    assert [str({**row, "timing": None}) for row in large.outputs] == content(held)[2]
    assert large.at(-1)["answer"] == held.at(-1)["answer"]


def saved_run(folder):
    """A finished run with a kept index."""
    results = evaluate(folder, environment(), model(failing={3}, wrong={1}), is_large=True)
    assert (folder / INDEX_NAME).exists()
    return results


def resumed(folder, count=8):
    """The results of a finished run, and how many model calls resuming it made."""
    client = model()
    return evaluate(folder, environment(count), client, is_large=True, retry_errors=False), len(
        client.requests
    )


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def of_another_run(file):
    saved_run(file.parent / "other")
    shutil.copy(file.parent / "other" / INDEX_NAME, file)


BREAK = {
    "absent": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "flipped": flip,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "another": of_another_run,
    "older": lambda file: file.write_bytes(
        b'{"format":3,"rows":8,"bytes":100,"crc32":1}\n' + bytes(999)
    ),
    "sealed otherwise": lambda file: file.write_bytes(
        file.read_bytes().replace(b"reward", b"rewarD")
    ),
}


@pytest.mark.parametrize("how", BREAK)
def test_an_index_that_does_not_fit_is_not_used_and_written_anew(tmp_path, how):
    before = saved_run(tmp_path)
    BREAK[how](tmp_path / INDEX_NAME)
    results, calls = resumed(tmp_path)
    assert calls == 0
    assert content(results)[1:] == content(before)[1:]
    content_before = (tmp_path / INDEX_NAME).read_bytes()
    resumed(tmp_path)
    assert (tmp_path / INDEX_NAME).read_bytes() == content_before


def test_a_fitting_index_is_used_and_what_came_later_is_read(tmp_path, monkeypatch):
    saved_run(tmp_path)
    evaluate(tmp_path, environment(10), model(), is_large=False)  # the index does not have these
    read = []
    add = index_file.RowIndex._add
    monkeypatch.setattr(
        index_file.RowIndex,
        "_add",
        lambda index, body, end: (read.append(body), add(index, body, end)),
    )
    results, calls = resumed(tmp_path, 10)
    assert (calls, len(results)) == (0, 20)
    assert len(read) == len(list(read_journal(tmp_path / "results.jsonl"))) - 16


@pytest.mark.parametrize("is_indexed", [True, False])
def test_a_line_that_was_damaged_since_is_found(tmp_path, monkeypatch, is_indexed):
    saved_run(tmp_path)
    if not is_indexed:
        (tmp_path / INDEX_NAME).unlink()
    file = tmp_path / "results.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(
        b"".join([*lines[:2], lines[2].replace(b"assistant", b"assistent"), *lines[3:]])
    )
    before = file.read_bytes()
    with pytest.raises(JournalError, match=r"results.jsonl:3"):
        resumed(tmp_path)
    assert file.read_bytes() == before
    monkeypatch.setattr(loading, "LARGE_BYTES", 0)
    with pytest.raises(JournalError, match=r"results.jsonl:3"):
        load_results(tmp_path)


def test_a_journal_that_lost_its_end_is_run_again_there(tmp_path):
    saved_run(tmp_path)
    file = tmp_path / "results.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-3]) + b'{"example_id"')
    results, calls = resumed(tmp_path)
    assert (calls, len(results)) == (3, 16)
    assert len({row["rollout_key"] for row in read_journal(file)}) == 16


@pytest.mark.parametrize(
    ("part_rows", "num_read"), [(4, 2), (100, 14)]
)  # the second: the negative control
def test_an_index_is_used_as_far_as_the_journal_still_has_what_it_covers(
    tmp_path, monkeypatch, part_rows, num_read
):
    before = content(evaluate(tmp_path, environment(), model(), is_large=True, part_rows=part_rows))
    file = tmp_path / "results.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-2]))
    read, add, client = [], index_file.RowIndex._add, model()
    monkeypatch.setattr(
        index_file.RowIndex,
        "_add",
        lambda index, body, end: (read.append(body), add(index, body, end)),
    )
    results = evaluate(tmp_path, environment(), client, is_large=True, part_rows=part_rows)
    # the two new ones are indexed as well
    assert (len(read), len(client.requests)) == (num_read + 2, 2)
    assert content(results)[1:] == before[1:]
    assert len(index_file.open_index(file)) == 16
    assert len(read) == num_read + 2, "the index was not kept"


def test_an_index_is_kept_while_the_run_goes_on(tmp_path, monkeypatch):
    """So that a killed run has it: this one is copied in the middle."""
    copies = []

    def copy(*_):
        copies.append(tmp_path / f"copy-{len(copies)}")
        shutil.copytree(tmp_path / "run", copies[-1])

    finished = evaluate(
        tmp_path / "run",
        environment(),
        model(),
        True,
        part_rows=4,
        on_progress=copy,
        max_concurrent=1,
    )
    sizes = [
        (each / INDEX_NAME).stat().st_size if (each / INDEX_NAME).exists() else 0 for each in copies
    ]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 5  # none, and one to four parts of four
    read, add = [], index_file.RowIndex._add
    monkeypatch.setattr(
        index_file.RowIndex,
        "_add",
        lambda index, body, end: (read.append(body), add(index, body, end)),
    )
    results = evaluate(copies[13], environment(), model(), True, part_rows=4)
    assert len(read) == 16 - 12
    assert content(results)[1:] == content(finished)[1:]


def test_results_do_not_change_with_the_kept_index(tmp_path):
    def numbers():
        measured = results.measurements()
        return [
            list(measured.rewards),
            list(measured.total_ms),
            list(results._index.columns["sibling"]),
        ]

    results, index = saved_run(tmp_path), tmp_path / INDEX_NAME
    before = str(numbers())
    index.write_bytes(bytes(index.stat().st_size))
    assert str(numbers()) == before
    index.unlink()
    assert str(numbers()) == before


@pytest.mark.parametrize("seed", range(4))
def test_rollouts_that_finish_in_any_order_are_found_again(tmp_path, seed):
    """More of them are out of order than keys are compared at a time; some workers are slow, and it
    is interrupted."""
    chance = random.Random(seed)

    async def answer(request):
        await asyncio.sleep(chance.choice([0, 0, 0.02]))
        number = int(request.prompt[-1]["content"].split()[0])
        if number == 20 and seed % 2:
            raise KeyboardInterrupt
        return str(number + 1)

    options, client = {"max_concurrent": 30}, ScriptedClient(answer)
    if seed % 2:
        with pytest.raises(KeyboardInterrupt):
            evaluate(tmp_path, environment(24), client, True, **options)
    results = evaluate(tmp_path, environment(24), model() if seed % 2 else client, True, **options)
    lines = [row["example_id"] for row in read_journal(tmp_path / "results.jsonl")]
    assert lines != sorted(lines)
    assert results["example_ids"] == [number for number in range(24) for _ in range(SIBLINGS)]
    assert [row["answer"] for row in results.rollouts()] == [
        str(n + 1) for n in range(24) for _ in range(SIBLINGS)
    ]


@pytest.mark.parametrize("is_mended", [True, False])
def test_an_index_that_cannot_be_written_is_said_once(tmp_path, caplog, is_mended):
    """A link in its place refuses each write, as a full disk does; what is not written stays in
    memory."""
    seen = []

    def link(*_):
        seen.append(1)
        if len(seen) == 1:
            (tmp_path / INDEX_NAME).symlink_to(tmp_path / "elsewhere")
        elif len(seen) == 12 and is_mended:
            (tmp_path / INDEX_NAME).unlink()

    results = evaluate(
        tmp_path, environment(), model(), True, part_rows=4, on_progress=link, max_concurrent=1
    )
    said = [record.getMessage() for record in caplog.records if "index" in record.getMessage()]
    assert [text.split(": ")[0].removeprefix(str(tmp_path)) for text in said] == [
        "/results.jsonl has no whole index, so it resumes slowly",
        "/results.jsonl has a whole index again",
    ][: 1 + is_mended]
    (tmp_path / INDEX_NAME).unlink()
    assert content(resumed(tmp_path)[0])[1:] == content(results)[1:]


def test_names_that_come_late_are_in_the_kept_index(tmp_path):
    evaluate(tmp_path, environment(), model(failing={5}), True, part_rows=4, max_concurrent=1)
    evaluate(tmp_path, environment(10), model(failing={9}), True, part_rows=4, max_concurrent=1)
    kept = index_file.open_index(tmp_path / "results.jsonl")
    (tmp_path / INDEX_NAME).unlink()
    read = index_file.open_index(tmp_path / "results.jsonl")
    for loaded, expected in (
        (kept.columns, read.columns),
        (kept.metrics, read.metrics),
        (kept.usage, read.usage),
    ):
        assert {name: str(list(values)) for name, values in loaded.items()} == {
            n: str(list(v)) for n, v in expected.items()
        }
    assert set(kept.columns["error"]) == {None, "ModelUnavailable"}


def test_a_line_without_a_key_is_refused(tmp_path):
    from verifiers.storage.journal import Journal

    saved_run(tmp_path)
    with Journal.open(tmp_path / "results.jsonl") as journal:
        journal.append_sync({"example_id": 1, "prompt": "q", "completion": "a", "reward": 0.0})
    with pytest.raises(JournalError, match=r"results.jsonl:17: .*no rollout_key"):
        resumed(tmp_path)


def test_the_rollouts_of_a_large_run_are_not_held(tmp_path):
    long = ScriptedClient(lambda request: request.prompt[-1]["content"] * 5_000)

    def growth(is_large):
        tracemalloc.start()
        results = evaluate(tmp_path / str(is_large), environment(50), long, is_large)
        assert results["rewards"] == [0.0] * 100
        long.requests.clear()  # each holds its state
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return held

    growth(True)  # imports, caches
    shutil.rmtree(tmp_path)
    # the negative control holds the texts
    assert growth(True) < 1_000_000 < 1_500_000 < growth(False)


def test_resuming_formats_each_row_once_and_holds_none(tmp_path):
    def counted():
        formatted = []
        env = environment(100)
        env.eval_table._store.row_format = replace(
            env.eval_table.row_format, default_task=lambda: formatted.append(1) or "default"
        )
        return env, formatted

    evaluate(tmp_path, environment(100), model(), is_large=True)
    env, formatted = counted()
    results = evaluate(tmp_path, env, model(), is_large=True)
    assert len(results) == 200
    # a few are read again, to see what the data lack
    assert 100 <= len(formatted) <= 100 + NUM_SAMPLED + 1
    assert env.eval_table._store._examples == []
    assert results.rollout(7, 1).answer == "8"


def test_rows_of_equal_content_have_the_same_keys_when_they_are_not_held(tmp_path):
    rows = [{"question": "1 + 1", "answer": "2"}, {"question": "3 + 1", "answer": "4"}] * 3
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[exact]))
    evaluate(tmp_path, env, model(), is_large=False)
    again = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[exact]))
    client = model()
    results = evaluate(tmp_path, again, client, is_large=True)
    assert (len(results), len(client.requests), results.metadata.outside_plan) == (12, 0, [])
    assert len({row["rollout_key"] for row in read_journal(tmp_path / "results.jsonl")}) == 12


def test_an_index_that_covers_the_journal_is_not_written_again(tmp_path):
    saved_run(tmp_path)
    before = (tmp_path / INDEX_NAME).stat()
    resumed(tmp_path)
    after = (tmp_path / INDEX_NAME).stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ino,
    )
    evaluate(tmp_path, environment(10), model(), is_large=True)  # negative control
    assert (tmp_path / INDEX_NAME).stat().st_size > before.st_size


def test_one_rollout_is_read_with_the_advantages_of_its_group_alone(tmp_path, monkeypatch):
    results = saved_run(tmp_path)
    computed = []
    centered = stored.centered_advantages
    monkeypatch.setattr(
        stored,
        "centered_advantages",
        lambda rewards: computed.append(len(rewards)) or centered(rewards),
    )
    advantage = results.at(3)["advantage"]
    assert computed == [SIBLINGS]
    assert [str(row["advantage"]) for row in results.rollouts()][3] == str(advantage)
    assert len(computed) == 1 + 8


def test_display_callbacks_of_every_form_are_called(tmp_path):
    seen = []
    evaluate(
        tmp_path,
        environment(2),
        ScriptedClient(add_one),
        True,
        on_progress=lambda *outputs: seen.append(outputs),
    )
    assert sum(len(new) for *_, new, _ in seen) == 4
    assert seen[-1][-1].num_rollouts >= 1


# --- an index that somebody else wrote


def forged(folder):
    """Write an index of the run's journal with other rewards, in the way in which a
    run writes it."""
    index = RowIndex(folder / "results.jsonl")
    index.read()
    index.columns["reward"] = Column("f8", np.full(len(index), 0.7))
    (folder / INDEX_NAME).unlink(missing_ok=True)
    IndexFile(index).append()


@pytest.mark.parametrize("user", ["stranger", "own"])
def test_an_index_of_somebody_else_is_not_believed(tmp_path, monkeypatch, user):
    """Whatever it says, and however well it fits the journal; this user's own is the negative
    control."""
    monkeypatch.setattr(loading, "LARGE_BYTES", 0)
    keys = tmp_path / "own"
    monkeypatch.setattr(index_file, "user_cache_folder", lambda: keys)
    before = content(saved_run(tmp_path / "run"))
    keys = tmp_path / user
    forged(tmp_path / "run")
    keys = tmp_path / "own"
    rewards = load_results(tmp_path / "run").reward
    assert (set(rewards) == {0.7}) == (user == "own")
    if user == "stranger":
        assert str(rewards) == str(load_results(tmp_path / "run")["rewards"])
        assert content(resumed(tmp_path / "run")[0])[1:] == before[1:]
        assert sorted(map(str, load_results(tmp_path / "run").reward)) == sorted(map(str, rewards))


def test_an_index_is_not_believed_for_a_line_that_was_replaced_by_a_valid_line(
    tmp_path, monkeypatch
):
    """Of the same length, and with a checksum that fits."""
    monkeypatch.setattr(loading, "LARGE_BYTES", 0)
    saved_run(tmp_path)
    file = tmp_path / "results.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    body = lines[2][: lines[2].rindex(b',"crc32":')]
    changed = body.replace(b'"reward":1.0', b'"reward":0.5')
    assert changed != body
    lines[2] = b'%b,"crc32":%d}\n' % (changed, crc32(changed))
    file.write_bytes(b"".join(lines))
    assert 0.5 in load_results(tmp_path).reward


@pytest.mark.parametrize("key", [b"", b"x" * 31, None])
def test_without_a_key_of_the_user_no_index_is_believed_or_written(
    tmp_path, monkeypatch, caplog, key
):
    monkeypatch.setattr(loading, "LARGE_BYTES", 0)
    monkeypatch.setattr(index_file, "user_cache_folder", lambda: tmp_path / "cache")
    saved_run(tmp_path / "run")
    (tmp_path / "cache" / index_file.KEY_NAME).unlink()
    if key is not None:
        (tmp_path / "cache" / index_file.KEY_NAME).write_bytes(key)
    index = RowIndex(tmp_path / "run/results.jsonl")
    IndexFile(index).restore()
    assert len(index) == 0
    assert len(load_results(tmp_path / "run")) == 16
    before = (tmp_path / "run" / INDEX_NAME).read_bytes()
    resumed(tmp_path / "run")
    assert ((tmp_path / "run" / INDEX_NAME).read_bytes() == before) == (key is not None)
    assert ("no whole index" in caplog.text) == (key is not None)


def test_a_part_that_claims_more_than_its_rows_is_not_read(tmp_path):
    saved_run(tmp_path)
    file = tmp_path / INDEX_NAME
    end, _, seal = index_file._HEAD.unpack(file.read_bytes()[: index_file._HEAD.size])
    with open(file, "wb") as forged_file:
        forged_file.write(index_file._HEAD.pack(end, 2**34, seal))
        forged_file.truncate(2**34 + 100)  # a sparse file
    tracemalloc.start()
    index = index_file.open_index(tmp_path / "results.jsonl")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == 16
    assert peak < 10_000_000


def test_an_index_of_a_stranger_is_not_read_beyond_its_first_numbers(tmp_path, monkeypatch):
    """Sparse files cost nothing to make, and hours to read: a terabyte of results with its index."""
    keys = tmp_path / "stranger"
    monkeypatch.setattr(index_file, "user_cache_folder", lambda: keys)
    saved_run(tmp_path / "run")
    results, file = tmp_path / "run/results.jsonl", tmp_path / "run" / INDEX_NAME
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / index_file.KEY_NAME).write_bytes(b"k" * 32)
    keys = tmp_path / "own"
    with results.open("r+b") as grown, file.open("wb") as forged_file:
        grown.truncate(2**40)
        forged_file.write(index_file._HEAD.pack(2**40, 2**30, b"s" * 32))
        forged_file.truncate(2**30 + 100)
    tracemalloc.start()
    began = time.process_time()
    index = RowIndex(results)
    IndexFile(index).restore()
    elapsed_s, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == 0
    assert elapsed_s < 0.5
    assert peak < 1_000_000


def test_two_readers_beside_a_writer_see_what_was_durable(tmp_path):
    """Each of them has whole rows of the journal, whether the index has them or not, and never
    fewer than before."""
    seen, is_over = [[0], [0]], threading.Event()

    def read(counts):
        while not is_over.is_set():
            if (tmp_path / "results.jsonl").exists():
                index = index_file.open_index(tmp_path / "results.jsonl")
                assert index.failure is None
                rows = index.rows(range(len(index)))
                assert index.columns["example"][:] == [row["example_id"] for row in rows]
                counts.append(len(index))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read, counts) for counts in seen]
        evaluate(tmp_path, environment(40), model(), True, part_rows=4)
        is_over.set()
        for reader in readers:
            reader.result()
    for counts in seen:
        assert counts == sorted(counts)
        assert len(set(counts)) > 1
