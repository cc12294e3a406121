"""Our sandbox under Harbor, in place of containers.

    harbor run --path TASKS --agent oracle --env verifiers_agents.harbor_sandbox:Sandbox \
        --ek host_images=buildpack-deps:bookworm

Promise: what a task asks for and the sandbox cannot give (a network, GPUs, an image that is not named, another user) is
refused with one sentence, by Harbor's own checks or by ours. A command that overruns its time is ended with all other
processes of the sandbox.

Imported by Harbor only: it needs the package ``harbor`` (0.26.0, Python 3.12 or later).
"""

from __future__ import annotations

import asyncio
import posixpath
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)

from verifiers.errors import ConfigError, SandboxError
from verifiers.sandbox import Sandbox as Session
from verifiers.sandbox import SandboxSpec, backend_for
from verifiers.sandbox.transfer import pack, put, take
from verifiers.sandbox.unpacking import unpack_sent
from verifiers_agents.harbor import building
from verifiers_agents.harbor.dockerfile import Dockerfile, read_dockerfile
from verifiers_agents.harbor.images import ImageStore

WALL_S = 6 * 3600.0
"""Longest life of a sandbox; Harbor's own limits are shorter."""
ROOT_USERS = (None, "root", "0", 0)
_LAYERS: dict[str, building.Layer] = {}
"""Hash of an environment -> what it makes of its image; built once in a process."""
_BUILDING = asyncio.Lock()


class Sandbox(BaseEnvironment):  # type: ignore[misc]  # Harbor is not installed where types are checked
    """A Harbor environment.

    Arguments of ``--ek``: ``host_images``, images separated by commas in whose place this machine's
    system programs stand; ``images``, a folder with the root file systems of others, as that of
    ``HarborEnv``; ``without_network``, true to run tasks that ask for a network or say nothing
    about it; ``backend``, a sandbox with the capability "root".
    """

    def __init__(
        self,
        *args: object,
        host_images: str = "",
        images: str = "",
        without_network: bool = False,
        backend: str = "bubblewrap",
        **keywords: object,
    ):
        self._host_images = {name.strip() for name in host_images.split(",")} - {""}
        self._images = images
        self._without_network, self._backend = without_network, backend
        self._build = Dockerfile()
        self._session: Session | None = None
        super().__init__(*args, **keywords)

    @staticmethod
    def type() -> str:
        return "verifiers-sandbox"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(memory_limit=True)

    def _validate_definition(self) -> None:
        path, config = self.environment_dir / "Dockerfile", self.task_env_config
        if (self.environment_dir / "docker-compose.yaml").exists():
            raise ConfigError(
                f"{self.environment_name}: docker-compose.yaml is not supported by {self.type()}"
            )
        if path.is_file():
            self._build = read_dockerfile(path, self._start_of)
        elif config.docker_image:
            self._build = self._start_of(config.docker_image)
        if config.workdir:
            self._build.workdir = config.workdir
            self._build.folders.append(config.workdir)
        if self._network_is_public and not self._without_network:
            raise ConfigError(
                f"{self.environment_name}: the sandbox has no network; set [environment]"
                ' network_mode = "no-network" in its task.toml, or pass --ek without_network=true'
            )

    def _start_of(self, image: str) -> Dockerfile:
        if image in self._host_images:
            return Dockerfile(image=image)
        if self._images:
            return building.start(image, ImageStore(self._images), self.environment_name)
        raise ConfigError(
            f"{self.environment_name}: its image {image!r} is not here, and none is downloaded;"
            f" pass --ek host_images={image} to use this machine's system programs in its place, or"
            " --ek images=FOLDER with its root file system"
        )

    # --- one life ---------------------------------------------------------------------------------

    async def start(self, force_build: bool) -> None:
        layer = await self._layer(force_build)
        self._session = await self._open()
        await layer.put(self._session)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _open(self) -> Session:
        memory_mb = self._effective_memory_mb or SandboxSpec().memory_mb
        spec = SandboxSpec(
            memory_mb=memory_mb,
            file_mb=min(self._effective_storage_mb or memory_mb, memory_mb),
            cpu_s=WALL_S,
            wall_s=WALL_S,
            env={**self._build.env, **self._startup_env()},
            working_dir=self._build.workdir,
            writable_root=True,
            root=None if self._build.root is None else str(self._build.root),
        )
        return await (await backend_for(self._backend)).open(spec)

    async def _layer(self, force_build: bool) -> building.Layer:
        async with _BUILDING:
            if force_build or self.environment_id not in _LAYERS:
                limit_s = self.task_env_config.build_timeout_sec
                _LAYERS[self.environment_id] = await building.layer_of(
                    self._build, self._open, self.environment_name, limit_s
                )
            return _LAYERS[self.environment_id]

    # --- commands and files -----------------------------------------------------------------------

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        if self._resolve_user(user) not in ROOT_USERS:
            raise ConfigError(
                f"{self.environment_name}: the sandbox has one user; it cannot run as {user!r}"
            )
        variables = [f"{name}={value}" for name, value in (self._merge_env(env) or {}).items()]
        folder = cwd or self._build.workdir
        argv = ["env", *variables, "bash", "-c", 'cd "$0" && eval "$1"', folder, command]
        result = await self._running().exec(argv, timeout_s=timeout_sec or WALL_S)
        if result.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        stderr = "\n".join(part for part in (result.stderr, result.error) if part)
        code = 1 if result.exit_code is None else result.exit_code
        return ExecResult(
            stdout=result.stdout, stderr=stderr, return_code=128 - code if code < 0 else code
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        folder, name = posixpath.split(target_path)
        await put(
            self._running(),
            await asyncio.to_thread(pack, [(Path(source_path), name)]),
            folder or ".",
        )

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await put(
            self._running(), await asyncio.to_thread(pack, [(Path(source_dir), ".")]), target_dir
        )

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        content = await self._running().read_file(source_path)
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(Path(target_path).write_bytes, content)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        packed = await take(self._running(), source_dir)
        if packed is None or not packed.is_folder:
            raise FileNotFoundError(f"{source_dir} is no folder of the sandbox")
        # what leads out is left out
        await asyncio.to_thread(unpack_sent, packed.archive, Path(target_dir))

    def _running(self) -> Session:
        if self._session is None:
            raise SandboxError(
                f"{self.environment_name}: the sandbox is not running; start() opens it"
            )
        return self._session
