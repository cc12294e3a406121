"""The table of faults is complete: every row has tests and negative controls that exist, and the
page is up to date."""

import ast
import json
from functools import cache
from pathlib import Path

import pytest

import certificate
from faults.matrix import PAGE, PROMISES, REQUIRED, ROWS, page

TESTS = Path(__file__).parents[1]


@cache
def functions_of(file):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {
        node.name for node in tree.body if isinstance(node, kinds) and node.name.startswith("test_")
    }


def test_no_row_is_missing_and_each_stands_under_one_promise():
    assert set(REQUIRED) <= set(ROWS)
    assert sorted(number for numbers in PROMISES.values() for number in numbers) == sorted(ROWS)


@pytest.mark.parametrize("number", ROWS)
def test_a_row_has_tests_and_negative_controls_and_all_of_them_exist(number):
    row = ROWS[number]
    assert row.tests
    assert row.negative_controls
    missing = [
        test
        for test in (*row.tests, *row.negative_controls)
        if test.split("::")[1] not in functions_of(test.split("::")[0])
    ]
    assert missing == []


def test_every_test_of_this_folder_is_in_the_table():
    listed = {test for row in ROWS.values() for test in (*row.tests, *row.negative_controls)}
    files = [
        file
        for file in sorted(Path(__file__).parent.glob("test_*.py"))
        if file.name != "test_matrix.py"
    ]
    defined = {
        f"faults/{file.name}::{name}"
        for file in files
        for name in functions_of(f"faults/{file.name}")
    }
    assert defined - listed == set()


def test_the_page_of_promises_is_what_the_table_says():
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "write it again: python tests/faults/matrix.py"
    )


# --- the certificate ------------------------------------------------------------------------------


def test_the_page_of_the_certificate_is_the_recorded_one_of_these_promises():
    record = json.loads(certificate.RECORD.read_text())
    text = certificate.PAGE.read_text(encoding="utf-8")
    assert text == certificate.with_section(text, record), (
        "write it again: python tests/certificate.py --page FILES"
    )
    files = {
        test.partition("::")[0]
        for row in ROWS.values()
        for test in (*row.tests, *row.negative_controls)
    }
    made = record["certificate"]
    assert [promise["promise"] for promise in made["promises"]] == list(PROMISES)
    assert {file for promise in made["promises"] for file in promise["families"]} <= files
    assert certificate.holds(made)
    assert record["soak"]["violation"] is None
    assert record["soak"]["minutes"] >= 60


def outcomes(*changes):
    every = {
        test: "passed" for promise in PROMISES for test in certificate.named_tests(promise, ROWS)
    }
    return {name: outcome for name, outcome in (every | dict(changes)).items() if outcome}


def test_a_certificate_holds_for_what_ran_and_passed_alone():
    first = next(iter(outcomes()))
    assert certificate.holds(certificate.certificate(outcomes(), "all", 1.0))
    skipped = certificate.certificate(outcomes((first, "Skipped: no such device")), "all", 1.0)
    assert certificate.holds(skipped)
    assert "skipped 1: no such device" in "\n".join(certificate.lines_of(skipped))
    # negative controls
    for outcome, said in (("failed", f"failed: {first}"), ("", "1 tests left out")):
        made = certificate.certificate(outcomes((first, outcome)), "all", 1.0)
        assert not certificate.holds(made)
        assert said in "\n".join(certificate.lines_of(made))


def test_of_several_runs_a_case_counts_as_it_ran_last():
    first, *later = outcomes()
    full_run = certificate.certificate(outcomes((first, "failed")), "all", 60.0)
    again = certificate.certificate({first: "passed"}, "some", 1.0)
    made = certificate.merged([full_run, again])
    assert certificate.holds(made)
    assert made["passed"] == made["cases"] == 1 + len(later)
    assert [run["passed"] for run in made["runs"]] == [len(later), 1]
    # negative control: the failure is the last word
    assert not certificate.holds(certificate.merged([again, full_run]))
