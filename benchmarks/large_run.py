"""One run folder with very many rollouts: generating, resuming, viewing, loading and exporting it.

    python benchmarks/large_run.py [--rows 100000] [--fill] [--folder DIR] [--quick] [--store]

``vf-eval`` generates the rollouts (four of each example) against a model server on loopback that
answers at once; with ``--fill`` it is interrupted once some are saved, and the journal's own writer
appends the others: copies with their own example, key and reward, some 50 us per rollout. Then each
step is a process of its own; CPU time and peak memory are those of that process:

* resume: ``vf-eval --resume FOLDER`` on the finished folder, and on the folder without its last 64
  rollouts;
* view: ``vf-view`` on the folder; the time of the requests that the page makes for its list and its
  first rollouts;
* load: ``vf.load_results(folder)`` and its rewards, and one text column;
* export: ``vf.load_results(folder).save("results.parquet")``.

The floor of a step that reads the file is decoding each of its lines with msgspec. Disk: about 2 KB
per rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from _measure import Report, options, parse, print_table, versions
from _server import BareServer

SIBLINGS = 4
NUM_LOST = 64
INTERRUPTED = 130
ENVIRONMENTS = Path(__file__).parent / "_environments"
EVALUATE = "from verifiers.cli.evaluate.command import main; main()"
VIEW = "from verifiers.cli.view import main; main()"
FLOOR = """
import msgspec, sys
decode = msgspec.json.Decoder().decode
for line in open(sys.argv[1] + "/results.jsonl", "rb"):
    decode(line)
"""
LOAD = "import sys, verifiers as vf; results = vf.load_results(sys.argv[1])\n"
REWARDS = LOAD + "assert len(results.reward) == int(sys.argv[2])"
COMPLETIONS = LOAD + "assert len(results['completions']) == int(sys.argv[2])"
EXPORT = LOAD + "results.save(sys.argv[1] + '/results.parquet')"
RESUME_TARGET_S, PAGE_TARGET_S, EXPORT_TARGET_MB = 10.0, 1.0, 1000.0


@dataclass(frozen=True, slots=True)
class Step:
    """What one process took."""

    wall_s: float
    cpu_s: float
    peak_mb: float

    def cells(self) -> list[str]:
        return [f"{self.wall_s:.2f}", f"{self.cpu_s:.2f}", f"{self.peak_mb:.0f}"]


def step(code: str, *words: str) -> Step:
    """Run Python code with these arguments in a process of its own. *Raises* SystemExit when it
    fails."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            stderr.seek(0)
            raise SystemExit(f"{code} {' '.join(words)} failed:\n{stderr.read().decode()}")
    return Step(time.monotonic() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000)


def environment() -> dict[str, str]:
    """The variables of a child: the environment's module can be imported, and nothing else is set
    for Python."""
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "OPENAI", "COV"))
    }
    return plain | {"PYTHONPATH": str(ENVIRONMENTS)}


def evaluate(url: str, num_rows: int, *where: str) -> Step:
    """``vf-eval`` of all rollouts; ``where`` is further arguments: which folder, new or to be
    resumed."""
    return step(EVALUATE, *arguments(url, num_rows), *where)


