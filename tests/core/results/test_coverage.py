"""A run says what did not happen in it: planted wrong settings are named after the first rollouts,
and sound runs are silent."""

import json
import logging
import time

import pytest

import verifiers as vf
from support.coverage_cases import (
    CALLS,
    PLANTED,
    ROWS,
    SOUND,
    answer_of,
    both,
    broken_tools,
    calling,
    cut,
    right,
    single,
    tools,
)
from verifiers.clients import OpenAIChatCompletionsClient, RetryPolicy
from verifiers.errors import RolloutError
from verifiers.results.coverage import FIRST, Coverage
from verifiers.results.heads import VALUES, counts_of_text, head_values
from verifiers.results.index import RowIndex
from verifiers.results.texts import number_lines
from verifiers.testing import FakeServer, ScriptedClient


def warnings_of(make, reply, caplog, num_examples=-1):
    """What a run logs as warnings, and its results."""
    with caplog.at_level(logging.WARNING, logger="verifiers"):
        results = make().evaluate(ScriptedClient(reply), "m", num_examples=num_examples)
    return [record.getMessage() for record in caplog.records], results


@pytest.mark.parametrize(("make", "reply", "sentence"), PLANTED.values(), ids=PLANTED)
def test_a_wrong_setting_is_named_after_the_first_rollouts(make, reply, sentence, caplog):
    """Before the run ends: the warning is logged when ``FIRST`` rollouts are finished."""
    logged, _ = warnings_of(make, reply, caplog, num_examples=FIRST)
    assert [text for text in logged if sentence in text], logged


@pytest.mark.parametrize(("make", "reply"), SOUND.values(), ids=SOUND)
def test_a_sound_run_is_silent(make, reply, caplog):
    logged, _ = warnings_of(make, reply, caplog)
    assert logged == []


def test_a_warning_comes_once_and_early(caplog):
    seen = []
    env = single()
    with caplog.at_level(logging.WARNING, logger="verifiers"):
        env.evaluate(
            ScriptedClient(cut("x")),
            "m",
            max_concurrent=1,
            on_progress=lambda outputs, metadata: seen.append(len(caplog.records)),
        )
    assert seen == [0] * (FIRST - 1) + [1] * (len(ROWS) - FIRST + 1)


def test_counts_are_saved_and_survive_a_second_session(tmp_path):
    folder = tmp_path / "run"
    single().evaluate(ScriptedClient(cut("x")), "m", num_examples=4, results_path=folder)
    results = single().evaluate(ScriptedClient("2"), "m", results_path=folder)
    counts = results.metadata.coverage
    assert (counts["rollouts"], counts["truncated"], counts["groups"]) == (12, 4, 0)
    assert counts["unparsed"] is counts["without_calls"] is counts["calls_as_text"] is None
    assert results.summary()["coverage"] == counts
    assert json.loads((folder / "metadata.json").read_text())["coverage"] == counts
    assert vf.load_results(folder).metadata.coverage == counts


@pytest.mark.parametrize("workers", [0, 1])
def test_unparsed_replies_are_counted_of_the_rollouts_whose_parser_needs_a_format(
    workers, monkeypatch, tmp_path
):
    """In this process and in workers; each member of a group by its own parser."""
    (tmp_path / "two_kinds.py").write_text(
        "from support.coverage_cases import both as load_environment\n"
    )
    monkeypatch.chdir(tmp_path)
    env = vf.load_environment("two_kinds")
    results = env.evaluate(ScriptedClient("4"), "m", num_workers=workers)
    counts = results.metadata.coverage
    assert (counts["parsed"], counts["unparsed"]) == (12, 12)
    assert (counts["with_tools"], counts["without_calls"], counts["calls_as_text"]) == (12, 12, 0)


