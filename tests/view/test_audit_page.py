"""The page of an environment's audit, from the certificate that ``vf-audit --certify`` writes."""

from __future__ import annotations

import json
from dataclasses import replace
from urllib.parse import quote

import pytest

from support.browser import too_wide
from verifiers.checks.audit import audit_environment
from verifiers.checks.audit.certificate import write_certificate
from verifiers.checks.audit.report import RowProfile
from verifiers.environments.registry import load_environment
from verifiers.testing import ScriptedClient

LENIENT = """
import verifiers as vf

def load_environment():
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20, 32)]

    def partly(completion, answer):
        return 1.0 if completion[-1].content == answer else 0.25 * (answer in completion[-1].content)

    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([partly]))
"""


@pytest.fixture
def audited(tmp_path, monkeypatch):
    """An environment's package with its certificate, and an evaluation of it."""
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "environments" / "lenient"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LENIENT)
    report = audit_environment(lambda: load_environment("lenient"), n=6, seed=0)
    profile = tuple(RowProfile(n, f"{n}", min(4, max(0, n - 2)), 4) for n in range(8))
    file = write_certificate(replace(report, profile=profile), "lenient")
    env = load_environment("lenient")
    env.evaluate_sync(
        ScriptedClient(["21"]), "m", num_examples=2, results_path=tmp_path / "evals/lenient--m/1"
    )
    return tmp_path, report, json.loads(file.read_text())


def test_the_certificate_is_shown_with_its_panel_and_profile(page, serve, audited):
    folder, report, stored = audited
    assert len(stored["non_solutions"]) == len(report.non_solutions) > 50
    assert stored["is_repeatable"] is True
    server = serve(folder / "evals")
    run = server.ask("runs")["runs"][0]["id"]
    page.open(server.url + "#/run/" + quote(run, safe=""))
    page.wait(lambda: "audit" in page.text(".title"))
    page.open(server.url + "#/audit/" + quote(run, safe=""))
    page.wait_text("Audit of lenient")
    page.picture("audit")
    text = page.text()
    best = report.best_non_solution
    assert f"best non-solution\n{best.reward:.3f}\n{best.name}" in text
    assert "same reply, same reward\nyes" in text
    assert [card.split("\n")[:2] for card in page.texts("section .card")] == [
        ["never solved", "3"], ["sometimes", "3"], ["always", "2"],
    ]  # fmt: skip
    lines = page.texts("table.compared tbody tr")
    assert lines[0].startswith("a right answer")
    assert len(lines) == 13
    page.find("section .more").click()
    page.wait(lambda: len(page.texts("table.compared tbody tr")) == 1 + len(report.non_solutions))


def test_an_older_certificate_without_a_panel_and_a_run_without_one_are_said(page, serve, audited):
    folder, _, stored = audited
    summary = {
        name: stored[name]
        for name in stored
        if name not in ("non_solutions", "findings", "oracle", "profile")
    }
    (folder / "environments/lenient/audit.json").write_text(json.dumps(summary))
    server = serve(folder / "evals")
    address = server.url + "#/audit/" + quote(server.ask("runs")["runs"][0]["id"], safe="")
    page.open(address)
    page.wait_text("This certificate holds a summary")
    (folder / "environments/lenient/__init__.py").write_text(LENIENT + "\n# changed\n")
    page.open(address)
    page.wait_text("have changed since this audit")
    (folder / "environments/lenient/audit.json").unlink()
    page.open(address)
    page.wait_text("vf-audit lenient --certify")


def test_the_page_of_an_audit_is_no_wider_than_a_phone(phone, serve, audited):
    server = serve(audited[0] / "evals")
    phone.open(server.url + "#/audit/" + quote(server.ask("runs")["runs"][0]["id"], safe=""))
    phone.wait_text("Audit of lenient")
    phone.picture("phone-audit")
    assert too_wide(phone) == []
