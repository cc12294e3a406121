"""An audit under the test ids of OpenEnv's RFC 008, environment auto-validation: what it answers,
with what was measured, and what it does not run.

A status is the RFC's: pass, fail, or skip where an audit did not come to it. *Source*: RFC 008,
"The 44-test mapping", and the acceptance tests that it numbers; for two statistical tests it
reserves the ids and leaves the procedure to others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from verifiers.checks.audit.report import NOT_REPEATABLE, AuditReport

EMPTY_REPLY = "no text at all"
"""The non-solution whose reward is the floor of the RFC."""
MARGIN = 0.5
"""Share of a right answer's reward that must lie between it and the floor, as in the RFC's
example: environments here declare none."""
FAILED_BY: Mapping[str, tuple[str, ...]] = {
    "semantic.oracle_max": ("solution-is-not-paid", "no-oracle"),
    "semantic.floor_gap": (),
    "semantic.no_solution_leakage": ("answer-in-the-prompt", "feedback-tells-the-answer"),
    "semantic.verifier_determinism": (NOT_REPEATABLE,),
    "statistical.adversarial_floor": ("non-solution-is-paid", "non-solution-is-paid-partly"),
    "statistical.gameability_gap": (),
    "statistical.reward_reachability": (),
}
"""Test id -> the codes of findings that fail it."""
NOT_RUN: Mapping[str, tuple[str, ...]] = {
    "of a built image and its manifest, and an audit builds none": (
        *("static.manifest", "static.reproducible_build", "static.image_hygiene"),
        *("static.layout", "static.sbom", "static.oci_labels", "static.resource_declaration"),
        *("static.timeout_ceiling", "static.dependency_pinning"),
        *("static.task_distribution_pinning", "semantic.resource_envelope"),
    ),
    "of an environment that is served in a sandbox": (
        *("runtime.egress_denied", "runtime.host_containment", "runtime.resource_bounds"),
        *("runtime.episode_isolation", "runtime.oracle_containment"),
        *("runtime.observation_schema", "runtime.state_contract"),
        *("runtime.tool_declaration_accuracy", "runtime.task_declaration_accuracy"),
    ),
    "vf-eval ENV --check looks for it": (
        *("runtime.reward_well_formed", "runtime.seed_control", "runtime.episode_determinism"),
    ),
    "what every rollout records here": (
        *("runtime.rubric_introspectable", "runtime.trajectory_record"),
        *("runtime.reward_attribution", "semantic.replayability"),
    ),
    "of trajectories that a package ships, or of several machines": (
        *("semantic.canary_floor", "semantic.verifier_portability"),
    ),
    "of a hub": (
        *("hub.layer_isolation", "hub.time_to_first_work", "hub.cosign_signature"),
        *("hub.cross_host_determinism", "hub.immutable_versioning"),
    ),
    "of several models, or of a training": (
        *("statistical.difficulty_separation", "statistical.headroom"),
        *("statistical.variance_bound", "statistical.training_signal"),
    ),
}
"""Why an audit does not run a test -> the ids."""


def rfc008(report: AuditReport) -> dict[str, Any]:
    """The results of a report by test id, and the ids that were not run with the reason."""
    measured = _measured(report)
    results = {}
    for name, codes in FAILED_BY.items():
        of_test = [f for f in (*report.errors, *report.warnings) if f.code in codes]
        numbers = measured[name]
        results[name] = {
            "status": _status(name, bool(of_test), numbers),
            "measured": {key: _finite_or_none(value) for key, value in numbers.items()},
            "evidence": [finding.message for finding in of_test],
            "remediation": [finding.fix for finding in of_test],
        }
    return {
        "results": results,
        "not_run": {name: why for why, names in NOT_RUN.items() for name in names},
    }


def _measured(report: AuditReport) -> dict[str, dict[str, float]]:
    """The numbers that decide each test; NaN where unknown."""
    right = math.nan if report.oracle is None else report.oracle.reward
    floor = max((p.reward for p in report.non_solutions if p.name == EMPTY_REPLY), default=math.nan)
    best = math.nan if report.best_non_solution is None else report.best_non_solution.reward
    pairs = [
        (paid.reward, paid.success)
        for paid in (*report.non_solutions, *([report.oracle] if report.oracle else []))
        if not math.isnan(paid.reward) and not math.isnan(paid.success)
    ]
    rewards, successes = [list(column) for column in zip(*pairs, strict=True)] or [[], []]
    varies = len(set(rewards)) > 1 and len(set(successes)) > 1
    num_solved = sum(row.num_solved > 0 for row in report.profile)
    played = float(sum(not math.isnan(paid.reward) for paid in report.non_solutions))
    return {
        "semantic.oracle_max": {"oracle_reward": right},
        "semantic.floor_gap": {"oracle_reward": right, "measured_floor": floor},
        "semantic.no_solution_leakage": {"rows": report.num_rows or math.nan},
        "semantic.verifier_determinism": {"rollouts": report.num_rollouts if played else math.nan},
        "statistical.adversarial_floor": {
            "best_non_solution_reward": best,
            "measured_floor": floor,
            "num_non_solutions": played,
        },
        "statistical.gameability_gap": {
            "correlation_of_reward_and_success": (
                statistics.correlation(rewards, successes) if varies else math.nan
            )
        },
        "statistical.reward_reachability": {
            "rows_solved": float(num_solved) if report.profile else math.nan,
            "rows": float(len(report.profile)) if report.profile else math.nan,
        },
    }


def _status(name: str, has_finding: bool, numbers: Mapping[str, float]) -> str:
    if has_finding:
        return "fail"
    # no bound of the correlation is declared
    if name == "statistical.gameability_gap" or any(map(math.isnan, numbers.values())):
        return "skip"
    if name == "semantic.floor_gap":
        right = numbers["oracle_reward"]
        return "pass" if right - numbers["measured_floor"] >= MARGIN * right else "fail"
    if name == "statistical.reward_reachability":
        return "pass" if numbers["rows_solved"] else "fail"
    return "pass"


def _finite_or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
