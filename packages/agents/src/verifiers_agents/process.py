"""Run one agent program in a sandbox: its files, its command, its end, its log, and the files it
leaves.

The promise: the agent reaches nothing but its model, through one socket; when ``AgentProcess`` is
closed, none of its processes runs; its log is readable however it ended. Its end is a report or one
error.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verifiers.errors import AgentError, ConfigError, SandboxError, SandboxLimit
from verifiers.runtime.bounded import MAX_ROW_BYTES, read_file, size_text
from verifiers.runtime.decoding import decode_message
from verifiers.sandbox import ExecResult, Sandbox, SandboxBackend, SandboxSpec
from verifiers.sandbox.host.mounts import interpreter, is_system
from verifiers.sandbox.unpacking import unpack_sent
from verifiers_agents import inside
from verifiers_agents.agent import Agent, Installed, fill
from verifiers_agents.gateway import MODEL, SOCKET, Route, gateway
from verifiers_agents.host_programs import host_program, is_interpreter

PORT = 8000
"""Where the model's API is, inside: ``http://127.0.0.1:8000``."""
MOUNTED = "/opt/agent"
SOCKETS = "/run/verifiers"
COLLECT_S = 60.0
MAX_COLLECTED, MAX_COLLECTED_BYTES = 1000, 64 * 2**20
"""Files that are collected from a rollout, and their bytes together, or ``max_file_mb`` if that is
more."""
NUM_PROCESSES = 512
"""Processes and threads of an agent and of the programs that it starts."""
LOG_LINES = 3
"""Last lines of the log that an error quotes."""
SHARED_NODE = "/usr/share/nodejs"
"""Where Debian's package of node keeps a part of it."""
SETTINGS = {
    "memory": "memory_gb",
    "cpu": "timeout_minutes",
    "wall": "timeout_minutes",
    "file": "disk_size_gb",
}
"""Limit of a sandbox -> the parameter that sets it."""

_FIND = """
import glob, json, os
os.chdir({work!r})
names = {{name for pattern in {patterns!r} for name in glob.glob(pattern, recursive=True, include_hidden=True)}}
print(json.dumps(sorted([name, os.path.getsize(name)] for name in names if os.path.isfile(name))))
"""
_PREPARE = """
import os
os.remove({work!r} + '/.verifiers')
os.makedirs({home!r}, exist_ok=True)
for path, target in {links!r}.items():
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.path.lexists(path) or os.symlink(target, path)
"""
_PACK = "import tarfile\nwith tarfile.open({target!r}, 'w') as file:\n    file.add({work!r}, '.')\n"


@dataclass(frozen=True, slots=True)
class AgentFolders:
    """Folders as the agent sees them, and how it reaches the model."""

    root: str
    home: str
    work: str
    is_isolated: bool
    has_image: bool = False
    """Whether the root file system is an image's, without the programs of the host."""

    @property
    def log(self) -> str:
        return f"{self.root}/agent.log"

    @classmethod
    def within(cls, backend: SandboxBackend) -> AgentFolders:
        """The places in a sandbox of this backend."""
        if "mounts" in backend.capabilities:
            return cls.isolated("/sandbox/work")
        root = tempfile.mkdtemp(prefix="verifiers-agent-")
        return cls(root, f"{root}/home", f"{root}/work", False)

    @classmethod
    def isolated(cls, work: str, has_image: bool = False) -> AgentFolders:
        """The places in an isolating sandbox with this work folder."""
        return cls("/sandbox", "/sandbox/home", work, True, has_image)

    def of(self, path: str) -> str:
        """The path inside of a file that an author named."""
        if path.startswith("~/"):
            return f"{self.home}/{path[2:]}"
        return path if path.startswith("/") else f"{self.work}/{path}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of an agent process."""

    max_output_bytes: int
    max_log_bytes: int
    max_file_bytes: int
    settings: Mapping[str, str] = field(default_factory=lambda: SETTINGS)
    """Limit of the sandbox -> what sets it, for the error."""


@dataclass(slots=True)
class Ending:
    """How the agent ended, and what it left."""

    exit_code: int | None = None
    """None while it runs, and when it was ended."""
    left_processes: list[str] = field(default_factory=list)
    """Names of processes that outlived it; they were ended with its sandbox."""
    log: str = ""
    log_bytes: int = 0
    """Bytes that the agent wrote, more than ``log`` where its middle is left out."""
    files: dict[str, str | bytes] = field(default_factory=dict)
    """Collected files: path -> text, or bytes that are no UTF-8."""
    notes: list[str] = field(default_factory=list)
    """What could not be collected, and why."""
    seconds: float = 0.0


