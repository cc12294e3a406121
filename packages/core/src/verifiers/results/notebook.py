"""HTML of results for notebooks: the numbers, a histogram of the rewards, and the worst and the
best rollout folded.

Every text of a model, a row or an error is escaped, and the HTML holds no script and loads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from verifiers.data.messages import render_text
from verifiers.results.rows import RolloutOutput
from verifiers.results.summary import RunSummary
from verifiers.results.texts import cause_text

NUM_BINS = 10
MAX_TEXT = 4000
"""Longest transcript shown, in characters."""
_BAR_WIDTH, _HEIGHT = 24, 64


def results_html(facts: RunSummary, outputs: Sequence[RolloutOutput]) -> str:
    """The table, the histogram and two transcripts of results, as one ``<div>``; ``facts`` are
    their ``summary()``."""
    pairs = ((output["reward"], index) for index, output in enumerate(outputs))
    rewards = [pair for pair in pairs if not math.isnan(pair[0])]
    parts = [_table(facts, len(outputs)), _histogram([reward for reward, _ in rewards])]
    if rewards:
        worst, best = min(rewards), max(rewards, key=lambda pair: (pair[0], -pair[1]))
        parts.append(_transcript("Worst rollout", outputs[worst[1]]))
        if best[1] != worst[1]:
            parts.append(_transcript("Best rollout", outputs[best[1]]))
    return f"<div>{''.join(parts)}</div>"


def _table(facts: RunSummary, num_rollouts: int) -> str:
    reward, stderr = _number(facts["avg_reward"]), _number(facts["reward_stderr"])
    rows: dict[str, object] = {
        "environment": facts["env_id"],
        "model": facts["model"],
        "rollouts": f"{num_rollouts} ({facts['num_examples']} examples)",
        "reward": f"{reward} ± {stderr}" if reward and stderr else reward,
        **{name: _number(value) for name, value in facts["avg_metrics"].items()},
        "errors": cause_text(facts["error_causes"]),
        "unscored": ", ".join(f"{count} × {cause}" for cause, count in facts["unscored"].items()),
        "saved in": facts["path"],
    }
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(str(name))}</th>"
        f"<td style='text-align:left'>{escape(str(value))}</td></tr>"
        for name, value in rows.items()
        if value not in (None, "")
    )
    return f"<table>{cells}</table>"


def _histogram(rewards: Sequence[float]) -> str:
    """Bars of equal width from the lowest to the highest reward; nothing if all are equal."""
    finite = [reward for reward in rewards if math.isfinite(reward)]
    if not finite or min(finite) == max(finite):
        return ""
    low, high = min(finite), max(finite)
    counts = [0] * NUM_BINS
    for reward in finite:
        counts[min(NUM_BINS - 1, int((reward - low) / (high - low) * NUM_BINS))] += 1
    bars = ""
    for index, count in enumerate(counts):
        height = _HEIGHT * count / max(counts)
        start, end = (low + (high - low) * edge / NUM_BINS for edge in (index, index + 1))
        bars += (
            f"<rect x='{index * _BAR_WIDTH}' y='{_HEIGHT - height:.1f}' width='{_BAR_WIDTH - 2}' "
            f"height='{height:.1f}' fill='currentColor' fill-opacity='0.6'>"
            f"<title>{_number(start)} to {_number(end)}: {count}</title></rect>"
        )
    width = NUM_BINS * _BAR_WIDTH
    caption = f"rewards of {len(finite)} rollouts, {_number(low)} to {_number(high)}"
    return (
        f"<figure style='margin:8px 0'><svg width='{width}' height='{_HEIGHT}' role='img'"
        f" aria-label='{caption}'>{bars}</svg><figcaption>{caption}</figcaption></figure>"
    )


def _transcript(title: str, output: RolloutOutput) -> str:
    text = f"{render_text(output['prompt'])}\n\n{render_text(output['completion'])}"
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}\n… {len(text) - MAX_TEXT:,} more characters"
    head = f"{title}: example {output['example_id']}, reward {_number(output['reward'])}"
    return (
        f"<details><summary>{escape(head)}</summary>"
        f"<pre style='white-space:pre-wrap;text-align:left'>{escape(text)}</pre></details>"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
