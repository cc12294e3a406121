"""The run directory: one configuration, one writer, nothing half made (reliability
rows 7 and 8)."""

import errno
import hashlib
import json
import os
import re
import socket
import tempfile
from pathlib import Path

import pytest

from support.kill import run_child, start_child
from verifiers.errors import ConfigError, RunBusy, RunMismatch
from verifiers.runtime.failpoints import armed
from verifiers.runtime.json import canonical_json
from verifiers.storage.configurations import config_differences, fingerprint, rollout_key
from verifiers.storage.directory import (
    RunDirectory,
    default_root,
    is_complete,
    read_config,
    read_metadata,
    run_path,
)
from verifiers.storage.files import atomic_write
from verifiers.storage.journal import read_journal
from verifiers.types import UserMessage

CONFIG = {
    "env_id": "sums",
    "model": "m",
    "env_args": {"level": 1, "tags": ["a"]},
    "sampling_args": {"temperature": 1.0},
}


def contents(folder):
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path(folder).iterdir()
    }


# --- a run and its resume -------------------------------------------------------------------------


def test_a_run_is_made_resumed_and_completed(tmp_path):
    path = tmp_path / "deep" / "run"
    with RunDirectory.create_or_resume(path, CONFIG, noted={"version": "1"}) as run:
        assert not run.resumed
        run.write_metadata({"status": "running", "avg_reward": float("nan")})
        with run.open_journal() as journal:
            journal.append_sync([{"key": 0}, {"key": 1}])
    assert read_config(path) == {
        "fingerprint": fingerprint(CONFIG),
        "config": CONFIG,
        "noted": {"version": "1"},
    }
    assert read_metadata(path) == {"status": "running", "avg_reward": None}
    frozen, rows = (path / "config.json").read_bytes(), []
    with RunDirectory.create_or_resume(path, CONFIG, noted={"version": "2"}) as run:
        assert run.resumed
        assert run.noted_changes == {"version": ("1", "2")}
        run.open_journal(on_row=rows.append).close()
        run.write_metadata({"status": "complete"})
    assert rows == [{"key": 0}, {"key": 1}]
    assert is_complete(path)
    assert (path / "config.json").read_bytes() == frozen
    assert sorted(os.listdir(path)) == ["config.json", "metadata.json", "results.jsonl", "run.lock"]


def test_another_configuration_is_refused_by_its_differences_and_nothing_is_written(tmp_path):
    with RunDirectory.create_or_resume(tmp_path, CONFIG) as run:
        run.open_journal().close()
    before = contents(tmp_path)
    changed_config = CONFIG | {"model": "n", "env_args": {"level": 2, "tags": ["a"]}, "seed": 3}
    with pytest.raises(RunMismatch, match="model was 'm', now 'n'") as raised:
        RunDirectory.create_or_resume(tmp_path, changed_config)
    assert raised.value.differences == {
        "env_args.level": (1, 2),
        "model": ("m", "n"),
        "seed": ("<not set>", 3),
    }
    assert raised.value.exit_code == 2
    assert contents(tmp_path) == before
    # negative control: the same configuration writes here
    with RunDirectory.create_or_resume(tmp_path, CONFIG):
        assert contents(tmp_path) != before


def test_a_second_process_is_refused_by_pid_and_host_and_the_first_goes_on(tmp_path):
    holder = """
import sys
from verifiers.storage.directory import RunDirectory
with RunDirectory.create_or_resume(sys.argv[1], {"model": "m"}) as run, run.open_journal() as journal:
    print("held")
    sys.stdin.read()
    journal.append_sync({"key": 0})
"""
    with start_child(holder, tmp_path) as first:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(
            RunBusy, match=f"process {first.pid} on {re.escape(socket.gethostname())}"
        ) as raised:
            RunDirectory.create_or_resume(tmp_path, {"model": "m"})
        assert (raised.value.pid, raised.value.host) == (first.pid, socket.gethostname())
        assert raised.value.exit_code == 2
        first.stdin.close()
        assert first.wait(20) == 0
    assert list(read_journal(tmp_path / "results.jsonl")) == [{"key": 0}]
    # its stale pid does not block
    with RunDirectory.create_or_resume(tmp_path, {"model": "m"}) as run:
        assert run.resumed


