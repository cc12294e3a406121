"""Read a task folder of Harbor: ``task.toml``, ``instruction.md``, ``environment/``, ``tests/``,
``solution/``.

Promise: what a task asks for and this package cannot give is refused with the task, the key and a
way out; a key that is unknown is refused too. ``waive`` names keys that may be ignored, such as
``"environment.network_mode"``. Reading executes nothing.

*Source*: the package ``harbor`` 0.26.0 (``harbor.models.task.config``), Apache-2.0.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from verifiers.errors import ConfigError
from verifiers.runtime.bounded import open_file, read_text
from verifiers.runtime.decoding import read_toml
from verifiers.runtime.suggest import closest
from verifiers_agents.harbor import building
from verifiers_agents.harbor.dockerfile import Copy, Dockerfile, read_dockerfile
from verifiers_agents.harbor.images import ImageStore

T = TypeVar("T")
ARTIFACTS = "/logs/artifacts"
"""Folder that is always collected."""
DEFAULT_VERIFIER_S = 600.0
_REFERENCE = re.compile(r"\$\{(\w+)(?::-((?:[^$}]|\$(?!\{))*))?\}")
_NETWORK = "the sandbox has no network"
_ROOT_USERS = (None, "root", 0, "0")

HONOURED = frozenset(
    "schema_version version source artifacts agent.timeout_sec verifier.timeout_sec verifier.env"
    " verifier.collect verifier.environment_mode environment.build_timeout_sec"
    " environment.docker_image environment.memory_mb environment.memory environment.storage_mb"
    " environment.storage environment.cpus environment.env environment.workdir environment.os"
    " solution.env agent.user verifier.user environment.network_mode agent.network_mode"
    " verifier.network_mode environment.allow_internet environment.gpus".split()
)
"""Keys that are read; some of their values are refused. ``[task]`` and ``[metadata]`` may hold
anything."""
REFUSED = {
    "environment.gpu_types": "the sandbox has no GPU",
    "environment.tpu": "the sandbox has no TPU",
    "environment.mcp_servers": "tool servers of a task are not started",
    "environment.skills_dir": "skills of a task are not given to the agent",
    "environment.healthcheck": "services of a task are not started",
    "environment.allowed_hosts": _NETWORK,
    "agent.allowed_hosts": _NETWORK,
    "verifier.allowed_hosts": _NETWORK,
    "verifier.environment": "the checks run in a fresh sandbox of the task's own environment",
    "steps": "a task has one instruction",
    "multi_step_reward_strategy": "a task has one instruction",
}
"""Keys that are never honoured -> why."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file or folder that is copied from the agent's sandbox to that of the checks."""

    source: str
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Collect:
    """A command that runs in the agent's sandbox when the agent has ended, before the artifacts are
    copied."""

    command: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task folder. Times in seconds, sizes in MB; None if the task leaves the choice to the
    environment."""

    name: str
    folder: Path
    instruction: str
    digest: str
    """Hash of every file of the folder."""
    build: Dockerfile
    env: Mapping[str, str]
    """Variables of every command, those of the Dockerfile included."""
    memory_mb: int | None
    storage_mb: int | None
    build_timeout_s: float
    agent_timeout_s: float | None
    max_turns: int | None
    """``[metadata] max_turns``, a key of ours: Harbor leaves turns to its agents."""
    verifier_timeout_s: float
    verifier_env: Mapping[str, str]
    shares_verifier: bool
    """Whether the task asks for checks in the agent's own sandbox."""
    collect: tuple[Collect, ...]
    artifacts: tuple[Artifact, ...]
    solution_env: Mapping[str, str]

    @property
    def tests(self) -> Path:
        return self.folder / "tests"

    @property
    def solution(self) -> Path:
        return self.folder / "solution"


def read_tasks(
    path: str | os.PathLike[str],
    images: ImageStore,
    only: Collection[str] | None = None,
    waive: Collection[str] = (),
    host_variables: Collection[str] = (),
) -> list[HarborTask]:
    """Read a task folder, or the task folders in a folder, by name; ``only`` these, which may take
    ``host_variables`` of this process. *Raises* ConfigError."""
    folder = Path(path).expanduser()
    if (folder / "task.toml").is_file():
        return [read_task(folder, images, waive, host_variables)]
    folders = sorted(file.parent for file in folder.glob("*/task.toml")) if folder.is_dir() else []
    if not folders:
        raise ConfigError(
            f"{folder} is no task folder and holds none: a task folder has a file task.toml",
            path=str(folder),
        )
    for name in only or ():
        if name not in (names := [path.name for path in folders]):
            raise ConfigError(
                f"there is no task {name!r} in {folder}{closest(name, names)}", path=str(folder)
            )
    return [
        read_task(path, images, waive, host_variables)
        for path in folders
        if only is None or path.name in only
    ]


