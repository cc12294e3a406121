"""Every shipped environment has a certificate of its present code, and it says that the audit
passed."""

import pytest

import verifiers as vf
from verifiers.checks.audit.certificate import read_certificate

NEEDS_A_JUDGE = {"self-judge"}
"""No reward is known without a model: only the rows are audited."""

NOT_AUDITED = {"kuhn-poker"}
"""A game has no right answer, and one script in both seats solves nothing."""
SHIPPED = sorted({info.id for info in vf.list_environments()} - NOT_AUDITED)


def test_what_is_not_audited_has_no_certificate():
    assert {env_id for env_id in NOT_AUDITED if read_certificate(env_id)} == set()


@pytest.mark.parametrize("env_id", SHIPPED)
def test_the_certificate_is_fresh_and_passed(env_id):
    certificate = read_certificate(env_id)
    again = f"run: vf-audit {env_id} --certify"
    assert certificate is not None, f"{env_id} has no certificate; {again}"
    assert certificate.is_fresh, f"{env_id} has changed since it was audited; {again}"
    assert certificate.ok, str(certificate)
    assert (certificate.content["best_non_solution"] is None) == (env_id in NEEDS_A_JUDGE)
