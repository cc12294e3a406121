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
