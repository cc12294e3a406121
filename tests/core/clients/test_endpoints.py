"""The endpoint registry: both formats, and every way to write it wrong."""

from __future__ import annotations

import pytest

import verifiers as vf
from verifiers.clients import as_client, client_and_model, load_endpoints
from verifiers.errors import ConfigError
from verifiers.testing import Behaviour, FakeServer

TOML = """
[[endpoint]]
endpoint_id = "qwen3-4b"
model = "Qwen/Qwen3-4B-Instruct-2507"
url = "http://127.0.0.1:8000/v1"
key = "MY_KEY"
type = "openai_chat_completions"
headers = { X-Team = "a" }

[[endpoint]]
endpoint_id = "qwen3-4b"
model = "qwen"
api_base_url = "http://127.0.0.1:8001/v1"
api_key_var = "OTHER_KEY"
"""

PYTHON = """
import os
ENDPOINTS = {
    "gpt": {"model": "gpt-4.1", "url": "https://api.openai.com/v1", "key": "OPENAI_API_KEY"},
    "two": [{"model": "a", "url": "http://a/v1"}, {"model": "b", "url": "http://b/v1"}],
}
"""


def load(tmp_path, text, name="endpoints.toml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return load_endpoints(path)


def test_toml_variants_of_one_alias_are_a_group(tmp_path):
    group = load(tmp_path, TOML)["qwen3-4b"]
    assert len(group) == 2
    assert (group["model"], group["url"], group["key"]) == (
        "Qwen/Qwen3-4B-Instruct-2507", "http://127.0.0.1:8000/v1", "MY_KEY")  # fmt: skip
    assert group[0].headers == {"X-Team": "a"}
    assert group[1].api_key_var == "OTHER_KEY"
    with pytest.raises(KeyError):
        group["nonsense"]


def test_a_python_literal_is_read_and_not_run(tmp_path):
    registry = load(tmp_path, PYTHON, "endpoints.py")
    assert registry["gpt"]["model"] == "gpt-4.1"
    assert [endpoint.model for endpoint in registry["two"]] == ["a", "b"]
    canary = tmp_path / "ran"
    load(tmp_path, f"open({str(canary)!r}, 'w')\nENDPOINTS: dict = {{}}", "endpoints.py")
    assert not canary.exists()


def test_a_loaded_alias_names_a_client_and_its_model(tmp_path):
    load(tmp_path, TOML)
    client, model = client_and_model("qwen3-4b")
    assert model == "Qwen/Qwen3-4B-Instruct-2507"
    assert [name for _, name in client.members] == [model, "qwen"]
    with pytest.raises(ConfigError, match="neither"):
        as_client("qwen3-5b")


def entry(line):
    return f'[[endpoint]]\nendpoint_id = "e"\nmodel = "m"\n{line}\n'


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        (entry('ulr = "x"'), "a.toml", "unknown key 'ulr', did you mean \"url\""),
        (entry('url = "http://a"\napi_base_url = "http://b"'), "a.toml", "repeats"),
        (entry('model = "again"'), "a.toml", "not valid TOML"),
        (entry('key = "sk-proj-abcdef1234567890"'), "a.toml", "looks like a key"),
        (entry('key = "hf_AbCdEf123456789012"'), "a.toml", "looks like a key"),
        (entry('type = "openai_chat_completion"'), "a.toml", "did you mean"),
        (entry("url = 5"), "a.toml", "must be"),
        (entry('headers = "x"'), "a.toml", "a table"),
        ('[[endpoint]]\nmodel = "m"', "a.toml", "endpoint_id"),
        ('[[endpoints]]\nmodel = "m"', "a.toml", r"\[\[endpoint\]\]"),
        ('[endpoint]\nmodel = "m"', "a.toml", "two brackets"),
        ("ENDPOINTS = build()", "a.py", "not a literal"),
        ("ENDPOINTS = {'a': {'model': 'm', 'key': os.environ['X']}}", "a.py", "not a literal"),
        ("ENDPOINTS = {'a': {'model': 'm'}, 'a': {'model': 'n'}}", "a.py", "'a' is given twice"),
        ("ENDPOINTS = {'a': 'm'}", "a.py", "must be a dict"),
        ("X = 1", "a.py", "no ENDPOINTS"),
        ("ENDPOINTS = {", "a.py", "not valid Python"),
    ],
)
def test_every_mistake_is_one_sentence_that_names_it(tmp_path, text, name, says):
    with pytest.raises(ConfigError, match=says) as caught:
        load(tmp_path, text, name)
    assert name in str(caught.value) or "client_type" in str(caught.value)
    assert "1234567890" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load_endpoints(tmp_path / "nowhere.toml")