def spec_for(
    spec: SandboxSpec, installed: Installed | None, agent: Agent, is_isolated: bool = True
) -> SandboxSpec:
    """The spec with what an agent needs: limits that a runtime such as node can start within, and
    where it is isolated its program, the programs of the host that it runs with, and the socket of
    its model.

    *Raises* ConfigError for a program of the host that does not run there.
    """
    spec = replace(
        spec, num_processes=max(spec.num_processes, NUM_PROCESSES), limit_address_space=False
    )
    if not is_isolated:
        return spec
    mounts = {f"{MOUNTED}/inside.py": inside.__file__, SOCKETS: str(gateway().folder)}
    path = []
    if installed is not None:
        mounts[f"{MOUNTED}/package"] = str(installed.folder)
    elif spec.root is None:
        host = host_program(agent.command, os.getcwd())
        mounts |= {seen_at(path): path for path in host.paths}
    for name in agent.needs:
        program = Path(shutil.which(name) or name).resolve()
        if not str(program).startswith("/usr/"):
            mounts[f"{MOUNTED}/{name}"] = str(program.parents[1])
            path.append(f"{MOUNTED}/{name}/bin")
        elif os.path.isdir(SHARED_NODE) and spec.root is None:
            mounts[SHARED_NODE] = SHARED_NODE
    env = dict(spec.env)
    if path:
        env["PATH"] = ":".join([*path, env.get("PATH", "/opt/python/bin:/usr/bin:/bin")])
    return replace(spec, mounts=mounts, env=env)


def seen_at(path: str) -> str:
    """Where a sandbox has a mounted path of the host: there, but for ``/tmp``, which is its own."""
    return f"{MOUNTED}/host{path}" if path.startswith("/tmp/") else path


def named_files(command: Sequence[str]) -> tuple[list[str], dict[str, bytes]]:
    """(the command, the files that are copied for it): those of the working directory that it
    names by a relative path, and a script elsewhere, the first file that it names there, which the
    command then names without its folder.

    *Raises* ConfigError for a script whose name another file has.
    """
    words, files = list(command), {}
    for number, word in enumerate(command[1:], 1):
        path, name = Path(word), word
        if not path.is_file() or is_system(word) or is_interpreter(word):
            continue
        if path.is_absolute() or ".." in path.parts:
            if any(words[n] != command[n] for n in range(number)):
                continue  # an argument
            words[number] = name = path.name
            if name in command:
                raise ConfigError(
                    f"the command names two files {name!r}, of which one would replace the other"
                    f" in the work folder: rename {word}",
                    key="command",
                )
        files[name] = read_file(word, MAX_ROW_BYTES)
    return words, files


def script_of(command: Sequence[str]) -> str | None:
    """The file that a command gives to its interpreter: its second word, if that is a relative path
    of a file.

    >>> script_of(["python3", "agent.py", "{prompt}"])
    'agent.py'
    """
    word = command[1] if len(command) > 1 else ""
    return word if re.fullmatch(r"[\w.][\w./-]*\.\w+", word) else None


def contents(files: Mapping[str, str | bytes | Path] | None) -> dict[str, str | bytes]:
    """Files by path with their contents read. *Raises* ConfigError for what is neither text, bytes
    nor ``Path``."""
    read: dict[str, str | bytes] = {}
    for path, content in (files or {}).items():
        if not isinstance(content, str | bytes | Path):
            raise ConfigError(
                f"files maps paths to text, bytes or Path, not {type(content).__name__}",
                key="files",
            )
        read[path] = read_file(content, MAX_ROW_BYTES) if isinstance(content, Path) else content
    return read


def check_backend(backend: SandboxBackend) -> None:
    """*Raises* ConfigError for a sandbox that cannot mount an agent and the socket of its model."""
    if "isolation" in backend.capabilities and "mounts" not in backend.capabilities:
        raise ConfigError(
            "an agent runs in a sandbox that can mount its program and the socket of its model,"
            f" which {backend.name!r} cannot: use sandbox='bubblewrap', or for trusted agents"
            " 'unsafe_subprocess'",
            key="sandbox",
        )


