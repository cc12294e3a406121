"""``GenerateMetadata``: what is true of a whole run, from its rows and from the facts the runner knows.

Means skip unknown values. A rollout *error* is a failure of the rollout itself; a rollout is *unscored* when it went
well and its reward is unknown all the same. This module reads no disk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.clients.prices import cost_usd
from verifiers.results.rows import RolloutOutput
from verifiers.results.statistics import clustered_stderr, mean, pass_rates, percentile
from verifiers.types import AttributeDict

FACTS: dict[str, Any] = {
    "env_id": "",
    "env_args": {},
    "env_version": "",
    "model": "",
    "base_url": "",
    "sampling_args": {},
    "date": "",
    "time": 0.0,
    "pass_threshold": 0.5,
    "state_columns": [],
    "path_to_save": None,
    "tools": None,
    "version_info": {"vf_version": None, "vf_commit": None, "env_version": None, "env_commit": None},
    "fingerprint": None,
    "status": "complete",
    "seed": None,
    "resumed": 0,
    "outside_plan": [],
    "local_model": None,
    "prices": None,
}
"""What the rows do not say, with its default. ``time`` is in seconds; ``date`` is ISO 8601; ``local_model`` has the
``name file sha256 quantisation`` of the model in this process, where that played; ``outside_plan`` are the keys of rows
that the directory keeps of examples which are no longer run, and that are not counted; ``prices``: see
``clients.prices``."""


class GenerateMetadata(AttributeDict):
    """The facts, and the statistics of the rows: ``num_rollouts num_errors num_unscored avg_reward reward_stderr
    avg_metrics avg_error stop_conditions pass_at_k pass_all_k usage cost_usd``. ``time_ms``: ``time`` in milliseconds.

    >>> from verifiers.testing import ScriptedClient
    >>> env = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}])
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
        pass_threshold: float
        state_columns: list[str]
        path_to_save: str | None
        tools: list[Any] | None
        version_info: dict[str, str | None]
        fingerprint: str | None
        status: str
        seed: int | None
        resumed: int
        outside_plan: list[str]
        local_model: dict[str, Any] | None
        prices: dict[str, float] | None
        num_examples: int
        rollouts_per_example: int
        num_rollouts: int
        num_errors: int
        num_unscored: int
        avg_reward: float
        reward_stderr: float
        avg_metrics: dict[str, float]
        avg_error: float
        stop_conditions: dict[str, int]
        pass_at_k: dict[str, float]
        pass_all_k: dict[str, float]
        usage: dict[str, int]
        cost_usd: float | None

    @classmethod
    def of(cls, outputs: Sequence[RolloutOutput], **facts: Any) -> GenerateMetadata:
        """From the rows. ``num_examples`` and ``rollouts_per_example`` may be given, else they are counted.

        *Raises* TypeError for a fact that does not exist.
        """
        planned = {name: facts.pop(name, None) for name in ("num_examples", "rollouts_per_example")}
        if unknown := facts.keys() - FACTS.keys():
            raise TypeError(f"metadata has no field {sorted(unknown)[0]!r}")
        made = cls(FACTS | facts)
        made["time_ms"] = made["time"] * 1000
        counts = Counter(map(example_key, outputs))
        made["num_examples"] = len(counts) if planned["num_examples"] is None else planned["num_examples"]
        siblings = planned["rollouts_per_example"]
        made["rollouts_per_example"] = max(counts.values(), default=1) if siblings is None else siblings
        made.update(_statistics(outputs, made["rollouts_per_example"], made["pass_threshold"]))
        made["cost_usd"] = cost_usd(made["prices"], outputs)
        return made


def example_key(output: Mapping[str, Any]) -> Any:
    """What siblings have in common: the hash of their example when the row knows it, else its id."""
    return output.get("example_hash") or output["example_id"]


def _statistics(outputs: Sequence[RolloutOutput], siblings: int, threshold: float) -> dict[str, Any]:
    rewards = [output["reward"] for output in outputs]
    examples = [example_key(output) for output in outputs]
    failed = [output["error"] is not None and is_rollout_error(output) for output in outputs]
    pass_any, pass_all = pass_rates(rewards, examples, siblings, threshold)
    metrics = [output["metrics"] for output in outputs]
    names = dict.fromkeys(name for measured in metrics for name in measured)
    return {
        "num_rollouts": len(outputs),
        "num_errors": sum(failed),
        "num_unscored": sum(math.isnan(reward) and not bad for reward, bad in zip(rewards, failed, strict=True)),
        "avg_reward": mean(rewards),
        "reward_stderr": clustered_stderr(rewards, examples),
        "avg_metrics": {n: mean([measured.get(n, math.nan) for measured in metrics]) for n in names},
        "avg_error": sum(failed) / len(outputs) if outputs else 0.0,
        "stop_conditions": dict(Counter([str(o["stop_condition"]) for o in outputs if o["stop_condition"]])),
        "pass_at_k": pass_any,
        "pass_all_k": pass_all,
        "usage": _total_usage(outputs),
    }


def is_rollout_error(output: Mapping[str, Any]) -> bool:
    """Whether the rollout itself failed (a reward function's failure is not that)."""
    return output["error"] is not None and not output["error"].is_scoring_error


def errors_by_cause(outputs: Sequence[RolloutOutput]) -> dict[str, int]:
    """Class of the rollout error -> count, the most frequent first."""
    return dict(Counter(o["error"].get("error", "unknown") for o in outputs if is_rollout_error(o)).most_common())


def unscored_by_function(outputs: Sequence[RolloutOutput]) -> dict[str, int]:
    """``"ConnectionError in flaky"`` -> count of unknown rewards, the most frequent first."""
    causes = Counter(
        f"{output['error'].cause} in {output['error'].get('where')}" if output["error"] is not None else "not scored"
        for output in outputs
        if math.isnan(output["reward"]) and not is_rollout_error(output)
    )
    return dict(causes.most_common())


def latency(outputs: Sequence[RolloutOutput]) -> dict[str, float]:
    """Of a rollout's whole time, in milliseconds: ``median_ms p95_ms p99_ms max_ms``."""
    times = [(output["timing"] or {}).get("total_ms", math.nan) for output in outputs]
    return {
        "median_ms": percentile(times, 50),
        "p95_ms": percentile(times, 95),
        "p99_ms": percentile(times, 99),
        "max_ms": percentile(times, 100),
    }


def _total_usage(outputs: Sequence[RolloutOutput]) -> dict[str, int]:
    total: dict[str, int] = {}
    for output in outputs:
        for name, count in (output["token_usage"] or {}).items():
            if count:
                total[name] = total.get(name, 0) + count
    return total
