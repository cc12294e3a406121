"""A run says what did not happen in it: planted wrong settings are named after the first rollouts,
and sound runs are silent."""

import json
import logging
import time

import pytest

import verifiers as vf
from support.coverage_cases import PLANTED, ROWS, SOUND, calling, cut, single
from verifiers.results.coverage import FIRST
from verifiers.results.texts import number_lines
from verifiers.testing import ScriptedClient


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
