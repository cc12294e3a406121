"""``evaluate`` and ``generate``: plans and order, results in memory and on disk, resuming,
refusals."""

import asyncio
import json
import math
import signal
import threading
from pathlib import Path

import pytest

import verifiers as vf
from support.small_envs import Talk, add_one, exact, row, single_turn, sums
from verifiers.runs.plan import Plan
from verifiers.storage.journal import read_journal
from verifiers.testing import FakeServer, ScriptedClient


def rows_on_disk(path):
    return list(read_journal(Path(path) / "results.jsonl"))


def keys(path):
    return [r["rollout_key"] for r in rows_on_disk(path)]


def evaluate(path, env=None, client=None, model="m", **options):
    """One saved run, and how many model calls it made."""
    client = client or ScriptedClient(add_one)
    before = len(client.requests)
    results = (env or single_turn()).evaluate(client, model, results_path=path, **options)
    return results, len(client.requests) - before


def always(completion):
    return 1.0


# --- what is run, and in which order


def test_evaluation_runs_every_example_so_many_times_in_order():
    results = single_turn(3).evaluate(
        ScriptedClient(add_one, delay_s=0.001), "m", rollouts_per_example=2
    )
    assert results["example_ids"] == [0, 0, 1, 1, 2, 2]
    assert results["rewards"] == [1.0] * 6
    assert results["advantages"] == [0.0] * 6
    assert len(results["states"]) == 6
    assert results.metadata.pass_at_k == {"1": 1.0, "2": 1.0}


def test_only_the_first_examples_and_shuffled_ones():
    env = single_turn(20)
    assert env.evaluate(ScriptedClient("x"), "m", num_examples=3)["example_ids"] == [0, 1, 2]
    shuffled = [
        env.evaluate(ScriptedClient("x"), "m", num_examples=3, shuffle_seed=5)["example_ids"]
        for _ in range(2)
    ]
    assert shuffled[0] == shuffled[1] != [0, 1, 2]
    assert len(env.evaluate(ScriptedClient("x"), "m", num_examples=500)) == 20


def test_samples_wrap_round_the_training_set():
    results = single_turn(3).generate(client=ScriptedClient("x"), model="m", n_samples=7)
    assert results["example_ids"] == [0, 0, 0, 1, 1, 2, 2]
    assert single_turn(3).generate(client=ScriptedClient("x"), model="m", n_samples=2)[
        "example_ids"
    ] == [0, 1]
    assert single_turn(3).generate(client=ScriptedClient("x"), model="m")["example_ids"] == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize(
    "inputs", [sums(2), {"question": ["0 + 1", "1 + 1"], "answer": ["1", "2"]}]
)
def test_inputs_of_the_callers_own(inputs):
    results = single_turn(9).generate(inputs, ScriptedClient(add_one), "m")
    assert (results["answers"], results["rewards"]) == (["1", "2"], [1.0, 1.0])
    assert (
        len(single_turn(9).generate(inputs, ScriptedClient(add_one), "m", rollouts_per_example=3))
        == 6
    )


def test_inputs_with_one_id_are_siblings_and_each_is_played_as_it_is():
    inputs = [
        {"question": q, "answer": "1", "example_id": i}
        for q, i in (("0 + 1", 4), ("9 + 1", 7), ("5 + 1", 4))
    ]
    results = single_turn(1).generate(inputs, ScriptedClient(add_one), "m")
    assert results["example_ids"] == [4, 4, 7]
    assert [p[-1]["content"] for p in results["prompts"]] == ["0 + 1", "5 + 1", "9 + 1"]
    assert results["advantages"] == [0.5, -0.5, 0.0]


def test_rows_without_an_id_are_groups_of_their_own():
    results = single_turn(1).generate(
        sums(2) + sums(2), ScriptedClient(["1", "0"]), "m", max_concurrent=1
    )
    assert len(set(results["example_ids"])) == 4
    assert results["advantages"] == [0.0] * 4


def test_results_answer_in_every_documented_way():
    results = single_turn(2).evaluate(
        ScriptedClient(add_one), "m", state_columns=["trajectory", "absent"]
    )
    prompts, completions, rewards = results
    assert rewards is results["rewards"] is results["reward"] is results.reward
    assert len(prompts) == len(completions) == len(results) == 2
    assert results.outputs[0].trajectory[0]["completion"] == completions[0]
    assert results.outputs[0].trajectory[0]["advantage"] == 0.0
    assert results["absent"] == [None, None]
    assert results.metadata["avg_reward"] == 1.0
    without = single_turn(1).evaluate(ScriptedClient("1"), "m", keep_states=False)
    with pytest.raises(vf.UsageError, match="keep_states"):
        without["states"]


