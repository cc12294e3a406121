"""The cache of completions: what is one request and what is another, concurrency,
kills and damage."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys

import pytest

import verifiers as vf
from verifiers.clients import cache
from verifiers.clients.cache import CompletionCache
from verifiers.testing import Behaviour, FakeServer, ScriptedClient

ROWS = [{"question": f"row {n}", "answer": ""} for n in range(5)]


def counter():
    """A model that never says the same twice."""
    numbers = itertools.count()
    return lambda request: vf.Response(
        vf.AssistantMessage(f"reply {next(numbers)}"), usage=vf.Usage(7, 3)
    )


def environment(rows=ROWS, rubric=None):
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=rubric or vf.Rubric([lambda completion: 1.0]))


def evaluate(server, folder, env=None, **options):
    defaults = {
        "num_examples": -1,
        "rollouts_per_example": 3,
        "cache_dir": folder,
        "temperature": 1.0,
    }
    return (env or environment()).evaluate(
        vf.ClientConfig(api_base_url=server.url), "m", **{**defaults, **options}
    )


def texts(results):
    return [completion[-1].content for completion in results["completions"]]


@pytest.mark.parametrize("client_type", ["openai_responses", "anthropic_messages"])
def test_the_clients_of_streams_are_cached_and_metered_too(client_type, tmp_path):
    with FakeServer(counter()) as server:
        client = vf.ClientConfig(api_base_url=server.url, client_type=client_type)
        options = {
            "num_examples": 2,
            "rollouts_per_example": 2,
            "max_tokens": 8,
            "max_total_tokens": 100_000,
        }
        first, again = (
            environment().evaluate(client, "m", cache_dir=tmp_path, **options) for _ in range(2)
        )
        assert server.count == 4
    assert texts(again) == texts(first)
    assert again["token_usages"] == first["token_usages"]
    assert (first.metadata.spent["tokens"], again.metadata.spent["tokens"]) == (40, 0)


def test_the_same_run_again_sends_nothing_and_siblings_stay_different(tmp_path):
    with FakeServer(counter()) as server:
        first = evaluate(server, tmp_path)
        again = evaluate(server, tmp_path)
        assert server.count == 15
        assert texts(again) == texts(first)
        assert len(set(texts(again))) == 15
        assert again["token_usages"] == first["token_usages"]
        assert (first.metadata.cached["hits"], again.metadata.cached["hits"]) == (0, 15)
        assert evaluate(server, None).metadata.cached is None  # negative control
        assert server.count == 30


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"max_tokens": 9},
        {"seed": 3},
        {"rollouts_per_example": 4},
        {"env": environment([{"question": "another"}])},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_request_is_sent(tmp_path, change):
    with FakeServer(counter()) as server:
        evaluate(server, tmp_path)
        before = server.count
        evaluate(server, tmp_path, **change)
        new = {"rollouts_per_example": 5, "env": 3}.get(next(iter(change)), 15)
        assert server.count == before + new


def test_another_model_or_server_is_another_request(tmp_path):
    with FakeServer(counter()) as server, FakeServer(counter()) as second:
        evaluate(server, tmp_path)
        evaluate(second, tmp_path)
        assert second.count == 15
        environment().evaluate(
            vf.ClientConfig(api_base_url=server.url), "m2", num_examples=-1, cache_dir=tmp_path
        )
        assert server.count == 20


def test_equal_rows_are_different_samples(tmp_path):
    with FakeServer(counter()) as server:
        twice = environment([{"question": "same"}, {"question": "same"}])
        results = evaluate(server, tmp_path, env=twice)
        assert len(set(texts(results))) == 6
        assert texts(evaluate(server, tmp_path, env=twice)) == texts(results)


def test_turns_of_one_rollout_with_an_equal_prompt_are_different_samples(tmp_path):
    class Forgetful(vf.MultiTurnEnv):
        async def env_response(self, messages, state):
            return []

        async def get_prompt_messages(self, state):
            return state["prompt"]

    env = Forgetful(eval_dataset=ROWS[:1], max_turns=4, rubric=vf.Rubric([lambda completion: 1.0]))
    with FakeServer(counter()) as server:
        evaluate(server, tmp_path, env=env, rollouts_per_example=1)
        assert server.count == 4
        evaluate(server, tmp_path, env=env, rollouts_per_example=1)
        assert server.count == 4


def test_a_judge_is_asked_once_about_equal_answers(tmp_path):
    with FakeServer("fixed") as server, FakeServer("<score>5</score>") as judges:
        judge = vf.JudgeRubric(
            judge_client=vf.ClientConfig(api_base_url=judges.url), judge_models=["j"]
        )
        assert evaluate(server, tmp_path, env=environment(rubric=judge))["rewards"] == [0.5] * 15
        before = judges.count
        assert evaluate(server, tmp_path, env=environment(rubric=judge))["rewards"] == [0.5] * 15
        assert judges.count == before <= 15


def test_failures_are_not_stored(tmp_path):
    with FakeServer(
        counter(), script=[Behaviour(400, body=b"{}"), Behaviour(body=b'{"choices": []}')]
    ) as server:
        first = evaluate(server, tmp_path, rollouts_per_example=1, env=environment(ROWS[:1]))
        assert first["errors"][0] is not None
        again = evaluate(server, tmp_path, rollouts_per_example=1, env=environment(ROWS[:1]))
        assert again["errors"] == [None]


def test_a_damaged_entry_is_a_miss_and_is_replaced(tmp_path):
    with FakeServer(counter()) as server:
        evaluate(server, tmp_path, rollouts_per_example=1)
        files = sorted(tmp_path.rglob("*.json"))
        files[0].write_bytes(files[0].read_bytes()[:-20])
        files[1].write_bytes(b"")
        assert evaluate(server, tmp_path, rollouts_per_example=1).metadata.cached["hits"] == 3
        assert evaluate(server, tmp_path, rollouts_per_example=1).metadata.cached["hits"] == 5


def test_an_entry_has_the_request_and_no_key(tmp_path):
    with FakeServer(counter()) as server:
        client = vf.as_client(
            vf.ClientConfig(
                api_base_url=server.url, extra_headers={"Authorization": "Bearer very-secret-key"}
            )
        )
        environment(ROWS[:1]).evaluate(client, "m", num_examples=1, cache_dir=tmp_path)
    (file,) = tmp_path.rglob("*.json")
    entry = json.loads(file.read_text())
    assert entry["request"]["messages"] == [{"role": "user", "content": "row 0"}]
    assert entry["reply"]["choices"][0]["message"]["content"] == "reply 0"
    assert "secret" not in file.read_text()


def test_a_reply_from_the_cache_costs_nothing(tmp_path):
    prices = {"usd_per_million_input_tokens": 1000.0, "usd_per_million_output_tokens": 1000.0}
    with FakeServer(counter()) as server:
        config = vf.ClientConfig(api_base_url=server.url, **prices)
        options = {
            "num_examples": -1,
            "cache_dir": tmp_path,
            "max_tokens": 5,
            "max_cost_usd": 100.0,
        }
        first = environment().evaluate(config, "m", **options)
        again = environment().evaluate(config, "m", **options)
    assert first.metadata.spent["usd"] == pytest.approx(5 * 10 * 1000 / 1e6)
    assert again.metadata.spent["usd"] == 0.0


CHILD = """
import asyncio, sys
from verifiers.clients import cache
from verifiers.clients.cache import CompletionCache

