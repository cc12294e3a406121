"""Whatever a caller hands in becomes a client, and None is resolved in the documented order."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from types import SimpleNamespace

import pytest

from support.small_envs import single_turn
from verifiers.clients import (
    ClientConfig,
    EndpointConfig,
    OpenAIChatCompletionsClient,
    RetryPolicy,
    as_client,
    client_and_model,
    register_model_resolver,
    resolve,
    use_client,
)
from verifiers.clients.protocol import CLIENT_TYPES, headers_from_state
from verifiers.errors import (
    AuthenticationFailed,
    ConfigError,
    MalformedResponse,
    ModelError,
    ModelUnavailable,
    OverlongPromptError,
    RateLimited,
)
from verifiers.testing import Behaviour, FakeServer, ScriptedClient
from verifiers.types import AssistantMessage, ModelRequest, Tool, UserMessage

FAST = RetryPolicy(max_retries=1, base_s=0.001)
REQUEST = ModelRequest(
    [UserMessage("hi")], "m", sampling_args={"max_tokens": 5, "top_k": 3, "temperature": None}
)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "VF_LOCAL_MODEL"):
        monkeypatch.delenv(name, raising=False)


def run(client, request=REQUEST):
    async def once():
        try:
            return await client.complete(request)
        finally:
            await client.aclose()
            # an SDK object is ours to close here
            if close := getattr(getattr(client, "called", None), "close", None):
                closed = close()
                if inspect.isawaitable(closed):
                    await closed

    return asyncio.run(once())


# --- SDK clients ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("timeout", 0), ("client_type", "gemini")])
@pytest.mark.parametrize("client_type", CLIENT_TYPES)
def test_a_setting_that_was_assigned_is_checked_for_every_api(client_type, name, value):
    config = ClientConfig(client_type=client_type, api_base_url="http://127.0.0.1:1/v1")
    assert as_client(config).client_type == client_type  # negative control: as it was made
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=f"{name}.*{value}"):
        as_client(config)


@pytest.mark.parametrize("name", ["OpenAI", "AsyncOpenAI"])
def test_a_plain_sdk_client_is_read_and_served_by_our_transport(name):
    openai = pytest.importorskip("openai")
    with FakeServer("x") as server:
        sdk_client = getattr(openai, name)(
            base_url=server.url, api_key="sk-1", default_headers={"X-A": "b"}, default_query={"v": "2"},
            organization="org", timeout=7, max_retries=4)  # fmt: skip
        before = dict(vars(sdk_client))
        client = as_client(sdk_client)
        assert isinstance(client, OpenAIChatCompletionsClient)
        assert (client.config.timeout, client.retry.max_retries) == (7, 4)
        assert run(client).text == "x"
        assert run(client).text == "x"
        headers = server.hits[0].headers
        assert (headers["authorization"], headers["x-a"], headers["openai-organization"]) == (
            "Bearer sk-1",
            "b",
            "org",
        )
        assert not [header for header in headers if header.startswith("x-stainless")]
        assert server.hits[0].query == "v=2"
        assert vars(sdk_client) == before
        assert as_client(sdk_client) is client
        sdk_client.api_key = "sk-2"
        assert as_client(sdk_client) is not client


def test_the_sdks_default_retry_count_is_not_taken_for_a_choice():
    openai = pytest.importorskip("openai")
    assert as_client(openai.OpenAI(api_key="k")).retry.max_retries == 10
    assert as_client(openai.OpenAI(api_key="k", max_retries=0)).retry.max_retries == 0


def sdk_variants(openai, url):
    class Subclass(openai.AsyncOpenAI):
        pass

    custom = openai.AsyncOpenAI(
        base_url=url, api_key="k", http_client=openai.DefaultAsyncHttpxClient()
    )
    blocking = openai.OpenAI(base_url=url, api_key="k", http_client=openai.DefaultHttpxClient())
    patched = openai.AsyncOpenAI(base_url=url, api_key="k")
    patched.chat.completions.create = patched.chat.completions.create
    dynamic = openai.OpenAI(base_url=url, api_key=lambda: "k")
    return [Subclass(base_url=url, api_key="k"), custom, blocking, patched, dynamic]


def test_any_other_sdk_client_is_called_as_it_is_with_one_retry_layer():
    openai = pytest.importorskip("openai")
    with FakeServer("x") as server:
        for sdk_client in sdk_variants(openai, server.url):
            client = as_client(sdk_client)
            assert type(client).__name__ == "OpenAILikeClient"
            assert run(client).text == "x"
            sent = server.requests[-1]
            assert sent["top_k"] == 3
            assert "temperature" not in sent
            assert as_client(sdk_client) is client
    with FakeServer("x", [503, 503]) as server:
        client = as_client(sdk_variants(openai, server.url)[1])
        assert len(run(client).attempts) == 2
        assert server.count == 3


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Behaviour(401), AuthenticationFailed),
        (Behaviour(400, body="maximum context length is 5"), OverlongPromptError),
        (Behaviour(429, {"Retry-After": "600"}), RateLimited),
        (Behaviour(body='{"choices": null}'), MalformedResponse),
        (Behaviour(reset=True), ModelUnavailable),
        (Behaviour(body="<html>"), ModelError),
    ],
)
def test_no_sdk_exception_leaks(fault, kind):
    openai = pytest.importorskip("openai")
    with FakeServer("x", lambda hit: fault) as server:
        sdk_client = openai.AsyncOpenAI(
            base_url=server.url, api_key="sk-canary", http_client=openai.DefaultAsyncHttpxClient()
        )
        client = as_client(sdk_client)
        client.retry = FAST
        with pytest.raises(kind) as caught:
            run(client)
    assert "canary" not in f"{caught.value} {caught.value.facts}"


# --- doubles --------------------------------------------------------------------------------------


def answer(**fields):
    message = SimpleNamespace(role="assistant", content="x", tool_calls=None)
    return SimpleNamespace(
        choices=[SimpleNamespace(message=message, finish_reason="stop", **fields)], usage=None
    )


def double(create):
    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))


def test_a_double_with_an_async_create_sees_the_callers_own_words():
    seen = {}

    async def create(**arguments):
        seen.update(arguments)
        return answer()

    request = ModelRequest(
        [UserMessage("hi")], "m", tools=[Tool("f")], seed=1, sampling_args=REQUEST.sampling_args
    )
    assert run(as_client(double(create)), request).message == AssistantMessage("x")
    assert seen["max_tokens"] == 5
    assert seen["seed"] == 1
    assert seen["extra_body"] == {"top_k": 3}
    assert seen["tools"][0]["function"]["name"] == "f"


def test_a_blocking_create_never_blocks_the_loop():
    def create(model, messages, max_tokens, extra_body):
        assert threading.current_thread() is not threading.main_thread()
        time.sleep(0.2)
        return {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}

    async def many():
        client = as_client(double(create))
        started = time.monotonic()
        texts = [
            r.text for r in await asyncio.gather(*(client.complete(REQUEST) for _ in range(16)))
        ]
        await client.aclose()
        return texts, time.monotonic() - started

    texts, elapsed_s = asyncio.run(many())
    assert texts == ["x"] * 16
    assert elapsed_s < 2
    threads = [t for t in threading.enumerate() if t.name.startswith("verifiers-client")]
    for thread in threads:
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in threads)


def test_token_data_of_a_double_are_read():
    async def create(**_):
        logprobs = SimpleNamespace(content=[SimpleNamespace(token="?", logprob=-0.5)])
        return answer(token_ids=[4], prompt_token_ids=[1, 2], logprobs=logprobs)

    tokens = run(
        as_client(double(create)), ModelRequest([UserMessage("hi")], "m", require_tokens=True)
    ).tokens
    assert (tokens.prompt_ids.tolist(), tokens.completion_ids.tolist()) == ([1, 2], [4])


def test_automatic_attributes_of_a_mock_are_not_data():
    class Anything:
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything()

        def __call__(self, **_):
            return Anything()

    client = as_client(double(Anything()))
    client.retry = FAST
    with pytest.raises(MalformedResponse, match="choices"):
        run(client)


def test_an_exception_of_a_double_is_mapped_and_chained():
    async def create(**_):
        raise ZeroDivisionError("oops")

    with pytest.raises(ModelError, match="ZeroDivisionError: oops") as caught:
        run(as_client(double(create)))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_third_generation_client_is_understood():
    class G3:
        async def get_response(self, prompt, model, sampling_args, tools=None, **_):
            assert sampling_args == {"max_tokens": 5, "top_k": 3}
            tokens = SimpleNamespace(prompt_ids=[1], completion_ids=[2], completion_logprobs=[-0.5])
            call = SimpleNamespace(id="c", name="f", arguments="{}")
            message = SimpleNamespace(
                content=None, tool_calls=[call], finish_reason="tool_calls", tokens=tokens
            )
            return SimpleNamespace(
                message=message, id="1", usage=SimpleNamespace(prompt_tokens=1, completion_tokens=1)
            )

    response = run(as_client(G3()))
    assert response.message.tool_calls[0].name == "f"
    assert response.finish_reason == "tool_calls"
    assert response.tokens.completion_ids.tolist() == [2]


def test_text_requests_use_completions_create():
    async def create(**arguments):
        assert arguments["prompt"] == "once"
        return SimpleNamespace(choices=[SimpleNamespace(text="more", finish_reason="length")])

    client = as_client(SimpleNamespace(completions=SimpleNamespace(create=create)))
    assert run(client, ModelRequest("once", "m", message_type="completion")).text == "more"


# --- configs, lists, nonsense ---------------------------------------------------------------------


def test_a_list_takes_turns_and_a_rollout_stays_with_its_endpoint():
    first, second = ScriptedClient("1"), ScriptedClient("2")
    client = as_client([first, second])
    asked = [ModelRequest([], "m", rollout_id=name) for name in ("a", "b", "a", "b", "c")]
    assert [run(client, request).text for request in asked] == ["1", "2", "1", "2", "1"]
    assert [run(client, ModelRequest([], "m")).text for _ in range(2)] == ["2", "1"]


def test_endpoint_configs_carry_their_own_model_and_share_the_limits():
    config = ClientConfig(
        timeout=9,
        endpoint_configs=[
            EndpointConfig("e", "m1", "http://a/v1"),
            EndpointConfig("e", "m2", "http://b/v1"),
        ],
    )
    client = as_client(config)
    assert [(member.base_url, member.config.timeout, model) for member, model in client.members] == [
        ("http://a/v1", 9, "m1"), ("http://b/v1", 9, "m2")]  # fmt: skip
    assert client_and_model(config)[1] == "m1"


async def test_each_endpoint_of_a_list_gets_the_headers_of_its_own_settings():
    with FakeServer("1") as first, FakeServer("2") as two:
        configs = [
            ClientConfig(api_base_url=first.url, extra_headers_from_state={"X-Task": "task"}),
            ClientConfig(
                api_base_url=two.url, extra_headers_from_state={"X-Example": "example_id"}
            ),
        ]
        client = as_client(configs)
        assert headers_from_state(client) == {"X-Task": "task", "X-Example": "example_id"}
        env = single_turn(4)
        results = await env.evaluate(client, "m", preflight=False)
        assert results["errors"] == [None] * 4
    assert not any("x-example" in hit.headers for hit in first.hits)
    assert not any("x-task" in hit.headers for hit in two.hits)
    assert len(first.hits) == len(two.hits) == 2
    assert {hit.headers["x-task"] for hit in first.hits} == {"default"}
    assert all(hit.headers["x-example"] in "0123" for hit in two.hits)


@pytest.mark.parametrize("nonsense", [3, object(), [], ScriptedClient, "http://host/v1"])
def test_what_is_no_client_is_refused_with_what_would_be(nonsense):
    with pytest.raises(ConfigError):
        as_client(nonsense)


# --- None -----------------------------------------------------------------------------------------


def test_use_client_serves_calls_without_one_inside_its_block_only(monkeypatch):
    monkeypatch.setattr("verifiers.clients.local.is_installed", lambda: False)
    client = ScriptedClient("x")
    with use_client(client, SimpleNamespace(name_or_path="policy")):
        assert client_and_model() == (client, "policy")
        assert client_and_model(None, "other") == (client, "other")
        assert client_and_model(ScriptedClient("y"))[1] == "scripted"
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        client_and_model()


def test_the_environment_comes_before_the_local_model(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    client, model = client_and_model()
    assert (client.base_url, model) == ("https://api.openai.com/v1", "gpt-4.1-mini")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="name the model"):
        client_and_model()
    client, model = client_and_model(None, "m")
    assert (client.base_url, model) == ("http://127.0.0.1:9/v1", "m")


def test_a_named_model_never_falls_back_to_the_local_one():
    with pytest.raises(ConfigError, match="'gpt-5'"):
        client_and_model(None, "gpt-5")


def test_a_live_model_is_passed_to_the_registered_resolver(monkeypatch):
    monkeypatch.setattr(resolve, "_resolvers", [])
    live = SimpleNamespace(name_or_path="tiny")
    client = ScriptedClient("x")
    register_model_resolver(lambda model: client if model is live else None)
    assert client_and_model(None, live) == (client, "tiny")
    with pytest.raises(ConfigError, match="'other'"):
        client_and_model(None, SimpleNamespace(name_or_path="other"))


def test_a_client_without_a_model_name_asks_for_one():
    with pytest.raises(ConfigError, match="name the model"):
        client_and_model(ClientConfig(api_base_url="http://127.0.0.1:9/v1"))
