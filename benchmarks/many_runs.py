"""Very many run folders: the first page of ``vf-view``, its whole list of runs, and a page that is
left open.

    python benchmarks/many_runs.py [--runs 10000] [--folder DIR] [--keep] [--quick] [--store]

The runs are copies of a few that the library saved (evaluations of several environments and models,
trainings), each with its own id, settings, numbers and time; some are running: their writer is this
process. Each start is a process of its own:

* first page: from the request of ``/`` until its files and the first reply of the list are there;
* whole list: until the last reply of the list, which the page asks for while it shows the first
  runs;
* idle page: CPU time per second of a page that looks whether a run changed.

"first start" is the first process that reads the folders, "second start" a later one; the operating
system has all files in memory both times. The floor is listing every folder once. Disk: about 20 KB
per run.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _measure import Report, Stopwatch, options, parse, print_table

VIEW = "from verifiers.cli.view import main; main()"
PAGE_TARGET_S = 0.3
ENVIRONMENTS = ("sums", "words", "code-golf", "long-answers")
MODELS = ("small-1b", "medium-8b", "large-70b")
TRAINING_SHARE, RUNNING_SHARE = 0.05, 0.002
NO_PID = 2**22 + 1
"""The id of no process: above the largest that Linux gives."""
DAY_S = 86_400.0
IDLE_S = 8.0


def make_runs(folder: Path, num_runs: int) -> None:
    """Write ``num_runs`` run folders, the newest last: evaluations below ``evals``, trainings
    beside it."""
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as temporary:
        originals = [saved_run(Path(temporary) / name, name) for name in ENVIRONMENTS]
    now = time.time()
    for number in range(num_runs):
        changed = now - DAY_S - 60.0 * (num_runs - number)
        if chance.random() < TRAINING_SHARE:
            path = folder / f"training-{number:05}"
            make_training(path, changed, chance)
        else:
            original, model = chance.choice(originals), chance.choice(MODELS)
            env_id = original["metadata.json"]["env_id"]
            path = folder / "evals" / f"{env_id}--{model}" / f"{number:08x}"
            is_running = chance.random() < RUNNING_SHARE or number == num_runs - 1
            make_evaluation(path, original, model, is_running, changed, chance)
        for entry in (*path.iterdir(), path):
            os.utime(entry, (changed, changed))


def saved_run(path: Path, env_id: str) -> dict[str, Any]:
    """The files of a small evaluation that the library itself saved: name -> content, objects for
    JSON."""
    import verifiers as vf
    from verifiers.testing import ScriptedClient

    env = vf.SingleTurnEnv(
        dataset=[{"question": f"{n} + {n}", "answer": str(2 * n)} for n in range(4)], env_id=env_id
    )
    env.evaluate_sync(
        ScriptedClient("4"), model="m", rollouts_per_example=2, results_path=path, save_results=True
    )
    files = {entry.name: entry.read_text() for entry in path.iterdir() if entry.is_file()}
    return {
        name: json.loads(text) if name.endswith(".json") else text for name, text in files.items()
    }


def make_evaluation(
    path: Path,
    original: dict[str, Any],
    model: str,
    is_running: bool,
    changed: float,
    chance: random.Random,
) -> None:
    """A copy of an evaluation with its own settings and numbers; a running one is locked by this
    process."""
    path.mkdir(parents=True)
    temperature, reward = chance.choice((0.0, 0.7, 1.0)), chance.random()
    for name, content in original.items():
        if name == "metadata.json":
            date = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(changed))
            changes = {
                "model": model,
                "avg_reward": reward,
                "date": date,
                "sampling_args": {"temperature": temperature},
            }
            content = content | changes | ({"status": "running"} if is_running else {})
        elif name == "config.json":
            config = content["config"] | {
                "model": model,
                "sampling_args": {"temperature": temperature},
            }
            content = content | {"config": config}
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    holder = {"pid": os.getpid() if is_running else NO_PID, "host": socket.gethostname()}
    (path / "run.lock").write_text(json.dumps(holder))


def make_training(path: Path, changed: float, chance: random.Random) -> None:
    """The files of a short training, by the trainer's formats."""
    (path / "completions").mkdir(parents=True)
    lines = [
        {
            "step": step,
            "policy_version": step,
            "time": changed - 20 + step,
            "reward/mean": chance.random(),
            "loss": 0.1,
        }
        for step in range(1, 21)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "summary.json").write_text(
        json.dumps({"environment": "sums", "model": "tiny", "steps": 20})
    )
    for step in (10, 20):
        row = {"example_id": 0, "prompt": "1 + 1", "completion": "2", "reward": 1.0, "metrics": {}}
        (path / "completions" / f"step-{step}.jsonl").write_text(json.dumps(row) + "\n")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a page took: wall seconds, and CPU seconds of the server."""

    wall_s: float
    cpu_s: float

    def cells(self) -> list[str]:
        return [f"{self.wall_s:.2f}", f"{self.cpu_s:.2f}"]


class Page:
    """A server over the runs in a process of its own, and the requests of its page."""

    def __init__(self, url: str, pid: int):
        self.url, self._pid = url, pid

    def first(self) -> Seen:
        """The start page with its files, and the first reply of the list."""
        return self._timed(self._first)

    def rest(self) -> Seen:
        """The other replies of the list."""
        return self._timed(self._rest)

    def idle(self, seconds: float) -> float:
        """CPU seconds of the server per second of a page that is left open."""
        before, started = self._cpu_s(), time.monotonic()
        while (waited := time.monotonic() - started) < seconds:
            self._ask("version")
            time.sleep(min(1.0, seconds))
        return (self._cpu_s() - before) / waited

    def _first(self) -> None:
        index = self._get("").decode()
        pending, assets = re.findall(r'(?:src|href)="/static/([a-z_]+\.[a-z]+)"', index), set()
        while pending:
            if (name := pending.pop()) not in assets:
                assets.add(name)
                pending += re.findall(
                    r'from "\./([a-z_]+\.js)"', self._get(f"static/{name}").decode()
                )
        self._answer = self._ask("runs")
        self.num_first = len(self._answer["runs"])
        self.ids = {run["id"] for run in self._answer["runs"]}

    def _rest(self) -> None:
        while self._answer["next"] is not None:
            self._answer = self._ask("runs", first=self._answer["next"])
            self.ids |= {run["id"] for run in self._answer["runs"]}

    def _timed(self, action: Any) -> Seen:
        before, started = self._cpu_s(), time.monotonic()
        action()
        return Seen(time.monotonic() - started, self._cpu_s() - before)

    def _cpu_s(self) -> float:
        if not sys.platform.startswith("linux"):
            return float("nan")
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _ask(self, question: str, **query: Any) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(
            self._get(f"api/{question}?{urllib.parse.urlencode(query)}")
        )
        return answer

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path) as response:
            content: bytes = response.read()
        return content


@contextmanager
def viewing(folder: Path) -> Iterator[Page]:
    """``vf-view`` over a folder; yields as soon as it says its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", VIEW, str(folder), "--no-browser", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield Page(json.loads(process.stdout.readline())["url"], process.pid)
    finally:
        process.terminate()
        process.wait()


