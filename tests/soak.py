"""A soak: random faults against an evaluation and a training at once, round after round, with every
promise checked.

    python3 run.py soak --minutes 60 --seed 7
    python3 run.py soak --seed 7 --first-round 12 --rounds 1        repeat one round
    python3 run.py soak --rounds 1 --disturbed 1                    a short round, a few minutes

A round is one ``vf-eval`` and one ``vf-train`` (``builtin:tiny``) side by side. Each is disturbed
several times and then repeated undisturbed until it says that it is done: kill -9, SIGTERM, Ctrl-C
once and twice at random times and at failpoints, a full disk, a model server that refuses, stalls,
lies, dies and returns, repeats its key, a stranger's requests, a worker that is stopped, or busy in
a pattern when its run is killed. Between two attempts the
command is repeated with another configuration or edited source, run twice at once, and given a
damaged copy. What may happen is drawn from the seed and the round alone; when it happens depends on
the machine.

One line per round, and one JSON object of counts at the end, on stdout or in ``--report``; a report
that exists is continued at its next round. The first violation ends the soak with exit code 1; it
names the seed and the round, and leaves the folder of the round. ``--sabotage`` breaks an invariant
on purpose, so that the soak is seen to notice (its negative control).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import gzip
import json
import math
import multiprocessing
import multiprocessing.util
import os
import platform
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifiers.errors import JournalError
from verifiers.runtime.bounded import read_file
from verifiers.storage.journal import read_journal
from verifiers.testing import Behaviour, FakeServer

MARK = "VF_SOAK"
"""Environment variable of every process that the soak starts; a process that carries it was left
behind."""
HANG_S = 240.0
"""No command of a round runs for longer. Seconds in which a thread of it waits for a processor are
not counted, here and below: on a loaded machine that is most of the time, and no fault of the
command."""
ENDS_S = 60.0
"""A signalled command has ended by then: a grace of 10 s, and a step of a training."""
LONGEST_S = 1800.0
"""No command runs for longer, whatever it waits for."""
MEMORY_BYTES = 600 * 2**20
"""What the peak of one command may be above that of its undisturbed twin: several replies at their
limit."""
GROWTH_BYTES = 150 * 2**20
"""What the soak's own process may grow by after its first rounds."""
MISMATCH = 1e-4
"""Largest mean |log ratio| between the sampler and the trainer for tokens of one
policy, in nats."""

KEY, GATE = "Zq7-key-of-the-soak-0123", "Zq7-gate-of-the-soak-4567"
"""Secrets of the evaluation, a variable's and a header's: in no file of a round and on no stream."""

EVALUATION = """
import re
import verifiers as vf

def right(completion, answer):
    return float(completion[-1]["content"].endswith(f": {answer}"))

def length(completion):
    re.search("(a|a)*b", "a" * 16)  # nothing else of its interpreter runs meanwhile
    return len(completion[-1]["content"])

def load_environment(num_rows=40, isolated=False):
    rows = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(num_rows)]
    rubric = vf.Rubric(funcs=[right])
    rubric.add_reward_func(length, weight=0.0, isolated=isolated)
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=rubric)
"""
TRAINING = """
import verifiers as vf

def digits(completion):
    text = completion[-1]["content"] or ""
    return sum(character.isdigit() for character in text) / max(1, len(text))

def load_environment():
    rows = [{"question": f"{n:03d}"} for n in range(40)]
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows[:4], rubric=vf.Rubric(funcs=[digits]))
"""
STEPS = 6
SETTINGS = f"""
model = "builtin:tiny"
[env]
id = "soak_training"
[trainer.args]
run_name = "soak"
rollouts_per_example = 4
batch_size = 16
micro_batch_size = 8
max_steps = {STEPS}
max_tokens = 6
max_seq_len = 64
use_lora = false
embedded_threads = 1
deterministic = true
save_strategy = "steps"
save_steps = 2
learning_rate = 1e-3
"""
LAG = "--trainer.args.max_off_policy_steps"
VARIANTS: dict[str, tuple[str, ...]] = {
    "on policy": (LAG, "0"),
    "one step off policy": (LAG, "1"),
    "with evaluations": (
        LAG,
        "0",
        "--trainer.args.eval_strategy",
        "steps",
        "--trainer.args.eval_steps",
        "3",
    ),
}
SAVED = (
    "model.safetensors",
    "optimizer.safetensors",
    "optimizer.json",
    "rng.safetensors",
    "scheduler.json",
)
ROW_ERRORS = (
    "ModelUnavailable",
    "MalformedResponse",
    "RateLimited",
    "RolloutTimeout",
    "ModelError",
)
JOURNAL_POINTS = (
    "journal.before_write",
    "journal.after_write",
    "journal.after_fsync",
    "atomic_write.before_rename",
)
CHECKPOINT_POINTS = ("before_sending", "before_manifest", "before_rename", "after_rename")
SABOTAGES = ("row", "twice", "mixed", "loss", "process", "file")


class Violation(AssertionError):
    """A promise did not hold."""


def require(holds: object, sentence: str) -> None:
    """Raise ``Violation`` with ``sentence`` unless ``holds``."""
    if not holds:
        raise Violation(sentence)


# --- processes ------------------------------------------------------------------------------------