async def write(cache):
    for n in range(100_000):
        await cache.put(f"{n % 50:064x}", b'{"n": 1}', b'{"x": "' + b"y" * 20_000 + b'"}')
        print(n, flush=True)

asyncio.run(write(CompletionCache(sys.argv[1])))
"""


def test_kills_and_concurrent_writers_leave_whole_entries(tmp_path):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for child, count in zip(children, (60, 90), strict=True):
        for _ in range(count):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.communicate()
    cache = CompletionCache(tmp_path)
    replies = [asyncio.run(cache.get(f"{n:064x}", bytes)) for n in range(50)]
    assert all(reply is not None and len(reply) == 20_009 for reply in replies)


def test_clients_without_a_cache_are_refused(tmp_path):
    with pytest.raises(vf.ConfigError, match="cannot hold the replies of ScriptedClient"):
        environment().evaluate(
            ScriptedClient("x"), "m", cache_dir=tmp_path / "cache", results_path=tmp_path / "run"
        )
    with FakeServer("x") as server, pytest.raises(vf.ConfigError, match="num_workers=0"):
        evaluate(server, tmp_path, num_workers=1)
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")
    with (
        FakeServer("x") as server,
        pytest.raises(vf.ConfigError, match="the cache cannot be kept in"),
    ):
        evaluate(server, tmp_path / "file" / "cache")


CHANGES = {
    "a letter of the reply": lambda entry: entry.replace("reply 0", "reply 9"),
    "a letter of the request": lambda entry: entry.replace("row 0", "row 9"),
    "a foreign shape": lambda entry: '{"request": {}, "reply": {"choices": 5}, "sha256": ""}',
    "without a checksum": lambda entry: entry.partition(',"sha256"')[0] + "}",
    "deep": lambda entry: '{"request": ' + "[" * 100_000 + "]" * 100_000 + "}",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_entry_is_a_miss_and_is_replaced(tmp_path, change):
    with FakeServer(counter()) as server:
        env = environment(ROWS[:1])
        evaluate(server, tmp_path, env, rollouts_per_example=1)
        (file,) = tmp_path.rglob("*.json")
        changed = CHANGES[change](file.read_text())
        assert changed != file.read_text()
        file.write_text(changed)
        assert texts(evaluate(server, tmp_path, env, rollouts_per_example=1)) == ["reply 1"]
        assert texts(evaluate(server, tmp_path, env, rollouts_per_example=1)) == ["reply 1"]
        assert server.count == 2


def test_an_entry_under_the_name_of_another_request_is_a_miss(tmp_path):
    with FakeServer(counter()) as server:
        evaluate(server, tmp_path, environment(ROWS[:2]), rollouts_per_example=1)
        first, second = tmp_path.rglob("*.json")
        first.write_bytes(second.read_bytes())
        again = evaluate(server, tmp_path, environment(ROWS[:2]), rollouts_per_example=1)
        assert again.metadata.cached["hits"] == 1
        assert len(set(texts(again))) == 2


def test_a_reply_that_is_none_is_a_miss_whatever_its_checksum_says(tmp_path, monkeypatch):
    with FakeServer(counter()) as server:
        env = environment(ROWS[:1])
        with monkeypatch.context() as patch:
            patch.setattr(cache, "_checksum", lambda key, request, reply: "same")
            evaluate(server, tmp_path, env, rollouts_per_example=1)
            (file,) = tmp_path.rglob("*.json")
            file.write_text('{"request": {}, "reply": {"choices": 5}, "sha256": "same"}')
            assert texts(evaluate(server, tmp_path, env, rollouts_per_example=1)) == ["reply 1"]
            # negative control: without the checksum a changed letter is taken for a reply
            file.write_text(file.read_text().replace("reply 1", "reply 9"))
            assert texts(evaluate(server, tmp_path, env, rollouts_per_example=1)) == ["reply 9"]


def test_a_pipe_in_the_place_of_an_entry_is_a_miss(tmp_path):
    with FakeServer(counter()) as server:
        env = environment(ROWS[:1])
        evaluate(server, tmp_path, env, rollouts_per_example=1)
        (file,) = tmp_path.rglob("*.json")
        file.unlink()
        os.mkfifo(file)
        assert texts(evaluate(server, tmp_path, env, rollouts_per_example=1)) == ["reply 1"]
        assert file.is_file()


def test_keys_of_the_body_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "canary-by-its-value")
    body = {"api_key": "canary-by-its-name", "user": "canary-by-its-value", "tier": "flex"}
    with FakeServer(counter()) as server:
        for _ in range(2):
            evaluate(server, tmp_path, environment(ROWS[:1]), extra_body=body)
        assert server.count == 3
        evaluate(server, tmp_path, environment(ROWS[:1]), extra_body=body | {"api_key": "another"})
        assert server.count == 6
    for file in tmp_path.rglob("*.json"):
        assert "flex" in file.read_text()
        assert "canary" not in file.read_text()
