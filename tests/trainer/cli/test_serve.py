"""``vf-serve``: a saved model answers on a port until a signal ends it; other machines reach it
only with a key."""

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from support.tinker_client import TinkerSession, weighted
from support.training_child import ForkedScript
from verifiers.errors import ConfigError
from verifiers_trainer.cli.serve import COMMAND
from verifiers_trainer.policy import builtin_models
from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer


def post(url, key=None):
    body = {"model": "policy", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def test_a_run_folder_is_served_with_its_key_until_sigterm(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVE_KEY", "s3cret-of-this-test")
    folder = tmp_path / "run/checkpoint-7"
    build_tiny_model(seed=3).save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    flags = [
        str(tmp_path / "run"),
        "--port",
        "0",
        "--name",
        "policy",
        "--api-key-var",
        "SERVE_KEY",
        "--json",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "verifiers_trainer.cli.serve", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        facts = json.loads(process.stdout.readline())
        assert facts["ok"]
        assert facts["model"] == "policy"
        assert post(facts["url"], "s3cret-of-this-test")["usage"]["completion_tokens"] <= 4
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(facts["url"])
        process.send_signal(signal.SIGTERM)
        _, notes = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, notes
    assert f"vf-eval ENV -m policy -b {facts['url']} -k SERVE_KEY" in notes
    assert "s3cret-of-this-test" not in notes
    with pytest.raises(OSError):
        post(facts["url"], "s3cret-of-this-test")


def test_until_the_model_is_loaded_the_port_says_so_to_vf_eval_too(tmp_path, monkeypatch, capsys):
    from verifiers.cli.evaluate.command import run_command
    from verifiers_trainer.policy import folder_client

    build_tiny_model(seed=3).save_pretrained(tmp_path / "model")
    build_tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers = []

    def load(folder, **options):
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            post(f"http://127.0.0.1:{port}/v1")
        answers.append(refused.value.read().decode())
        answers.append(run_command(["reverse-text", "-b", f"http://127.0.0.1:{port}/v1"]))
        raise ConfigError("loaded")  # the second server needs the port, and no signal ends a test

    monkeypatch.setattr(folder_client, "load_folder", load)
    assert COMMAND.run(["model", "--port", str(port)]) == 2
    assert "the model is still being loaded" in answers[0]
    assert answers[1] == 3
    printed = capsys.readouterr().err
    assert "vf-serve: loading model\n" in printed
    assert "HTTP 503: the model is still being loaded" in printed
    with socket.create_server(("127.0.0.1", port)):  # it is free again for the endpoint
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one folder"),
        (["nofolder"], "there is no folder nofolder"),
        ([".", "--host", "0.0.0.0"], "add --api-key-var"),
        ([".", "--api-key-var", "NOT_SET_HERE"], "NOT_SET_HERE is not set"),
        (["."], "holds no model"),
        ([".", "--concurrency", "2"], "--concurrency needs --tinker"),
        ([".", "--tinker", "run", "--host", "0.0.0.0"], "add --api-key-var"),
        (["builtin:tiny", "--tinker", "run", "--api-key-var", "OTHER_KEY"], "begin with tml-"),
        (["builtin:tini", "--tinker", "run"], "did you mean 'builtin:tiny'"),
    ],
)
def test_a_refusal_is_one_sentence(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTHER_KEY", "sk-of-this-test")
    assert COMMAND.run(arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "sk-of-this-test" not in printed


SERVE = """
import sys
from verifiers_trainer.cli.serve import COMMAND
sys.exit(COMMAND.run(sys.argv[2:]))
"""


def test_the_protocol_of_tinker_is_served_until_sigterm(tmp_path):
    """In a fork by child_context; the other server is started as users start it."""
    run = tmp_path / "run"
    words = ["builtin:tiny", "--tinker", str(run), "--port", "0", "--name", "mine", "--json"]
    process = ForkedScript(SERVE, tmp_path, *words)
    try:
        facts = json.loads(process.first_line("{"))
        session = TinkerSession(facts["url"])
        model = session.create("mine")
        session.result(session.train(model, weighted([5, 6, 7])))
        session.result(session.step(model))
        process.send_signal(signal.SIGTERM)
        notes, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, notes
    assert f"TINKER_BASE_URL={facts['url']} TINKER_API_KEY=tml-any" in notes
    assert (run / f"models/{model}/live/adapter_model.safetensors").is_file()


@pytest.mark.parametrize("model", ["saved", "local", "builtin:smollm2-135m"])
def test_a_port_in_use_is_named(model, tmp_path, monkeypatch, capsys):
    build_tiny_model(seed=3).save_pretrained(tmp_path)
    build_tiny_tokenizer().save_pretrained(tmp_path)
    # in place of the small real model, whose conversion takes a minute
    monkeypatch.setattr(builtin_models, "smollm2_folder", lambda _: tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        name = str(tmp_path) if model == "saved" else model
        assert COMMAND.run([name, "--port", str(port)]) != 0
    assert str(port) in capsys.readouterr().err
