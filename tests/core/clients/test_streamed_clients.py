"""The clients of the responses and messages APIs: where they connect, with which key, and what they
leave out."""

from __future__ import annotations

import json

import pytest

import verifiers as vf
from support.small_envs import single_turn
from verifiers.clients import as_client, load_endpoints
from verifiers.clients.dialects import messages, responses
from verifiers.testing import Behaviour, FakeServer

REQUEST = vf.ModelRequest([vf.UserMessage("1 + 1")], "m")
CLIENTS = {
    "openai_responses": vf.OpenAIResponsesClient,
    "anthropic_messages": vf.AnthropicMessagesClient,
}


async def complete(client, request=REQUEST):
    try:
        return await client.complete(request)
    finally:
        await client.aclose()


# --- where and with which key ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("client_type", "url", "variable"),
    [
        ("openai_chat_completions", "https://api.openai.com/v1", "OPENAI_API_KEY"),
        ("openai_responses", "https://api.openai.com/v1", "OPENAI_API_KEY"),
        ("anthropic_messages", "https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
    ],
)
def test_the_endpoint_and_the_key_are_the_vendors_unless_named(client_type, url, variable):
    config = vf.ClientConfig(client_type=client_type)
    endpoint = vf.EndpointConfig("small", "m", client_type=client_type)
    assert (
        (config.api_base_url, config.api_key_var)
        == (endpoint.api_base_url, endpoint.api_key_var)
        == (url, variable)
    )
    explicit = vf.ClientConfig(
        client_type=client_type, api_base_url="http://127.0.0.1:1/v1", api_key_var="MINE"
    )
    assert (explicit.api_base_url, explicit.api_key_var) == ("http://127.0.0.1:1/v1", "MINE")
    assert as_client(config).base_url == url


def test_the_settings_of_another_vendor_are_not_taken_over():
    with pytest.raises(vf.ConfigError, match="client_type='anthropic_messages'"):
        vf.AnthropicMessagesClient(vf.ClientConfig(timeout=3))
    with pytest.raises(vf.ConfigError, match="client_type='openai_responses'"):
        vf.OpenAIResponsesClient(vf.ClientConfig(client_type="anthropic_messages"))
    assert (
        vf.AnthropicMessagesClient(
            vf.ClientConfig(client_type="anthropic_messages", timeout=3)
        ).config.timeout
        == 3
    )


async def test_the_key_is_sent_as_the_vendor_expects_it_and_shown_to_nobody(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-secret-1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-2")
    body = json.dumps(messages.error_body(401, "invalid x-api-key sk-ant-secret-1"))
    with FakeServer(
        "ok", script=lambda hit: Behaviour(401, body=body) if hit.index == 2 else None
    ) as server:
        await complete(vf.AnthropicMessagesClient(base_url=server.url))
        await complete(vf.OpenAIResponsesClient(base_url=server.url))
        with pytest.raises(vf.AuthenticationFailed) as caught:
            await complete(vf.AnthropicMessagesClient(base_url=server.url))
        theirs, ours = server.hits[0].headers, server.hits[1].headers
    assert (theirs["x-api-key"], theirs["anthropic-version"]) == ("sk-ant-secret-1", "2023-06-01")
    assert "authorization" not in theirs
    assert ours["authorization"] == "Bearer sk-secret-2"
    assert "x-api-key" not in ours
    assert "ANTHROPIC_API_KEY" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_without_a_key_the_variable_is_named(monkeypatch):
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(vf.MissingKeyError, match="ANTHROPIC_API_KEY"):
        await complete(vf.AnthropicMessagesClient())
    sent = {"X-Api-Key": "secret-of-a-proxy"}
    client = vf.AnthropicMessagesClient(base_url="http://127.0.0.1:9", headers=sent)
    assert "secret" not in repr(client)


@pytest.mark.parametrize("suffix", ["/v1", "", "/", "/v1/"])
async def test_a_base_url_of_the_vendors_sdk_is_accepted_too(suffix):
    """Anthropic's own SDK names the host alone, and adds ``/v1``."""
    with FakeServer("ok") as server:
        url = server.url.removesuffix("/v1") + suffix
        assert (await complete(vf.AnthropicMessagesClient(base_url=url))).text == "ok"


@pytest.mark.parametrize("kind", CLIENTS.values(), ids=CLIENTS)
async def test_the_first_request_of_a_run_finds_a_wrong_url(kind):
    with FakeServer("ok", models=Behaviour(404), script=[404]) as server:
        client = kind(base_url=server.url)
        with pytest.raises(vf.EndpointUnreachable, match="no completions endpoint"):
            await single_turn(1).a_evaluate(client, "scripted")
        assert [hit.path for hit in server.hits] == [f"/v1/{kind.path}"]
        await client.aclose()


# --- a registry -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "client_type"), [("messages", "anthropic_messages"), ("responses", "openai_responses")]
)
def test_a_registry_names_the_api_shortly_or_in_full(tmp_path, name, client_type):
    file = tmp_path / "endpoints.toml"
    entry = '[[endpoint]]\nendpoint_id = "{}"\nmodel = "m"\n{} = "{}"\n'
    file.write_text(
        entry.format("short", "type", name) + entry.format("full", "api_client_type", client_type)
    )
    groups = load_endpoints(file)
    assert groups["short"]["client_type"] == groups["full"]["client_type"] == client_type
    assert groups["short"]["key"] == (
        "ANTHROPIC_API_KEY" if name == "messages" else "OPENAI_API_KEY"
    )
    assert isinstance(as_client(groups["full"][0]).members[0][0], CLIENTS[client_type])


