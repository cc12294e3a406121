"""What counts as a secret, by name, shape and value; and the digests that tell two
secrets apart."""

from __future__ import annotations

import html
import json
import time
import urllib.parse

import pytest

from verifiers.clients.http import OpenAIChatCompletionsClient
from verifiers.clients.protocol import ClientConfig
from verifiers.environments.integrations.mcp_http import headers_of
from verifiers.environments.integrations.mcp_servers import ServerSpec
from verifiers.environments.single_turn import SingleTurnEnv
from verifiers.rubrics.judge_rubric import JudgeRubric
from verifiers.runs.rollout import RunContext
from verifiers.runtime import redaction
from verifiers.runtime.redaction import (
    HIDDEN,
    digested,
    is_credential_name,
    is_secret_name,
    redacted,
    redacted_column,
    redacted_text,
    redacted_words,
    remember_headers,
    remember_secrets,
    remember_values,
    without_digest,
    without_secrets,
)
from verifiers.sandbox.protocol import SandboxSpec


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    """Secrets of other tests of this process are not those of these."""
    monkeypatch.setattr(redaction, "_remembered", set())


SECRET_NAMES = """
api_key judge_api_key judgeApiKey apikey X-Api-Key Ocp-Apim-Subscription-Key access_token authToken HF_TOKEN hub_token
client_secret clientSecret aws_secret_access_key secret password db_password passphrase credentials token Authorization
Proxy-Authorization Set-Cookie cookie headers extra_headers OPENAI_API_KEY AWS_SECRET_ACCESS_KEY private_key
""".split()
PLAIN_NAMES = """
api_key_var question_key eos_token pad_token_id max_tokens MAX_TOKENS tokenizer num_tokens author key keys monkey
header_from_state extra_headers_from_state secretary token_ids stop_tokens model base_url KEY
""".split()
SHAPES = [
    "sk-proj-abcdefghijklmnop1234",
    "hf_abcdefghijklmnopqrstuv",
    "ghp_abcdefghijklmnopqrstuvwxyz",
    "github_pat_abcdefghijklmnopqrstuvwxyz",
    "xoxb-1234567890-abcdefghij",
    "AKIAIOSFODNN7EXAMPLE",
    "AIzaSyA1234567890abcdefghijklmnopqrstu",
    "eyJhbGciOiJIUzI1NiJ9abc.eyJzdWIiOiIxMjM0NTY3ODkwIn0.SflKxwRJSMeKKF2QT4",
    "Bearer abcdef0123456789",
    "https://me:hunter2@host/simple",
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_the_value_of_such_a_name_is_hidden_at_any_depth(name):
    assert is_secret_name(name)
    canary = "c4n4ry-value"
    settings = {"a": [{"b": {name: {"x": canary, "y": [canary, 7, None, True, ""]}}}]}
    for hide in (redacted, digested):
        assert canary not in json.dumps(hide(settings))
        hidden = hide(settings)["a"][0]["b"][name]["y"]
        assert hidden[2:] == [None, True, ""]
        assert all(value.startswith(HIDDEN) for value in hidden[:2])


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_the_value_of_another_name_stays(name):
    assert not is_secret_name(name)
    assert redacted({name: "value"}) == digested({name: "value"}) == {name: "value"}


@pytest.mark.parametrize("secret", SHAPES)
def test_a_shape_is_found_inside_a_text_under_any_name(secret):
    tail = secret.rpartition(" ")[2].removesuffix("@host/simple").removeprefix("https://")
    for text in (
        redacted_text(f"before {secret} after"),
        json.dumps(redacted({"note": [f"x={secret}"]})),
    ):
        assert tail not in text
        assert HIDDEN in text
    assert "before" in redacted_text(f"before {secret} after")


def test_a_column_of_a_rollout_keeps_what_may_be_data():
    column = {
        "secret": "banana",
        "password": "swordfish",
        "note": SHAPES[0],
        "api_key": "x",
        "headers": {"Cookie": "y"},
    }
    hidden = {"api_key": HIDDEN, "headers": {"Cookie": HIDDEN}}
    assert redacted_column(column) == column | hidden
    assert is_credential_name("X-Api-Key")
    assert not is_credential_name("password")


def test_a_digest_tells_secrets_and_their_names_apart_and_is_the_same_in_every_process():
    digest = digested({"api_key": "a" * 40})["api_key"]
    assert (
        digest
        == digested({"api_key": "a" * 40})["api_key"]
        == digested({"apiKey": "a" * 40})["apiKey"]
    )
    assert digested({"api_key": "b" * 40})["api_key"] != digest
    assert digested({"password": "a" * 40})["password"] != digest
    assert digested({"api_key": digest})["api_key"] == digest
    assert without_digest(digest) == HIDDEN
    in_text = digested({"note": f"use {SHAPES[0]}"})["note"]
    assert without_digest(in_text) == f"use {HIDDEN}"
    assert in_text != digested({"note": f"use {SHAPES[0]}x"})["note"]


def test_what_was_remembered_is_removed_from_every_later_text(monkeypatch):
    monkeypatch.setattr(redaction, "_remembered", set())
    text = "the server said: unknown key 'rosebud-42', pin 1234"
    assert redacted_text(text) == text
    remember_secrets({"judge": [{"api_key": "rosebud-42", "model": "server"}], "password": "1234"})
    assert redacted_text(text) == "the server said: unknown key '***', pin 1234"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["-a", '{"api_key": "x"}'], ["-a", '{"api_key": "***"}']),
        (['--env-args={"api_key": "x"}'], ['--env-args={"api_key": "***"}']),
        (["-S", '{"extra_headers": {"A": "b"}}'], ["-S", '{"extra_headers": {"A": "***"}}']),
        (["--header", "X-A: b:c", "-n", "5"], ["--header", "X-A: ***", "-n", "5"]),
        (["--header=X-A: b"], ["--header=X-A: ***"]),
        (["--header", "X-A:b"], ["--header", "X-A: ***"]),
        (["--header-from-state", "X-A=key"], ["--header-from-state", "X-A=key"]),
        (["--env.args.judge_api_key", "x"], ["--env.args.judge_api_key", "***"]),
        (["--env-args.password=x"], ["--env-args.password=***"]),
        (["-k", "OPENAI_API_KEY"], ["-k", "OPENAI_API_KEY"]),
        (["-a", '{"n":1,  "s": "é"}', "-n", "-1"], ["-a", '{"n":1,  "s": "é"}', "-n", "-1"]),
        (["-x", f"note={SHAPES[0]}"], ["-x", "note=***"]),
    ],
)
def test_a_command_line_is_shown_without_secrets_and_otherwise_as_it_was_typed(words, shown):
    assert redacted_words(words) == shown