def list_folders(folder: str) -> int:
    """The number of files below a folder: the floor."""
    count = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            count += list_folders(entry.path) if entry.is_dir(follow_symlinks=False) else 1
    return count


def measure(folder: Path, num_runs: int, num_pairs: int, idle_s: float, report: Report) -> None:
    """Measure each start on the runs below ``folder``."""
    rows: list[list[str]] = []
    firsts: dict[str, list[Seen]] = {"first start": [], "second start": []}
    floors, idles, wholes = [], [], []
    for _ in range(num_pairs):
        with Stopwatch() as watch:
            list_folders(str(folder))
        floors.append(watch.cost.cpu_s)
        for name, seen in firsts.items():
            with viewing(folder) as page:
                seen.append(page.first())
                other_runs = page.rest()
                assert len(page.ids) == num_runs, f"{len(page.ids)} of {num_runs} runs are listed"
                rows.append([f"{name}: first page, {page.num_first} runs", *seen[-1].cells()])
                rows.append([f"{name}: the other runs", *other_runs.cells()])
                wholes.append(seen[-1].cpu_s + other_runs.cpu_s)
                idles.append(page.idle(idle_s))
                again = page.first()
                rows.append([f"{name}: first page again", *again.cells()])
    print_table(f"{num_runs:,} runs", ["", "wall s", "CPU s of the server"], rows)
    runs = f"{num_runs:,} runs"
    for name, seen in firsts.items():
        wall_s = statistics.median(each.wall_s for each in seen)
        report.figure(f"{runs}: first page, {name}", wall_s, " s", to_reach=PAGE_TARGET_S)
        report.figure(
            f"{runs}: first page, {name}, CPU", statistics.median(each.cpu_s for each in seen), " s"
        )
    report.figure(f"{runs}: whole list, CPU", statistics.median(wholes), " s")
    report.figure(
        f"{runs}: whole list, CPU over listing every folder",
        statistics.median(wholes) / statistics.median(floors),
    )
    report.figure(f"{runs}: page left open, CPU per second", statistics.median(idles), " s")


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=None, help="number of run folders [10,000]")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        help="where to write the runs, which are removed again",
    )
    args = parse(parser)
    num_runs = args.runs or (150 if args.quick else 10_000)
    report = Report("many_runs", args)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix=".benchmark-") as temporary:
        folder = Path(temporary).resolve() / "outputs"
        make_runs(folder, num_runs)
        measure(folder, num_runs, args.pairs, 0.1 if args.quick else IDLE_S, report)
    report.close()


if __name__ == "__main__":
    main()