def test_the_environment_says_whether_to_score():
    env = single_turn(1, score_rollouts=False)
    assert math.isnan(env.evaluate(ScriptedClient("1"), "m")["rewards"][0])
    assert env.evaluate(ScriptedClient("1"), "m", score_rollouts=True)["rewards"] == [1.0]


def test_independent_scoring_has_no_advantages():
    results = single_turn(2).evaluate(
        ScriptedClient("1"), "m", independent_scoring=True, rollouts_per_example=2
    )
    assert results["advantages"] == [None] * 4


# --- before the first request


def wants_more(completion, difficulty):
    return 1.0


@pytest.mark.parametrize(
    ("env", "options", "told"),
    [
        (
            lambda: single_turn(rubric=vf.Rubric(funcs=[wants_more])),
            {},
            "'difficulty' that nothing supplies",
        ),
        (
            lambda: single_turn(rubric=vf.Rubric(funcs=[lambda completions: [1.0]])),
            {"independent_scoring": True},
            "group",
        ),
        (lambda: vf.SingleTurnEnv(dataset=lambda: []), {}, "nothing to run"),
        (lambda: single_turn(env_args={"f": print}), {"results_path": "run"}, "cannot be saved"),
    ],
)
def test_what_cannot_work_is_found_before_the_first_request(
    env, options, told, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    client = ScriptedClient("x")
    with pytest.raises(vf.UsageError, match=told):
        env().evaluate(client, "m", **options)
    assert client.requests == []
    assert list(tmp_path.iterdir()) == []


def test_settings_that_could_not_be_saved_are_fine_without_saving():
    results = single_turn(1, env_args={"f": print}).evaluate(ScriptedClient("1"), "m")
    assert results.metadata.fingerprint is None


def test_without_any_client_the_ways_are_listed(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(vf.ConfigError, match="OPENAI_API_KEY"):
        single_turn().evaluate(None, "some-model")
    with pytest.raises(vf.ConfigError, match="OpenAI"):
        single_turn().evaluate(object(), "m")


def test_a_client_of_the_context_is_used():
    with vf.use_client(ScriptedClient(add_one), "from-context"):
        results = single_turn().evaluate()
    assert results["rewards"] == [1.0] * 3
    assert results.metadata.model == "from-context"


async def test_a_client_of_the_context_is_used_inside_a_loop_too():
    with vf.use_client(ScriptedClient(add_one), "from-context"):
        assert single_turn().evaluate_sync().metadata.model == "from-context"
        assert (await single_turn().evaluate()).metadata.model == "from-context"


# --- calling convention


async def test_inside_a_loop_the_call_returns_an_awaitable():
    pending = single_turn().evaluate(ScriptedClient(add_one), "m")
    assert asyncio.iscoroutine(pending)
    assert len(await pending) == 3
    assert len(single_turn().evaluate_sync(ScriptedClient(add_one), "m")) == 3
    assert len(single_turn().generate_sync(sums(2), ScriptedClient(add_one), "m")) == 2
    assert len(await single_turn().a_generate(sums(2), ScriptedClient(add_one), "m")) == 2


def test_it_works_in_a_thread_and_touches_no_signal_handler(tmp_path):
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    threads, outcome = threading.active_count(), []
    thread = threading.Thread(target=lambda: outcome.append(evaluate(tmp_path / "run")[1]))
    thread.start()
    thread.join()
    assert outcome == [3]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert threading.active_count() == threads


async def test_two_runs_share_one_openai_client_in_one_loop():
    import openai

    with FakeServer("1", delay_s=0.01) as server:
        client = openai.AsyncOpenAI(base_url=server.url, api_key="k")
        runs = await asyncio.gather(
            *(single_turn(n).evaluate(client, "scripted", max_concurrent=2) for n in (2, 4, 12, 20))
        )
        assert [r.metadata.num_errors for r in runs] == [0, 0, 0, 0]
        assert not client.is_closed()
        assert server.count == 38


@pytest.mark.parametrize("kind", ["OpenAI", "AsyncOpenAI", "ClientConfig"])
def test_openai_objects_are_accepted_as_they_are(kind):
    import openai

    with FakeServer("1") as server:
        if kind == "ClientConfig":
            client = vf.ClientConfig(api_base_url=server.url)
        else:
            client = getattr(openai, kind)(base_url=server.url, api_key="k", max_retries=1)
        for _ in range(2):
            results = single_turn(3).evaluate(client, "scripted", temperature=0.5)
            assert results["rewards"] == [1.0, 0.0, 0.0]
        assert server.count == 6
        assert server.requests[0]["temperature"] == 0.5
        assert results.metadata.base_url.rstrip("/") == server.url
        if kind != "ClientConfig":
            assert results["states"][0]["client"] is client
            assert not client.is_closed()


def test_raw_responses_are_kept_on_request():
    import openai

    with FakeServer("1") as server:
        client = openai.OpenAI(base_url=server.url, api_key="k")
        for keep in (True, False):
            results = single_turn(1).evaluate(client, "scripted", keep_raw_responses=keep)
            raw = results["states"][0]["responses"][0].raw
            assert (raw is not None) is keep


def test_a_server_that_is_not_there_is_told_before_rollouts_start():
    with pytest.raises(vf.EndpointUnreachable, match="start the server"):
        single_turn().evaluate(vf.ClientConfig(api_base_url="http://127.0.0.1:9/v1"), "m")


def test_a_model_the_server_does_not_list_is_warned_about(caplog):
    with FakeServer("1", models=["other"]) as server:
        single_turn(1).evaluate(vf.ClientConfig(api_base_url=server.url), "mine")
    assert "'mine'" in caplog.text


# --- callbacks


async def test_callbacks_get_durable_rows_and_may_be_async(tmp_path):
    seen = []

    async def on_progress(outputs, metadata):
        on_disk = {r["example_id"] for r in rows_on_disk(tmp_path)}
        seen.append(all(o.example_id in on_disk for o in outputs))
        assert metadata.status == "running"

    await single_turn(5).evaluate(
        ScriptedClient("1"), "m", results_path=tmp_path, on_progress=on_progress
    )
    assert seen == [True] * 5


def test_a_callback_that_raises_is_logged_and_stops_nothing(caplog):
    results = single_turn(2).evaluate(
        ScriptedClient("1"), "m", on_progress=lambda rows, metadata: 1 / 0
    )
    assert len(results) == 2
    assert "ZeroDivisionError" in caplog.text


# --- on disk


def test_a_saved_run_is_described_complete_and_readable(tmp_path):
    results, _ = evaluate(tmp_path, state_columns=["trajectory"], seed=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "metadata.json",
        "results.jsonl",
        "run.lock",
    ]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["fingerprint"] == results.metadata.fingerprint
    assert config["config"]["reward_functions"] == ["exact"]
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    assert (metadata["status"], metadata["num_rollouts"], metadata["seed"]) == ("complete", 3, 3)
    again = vf.load_results(tmp_path)
    assert again["rewards"] == results["rewards"]
    assert again["advantages"] == results["advantages"]
    assert again.outputs[0].trajectory[0]["prompt"] == results["prompts"][0]


def test_the_default_place_is_named_after_environment_model_and_configuration(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    env = single_turn(1, env_id="sums")
    for _ in range(2):
        env.evaluate(ScriptedClient("1"), "org/model", save_results=True)
    env.evaluate(ScriptedClient("1"), "org/model", save_results=True, resume=False)
    runs = sorted(p.name for p in (tmp_path / "outputs/evals/sums--org--model").iterdir())
    assert [name[8:] for name in runs] == ["", "-2", "-3"]


def test_secrets_in_settings_do_not_reach_the_disk(tmp_path):
    extra = {"extra_headers": {"Authorization": "Bearer sk-secret-0123456789abcdef"}}
    evaluate(tmp_path, sampling_args={"extra_body": extra})
    for path in tmp_path.iterdir():
        assert "sk-secret" not in path.read_text()


def test_journal_rows_of_long_conversations_are_linear_in_turns(tmp_path):
    def size(turns):
        path = tmp_path / str(turns)
        env = Talk(1, max_turns=turns)
        evaluate(path, env, ScriptedClient("some words", tokens=True), state_columns=["trajectory"])
        return (path / "results.jsonl").stat().st_size

    small, large = size(8), size(64)
    assert large <= 8.5 * small


def test_journal_rows_with_whole_prompts_grow_with_the_square():
    """Negative control: the same steps written as they read."""
    results = Talk(1, max_turns=64).evaluate(ScriptedClient("some words", tokens=True), "m")
    steps = [dict(step) | {"response": None} for step in results["states"][0]["trajectory"]]
    bytes_of = [len(json.dumps(step, default=dict)) for step in steps]
    assert sum(bytes_of) > 20 * sum(bytes_of[:8])


# --- resuming


def test_a_complete_run_gives_its_rows_without_a_request(tmp_path):
    first, asked = evaluate(tmp_path, rollouts_per_example=2)
    again, asked_again = evaluate(tmp_path, rollouts_per_example=2)
    assert (asked, asked_again) == (6, 0)
    assert again["rewards"] == first["rewards"]
    assert again["example_ids"] == first["example_ids"]
    assert set(again.outputs[0]) == set(first.outputs[0])
    assert len(again["states"]) == 6
    assert (again.metadata.status, again.metadata.resumed) == ("complete", 6)
    assert again.metadata.avg_reward == first.metadata.avg_reward


@pytest.mark.parametrize(
    ("examples", "siblings", "pending"),
    [(3, 3, 3), (3, 2, 0), (2, 2, 0), (3, 5, 9)],
    ids=lambda n: str(n),
)
def test_more_examples_or_siblings_extend_a_run(tmp_path, examples, siblings, pending):
    env = single_turn(3)
    evaluate(tmp_path, env, num_examples=3, rollouts_per_example=2)
    results, asked = evaluate(tmp_path, env, num_examples=examples, rollouts_per_example=siblings)
    assert asked == pending
    assert len(results) == examples * siblings
    assert len(set(keys(tmp_path))) == len(keys(tmp_path)) == max(6, examples * siblings)


def test_examples_can_be_added(tmp_path):
    evaluate(tmp_path, single_turn(2))
    results, asked = evaluate(tmp_path, single_turn(5))
    assert (asked, len(results), results["answers"]) == (3, 5, ["1", "2", "3", "4", "5"])


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model": "other"}, "model"),
        ({"temperature": 0.5}, "sampling_args.temperature"),
        ({"seed": 4}, "seed"),
        ({"independent_scoring": True}, "independent_scoring"),
        ({"score_rollouts": False}, "score_rollouts"),
        ({"env": dict(system_prompt="Be brief.")}, "system_prompt"),
        ({"env": dict(env_args={"n": 2})}, "env_args.n"),
        ({"env": dict(max_seq_len=99)}, "max_seq_len"),
        ({"env": dict(timeout_seconds=9.0)}, "timeout_seconds"),
        ({"env": dict(rubric=vf.Rubric(funcs=[exact], weights=[0.5]))}, "reward_weights"),
        ({"env": dict(rubric=vf.Rubric(funcs=[exact, always]))}, "reward_functions"),
    ],
)
def test_another_configuration_is_refused_and_nothing_is_written(tmp_path, change, key):
    evaluate(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != "run.lock"}
    client = ScriptedClient("x")
    options = {name: value for name, value in change.items() if name != "env"}
    with pytest.raises(vf.RunMismatch) as caught:
        evaluate(tmp_path, single_turn(**change.get("env", {})), client, **options)
    assert key in caught.value.differences
    assert key in str(caught.value)
    assert client.requests == []
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != "run.lock"} == before


