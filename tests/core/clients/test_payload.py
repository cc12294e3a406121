"""What is sent: names, precedence and what is refused before sending."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from verifiers.clients.payload import split_arguments, to_body
from verifiers.errors import ConfigError
from verifiers.types import InputAudioContentPart, ModelRequest, Tool, UserMessage


def body_of(
    prompt: Any = None, name: str = "max_completion_tokens", **fields: Any
) -> dict[str, Any]:
    prompt = [UserMessage("hi")] if prompt is None else prompt
    return json.loads(to_body(ModelRequest(prompt, "m", **fields), name))


def test_nothing_is_sent_that_the_caller_did_not_ask_for():
    assert body_of() == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_none_is_never_sent():
    assert "temperature" not in body_of(sampling_args={"temperature": None, "top_p": 0.5})


@pytest.mark.parametrize("alias", ["max_tokens", "max_completion_tokens", "max_new_tokens"])
def test_every_spelling_of_the_limit_is_sent_under_the_name_in_use(alias):
    assert body_of(sampling_args={alias: 7})["max_completion_tokens"] == 7
    assert (
        body_of("text", "max_tokens", message_type="completion", sampling_args={alias: 7})[
            "max_tokens"
        ]
        == 7
    )


def test_two_limits_that_disagree_are_refused_and_equal_ones_are_one():
    with pytest.raises(ConfigError, match="two limits"):
        body_of(sampling_args={"max_tokens": 7, "max_new_tokens": 8})
    assert (
        body_of(sampling_args={"max_tokens": 7, "max_new_tokens": 7})["max_completion_tokens"] == 7
    )


def test_engine_arguments_go_to_the_extra_body():
    request = ModelRequest(
        "p", "m", sampling_args={"top_k": 5, "temperature": 1, "extra_body": {"min_p": 0.1}}
    )
    assert split_arguments(request, "max_tokens") == (
        {"temperature": 1},
        {"top_k": 5, "min_p": 0.1},
    )
    assert body_of(sampling_args=request.sampling_args)["min_p"] == 0.1


def test_the_requests_own_seed_wins():
    assert body_of(seed=3, sampling_args={"seed": 9})["seed"] == 3
    assert body_of(sampling_args={"seed": 9})["seed"] == 9


def test_requiring_tokens_asks_for_logprobs_and_ids():
    sent = body_of(require_tokens=True)
    assert (sent["logprobs"], sent["return_token_ids"]) == (True, True)
    sent = body_of("t", require_tokens=True, message_type="completion")
    assert (sent["logprobs"], sent["return_token_ids"]) == (1, True)
    sent = body_of(sampling_args={"extra_body": {"return_tokens_as_token_ids": True}})
    assert (sent["logprobs"], sent["return_token_ids"]) == (True, True)


def test_tools_are_sent_only_when_there_are_any():
    assert "tools" not in body_of(tools=[])
    assert body_of(tools=[Tool("f", "d", {})])["tools"][0]["function"]["name"] == "f"


def test_audio_in_the_prompt_asks_for_text_back():
    audio = UserMessage([InputAudioContentPart("AAAA")])
    assert body_of([audio], sampling_args={"modalities": ["audio"]})["modalities"] == ["text"]
    assert "modalities" not in body_of()


@pytest.mark.parametrize("arguments", [{"n": 2}, {"stream": True}])
def test_several_completions_or_a_stream_are_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        body_of(sampling_args=arguments)


def test_a_lone_surrogate_from_a_model_is_escaped_and_numpy_numbers_are_numbers():
    sent = body_of(
        [UserMessage("\ud800")],
        sampling_args={"temperature": np.float32(0.5), "top_p": np.float64(1)},
    )
    assert sent["messages"][0]["content"] == "\ud800"
    assert (sent["temperature"], sent["top_p"]) == (0.5, 1.0)


def test_what_has_no_json_form_is_refused_by_name():
    with pytest.raises(ConfigError, match="object has no JSON form"):
        body_of(sampling_args={"stop": object()})
