"""The record of where a run's numbers come from: versions, commit, command, settings, weights."""

import hashlib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import verifiers as vf
from support.small_envs import exact, sums
from verifiers.storage.provenance import commit_of, provenance, provenance_rows
from verifiers.storage.weights import file_sha256, weight_hashes
from verifiers.testing import ScriptedClient
from verifiers.view.catalog import Catalog
from verifiers.view.library import Library


def git(folder, *words):
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words],
        cwd=folder,
        check=True,
        capture_output=True,
    )


@pytest.fixture
def clone(tmp_path):
    """A clone with a package, and what an environment for it would install."""
    (package := tmp_path / "clone" / "package").mkdir(parents=True)
    (package / "module.py").write_text("x = 1\n")
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", "first")
    commit_of.cache_clear()
    yield package
    commit_of.cache_clear()


def test_the_commit_of_a_clone_and_whether_it_was_clean(clone):
    first = commit_of(clone)
    assert first["is_clean"] is True
    assert len(first["sha"]) == 40

    (clone.parent / "beside.txt").write_text("x")
    commit_of.cache_clear()
    assert commit_of(clone)["is_clean"] is True
    assert commit_of(clone, is_whole=True)["is_clean"] is False

    (clone / "module.py").write_text("x = 2\n")
    commit_of.cache_clear()
    assert commit_of(clone) == {"sha": first["sha"], "is_clean": False}


def test_an_installed_package_has_no_commit_although_its_environment_lies_in_a_clone(clone):
    installed = clone.parent / ".venv" / "site-packages" / "package"
    installed.mkdir(parents=True)
    assert commit_of(installed) is None
    assert commit_of(Path("/")) is None


def test_a_folder_without_a_commit_or_without_git_has_none(clone, tmp_path, monkeypatch):
    git(tmp_path, "init", "-q")
    assert commit_of(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(clone) is None


def evaluate(folder, client=None, **options):
    env = vf.SingleTurnEnv(dataset=sums(2), rubric=vf.Rubric([exact]))
    return env.evaluate(client or ScriptedClient("1"), "m", results_path=folder, **options)


def test_the_metadata_of_an_evaluation_say_where_its_numbers_come_from(tmp_path, monkeypatch):
    secret = "sk-0123456789abcdefghij"
    monkeypatch.setattr(sys, "orig_argv", ["python", "eval.py", "--api-key", secret, "-n", "2"])
    results = evaluate(tmp_path / "run", seed=3, max_concurrent=2, abort_after=7)

    text = (tmp_path / "run" / "metadata.json").read_text()
    assert secret not in text
    record = json.loads(text)["provenance"]
    assert record == json.loads(json.dumps(results.metadata["provenance"]))
    assert record["command"] == "python eval.py --api-key '***' -n 2"
    assert record["folder"] == os.getcwd()
    assert record["packages"]["verifiers"] == metadata.version("verifiers")
    assert record["packages"]["openai"] == metadata.version("openai")
    assert record["engine"] == "ScriptedClient"
    assert record["processes"] == 1
    # also those that may change when the run is resumed
    assert record["settings"]["max_concurrent"] == 2
    assert record["settings"]["abort_after"] == 7
    assert record["code"] == {"support/small_envs.py": record["code"]["support/small_envs.py"]}
    assert results.metadata["version_info"]["vf_commit"] == (record["commit"] or {}).get("sha")


def test_a_resumed_evaluation_keeps_what_differed_in_its_earlier_sessions(tmp_path, monkeypatch):
    for number, words in enumerate((["first"], ["second"], ["third"])):
        monkeypatch.setattr(sys, "orig_argv", words)
        evaluate(tmp_path / "run", rollouts_per_example=number + 1)

    record = json.loads((tmp_path / "run" / "metadata.json").read_text())["provenance"]
    assert record["command"] == "third"
    assert [session["command"] for session in record["earlier"]] == ["first", "second"]
    assert all(session.keys() <= {"command", "date"} for session in record["earlier"])


def test_a_session_by_another_version_is_told_apart():
    first = provenance() | {"packages": {"verifiers": "0.1"}, "engine": "old"}
    second = provenance(first, engine="new")
    assert second["earlier"] == [
        {"packages": {"verifiers": "0.1"}, "engine": "old"}
        | ({"date": first["date"]} if first["date"] != second["date"] else {})
    ]


def test_the_page_shows_the_record(tmp_path):
    evaluate(tmp_path / "run")
    library = Library(Catalog([tmp_path]))
    (entry,) = library.runs()["runs"]
    rows = dict(library.run(entry["id"])["provenance"])
    assert rows["packages"].startswith(f"verifiers {metadata.version('verifiers')}, ")
    assert rows["engine"] == "ScriptedClient"
    assert "settings" not in rows  # they have a table of their own


def test_a_run_of_an_older_version_has_no_record():
    assert provenance_rows(None) == []
    assert provenance_rows("torn") == []
    # one of another version may hold anything
    assert provenance_rows({"commit": {"sha": "ab", "is_clean": False}, "new": [1]}) == [
        ("commit", "ab, with changes"),
        ("new", "1"),
    ]


# --- weights --------------------------------------------------------------------------------------


def test_the_hashes_of_weights_are_of_weight_files_alone(tmp_path):
    weights = ("model-00001-of-00002.safetensors", "adapter_model.safetensors", "model.gguf")
    state = (
        "optimizer.safetensors",
        "rng.safetensors",
        "rng_1.safetensors",
        "batch_0.safetensors",
        "reference.safetensors",
        "training_args.bin",
        "optimizer.pt",
        "config.json",
    )
    for name in (*weights, *state):
        (tmp_path / name).write_text(name)
    assert weight_hashes(tmp_path) == {
        name: hashlib.sha256(name.encode()).hexdigest() for name in weights
    }


def test_a_file_of_the_hub_has_its_hash_as_its_name(tmp_path):
    (blobs := tmp_path / "blobs").mkdir()
    (blobs / ("a" * 64)).write_text("not read")
    (tmp_path / "model.safetensors").symlink_to(blobs / ("a" * 64))
    assert file_sha256(tmp_path / "model.safetensors") == "a" * 64
    # another link is read
    (tmp_path / ("b" * 64)).write_text("read")
    (tmp_path / "other.safetensors").symlink_to(tmp_path / ("b" * 64))
    digest = hashlib.sha256(b"read").hexdigest()
    assert file_sha256(tmp_path / "other.safetensors") == digest
    (tmp_path / ("b" * 64)).write_text("changed")
    assert file_sha256(tmp_path / "other.safetensors") != digest
