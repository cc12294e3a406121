"""What ``vf-eval`` shows while it runs, and what it does when one of several environments fails."""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import os
import pty
import subprocess
import sys
import time

import pytest

import verifiers as vf
from support.eval_command import TOY, last_word
from verifiers.cli.evaluate.display import (
    BarDisplay,
    LogHandler,
    PlainDisplay,
    TimeLeft,
    status_line,
    waiting_line,
)
from verifiers.cli.evaluate.summary import transcript
from verifiers.results.rows import RolloutOutput
from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rollouts.state import State
from verifiers.runs.rollout import Progress
from verifiers.testing import FakeServer, ScriptedClient


@pytest.fixture
def progress():
    """Ten of forty rollouts done in twenty seconds, four of them before this start."""
    progress = Progress(total=40, done=10, resumed=4, reward_sum=4.5, rewards=9, output_tokens=2000)
    progress.started = progress.last_done = 100.0
    progress.errors["ModelUnavailable"] += 1
    waiting = State(prompt=[], example_id=7)
    waiting.waiting_for = "the model"
    progress.running = {3: (95.0, waiting), 4: (110.0, None)}
    return progress


def test_the_status_line_counts_what_is_durable_and_guesses_the_rest_from_this_start(progress):
    progress.last_done = 120.0
    assert (
        status_line(progress, 120.0)
        == "10/40 done · 2 running · reward 0.500 · 1 error (1 × ModelUnavailable) · 100 tokens/s ·"
        " 1 min 40 s left"
    )


def test_the_time_left_falls_while_nothing_finishes_and_tokens_of_running_rollouts_count(progress):
    progress.last_done = 120.0
    progress.running[3][1]["usage"]["output_tokens"] = 1000
    # (2000 + 1000) / 30 s
    assert status_line(progress, 130.0).endswith("100 tokens/s · 1 min 30 s left")
    assert status_line(progress, 500.0).endswith("6 min 40 s")  # since the start, not "0 s left"