@pytest.mark.parametrize(
    "change",
    [
        {"max_concurrent": 1},
        {"state_columns": ["trajectory"]},
        {"abort_after": 3},
        {"rollout_timeout_s": 60.0},
    ],
)
def test_what_does_not_change_the_rows_may_differ(tmp_path, change):
    """Negative control."""
    evaluate(tmp_path)
    assert evaluate(tmp_path, **change)[1] == 0


def test_resume_can_be_refused(tmp_path):
    evaluate(tmp_path)
    with pytest.raises(vf.ConfigError, match="already holds a run"):
        evaluate(tmp_path, resume=False)
    assert evaluate(tmp_path / "new", resume=False)[1] == 3


def test_an_interrupted_run_goes_on_with_what_it_owes(tmp_path):
    env = single_turn(10)
    client = ScriptedClient(add_one, errors={6: vf.AuthenticationFailed("the key expired")})
    with pytest.raises(vf.AuthenticationFailed):
        evaluate(tmp_path, env, client, max_concurrent=1)
    assert json.loads((tmp_path / "metadata.json").read_text())["status"] == "failed"
    assert len(keys(tmp_path)) == 6
    results, asked = evaluate(tmp_path, env)
    assert asked == 4
    assert results["rewards"] == [1.0] * 10
    assert len(set(keys(tmp_path))) == len(keys(tmp_path)) == 10