class Commands:
    """Starts ``vf-eval`` and ``vf-train`` as forks of one process that has imported both: seconds
    less for each."""

    def __init__(self, scratch: Path):
        self.scratch = scratch
        """The children's folder for temporary files."""
        # its own folder, before ``scratch`` becomes the place of all others
        multiprocessing.util.get_temp_dir()
        os.environ |= {
            MARK: uuid.uuid4().hex,
            "TMPDIR": str(scratch),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        # torch's own, one for all processes
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch.parent / "torch")
        tempfile.tempdir = None
        for name in [
            name for name in os.environ if name.startswith(("OPENAI_", "VF_")) and name != MARK
        ]:
            del os.environ[name]
        os.environ["OPENAI_API_KEY"] = KEY
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            [
                "verifiers.cli.evaluate.command",
                "verifiers.runs.run",
                "verifiers.clients.http",
                "verifiers_trainer.cli.session",
                "verifiers_trainer.trainer",
                "transformers.models.qwen3.modeling_qwen3",
            ]
        )

    def start(
        self, kind: str, words: Sequence[str], folder: Path, failpoint: str = "", max_bytes: int = 0
    ) -> Command:
        """``vf-<kind> words…`` in ``folder``; ``max_bytes`` is the longest file that it can write,
        0 any."""
        log = folder / f"{kind}-{uuid.uuid4().hex[:8]}.log"
        process = self.context.Process(
            target=_run, args=(kind, list(words), str(folder), str(log), failpoint, max_bytes)
        )
        process.start()
        return Command(process, log)

    def left_behind(self) -> list[str]:
        """The command lines of marked processes, without the two that ``multiprocessing`` keeps."""
        mark, processes = f"{MARK}={os.environ[MARK]}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                kept = (
                    "multiprocessing.forkserver" in line
                    or "multiprocessing.resource_tracker" in line
                )
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if mark in (entry / "environ").read_bytes() and not (
                    kept and parent == os.getpid()
                ):
                    processes.append(f"{entry.name}: {line[:120]}")
        return processes


def _run(
    kind: str, words: list[str], folder: str, log: str, failpoint: str, max_bytes: int
) -> None:
    """The child: the command itself, with its streams in a file."""
    import importlib

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
    faulthandler.register(signal.SIGUSR1, sys.stderr)
    # a soak in the background of a script ignores Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = [f"vf-{kind}", *words]
    if failpoint:
        os.environ["VF_FAILPOINT"] = failpoint
        importlib.reload(importlib.import_module("verifiers.runtime.failpoints"))
    if max_bytes:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    if kind == "eval":
        importlib.import_module("verifiers.cli.evaluate.command").main()
    else:
        importlib.import_module("torch").set_num_threads(1)
        importlib.import_module("verifiers_trainer.cli.train").main()


class Command:
    """One started command; its output is in ``log``."""

    def __init__(self, process: Any, log: Path):
        self.process, self.log = process, log
        self.peak_bytes = 0
        self._delays_ns: dict[str, int] = {}

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait(self, until: Callable[[], bool] = bool, timeout_s: float = HANG_S) -> bool:
        """Wait until it ends or ``until()`` holds; True when it has ended. Raises ``Violation``
        when neither comes."""
        began = before = time.monotonic()
        counted_s = 0.0
        self._starved_s()
        while True:
            ended = not self.process.is_alive()
            self._measure()
            if ended or until():
                return ended
            now = time.monotonic()
            if now - before > 1.0:
                counted_s += max(0.0, now - before - self._starved_s())
                before = now
            if counted_s > timeout_s or now - began > LONGEST_S:
                waited = f"{counted_s:.0f} s of its own, {now - began:.0f} s in all"
                raise Violation(
                    f"a command did not end within {timeout_s:g} s ({waited}):"
                    f" {self._end_with_stacks()}"
                )
            time.sleep(0.05)

    def _starved_s(self) -> float:
        """The longest time that a thread of the command or of its children has waited for a
        processor since last."""
        longest_ns = 0
        for pid in (self.process.pid, *_descendants(self.process.pid)):
            for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):
                    waited_ns = int(file.read_text().split()[1])
                    longest_ns = max(longest_ns, waited_ns - self._delays_ns.get(str(file), 0))
                    self._delays_ns[str(file)] = waited_ns
        return longest_ns / 1e9

    def _end_with_stacks(self) -> str:
        """Kill it; the end of what it printed, with the stacks of its threads."""
        self.send(signal.SIGUSR1)  # to the handler of ``_run``
        self.process.join(5.0)
        self.process.kill()
        self.process.join()
        return self.text[-6000:]

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def is_stopped(self) -> bool:
        """Whether SIGSTOP has reached it, before it came to its end."""
        deadline = time.monotonic() + 5
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                state = (
                    Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
                )
                if state in "TtZX":
                    return state in "Tt"
                time.sleep(0.01)
        return False

    def end(self, timeout_s: float = HANG_S) -> int:
        """Wait for its end; the exit code, negative for a signal."""
        self.wait(timeout_s=timeout_s)
        self.process.join()
        code = self.process.exitcode
        self.process.close()
        assert code is not None
        return int(code)

    def _measure(self) -> None:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            peak = next(line for line in lines if line.startswith("VmHWM:"))
            self.peak_bytes = max(self.peak_bytes, int(peak.split()[1]) * 1024)


def _descendants(pid: int) -> list[int]:
    """The children of a process, their children, and so on."""
    children = collections.defaultdict(list)
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children[int(file.read_text().rpartition(")")[2].split()[1])].append(
                int(file.parent.name)
            )
    descendants, pending = [], [pid]
    while pending:
        below = children[pending.pop()]
        descendants += below
        pending += below
    return descendants


def _workers(pid: int) -> list[int]:
    """The children of a command that are its workers."""
    workers = []
    for child in _descendants(pid):
        with contextlib.suppress(OSError):
            if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes():
                workers.append(child)
    return workers


# --- disturbances ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What happens to one attempt."""

    name: str
    codes: tuple[int, ...]
    """Exit codes that are right; 0 is always, when the command was faster."""
    signals: tuple[int, ...] = ()
    failpoint: str = ""
    is_full_disk: bool = False
    is_hostile: bool = False
    """Requests of a stranger to its endpoint, or to the model server of a command without one."""
    stops_child: bool = False
    """A worker is stopped, if there are any."""