def test_tokens_per_second_are_those_of_the_last_half_minute_and_of_the_whole_run_at_its_end(
    progress, monkeypatch
):
    """Negative control: the mean of the whole run, which the line had before, hides that the server
    has stopped."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    progress.output_tokens = 0
    display = PlainDisplay(stream)
    display.begin("toy · m", progress, {})
    for second in range(100, 181):
        now = float(second)
        if second <= 120:
            progress.output_tokens += 100  # 100 a second for 20 s, then nothing
        display.tick()
    rates = [
        line.split(" tokens/s")[0].split(" · ")[-1]
        for line in stream.getvalue().splitlines()
        if " done" in line
    ]
    assert rates == ["110", "105", "70", "33", "0", "0", "0", "0"]
    assert "26 tokens/s" in status_line(progress, now)


def test_the_time_left_does_not_grow_by_the_jitter_of_single_rollouts_and_does_when_a_server_slows_down(
    progress,
):
    progress.total, progress.done, progress.resumed = 40, 0, 0
    shown, estimated, steady, now = [], [], TimeLeft(), 100.0
    for gap in (*(1.0, 1.4, 0.8, 1.3, 1.0) * 4, *(6.0,) * 10):
        now += gap
        progress.done += 1
        progress.last_done = now
        remaining_s = (progress.total - progress.done) * (now - progress.started) / progress.done
        estimated.append(remaining_s)
        shown.append(steady.update(remaining_s, now))
    jitter = slice(1, 20)
    assert all(late <= early for early, late in itertools.pairwise(shown[jitter]))
    # negative control
    assert any(late > early for early, late in itertools.pairwise(estimated[jitter]))
    assert shown[-1] >= 0.8 * estimated[-1]


def test_what_is_being_waited_for_is_said_after_thirty_silent_seconds_in_a_line_with_counts(
    progress,
):
    assert waiting_line(progress, 129.0) == ""
    assert waiting_line(progress, 131.0) == (
        "nothing finished for 31 s: waiting 1 for the model, 1 for a start, the oldest since 36 s"
        " (example 7, turn 1)"
    )
    progress.running |= {number: (120.0, None) for number in range(5, 10)}
    assert "waiting 6 for a start, 1 for the model" in waiting_line(progress, 131.0)
    progress.running.clear()
    assert waiting_line(progress, 200.0) == ""


def test_a_pipe_gets_a_plain_line_every_ten_seconds_also_when_nothing_happens(
    progress, monkeypatch
):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.begin("toy · m", progress, {})
    for second in range(100, 141):
        now = float(second)
        display.tick()
    lines = stream.getvalue().splitlines()
    assert len(lines) == sum(" done · " in line for line in lines) == 4
    assert sum("nothing finished" in line for line in lines) == 2
    assert lines[-1].endswith(
        " · nothing finished for 40 s: waiting 1 for the model, 1 for a start, the oldest since"
        " 45 s (example 7, turn 1)"
    )
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(
    ("function", "options"),
    [("single", {}), ("single", {"interleave_scoring": False}), ("group", {})],
)
def test_rollouts_that_a_judge_scores_are_counted_in_the_line(function, options):
    """A reward that waits, alone, after every generation, and for a group."""
    lines = []

    async def single(completion):
        await looked()
        return 1.0

    async def group(states):
        await looked()
        return [1.0] * len(states)

    async def looked():
        await asyncio.sleep(0.05)
        now = time.monotonic()
        lines.append(f"{status_line(run, now)} · {waiting_line(run, now + 60.0)}")

    run = Progress()
    env = vf.SingleTurnEnv(
        dataset=[{"question": "1 + 1", "answer": "2"}] * 2,
        rubric=vf.Rubric(funcs=[{"single": single, "group": group}[function]]),
    )
    env.evaluate_sync(
        client=ScriptedClient(["2"]), model="m", num_examples=2, progress=run, **options
    )
    assert any("2 running (2 being scored)" in line for line in lines), lines
    assert any("waiting 2 for scoring" in line for line in lines), lines


def test_on_a_real_terminal_the_progress_is_on_stderr_and_the_results_alone_on_stdout(eval_folder):
    with FakeServer(last_word, models=["m"], delay_s=0.1) as server:
        parent, child_end = pty.openpty()
        ran = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "verifiers.cli.evaluate.command",
                "toy",
                "-b",
                server.url,
                "-n",
                "4",
                "-r",
                "2",
                "-c",
                "2",
            ],
            stdout=subprocess.PIPE,
            stderr=child_end,
            env={**os.environ, "PYTHONPATH": str(eval_folder), "TERM": "xterm"},
        )
        os.close(child_end)
        seen = bytearray()
        while True:
            try:
                chunk = os.read(parent, 65536)
            except OSError:  # the other end is closed: the child is done
                break
            if not chunk:
                break
            seen += chunk
        out, _ = ran.communicate(timeout=20)
        os.close(parent)
    shown = seen.decode()
    assert ran.returncode == 0
    assert "8 running" not in shown
    assert "2 running" in shown
    assert "reward 1.000" in shown
    assert out.decode().startswith("toy · m\n")
    assert b"\x1b" not in out


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def block(display: BarDisplay) -> list[str]:
    """The block as lines of text, without colours."""
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, width=100, no_color=True).print(display._block())
    return stream.getvalue().splitlines()


def test_of_several_runs_each_has_a_line_and_far_ones_are_counted(progress, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 120.0)
    display = BarDisplay(Terminal())
    labels = [f"env-{number} · m" for number in range(12)]
    display.plan(labels)
    for number, label in enumerate(labels[:6]):
        display.begin(label, progress, {})
        display.finish(3 if number == 4 else 0)
    display.begin(labels[6], progress, {})
    lines = [line.rstrip() for line in block(display)]
    display.finish(0)
    assert lines[0] == "… 2 more before"
    assert [line[:9] for line in lines[1:5]] == ["✓ env-2 ·", "✓ env-3 ·", "✗ env-4 ·", "✓ env-5 ·"]
    assert lines[5].startswith(
        "env-6 · m  ━━━━━━──────────────────  10/40 done · 2 running · reward 0.500"
    )
    assert lines[-5:] == [*(f"· env-{number} · m" for number in (7, 8, 9, 10)), "… 1 more to come"]


def test_one_run_has_no_lines_of_others(progress, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 120.0)
    display = BarDisplay(Terminal())
    display.plan(["toy · m"])
    display.begin("toy · m", progress, {})
    lines = block(display)
    display.finish(0)
    assert lines[0].startswith("toy · m  ━")
    assert not any(line.startswith(("✓", "·", "…")) for line in lines)


@pytest.mark.parametrize("kind", [PlainDisplay, BarDisplay])
def test_messages_and_notes_of_others_are_shown_with_their_control_characters_escaped(kind):
    stream = Terminal()
    display = kind(stream)
    display.note("the server said \x1b]0;owned\x07")
    LogHandler(display).emit(
        logging.LogRecord("verifiers", logging.WARNING, "", 0, "a \x1b[2J name", (), None)
    )
    shown = stream.getvalue()
    assert "\\x1b]0;owned\\x07" in shown
    assert "\\x1b[2J" in shown
    assert "\x1b]0" not in shown
    assert "\x1b[2J" not in shown


def test_names_that_a_server_or_an_author_gives_are_escaped_in_the_summary(vf_eval, eval_folder):
    (eval_folder / "toy.py").write_text(
        "import verifiers as vf\n"
        "def load_environment():\n"
        "    def f(completion): return 1.0\n"
        "    f.__name__ = 'cute\\x1b[2Jname'\n"
        "    rows = [{'question': 'say 1', 'answer': '1'}]\n"
        "    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric(funcs=[f]))\n"
    )
    with FakeServer("1", models=["evil\x1b]0;owned\x07"]) as server:
        ran = vf_eval("toy", "-b", server.url, "-n", "1", "-r", "1")
        plan = vf_eval("toy", "-b", server.url, "-m", "evil\x1b[2J", "--dry-run")
    assert ran.code == plan.code == 0, ran.err + plan.err
    assert "cute\\x1b[2Jname" in ran.out
    assert not {"\x1b", "\x07"} & {*ran.out, *ran.err, *plan.out, *plan.err}


def test_long_and_hostile_texts_are_cut_and_spelled_out_in_a_transcript():
    output = RolloutOutput(
        prompt=[{"role": "user", "content": "x" * 5000}],
        completion=[{"role": "assistant", "content": "\x1b]0;owned\x07 \u202e"} for _ in range(40)],
        answer={"a": 1},
        error=ErrorInfo(error="EnvironmentFault", message="it\x1b broke"),
    )
    text = transcript(output)
    assert len(text) < 6000
    assert "characters left out" in text
    assert "messages left out" in text
    assert 'answer: {"a": 1}' in text
    assert not any(character in text for character in "\x1b\x07\u202e")


# --- several environments -------------------------------------------------------------------------


def test_a_failing_environment_does_not_keep_the_next_from_running_and_the_worst_code_wins(
    vf_eval, eval_folder
):
    for name in ("alpha", "beta"):
        (eval_folder / f"{name}.py").write_text(TOY)
    (eval_folder / "two.toml").write_text(
        'num_examples = 2\nrollouts_per_example = 1\n[[eval]]\nid = "alpha"\nargs = {'
        ' broken_rewards = true }\n[[eval]]\nid = "beta"\n'
    )
    with FakeServer(last_word, models=["m"]) as server:
        ran = vf_eval("two.toml", "-b", server.url, "--json")
    assert [run["avg_reward"] for run in ran.json["runs"]] == [None, 1.0]
    assert ran.code == ran.json["exit_code"] == 3
    assert "alpha: none of 2 rollouts could be scored" in ran.paragraph


def test_teardown_handlers_run_and_a_failing_one_is_only_said(vf_eval, eval_folder):
    (eval_folder / "toy.py").write_text(
        "import verifiers as vf\n"
        "class Env(vf.SingleTurnEnv):\n"
        "    @vf.teardown\n"
        "    def leave(self):\n"
        "        raise OSError('no such container')\n"
        "def load_environment():\n"
        "    return Env(eval_dataset=[{'question': 'say 1', 'answer': '1'}])\n"
    )
    with FakeServer(last_word, models=["m"]) as server:
        ran = vf_eval("toy", "-b", server.url, "-A")
    assert ran.code == 0
    assert "the teardown of toy raised OSError: no such container" in ran.err