# --- what an endpoint refuses ---------------------------------------------------------------------


def refusing(part, name, text):
    """An endpoint that refuses every body with a part in it."""

    def script(hit):
        if part in hit.body:
            return Behaviour(400, body=json.dumps(name.error_body(400, text)))
        return None

    return script


REFUSALS = [
    (
        vf.OpenAIResponsesClient,
        b"encrypted_content",
        "Encrypted content is not supported with this model.",
    ),
    (vf.OpenAIResponsesClient, b'"rs_', "Item with id 'rs_1' not found. Items are not persisted."),
    (vf.OpenAIResponsesClient, b'"stream":true', "Unsupported parameter: 'stream'."),
    (
        vf.AnthropicMessagesClient,
        b'"unsigned"',
        "messages.1.content.0: Invalid `signature` in `thinking` block",
    ),
    (vf.AnthropicMessagesClient, b'"stream":true', "stream: Extra inputs are not permitted"),
]


@pytest.mark.parametrize(
    ("kind", "part", "text"), REFUSALS, ids=[text[:20] for _, _, text in REFUSALS]
)
async def test_a_part_that_an_endpoint_refuses_by_name_is_left_out_from_then_on(kind, part, text):
    talk = [
        vf.UserMessage("1"),
        vf.AssistantMessage("2", reasoning_content="of another model"),
        vf.UserMessage("3"),
    ]
    with FakeServer("ok", script=refusing(part, kind.dialect, text)) as server:
        client = kind(base_url=server.url, max_retries=0)
        first = await client.complete(vf.ModelRequest(talk, "m"))
        again = await complete(client, vf.ModelRequest(talk, "m"))
        assert [part in hit.body for hit in server.hits] == [True, False, False]
    assert (first.text, again.text, first.attempts) == ("ok", "ok", ())


@pytest.mark.parametrize("kind", CLIENTS.values(), ids=CLIENTS)
async def test_another_refusal_is_an_error_at_once(kind):
    """Negative control: nothing is left out for a refusal that names no part."""
    with FakeServer(
        "ok", script=refusing(b"model", kind.dialect, "temperature must be at least 0")
    ) as server:
        with pytest.raises(vf.ModelRefused, match="temperature"):
            await complete(kind(base_url=server.url, max_retries=3))
        assert server.count == 1


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CLIENTS.values(), ids=CLIENTS)
async def test_the_decoded_answer_is_kept_on_request(kind):
    with FakeServer("ok") as server:
        assert (await complete(kind(base_url=server.url))).raw is None
        raw = (await complete(kind(base_url=server.url, keep_raw=True))).raw
    assert raw["output" if kind is vf.OpenAIResponsesClient else "content"]


