"""E2B, Modal, Daytona and Prime Intellect: create a machine, run a command on it, transfer files,
end it.

Each service reads its key where its package does (``E2B_API_KEY``; ``MODAL_TOKEN_ID`` and
``MODAL_TOKEN_SECRET`` or ``~/.modal.toml``; ``DAYTONA_API_KEY``; ``PRIME_API_KEY`` or ``prime
login``). The calls are checked against the types of the packages; none was tested against the live
service.
"""

from __future__ import annotations

import base64
import math
from typing import Any

from verifiers.sandbox.protocol import SandboxSpec
from verifiers_sandboxes.remote import Machine, RemoteBackend

IMAGE = "python:3.11-slim"
LABEL = "verifiers-sandbox"


class E2B(RemoteBackend):
    """A ``SandboxBackend``; ``template`` must contain Python 3.11 or later."""

    name = package = distribution = "e2b"

    def __init__(self, template: str = "code-interpreter-v1"):
        super().__init__()
        self._template = template

    async def create(self, spec: SandboxSpec) -> Machine:
        from e2b import AsyncSandbox

        return _E2BMachine(
            await AsyncSandbox.create(
                self._template,
                timeout=math.ceil(spec.wall_s),
                allow_internet_access=spec.network,
                metadata={"made-by": LABEL},
            )
        )


class _E2BMachine:
    def __init__(self, sandbox: Any):
        self._sandbox = sandbox

    async def run(self, command: str, timeout_s: float) -> tuple[int, str]:
        from e2b import CommandExitException

        try:
            result = await self._sandbox.commands.run(command, timeout=timeout_s)
        except CommandExitException as error:
            return error.exit_code, error.stdout
        return result.exit_code, result.stdout

    async def upload(self, path: str, data: bytes) -> None:
        await self._sandbox.files.write(path, data)

    async def download(self, path: str) -> bytes:
        return bytes(await self._sandbox.files.read(path, format="bytes"))

    async def end(self) -> None:
        await self._sandbox.kill()


class Modal(RemoteBackend):
    """A ``SandboxBackend``; the packages are a layer of the image, so the machine
    needs no network."""

    name = package = distribution = "modal"

    def __init__(self, app: str = LABEL):
        super().__init__()
        self._app = app

    async def create(self, spec: SandboxSpec) -> Machine:
        import modal

        image = modal.Image.debian_slim(python_version="3.11")
        if spec.packages:
            image = image.pip_install(*spec.packages)
        return _ModalMachine(
            await modal.Sandbox.create.aio(
                app=await modal.App.lookup.aio(self._app, create_if_missing=True),
                image=image,
                timeout=math.ceil(spec.wall_s),
                memory=spec.memory_mb,
                block_network=not spec.network,
            )
        )


class _ModalMachine:
    def __init__(self, sandbox: Any):
        self._sandbox = sandbox

    async def run(self, command: str, timeout_s: float) -> tuple[int, str]:
        process = await self._sandbox.exec.aio("sh", "-c", command, timeout=math.ceil(timeout_s))
        printed = await process.stdout.read.aio()
        return await process.wait.aio(), printed

    async def upload(self, path: str, data: bytes) -> None:
        await self._sandbox.filesystem.write_bytes.aio(data, path)

    async def download(self, path: str) -> bytes:
        return bytes(await self._sandbox.filesystem.read_bytes.aio(path))

    async def end(self) -> None:
        await self._sandbox.terminate.aio()


class Daytona(RemoteBackend):
    """A ``SandboxBackend``; ``image`` must contain Python 3.11 or later."""

    name = package = distribution = "daytona"

    def __init__(self, image: str = IMAGE):
        super().__init__()
        self._image = image

    async def create(self, spec: SandboxSpec) -> Machine:
        from daytona import AsyncDaytona, CreateSandboxFromImageParams, Resources

        client = AsyncDaytona()
        try:
            parameters = CreateSandboxFromImageParams(
                image=self._image,
                resources=Resources(memory=max(1, math.ceil(spec.memory_mb / 1024))),
                network_block_all=not spec.network,
                ttl_minutes=math.ceil(spec.wall_s / 60),
                ephemeral=True,
                labels={"made-by": LABEL},
            )
            return _DaytonaMachine(client, await client.create(parameters, timeout=300))
        except BaseException:  # also on cancellation: close the client; raised again
            await client.close()
            raise


class _DaytonaMachine:
    def __init__(self, client: Any, sandbox: Any):
        self._client, self._sandbox = client, sandbox

    async def run(self, command: str, timeout_s: float) -> tuple[int, str]:
        result = await self._sandbox.process.exec(command, timeout=math.ceil(timeout_s))
        return result.exit_code, result.result

    async def upload(self, path: str, data: bytes) -> None:
        await self._sandbox.fs.upload_file(data, path)

    async def download(self, path: str) -> bytes:
        return bytes(await self._sandbox.fs.download_file(path))

    async def end(self) -> None:
        try:
            await self._client.delete(self._sandbox)
        finally:
            await self._client.close()


class PrimeSandboxes(RemoteBackend):
    """A ``SandboxBackend``; ``image`` must contain Python 3.11 or later."""

    name = distribution = "prime-sandboxes"
    package = "prime_sandboxes"

    def __init__(self, image: str = IMAGE):
        super().__init__()
        self._image = image

    async def create(self, spec: SandboxSpec) -> Machine:
        from prime_sandboxes import AsyncSandboxClient, CreateSandboxRequest

        client = AsyncSandboxClient()
        machine = None
        try:
            request = CreateSandboxRequest(
                name=LABEL,
                docker_image=self._image,
                memory_gb=max(1.0, spec.memory_mb / 1024),
                timeout_minutes=max(1, math.ceil(spec.wall_s / 60)),
                network_denylist=None if spec.network else ["0.0.0.0/0"],
                labels=[LABEL],
            )
            machine = _PrimeMachine(client, (await client.create(request)).id)
            await client.wait_for_creation(machine.id)
        except BaseException:  # also on cancellation: end the machine; raised again
            await (client.aclose() if machine is None else machine.end())
            raise
        return machine


class _PrimeMachine:
    def __init__(self, client: Any, sandbox_id: str):
        self._client, self.id = client, sandbox_id

    async def run(self, command: str, timeout_s: float) -> tuple[int, str]:
        result = await self._client.execute_command(self.id, command, timeout=math.ceil(timeout_s))
        return result.exit_code, result.stdout

    async def upload(self, path: str, data: bytes) -> None:
        await self._client.upload_bytes(self.id, path, data, path.rpartition("/")[2])

    async def download(self, path: str) -> bytes:
        """Read the file with a command, because the package's download writes a file on this
        machine."""
        code, printed = await self.run(f"base64 -w0 {path}", 600)
        if code != 0:
            raise FileNotFoundError(path)
        return base64.b64decode(printed)

    async def end(self) -> None:
        try:
            await self._client.delete(self.id)
        finally:
            await self._client.aclose()