def test_groups_with_equal_rewards_are_counted_and_shown_if_all_are():
    def lines(reply):
        results = single().evaluate(ScriptedClient(reply), "m", rollouts_per_example=2)
        return results.metadata.coverage, dict(number_lines(results.summary()))

    counts, shown = lines("1")  # the answer of the first example
    assert (counts["groups"], counts["equal_groups"]) == (12, 12)
    assert shown["groups"].startswith("equal rewards in each of 12")
    counts, shown = lines(["1", "no", "2", "3"])
    assert counts["equal_groups"] < 12
    assert "groups" not in shown


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tool_that_always_fails_is_counted_and_warned_of(workers, caplog, monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text(
        "from support.coverage_cases import broken_tools as load_environment\n"
    )
    monkeypatch.chdir(tmp_path)
    env = vf.load_environment("broken")
    with caplog.at_level(logging.WARNING, logger="verifiers"):
        results = env.evaluate(ScriptedClient(calling), "m", num_workers=workers)
    assert f"{FIRST} of {FIRST} tool calls failed: add: no network" in caplog.text
    assert dict(number_lines(results.summary()))["tool errors"] == "12 of 12 calls failed"


def test_a_parser_that_never_returns_is_not_waited_for():
    parser = vf.Parser(lambda text: time.sleep(20))
    rubric = vf.Rubric([lambda completion: 1.0], parser=parser, timeout_s=0.2)
    env = vf.SingleTurnEnv(eval_dataset=ROWS[:1], rubric=rubric)
    started = time.monotonic()
    results = env.evaluate(ScriptedClient("4"), "m")
    assert time.monotonic() - started < 10
    assert results.metadata.coverage["unparsed"] is None
    assert results["reward"] == [1.0]


# --- of the rows, wherever a run was cut


def mixed(request):
    """Replies that are cut, call tools, fail, or write a call as text."""
    number = int(next(m for m in request.prompt if m.role == "user").content.split()[0])
    if number % 6 == 0:
        return cut("x")(request)
    if number % 6 == 1:
        raise vf.ModelUnavailable("down", status=503)
    if number % 6 == 2:
        return CALLS["hermes"]
    return calling(request)


def fields_of(metadata):
    changing = ("date", "time", "time_ms", "resumed", "path_to_save", "provenance")
    return {name: value for name, value in metadata.items() if name not in changing}


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("num_kept", [1, 8, 11])
@pytest.mark.parametrize("make", [tools, broken_tools, both, single])
def test_every_number_after_a_kill_is_the_uninterrupted_runs(
    make, num_kept, is_large, tmp_path, monkeypatch
):
    """A kill leaves a prefix of the rows, and the metadata of the last write: here none of it, or
    that of twelve rollouts that were done again."""
    if is_large:
        monkeypatch.setattr("verifiers.runs.store.LARGE_PLAN", 0)
        monkeypatch.setattr("verifiers.runs.large_store.PART_ROWS", 5)
    options = {"num_examples": 12, "max_concurrent": 1, "abort_after": 0}
    client = ScriptedClient(mixed)
    uninterrupted = make().evaluate(client, "m", results_path=tmp_path / "a", **options).metadata
    folder = tmp_path / "b"
    make().evaluate(client, "m", results_path=folder, **options)
    journal = folder / "results.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:num_kept]))
    resumed = make().evaluate(client, "m", results_path=folder, **options).metadata
    assert json.loads(json.dumps(resumed["coverage"])) == resumed["coverage"]
    assert repr(fields_of(resumed)) == repr(fields_of(uninterrupted))
    assert resumed["coverage"]["requests"] > 0


def test_the_index_counts_a_row_as_the_run_does(tmp_path):
    for number, make in enumerate((tools, broken_tools, both, single)):
        folder = tmp_path / str(number)
        client = ScriptedClient(mixed)
        results = make().evaluate(client, "m", results_path=folder, abort_after=0)
        index = RowIndex(folder / "results.jsonl")
        index.read()
        coverage = Coverage()
        for text in index.columns["counts"]:
            coverage.add_counts(counts_of_text(text))
        counts = results.metadata["coverage"]
        assert coverage.counts() == {name: counts[name] for name in coverage.counts()}


@pytest.mark.parametrize(
    "odd",
    [
        {"attempts": "many"},
        {"attempts": 1e300},
        {"attempts": -3},
        {"failed_requests": {"refused_for_rate": -2, "unusable": "x"}},
        {"failed_requests": [1]},
        {"tool_defs": [{"function": "add"}, 3, {"name": "add"}]},
        {"tool_defs": "add", "tool_errors": 7},
        {"completion": [{"role": "assistant", "content": "x", "tool_calls": 5}]},
        {"completion": [{"role": "assistant", "content": 5}]},
        {"is_truncated": [], "is_unparsed": "no"},
    ],
    ids=repr,
)
def test_odd_values_of_another_program_cost_no_row(odd):
    row = {"prompt": "?", "completion": "x", "reward": 1.0, "metrics": {"a": 1.0}, "tool_defs": []}
    values = dict(zip(VALUES, head_values(json.dumps(row | odd).encode(), []), strict=True))
    assert values["reward"] == 1.0
    assert all(count > 0 for count in counts_of_text(values["counts"]).values())


def test_requests_that_failed_are_counted_and_explained(tmp_path):
    statuses = [429, 429, 503, 200]
    with FakeServer(script=lambda hit: statuses[hit.index % 4]) as server:
        retry = RetryPolicy(base_s=0.001, max_s=0.001)
        client = OpenAIChatCompletionsClient(base_url=server.url, retry=retry)
        results = single().evaluate(client, "m", max_concurrent=1, results_path=tmp_path)
    counts = results.metadata["coverage"]
    assert counts["requests"] == 4 * len(ROWS)
    assert (counts["refused_for_rate"], counts["server_errors"]) == (2 * len(ROWS), len(ROWS))
    line = dict(number_lines(results.summary()))["requests"]
    assert line == (
        "48, of which 24 refused for their rate (429), 12 answered by an error of the server (5xx)"
    )
    assert vf.load_results(tmp_path).outputs[0]["failed_requests"] == {
        "refused_for_rate": 2,
        "server_errors": 1,
    }
    # negative control
    sound = single().evaluate(ScriptedClient(answer_of), "m")
    assert "requests" not in dict(number_lines(sound.summary()))
    assert "failed_requests" not in sound.outputs[0]


def test_the_failed_requests_of_all_turns_and_attempts_of_a_rollout_are_added():
    class Twice(vf.MultiTurnEnv):
        attempts = 0

        async def env_response(self, messages, state):
            Twice.attempts += 1
            if Twice.attempts == 1:
                raise vf.InfraError("lost")
            return [{"role": "user", "content": "again"}]

    statuses = [429, 200, 429, 429, 200, 503, 200]  # one turn of the first attempt, two of the next
    with FakeServer(script=lambda hit: statuses[hit.index]) as server:
        retry = RetryPolicy(base_s=0.001, max_s=0.001)
        client = OpenAIChatCompletionsClient(base_url=server.url, retry=retry)
        env = Twice(dataset=ROWS[:1], max_turns=2)
        (output,) = env.evaluate(client, "m", max_retries=1).outputs
    assert (output.error, server.count) == (None, len(statuses))
    assert output["failed_requests"] == {"refused_for_rate": 3, "server_errors": 1}


def test_requests_of_a_rollout_that_ends_without_a_completion_are_counted():
    retry = RetryPolicy(max_retries=2, base_s=0.001, max_s=0.001)
    with FakeServer(script=lambda hit: 500) as server:
        client = OpenAIChatCompletionsClient(base_url=server.url, retry=retry)
        results = single().evaluate(client, "m", num_examples=2, abort_after=0)
    counts = results.metadata["coverage"]
    assert (counts["rollouts"], counts["requests"], counts["server_errors"]) == (0, 6, 6)


def test_requests_before_the_time_limit_of_a_rollout_are_counted():
    retry = RetryPolicy(max_retries=9, base_s=0.001, max_s=0.001)
    with FakeServer(script=lambda hit: 429 if hit.index < 2 else {"never": True}) as server:
        client = OpenAIChatCompletionsClient(base_url=server.url, retry=retry)
        results = single().evaluate(
            client, "m", num_examples=1, abort_after=0, rollout_timeout_s=1.0
        )
    assert results.outputs[0]["error"]["error"] == "RolloutTimeout"
    assert results.metadata["coverage"]["refused_for_rate"] == 2


def test_a_rollout_that_was_begun_again_counts_with_its_requests():
    begun = []

    class Hiccup(RolloutError):
        retryable = True

    class Flaky(vf.SingleTurnEnv):
        def setup_state(self, state):
            begun.append(state)
            if len(begun) % 2:
                raise Hiccup("again")

    env = Flaky(eval_dataset=ROWS, rubric=vf.Rubric([right]))
    results = env.evaluate(ScriptedClient(answer_of), "m", max_concurrent=1, max_retries=1)
    assert results.metadata["coverage"]["begun_again"] == len(ROWS)
    assert dict(number_lines(results.summary()))["begun again"].startswith("12 × ")