SIGNALS = (
    Disturbance("kill -9", (-9,), (signal.SIGKILL,)),
    Disturbance("SIGTERM", (143, -15), (signal.SIGTERM,)),  # the second before its handlers stand
    Disturbance("Ctrl-C", (130, 1, -2), (signal.SIGINT,)),
    Disturbance("Ctrl-C twice", (130, 1, -2), (signal.SIGINT, signal.SIGINT)),
)
FULL_DISK = Disturbance("full disk", (3,), is_full_disk=True)
HOSTILE = Disturbance("hostile requests", (), is_hostile=True)
STOPPED_WORKER = Disturbance("worker stopped", (), stops_child=True)
NOTHING = Disturbance("nothing", ())


def draw(rng: random.Random, points: Sequence[str], has_workers: bool = False) -> Disturbance:
    """One disturbance; half of them are kill -9."""
    kinds = {
        "kill": 8,
        "signal": 6,
        "failpoint": 6,
        "error": 2,
        "disk": 2,
        "hostile": 2,
        "stop": 2 * has_workers,
    }
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    if kind in ("kill", "signal"):
        return SIGNALS[0] if kind == "kill" else rng.choice(SIGNALS[1:])
    if kind in ("disk", "hostile", "stop"):
        return {"disk": FULL_DISK, "hostile": HOSTILE, "stop": STOPPED_WORKER}[kind]
    point, number = rng.choice(points), rng.randint(1, 5 if points[0].startswith("journal") else 3)
    if kind == "failpoint":
        return Disturbance(f"kill -9 at {point}", (-9,), failpoint=f"{point}:{number}")
    code = rng.choice(("ENOSPC", "EIO"))
    return Disturbance(f"{code} at {point}", (2, 3), failpoint=f"{point}:{number}:{code}")


def disturb(
    command: Command,
    what: Disturbance,
    rng: random.Random,
    progress: Callable[[], int],
    goal: int,
    is_server_away: bool = False,
) -> int:
    """Let ``what`` happen once ``progress()`` has reached a drawn part of ``goal``;
    the exit code."""
    reached, pause_s = rng.randint(0, goal), rng.choice((0.0, rng.uniform(0.0, 2.0)))
    # the process that forks ignores Ctrl-C; its child does not any more once it has opened its log
    is_active = what.signals or what.is_hostile or what.stops_child
    if is_active and not command.wait(lambda: command.log.exists() and progress() >= reached):
        time.sleep(pause_s)
        if what.is_hostile:
            for port in listening_ports(command.process.pid) or listening_ports(os.getpid()):
                pester(port)
        if what.stops_child and (workers := _workers(command.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(workers), signal.SIGSTOP)
        for number in what.signals:
            command.send(number)
            time.sleep(rng.uniform(0.0, 0.2))
        code = command.end(ENDS_S if what.signals else HANG_S)
    else:
        code = command.end()
    # the listing of models before a run is asked for once: a server away then ends the command
    is_refused = is_server_away and "start the server or correct the base URL" in command.text
    require(
        code in (0, *what.codes) or (code == 2 and is_refused),
        f"{what.name}: exit code {code}, not one of {(0, *what.codes)}: {command.text}",
    )
    return code


def listening_ports(pid: int) -> list[int]:
    """The TCP ports at which a process listens."""
    inodes, ports = set(), []
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                ports.append(int(words[1].rpartition(":")[2], 16))
    return ports


def pester(port: int) -> None:
    """Idle connections, half requests, what is no HTTP, another site's page, a body that is not what
    its encoding says, and one of very many objects: each is closed or refused."""
    body = b'{"messages": [' + b"{}," * 2_000_000 + b"{}]}"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    refused = {
        b"GET / HTTP/1.1\r\nno header\r\n\r\n": (400,),
        head + b"Origin: http://evil.example\r\nContent-Length: 2\r\n\r\n{}": (403,),
        head + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx": (400, 401),
        head + b"Content-Encoding: br\r\nContent-Length: 2\r\n\r\nxx": (400, 401),
        head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body): (400, 401),
    }
    with contextlib.ExitStack() as stack, contextlib.suppress(ConnectionError):
        for sent in [b""] * 50 + [b"GET / HTTP/1.1\r\nHost: loc"] * 50:
            opened = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            opened.sendall(sent)
        for request, statuses in refused.items():
            with socket.create_connection(("127.0.0.1", port), 30) as opened:
                with contextlib.suppress(ConnectionError):  # refused before all of it was read
                    opened.sendall(request)
                answer = opened.recv(65536)
            require(
                int(answer.split()[1]) in statuses,
                f"{request[:80]!r} was answered with {answer[:80]!r}, not with {statuses}",
            )


# --- the evaluation -------------------------------------------------------------------------------

