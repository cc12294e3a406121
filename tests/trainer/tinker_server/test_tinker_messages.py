"""Bodies of the SDK 0.38.0, recorded, and what it reads of our answers."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from verifiers.errors import ModelRefused
from verifiers_trainer.tinker_server.messages import (
    NO_LOGPROB,
    OptimStep,
    Sample,
    Sampled,
    SampledSequence,
    TopTokens,
    Trained,
    read_json,
    read_pass,
    read_pass_json,
)

PASS = (  # two datums, the first in two chunks; loss "ppo" with a threshold; forward only
    "CglzOnRyYWluOjAQAxqiAQoQCg4KDAUAAAAGAAAABwAAAAoICgYKBAgAAAASJQoKYWR2YW50YWdlcxIXChAAAAAAAACAPwAA"
    "wL8AAIA+GAEiAQQSIwoIbG9ncHJvYnMSFwoQAAAAAAAAAL8AAKC/AAAAwBgBIgEEEjgKDXRhcmdldF90b2tlbnMSJwogBgAA"
    "AAAAAAAHAAAAAAAAAAgAAAAAAAAA4JMEAAAAAAAYAiIBBBpgCggKBgoECQAAABIZCgphZHZhbnRhZ2VzEgsKBAAAAEAYASIB"
    "ARIXCghsb2dwcm9icxILCgQAAIC/GAEiAQESIAoNdGFyZ2V0X3Rva2VucxIPCggBAAAAAAAAABgCIgEBIgNwcG8qHQoSY2xp"
    "cF9sb3dfdGhyZXNob2xkEc3MzMzMzOw/MAE6HwoSY2xpcF9sb3dfdGhyZXNob2xkEgkJzczMzMzM7D8="
)
TRAINED = (
    "CgtBcnJheVJlY29yZBJHCgtBcnJheVJlY29yZBI2Cghsb2dwcm9icxIqCgwAAIC/AAAgwAAAgL4SGAAAAAAAAAAACAAAAAAA"
    "AAAMAAAAAAAAABgBGAIaEwoIbG9zczpzdW0RAAAAAAAA+D8="
)
SAMPLED = (
    "Cj4SCAcAAAADAAAAGggAAAC/AACAviIoChADAAAABAAAAAUAAAAGAAAAEhAAAAC/AACAvwAAAMAAAEDAGAIgAgoOCAESBCwB"
    "AAAaBAAAEMESCAAAwH8AAMC/GigKEAAAAAAAAAAABQAAAAYAAAASEIBPw8eAT8PHAAAAwAAAQMAYAiAC"
)
LOGPROBS = [np.array(values, "<f4").tobytes() for values in ([-1, -2.5], [-0.25])]


def test_a_training_pass_is_read():
    read = read_pass(base64.b64decode(PASS))
    assert (read.model_id, read.seq_id, read.loss, read.forward_only) == (
        "s:train:0",
        3,
        "ppo",
        True,
    )
    assert read.config == {"clip_low_threshold": 0.9}
    first, second = read.data
    assert first.token_ids.tolist() == [5, 6, 7, 8]
    assert first.target_ids.tolist() == [6, 7, 8, 300000]
    assert {name: array.tolist() for name, array in first.inputs.items()} == {
        "logprobs": [0, -0.5, -1.25, -2],
        "advantages": [0, 1, -1.5, 0.25],
    }
    assert (second.token_ids.tolist(), second.target_ids.tolist()) == ([9], [1])


def test_the_same_pass_in_json():
    def tensor(values, dtype="float32"):
        return {"data": values, "dtype": dtype, "shape": [len(values)]}

    inputs = {"target_tokens": tensor([6, 7], "int64"), "weights": tensor([0.0, 1.0])}
    datum = {"model_input": {"chunks": [{"tokens": [5, 6]}]}, "loss_fn_inputs": inputs}
    body = {"data": [datum], "loss_fn": "cross_entropy"}
    read = read_pass_json(json.dumps({"model_id": "m", "forward_backward_input": body}).encode())
    assert (read.loss, read.forward_only, read.seq_id) == ("cross_entropy", False, None)
    assert read.data[0].target_ids.tolist() == [6, 7]
    assert read.data[0].inputs["weights"].tolist() == [0, 1]
    assert read_pass_json(
        json.dumps({"model_id": "m", "forward_input": body}).encode()
    ).forward_only


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_body_that_was_cut_is_refused(cut):
    with pytest.raises(ModelRefused):
        read_pass(base64.b64decode(PASS)[:-cut])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\xff" * 20, "no protocol buffer"),
        (b"\x0b", "no protocol buffer"),
        (b"\x4a\x00", "field 9"),
        (b"\x1a\x00", "target_tokens"),
        (b"\x1a\x04\x0a\x02\x12\x00", "type image"),
        (b"\x0a\x01\xff", "no protocol buffer"),
    ],
)
def test_what_is_no_training_pass_is_refused(content, sentence):
    with pytest.raises(ModelRefused, match=sentence):
        read_pass(content)


def test_results_are_what_the_sdk_reads():
    trained = Trained(loss=1.5, logprobs=LOGPROBS)
    assert trained.protobuf() == base64.b64decode(TRAINED)
    assert trained.json()["loss_fn_outputs"][0]["logprobs"]["data"] == [-1, -2.5]
    top = TopTokens(np.array([[3, 4], [5, 6]]), np.array([[-0.5, -1], [-2, -3]]))
    of_prompt = TopTokens(
        np.array([[0, 0], [5, 6]]), np.array([[NO_LOGPROB, NO_LOGPROB], [-2, -3]])
    )
    sampled = Sampled(
        sequences=[
            SampledSequence(np.array([7, 3]), np.array([-0.5, -0.25]), True, top),
            SampledSequence(np.array([300]), np.array([-9.0]), False),
        ],
        prompt_logprobs=np.array([np.nan, -1.5]),
        top_of_prompt=of_prompt,
    )
    assert sampled.protobuf() == base64.b64decode(SAMPLED)
    assert sampled.json() == {
        "type": "sample",
        "sequences": [
            {"stop_reason": "stop", "tokens": [7, 3], "logprobs": [-0.5, -0.25]},
            {"stop_reason": "length", "tokens": [300], "logprobs": [-9.0]},
        ],
        "prompt_logprobs": [None, -1.5],
        "topk_prompt_logprobs": [None, [(5, -2.0), (6, -3.0)]],
    }


@pytest.mark.parametrize(
    ("kind", "body", "sentence"),
    [
        (OptimStep, b'{"model_id": "m"}', "adam_params"),
        (OptimStep, b'{"model_id": "m", "adam_params": {"momentum": 1}}', "momentum"),
        (OptimStep, b'{"model_id": 1, "adam_params": {}}', "model_id"),
        (Sample, b"[", "JSON"),
        (Sample, b"[" * 100_000, "JSON"),
    ],
)
def test_other_bodies_are_refused_with_the_field(kind, body, sentence):
    with pytest.raises(ModelRefused, match=sentence):
        read_json(body, kind)
