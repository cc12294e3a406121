"""Clients by template: what they are passed, how they fail, and NeMo RL's."""

import numpy as np
import pytest
from openai import AsyncOpenAI

import verifiers as vf
from verifiers.clients import NeMoRLChatCompletionsClient
from verifiers.errors import AuthenticationFailed
from verifiers.legacy.template_client import TemplateClient
from verifiers.testing import FakeServer
from verifiers.types import ResponseMessage

ROWS = [{"question": "q", "answer": "a"}]


class Alone(vf.Client):
    """Overrides ``get_response`` alone."""

    def __init__(self, reply):
        super().__init__(None)
        self.reply, self.seen = reply, []

    async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        self.seen.append({"sampling_args": sampling_args, **kwargs})
        if isinstance(self.reply, Exception):
            raise self.reply
        return vf.Response(ResponseMessage(self.reply), usage=vf.Usage(3, 1))


class WithoutState(Alone):
    async def get_response(self, prompt, model, sampling_args, tools=None):
        return await super().get_response(prompt, model, sampling_args, tools)


class AuthenticationError(Exception):
    """As an SDK defines it."""


AuthenticationError.__module__ = "openai"


def played(client, **options):
    return vf.SingleTurnEnv(dataset=ROWS).evaluate(client, "m", **options)


def test_the_state_and_its_headers_are_passed_where_they_are_accepted():
    client = Alone("hi")
    client._config = vf.ClientConfig(extra_headers_from_state={"X-Id": "example_id"})
    played(client, sampling_args={"temperature": 0.5, "top_p": None})
    (seen,) = client.seen
    assert seen["state"]["example_id"] == 0
    assert seen["extra_headers"] == {"X-Id": "0"}
    assert seen["sampling_args"] == {"n": 1, "extra_body": {}, "temperature": 0.5}
    stateless = WithoutState("hi")
    assert played(stateless)["errors"] == [None]
    assert "state" not in stateless.seen[0]


@pytest.mark.parametrize("reply", ["", None])
def test_an_empty_answer_is_named(reply):
    client = Alone(reply)
    (error,) = played(client)["errors"]
    assert error["error"] == "EmptyModelResponseError"
    assert len(client.seen) == 1


@pytest.mark.parametrize(
    ("failure", "name"), [(ValueError("boom"), "ModelError"), (vf.RateLimited("x"), "RateLimited")]
)
def test_a_failure_is_recorded_once_and_not_repeated(failure, name):
    client = Alone(failure)
    (error,) = played(client)["errors"]
    assert error["error"] == name
    assert len(client.seen) == 1


def test_a_refused_key_ends_the_run():
    with pytest.raises(AuthenticationFailed, match="was refused its key"):
        played(Alone(AuthenticationError("no")))


def test_a_client_with_complete_is_no_template_and_one_with_nothing_is_refused():
    class Native(vf.Client):
        async def complete(self, request):
            return vf.Response(vf.AssistantMessage("hi"))

    class Nothing(vf.Client):
        pass

    assert not issubclass(Native, TemplateClient)
    assert issubclass(Alone, TemplateClient)
    assert played(Native())["errors"] == [None]
    with pytest.raises(TypeError, match="define complete"):
        Nothing(None)


def test_the_message_of_a_response_says_how_it_ended():
    tokens = vf.ResponseTokens([1, 2], [3], [-0.5])
    response = vf.Response(vf.AssistantMessage("x"), "length", tokens=tokens)
    message = response.message
    assert (message.finish_reason, message.is_truncated, message.tokens) == ("length", True, tokens)
    assert set(message) == {"role", "content"}
    del response
    assert (message.finish_reason, message.tokens) == (None, None)  # the message holds no tokens
    with pytest.raises(ValueError, match="completion_mask"):
        vf.ResponseTokens([1], [3], [-0.5], completion_mask=[0])


def test_nemo_rl_keeps_the_tokens_of_the_message_and_passes_every_call_through_one_method():
    seen = []

    class Gym(NeMoRLChatCompletionsClient):
        async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
            seen.append(model)
            answer = await super().get_native_response(
                prompt, model, sampling_args, tools, **kwargs
            )
            answer.choices[0].message.prompt_token_ids = [1, 2]
            answer.choices[0].message.generation_token_ids = [7]
            answer.choices[0].message.generation_log_probs = [-0.1]
            return answer

    with FakeServer("four") as server:
        sdk = AsyncOpenAI(base_url=server.url, api_key="none")
        client = Gym(sdk)
        results = played(client, keep_states=True)
    assert client.client is sdk
    assert seen == ["m"]
    (state,) = results["states"]
    tokens = state["trajectory"][0]["tokens"]
    assert (tokens["prompt_ids"], tokens["completion_ids"], tokens["completion_logprobs"]) == (
        [1, 2],
        [7],
        [-0.1],
    )
    assert np.array_equal(state.rollout().turns[0].completion_ids, [7])
