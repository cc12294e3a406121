"""What the container backends share: the root they show, the keeper they start in it, the session over its pipe.

Each says in ``launch`` the command line that runs the keeper in its kind of container, and what is to be done when that
command has ended. The root is made of host files, read-only, as with ``bubblewrap``: no image is fetched.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from verifiers.errors import ConfigError, SandboxError, SandboxUnavailable
from verifiers.sandbox.host import mounts
from verifiers.sandbox.host.packages import require
from verifiers.sandbox.host.pipe import Pipe
from verifiers.sandbox.host.remote_processes import Kept, Line, max_reply_bytes, told_settings
from verifiers.sandbox.host.session import Session
from verifiers.sandbox.host.zygotes import ENVIRONMENT, FILES, START
from verifiers.sandbox.protocol import Availability, SandboxSpec

ROOT = "/sandbox"
HOME = f"{ROOT}/home"
SHARED = "/dev/shm"
PROBE = """
import os
with open("/proc/self/status") as file:
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
assert int(status["CapEff"], 16) == 0, "the code has capabilities"
assert status.get("NoNewPrivs", "1") == "1", "the code can gain privileges"
assert not os.path.exists(HOST_FILE), "a file of the host is visible"
os.getpid() < 100, os.listdir("/sandbox/home")
"""
"""Run in a session before a backend says that it works. ``HOST_FILE`` is this module's own path."""
PROBE_S = 60.0
VERSION = 1
"""Of what is in a root; another one is made anew."""
FIRST_UID = 2**21
"""Of users that no host has: the kernel counts processes by user, so each sandbox has one of its own."""
_uids = itertools.count(random.SystemRandom().randrange(2**28))


@dataclass(frozen=True, slots=True)
class Root:
    """Example: ``Root(Path("/tmp/x"), {"/usr/bin": "/usr/bin"}, "3f2a")``"""

    folder: Path
    """An almost empty file system: places to mount on, links, and a few files."""
    shown: dict[str, str]
    """Place inside -> file or folder of the host, read-only; outer places first."""
    digest: str


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that runs a keeper, and the shell's command for when it has ended."""

    argv: list[str]
    after: str = "true"


class ContainerBackend(ABC):
    """A ``SandboxBackend`` over a program of this machine."""

    name: str
    program: str
    network = False
    """Whether a sandbox may have one."""

    def __init__(self) -> None:
        self._said: Availability | None = None

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"numpy", "sympy", "files", "state", "isolation"} | ({"network"} if self.network else set()))

    @abstractmethod
    async def launch(self, program: str, spec: SandboxSpec, keeper: list[str]) -> Launch:
        """How to run ``keeper``, whose ``ROOT`` is an empty, limited file system in memory."""

    def find(self) -> str | None:
        return shutil.which(self.program)

    async def available(self) -> Availability:
        if self._said is None:
            self._said = await self._probe()
        return self._said

    async def open(self, spec: SandboxSpec) -> Session:
        if spec.network and not self.network:
            raise ConfigError(f"The sandbox {self.name!r} has no network; leave network=False or use a remote backend")
        require(spec.packages)
        if (program := self.find()) is None:
            raise SandboxUnavailable(f"The program {self.program!r} is not installed", names=[self.name])

        async def line() -> Line:
            launch = await self.launch(program, spec, _keeper(spec))
            return await Pipe.open(launch.argv, launch.after, max_reply_bytes(spec), self.name)

        return await Session.open(spec, Kept(line))

    async def _probe(self) -> Availability:
        try:
            sandbox = await self.open(SandboxSpec())
            try:
                result = await sandbox.exec(PROBE.replace("HOST_FILE", repr(__file__)), timeout_s=PROBE_S)
            finally:
                await sandbox.close()
        except (SandboxError, OSError) as error:
            return Availability(False, str(error))
        if result.value != "(True, [])":
            return Availability(False, f"a session was not isolated: {result.error or result.value}")
        return Availability(True, f"a session in {self.name} answered")


def file_sizes(spec: SandboxSpec) -> tuple[int, int]:
    """MB of ``ROOT`` and of ``SHARED``: both together are what the sandbox may have."""
    all_mb = max(2, min(spec.file_mb, spec.memory_mb))
    shared_mb = max(1, min(64, all_mb // 8))
    return all_mb - shared_mb, shared_mb


def own_uid() -> int:
    """Another for each sandbox."""
    return FIRST_UID + next(_uids) % 2**28


def environment(spec: SandboxSpec) -> dict[str, str]:
    return {**ENVIRONMENT, **spec.env}


def _keeper(spec: SandboxSpec) -> list[str]:
    told = told_settings(spec, HOME, [ROOT, SHARED, "/tmp"], [f"{ROOT}/tmp"], confined=True)
    return [mounts.INTERPRETER, "-c", START.format(path=mounts.INSIDE, module="init"), told]


@lru_cache
def root_for(packages: tuple[str, ...]) -> Root:
    """Made once, beside other caches: it holds names and links only."""
    shown = mounts.mounts(packages)
    empty = [*shown.hidden]
    told = repr(
        (VERSION, sorted(shown.shown.items()), sorted(shown.links.items()), sorted(empty), sorted(FILES.items()))
    )
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verifiers" / "sandbox"
    folder = caches / digest
    if not folder.exists():
        caches.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(dir=caches, prefix="making-"))
        _make(making, shown)
        making.chmod(0o755)
        try:
            making.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(making, ignore_errors=True)
    places = {place: str(path) for place, path in shown.shown.items()}
    places |= {place: str(folder / "empty") for place in empty}
    return Root(folder / "root", dict(sorted(places.items())), digest)


def _make(folder: Path, shown: mounts.Mounts) -> None:
    for path in (folder / "empty", folder / "root"):
        path.mkdir(mode=0o755)
    inside = [*shown.folders(), ROOT, "/proc", "/sys", "/dev", "/run", "/etc"]
    for place in inside:
        (folder / f"root{place}").mkdir(mode=0o755, parents=True, exist_ok=True)
    (folder / f"root{ROOT}").chmod(0o1777)  # engines give what they mount there the mode of the place
    for place, path in shown.shown.items():
        at = folder / f"root{place}"
        if path.is_dir():
            at.mkdir(mode=0o755, exist_ok=True)
        elif not at.exists():
            at.touch()
    for place, target in {**shown.links, "/tmp": f"{ROOT}/tmp"}.items():
        (folder / f"root{place}").symlink_to(target)
    for place, text in FILES.items():
        (folder / f"root{place}").write_text(text, encoding="ascii")