def read_task(
    folder: Path,
    images: ImageStore,
    waive: Collection[str] = (),
    host_variables: Collection[str] = (),
) -> HarborTask:
    """Read one task folder. *Raises* ConfigError for what cannot be honoured."""
    folder = folder.resolve()
    config = _read(read_toml, folder / "task.toml")
    read = _Reader(folder.name, config, frozenset(waive), frozenset(host_variables))
    read.check_keys()
    _check_files(folder, read)
    build = _build_of(folder, read, images)
    return HarborTask(
        name=folder.name,
        folder=folder,
        instruction=_read(read_text, folder / "instruction.md").strip(),
        digest=_digest(folder),
        build=build,
        env={**build.env, **read.variables("environment.env")},
        memory_mb=read.megabytes("memory"),
        storage_mb=read.megabytes("storage"),
        build_timeout_s=read.number("environment.build_timeout_sec") or 600.0,
        agent_timeout_s=read.number("agent.timeout_sec"),
        max_turns=read.turns(),
        verifier_timeout_s=read.number("verifier.timeout_sec") or DEFAULT_VERIFIER_S,
        verifier_env=read.variables("verifier.env"),
        shares_verifier=read.text("verifier.environment_mode") == "shared",
        collect=read.collect(),
        artifacts=read.artifacts(),
        solution_env=read.variables("solution.env"),
    )


def _read(read: Callable[[Path], T], path: Path) -> T:
    try:
        return read(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"task {path.parent.name}: {path} cannot be read: {error}", path=str(path.parent)
        ) from error


class _Reader:
    """The tables of one ``task.toml``. Every method *raises* ConfigError with the
    task and the key."""

    def __init__(
        self,
        name: str,
        config: Mapping[str, object],
        waive: Collection[str],
        host_variables: Collection[str],
    ):
        self._name, self._config, self._waive = name, config, waive
        self._host_variables = host_variables

    def get(self, key: str) -> Any:
        """The value of ``table.key``; None if it is absent or waived."""
        value: object = self._config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return None if key in self._waive else value

    def refuse(self, key: str, why: str, way_out: str | None = None) -> ConfigError:
        way_out = way_out or f'pass waive=["{key}"] to run the task without it'
        return ConfigError(
            f"task {self._name}: {key} cannot be honoured: {why}; {way_out}",
            example_id=self._name,
            key=key,
        )

    def check_keys(self) -> None:
        """Refuse keys that are not honoured, and values of others that cannot be."""
        for key in _keys(self._config):
            if self.get(key) in (None, [], {}):
                continue
            if key in REFUSED:
                raise self.refuse(key, REFUSED[key])
            if key not in HONOURED:
                raise self.refuse(key, f"the key is unknown{closest(key, sorted(HONOURED))}")
        if self.get("environment.allow_internet"):
            raise self.refuse("environment.allow_internet", _NETWORK)
        for phase in ("environment", "agent", "verifier"):
            if (mode := self.get(f"{phase}.network_mode")) not in (None, "no-network"):
                raise self.refuse(f"{phase}.network_mode", f"it is {mode!r} and {_NETWORK}")
            if self.get(f"{phase}.user") not in _ROOT_USERS:
                raise self.refuse(f"{phase}.user", "the sandbox has one user")
        if self.get("environment.gpus"):
            raise self.refuse("environment.gpus", "the sandbox has no GPU")
        if str(self.get("environment.os") or "linux").lower() != "linux":
            raise self.refuse("environment.os", "the sandbox runs Linux")
        cpus = self.number("environment.cpus") or 0
        if cpus > (os.cpu_count() or 1):
            raise self.refuse(
                "environment.cpus", f"the task needs {cpus:g} and this machine has {os.cpu_count()}"
            )
        version = self.get("schema_version") or self.get("version")
        if version is not None and not str(version).startswith("1."):
            raise self.refuse("schema_version", f"it is {version!r} and this package reads 1.x")

    def number(self, key: str) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"task {self._name}: {key} is {value!r}; it must be a number above 0")
        return float(value)

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"task {self._name}: {key} is {value!r}; it must be a text")
        return value

    def megabytes(self, kind: str) -> int | None:
        """``memory_mb``, or the older ``memory = "2G"``."""
        number, older = self.number(f"environment.{kind}_mb"), self.text(f"environment.{kind}")
        if number is not None or older is None:
            return None if number is None else int(number)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([GMK])", older.strip().upper())
        if match is None:
            raise ConfigError(
                f"task {self._name}: environment.{kind} is {older!r}; write a size such as '2G'"
            )
        return max(1, int(float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2]]))

    def variables(self, key: str) -> dict[str, str]:
        """A table of variables; ``${NAME}`` and ``${NAME:-default}`` are filled from this process's
        environment if the user named them."""

        def filled(match: re.Match[str]) -> str:
            name, default = match[1], match[2]
            if name not in self._host_variables and default is None:
                raise ConfigError(
                    f"task {self._name}: {key} asks for the variable {name} of this machine; pass"
                    f" host_variables=[{name!r}] to give it to the sandbox, whose programs and"
                    " model can read it",
                    example_id=self._name,
                    key=key,
                )
            value = os.environ.get(name, default) if name in self._host_variables else default
            if value is None:
                raise ConfigError(
                    f"task {self._name}: {key} needs the variable {name}, which is not set here"
                )
            return value

        return {
            str(name): _REFERENCE.sub(filled, str(value))
            for name, value in (self.get(key) or {}).items()
        }

    def turns(self) -> int | None:
        value = self.number("metadata.max_turns")
        return None if value is None else int(value)

    def collect(self) -> tuple[Collect, ...]:
        hooks = []
        for hook in self.get("verifier.collect") or ():
            if hook.get("service", "main") != "main" or hook.get("user") not in _ROOT_USERS:
                raise self.refuse("verifier.collect", "a task has one service and one user")
            hooks.append(Collect(str(hook["command"]), float(hook.get("timeout_sec", 60.0))))
        return tuple(hooks)

    def artifacts(self) -> tuple[Artifact, ...]:
        artifacts = []
        for entry in self.get("artifacts") or ():
            fields = {"source": entry} if isinstance(entry, str) else entry
            source = str(fields.get("source", ""))
            if fields.get("service", "main") != "main":
                raise self.refuse("artifacts", "a task has one service")
            if not source.startswith("/") or ".." in source.split("/") or source.rstrip("/") == "":
                raise ConfigError(
                    f"task {self._name}: the artifact {source!r} must be an absolute path below /"
                )
            artifacts.append(
                Artifact(source.rstrip("/"), tuple(map(str, fields.get("exclude", ()))))
            )
        return tuple(artifacts)


