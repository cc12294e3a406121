"""A machine of no service: this one, for the tests of the remote sandbox backends. It isolates
nothing."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from verifiers.sandbox.guest.supervisor import descendants


class Here:
    """A ``Machine``: runs the commands that a service would be asked to run."""

    def __init__(self):
        self.folders = []

    async def run(self, command, timeout_s):
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        process = await asyncio.create_subprocess_shell(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PATH": path},
        )
        try:
            printed, _ = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        return process.returncode, printed.decode()

    async def upload(self, path, data):
        self.folders.append(os.path.dirname(path))
        Path(path).write_bytes(data)

    async def download(self, path):
        return Path(path).read_bytes()

    async def end(self):
        """What a service does to the whole machine."""
        for folder in {*self.folders}:  # several when a sandbox was made anew
            for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    if f"{folder}/socket".encode() in cmdline.read_bytes():  # a guest init
                        init = int(cmdline.parent.name)
                        for pid in [*descendants(init), init]:
                            os.kill(pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
