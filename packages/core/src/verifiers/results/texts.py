"""The numbers of a run as text, as the summary of ``vf-eval`` and ``vf-tui`` show them; an unknown
number is "unknown"."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verifiers.results.coverage import coverage_lines
from verifiers.types import StopReason

MAX_CAUSES = 5
PARTS_IN_CODE = (
    "rubric parser environment code reward_functions reward_weights group_weights".split()
)
"""Parts of a run's configuration that its code sets, not its user."""
OF_ONE_TURN = {StopReason.MAX_TURNS.value: "its only turn"}
"""Saved reason -> words, of a rollout that has one turn: it met no limit of turns."""


def ended_by(reason: str | None, num_turns: float) -> str | None:
    """What ended a rollout of so many turns, or a mean of so many, in words.

    >>> ended_by("max_turns_reached", 1), ended_by("max_turns_reached", 2), ended_by("won", 1)
    ('its only turn', 'max_turns_reached', 'won')
    """
    return OF_ONE_TURN.get(reason or "", reason) if num_turns == 1 else reason


def number_lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, value) of each number of ``GenerateOutputs.summary``; ``throughput`` too if the
    command has it.

    Names are not escaped. Lines without a value are left out.
    """
    yield "reward", _mean(facts["avg_reward"], facts["reward_stderr"])
    if facts["avg_success"] is not None:
        rate = _mean(facts["avg_success"], facts["success_stderr"])
        yield "success", f"{rate}; {_meaning_of_success(facts)}"
    elif facts["avg_reward"] is not None:
        why = "the reward is graded, and the rubric names no success metric (success=…)"
        yield "success", f"not known: {why}"
    if facts["pass_at_k"]:
        yield "pass@k", _by_k(facts["pass_at_k"], facts["pass_at_k_interval"], _behind(facts))
        yield "pass^k", _by_k(facts["pass_all_k"])
        if facts.get("pass_at_k_unknown"):
            yield "unknown", unknown_text(facts)
    yield from _metric_lines(facts)
    if facts["errors"]:
        yield "errors", cause_text(facts["error_causes"])
    if facts["unscored"]:
        listed = ", ".join(f"{count} × {cause}" for cause, count in facts["unscored"].items())
        yield "unscored", f"{listed}; not in the mean"
    if facts["stop_conditions"]:
        num_turns = facts["avg_metrics"].get("num_turns", math.nan)
        ends = (
            f"{count} × {ended_by(reason, num_turns)}"
            for reason, count in facts["stop_conditions"].items()
        )
        yield "ended by", ", ".join(ends)
    yield from coverage_lines(facts.get("coverage"), max_tokens_of(facts))
    yield "tokens", _tokens(facts["usage"], facts["num_rollouts"])
    if facts["cost_usd"] is not None:
        yield "cost", dollars(facts["cost_usd"], facts["num_rollouts"])
    if facts["spent"] is not None:
        yield "spent", _spent(facts["spent"])
    if facts["latency"]["median_ms"] is not None:
        latency = {name: latency_text(facts["latency"][name]) for name in ("median_ms", "p95_ms")}
        yield "latency", f"median {latency['median_ms']}, 95% within {latency['p95_ms']}"
    if facts["seconds"] is not None:
        yield "time", _time(facts)


def _metric_lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The mean of each metric, with how many rollouts it has where it does not apply to each."""
    counts = facts.get("metric_counts") or {}
    num_scored = facts["num_rollouts"] - facts["num_errors"] - facts["num_unscored"]
    for name, value in facts["avg_metrics"].items():
        is_of_some = name in counts and counts[name] < num_scored
        of = f" (in {counts[name]} of {facts['num_rollouts']} rollouts)" if is_of_some else ""
        yield f"  {name}", f"{number(value)}{of}"


def max_tokens_of(facts: Mapping[str, Any]) -> object:
    """The limit of a reply in a run's facts or metadata; None if the server chose it."""
    local = (facts.get("local_model") or {}).get("sampling") or {}
    return (facts.get("sampling_args") or {}).get("max_tokens", local.get("max_tokens"))


def cause_text(causes: Mapping[str, int]) -> str:
    """The most frequent causes with their counts.

    >>> cause_text({"ModelUnavailable: 503": 3})
    '3 × ModelUnavailable: 503'
    """
    listed = [f"{count} × {cause}" for cause, count in causes.items()]
    num_more = sum([*causes.values()][MAX_CAUSES:])
    return "; ".join([*listed[:MAX_CAUSES], *([f"{num_more} × others"] if num_more else [])])


def _mean(mean: float | None, stderr: float | None) -> str:
    if mean is None:
        return "unknown"
    return f"{mean:.3f}" + (f" ± {stderr:.3f} (standard error)" if stderr is not None else "")


def _meaning_of_success(facts: Mapping[str, object]) -> str:
    """What counts as solved.

    >>> _meaning_of_success({"success_metric": None, "pass_threshold": 0.5})
    'solved = reward ≥ 0.5'
    """
    if facts["success_metric"] is not None:
        return f"solved = {facts['success_metric']} is 1"
    if facts["pass_threshold"] is None:
        return "solved = reward is 1"
    return f"solved = reward ≥ {facts['pass_threshold']:g}"


def number(value: float | None) -> str:
    """A number with three decimals."""
    return "unknown" if value is None else f"{value:.3f}"


