"""The promises as a certificate: run exactly the tests that the table of faults names, and say what
proves what.

    python3 run.py test --promises            every test, slow ones too
    python3 run.py test --promises --fast     without the slow ones; --slow: those alone

Further arguments go to pytest. The certificate is printed and written to
``outputs/certificate.json``. ``--page`` takes such files (of several, a case counts as it ran
last), and ``--soak`` the report of ``python3 run.py soak``, into ``docs/reference/certificate.md``
and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

# found by the line above when this file is run as a script
from faults.matrix import PROMISES, ROWS  # noqa: E402

PAGE, RECORD = ROOT / "docs/reference/certificate.md", ROOT / "docs/reference/certificate.json"
WRITTEN = ROOT / "outputs/certificate.json"
SELECTIONS = {"all": "", "fast": "not slow and not real and not gpu", "slow": "slow"}
"""Selection -> pytest's expression of marks."""
BEGIN, END = "<!-- certificate: begin -->\n", "<!-- certificate: end -->\n"


def named_tests(promise: str, faults: Collection[int] = ROWS) -> list[str]:
    """The tests and negative controls of a promise, each once, as ``folder/file.py::test_name``
    below ``tests/``."""
    rows = (ROWS[number] for number in PROMISES[promise] if number in faults)
    return list(
        dict.fromkeys(test for row in rows for test in (*row.tests, *row.negative_controls))
    )


class Recorder:
    """A pytest plugin: the outcome of every case, also of those that ran in other processes."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        """Node id -> "passed", "failed", or the reason why it was skipped."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of set-up, call and tear-down."""
        node = report.nodeid.removeprefix("tests/")
        if report.skipped:
            self.outcomes[node] = str(
                report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            )
        elif report.failed or (report.when == "call" and node not in self.outcomes):
            self.outcomes[node] = report.outcome


def run_tests(arguments: Sequence[str], selection: str, faults: Collection[int]) -> dict[str, str]:
    """Run the named tests; node id below ``tests/`` -> outcome."""
    files = dict.fromkeys(
        f"tests/{test}" for promise in PROMISES for test in named_tests(promise, faults)
    )
    recorder = Recorder()
    options = ["-q", "-n", "auto", "-m", SELECTIONS[selection]]
    pytest.main([*files, *options, *arguments], plugins=[recorder])
    return recorder.outcomes


def certificate(
    outcomes: dict[str, str], selection: str, seconds: float, arguments: Sequence[str] = ()
) -> dict[str, Any]:
    """What proves each promise: test files with their numbers of cases, and what was left out.

    ``arguments``: those of pytest, which may have left out more.
    """
    by_test: dict[str, list[str]] = {}
    for node, outcome in outcomes.items():
        by_test.setdefault(node.partition("[")[0], []).append(outcome)
    promises = []
    for promise, numbers in PROMISES.items():
        families: dict[str, int] = Counter()
        passed, failed, skipped, not_run = 0, [], Counter[str](), 0
        for test in named_tests(promise):
            cases = by_test.get(test, [])
            families[test.partition("::")[0]] += len(cases)
            passed += cases.count("passed")
            failed += [test] * cases.count("failed")
            skipped.update(
                outcome.removeprefix("Skipped: ")
                for outcome in cases
                if outcome not in ("passed", "failed")
            )
            not_run += not cases
        promises.append(
            {
                "promise": promise,
                "faults": len(numbers),
                "tests": len(named_tests(promise)),
                "cases": sum(families.values()),
                "passed": passed,
                "failed": failed,
                "skipped": dict(skipped),
                "tests_not_run": not_run,
                "families": {name: count for name, count in sorted(families.items()) if count},
            }
        )
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": (
            f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()}"
            " processors"
        ),
        "python": platform.python_version(),
        "selection": selection,
        "arguments": list(arguments),
        "seconds": round(seconds),
        "cases": len(outcomes),
        "passed": sum(outcome == "passed" for outcome in outcomes.values()),
        "promises": promises,
        "outcomes": outcomes,
    }


