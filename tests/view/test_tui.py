"""``vf-tui`` driven by its keys: the list, a run's rollouts, a rollout, the way back."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

import pytest

import verifiers as vf
from support import view_runs
from support.fresh_python import Ran
from verifiers.cli.tui import COMMAND
from verifiers.results.texts import number_lines
from verifiers.runtime.install_lines import install_line
from verifiers.testing import ScriptedClient
from verifiers.view.catalog import Catalog
from verifiers.view.library import Library

pytest.importorskip("textual", reason="textual is not installed (extra tui)")

from textual.widgets import Static

from verifiers.tui.app import RolloutScreen, RowsScreen, RunsApp, RunsScreen, ordered

CAREFUL = "evals/times-table--careful-7b/3fa9c1d2"


@pytest.fixture
def app(runs):
    return RunsApp(Library(Catalog([runs])))


def shown(app) -> str:
    """The text on the terminal."""
    compositor = app.screen._compositor
    return "\n".join(
        "".join(segment.text for segment in strip) for strip in compositor.render_strips(app.size)
    )


def keep(app, name: str) -> None:
    if folder := os.environ.get("VF_SCREENSHOTS"):
        Path(folder, f"{name}.svg").write_text(app.export_screenshot())


async def to(pilot, text: str) -> None:
    """Move the cursor of the list to the entry whose line holds a text."""
    lines = pilot.app.screen.lines
    wanted = next(i for i, entry in enumerate(lines.entries) if text in lines.line(entry).plain)
    for _ in range(wanted - lines.cursor):
        await pilot.press("j")


async def open_careful(pilot) -> None:
    await pilot.pause()
    await to(pilot, "careful-7b")
    await pilot.press("enter")
    await pilot.pause()


async def test_from_the_list_to_a_rollout_and_back(app, runs):
    async with app.run_test(size=(130, 34)) as pilot:
        await pilot.pause()
        assert isinstance(app.screen, RunsScreen)
        expected = next(run for run in app.library.runs()["runs"] if run["id"] == CAREFUL)
        assert len(app.screen.lines.entries) == 4
        assert f"{expected['reward']:.3f}" in shown(app)
        keep(app, "tui-runs")
        await to(pilot, "careful-7b")
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, RowsScreen)
        assert len(app.screen.lines.entries) == 36
        assert "What is 3 times 1?" in shown(app)
        keep(app, "tui-rollouts")
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, RolloutScreen)
        text = shown(app)
        assert "multiply(" in text
        assert "exact" in text
        assert "1 of 36" in text
        keep(app, "tui-rollout")
        await pilot.press("l", "right")
        await pilot.pause()
        assert "3 of 36" in shown(app)
        await pilot.press("h")
        await pilot.pause()
        assert "2 of 36" in shown(app)
        await pilot.press("b")
        await pilot.pause()
        assert isinstance(app.screen, RowsScreen)
        assert app.screen.lines.cursor == 1
        await pilot.press("b", "b", "b")
        await pilot.pause()
        assert isinstance(app.screen, RunsScreen)
        await pilot.press("q")


async def test_a_search_shows_the_rows_that_hold_the_text(app):
    async with app.run_test(size=(130, 34)) as pilot:
        await pilot.pause()
        await to(pilot, "careful-7b")
        await pilot.press("enter")
        await pilot.pause()
        await pilot.press("s", *"hundred", "enter")
        await pilot.pause()
        expected = app.library.search(CAREFUL, "hundred", budget_s=9)["rows"]
        assert sorted(app.screen.lines.entries) == sorted(expected)
        assert 0 < len(expected) < 36


async def test_rows_sort_by_any_column_and_unknown_values_come_last(app):
    async with app.run_test(size=(130, 34)) as pilot:
        await open_careful(pilot)
        facts = app.screen.facts
        assert app.screen.lines.entries == sorted(
            range(36), key=lambda row: (facts["example"][row], row)
        )
        for name in ("reward", "turns", "output_tokens", "total_ms"):
            await pilot.press("o")
            await pilot.pause()
            values = [facts[name][row] for row in app.screen.lines.entries]
            assert values == sorted(values), name
        assert "sorted by Time, ascending" in shown(app)
        await pilot.press("r")
        await pilot.pause()
        assert "sorted by Time, descending" in shown(app)
        assert facts["total_ms"][app.screen.lines.entry] == max(facts["total_ms"])
        keep(app, "tui-sorted")
    assert ordered(range(3), [math.nan, 1.0, 2.0].__getitem__) == [1, 2, 0]
    assert ordered(range(3), [math.nan, 1.0, 2.0].__getitem__, is_reversed=True) == [2, 1, 0]
    assert ordered([10, "a", 9], lambda value: value) == [10, 9, "a"]


async def test_runs_sort_by_any_column(app):
    async with app.run_test(size=(130, 34)) as pilot:
        await pilot.pause()
        await pilot.press("o", "o", "r")
        await pilot.pause()
        rewards = [run["reward"] for run in app.screen.lines.entries]
        assert rewards == sorted(rewards, reverse=True)
        assert "sorted by Reward, descending" in shown(app)


async def test_one_key_leaves_only_the_errors(tmp_path):
    view_runs.large_run(tmp_path, 600)
    app = RunsApp(Library(Catalog([tmp_path])))
    async with app.run_test(size=(120, 30)) as pilot:
        await pilot.pause()
        await pilot.press("enter")
        await pilot.pause()
        assert len(app.screen.lines.entries) == 600
        await pilot.press("e")
        await pilot.pause()
        assert list(app.screen.lines.entries) == [250, 501]
        assert "2 listed" in shown(app)
        assert "errors only" in shown(app)
        keep(app, "tui-errors")
        await pilot.press("e")
        await pilot.pause()
        assert len(app.screen.lines.entries) == 600


async def test_the_numbers_of_a_run_are_those_of_the_final_table(app, runs):
    expected = dict(number_lines(vf.load_results(runs / CAREFUL).summary()))
    async with app.run_test(size=(130, 34)) as pilot:
        await open_careful(pilot)
        text = shown(app)
    for name in ("reward", "tokens", "time"):
        assert f"{name:<9}{expected[name]}" in text, name
    assert "±" in expected["reward"]


def test_the_numbers_count_errors_by_cause_and_what_is_solved(tmp_path):
    rows = [{"question": str(n), "answer": "x"} for n in range(6)]

    def right(prompt, completion) -> float:
        if prompt[-1].content == "2":
            raise RuntimeError("the judge is out")
        return float(int(prompt[-1].content) % 2)

    def reply(request):
        if request.prompt[-1]["content"] == "5":
            raise vf.ModelUnavailable("503")
        return "x"

    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([right]), env_id="sums")
    path = tmp_path / "evals/sums--m/1"
    options = {"num_examples": -1, "rollouts_per_example": 2, "results_path": path}
    summary = env.evaluate(ScriptedClient(reply), "m", **options).summary()
    numbers = Library(Catalog([tmp_path])).numbers("evals/sums--m/1")
    assert numbers["errors"] == summary["errors"] == {"ModelUnavailable": 2}
    ((cause, count),) = numbers["unscored"].items()
    assert (cause.startswith("RuntimeError in right"), count) == (True, 2)
    for name in (
        "unscored",
        "error_causes",
        "avg_reward",
        "reward_stderr",
        "avg_success",
        "success_stderr",
        "pass_at_k",
        "usage",
        "cost_usd",
    ):
        assert numbers[name] == summary[name], name
    assert numbers["pass_at_k"]["2"] == 0.5
    lines = dict(number_lines(numbers))
    assert lines["errors"].startswith("2 × ModelUnavailable: 503 (test_tui.py:")
    assert lines["unscored"] == f"2 × {cause}; not in the mean"


async def test_escapes_of_a_model_reach_neither_the_terminal_nor_the_clipboard(app, monkeypatch):
    copied = []
    monkeypatch.setattr(app, "copy_to_clipboard", copied.append)
    row = app.library.search(CAREFUL, "nothing else", budget_s=9)["rows"][0]
    raw = json.dumps(app.library.rollout(CAREFUL, row)["messages"])
    assert "\\u001b[2J" in raw  # negative control: they are in the row
    async with app.run_test(size=(130, 34)) as pilot:
        await pilot.pause()
        await to(pilot, "careful-7b")
        await pilot.press("enter")
        await pilot.pause()
        lines = app.screen.lines
        lines.action_move(lines.entries.index(row))
        await pilot.pause()
        assert "\x1b" not in shown(app)
        await pilot.press("enter", "c")
        await pilot.pause()
        assert r"\x1b[2J\x1b[31mred" in shown(app)
        assert "\x1b" not in shown(app)
        content = app.screen.query_one("#rollout", Static).content
        assert r"\x1b]8;;" in content.plain
        assert "\x1b" not in content.plain
    assert r"\x1b[2J" in copied[0]
    assert "\x1b" not in copied[0]


async def test_fifty_thousand_rollouts_are_a_list_like_any_other(tmp_path):
    view_runs.large_run(tmp_path, 50_000)
    app = RunsApp(Library(Catalog([tmp_path])))
    async with app.run_test(size=(120, 30)) as pilot:
        await pilot.pause()
        started = time.perf_counter()
        await pilot.press("enter")
        await pilot.pause()
        assert "Question 0:" in shown(app)
        print(f"opened after {time.perf_counter() - started:.2f} s")
        await pilot.press("end")
        await pilot.pause()
        assert "Question 49999:" in shown(app)


async def test_a_training_opens_at_its_newest_step(app):
    async with app.run_test(size=(130, 34)) as pilot:
        await pilot.pause()
        await to(pilot, "learner")
        await pilot.press("enter")
        await pilot.pause()
        assert "step 30" in shown(app)
        assert "Reverse word30" in shown(app)


def test_a_missing_extra_is_named(monkeypatch, capfd, runs):
    monkeypatch.setitem(sys.modules, "textual", None)
    code = COMMAND.run([str(runs)])
    streams = capfd.readouterr()
    ran = Ran(code, streams.out, streams.err)
    assert ran.code == 2
    assert install_line("verifiers", "tui") in ran.err
