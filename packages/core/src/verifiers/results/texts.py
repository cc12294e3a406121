"""The numbers of a run as text, as the summary of ``vf-eval`` and ``vf-tui`` show them; an unknown
number is "unknown"."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from verifiers.results.coverage import coverage_lines
from verifiers.results.summary import RunSummary, Spent, Throughput
from verifiers.storage.directory import LocalModelFacts
from verifiers.types import StopReason

MAX_CAUSES = 5
PARTS_IN_CODE = (
    "rubric parser environment code reward_functions reward_weights group_weights".split()
)
"""Parts of a run's configuration that its code sets, not its user."""
OF_ONE_TURN = {StopReason.MAX_TURNS.value: "its only turn"}
"""Saved reason -> words, of a rollout that has one turn: it met no limit of turns."""


def ended_by(reason: str | None, num_turns: float | None) -> str | None:
    """What ended a rollout of so many turns, or a mean of so many, in words.

    >>> ended_by("max_turns_reached", 1), ended_by("max_turns_reached", 2), ended_by("won", 1)
    ('its only turn', 'max_turns_reached', 'won')
    """
    return OF_ONE_TURN.get(reason or "", reason) if num_turns == 1 else reason


def number_lines(facts: RunSummary) -> Iterator[tuple[str, str]]:
    """(name, value) of each number of ``GenerateOutputs.summary``; ``throughput`` too if the
    command has it.

    Names are not escaped. Lines without a value are left out.
    """
    yield "reward", _mean(facts["avg_reward"], facts["reward_stderr"])
    if facts["avg_success"] is not None:
        rate = _mean(facts["avg_success"], facts["success_stderr"])
        meaning = _meaning_of_success(facts["success_metric"], facts["pass_threshold"])
        yield "success", f"{rate}; {meaning}"
    elif facts["avg_reward"] is not None:
        why = "the reward is graded, and the rubric names no success metric (success=…)"
        yield "success", f"not known: {why}"
    if facts["pass_at_k"]:
        yield "pass@k", _by_k(facts["pass_at_k"], facts["pass_at_k_interval"], _behind(facts))
        yield "pass^k", _by_k(facts["pass_all_k"])
        if facts["pass_at_k_unknown"]:
            bounds = facts["pass_at_k_bounds"]
            yield (
                "unknown",
                unknown_text(facts["pass_at_k_unknown"], facts["num_rollouts"], bounds),
            )
    yield from _metric_lines(facts)
    if facts["errors"]:
        yield "errors", cause_text(facts["error_causes"])
    if facts["unscored"]:
        listed = ", ".join(f"{count} × {cause}" for cause, count in facts["unscored"].items())
        yield "unscored", f"{listed}; not in the mean"
    if facts["stop_conditions"]:
        num_turns = facts["avg_metrics"].get("num_turns")
        ends = (
            f"{count} × {ended_by(reason, num_turns)}"
            for reason, count in facts["stop_conditions"].items()
        )
        yield "ended by", ", ".join(ends)
    max_tokens = max_tokens_of(facts["sampling_args"], facts.get("local_model"))
    yield from coverage_lines(facts["coverage"], max_tokens)
    yield "tokens", _tokens(facts["usage"], facts["num_rollouts"])
    if facts["cost_usd"] is not None:
        yield "cost", dollars(facts["cost_usd"], facts["num_rollouts"])
    if facts["spent"] is not None:
        yield "spent", _spent(facts["spent"])
    median_ms, p95_ms = facts["latency"]["median_ms"], facts["latency"]["p95_ms"]
    if median_ms is not None and p95_ms is not None:
        yield "latency", f"median {latency_text(median_ms)}, 95% within {latency_text(p95_ms)}"
    if facts["seconds"] is not None:
        yield "time", _time(facts["seconds"], facts.get("throughput"))


def _metric_lines(facts: RunSummary) -> Iterator[tuple[str, str]]:
    """The mean of each metric, with how many rollouts it has where it does not apply to each."""
    counts = facts["metric_counts"]
    num_scored = facts["num_rollouts"] - facts["num_errors"] - facts["num_unscored"]
    for name, value in facts["avg_metrics"].items():
        is_of_some = name in counts and counts[name] < num_scored
        of = f" (in {counts[name]} of {facts['num_rollouts']} rollouts)" if is_of_some else ""
        yield f"  {name}", f"{number(value)}{of}"


def max_tokens_of(
    sampling_args: Mapping[str, object] | None, local_model: LocalModelFacts | None
) -> object:
    """The limit of a run's replies; None if the server chose it."""
    local = (local_model or {}).get("sampling") or {}
    return (sampling_args or {}).get("max_tokens", local.get("max_tokens"))


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


def _meaning_of_success(metric: str | None, threshold: float | None) -> str:
    """What counts as solved.

    >>> _meaning_of_success(None, 0.5)
    'solved = reward ≥ 0.5'
    """
    if metric is not None:
        return f"solved = {metric} is 1"
    return "solved = reward is 1" if threshold is None else f"solved = reward ≥ {threshold:g}"


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


def _behind(facts: RunSummary) -> dict[str, str]:
    """k -> how many examples have k known rollouts, where not all have."""
    total, counts = facts["num_examples"], facts["pass_at_k_examples"]
    return {k: f"{count} of {total} examples" for k, count in counts.items() if count < total}


def unknown_text(
    num_unknown: int,
    num_rollouts: int | None,
    bounds: Mapping[str, tuple[float | None, float | None]],
) -> str:
    """How many rollouts are in no pass@k, and what they leave possible.

    >>> unknown_text(4, 64, {"1": (0.2, 0.3)})
    '4 of 64 rollouts, in no pass@k: 1: 0.200 to 0.300 were they all unsolved, or all solved'
    """
    texts = "  ".join(f"{k}: {number(low)} to {number(high)}" for k, (low, high) in bounds.items())
    count = f"{num_unknown} of {num_rollouts} rollouts"
    return f"{count}, in no pass@k: {texts} were they all unsolved, or all solved"


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


def _spent(spent: Spent) -> str:
    """What the run has spent over all sessions, and its limits."""
    limits = [f"${spent['max_cost_usd']:g}"] if spent["max_cost_usd"] is not None else []
    if spent["max_total_tokens"] is not None:
        limits.append(f"{spent['max_total_tokens']:,} tokens")
    of = f" of at most {' and '.join(limits)}" if limits else ""
    lost = f", {spent['lost']} of them lost and counted in full" if spent["lost"] else ""
    usd = f"${spent['usd']:.4f} and " if spent["max_cost_usd"] is not None or spent["usd"] else ""
    return f"{usd}{spent['tokens']:,} tokens{of}, in {spent['requests']:,} requests{lost}"


def _time(seconds: float, rates: Throughput | None) -> str:
    spent = duration(seconds) if seconds >= 10 else f"{seconds:.1f} s"
    if rates is None or (rate := rates["rollouts_per_s"]) is None:
        return spent
    tokens = rates["output_tokens_per_s"]
    sampled = f", {tokens:,.0f} tokens/s" if tokens is not None else ""
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
