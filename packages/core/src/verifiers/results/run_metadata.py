"""``GenerateMetadata``: the facts of a run and the statistics of its rollouts.

Means skip unknown values. A rollout *error* is a failure of the rollout itself; a rollout without
an error whose reward is unknown is *unscored*.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.clients.protocol import PRICE_FIELDS
from verifiers.errors import ScoringError
from verifiers.results.rows import RolloutOutput, example_key
from verifiers.results.statistics import (
    clustered_stderr,
    known_sum,
    mean,
    pass_rates,
    percentiles,
    solved,
)
from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rollouts.values import reported, tree_number
from verifiers.rubrics.scoring import SUCCESS
from verifiers.storage.directory import LocalModelFacts
from verifiers.types import AttributeDict

MAX_CAUSE_CHARS = 240
"""Longest message of an error in the numbers of a run."""
FACTS: dict[str, Any] = {
    "env_id": "",
    "env_args": {},
    "env_version": "",
    "model": "",
    "base_url": "",
    "sampling_args": {},
    "date": "",
    "time": 0.0,
    "success_metric": None,
    "pass_threshold": None,
    "state_columns": [],
    "path_to_save": None,
    "tools": None,
    "version_info": {
        "vf_version": None,
        "vf_commit": None,
        "env_version": None,
        "env_commit": None,
    },
    "provenance": None,
    "fingerprint": None,
    "status": "complete",
    "seed": None,
    "resumed": 0,
    "outside_plan": [],
    "changed_code": [],
    "served_models": {},
    "local_model": None,
    "prices": None,
    "stopped": None,
    "spent": None,
    "origin": None,
    "cached": None,
    "coverage": None,
}
"""Facts that are not computed from the rollouts, with defaults. ``time`` is in seconds; ``date`` is
ISO 8601; ``success_metric``: the function whose value, 0 or 1, says whether a rollout solved its
task; ``pass_threshold``: where none is named, the reward that does; ``local_model``: ``name
sampling`` of a model in this process, of a quantised file also ``file sha256 quantisation``;
``outside_plan``: keys of saved rollouts outside the plan, which are not counted; ``changed_code``:
files and functions that were changed between two sessions of the run; ``served_models``: names
under which the server answered, each with its number of rollouts, where it is not the requested
name alone; ``prices``: see ``clients.protocol.prices_of``; ``stopped``: ``low high num_examples
against`` of the interval that ended the run before its plan; ``spent``: ``usd tokens requests lost
max_cost_usd max_total_tokens`` of a run with a limit, over all its sessions; ``origin``: ``path
fingerprint env_args date avg_reward num_rollouts`` of the run whose rollouts were scored again;
``cached``: ``folder hits misses`` of the last call with a cache; ``coverage``: see
``results.coverage.Coverage.counts``; ``provenance``: see ``storage.provenance``."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """What the statistics need of N rollouts, as columns [N]; unknown numbers are NaN."""

    rewards: Sequence[float]
    examples: Sequence[object] | np.ndarray
    """What siblings share: see ``example_key``."""
    metrics: Mapping[str, Sequence[float]]
    errors: Sequence[str | None]
    """Class of the error, of the rollout or of its scoring."""
    causes: Sequence[str | None]
    """Innermost exception of an error, and where it was raised."""
    stop_conditions: Sequence[str | None]
    usage: Mapping[str, Sequence[float]]
    total_ms: Sequence[float]
    trees: Sequence[float] = ()
    """The tree of each in its group: rollouts of one share turns. NaN: of its own; empty: all
    are."""

    @classmethod
    def of(cls, outputs: Sequence[Mapping[str, Any]]) -> Measurements:
        """The columns of rollouts in memory."""
        metrics = [output["metrics"] for output in outputs]
        errors = [output["error"] for output in outputs]
        usages = [reported(output["token_usage"]) for output in outputs]
        return cls(
            rewards=[output["reward"] for output in outputs],
            examples=[example_key(output) for output in outputs],
            metrics={n: [m.get(n, math.nan) for m in metrics] for n in _names_in(metrics)},
            errors=[None if error is None else error.get("error") or "unknown" for error in errors],
            causes=[
                None if error is None else f"{error.cause} in {error.get('where')}"
                for error in errors
            ],
            stop_conditions=[output["stop_condition"] for output in outputs],
            usage={n: [u.get(n, math.nan) for u in usages] for n in _names_in(usages)},
            total_ms=[(output["timing"] or {}).get("total_ms", math.nan) for output in outputs],
            trees=[tree_number(output.get("fork")) for output in outputs],
        )

    def __len__(self) -> int:
        return len(self.rewards)


def _names_in(mappings: Iterable[Mapping[str, object]]) -> dict[str, None]:
    """The keys of all, in order of appearance."""
    return dict.fromkeys(itertools.chain.from_iterable(mappings))


class GenerateMetadata(AttributeDict):
    """The facts and the statistics of a run: ``num_rollouts num_errors num_unscored avg_reward
    reward_stderr avg_success success_stderr avg_metrics metric_counts avg_error stop_conditions pass_at_k
    pass_at_k_interval pass_at_k_examples pass_at_k_unknown pass_at_k_bounds pass_all_k usage
    cost_usd``. ``time_ms``: ``time`` in milliseconds.

    ``avg_success`` is the share of solved rollouts, NaN if nothing says what solved means: a
    graded reward, and neither a success metric nor a ``pass_threshold``; pass@k is empty then.
    ``metric_counts``: the known values behind each mean, fewer where a function does not apply to
    each rollout. Intervals are 95 %, over the examples. An example counts with its known rollouts in each pass@k
    of at most as many: ``pass_at_k_examples`` are behind each k, ``pass_at_k_unknown`` rollouts are
    in none, and ``pass_at_k_bounds`` is what is possible were these all unsolved, or all solved.
    Rollouts that share turns are no samples of their own: of k draws each takes one of another tree.

    >>> from verifiers.testing import ScriptedClient
    >>> env = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}], rubric=vf.Rubric([lambda completion: 0.0]))
    >>> metadata = env.evaluate(ScriptedClient("2"), "m", rollouts_per_example=4).metadata
    >>> metadata.num_rollouts, metadata["num_errors"], metadata.pass_at_k
    (4, 0, {'1': 0.0, '2': 0.0, '4': 0.0})
    """

    if TYPE_CHECKING:
        env_id: str
        env_args: dict[str, Any]
        env_version: str
        model: str
        base_url: str
        sampling_args: dict[str, Any]
        date: str
        time: float
        time_ms: float
        success_metric: str | None
        pass_threshold: float | None
        state_columns: list[str]
        path_to_save: Path | None
        tools: list[Any] | None
        version_info: dict[str, str | None]
        provenance: dict[str, Any] | None
        fingerprint: str | None
        status: str
        seed: int | None
        resumed: int
        outside_plan: list[str]
        changed_code: list[str]
        served_models: dict[str, int]
        local_model: LocalModelFacts | None
        prices: dict[str, float] | None
        stopped: dict[str, Any] | None
        spent: dict[str, Any] | None
        origin: dict[str, Any] | None
        cached: dict[str, Any] | None
        coverage: dict[str, int | None] | None
        num_examples: int
        rollouts_per_example: int
        num_rollouts: int
        num_errors: int
        num_unscored: int
        avg_reward: float
        reward_stderr: float
        avg_success: float
        success_stderr: float
        avg_metrics: dict[str, float]
        metric_counts: dict[str, int]
        avg_error: float
        stop_conditions: dict[str, int]
        pass_at_k: dict[str, float]
        pass_at_k_interval: dict[str, tuple[float, float]]
        pass_at_k_examples: dict[str, int]
        pass_at_k_unknown: int
        pass_at_k_bounds: dict[str, tuple[float, float]]
        pass_all_k: dict[str, float]
        usage: dict[str, float]
        cost_usd: float | None

    @classmethod
    def of(
        cls, rollouts: Sequence[RolloutOutput] | Measurements, **facts: object
    ) -> GenerateMetadata:
        """Compute the metadata. ``num_examples`` and ``rollouts_per_example`` are counted unless
        given.

        *Raises* TypeError for an unknown fact.
        """
        measured = rollouts if isinstance(rollouts, Measurements) else Measurements.of(rollouts)
        num_examples: object = facts.pop("num_examples", None)
        siblings: Any = facts.pop("rollouts_per_example", None)
        if unknown := facts.keys() - FACTS.keys():
            raise TypeError(f"metadata has no field {sorted(unknown)[0]!r}")
        metadata = cls(FACTS | facts)
        if metadata["path_to_save"] is not None:
            metadata["path_to_save"] = Path(metadata["path_to_save"])
        metadata["time_ms"] = metadata["time"] * 1000
        if num_examples is None or siblings is None:
            counts = Counter(measured.examples)
            num_examples = len(counts) if num_examples is None else num_examples
            siblings = max(counts.values(), default=1) if siblings is None else siblings
        metadata.update(num_examples=num_examples, rollouts_per_example=siblings)
        metadata.update(_statistics(measured, siblings, metadata["pass_threshold"]))
        metadata["cost_usd"] = cost_usd(metadata["prices"], measured)
        return metadata


def successes(outputs: Sequence[Mapping[str, Any]], threshold: float | None = None) -> list[float]:
    """Whether each rollout solved its task: 1, 0, or NaN if that is unknown.

    It is the metric ``success``; without the metric whether the reward reaches ``threshold``, or
    the reward itself where no threshold is given. All are NaN when any of them is neither 0 nor 1:
    a graded reward does not say what solved means.

    >>> graded = [{"reward": 0.7, "metrics": {}}, {"reward": 1.0, "metrics": {}}]
    >>> successes(graded), successes(graded, 0.5)
    ([nan, nan], [1.0, 1.0])
    """
    measured = [output["metrics"].get(SUCCESS, math.nan) for output in outputs]
    return list(solved([output["reward"] for output in outputs], measured, threshold).tolist())


def _statistics(
    measured: Measurements, siblings: int, threshold: float | None
) -> dict[str, object]:
    rewards, examples = measured.rewards, measured.examples
    num_rollouts = len(rewards)
    num_failed = sum(
        count for error, count in Counter(measured.errors).items() if _is_of_rollout(error)
    )
    unscored = (
        error for reward, error in zip(rewards, measured.errors, strict=True) if reward != reward
    )
    successes = solved(rewards, measured.metrics.get(SUCCESS), threshold)
    passed = pass_rates(successes, examples, siblings, measured.trees)
    return {
        "num_rollouts": num_rollouts,
        "num_errors": num_failed,
        "num_unscored": sum(not _is_of_rollout(error) for error in unscored),
        "avg_reward": mean(rewards),
        "reward_stderr": clustered_stderr(rewards, examples),
        "avg_success": mean(successes),
        "success_stderr": clustered_stderr(successes, examples),
        "avg_metrics": {name: mean(values) for name, values in measured.metrics.items()},
        "metric_counts": {
            name: int(np.count_nonzero(~np.isnan(np.asarray(values, float))))
            for name, values in measured.metrics.items()
        },
        "avg_error": num_failed / num_rollouts if num_rollouts else 0.0,
        "stop_conditions": {
            str(stop): count for stop, count in Counter(measured.stop_conditions).items() if stop
        },
        "pass_at_k": passed.any_of,
        "pass_at_k_interval": passed.any_of_interval,
        "pass_at_k_examples": passed.num_examples,
        "pass_at_k_unknown": passed.num_unknown,
        "pass_at_k_bounds": passed.any_of_bounds,
        "pass_all_k": passed.all_of,
        "usage": _mean_usage(measured),
    }


def _is_of_rollout(error: str | None) -> bool:
    """Whether an error of this class is of the rollout itself, not only of a reward function."""
    return error is not None and error != ScoringError.__name__


def errors_by_cause(measured: Measurements) -> dict[str, int]:
    """Class of the rollout error -> count, the most frequent first."""
    return dict(
        Counter(error for error in measured.errors if error and _is_of_rollout(error)).most_common()
    )


def error_causes(errors: Iterable[ErrorInfo]) -> dict[str, int]:
    """``"EnvironmentFault: env_response raised KeyError: 'board' (sums.py:12)"`` -> count, the most
    frequent first.

    Errors of one class at one line are one cause, with their message where it is the same.
    """
    messages: dict[tuple[str, str | None], Counter[str]] = {}
    for error in errors:
        if error.is_scoring_error:
            continue
        messages.setdefault((error.get("error", "unknown"), error.author_line), Counter())[
            _headline(error)
        ] += 1
    causes = Counter(
        {
            f"{name}{f': {next(iter(texts))}' if len(texts) == 1 and any(texts) else ''}{f' ({line})' if line else ''}":
            texts.total() for (name, line), texts in messages.items()
        }
    )  # fmt: skip
    return dict(causes.most_common())


def _headline(error: ErrorInfo) -> str:
    """The first line of the message, at most ``MAX_CAUSE_CHARS``."""
    line = (error.get("message") or "").strip().partition("\n")[0]
    return line if len(line) <= MAX_CAUSE_CHARS else line[: MAX_CAUSE_CHARS - 1] + "…"


def unscored_by_function(measured: Measurements) -> dict[str, int]:
    """``"ConnectionError in flaky"`` -> count of unknown rewards, the most frequent first."""
    rows = zip(measured.rewards, measured.errors, measured.causes, strict=True)
    causes = (
        cause or "not scored"
        for reward, error, cause in rows
        if reward != reward and not _is_of_rollout(error)
    )
    return dict(Counter(causes).most_common())


def latency(measured: Measurements) -> dict[str, float]:
    """Percentiles of the rollouts' total time in milliseconds: ``median_ms p95_ms
    p99_ms max_ms``."""
    percents = {"median_ms": 50, "p95_ms": 95, "p99_ms": 99, "max_ms": 100}
    return dict(zip(percents, percentiles(measured.total_ms, percents.values()), strict=True))


def total_usage(measured: Measurements) -> dict[str, int]:
    """The sum of each count over the rollouts."""
    totals = {name: known_sum(counts) for name, counts in measured.usage.items()}
    return {name: int(total) for name, total in totals.items() if total}


def _mean_usage(measured: Measurements) -> dict[str, float]:
    """The mean of each count over the rollouts that have counts."""
    unknown = [np.isnan(np.asarray(counts, float)) for counts in measured.usage.values()]
    num_counted = int(np.count_nonzero(~np.logical_and.reduce(unknown)))
    return {
        name: known_sum(counts) / max(1, num_counted) for name, counts in measured.usage.items()
    }


def cost_usd(prices: Mapping[str, float] | None, measured: Measurements) -> float | None:
    """US dollars for the tokens of all rollouts; None without prices, or when an error-free rollout
    has no counts.

    >>> prices = {"usd_per_million_input_tokens": 2.0, "usd_per_million_output_tokens": 8.0}
    >>> from verifiers.testing import ScriptedClient
    >>> results = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}]).evaluate(ScriptedClient("2"), "m")
    >>> cost_usd(prices, results.measurements()) is None, results.outputs[0].token_usage["input_tokens"]
    (True, 0)
    """
    if not prices:
        return None
    unknown = [math.nan] * len(measured)
    inputs, sampled = (
        measured.usage.get(name, unknown) for name in ("input_tokens", "output_tokens")
    )
    has_tokens = (count > 0 for count in inputs)
    if any(
        error is None and not has for error, has in zip(measured.errors, has_tokens, strict=True)
    ):
        return None
    totals = (known_sum(counts) for counts in (inputs, sampled))
    return sum(total * prices[name] for total, name in zip(totals, PRICE_FIELDS, strict=True)) / 1e6