NUM_ROWS, SIBLINGS = 40, 2
ZIPPED = {"Content-Encoding": "gzip"}
OBJECTS = gzip.compress(b'{"choices": [' + b"{}," * 8_000_000 + b"{}]}", 1)
BOMB, LONG_BOMB = (gzip.compress(bytes(size * 2**20), 9) for size in (4, 70))
NO_CLOCK = "Mon, 01 Jan 2020 00:00:00 +99999999999999"
WORST_TEXTS = [part * (200_000 // len(part)) for part in ("a.", "eyJ-", "://", "authorization ")]
"""Texts for which a pattern once took the square of their length."""
BEHAVIOURS: dict[str, Callable[[random.Random], Any]] = {
    "500": lambda _: 500,
    "502": lambda _: 502,
    "503": lambda _: 503,
    "429": lambda _: 429,
    "429 with Retry-After": lambda _: Behaviour(429, {"Retry-After": "1"}),
    "429 with a pause of no clock": lambda _: Behaviour(429, {"Retry-After": NO_CLOCK}),
    "500 that repeats the key": lambda _: Behaviour(
        500, body=json.dumps({"error": {"message": f"{KEY} beside {GATE}: overloaded"}})
    ),
    "500 with a long text": lambda rng: Behaviour(500, body=rng.choice(WORST_TEXTS)),
    "reset": lambda _: Behaviour(reset=True),
    "garbage": lambda rng: Behaviour(garbage=rng.randbytes(200)),
    "cut": lambda rng: Behaviour(cut_bytes=rng.randint(0, 60)),
    "slow": lambda rng: Behaviour(delay_s=rng.uniform(0.1, 1.0)),
    "drip": lambda _: Behaviour(drip_s=0.001),
    "silence": lambda _: Behaviour(never=True),
    "silence inside the body": lambda _: Behaviour(cut_bytes=20, never=True),
    "HTML": lambda _: Behaviour(body="<html>maintenance</html>"),
    "no choices": lambda _: Behaviour(body='{"choices": null}'),
    "cut JSON": lambda _: Behaviour(body='{"choices": [{"mess'),
    "bomb": lambda _: Behaviour(headers=ZIPPED, body=BOMB),
    "bomb above the limit": lambda _: Behaviour(headers=ZIPPED, body=LONG_BOMB),
    "bomb of objects": lambda _: Behaviour(headers=ZIPPED, body=OBJECTS),
}
RARE = ("silence", "silence inside the body", "bomb above the limit", "bomb of objects")
"""A silent request costs its rollout the whole time limit; a long bomb costs a second of this
machine."""


def solve(request: Any) -> str:
    """The one right answer; it names the model, so that a row of another run would show."""
    return f"{request.model}: {int(request.prompt[-1]['content'].split()[0]) + 1}"


class Server:
    """The model server of a round: misbehaves at a rate, and can be away."""

    def __init__(self, rng: random.Random, counts: collections.Counter[str]):
        self.rate, self._rng, self._counts, self._lock = 0.0, rng, counts, threading.Lock()
        self._server = FakeServer(
            solve, script=self._script, delay_s=0.01, models=["soak"], record=False
        )
        self._num_before = 0

    def __enter__(self) -> Server:
        self._server.start()
        self.url = self._server.url
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    @property
    def count(self) -> int:
        """Completion requests of the whole round."""
        return self._num_before + self._server.count

    def away(self, seconds: float) -> None:
        """Die, and come back at the same address."""
        self._server.stop()
        self._num_before += self._server.count
        time.sleep(seconds)
        port = int(self.url.removesuffix("/v1").rpartition(":")[2])
        self._server = FakeServer(
            solve, script=self._script, delay_s=0.01, models=["soak"], record=False, port=port
        )
        self._server.start()
        self._counts["server: away"] += 1

    def _script(self, _: object) -> Any:
        with self._lock:
            if self._rng.random() >= self.rate:
                return None
            weights = [0.05 if name in RARE else 1.0 for name in BEHAVIOURS]
            name = self._rng.choices(list(BEHAVIOURS), weights)[0]
            self._counts[f"server: {name}"] += 1
            return BEHAVIOURS[name](self._rng)


def rows_in(file: Path) -> list[dict[str, Any]]:
    """The rows of a journal that nobody has open."""
    return list(read_journal(file)) if file.exists() else []


def check_rows(
    rows: Sequence[Mapping[str, Any]], acknowledged: set[str], model: str, is_done: bool
) -> None:
    """No acknowledged row lost, none twice, none of another configuration; all of them when
    ``is_done``."""
    keys = [row["rollout_key"] for row in rows]
    require(len(set(keys)) == len(keys), f"{len(keys) - len(set(keys))} rows are there twice")
    require(
        acknowledged <= set(keys), f"{len(acknowledged - set(keys))} acknowledged rows are lost"
    )
    per_example = collections.Counter(row["example_id"] for row in rows)
    require(
        all(count <= SIBLINGS for count in per_example.values()),
        f"more rows than planned: {per_example}",
    )
    if is_done:
        require(
            len(keys) == NUM_ROWS * SIBLINGS,
            f"{len(keys)} rows of {NUM_ROWS * SIBLINGS} in a finished run",
        )
    for row in rows:
        if row["error"]:
            require(
                row["error"]["error"] in ROW_ERRORS,
                f"a row failed for no fault of the server: {row['error']}",
            )
            require(
                row["reward"] is None,
                f"a failed rollout has the reward {row['reward']}, which is unknown",
            )
            continue
        wanted = f"{model}: {int(row['prompt'][-1]['content'].split()[0]) + 1}"
        said = row["completion"][-1]["content"]
        require(said == wanted, f"a row of another run or question: {said!r}, not {wanted!r}")
        require(row["reward"] == 1.0, f"the reward of a right answer is {row['reward']}")


@dataclass
class EvaluationRun:
    """One ``vf-eval`` of a round, through all its attempts."""

    commands: Commands
    folder: Path
    rng: random.Random
    counts: collections.Counter[str]
    limit_bytes: float = math.inf
    """The most memory that an attempt may have taken."""
    sabotage: str = ""
    model: str = ""
    acknowledged: set[str] = field(default_factory=set)
    peak_bytes: int = 0
    words: list[str] = field(default_factory=list)

    @property
    def file(self) -> Path:
        """The run's journal, which need not be there yet."""
        return next(iter(self.folder.glob("runs/evals/*/*/results.jsonl")), self.folder / "none")

    def run(self, num_disturbed: int = 3) -> None:
        """Disturb, repeat, finish, check."""
        self.folder.mkdir()
        (self.folder / "soak_evaluation.py").write_text(EVALUATION)
        self.model = f"model-{self.rng.randrange(10**6)}"
        arguments = {"isolated": self.rng.random() < 0.3}
        workers = self.rng.choice((0, 0, 0, 2))
        with Server(random.Random(self.rng.random()), self.counts) as server:
            self.words = [
                "soak_evaluation",
                "-m",
                self.model,
                "-b",
                server.url,
                "-n",
                "-1",
                "-r",
                str(SIBLINGS),
            ]
            self.words += [
                "-c",
                str(self.rng.choice((1, 4, 8))),
                "-o",
                "runs",
                "--timeout",
                "20",
                "--header",
                f"X-Gate: {GATE}",
                "--progress",
                "json",
            ]
            self.words += [
                "-a",
                json.dumps(arguments),
                "--max-error-rate",
                "1",
                "--abort-after",
                "0",
            ]
            self.words += ["-w", str(workers), "-A"]
            for _ in range(num_disturbed):
                server.rate = self.rng.choice((0.0, 0.1, 0.3)) if num_disturbed else 0.0
                what = draw(self.rng, JOURNAL_POINTS, workers > 0 and not arguments["isolated"])
                if what.is_hostile:  # the stranger asks the model server, which must then be right
                    server.rate = 0.0
                if self._attempt(what, server) == 0:
                    break
                self._between()
            server.rate = 0.0
            pending = NUM_ROWS * SIBLINGS - len(rows_in(self.file))
            before = server.count
            require(
                self._attempt(NOTHING, server) == 0,
                "an undisturbed repetition did not finish the run",
            )
            asked = server.count - before
            require(
                asked == pending, f"{pending} rollouts were pending, and {asked} requests were sent"
            )
        self._spoil()
        rows = rows_in(self.file)
        check_rows(rows, self.acknowledged, self.model, is_done=True)
        metadata = json.loads((self.file.parent / "metadata.json").read_text())
        require(
            metadata["status"] == "complete", f"a finished run has the status {metadata['status']}"
        )
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        mean = sum(rewards) / len(rewards) if rewards else None
        require(
            metadata["avg_reward"] == mean,
            f"the mean is {metadata['avg_reward']}, of the known rewards {mean}",
        )
        temporary = [path.name for path in self.file.parent.glob(".*.tmp")]
        require(not temporary, f"temporary files are left in the run's folder: {temporary}")
        self.counts["rows"] += len(rows)
        self.counts["rows with an error"] += sum(row["error"] is not None for row in rows)

    def _attempt(self, what: Disturbance, server: Server) -> int:
        before = self.file.read_bytes() if self.file.exists() else b""
        max_bytes = len(before) + self.rng.randint(4_000, 40_000) if what.is_full_disk else 0
        done = len(rows_in(self.file))
        # a finished run is repeated by its path: the plain command would begin another one
        words = self.words if done < NUM_ROWS * SIBLINGS else [*self._words_in(self.file.parent)]
        command = self.commands.start("eval", words, self.folder, what.failpoint, max_bytes)

        def progress() -> int:
            return command.text.count('"event": "rollout"')

        away = None
        if server.rate and self.rng.random() < 0.3:
            away = threading.Thread(target=server.away, args=(self.rng.uniform(0.2, 1.0),))
            away.start()
        if what is not NOTHING and self.rng.random() < 0.2:
            self._second(command, progress)
        try:
            goal = max(1, NUM_ROWS * SIBLINGS - done)
            code = disturb(command, what, self.rng, progress, goal, is_server_away=away is not None)
        finally:
            if away is not None:
                away.join()
        self.counts["evaluations started"] += 1
        self.counts[f"evaluation: {what.name}"] += what is not NOTHING
        num_before = len(self.acknowledged)
        self._take(command)
        self.counts["rows acknowledged by a command that was stopped"] += (
            len(self.acknowledged) - num_before
        ) * (code != 0)
        after = self.file.read_bytes() if self.file.exists() else b""
        complete = before[: before.rfind(b"\n") + 1]
        require(after.startswith(complete), "rows that were on disk have changed")
        check_rows(rows_in(self.file), self.acknowledged, self.model, is_done=False)
        return code

    def _take(self, command: Command) -> None:
        """Remember what the command acknowledged and took."""
        for line in command.text.splitlines():
            if line.startswith('{"event": "rollout"') and line.endswith("}"):
                self.acknowledged.add(json.loads(line)["key"])
        self.peak_bytes = max(self.peak_bytes, command.peak_bytes)
        require(
            command.peak_bytes < self.limit_bytes,
            f"vf-eval took {command.peak_bytes / 2**20:.0f} MiB",
        )

    def _second(self, first: Command, progress: Callable[[], int]) -> None:
        """The same command a second time, while the first one runs."""
        if first.wait(lambda: progress() > 0):
            return
        first.send(signal.SIGSTOP)
        if not first.is_stopped():
            return
        if not self._is_unfinished():
            first.send(signal.SIGCONT)
            return
        command = self.commands.start("eval", self.words, self.folder)
        code = command.end()
        first.send(signal.SIGCONT)
        require(
            code == 2,
            f"a second process on the run's folder ended with {code}, not 2: {command.text}",
        )
        require(
            str(first.process.pid) in command.text,
            f"it does not name process {first.process.pid}: {command.text}",
        )
        self.counts["evaluation: second process refused"] += 1

    def _is_unfinished(self) -> bool:
        """Whether the run has some of its rows; the command of a run that has all begins another."""
        return 0 < len(rows_in(self.file)) < NUM_ROWS * SIBLINGS

    def _between(self) -> None:
        """What happens to the folder between two attempts."""
        if not self._is_unfinished():
            return
        chance, before = self.rng.random(), self.file.read_bytes()
        if chance < 0.2:
            self._refused("other code", edit=True)
        elif chance < 0.4:
            change = self.rng.choice((["-m", "another"], ["-T", "0.5"], ["-a", '{"num_rows": 39}']))
            self._refused("another configuration", ["--resume", str(self.file.parent), *change])
        elif chance < 0.6:
            self._damaged_copy(before)
        elif chance < 0.8:
            self._torn_copy(before)
        require(self.file.read_bytes() == before, "a refused command has changed the run")

    def _refused(self, name: str, words: Sequence[str] = (), edit: bool = False) -> None:
        source = self.folder / "soak_evaluation.py"
        if edit:
            source.write_text(EVALUATION.replace("float(", "0.5 * float("))
        command = self.commands.start("eval", [*self.words, *words], self.folder)
        code = command.end()
        source.write_text(EVALUATION)
        require(code == 2, f"{name}: the repeated command ended with {code}, not 2: {command.text}")
        require(
            name in " ".join(command.text.split()),
            f"the refusal does not speak of {name}: {command.text}",
        )
        self.counts[f"evaluation: {name} refused"] += 1

    def _copy(self, content: bytes) -> Path:
        folder = self.folder / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.file.parent, folder, ignore=shutil.ignore_patterns("run.lock"))
        (folder / "results.jsonl").write_bytes(content)
        return folder

    def _damaged_copy(self, content: bytes) -> None:
        """A flipped bit in a line that is not the last stops the command, by line."""
        end = content.rstrip(b"\n").rfind(b"\n")
        if end <= 0:
            return
        damaged = bytearray(content)
        at = self.rng.randrange(end)
        damaged[at] ^= 1 << self.rng.randrange(7)
        folder = self._copy(bytes(damaged))
        command = self.commands.start("eval", [*self._words_in(folder)], self.folder)
        code = command.end()
        require(code == 3, f"a flipped bit at byte {at} ended with {code}, not 3: {command.text}")
        require("results.jsonl:" in command.text, f"it does not name the line: {command.text}")
        require((folder / "results.jsonl").read_bytes() == damaged, "a damaged file was changed")
        self.counts["evaluation: damaged copy refused"] += 1

    def _torn_copy(self, content: bytes) -> None:
        """A file cut anywhere is continued from its last whole row."""
        folder = self._copy(content[: self.rng.randrange(1, len(content))])
        rows = [
            json.loads(line) for line in (folder / "results.jsonl").read_bytes().split(b"\n")[:-1]
        ]
        command = self.commands.start("eval", [*self._words_in(folder)], self.folder)
        code = command.end()
        require(code == 0, f"a torn copy was not finished, but ended with {code}: {command.text}")
        kept = {row["rollout_key"] for row in rows if "write_part" not in row}
        check_rows(rows_in(folder / "results.jsonl"), kept, self.model, is_done=True)
        self.counts["evaluation: torn copy finished"] += 1

    def _words_in(self, folder: Path) -> Iterator[str]:
        words = iter(self.words)
        for word in words:
            if word == "-o":
                next(words)
                yield from ("--resume", str(folder))
            else:
                yield word

    def _spoil(self) -> None:
        """The negative controls."""
        if self.sabotage in ("row", "twice", "mixed"):
            lines = self.file.read_bytes().splitlines(keepends=True)
            if self.sabotage == "mixed":
                from verifiers.storage.journal import Journal

                rows = rows_in(self.file)
                rows[0]["completion"][-1]["content"] = "another-model: 1"
                self.file.unlink()
                with Journal.open(self.file) as journal:
                    journal.append_sync(rows)
                return
            self.file.write_bytes(
                b"".join(lines[1:] if self.sabotage == "row" else [*lines, lines[0]])
            )


# --- the training ---------------------------------------------------------------------------------


def losses_in(folder: Path) -> list[tuple[int, str]]:
    """(step, loss as hex) of every optimizer step in ``metrics.jsonl``."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [(row["step"], row["loss"].hex()) for row in map(json.loads, lines) if "loss" in row]


def saved_in(folder: Path) -> dict[str, str]:
    """Size and checksum of what the last checkpoint holds."""
    files = json.loads(read_file(folder / f"checkpoint-{STEPS}" / "MANIFEST.json"))["files"]
    return {name: str(files[name]) for name in SAVED}


def check_training(
    folder: Path, losses: list[tuple[int, str]], saved: Mapping[str, str], max_lag: int
) -> int:
    """The finished run is the undisturbed one bit for bit, and trained what was sampled; the tokens
    that it trained."""
    resumed_losses = losses_in(folder)
    require(
        resumed_losses == losses,
        f"the losses of the resumed run differ: {resumed_losses} against {losses}",
    )
    now = saved_in(folder)
    differing = [name for name in saved if now[name] != saved[name]]
    require(
        not differing,
        f"files of the last checkpoint differ from the undisturbed run's: {differing}",
    )
    tokens = 0
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "loss" not in row:
            continue
        step, ratio = row["step"], row.get("sampler/log_ratio_abs")
        require(
            ratio is None or ratio < MISMATCH,
            f"step {step}: mean |log ratio| {ratio} of tokens just sampled",
        )
        lines = (folder / f"completions/step-{step}.jsonl").read_text().splitlines()
        rollouts = [row for row in map(json.loads, lines) if row["trained"]]
        sampled = sum(rollout["completion_tokens"] for rollout in rollouts)
        require(
            row["tokens/trained"] == sampled,
            f"step {step}: {row['tokens/trained']} tokens of {sampled} sampled",
        )
        oldest = min(rollout["policy_version"] for rollout in rollouts)
        require(oldest >= step - 1 - max_lag, f"step {step} trained rollouts of policy {oldest}")
        tokens += sampled
    temporary = [path.name for path in folder.glob(".tmp-*")]
    require(not temporary, f"unfinished checkpoints are left: {temporary}")
    return tokens


@dataclass
class TrainingRun:
    """One ``vf-train`` of a round, through all its attempts."""

    commands: Commands
    folder: Path
    rng: random.Random
    counts: collections.Counter[str]
    variant: str
    limit_bytes: float = math.inf
    sabotage: str = ""
    peak_bytes: int = 0

    @property
    def output(self) -> Path:
        """The folder of the run."""
        return self.folder / "out"

    def prepare(self) -> None:
        """Write the environment and the settings."""
        self.folder.mkdir()
        (self.folder / "soak_training.py").write_text(TRAINING)
        (self.folder / "train.toml").write_text(SETTINGS)

    def run(
        self, losses: list[tuple[int, str]], saved: Mapping[str, str], num_disturbed: int = 3
    ) -> None:
        """Disturb, repeat, finish, compare with the undisturbed run."""
        self.prepare()
        for _ in range(num_disturbed):
            points = [
                *(f"checkpoint.{name}" for name in CHECKPOINT_POINTS),
                "atomic_write.before_rename",
            ]
            if self.attempt(draw(self.rng, points)) == 0:
                break
            self._between(losses, saved)
        require(self.attempt(NOTHING) == 0, "an undisturbed repetition did not finish the training")
        if self.sabotage == "loss":
            file = self.output / "metrics.jsonl"
            file.write_text(file.read_text().replace('"loss": ', '"loss": 1', 1))
        self.counts["tokens trained"] += check_training(
            self.output, losses, saved, max_lag=int(VARIANTS[self.variant][1])
        )

    def attempt(self, what: Disturbance, words: Sequence[str] = (), output: str = "out") -> int:
        """The command once; the exit code."""
        max_bytes = self.rng.choice((20_000, 60_000)) if what.is_full_disk else 0
        everything = ["@", "train.toml", "--output-dir", output, *VARIANTS[self.variant], *words]
        command = self.commands.start("train", everything, self.folder, what.failpoint, max_bytes)
        before = len(losses_in(self.folder / output))
        code = disturb(
            command,
            what,
            self.rng,
            lambda: len(losses_in(self.folder / output)) - before,
            max(1, STEPS - before),
        )
        self.counts["trainings started"] += 1
        if what.name and what is not NOTHING:
            self.counts[f"training: {what.name}"] += 1
        self.peak_bytes = max(self.peak_bytes, command.peak_bytes)
        require(
            command.peak_bytes < self.limit_bytes,
            f"vf-train took {command.peak_bytes / 2**20:.0f} MiB",
        )
        self.said = command.text
        return code

    def _between(self, losses: list[tuple[int, str]], saved: Mapping[str, str]) -> None:
        checkpoints = sorted(self.output.glob("checkpoint-*"))
        # begun, and not at its end
        if not checkpoints or (self.output / f"checkpoint-{STEPS}").exists():
            return
        chance = self.rng.random()
        before = {path.name: (path / "MANIFEST.json").read_bytes() for path in checkpoints}
        refusal = Disturbance("", (2,))
        if chance < 0.15:
            code = self.attempt(refusal, ["--trainer.args.learning_rate", "0.5"])
            self._require_refused(code, "another configuration")
        elif chance < 0.3:
            source = self.folder / "soak_training.py"
            source.write_text(TRAINING.replace("isdigit", "isalpha"))
            code = self.attempt(refusal)
            source.write_text(TRAINING)
            self._require_refused(code, "other code")
        elif chance < 0.5:
            self._damaged_copy(checkpoints, losses, saved)
        now = {
            path.name: (path / "MANIFEST.json").read_bytes()
            for path in sorted(self.output.glob("checkpoint-*"))
        }
        require(now == before, "a refused command has changed the checkpoints")

    def _require_refused(self, code: int, name: str) -> None:
        require(code == 2, f"{name}: the repeated command ended with {code}, not 2: {self.said}")
        require(
            name in " ".join(self.said.split()),
            f"the refusal does not speak of {name}: {self.said}",
        )
        self.counts[f"training: {name} refused"] += 1

    def _damaged_copy(
        self, checkpoints: Sequence[Path], losses: list[tuple[int, str]], saved: Mapping[str, str]
    ) -> None:
        """A flipped bit in the newest checkpoint: the one before it is taken, or it is said that
        there is none."""
        shutil.rmtree(self.folder / "copy", ignore_errors=True)
        shutil.copytree(
            self.output, self.folder / "copy", ignore=shutil.ignore_patterns("run.lock")
        )
        newest = max(
            self.folder.glob("copy/checkpoint-*"),
            key=lambda path: int(path.name.rpartition("-")[2]),
        )
        file = self.rng.choice(sorted(path for path in newest.iterdir() if path.stat().st_size))
        content = bytearray(file.read_bytes())
        if self.rng.random() < 0.5:
            content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(7)
        else:
            del content[self.rng.randrange(len(content)) :]
        file.write_bytes(content)
        code = self.attempt(Disturbance("", (2,)), output="copy")
        if len(checkpoints) == 1:
            require(
                code == 2,
                f"the only checkpoint is damaged in {file.name}, and it ended with {code}:"
                f" {self.said}",
            )
        else:
            require(
                code == 0,
                f"{newest.name}/{file.name} is damaged, and it ended with {code}: {self.said}",
            )
            check_training(
                self.folder / "copy", losses, saved, max_lag=int(VARIANTS[self.variant][1])
            )
        self.counts["training: damaged copy"] += 1


def require_no_secret(folder: Path) -> None:
    """Neither the key nor the value of the header is in a file of the round, or was printed."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            require(
                KEY.encode() not in content and GATE.encode() not in content,
                f"a secret is in {path.relative_to(folder)}",
            )


