"""What each test costs in CPU seconds: its own, and those of processes that it starts.

    .venv/bin/python tests/profile_suite.py FOLDER [PYTEST WORDS...]     run, with records in FOLDER
    .venv/bin/python tests/profile_suite.py --report FOLDER              what they say, by cause

CPU and not wall time, so that a busy machine measures the same. With ``-n`` a record is of a worker,
so that tests may run side by side. On Linux what a process that tests share (a fork server, a real
server) has used counts in the test it was used in, elsewhere where it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "VF_SUITE_PROFILE"
HEAVY = ("torch", "transformers", "datasets", "pandas", "openai", "pyarrow", "verifiers")
_started: list[str] = []
AT_EXIT = """
import os
if os.environ.get("{folder}"):
    import atexit, json, resource, sys
    def _vf_profile(pid=os.getpid()):
        used = resource.getrusage(resource.RUSAGE_SELF)
        heavy = [name for name in {heavy!r} if name in sys.modules]
        line = json.dumps(dict(
            test=os.environ.get("PYTEST_CURRENT_TEST", ""), words=sys.orig_argv[:8],
            own_s=used.ru_utime + used.ru_stime, heavy=heavy, forked=os.getpid() != pid,
        ))
        try:
            with open(os.environ["{folder}"] + "/processes.jsonl", "a") as file:
                file.write(line + chr(10))
        except OSError:
            pass
    atexit.register(_vf_profile)
"""


def _cpu(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def _children(pid: int | str) -> list[str]:
    """The processes that one started and has not waited for; none where there is no /proc."""
    children: list[str] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            children += listed.read_text().split()
    return children


def _descendants_cpu(pid: int | str = "self") -> float:
    """Of the processes below one that still run, with those that each of them has waited for."""
    total_s = 0.0
    for child in _children(pid):
        with contextlib.suppress(OSError):  # ended in between
            # the name in parentheses may hold anything; user, system, and of children both
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total_s += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            total_s += _descendants_cpu(child)
    return total_s


def _times() -> tuple[float, float, float]:
    children_s = _cpu(resource.RUSAGE_CHILDREN) + _descendants_cpu()
    return time.monotonic(), _cpu(resource.RUSAGE_SELF), children_s


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen":
        _started.append(" ".join(map(str, arguments[1]))[:160])  # type: ignore[call-overload]
    elif event in ("os.fork", "os.posix_spawn"):
        _started.append(event)


def pytest_configure() -> None:
    """Count the processes started from here on."""
    sys.addaudithook(_note)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record a test with its fixtures."""
    _started.clear()
    before = _times()
    try:
        return (yield)
    finally:
        after = _times()
        wall_s, own_s, children_s = (round(b - a, 4) for a, b in zip(before, after, strict=True))
        line = {
            "test": item.nodeid,
            "wall_s": wall_s,
            "own_s": own_s,
            "children_s": children_s,
            "started": list(_started),
        }
        with open(f"{os.environ[FOLDER]}/tests.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


def report(folder: Path) -> None:
    """Print the sums, dearest first."""
    tests = [json.loads(line) for line in (folder / "tests.jsonl").read_text().splitlines()]
    own, children, wall = (
        sum(test[name] for test in tests) for name in ("own_s", "children_s", "wall_s")
    )
    print(f"{len(tests)} tests: {own:.0f} s own, {children:.0f} s of processes, {wall:.0f} s wall")
    by_file: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for test in tests:
        of_file = by_file[test["test"].partition("::")[0]]
        of_file.update({name: test[name] for name in ("own_s", "children_s", "wall_s")})
        of_file.update(tests=1, started=len(test["started"]))
    print(f"\n{'own':>7} {'procs':>7} {'wall':>7} {'tests':>6} {'started':>7}  file")
    order = sorted(by_file.items(), key=lambda pair: -pair[1]["own_s"] - pair[1]["children_s"])
    for file, of_file in order[:60]:
        seconds = " ".join(f"{of_file[name]:7.1f}" for name in ("own_s", "children_s", "wall_s"))
        print(f"{seconds} {of_file['tests']:6} {of_file['started']:7}  {file}")
    print("\nwaits: wall time without CPU")
    for test in sorted(tests, key=lambda t: -t["wall_s"] + t["own_s"] + t["children_s"])[:30]:
        waited = test["wall_s"] - test["own_s"] - test["children_s"]
        print(f"{waited:7.1f}  {test['test']}")
    print("\nown time above a second")
    for test in sorted(tests, key=lambda t: -t["own_s"])[:40]:
        print(f"{test['own_s']:7.1f}  {test['test']}")
    path = folder / "processes.jsonl"
    by_imports: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for line in path.read_text().splitlines() if path.exists() else ():
        process = json.loads(line)
        by_imports[" ".join(process["heavy"]) or "none"].update(n=1, own_s=process["own_s"])
    print("\nprocesses by what they had imported")
    for heavy, sums in sorted(by_imports.items(), key=lambda pair: -pair[1]["own_s"]):
        print(f"{sums['own_s']:7.1f} s in {sums['n']:5}: {heavy}")


def main() -> int:
    """Run pytest with this plugin, or report."""
    first, *words = sys.argv[1:] or sys.exit(__doc__)
    if first == "--report":
        report(Path(words[0]))
        return 0
    folder = Path(first).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    hook = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages")
    hook /= "vf_suite_profile.pth"
    code = AT_EXIT.format(folder=FOLDER, heavy=HEAVY)
    hook.write_text(f"import os; exec({code!r}, {{}})\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "profile_suite", *words]
    try:
        return subprocess.call(command, cwd=ROOT, env={**os.environ, FOLDER: str(folder)})
    finally:
        hook.unlink()


if __name__ == "__main__":
    raise SystemExit(main())