def test_settings_without_secrets_name_what_was_left_out():
    settings = {
        "n": (1, 2),
        "headers": {"A": "b"},
        "judge": {"token": "x", "name": "j"},
        "url": "https://a:b@c",
    }
    assert without_secrets(settings) == (
        {"n": (1, 2), "judge": {"name": "j"}},
        ["headers.A", "judge.token", "url"],
    )


@pytest.mark.parametrize(
    "query",
    ["key=k-1", "code=c-1&b=2", "x=1&sig=s%2B1", "subscription-key=abc", "t=0123456789abcdef"],
)
@pytest.mark.parametrize("text", ["https://host/v1?{}", "404 for 'https://host/v1?{}#end'"])
def test_values_of_an_address_that_may_be_keys_are_hidden(text, query):
    shown = redacted_text(text.format(query))
    assert HIDDEN in shown
    for secret in ("k-1", "c-1", "s%2B1", "abc", "0123456789abcdef"):
        assert secret not in shown
    assert shown.startswith(text.partition("{")[0])


@pytest.mark.parametrize(
    "text",
    [
        "https://host/v1?api-version=2024-10-01-preview",
        "https://host/rows?split=train&page=2",
        "git+ssh://git@github.com/a/b",
    ],
)
def test_addresses_without_a_key_stay(text):
    assert redacted_text(text) == text


@pytest.mark.parametrize("login", ["token-alone", "me:p@ss:word", "me:pa%40ss"])
def test_the_login_of_an_address_is_hidden_to_its_end(login):
    assert redacted_text(f"https://{login}@host/x") == f"https://{HIDDEN}@host/x"


# --- long and hostile texts -----------------------------------------------------------------------

WORST = (
    "a. n- a:// a://x@ eyJ- eyJaaaaaaaaaaaaaaaaaaaaaaaaa. eyJaaaaaaaaaaaaaaaaaaaaaaaaa- sk- hf_"
    " authorization authorization: authorization:bearer bearer api_key password= ?a ?key= &a= {}"
).split()