async def test_a_cancelled_run_is_marked_and_goes_on(tmp_path):
    env, client = single_turn(20), ScriptedClient(add_one, delay_s=0.02)
    begun = asyncio.Event()
    task = asyncio.ensure_future(
        env.evaluate(
            client, "m", results_path=tmp_path, max_concurrent=4, on_progress=lambda *_: begun.set()
        )
    )
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert json.loads((tmp_path / "metadata.json").read_text())["status"] == "interrupted"
    done, before = len(keys(tmp_path)), len(client.requests)
    assert 0 < done < 20
    results = await env.evaluate(client, "m", results_path=tmp_path)
    assert len(client.requests) - before == 20 - done
    assert results["rewards"] == [1.0] * 20


def test_rows_with_errors_count_as_done_unless_asked_for(tmp_path):
    failing = ScriptedClient(
        add_one, errors={0: vf.ModelUnavailable("down"), 2: vf.ModelUnavailable("down")}
    )
    first, _ = evaluate(tmp_path, client=failing, max_concurrent=1)
    assert first.metadata.num_errors == 2
    same, asked = evaluate(tmp_path)
    assert (asked, same.metadata.num_errors) == (0, 2)
    assert same["errors"][0].error == "ModelUnavailable"
    again, asked = evaluate(tmp_path, retry_errors=True)
    assert (asked, again["rewards"], again.metadata.num_errors) == (2, [1.0] * 3, 0)
    assert vf.load_results(tmp_path)["rewards"] == [1.0] * 3