def test_a_killed_holder_leaves_no_lock(tmp_path):
    code = """
import sys
from verifiers.storage.directory import RunDirectory
run = RunDirectory.create_or_resume(sys.argv[1], {"model": "m"})
print("held")
sys.stdin.read()
"""
    assert run_child(code, tmp_path, kill_after_lines=1).killed
    RunDirectory.create_or_resume(tmp_path, {"model": "m"}).close()


def test_killed_before_the_configuration_is_in_place_the_run_begins_anew(tmp_path):
    code = """
import sys
from verifiers.storage.directory import RunDirectory
RunDirectory.create_or_resume(sys.argv[1], {"model": "m"})
"""
    assert run_child(code, tmp_path, failpoint="atomic_write.before_rename:1").killed
    assert any(name.endswith(".tmp") for name in os.listdir(tmp_path))
    assert read_config(tmp_path) is None
    with RunDirectory.create_or_resume(tmp_path, {"model": "n"}) as run:
        assert not run.resumed
    assert sorted(os.listdir(tmp_path)) == ["config.json", "run.lock"]


def test_rows_without_a_configuration_are_not_adopted(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"reward": 1}\n')
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        RunDirectory.create_or_resume(tmp_path, CONFIG)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("text", ["", "[]", '{"config": {}}', "\x00"])
def test_a_damaged_configuration_is_named_and_kept(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        RunDirectory.create_or_resume(tmp_path, CONFIG)
    assert (tmp_path / "config.json").read_text() == text


# --- places that cannot be written ----------------------------------------------------------------


@pytest.mark.parametrize("location", ["file/run", "file", "/proc/run/deep"])
def test_a_place_that_cannot_hold_a_run_is_refused_in_one_sentence(tmp_path, location):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="results cannot be saved in") as raised:
        RunDirectory.create_or_resume(tmp_path / location, CONFIG)
    assert "Choose a writable directory" in str(raised.value)
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_without_permission_is_refused_and_left_alone():
    user = os.geteuid()
    # not tmp_path, whose parents only its owner may enter
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o555)
        if user == 0:  # root may write anywhere
            os.seteuid(65534)
        try:
            with pytest.raises(
                ConfigError, match=r"results cannot be saved in .*Permission denied"
            ):
                RunDirectory.create_or_resume(Path(parent, "a", "run"), CONFIG)
        finally:
            os.seteuid(user)
        assert os.listdir(parent) == []


def test_a_disk_that_fills_while_the_directory_is_made_leaves_nothing_half_made(tmp_path):
    with (
        armed("atomic_write.before_rename:1:ENOSPC"),
        pytest.raises(ConfigError, match="No space left"),
    ):
        RunDirectory.create_or_resume(tmp_path / "a" / "run", CONFIG)
    assert os.listdir(tmp_path) == []
    RunDirectory.create_or_resume(tmp_path / "a" / "run", CONFIG).close()  # negative control
    assert os.listdir(tmp_path) == ["a"]


# --- names ----------------------------------------------------------------------------------------


def test_the_path_follows_the_naming_scheme(tmp_path):
    path = run_path(tmp_path, "sums", "org/model-1.5", "0123456789abcdef")
    assert path == tmp_path / "outputs/evals/sums--org--model-1.5/01234567"
    assert run_path("x", "sums", "m", "0" * 64, output_dir="y") == Path("y/evals/sums--m/00000000")
    assert os.listdir(tmp_path) == []


def test_a_complete_run_moves_the_next_one_to_the_next_number(tmp_path):
    mark = fingerprint(CONFIG)
    run_key = (tmp_path, "sums", "m", mark)
    for suffix in ("", "-2", "-3"):
        path = run_path(*run_key)
        assert path.name == mark[:8] + suffix
        assert not path.exists()
        with RunDirectory.create_or_resume(path, CONFIG) as run:
            assert run_path(*run_key) == path
            assert run_path(*run_key, resume=False) != path
            run.write_metadata({"status": "complete"})
    assert not run_path(*run_key).exists()


def test_a_directory_of_a_configuration_with_the_same_eight_digits_is_passed_over(tmp_path):
    mark = fingerprint(CONFIG)
    RunDirectory.create_or_resume(run_path(tmp_path, "sums", "m", mark), CONFIG).close()
    assert run_path(tmp_path, "sums", "m", mark[:8] + "0" * 56).name == f"{mark[:8]}-2"