# --- rounds ---------------------------------------------------------------------------------------


@dataclass
class Soak:
    """All rounds of one seed."""

    folder: Path
    seed: int
    sabotage: str = ""
    num_disturbed: int = 3
    """How often each command of a round is disturbed."""
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    references: dict[str, tuple[list[tuple[int, str]], dict[str, str]]] = field(
        default_factory=dict
    )
    peaks: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scratch = self.folder / "tmp"
        self.scratch.mkdir(parents=True)
        self.commands = Commands(self.scratch)

    def variant(self, number: int) -> str:
        """How the training of a round samples."""
        return random.Random(f"{self.seed}/{number}").choice(list(VARIANTS))

    def begin(self, variants: Iterable[str] = VARIANTS) -> None:
        """The undisturbed runs that the rounds are compared with."""
        for name in variants:
            run = TrainingRun(
                self.commands,
                self.folder / f"reference {name}",
                random.Random(0),
                self.counts,
                name,
            )
            run.prepare()
            require(
                run.attempt(NOTHING) == 0, f"the undisturbed training ({name}) failed: {run.said}"
            )
            self.references[name] = losses_in(run.output), saved_in(run.output)
            self.peaks["train"] = max(self.peaks.get("train", 0), run.peak_bytes)
        undisturbed = EvaluationRun(
            self.commands, self.folder / "reference", random.Random(0), self.counts
        )
        undisturbed.run(num_disturbed=0)
        self.peaks["eval"] = undisturbed.peak_bytes
        self.counts.clear()
        self.baseline = self._usage()

    def _usage(self) -> dict[str, int]:
        return {
            "open files": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "resident bytes": (
                int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            ),
        }

    def round(self, number: int) -> dict[str, int]:
        """One round; what it counted. Raises ``Violation``."""
        folder = self.folder / f"round-{number}"
        folder.mkdir()
        counts: collections.Counter[str] = collections.Counter()
        variant = self.variant(number)
        seeds = [random.Random(f"{self.seed}/{number}/{kind}") for kind in ("eval", "train")]
        evaluation = EvaluationRun(
            *(
                self.commands,
                folder / "evaluation",
                seeds[0],
                counts,
                self.peaks["eval"] + MEMORY_BYTES,
                self.sabotage,
            )
        )
        training = TrainingRun(
            self.commands,
            folder / "training",
            seeds[1],
            counts,
            variant,
            self.peaks["train"] + MEMORY_BYTES,
            self.sabotage,
        )
        num_disturbed = 0 if self.sabotage else self.num_disturbed
        with ThreadPoolExecutor(2) as pool:
            futures = [
                pool.submit(evaluation.run, num_disturbed),
                pool.submit(training.run, *self.references[variant], num_disturbed),
            ]
        for future in futures:
            future.result()
        self._clean(number)
        require_no_secret(folder)
        shutil.rmtree(folder)
        self.counts += counts
        return dict(counts)

    def _clean(self, number: int) -> None:
        """Nothing is left of the round: no process, no temporary file, no open file, no memory."""
        if self.sabotage == "file":
            (self.scratch / "left-behind").write_text("")
        spoiler = subprocess.Popen(["sleep", "60"]) if self.sabotage == "process" else None
        try:
            deadline = time.monotonic() + 10
            while (processes := self.commands.left_behind()) and time.monotonic() < deadline:
                time.sleep(0.1)
            require(not processes, f"processes are left: {processes}")
        finally:
            if spoiler is not None:
                spoiler.kill()
                spoiler.wait()
        files = sorted(path.name for path in self.scratch.iterdir())
        require(not files, f"temporary files are left: {files}")
        usage = self._usage()
        for name in ("open files", "threads"):
            require(
                usage[name] <= self.baseline[name],
                f"{name}: {usage[name]}, at the start {self.baseline[name]}",
            )
        if number < 3:  # caches fill
            self.baseline["resident bytes"] = max(
                self.baseline["resident bytes"], usage["resident bytes"]
            )
        grown = usage["resident bytes"] - self.baseline["resident bytes"]
        require(grown < GROWTH_BYTES, f"the soak grew by {grown / 2**20:.0f} MiB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; exit code 1 for a violation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="start no round after this time (default 60)"
    )
    parser.add_argument(
        "--rounds", type=int, default=0, help="at most so many rounds (default: any number)"
    )
    parser.add_argument(
        "--disturbed",
        type=int,
        default=3,
        help="how often a command of a round is disturbed (default 3)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="what may happen is drawn from it (default 0)"
    )
    parser.add_argument(
        "--first-round", type=int, default=1, help="number of the first round (default 1)"
    )
    parser.add_argument(
        "--folder", type=Path, help="where the rounds are; default: a temporary folder"
    )
    parser.add_argument("--report", type=Path, help="file for the JSON of counts; default: stdout")
    parser.add_argument(
        "--cpus", type=int, default=0, help="processors that everything shares; default: all"
    )
    parser.add_argument(
        "--sabotage", choices=SABOTAGES, default="", help="break an invariant: a negative control"
    )
    options = parser.parse_args(arguments)
    earlier: dict[str, Any] = {"seed": options.seed, "minutes": 0.0, "rounds": 0, "counts": {}}
    if options.report is not None and options.report.exists():
        earlier = json.loads(options.report.read_text())
        if earlier["seed"] != options.seed:
            parser.error(
                f"{options.report} is of seed {earlier['seed']}; give --seed {earlier['seed']} or"
                " another file"
            )
        options.first_round = earlier["rounds"] + 1
    os.nice(10)
    if options.cpus:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[-options.cpus :]))
    if options.folder is None:
        folder = Path(tempfile.mkdtemp(prefix="soak-"))
    else:
        folder = options.folder.absolute()
    began, number, violation = time.monotonic(), options.first_round, None
    soak = Soak(folder, options.seed, options.sabotage, options.disturbed)
    num_rounds = 0
    try:
        soak.begin({soak.variant(number)} if options.rounds == 1 else VARIANTS)
        print(
            f"undisturbed runs done after {time.monotonic() - began:.0f} s; rounds begin",
            flush=True,
        )
        while time.monotonic() - began < 60 * options.minutes and (
            not options.rounds or num_rounds < options.rounds
        ):
            at = time.monotonic()
            counted = soak.round(number)
            happened = "; ".join(
                f"{name} {count}" for name, count in sorted(counted.items()) if count
            )
            print(f"round {number}: ok in {time.monotonic() - at:.0f} s; {happened}", flush=True)
            number += 1
            num_rounds += 1
    except (Violation, JournalError, OSError, ValueError, KeyError) as error:
        violation = f"round {number} of seed {options.seed}: {type(error).__name__}: {error}"
    report = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
        "python": platform.python_version(),
        "seed": options.seed,
        "minutes": round(earlier["minutes"] + (time.monotonic() - began) / 60, 1),
        "rounds": earlier["rounds"] + num_rounds,
        "violation": violation,
        "counts": dict(sorted((soak.counts + collections.Counter(earlier["counts"])).items())),
    }
    text = json.dumps(report, indent=2)
    if options.report is None:
        print(text)
    else:
        options.report.write_text(f"{text}\n")
    if violation is None:
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    print(
        f"VIOLATION in {violation}\nits files are in {folder}; to repeat it: "
        f"python3 run.py soak --seed {options.seed} --first-round {number} --rounds 1",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