def test_edited_rows_run_anew_and_gone_ones_are_reported(tmp_path, caplog):
    evaluate(tmp_path, single_turn(4))
    # reordered, one edited, one removed
    rows = [sums(4)[2], {"question": "7 + 1", "answer": "8"}, sums(4)[0]]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[exact]))
    results, asked = evaluate(tmp_path, env)
    assert asked == 1
    assert results["answers"] == ["3", "8", "1"]
    assert results["example_ids"] == [0, 1, 2]
    assert results["rewards"] == [1.0] * 3
    assert results.metadata.num_rollouts == 3
    assert "holds 2 rollouts outside this plan" in caplog.text
    assert len(keys(tmp_path)) == 5
    read = vf.load_results(tmp_path)
    assert sorted(read["answers"]) == ["1", "3", "8"]
    assert (read.metadata.num_rollouts, len(read.metadata.outside_plan)) == (3, 2)
    # nobody knows the plan any more: everything there is counts
    (tmp_path / "metadata.json").unlink()
    assert len(vf.load_results(tmp_path)) == 5


def test_a_smaller_plan_is_read_back_as_it_was_run_and_the_larger_one_again(tmp_path):
    assert len(evaluate(tmp_path, single_turn(4))[0]) == 4
    env = single_turn(4)
    for num_examples, expected in ((2, 2), (4, 4), (-1, 4)):
        results = env.evaluate(
            ScriptedClient(add_one), "m", results_path=tmp_path, num_examples=num_examples
        )
        assert len(results) == len(vf.load_results(tmp_path)) == expected
    assert vf.load_results(tmp_path).metadata.outside_plan == []


def test_equal_rows_are_rollouts_of_their_own(tmp_path):
    env = vf.SingleTurnEnv(dataset=sums(2) * 3, rubric=vf.Rubric(funcs=[exact]))
    client = ScriptedClient(add_one)
    first = env.evaluate(client, "m", results_path=tmp_path, rollouts_per_example=2, seed=1)
    assert len(first) == len(client.requests) == len(set(keys(tmp_path))) == 12
    assert len({request.seed for request in client.requests}) == 12
    assert evaluate(tmp_path, env, rollouts_per_example=2, seed=1)[1] == 0
    assert evaluate(tmp_path, env, rollouts_per_example=3, seed=1)[1] == 6
    assert len(vf.load_results(tmp_path)) == 18


