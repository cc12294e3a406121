"""The list of very many runs: few files are opened for its first part, and none of its numbers is
older than a file."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time

import pytest

from support import view_runs
from verifiers.storage.directory import METADATA_NAME
from verifiers.view import describe as describing
from verifiers.view.catalog import FRESH_S, Catalog
from verifiers.view.library import Library
from verifiers.view.listing import MIN_LISTED

opened: list[str] | None = None


def note(event, arguments):
    if opened is not None and event == "open":
        opened.append(str(arguments[0]))


sys.addaudithook(note)


@pytest.fixture
def files_opened():
    """The paths of the files that are opened during the test."""
    global opened
    opened = []
    yield opened
    opened = None


def evaluation(folder, name, reward=0.5, changed=None):
    """The files of an evaluation of another program: saved rollouts and metadata."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "results.jsonl").write_text(
        json.dumps({"example_id": 0, "reward": reward, "metrics": {}}) + "\n"
    )
    (path / METADATA_NAME).write_text(
        json.dumps({"env_id": "sums", "model": "m", "avg_reward": reward})
    )
    if changed is not None:
        os.utime(path, (changed, changed))
    return path


def rewards(part):
    return {run["id"]: run["reward"] for run in part["runs"]}


def test_the_first_part_opens_the_files_of_the_newest_runs_alone(tmp_path, files_opened):
    for number in range(3 * MIN_LISTED):
        evaluation(tmp_path, f"run-{number:03}", changed=1_700_000_000 + number)
    library = Library(Catalog([tmp_path]))
    files_opened.clear()
    first = library.runs(budget_s=0.0)
    newest = [f"run-{number:03}" for number in reversed(range(2 * MIN_LISTED, 3 * MIN_LISTED))]
    assert [run["id"] for run in first["runs"]] == newest
    read = {path.split("/")[-2] for path in files_opened if path.endswith(METADATA_NAME)}
    assert read == set(newest)
    library.runs()  # negative control
    assert len({path for path in files_opened if path.endswith(METADATA_NAME)}) == 3 * MIN_LISTED


def test_a_part_that_was_read_before_has_the_numbers_of_the_files(tmp_path, files_opened):
    evaluation(tmp_path, "a", 0.25), evaluation(tmp_path, "b", 0.25)
    library = Library(Catalog([tmp_path]))
    assert rewards(library.runs()) == {"a": 0.25, "b": 0.25}
    evaluation(tmp_path, "a", 0.75)
    files_opened.clear()
    assert rewards(library.runs()) == {"a": 0.75, "b": 0.25}
    assert {path.split("/")[-2] for path in files_opened if path.endswith(METADATA_NAME)} == {"a"}
    assert library.run("a")["reward"] == 0.75


def test_afterwards_only_changes_are_sent(tmp_path):
    for name in "abc":
        evaluation(tmp_path, name)
    library = Library(Catalog([tmp_path]))
    listed, before = library.runs(), library.version()
    assert (len(listed["runs"]), listed["next"], listed["total"]) == (3, None, 3)
    assert library.version() == before
    assert library.runs(listed["seen"])["runs"] == []

    evaluation(tmp_path, "b", 0.75)
    assert library.version() != before
    changes = library.runs(listed["seen"])
    assert (rewards(changes), changes["gone"]) == ({"b": 0.75}, [])

    shutil.rmtree(tmp_path / "c")
    evaluation(tmp_path, "d", 1.0)
    time.sleep(1.1 * FRESH_S)  # the folders are searched once a second
    changes = library.runs(changes["seen"])
    assert (rewards(changes), changes["gone"]) == ({"d": 1.0}, ["c"])


def test_a_run_that_was_just_made_is_found_by_its_id(tmp_path):
    evaluation(tmp_path, "a")
    catalog = Catalog([tmp_path])
    assert set(catalog.sources()) == {"a"}
    evaluation(tmp_path, "b")
    assert set(catalog.sources()) == {"a"}  # negative control: the list is searched once a second
    time.sleep(0.1)  # a search may take a fifth of the time
    assert catalog.get("b").folder == tmp_path / "b"


def test_changes_counted_by_another_server_are_not_taken_for_those_of_this_one(tmp_path):
    evaluation(tmp_path, "a")
    before = Library(Catalog([tmp_path])).runs()
    after = Library(Catalog([tmp_path])).runs(before["seen"] + 10, generation=before["generation"])
    assert set(rewards(after)) == {"a"}
    assert after["generation"] != before["generation"]


def test_a_running_run_is_looked_at_first_however_many_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr("verifiers.view.listing.SWEEP_S", 0.0)
    for number in range(3 * MIN_LISTED):
        path = evaluation(tmp_path, f"run-{number:03}")
        os.utime(path, (1, 1))
        for file in path.iterdir():
            os.utime(file, (1, 1))
    path = evaluation(tmp_path, "now")
    (path / METADATA_NAME).write_text(json.dumps({"status": "running", "avg_reward": 0.25}))
    library = Library(Catalog([tmp_path]))
    library.runs()
    for number in (1, 2, 3):
        before = library.version()
        (path / METADATA_NAME).write_text(
            json.dumps({"status": "running", "avg_reward": number / 8})
        )
        assert library.version() != before
    evaluation(tmp_path, "run-000", 0.75)
    versions = {str(library.version()) for _ in range(5)}  # the others in turn
    assert len(versions) == 2


@pytest.mark.parametrize("newest", [0, 1, 2])
def test_ids_do_not_depend_on_which_folder_is_found_first(tmp_path, newest):
    folders = [tmp_path / name / "outputs" for name in ("x", "y", "z")]
    for number, folder in enumerate(folders):
        evaluation(folder, "run", reward=number / 4)
        changed = 2_000_000_000 if number == newest else 1
        for path in (folder, folder / "run"):
            os.utime(path, (changed, changed))
    sources = Catalog(folders).sources()
    assert {run_id: source.folder.parents[1].name for run_id, source in sources.items()} == {
        "run": "x",
        "y/run": "y",
        "z/run": "z",
    }


def test_a_run_whose_id_is_taken_twice_is_named_by_the_folders_order(tmp_path):
    folders = [tmp_path / name / "same" for name in ("x", "y")]
    for folder in folders:
        evaluation(folder, "run")
        evaluation(folder, "own-" + folder.parent.name)
    ids = {
        run_id: source.folder.parents[1].name
        for run_id, source in Catalog(folders).sources().items()
    }
    assert ids == {"run": "x", "same/run": "y", "own-x": "x", "own-y": "y"}


def test_a_list_that_is_not_whole_says_so_on_the_page(page, serve, tmp_path, monkeypatch):
    for number in range(MIN_LISTED + 1):
        view_runs.training(tmp_path / f"run-{number:03}", num_steps=1)
    slow = evaluation(tmp_path, "slow")
    os.utime(slow, (1, 1))
    is_read, describe = threading.Event(), describing.describe

    def describe_slowly(source):
        if source.folder == slow:
            is_read.wait(60)
        return describe(source)

    monkeypatch.setattr(describing, "describe", describe_slowly)
    server = serve(tmp_path)
    page.driver.get(server.url)
    try:
        page.wait_text("the others are being read")
        page.wait(lambda: page.texts(".body .row"))
        assert f"{MIN_LISTED + 2} runs" not in page.text()
        page.press("j", "j")  # the list can be used meanwhile
        page.wait(lambda: page.driver.find_elements("css selector", ".row.focused"))
    finally:
        is_read.set()
    page.wait(lambda: "the others" not in page.text() and f"{MIN_LISTED + 2} runs" in page.text())
