"""The audit finds every planted hole of the zoo and raises no alarm at its clean environments, each
in seconds."""

import time

import pytest

import verifiers as vf
from support.zoo import CLEAN, HOLES

LIMIT_S = 60


def test_the_zoo_has_thirty_holes_and_twelve_clean_environments():
    assert len(HOLES) >= 30
    assert len(CLEAN) >= 12


@pytest.mark.parametrize("name", HOLES)
def test_a_planted_hole_is_found(name):
    build, code = HOLES[name]
    started = time.monotonic()
    report = vf.audit_environment(build())
    assert code in [finding.code for finding in report.errors], report
    assert not report.ok
    assert time.monotonic() - started < LIMIT_S


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_environment_raises_no_alarm(name):
    started = time.monotonic()
    report = vf.audit_environment(CLEAN[name]())
    assert report.ok, report
    assert report.oracle.reward == 1.0
    assert time.monotonic() - started < LIMIT_S


def judged(is_reached: bool) -> vf.Environment:
    """An exact answer is paid at once; a judge, who can be asked or not, decides about others."""

    def right(completion, answer) -> float:
        if completion[-1]["content"] == answer:
            return 1.0
        if not is_reached:
            raise ConnectionError("the judge is not there")
        return 0.0

    rows = [{"question": f"{n} + {n}", "answer": str(2 * n)} for n in range(20, 40)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[right]))


def test_an_unknown_reward_is_not_one_of_nothing():
    report = vf.audit_environment(judged(is_reached=False), n=6)
    (finding,) = (f for f in report.warnings if f.code == "reward-is-unknown")
    assert "the judge is not there" in finding.message
    text = str(report)
    assert "the reward was not audited" in text
    assert "earned nothing" not in text
    assert "no way to be paid" not in text
    sound = vf.audit_environment(judged(is_reached=True), n=6)  # negative control
    assert "reward-is-unknown" not in [finding.code for finding in sound.warnings]
    assert "no way to be paid" in str(sound)
