"""Audits under the test ids of OpenEnv's RFC 008."""

from __future__ import annotations

from dataclasses import replace

import pytest

import verifiers as vf
from verifiers.checks.audit.report import AuditReport, RowProfile
from verifiers.checks.audit.rfc008 import FAILED_BY, NOT_RUN, rfc008


def audit(pays, answers=str, **parameters) -> AuditReport:
    rows = [{"question": f"{n} + {n}", "answer": answers(2 * n)} for n in range(20, 30)]

    def reward(completion, answer) -> float:
        return float(pays(completion[-1]["content"], answer))

    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[reward]), **parameters)
    return vf.audit_environment(env, n=4, search_steps=0)


def statuses(report: AuditReport) -> dict[str, str]:
    return {name: result["status"] for name, result in rfc008(report)["results"].items()}


@pytest.fixture(scope="module")
def sound() -> AuditReport:
    return audit(lambda text, answer: text == answer)


def test_an_audit_without_a_finding_passes_the_tests_that_it_answers(sound):
    assert statuses(sound) == {
        "semantic.oracle_max": "pass",
        "semantic.floor_gap": "pass",
        "semantic.no_solution_leakage": "pass",
        "semantic.verifier_determinism": "pass",
        "statistical.adversarial_floor": "pass",
        "statistical.gameability_gap": "skip",
        "statistical.reward_reachability": "skip",  # no model was asked
    }
    results = rfc008(sound)["results"]
    assert results["semantic.floor_gap"]["measured"] == {
        "oracle_reward": 1.0,
        "measured_floor": 0.0,
    }
    assert results["statistical.gameability_gap"]["measured"] == {
        "correlation_of_reward_and_success": pytest.approx(1.0)
    }


def test_a_reward_for_an_empty_reply_fails_the_floor():
    report = audit(lambda text, answer: text == answer or not text)
    assert statuses(report)["semantic.floor_gap"] == "fail"
    assert statuses(report)["statistical.adversarial_floor"] == "fail"
    measured = rfc008(report)["results"]["semantic.floor_gap"]["measured"]
    assert measured == {"oracle_reward": 1.0, "measured_floor": 1.0}


def test_a_finding_fails_its_test_with_its_words():
    report = audit(lambda text, answer: answer in text)
    result = rfc008(report)["results"]["statistical.adversarial_floor"]
    assert result["status"] == "fail"
    (paid,) = (f for f in report.errors if f.code == "non-solution-is-paid")
    assert (result["evidence"], result["remediation"]) == ([paid.message], [paid.fix])
    assert statuses(report)["semantic.floor_gap"] == "pass"


def test_without_a_right_answer_the_oracle_fails_and_the_gap_is_not_known():
    report = audit(lambda text, answer: "7" in text, answers=lambda n: "")
    assert statuses(report)["semantic.oracle_max"] == "fail"
    assert statuses(report)["semantic.floor_gap"] == "skip"


def test_reward_is_reachable_where_the_model_solved_a_row(sound):
    rows = (RowProfile(0, "a", 0, 4), RowProfile(1, "b", 1, 4))
    reachable = "statistical.reward_reachability"
    assert statuses(replace(sound, profile=rows))[reachable] == "pass"
    assert statuses(replace(sound, profile=rows[:1]))[reachable] == "fail"


def test_every_id_is_answered_or_has_a_reason():
    names = [*FAILED_BY, *(name for listed in NOT_RUN.values() for name in listed)]
    assert len(names) == len(set(names)) == 45  # 42 tests of 44, two of them in two parts, and one
    nothing_played = AuditReport("e", (), (), (), 0)
    assert set(statuses(nothing_played).values()) == {"skip"}
