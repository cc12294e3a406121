"""Several machines on one: network namespaces, each with an address and a loopback of its own, and one disk.

``with Machines(folder, 3) as machines``: the first has the address ``machines.addresses[0]`` and the switch, the others
a cable to it. ``start`` runs a command on one of them. Needs Linux, root and ``ip`` (iproute2).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

NETWORK = "10.77.41"
RAY_PORT = 6391
RAY_AGENTS = (
    "dashboard-agent-grpc-port",
    "metrics-export-port",
    "runtime-env-agent-port",
    "dashboard-agent-listen-port",
)
START_S = 300
ATTEMPTS = 5


def cannot() -> str | None:
    """Why there can be no machines here; None where there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not there"
    name = f"vf-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces are not allowed here"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


class Machines:
    """``count`` namespaces. Leaving the block ends all their processes and removes them."""

    def __init__(self, folder: Path, count: int = 2, **variables: str):
        self.folder, self.processes, self.variables = folder, [], variables
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses = [f"{NETWORK}.{number}" for number in range(1, count + 1)]
        self.names = {address: f"vf-{address.rpartition('.')[2]}-{os.getpid()}" for address in self.addresses}
        self.ray_folder = Path("/tmp") / f"vf-ray-{os.getpid()}"  # the path of a socket has at most 107 characters

    def __enter__(self) -> Machines:
        hub = self.names[self.addresses[0]]
        for name in self.names.values():
            ip("netns", "add", name)
        ip("-n", hub, "link", "add", "switch", "type", "bridge")
        for number, (address, name) in enumerate(self.names.items()):
            device = "switch"
            if name != hub:
                device = "cable"
                ip("-n", name, "link", "add", device, "type", "veth", "peer", "name", f"cable{number}", "netns", hub)
                ip("-n", hub, "link", "set", f"cable{number}", "master", "switch", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            for each in ("lo", device):
                ip("-n", name, "link", "set", each, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for address, name in self.names.items():
            self.kill(address)
            subprocess.run(["ip", "netns", "del", name], check=False)
        shutil.rmtree(self.ray_folder, ignore_errors=True)

    def kill(self, machine: str) -> None:
        """End all processes of a machine at once."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.names[machine]], capture_output=True, text=True, check=False
        )
        for pid in map(int, listed.stdout.split()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def start(self, machine: str, *words: str, log: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command; its output is in ``<folder>/<log>.log``."""
        environ = {
            **os.environ,
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "60",
            **self.variables,
            **variables,
        }
        command = ["ip", "netns", "exec", self.names[machine], *words]
        with (self.folder / f"{log}.log").open("wb") as file:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environ, stdout=file, stderr=file, start_new_session=True
            )
        self.processes.append(process)
        return process

    def finish(self, machine: str, *words: str, log: str, timeout_s: float = 400, **variables: str) -> tuple[int, str]:
        """Exit status and output."""
        status = self.start(machine, *words, log=log, **variables).wait(timeout_s)
        return status, self.output(log)

    def output(self, log: str) -> str:
        """What a command has written so far."""
        return (self.folder / f"{log}.log").read_text(errors="replace")

    def wait_for(self, log: str, words: str, process: subprocess.Popen[bytes] | None = None) -> None:
        """Wait until a command (the newest) has written ``words``."""
        process = process or self.processes[-1]
        deadline = time.monotonic() + START_S
        while words not in self.output(log):
            assert time.monotonic() < deadline, self.output(log)
            assert process.poll() is None, self.output(log)
            time.sleep(0.5)

    def start_ray(self, *num_cpus: int, **variables: str) -> str:
        """Start a Ray cluster with a node on each machine, of so many cores; return its address."""
        address, logs = f"{self.addresses[0]}:{RAY_PORT}", {}
        for number, (machine, cores) in enumerate(zip(self.addresses, num_cpus, strict=True)):
            logs[f"node{number}"] = machine, cores
            if number == 0:
                self._wait_for_node(address, *logs.popitem(), variables)
        for log, (machine, cores) in logs.items():
            self._start_node(address, machine, cores, log, variables)
        for log, placed in logs.items():
            self._wait_for_node(address, log, placed, variables)
        return address

    def _start_node(self, address: str, machine: str, cores: int, log: str, variables: Mapping[str, str]) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        words = ["--num-cpus", str(cores), "--block", "--object-store-memory", str(100 * 2**20)]
        for port, agent in enumerate(RAY_AGENTS, RAY_PORT + 1):  # not given, Ray waits 15 s for each, and fails
            words += [f"--{agent}", str(port)]
        if machine == self.addresses[0]:
            words += ["--head", "--port", str(RAY_PORT), "--include-dashboard", "false"]
            words += ["--temp-dir", str(self.ray_folder)]
        else:
            words += ["--address", address]
        self.nodes[log] = self.start(machine, ray, "start", "--node-ip-address", machine, *words, log=log, **variables)

    def _wait_for_node(self, address: str, log: str, placed: tuple[str, int], variables: Mapping[str, str]) -> None:
        """Wait until a node runs; start it again where its agents missed the 15 s that Ray gives them."""
        for attempt in range(ATTEMPTS):
            if attempt or log not in self.nodes:
                self.kill(placed[0])
                if placed[0] == self.addresses[0]:
                    shutil.rmtree(self.ray_folder, ignore_errors=True)
                self._start_node(address, *placed, log, variables)
            with contextlib.suppress(AssertionError):
                return self.wait_for(log, "Ray runtime started", self.nodes[log])
        raise AssertionError(self.output(log))


def ip(*words: str) -> None:
    """Run the command ``ip``."""
    subprocess.run(["ip", *words], check=True)