class AgentProcess:
    """An agent in one sandbox. ``open`` prepares it, ``run`` runs it, ``collect`` reads what it
    left."""

    def __init__(self, agent: Agent, sandbox: Sandbox, paths: AgentFolders, limits: Limits):
        self._agent, self._sandbox, self._folders, self._limits = agent, sandbox, paths, limits
        self._absent_script: str | None = None
        self.ending = Ending()
        self.is_collected = False
        self._started = 0.0

    @classmethod
    async def open(
        cls,
        agent: Agent,
        installed: Installed | None,
        sandbox: Sandbox,
        paths: AgentFolders,
        route: Route,
        prompt: str,
        files: Mapping[str, str | bytes],
        limits: Limits,
    ) -> AgentProcess:
        """Write the files into a sandbox that was opened for this agent; it is closed when that
        fails.

        *Raises* SandboxError.
        """
        if paths.is_isolated:
            root_url, package = f"http://127.0.0.1:{PORT}{route.path}", f"{MOUNTED}/package"
        else:
            root_url = route.url.removesuffix("/v1")
            package = str(installed.folder if installed else "")
        program = installed.program if installed is not None else None
        values = {
            "prompt": prompt,
            "base_url": f"{root_url}/v1",
            "root_url": root_url,
            "model": MODEL,
            "package": package,
            "program": (
                f"{package}/{program.relative_to(installed.folder)}"
                if installed and program
                else ""
            ),
            "home": paths.home,
            "work": paths.work,
        }
        links: dict[str, str] = {}
        if installed is None and not paths.has_image:
            host = host_program(agent.command, os.getcwd())
            agent = replace(agent, command=host.command)
            if paths.is_isolated:
                links = {path: seen_at(path) for path in host.paths if seen_at(path) != path}
        process = cls(agent.filled(values), sandbox, paths, limits)
        if (script := script_of(agent.command)) is not None and script not in files:
            process._absent_script = script
        try:
            await process._write(files, values, links)
        except BaseException:  # also when cancelled: nothing stays open; raised again
            await process.close()
            raise
        return process

    async def run(self) -> None:
        """Run the agent to its end.

        *Raises* AgentError when it cannot be started or ends with another code than 0; SandboxLimit
        when it writes more than its bound, or reaches a limit of its sandbox.
        """
        self._started = time.monotonic()
        python = (
            interpreter(self._folders.has_image) if self._folders.is_isolated else [sys.executable]
        )
        program = [
            *python,
            "-I",
            "-S",
            f"{MOUNTED}/inside.py" if self._folders.is_isolated else inside.__file__,
        ]
        try:
            result = await self._sandbox.exec(
                [*program, f"{self._folders.root}/settings.json"], timeout_s=10**7
            )
        finally:
            self.ending.seconds = time.monotonic() - self._started
        report = self._report(result)
        if (failed := report.get("failed")) is not None:
            raise AgentError(
                f"the agent {self._agent.name!r} could not be started: {failed}; its sandbox has"
                " the system's programs, a program that the command names by its path, and files"
                " that the command names after its first word: ['python3', 'agent.py', '{prompt}']"
            )
        self.ending.exit_code, self.ending.left_processes = report["exit_code"], report["left"]
        if report.get("flooded"):
            raise SandboxLimit(
                f"the agent {self._agent.name!r} was ended: it wrote more than"
                f" {self._limits.max_output_bytes} bytes (max_output_mb)",
                limit="output",
            )

    def _report(self, result: ExecResult) -> dict[str, Any]:
        if result.timed_out or result.limit in ("memory", "cpu", "file", "processes", "wall"):
            limit = "wall" if result.timed_out else str(result.limit)
            settings = self._limits.settings
            setting = f" ({settings[limit]})" if limit in settings else ""
            raise SandboxLimit(
                f"the agent {self._agent.name!r} was ended: its sandbox reached the limit of"
                f" {limit}{setting}",
                limit=limit,
            )
        try:
            report: dict[str, Any] = decode_message(result.stdout)
            if "failed" not in report and type(report["exit_code"]) is not int:
                raise ValueError("no exit code")
            return report | {"left": [str(name) for name in report.get("left") or ()]}
        except (ValueError, TypeError, KeyError):  # lost, or forged from inside
            reason = result.error or result.stderr or f"exit code {result.exit_code}"
            raise AgentError(
                f"the agent {self._agent.name!r} was lost with its sandbox: {reason}"
            ) from None

    def check_exit_code(self) -> None:
        """*Raises* AgentError that quotes the end of the log when the agent ended with another code
        than 0."""
        code = self.ending.exit_code
        if code:
            how = f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code}"
            absent = self._absent_script
            why = (
                f"; {absent} is no file of the working directory {os.getcwd()}, so it was not"
                " copied"
                if absent
                else ""
            )
            raise AgentError(f"the agent {self._agent.name!r} {how}{self.last_lines()}{why}")

    def last_lines(self) -> str:
        """The last lines of the log that have words, for a message."""
        lines = [
            line.strip() for line in self.ending.log.splitlines() if any(map(str.isalnum, line))
        ][-LOG_LINES:]
        return f"; its log ends with: {' | '.join(lines)}" if lines else "; it wrote nothing"

    async def collect(self, patterns: Sequence[str], keep: Path | None) -> None:
        """Read the log, then the files that match the patterns; copy the work folder to ``keep``.

        What cannot be read is in ``ending.notes``.
        """
        ending, limits = self.ending, self._limits
        self.is_collected = True
        try:
            if patterns or keep is not None:
                # what the agent left running could change files while they are read
                await self._sandbox.restart()
            content = await self._sandbox.read_file(self._folders.log)
            output, ending.log_bytes = inside.output_of(content, limits.max_log_bytes)
            ending.log = output.decode("utf-8", "replace")
            matching = await self._matching(patterns)
            room = max_bytes = max(MAX_COLLECTED_BYTES, limits.max_file_bytes)
            for number, (name, size) in enumerate(matching):
                if size > limits.max_file_bytes:
                    ending.notes.append(
                        f"{name} was not collected: {size} bytes are more than max_file_mb"
                    )
                    continue
                room -= size
                if room < 0 or number == MAX_COLLECTED:
                    ending.notes.append(
                        f"{name} and what follows it, {len(matching) - number} files, were not"
                        f" collected: at most {MAX_COLLECTED} are, of {size_text(max_bytes)} together"
                    )
                    break
                data = await self._sandbox.read_file(f"{self._folders.work}/{name}")
                ending.files[name] = _text(data)
            if keep is not None:
                await self._keep(keep)
        except (SandboxError, OSError, ValueError, TypeError) as error:
            # the latter for an answer that is no list
            ending.notes.append(f"the sandbox could not be read: {error}")

    async def _matching(self, patterns: Sequence[str]) -> list[tuple[str, int]]:
        if not patterns:
            return []
        code = _FIND.format(work=self._folders.work, patterns=list(patterns))
        result = await self._sandbox.exec(code, timeout_s=COLLECT_S)
        if result.error or result.timed_out:
            self.ending.notes.append(f"files were not collected: {result.error or 'time-out'}")
            return []
        return [(str(name), int(size)) for name, size in decode_message(result.stdout)]

    async def _keep(self, keep: Path) -> None:
        target = f"{self._folders.root}/work.tar"
        result = await self._sandbox.exec(
            _PACK.format(target=target, work=self._folders.work), timeout_s=COLLECT_S
        )
        if result.error or result.timed_out:
            self.ending.notes.append(f"the work folder was not kept: {result.error or 'time-out'}")
            return
        packed = await self._sandbox.read_file(target)

        try:
            left_out = await asyncio.to_thread(unpack_sent, packed, keep)
        except (OSError, tarfile.TarError) as error:  # a copy for people costs no rollout
            self.ending.notes.append(f"the work folder was not kept as a whole: {error}")
            return
        if left_out:
            names = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
            self.ending.notes.append(
                f"the copy of the work folder is without {names}, which lead out of it"
            )

    async def close(self) -> None:
        """End every process of the agent and delete its files."""
        await self._sandbox.close()
        if not self._folders.is_isolated:
            await asyncio.to_thread(shutil.rmtree, self._folders.root, ignore_errors=True)

    async def _write(
        self, files: Mapping[str, str | bytes], values: Mapping[str, str], links: Mapping[str, str]
    ) -> None:
        paths, limits, agent = self._folders, self._limits, self._agent
        await self._sandbox.write_file(f"{paths.work}/.verifiers", b"")
        result = await self._sandbox.exec(
            _PREPARE.format(work=paths.work, home=paths.home, links=dict(links)),
            timeout_s=COLLECT_S,
        )
        if result.error:
            raise SandboxError(f"the work folder could not be made: {result.error}")
        for path, content in {**agent.files, **files}.items():
            if isinstance(content, str) and path.startswith("~/"):
                content = fill(content, values)
            await self._sandbox.write_file(paths.of(path), content)
        settings = {
            "argv": list(agent.command),
            "env": {
                "HOME": paths.home,
                "OPENAI_BASE_URL": values["base_url"],
                "OPENAI_API_KEY": "unused",
                "ANTHROPIC_BASE_URL": values["root_url"],
                "ANTHROPIC_API_KEY": "unused",
                "VF_MODEL": MODEL,
                "VF_PROMPT": values["prompt"],
                **agent.environment,
            },
            "cwd": paths.work,
            "log": paths.log,
            "max_log_bytes": limits.max_log_bytes,
            "max_output_bytes": limits.max_output_bytes,
            "socket": f"{SOCKETS}/{SOCKET}" if paths.is_isolated else None,
            "port": PORT,
            "alone": paths.is_isolated,
        }
        await self._sandbox.write_file(f"{paths.root}/settings.json", json.dumps(settings))


def _text(data: bytes) -> str | bytes:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data