def _by_k(
    rates: Mapping[str, float | None],
    intervals: Mapping[str, Sequence[float]] | None = None,
    behind: Mapping[str, str] | None = None,
) -> str:
    """The rates by k, with their 95 % intervals in brackets, and what is ``behind`` them.

    >>> _by_k({"1": 0.25}, {"1": (0.1, 0.5)}, {"1": "3 of 4 examples"})
    '1: 0.250 [0.10, 0.50] (3 of 4 examples)'
    """
    texts = {k: f" [{low:.2f}, {high:.2f}]" for k, (low, high) in (intervals or {}).items()}
    for k, text in (behind or {}).items():
        texts[k] = f"{texts.get(k, '')} ({text})"
    return "  ".join(f"{k}: {number(rate)}{texts.get(k, '')}" for k, rate in rates.items())


def _behind(facts: Mapping[str, Any]) -> dict[str, str]:
    """k -> how many examples have k known rollouts, where not all have."""
    total, counts = facts["num_examples"], facts.get("pass_at_k_examples") or {}
    return {k: f"{count} of {total} examples" for k, count in counts.items() if count < total}


def unknown_text(facts: Mapping[str, Any]) -> str:
    """How many rollouts are in no pass@k, and what they leave possible.

    >>> facts = {"pass_at_k_unknown": 4, "num_rollouts": 64, "pass_at_k_bounds": {"1": (0.2, 0.3)}}
    >>> unknown_text(facts)
    '4 of 64 rollouts, in no pass@k: 1: 0.200 to 0.300 were they all unsolved, or all solved'
    """
    bounds = "  ".join(
        f"{k}: {low:.3f} to {high:.3f}" for k, (low, high) in facts["pass_at_k_bounds"].items()
    )
    count = f"{facts['pass_at_k_unknown']} of {facts['num_rollouts']} rollouts"
    return f"{count}, in no pass@k: {bounds} were they all unsolved, or all solved"


def _tokens(usage: Mapping[str, int], num_rollouts: int) -> str:
    prompt, sampled = usage.get("input_tokens", 0), usage.get("output_tokens", 0)
    if not prompt and not sampled:
        return "not reported"
    per_rollout = f" ({sampled / num_rollouts:,.0f} per rollout)" if num_rollouts else ""
    cached = f" ({cached:,} from the cache)" if (cached := usage.get("cached_tokens")) else ""
    return f"{prompt:,} read{cached}, {sampled:,} sampled{per_rollout}"


def dollars(cost: float, num_rollouts: int) -> str:
    """A cost with at least two significant digits.

    >>> dollars(0.0042, 10), dollars(12.5, 100)
    ('$0.0042 ($0.00042 per rollout)', '$12.50 ($0.12 per rollout)')
    """

    def rounded(amount: float) -> str:
        return f"${amount:.2f}" if amount >= 0.1 or not amount else f"${amount:.2g}"

    per_rollout = f" ({rounded(cost / num_rollouts)} per rollout)" if num_rollouts else ""
    return f"{rounded(cost)}{per_rollout}"


def _spent(spent: Mapping[str, object]) -> str:
    """What the run has spent over all sessions, and its limits."""
    limits = [f"${spent['max_cost_usd']:g}"] if spent["max_cost_usd"] is not None else []
    if spent["max_total_tokens"] is not None:
        limits.append(f"{spent['max_total_tokens']:,} tokens")
    of = f" of at most {' and '.join(limits)}" if limits else ""
    lost = f", {spent['lost']} of them lost and counted in full" if spent["lost"] else ""
    usd = f"${spent['usd']:.4f} and " if spent["max_cost_usd"] is not None or spent["usd"] else ""
    return f"{usd}{spent['tokens']:,} tokens{of}, in {spent['requests']:,} requests{lost}"


def _time(facts: Mapping[str, Any]) -> str:
    spent = duration(facts["seconds"]) if facts["seconds"] >= 10 else f"{facts['seconds']:.1f} s"
    rates = facts.get("throughput") or {}
    if rates.get("rollouts_per_s") is None:
        return spent
    tokens = rates["output_tokens_per_s"]
    sampled = f", {tokens:,.0f} tokens/s" if tokens is not None else ""
    rate = rates["rollouts_per_s"]
    per_s = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    return f"{spent} ({per_s} rollouts/s{sampled})"


def latency_text(milliseconds: float) -> str:
    """
    >>> latency_text(12.3), latency_text(4321.0)
    ('12 ms', '4.3 s')
    """
    return f"{milliseconds / 1000:.1f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"


def duration(seconds: float) -> str:
    """
    >>> duration(4.25), duration(75), duration(7300)
    ('4 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, remainder = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder} s"
    return f"{minutes // 60} h {minutes % 60} min"


def flat_settings(config: Mapping[str, object]) -> dict[str, object]:
    """What the user of a run set in its configuration, as `flat`."""
    return flat({name: value for name, value in config.items() if name not in PARTS_IN_CODE})


def flat(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested settings as one level: ``{"env_args": {"unit": "word"}}`` is ``{"env_args.unit":
    "word"}``.

    Numbers and booleans stay, other values become text; empty objects and None are left out.
    """
    values_by_path: dict[str, object] = {}
    for name, value in settings.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            values_by_path |= flat(value, f"{path}.")
        elif isinstance(value, bool | int | float):
            values_by_path[path] = value
        elif value not in (None, "", []):
            is_text = isinstance(value, str)
            values_by_path[path] = value if is_text else json.dumps(value, default=str)
    return values_by_path
