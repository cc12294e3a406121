"""Torn and unwritable files of a training: the run is resumed all the same, bit for bit, and an error
keeps its name."""

import json
import os

import pytest
from transformers import TrainerCallback

from support.training import losses_of, run, small_trainer, weights_hash
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