@pytest.mark.parametrize("part", [*WORST, "bearer ", "api_key ", "a ", " ", "\n", "İ"])
def test_a_long_text_is_cut_first_and_takes_no_time(part):
    text = part * (1_000_000 // len(part))
    started = time.process_time()
    shown = redacted_text(text)
    assert time.process_time() - started < 0.1
    assert len(shown) < redaction.MAX_TEXT_CHARS + 100
    assert "characters left out" in shown or len(shown) < 1000


@pytest.mark.parametrize("distance", [0, 1, 10, 39, 40, 41, 3000])
def test_no_part_of_a_secret_across_a_cut_is_shown(distance, monkeypatch):
    secret = "sk-proj-" + "".join(f"{i:04d}" for i in range(8))
    monkeypatch.setenv("OF_THE_TEST_KEY", by_value := "value-" + "xy12" * 300)
    for hidden in (secret, by_value):
        for half in (-1000, 1000):  # before the first end of the cut, or before the second
            place = (1000 if half < 0 else 200_000 - 1000) - min(distance, len(hidden))
            text = ("a " * 100_000)[: place - 1] + " " + hidden
            text += (" b" * 100_000)[: max(0, 200_000 - len(text))]
            shown = redacted_text(text, 2000)
            assert not any(hidden[i : i + 12] in shown for i in range(len(hidden) - 12))
            assert "characters left out" in shown


def test_a_text_of_a_setting_is_never_cut():
    text = "a " * 100_000
    assert redacted({"prompt": text}) == digested({"prompt": text}) == {"prompt": text}
    assert redacted_words(["--env.args.prompt", text])[1] == text


@pytest.mark.parametrize(
    "text",
    [
        "HTTPS://user:hunter2hunter2@host/",
        "proxy-authorization: Basic hunter2hunter2",
        "x-eyJhbGciOiJIUzI1NiJ9abc.eyJhunter2hunter2MjM0.SflKxwRJSMeKKF2QT4",
        "?page=2&version=3&x-signature=hunter2hunter2",
        "#access_token=hunter2hunter2",
    ],
)
def test_shapes_are_found_in_every_spelling(text):
    assert "hunter2" not in redacted_text(text)
    assert redacted_text("?page=2&version=1.2.3.4.5.6.7.8.9.10") == (
        "?page=2&version=1.2.3.4.5.6.7.8.9.10"
    )


SECRET = "Zq7 'pri\"vate'/+ä-value\n"
FORMS = {
    "as it is": lambda secret: secret,
    "without its line end": str.strip,
    "repr": repr,
    "bytes": lambda secret: repr(b"Bearer " + secret.encode()),
    "JSON": json.dumps,
    "JSON, not ASCII": lambda secret: json.dumps({"key": secret}, ensure_ascii=False),
    "JSON in JSON": lambda secret: json.dumps({"error": json.dumps({"key": secret})}),
    "a URL": lambda secret: f"http://h/{urllib.parse.quote(secret.strip())}",
    "a form": lambda secret: urllib.parse.urlencode({"x": secret.strip()}),
    "HTML": lambda secret: f"<b>{html.escape(secret)}</b>",
}


def config_headers(secret):
    ClientConfig(extra_headers={"X-Org": f"Bearer {secret}"}).check()


WAYS_IN = {
    "settings": lambda secret: remember_secrets({"judge": {"api_key": secret}}),
    "headers of a client": config_headers,
    "sampling arguments": lambda secret: SingleTurnEnv(
        dataset=[{"question": "q"}], sampling_args={"extra_body": {"api_key": secret}}
    ),
    "sampling arguments of a run": lambda secret: RunContext(
        None, "m", {"extra_headers": {"X-Org": secret}}
    ),
    "sampling arguments of a judge": lambda secret: JudgeRubric(
        judge_sampling_args={"extra_body": {"access_token": secret}}
    ),
    "variables of a tool server": lambda secret: ServerSpec.of(
        {"name": "s", "command": "c", "env": {"SERVICE_TOKEN": secret}}
    ),
    "variables of a sandbox": lambda secret: SandboxSpec(env={"SERVICE_TOKEN": secret}),
    "a query": lambda secret: OpenAIChatCompletionsClient(
        base_url="http://h/v1", query={"api_key": secret}
    ),
}


@pytest.mark.parametrize("way", WAYS_IN.values(), ids=WAYS_IN)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_each_way_in_remembers_its_secrets_in_every_form_they_are_printed(monkeypatch, way, form):
    monkeypatch.setattr(redaction, "_remembered", set())
    text = f"refused: {form(SECRET)} is not valid"
    assert "Zq7" in redacted_text(text)  # negative control
    way(SECRET)
    shown = redacted_text(text)
    assert HIDDEN in shown
    assert "Zq7" not in shown
    assert "vate" not in shown


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_headers_and_keys_of_variables_of_any_name_are_remembered(monkeypatch, end):
    monkeypatch.setattr(redaction, "_remembered", set())
    monkeypatch.setenv("MY_ACCESS", "Zq7-of-a-variable" + end)
    text = "sent Zq7-of-a-variable and Zq7-of-a-call"
    assert redacted_text(text) == text
    headers_of("s", None, {"X-Tenant": "MY_ACCESS"})
    assert redacted_text(text) == "sent *** and Zq7-of-a-call"
    OpenAIChatCompletionsClient(base_url="http://h/v1", api_key="Zq7-of-a-call" + end)._key()
    assert redacted_text(text) == "sent *** and ***"


def test_a_secret_that_begins_another_leaves_nothing_of_it(monkeypatch):
    monkeypatch.setattr(redaction, "_remembered", set())
    remember_values(["Zq7-value", "Zq7-value-and-more"])
    assert redacted_text("x Zq7-value-and-more, Zq7-value") == "x ***, ***"


PLAIN_HEADERS = {
    "Content-Type": "application/json",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "token-efficient-tools",
    "User-Agent": "Mozilla/5.0 (X11; Linux x86_64)",
    "X-Title": "Night of the reasoning models",
    "HTTP-Referer": "https://example.org/reasoning",
    "X-Region": "eu-central",
    "OpenAI-Organization": "research-lab",
    "X-Env": "production",
    "X-Run": "12345678",
    "X-Since": "2026-11-29",
}
SECRET_HEADERS = {
    "Authorization": "open-sesame",
    "X-Api-Key": "production",
    "apikey": "production",
    "X-Team-Token": "12345678",
    "X-Judge-Auth": "correct horse",
    "Cookie": "session-of-somebody",
    "X-Access": "staircase",
    "X-Gate": "correct-horse-battery",
    "X-Door": "staircase",
    "X-Count": "12345678",
    "X-Team": "Bearer night-shift",
    "X-Project": "tk4fQ29zLw",
    "X-Org": "0123456789abcdef",
    "X-Client": "aGVsbG8gd29ybGQ=",
    "X-Model": "abcdefghijklmnopqrstuvwxyz",
    "X-Name": "kLmNoPqRsT",
    "X-Run": "98765432109876",
    "X-Title": "Night of Zq7-hours",
    "X-Code": "hunter-two",
}


@pytest.mark.parametrize("name", PLAIN_HEADERS)
@pytest.mark.parametrize("nested", [False, True])
def test_headers_that_are_plain_are_shown(monkeypatch, name, nested):
    monkeypatch.setattr(redaction, "_remembered", set())
    headers = {name: PLAIN_HEADERS[name]}
    if nested:
        remember_secrets({"judge": {"extra_headers": headers}})
    else:
        remember_headers(headers)
    text = f"refused in {PLAIN_HEADERS[name]}, twice"
    assert redacted_text(text) == text


@pytest.mark.parametrize("name", SECRET_HEADERS)
@pytest.mark.parametrize("nested", [False, True])
def test_headers_that_may_be_secrets_by_name_or_shape_are_hidden(monkeypatch, name, nested):
    monkeypatch.setattr(redaction, "_remembered", set())
    value = SECRET_HEADERS[name]
    text = f"refused in {value.removeprefix('Bearer ')}, twice"
    assert redacted_text(text) == text  # negative control
    if nested:
        remember_secrets({"judge": [{"headers": {"of all": {name: value}}}]})
    else:
        remember_headers({name: value})
    assert redacted_text(text) == "refused in ***, twice"


def test_an_error_of_an_endpoint_shows_its_plain_headers_and_values_of_its_query(monkeypatch):
    monkeypatch.setenv("NIGHT_TEAM", "research-lab")
    client = OpenAIChatCompletionsClient(
        base_url="http://127.0.0.1:1/v1?api-version=2024-10-21&sig=hunter",
        headers={"X-Region": "eu-central", "X-Gate": "open-sesame", "X-Org": "$NIGHT_TEAM"},
    )
    text = "2024-10-21 in eu-central: hunter, open-sesame, research-lab"
    assert client._endpoint(None).redact(text) == "2024-10-21 in eu-central: ***, ***, ***"


def test_arguments_of_a_tool_server_hold_no_key_in_the_identity_of_a_run():
    spec = ServerSpec.of(
        {"name": "s", "command": "c", "args": ["--api-key", "Zq7-x", "--root=/srv"]}
    )
    shown = json.dumps(spec.identity())
    assert "Zq7-x" not in shown
    assert "--root=/srv" in shown