def test_equal_rows_by_content_alone_are_one_rollout():
    """Negative control: the hashes of equal rows are equal; what tells them apart is
    their number."""
    env = vf.SingleTurnEnv(dataset=sums(1) * 2)
    plain = [example.hash for example in env.train_table]
    assert plain[0] == plain[1]
    numbered = [job.example.hash for (job,) in Plan(env.train_table, [1, 1]).groups()]
    assert numbered == [plain[0], f"{plain[0]}.2"]


def group_size(completions):
    return [float(len(completions))] * len(completions)


def test_a_whole_group_is_pending(tmp_path):
    def env():
        return single_turn(3, rubric=vf.Rubric(funcs=[group_size]))

    client = ScriptedClient(add_one, errors={6: vf.AuthenticationFailed("no key")})
    with pytest.raises(vf.AuthenticationFailed):
        evaluate(tmp_path, env(), client, rollouts_per_example=4, max_concurrent=1)
    assert len(keys(tmp_path)) == 4
    results, asked = evaluate(tmp_path, env(), rollouts_per_example=4)
    assert asked == 8
    assert results["rewards"] == [4.0] * 12
    assert all(r["advantage"] == 0.0 for r in rows_on_disk(tmp_path))
    extended, asked = evaluate(tmp_path, env(), rollouts_per_example=5)
    assert (asked, extended["rewards"]) == (15, [5.0] * 15)
    assert vf.load_results(tmp_path)["rewards"] == [5.0] * 15


def test_advantages_of_a_resumed_group_are_those_of_an_uninterrupted_one(tmp_path):
    replies = {"0 + 1": "1", "1 + 1": "0", "2 + 1": "0"}
    counts = {}

    def reply(request):
        """The first sibling of every example is right, the others are wrong."""
        text = request.prompt[-1]["content"]
        counts[text] = counts.get(text, 0) + 1
        return str(int(replies[text]) if counts[text] > 1 else int(text.split()[0]) + 1)

    replies = dict.fromkeys(replies, "0")
    uninterrupted = single_turn(3).evaluate(
        ScriptedClient(reply), "m", rollouts_per_example=3, max_concurrent=1
    )
    counts.clear()
    client = ScriptedClient(reply, errors={4: vf.AuthenticationFailed("no key")})
    with pytest.raises(vf.AuthenticationFailed):
        evaluate(tmp_path, client=client, rollouts_per_example=3, max_concurrent=1)
    results, _ = evaluate(
        tmp_path, client=ScriptedClient("0"), rollouts_per_example=3, max_concurrent=1
    )
    assert results["rewards"][:6] == uninterrupted["rewards"][:6]
    assert results["advantages"][:6] == pytest.approx(uninterrupted["advantages"][:6])
    assert [s["advantage"] for s in results["states"]] == results["advantages"]
    assert [s["trajectory"][0]["advantage"] for s in results["states"][4:6]] == results[
        "advantages"
    ][4:6]
    assert vf.load_results(tmp_path)["advantages"] == results["advantages"]


def test_metadata_are_renewed_while_a_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("verifiers.runs.store.METADATA_EVERY_S", 0.0)
    monkeypatch.setattr("verifiers.runs.store.COST_SHARE", 1e9)
    seen = []

    def look(rows, metadata):
        seen.append(json.loads((tmp_path / "metadata.json").read_text())["num_rollouts"])

    evaluate(tmp_path, single_turn(4), max_concurrent=1, on_progress=look)
    assert seen == [1, 2, 3, 4]


def test_completion_mode_is_saved_and_resumed(tmp_path):
    env = vf.SingleTurnEnv(dataset=[{"prompt": "once"}], message_type="completion")
    client = ScriptedClient(" upon a time")
    first, _ = evaluate(tmp_path, env, client)
    again, asked = evaluate(tmp_path, env, client)
    assert asked == 0
    assert first["completions"] == again["completions"] == [" upon a time"]


def test_columns_with_names_of_the_states_own_do_no_harm():
    env = vf.SingleTurnEnv(
        dataset=[row(error="none", reward=0.5, completion="gold", id="abc", metrics=[1])]
    )
    results = env.evaluate(ScriptedClient("x"), "m")
    assert results["errors"] == [None]
    assert math.isnan(results["rewards"][0])  # of no reward function, and not the row's 0.5
    assert results["states"][0]["input"]["id"] == "abc"
