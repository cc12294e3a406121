"""Torn and unwritable files of a training: the run is resumed all the same, bit for bit, and an error
keeps its name."""

import contextlib
import json
import os
import resource

import pytest
from transformers import TrainerCallback

from support.training import losses_of, run, small_trainer, weights_hash
from verifiers.errors import CheckpointError
from verifiers_trainer.policy import checkpoint_files
from verifiers_trainer.run.metrics_files import METRICS, read_metrics

RUN = {"deterministic": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(folder, weights) of a run of three steps that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = small_trainer(folder, **RUN)
    run(trainer)
    return folder, weights_hash(trainer.model)


def tear(folder, kind):
    metrics, proof = folder / METRICS, folder / "proof.json"
    content = metrics.read_bytes()
    if kind == "torn end":
        metrics.write_bytes(content[:-7])
    elif kind == "zeros after a power cut":
        metrics.write_bytes(content + b"\0" * 300)
    elif kind == "a damaged line":
        metrics.write_bytes(b'{"step": 1, "lo\n[]\n{"a": 1}\n\0\0\0\n' + content)
    elif kind == "a torn proof":
        proof.write_bytes(b'{"schema": 1, "verd')
    elif kind == "a folder as proof":
        proof.unlink(missing_ok=True)
        proof.mkdir()
    elif kind == "a torn checkpoint":
        newest = folder / "checkpoint-2"
        weights = next(newest.glob("*.safetensors"))
        os.truncate(weights, weights.stat().st_size // 2)


@pytest.mark.parametrize(
    "kind",
    [
        "torn end",
        "zeros after a power cut",
        "a damaged line",
        "a torn proof",
        "a folder as proof",
        "a torn checkpoint",
    ],
)
def test_a_run_with_torn_files_is_resumed_to_the_same_weights(undisturbed, tmp_path, kind):
    whole, weights = undisturbed
    run(small_trainer(tmp_path, **RUN | {"max_steps": 2}))
    tear(tmp_path, kind)
    trainer = small_trainer(tmp_path, **RUN)
    run(trainer, resume_from_checkpoint=True)
    assert weights_hash(trainer.model) == weights
    assert losses_of(tmp_path)[-1] == losses_of(whole)[-1]
    lines = (tmp_path / METRICS).read_text().splitlines()
    assert all(json.loads(line)["step"] for line in lines if line.strip("\0"))


def test_an_error_keeps_its_name_when_nothing_can_be_written_about_it(tmp_path, caplog):
    class Ends(Exception):
        pass

    def fails(*_, **__):
        (tmp_path / "proof.json").mkdir()
        raise Ends("the end")

    trainer = small_trainer(tmp_path, **RUN)
    trainer.add_callback(type("At", (TrainerCallback,), {"on_step_end": fails})())
    with pytest.raises(Ends, match="the end"):
        trainer.train()
    assert "proof.json was not written" in caplog.text


def test_what_is_no_line_of_a_run_is_left_out_with_its_place(tmp_path, caplog):
    path = tmp_path / METRICS
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo\n5\n{"a": 1}\n{"step": 3}\n{"step"')
    assert [row["step"] for row in read_metrics(path)] == [1, 3]
    assert [f"{METRICS}:{number} is damaged" in caplog.text for number in (1, 2, 3, 4, 5)] == [
        False,
        True,
        True,
        True,
        False,
    ]


@contextlib.contextmanager
def disk_of(num_bytes):
    """No file can become longer: what a full disk does to the write that reaches its end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


FULL = {"settings": 1_000, "completions": 6_000, "tokenizer": 9_000, "weights": 30_000}
"""What the disk has no room for -> the longest file that can be written."""


@pytest.mark.parametrize("what", FULL)
def test_on_a_full_disk_no_file_is_torn_the_error_names_one_and_the_run_is_resumed(
    undisturbed, tmp_path, what
):
    whole, weights = undisturbed
    trainer = small_trainer(tmp_path, **RUN, log_completions=True)
    with disk_of(FULL[what]), pytest.raises((OSError, CheckpointError)) as caught:
        run(trainer)
    assert str(tmp_path) in str(caught.value)
    for file in tmp_path.rglob("*.json*"):
        lines = [file.read_text()] if file.suffix == ".json" else file.read_text().splitlines()
        assert all(json.loads(line) for line in lines), file
    has_checkpoint = any(tmp_path.glob("checkpoint-*"))
    trainer = small_trainer(tmp_path, **RUN, log_completions=True)
    run(trainer, **({"resume_from_checkpoint": True} if has_checkpoint else {}))
    assert weights_hash(trainer.model) == weights
    assert losses_of(tmp_path) == losses_of(whole)


def test_written_in_place_a_full_disk_leaves_half_a_file(tmp_path):
    """Negative control; written as a whole the earlier file stays."""
    file, content = tmp_path / "proof.json", {"verdicts": ["agrees"] * 500}
    checkpoint_files.write_json(file, {})
    with disk_of(1_000):
        with pytest.raises(OSError, match=r"proof\.json"):
            checkpoint_files.write_json(file, content)
        assert json.loads(file.read_text()) == {}
        with pytest.raises(OSError, match="File too large"):
            file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"Unterminated|delimiter|Expecting"):
        json.loads(file.read_text())