@pytest.mark.parametrize(
    "model", ["../../../etc", "/etc/passwd", "a\x00b", "..", "x" * 5000, "\x1b[31m", "a\\b", ""]
)
def test_a_hostile_name_stays_one_component_inside_the_folder(tmp_path, model):
    path = run_path(tmp_path, "..", model, "0" * 64)
    assert path.parent.parent == tmp_path / "outputs/evals"
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,199}", path.parent.name)
    path.mkdir(parents=True)


def test_runs_are_saved_in_the_working_directory_unless_an_older_version_saved_beside_the_sources(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "environments/my_env").mkdir(parents=True)
    assert default_root("my-env") == default_root("other") == default_root("..") == Path()
    (tmp_path / "environments/my_env/outputs/evals").mkdir(parents=True)
    assert default_root("my-env") == default_root("owner/my-env") == Path("environments/my_env")


# --- identity -------------------------------------------------------------------------------------


def test_a_fingerprint_depends_on_the_values_alone():
    assert fingerprint(CONFIG) == fingerprint(json.loads(json.dumps(CONFIG, sort_keys=True)))
    assert fingerprint({"temperature": 1}) == fingerprint({"temperature": 1.0})
    assert config_differences({"temperature": 1}, {"temperature": 1.0}) == {}
    distinct = [
        {"a": 1},
        {"a": "1"},
        {"a": True},
        {"a": None},
        {},
        {"a": [1]},
        {"a": {"b": 1}},
        {"a": {}},
        {"a": 1.5},
    ]
    assert len({fingerprint(config) for config in distinct}) == len(distinct)
    for first in distinct:
        for second in distinct:
            assert bool(config_differences(first, second)) == (first is not second)


def test_a_setting_that_cannot_be_compared_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"env_args\.reward=") as raised:
        RunDirectory.create_or_resume(tmp_path / "run", {"env_args": {"reward": print}})
    assert raised.value.key == "env_args.reward"
    assert os.listdir(tmp_path) == []


def test_canonical_json_is_one_spelling_and_strict():
    assert (
        canonical_json({"b": 1.5, "a": [True, None, "é\ud800"]})
        == b'{"a":[true,null,"\\u00e9\\ud800"],"b":1.5}'
    )
    assert canonical_json([float("nan"), {"x": float("inf")}]) == b'[null,{"x":null}]'
    with pytest.raises(TypeError, match="object"):
        canonical_json({"a": object()})


def test_canonical_json_does_not_change_its_spelling():
    """Hashes of examples and runs are made of it: another spelling would orphan what was stored."""
    assert (
        canonical_json({"é": 1, "z": "\u2028", "a": (1.0, -0.0, 1e-05, 1e16, 1e22, 5e-324, 2**70)})
        == '{"a":[1.0,-0.0,0.00001,1e16,1e22,5e-324,1180591620717411303424],"z":"\u2028","é":1}'.encode()
    )
    assert canonical_json({2: "b", 10: "a"}) == b'{"10":"a","2":"b"}'
    assert canonical_json(UserMessage("hi")) == canonical_json({"content": "hi", "role": "user"})


@pytest.mark.parametrize(
    ("first", "second"),
    [("\ud800", "\\ud800"), ({"a": 1}, {"a": "1"}), ([1], [1.0]), ("é", "e\u0301")],
)
def test_different_values_have_different_canonical_json(first, second):
    assert canonical_json(first) != canonical_json(second)


def test_a_rollout_key_names_the_row_and_the_sibling():
    rows = [hashlib.sha256(text.encode()).hexdigest() for text in "ab"]
    assert len({rollout_key(row, sibling) for row in rows for sibling in range(20)}) == 40
    assert rollout_key(rows[0], 1) == hashlib.sha256(f"{rows[0]}:1".encode()).hexdigest()[:32]


# --- atomic writes --------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [None, b"old"])
def test_an_atomic_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path, old):
    path = tmp_path / "file"
    if old:
        path.write_bytes(old)
    with (
        armed("atomic_write.before_rename:1:EIO"),
        pytest.raises(OSError, match="failpoint") as raised,
    ):
        atomic_write(path, b"new")
    assert raised.value.errno == errno.EIO
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == ({"file": old} if old else {})
    atomic_write(path, b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"file": b"new"}