def test_an_entry_of_a_kind_that_is_not_spoken_is_refused_when_it_is_chosen(tmp_path):
    file = tmp_path / "endpoints.toml"
    file.write_text(
        '[[endpoint]]\nendpoint_id = "mini"\nmodel = "m"\nurl ='
        ' "http://127.0.0.1:9/v1"\n[[endpoint]]\nendpoint_id = "other"\nmodel = "n"\nurl ='
        ' "http://127.0.0.1:9"\ntype = "renderer"\n'
    )
    groups = load_endpoints(file)
    assert as_client(groups["mini"]).model == "m"  # the control
    with pytest.raises(
        ConfigError, match=r"endpoints\.toml: the endpoint 'other' is of the kind 'renderer'"
    ):
        as_client(groups["other"])


VARIABLES = """
[[endpoint]]
endpoint_id = "team"
model = "m"
url = "{url}"
key = "{key}"
headers = {{ X-Team = "$WIRE_TEAM", Proxy-Token = "Bearer ${{WIRE_TOKEN}}", X-Price = "$5" }}
"""


@pytest.mark.parametrize("key", ["WIRE_KEY", "$WIRE_KEY", "${WIRE_KEY}"])
def test_headers_and_keys_of_a_registry_may_name_variables(tmp_path, monkeypatch, key):
    secrets = {"WIRE_TEAM": "team-31415926", "WIRE_TOKEN": "tok-27182818", "WIRE_KEY": "key-1414"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    env = vf.SingleTurnEnv(
        dataset=[{"question": "q", "answer": "x"}], rubric=vf.Rubric(funcs=[lambda: 1.0])
    )
    refused = Behaviour(400, body='{"error": {"message": "no tok-27182818 of team-31415926"}}')
    with FakeServer("ok", script=lambda hit: refused if hit.index else None) as server:
        (tmp_path / "a.toml").write_text(VARIABLES.format(url=server.url, key=key))
        (endpoint,) = load_endpoints(tmp_path / "a.toml")["team"]
        assert "31415926" not in str(dict(endpoint))
        for _ in range(2):
            results = env.evaluate(endpoint, "m", num_examples=1)
        headers = server.hits[0].headers
    assert (headers["x-team"], headers["proxy-token"]) == ("team-31415926", "Bearer tok-27182818")
    assert (headers["x-price"], headers["authorization"]) == ("$5", "Bearer key-1414")
    errors = str(results["errors"])
    assert "***" in errors
    assert not any(value in errors for value in secrets.values())


@pytest.mark.parametrize("absent", ["WIRE_TEAM", "WIRE_TOKEN"])
def test_a_variable_that_is_not_set_is_named_before_the_first_request(
    tmp_path, monkeypatch, absent
):
    for name in {"WIRE_TEAM", "WIRE_TOKEN"} - {absent}:
        monkeypatch.setenv(name, "something")
    monkeypatch.delenv(absent, raising=False)
    env = vf.SingleTurnEnv(
        dataset=[{"question": "q", "answer": "x"}], rubric=vf.Rubric(funcs=[lambda: 1.0])
    )
    with FakeServer("ok") as server:
        (tmp_path / "a.toml").write_text(VARIABLES.format(url=server.url, key="WIRE_KEY"))
        (endpoint,) = load_endpoints(tmp_path / "a.toml")["team"]
        with pytest.raises(vf.MissingKeyError, match=f"variable {absent}, which is not set"):
            env.evaluate(endpoint, "m", num_examples=1)
        assert server.count == 0
