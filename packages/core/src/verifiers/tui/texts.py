"""Text of the terminal screens: a run's line, a rollout's line, a whole rollout. Control characters
are escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from verifiers.results.summary import RunSummary
from verifiers.results.texts import ended_by, latency_text, number_lines
from verifiers.runtime.terminal import escape_control
from verifiers.view.describe import RunEntry
from verifiers.view.rollout import Page, PageMessage, Preview

ROLE_STYLES = {
    "assistant": "bold blue",
    "user": "bold green",
    "tool": "bold yellow",
    "system": "bold magenta",
}
STATUS_STYLES = {"running": "green", "interrupted": "yellow", "failed": "red", "damaged": "red"}
RUN_TITLE = (
    f"{'Run':<34} {'Model':<24} {'Reward':>15} {'Rollouts':>11} {'Errors':>6}  {'Status':<12} Date"
)
ROW_TITLE = (
    f"{'#':>8} {'Reward':>8} {'Turns':>5} {'Tokens':>7} {'Time':>7} {'Stopped by':<20} Task and"
    " last reply"
)
NUMBERS_SHOWN = (
    "reward",
    "success",
    "pass@k",
    "unknown",
    "errors",
    "unscored",
    "tokens",
    "cost",
    "time",
)
"""The lines of a run's numbers that are shown above its rollouts."""


def numbers_text(facts: RunSummary) -> Text:
    """The numbers of a run, as the summary of ``vf-eval`` has them."""
    text = Text()
    for name, value in number_lines(facts):
        if name in NUMBERS_SHOWN:
            text.append(f"{chr(10) if text else ''}{name:<9}", "cyan").append(escape_control(value))
    return text


def heading(title: str, sorted_by: str) -> Text:
    """The titles of the columns; the column that sorts is underlined."""
    text = Text(title, no_wrap=True)
    start = title.index(sorted_by)
    text.stylize("bold underline", start, start + len(sorted_by))
    return text


def run_line(run: RunEntry) -> Text:
    """A run of the list."""
    is_training = run["kind"] == "training"
    rollouts = f"step {run['rollouts']}" if is_training else _count(run["rollouts"])
    reward = _number(run["reward"])
    if run["stderr"]:
        reward += f" ± {_number(run['stderr'])}"
    line = Text(no_wrap=True)
    line.append(_cell(f"{run['env']}{' (training)' if is_training else ''}", 34), "bold")
    model, errors = _cell(run["model"], 24), _count(run["errors"])
    line.append(f" {model} {reward:>15} {rollouts:>11} {errors:>6}  ")
    line.append(f"{run['status']:<12} ", STATUS_STYLES.get(run["status"], ""))
    line.append(str(run["date"])[:16].replace("T", " "), "dim")
    if ended := run.get("ended"):
        line.append(f"  {escape_control(ended)}", "red")
    return line


def row_line(facts: Mapping[str, Any], preview: Preview) -> Text:
    """A rollout of a run: the values of its columns by name, and its first words."""
    sibling = "" if math.isnan(facts["sibling"]) else f".{int(facts['sibling'])}"
    reward = facts["reward"]
    line = Text(no_wrap=True)
    line.append(f"{_cell(str(facts['example']) + sibling, 8).strip():>8} ")
    style = "dim" if math.isnan(reward) else "green" if reward >= 0.5 else "red"
    line.append(f"{_number(reward):>8}", style)
    line.append(f" {_count(facts['turns']):>5} {_count(facts['output_tokens']):>7} ")
    line.append(f"{'–' if math.isnan(facts['total_ms']) else latency_text(facts['total_ms']):>7} ")
    stopped = facts["error"] or ended_by(facts["stop_condition"], facts["turns"]) or ""
    line.append(f"{_cell(stopped, 20)} ", "red" if facts["error"] else "")
    line.append(_cell(preview["question"], 40), "dim")
    line.append(f"  {escape_control(preview['reply'])}")
    return line


def rollout_text(rollout: Page) -> Text:
    """A whole rollout: its scores, then its conversation turn by turn."""
    text = Text()
    text.append(f"reward {_number(rollout['reward'])}", "bold")
    for score in rollout["scores"]:
        weight = "" if score["weight"] is None else f" × {score['weight']:g}"
        value = f"{_number(score['value'])}{weight}"
        text.append(f"   {escape_control(score['name'])} {value}", "" if weight else "dim")
    text.append(f"\nstopped by {escape_control(str(rollout['ended_by']))}", "dim")
    if rollout["answer"] not in (None, ""):
        text.append(f"\nanswer {_plain(rollout['answer'])}", "dim")
    turn = 0
    for message in rollout["messages"]:
        sampled = message["section"] == "completion" and message["role"] == "assistant"
        turn += sampled
        title = f"\n\n── {escape_control(message['role'])}{f' · turn {turn}' if sampled else ''} "
        style = ROLE_STYLES.get(message["role"], "bold")
        text.append(f"{title.ljust(60, '─')}\n", style)
        _append_message(text, message)
    if error := rollout["error"]:
        what = escape_control(f"{error.get('error')}: {error.get('message')}")
        text.append(f"\n\n{what}", "red")
    return text


def _append_message(text: Text, message: PageMessage) -> None:
    if thought := message.get("reasoning"):
        text.append(f"{escape_control(thought.strip())}\n", "dim italic")
    for part in message["parts"]:
        match part["type"]:
            case "text":
                text.append(escape_control(part["text"]))
            case "image":
                text.append(f"[image, {len(part['url'])} characters]", "dim")
            case "address":
                text.append(f"[image at {escape_control(part['text'][:200])}]", "dim")
            case _:
                text.append(_plain(part.get("value")), "dim")
    for call in message.get("calls", ()):
        text.append(f"\n→ {escape_control(call['name'])}({_plain(call['arguments'])})", "cyan")


def _plain(value: object) -> str:
    return escape_control(value if isinstance(value, str) else json.dumps(value))


def _number(value: object) -> str:
    is_number = isinstance(value, int | float) and not math.isnan(value)
    return f"{value:.3f}".rstrip("0").rstrip(".") if is_number else "–"


def _count(value: object) -> str:
    return f"{int(value):,}" if isinstance(value, int | float) and not math.isnan(value) else "–"


def _cell(value: object, width: int) -> str:
    text = escape_control(str(value)).replace("\n", " ")
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"