def merged(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One certificate of several runs, the earliest first: a case counts as it ran last."""
    outcomes: dict[str, str] = {}
    for made in runs:
        outcomes.update(made["outcomes"])
    full_run = certificate(outcomes, "all", sum(made["seconds"] for made in runs))
    keep = ("date", "machine", "python", "selection", "seconds", "cases", "passed")
    return {
        "cases": full_run["cases"],
        "passed": full_run["passed"],
        "selection": full_run["selection"],
        "promises": full_run["promises"],
        "runs": [{name: made[name] for name in keep} for made in runs],
    }


def holds(made: dict[str, Any]) -> bool:
    """Whether nothing failed and no promise is without a test; of a selection, tests may be
    missing."""
    return all(
        not promise["failed"]
        and (made["selection"] != "all" or (promise["passed"] and not promise["tests_not_run"]))
        for promise in made["promises"]
    )


def lines_of(made: dict[str, Any]) -> Iterator[str]:
    """The certificate as text."""
    yield (
        f"{made['date']}, {made['machine']}, Python {made['python']}, {_which(made)},"
        f" {made['seconds']} s"
    )
    for promise in made["promises"]:
        if made["selection"] == "some" and not promise["cases"]:
            continue
        mark = "FAILED" if promise["failed"] else "proved" if promise["passed"] else "NOT RUN"
        yield f"\n{mark}  {promise['promise']}"
        yield f"        {promise['faults']} faults; {_counts(promise)}"
        yield "        " + ", ".join(
            f"{name} {count}" for name, count in promise["families"].items()
        )
        yield from (
            f"        skipped {count}: {reason}" for reason, count in promise["skipped"].items()
        )
        yield from (f"        failed: {test}" for test in dict.fromkeys(promise["failed"]))
    yield f"\n{made['passed']} of {made['cases']} cases passed" + (
        "" if holds(made) else "; a promise is NOT proved"
    )


def _which(made: dict[str, Any]) -> str:
    names = {
        "all": "every test",
        "fast": "every test but the slow ones",
        "slow": "the slow ones",
        "some": "the tests of some faults",
    }
    return names[made["selection"]]


def _counts(promise: dict[str, Any]) -> str:
    parts = [f"{promise['passed']} of {promise['cases']} cases passed"]
    parts += [f"{sum(promise['skipped'].values())} skipped"] if promise["skipped"] else []
    parts += [f"{promise['tests_not_run']} tests left out"] if promise["tests_not_run"] else []
    return ", ".join(parts)


# --- the page -------------------------------------------------------------------------------------


def section(record: dict[str, Any]) -> str:
    """The part of ``docs/reference/certificate.md`` that comes from the recorded certificate and
    soak."""
    made, soak = record["certificate"], record["soak"]
    text = [f"{made['passed']} of {made['cases']} cases passed; each counts as it ran last.\n"]
    text += [
        f"\nRun on {run['date']} ({run['machine']}, Python {run['python']}): {_which(run)},"
        f" {run['passed']} of {run['cases']} in {run['seconds'] / 60:.0f} minutes.\n"
        for run in made["runs"]
    ]
    text.append("\n| promise | faults | cases passed | proved in |\n|---|---|---|---|\n")
    skipped: Counter[str] = Counter()
    for promise in made["promises"]:
        skipped.update(promise["skipped"])
        files = ", ".join(
            f"`{name.removesuffix('.py')}` {count}" for name, count in promise["families"].items()
        )
        text.append(
            f"| {promise['promise']} | {promise['faults']} | {promise['passed']} of {promise['cases']} |"
            f" {files} |\n"
        )
    text += [
        f"\nSkipped, {count}: {reason.rstrip('.')}.\n" for reason, count in sorted(skipped.items())
    ]
    kinds = {"evaluation": 0, "training": 0, "server": 0}
    for name, count in soak["counts"].items():
        kind = name.partition(":")[0]
        kinds[kind] = kinds.get(kind, 0) + (count if ":" in name else 0)
    counts = soak["counts"]
    outcome = "no violation" if soak["violation"] is None else f"**violation: {soak['violation']}**"
    text.append(
        f"\nThe soak of {soak['date']} ({soak['machine']}): seed {soak['seed']},"
        f" {soak['minutes']:.0f} minutes, {soak['rounds']} rounds, {outcome}."
        f" {counts['evaluations started']} evaluations and {counts['trainings started']} trainings"
        f" were started and disturbed or refused {kinds['evaluation']} and {kinds['training']}"
        f" times, {kinds['server']} requests were answered wrongly or not at all; {counts['rows']}"
        f" rows are each there once ({counts.get('rows with an error', 0)} with the server's error"
        f" and no reward), {counts['tokens trained']} tokens were trained as they were sampled.\n"
    )
    return "".join(text)


def with_section(page: str, record: dict[str, Any]) -> str:
    """The page with its recorded part replaced."""
    head, _, after_begin = page.partition(BEGIN)
    return f"{head}{BEGIN}{section(record)}{END}{after_begin.partition(END)[2]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests, or write the page; exit code 1 when a promise is not proved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--fast", action="store_true", help="leave out slow tests")
    choice.add_argument("--slow", action="store_true", help="slow tests alone")
    parser.add_argument(
        "--faults", metavar="N,N", help="the tests of these rows of the table alone"
    )
    parser.add_argument(
        "--page",
        type=Path,
        nargs="+",
        metavar="CERTIFICATE",
        help="write the page from these files",
    )
    parser.add_argument(
        "--soak", type=Path, metavar="REPORT", help="write the page from this report of a soak"
    )
    options, further = parser.parse_known_args(arguments)
    if options.page or options.soak:
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        if options.page:
            record["certificate"] = merged([json.loads(file.read_text()) for file in options.page])
        record |= {"soak": json.loads(options.soak.read_text())} if options.soak else {}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
        return 0
    os.chdir(ROOT)
    began = time.monotonic()
    selection = "fast" if options.fast else "slow" if options.slow else "all"
    faults = [int(number) for number in options.faults.split(",")] if options.faults else list(ROWS)
    outcomes = run_tests(further, selection, faults)
    made = certificate(
        outcomes, "some" if options.faults else selection, time.monotonic() - began, further
    )
    WRITTEN.parent.mkdir(exist_ok=True)
    WRITTEN.write_text(json.dumps(made, indent=1) + "\n")
    print("\n".join(lines_of(made)))
    print(f"written to {WRITTEN.relative_to(ROOT)}")
    return 0 if holds(made) else 1


if __name__ == "__main__":
    raise SystemExit(main())