@pytest.mark.parametrize("kind", CLIENTS.values(), ids=CLIENTS)
async def test_one_connection_serves_one_call_after_the_other(kind):
    with FakeServer("ok") as server:
        client = kind(base_url=server.url)
        for _ in range(5):
            await client.complete(REQUEST)
        assert len(server.connections) == 1
        await client.aclose()


@pytest.mark.parametrize("kind", CLIENTS.values(), ids=CLIENTS)
def test_an_environment_with_tools_is_played_to_its_end(kind):
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one number
            b: another
        """
        return a + b

    def model(request):
        results = [m["content"] for m in request.prompt if m["role"] == "tool"]
        if not results:
            assert [tool["function"]["name"] for tool in request.tools] == ["add"]
            calls = [
                vf.ToolCall("c1", "add", {"a": 1, "b": 2}),
                vf.ToolCall("c2", "add", {"a": 3, "b": 4}),
            ]
            message = vf.AssistantMessage(None, calls, reasoning_content="two sums")
            return vf.Response(message, "tool_calls", usage=vf.Usage(30, 9, cached_tokens=20))
        said = request.prompt[-3]
        assert (said.reasoning_content, len(said.tool_calls)) == ("two sums", 2)
        return " and ".join(results)

    env = vf.ToolEnv(
        dataset=[{"question": "1 + 2, and 3 + 4?", "answer": "3 and 7"}],
        tools=[add],
        rubric=vf.Rubric(
            funcs=[lambda completion, answer: float(completion[-1]["content"] == answer)]
        ),
        max_turns=3,
    )
    with FakeServer(model) as server:
        results = env.evaluate(kind(base_url=server.url), "m", rollouts_per_example=2)
    assert (results["rewards"], results["errors"]) == ([1.0, 1.0], [None, None])
    usage = results["states"][0]["trajectory"][0]["response"].usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (30, 20)
    assert results.outputs[0]["token_usage"]["cached_tokens"] == 20  # the second call reports none
    assert "cache_write_tokens" not in results.outputs[0]["token_usage"]


def test_a_run_that_needs_token_ids_says_which_client_has_them():
    request = vf.ModelRequest([vf.UserMessage("hi")], "m", require_tokens=True)
    for dialect in (responses, messages):
        with pytest.raises(vf.ConfigError, match="openai_chat_completions"):
            dialect.request_body(request)


@pytest.mark.parametrize("client_type", CLIENTS)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_error_without_the_form_of_the_dialect_keeps_its_words(client_type, is_stream):
    said = '{"error": {"message": "prompt is too long: 9 tokens > 5 maximum"}}'
    reply = Behaviour(body='{"detail": "prompt is too long: 9 tokens > 5 maximum"}')
    if is_stream:
        reply = Behaviour(headers={"Content-Type": "text/event-stream"}, body=f"data: {said}\n\n")
    with FakeServer(script=lambda hit: reply) as server:
        with pytest.raises(vf.OverlongPromptError, match="9 tokens > 5 maximum"):
            await complete(CLIENTS[client_type](base_url=server.url, api_key="k"))


async def test_arguments_that_are_an_object_already_stay_json_and_an_end_without_a_response_is_none():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": 1}}
    body = json.dumps({"output": [call], "created_at": float("nan")})
    with FakeServer(script=[Behaviour(body=body)]) as server:
        client = vf.OpenAIResponsesClient(base_url=server.url)
        response = await complete(client)
    assert response.message["tool_calls"] == [vf.ToolCall("c", "f", '{"a": 1}')]
    events = 'data: {"type": "response.completed", "response": null}\n\n'
    reply = Behaviour(headers={"Content-Type": "text/event-stream"}, body=events)
    with FakeServer(script=lambda hit: reply) as server:
        client = vf.OpenAIResponsesClient(base_url=server.url, max_retries=0)
        with pytest.raises(vf.MalformedResponse, match="has no response"):
            await complete(client)
