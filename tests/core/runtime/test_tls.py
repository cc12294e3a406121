"""A server that is not trusted: every client says what is wrong with its certificate and what mends
it, and none says that it should be started."""

import asyncio
import os
import socket
import ssl
import subprocess
import sys
from urllib.error import URLError

import pytest

import verifiers as vf
from support.tls import https_server
from verifiers.clients import ClientConfig, OpenAIChatCompletionsClient, as_client
from verifiers.environments.integrations.mcp_http import http_streams
from verifiers.environments.integrations.openenv import _Session
from verifiers.errors import EndpointUnreachable, InfraError, WeightSyncError
from verifiers.runtime.http_clients import tls_fault

FAULTS = {
    "self-signed": "PEM file with the certificate of its authority (CA) in SSL_CERT_FILE",
    "no TLS": "it does not speak TLS there: write http:// in its URL",
}


@pytest.fixture(autouse=True)
def no_authorities(monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)


def by_client(url):
    client = OpenAIChatCompletionsClient(ClientConfig(api_base_url=f"{url}/v1", max_retries=3))
    return client.preflight("m")


async def by_model_call(url):
    client = OpenAIChatCompletionsClient(ClientConfig(api_base_url=f"{url}/v1", max_retries=3))
    return await client.complete(
        vf.ModelRequest(model="m", prompt=[{"role": "user", "content": "x"}])
    )


async def by_vendor_client(url):
    openai = pytest.importorskip("openai")

    class Another(openai.AsyncOpenAI):
        """Not read, but called itself."""

    async with Another(base_url=f"{url}/v1", api_key="k", max_retries=0) as called:
        request = vf.ModelRequest(model="m", prompt=[{"role": "user", "content": "x"}])
        return await as_client(called).complete(request)


async def by_mcp(url):
    from mcp.shared.message import SessionMessage
    from mcp.types import JSONRPCMessage, JSONRPCRequest

    request = JSONRPCRequest(jsonrpc="2.0", id=1, method="tools/list")
    async with http_streams(f"{url}/mcp", {}, 5.0) as (incoming, outgoing):
        message = JSONRPCMessage(request) if hasattr(JSONRPCMessage, "model_fields") else request
        await outgoing.send(SessionMessage(message))
        answer = (await incoming.receive()).message
        raise RuntimeError(str(answer))


async def by_openenv(url):
    return await _Session.open(url, 5.0, 5.0)


def by_weight_channel(url):
    from verifiers_trainer.engines.loop_thread import LoopThread
    from verifiers_trainer.engines.vllm.control import Server

    async def wait():
        thread = LoopThread("tls")
        thread.start()
        server = Server(url, "k", thread)
        try:
            await asyncio.to_thread(server.wait_healthy, 30.0)
        finally:
            server.close()
            thread.stop()

    return wait()


async def by_teacher(url):
    from verifiers_trainer.policy.teacher import EndpointTeacher

    return await asyncio.to_thread(EndpointTeacher(f"{url}/v1")._request, "models")


CLIENTS = (
    by_client,
    by_model_call,
    by_vendor_client,
    by_mcp,
    by_openenv,
    by_weight_channel,
    by_teacher,
)


@pytest.mark.parametrize("ask", CLIENTS, ids=lambda ask: ask.__name__)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_client_says_what_mends_the_trust(fault, ask, tmp_path):
    with https_server(tmp_path, fault) as (port, _):
        with pytest.raises(Exception) as caught:
            asyncio.run(asyncio.wait_for(ask(f"https://127.0.0.1:{port}"), 120))
    said = str(caught.value)
    assert FAULTS[fault] in said
    assert "start" not in said
    expected = {
        by_openenv: InfraError,
        by_mcp: RuntimeError,
        by_weight_channel: WeightSyncError,
    }.get(ask, EndpointUnreachable)
    assert isinstance(caught.value, expected)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("expired", "(certificate has expired): renew it, or set the clock of this machine"),
        ("another name", "write the URL with a name that is in the certificate"),
        ("self-signed", ""),
    ],
)
def test_a_certificate_of_a_known_authority_may_be_old_or_of_another(fault, said, tmp_path):
    with https_server(tmp_path, fault) as (port, file):
        trusting = ssl.create_default_context(cafile=file)
        with socket.create_connection(("127.0.0.1", port), 5.0) as opened:
            try:
                trusting.wrap_socket(opened, server_hostname="127.0.0.1").close()
                fault_said = ""
            except ssl.SSLError as error:
                fault_said = tls_fault(URLError(error))
    assert (said in fault_said) if said else fault_said == ""


def test_with_the_authority_in_the_variable_the_server_is_trusted(tmp_path):
    """In a process of its own: OpenSSL reads the variable when the clients are imported."""
    code = (
        "import asyncio, sys; from verifiers.clients import ClientConfig, OpenAIChatCompletionsClient;"
        "from verifiers.runtime.http_clients import open_url;"
        "url = sys.argv[1]; open_url(url + '/v1/models', 5.0).close();"
        "client = OpenAIChatCompletionsClient(ClientConfig(api_base_url=url + '/v1'));"
        "print(asyncio.run(client.preflight('m')))"
    )
    with https_server(tmp_path, "self-signed") as (port, file):
        words = [sys.executable, "-c", code, f"https://127.0.0.1:{port}"]
        for variables, is_trusted in (({"SSL_CERT_FILE": str(file)}, True), ({}, False)):
            ended = subprocess.run(
                words, env=os.environ | variables, capture_output=True, text=True, timeout=60
            )
            assert (ended.returncode == 0, ended.stdout) == (
                is_trusted,
                "None\n" if is_trusted else "",
            ), ended.stderr


def test_another_fault_of_a_connection_is_none_of_trust(monkeypatch):
    """Negative control: a server that is not there is still to be started."""
    assert tls_fault(ConnectionRefusedError("refused")) == tls_fault(None) == ""
    looped = ValueError("a")
    looped.__cause__ = OSError("b")
    looped.__cause__.__context__ = looped
    assert tls_fault(looped) == ""
    with pytest.raises(EndpointUnreachable, match="start the server or correct the base URL"):
        asyncio.run(by_client("http://127.0.0.1:9"))