def _keys(config: Mapping[str, object]) -> list[str]:
    """``table.key`` of every entry; of ``[task]`` and ``[metadata]`` none."""
    keys = []
    for name, value in config.items():
        if name in ("task", "metadata"):
            continue
        keys += [f"{name}.{key}" for key in value] if isinstance(value, Mapping) else [name]
    return keys


def _check_files(folder: Path, read: _Reader) -> None:
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"task {folder.name}: {folder / name} is missing", example_id=folder.name
            )
    for name in (
        "environment/docker-compose.yaml",
        "environment/.dockerignore",
        "tests/Dockerfile",
        "tests/docker-compose.yaml",
        "trajectory.json",
    ):
        if (folder / name).exists():
            raise read.refuse(name, "it is not supported", "delete it, or leave the task out")
    for path in folder.rglob("*"):
        # Harbor then leaves files out of tests/ and solution/: other checks would run
        if path.name == ".harborignore":
            name = path.relative_to(folder).as_posix()
            raise read.refuse(name, "it is not supported", "delete it and the files that it names")
        if path.is_symlink() and not path.resolve().is_relative_to(folder):
            raise ConfigError(
                f"task {folder.name}: the link {path} leaves the task folder",
                example_id=folder.name,
            )


def _build_of(folder: Path, read: _Reader, images: ImageStore) -> Dockerfile:
    """The Dockerfile, else a prebuilt image with the files of ``environment/``, else this machine's
    system programs."""
    context, workdir = folder / "environment", read.text("environment.workdir")
    if (context / "Dockerfile").is_file():
        build = read_dockerfile(
            context / "Dockerfile", lambda image: building.start(image, images, folder.name)
        )
    else:
        image = read.text("environment.docker_image")
        build = building.start(image, images, folder.name) if image else Dockerfile()
        if any(context.glob("*")):
            if not build.image:
                raise read.refuse(
                    "environment/",
                    "files without a Dockerfile go nowhere",
                    "add a Dockerfile with COPY",
                )
            build.steps.append(Copy(((context, workdir or "/"),)))
    if workdir is not None:
        build.workdir = workdir
        build.folders.append(workdir)
    return build


def _digest(folder: Path) -> str:
    """Hash of names, modes and contents."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            executable = os.access(path, os.X_OK)
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.relative_to(folder)}\0{executable}\0{size}\0".encode())
                while chunk := file.read(2**20):
                    digest.update(chunk)
    return digest.hexdigest()[:16]