def arguments(url: str, num_rows: int) -> list[str]:
    """The arguments of ``vf-eval`` for all rollouts."""
    words = f"large_data -n -1 -r {SIBLINGS} -c 64 -m m -b {url} --progress none".split()
    return [*words, "-a", json.dumps({"num_examples": num_rows // SIBLINGS})]


def generate_some(url: str, num_rows: int, folder: Path) -> None:
    """``vf-eval`` of all rollouts, interrupted once some are saved."""
    process = subprocess.Popen(
        [sys.executable, "-c", EVALUATE, *arguments(url, num_rows), "--output-dir", str(folder)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not any(
        file.stat().st_size for file in folder.rglob("results.jsonl")
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    if process.wait() not in (0, INTERRUPTED):  # a small run may end before it is interrupted
        raise SystemExit(f"vf-eval ended with {process.returncode} and not with {INTERRUPTED}")


async def fill(file: Path, num_rows: int) -> None:
    """Append every rollout of the plan that the file lacks, as copies of one that it has."""
    import verifiers as vf
    from verifiers.data.messages import message_text
    from verifiers.storage.configurations import rollout_key
    from verifiers.storage.journal import Journal, read_journal

    sys.path.insert(0, str(ENVIRONMENTS))
    from large_data import share_of_digits

    examples = vf.load_environment("large_data", num_examples=num_rows // SIBLINGS).eval_table.take(
        -1
    )
    rows = list(read_journal(file))
    done, copied = {row["rollout_key"] for row in rows}, rows[0]
    text = message_text(copied["completion"][-1])
    completion = [vf.AssistantMessage(text)]
    with Journal.open(file) as journal:
        for start in range(0, len(examples), 500):
            appended = []
            for example in examples[start : start + 500]:
                reward = share_of_digits(completion, example.row["answer"])
                columns = {
                    "prompt": example.row["prompt"],
                    "answer": example.row["answer"],
                    "reward": reward,
                }
                columns |= {
                    "metrics": {"share_of_digits": reward},
                    "example_id": example.example_id,
                }
                for sibling in range(SIBLINGS):
                    key = rollout_key(example.hash, sibling)
                    if key not in done:
                        keys = {
                            "rollout_key": key,
                            "example_hash": example.hash,
                            "sibling": sibling,
                        }
                        appended.append(
                            journal.append(copied | columns | {"share_of_digits": reward} | keys)
                        )
            await asyncio.gather(*appended)


def lose(file: Path, num_lines: int) -> None:
    """Remove the last lines of a file."""
    with open(file, "r+b") as lines:
        end = lines.seek(0, os.SEEK_END)
        tail_bytes = min(end, num_lines * 20_000)
        lines.seek(end - tail_bytes)
        tail = lines.read()
        lines.truncate(end - sum(map(len, tail.splitlines(keepends=True)[-num_lines:])))


@dataclass(frozen=True, slots=True)
class Viewed:
    """What a page took, one part after the other."""

    address_s: float
    """From the start of ``vf-view`` until it prints its address."""
    list_s: float
    rollouts_s: float
    cpu_s: float
    """CPU seconds of the server for list and rollouts."""


def view(folder: Path) -> Viewed:
    """Start ``vf-view``, and request what the page does for its list of runs and its first
    rollouts."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", VIEW, str(folder), "--no-browser", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
        text=True,
    )
    assert process.stdout is not None
    try:
        url = json.loads(process.stdout.readline())["url"]
        opened, cpu_s = time.monotonic(), cpu_of(process.pid)
        get(url)
        (run,) = get_json(f"{url}api/runs")["runs"]
        listed = time.monotonic()
        where = urllib.parse.urlencode({"run": run["id"]})
        get_json(f"{url}api/run?{where}")
        columns = get_json(f"{url}api/columns?{where}")
        rows = ",".join(map(str, range(min(50, columns["total"]))))
        assert get_json(f"{url}api/previews?{where}&rows={rows}")["previews"]
        shown, cpu_s = time.monotonic(), cpu_of(process.pid) - cpu_s
    finally:
        process.terminate()
        process.wait()
    return Viewed(opened - started, listed - opened, shown - listed, cpu_s)


def cpu_of(pid: int) -> float:
    """CPU seconds of a process that runs, where ``/proc`` has them; else NaN."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def get(url: str) -> bytes:
    with urllib.request.urlopen(url) as response:
        content: bytes = response.read()
    return content


def get_json(url: str) -> dict:
    content: dict = json.loads(get(url))
    return content


def make(url: str, num_rows: int, fills: bool, folder: Path) -> Step | None:
    """Make a finished run below ``place``; return what generating took, or None when most rollouts
    were appended."""
    if not fills:
        return evaluate(url, num_rows, "--output-dir", str(folder))
    generate_some(url, num_rows, folder)
    (results,) = folder.rglob("results.jsonl")
    command = [sys.executable, __file__, "--rows", str(num_rows), "--fill-file", str(results)]
    subprocess.run(command, check=True)  # a process of its own, whose memory is in no figure
    return None


def measure(num_rows: int, fills: bool, target: Path, report: Report) -> None:
    """Make ``num_rows`` rollouts below ``place``, measure each step on them, and report the
    figures."""
    steps: dict[str, Step] = {}

    def add(name: str, measured: Step) -> Step:
        steps[name] = measured
        print(
            f"{name}: wall {measured.wall_s:.2f} s, CPU {measured.cpu_s:.2f} s, peak"
            f" {measured.peak_mb:.0f} MB",
            flush=True,
        )
        return measured

    with BareServer() as server:
        generated = make(server.url, num_rows, fills, target)
        if generated is not None:
            add("generate", generated)
        (results,) = target.rglob("results.jsonl")
        assert count_lines(results) == num_rows
        folder = str(results.parent)
        finished = add("resume, finished", evaluate(server.url, num_rows, "--resume", folder))
        lose(results, NUM_LOST)
        unfinished = add(
            f"resume, {NUM_LOST} lost", evaluate(server.url, num_rows, "--resume", folder)
        )
        assert count_lines(results) == num_rows
    floor = add("decode every line", step(FLOOR, folder))
    rewards = add("load, rewards", step(REWARDS, folder, str(num_rows)))
    completions = add("load, completions", step(COMPLETIONS, folder, str(num_rows)))
    exported = add("load, export Parquet", step(EXPORT, folder))
    viewed = view(target)
    size_mb = results.stat().st_size / 1e6
    title = (
        f"{num_rows:,} rollouts, {size_mb:.0f} MB; {versions('verifiers', 'msgspec', 'pyarrow')}"
    )
    print_table(
        title,
        ["", "wall s", "CPU s", "peak MB"],
        [[name, *measured.cells()] for name, measured in steps.items()],
    )
    print(
        f"  vf-view: address {viewed.address_s:.2f} s, then list of runs {viewed.list_s:.2f} s,"
        f" first rollouts {viewed.rollouts_s:.2f} s; CPU of both {viewed.cpu_s:.2f} s"
    )
    size = f"{num_rows:,} rollouts"
    if generated is not None:
        report.figure(f"{size}: peak memory of generating", generated.peak_mb, " MB")
    report.figure(f"{size}: resume, finished", finished.wall_s, " s", to_reach=RESUME_TARGET_S)
    report.figure(
        f"{size}: resume, {NUM_LOST} rollouts lost",
        unfinished.wall_s,
        " s",
        to_reach=RESUME_TARGET_S,
    )
    report.figure(f"{size}: peak memory of resuming", finished.peak_mb, " MB")
    report.figure(
        f"{size}: first page of vf-view",
        viewed.list_s + viewed.rollouts_s,
        " s",
        to_reach=PAGE_TARGET_S,
    )
    report.figure(
        f"{size}: rewards of load_results, CPU over decoding", rewards.cpu_s / floor.cpu_s
    )
    report.figure(f"{size}: rewards of load_results, peak memory", rewards.peak_mb, " MB")
    report.figure(f"{size}: completions of load_results, peak memory", completions.peak_mb, " MB")
    report.figure(
        f"{size}: export to Parquet, peak memory",
        exported.peak_mb,
        " MB",
        to_reach=EXPORT_TARGET_MB,
    )


def count_lines(file: Path) -> int:
    with open(file, "rb") as lines:
        return sum(1 for _ in lines)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--rows", type=int, default=None, help="number of rollouts, a multiple of four [100,000]"
    )
    parser.add_argument(
        "--fill", action="store_true", help="generate a few of the rollouts, and append the others"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="where to write the run, which is removed again"
    )
    parser.add_argument("--fill-file", type=Path, help=argparse.SUPPRESS)
    args = parse(parser)
    if args.fill_file:
        asyncio.run(fill(args.fill_file, args.rows))
        return
    num_rows = args.rows or (400 if args.quick else 100_000)
    if num_rows % SIBLINGS or num_rows <= NUM_LOST:
        parser.error(f"--rows must be a multiple of {SIBLINGS} above {NUM_LOST}")
    report = Report("large_run", args)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix=".benchmark-") as folder:
        measure(num_rows, args.fill, Path(folder).resolve(), report)
    report.close()


if __name__ == "__main__":
    main()
