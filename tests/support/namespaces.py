"""Several machines on one: network namespaces, each with an address and a loopback of its own, and
one disk.

``with Machines(folder, 3) as machines``: the first has the address ``machines.addresses[0]`` and
the switch, the others a cable to it. ``start`` runs a command on one of them. Needs Linux, root and
``ip`` (iproute2).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import Popen

NETWORK = "10.77.41"
RAY_PORT = 6391
RAY_AGENTS = (
    "dashboard-agent-grpc-port",
    "metrics-export-port",
    "runtime-env-agent-port",
    "dashboard-agent-listen-port",
)
START_S = 300
ATTEMPTS = 2


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
        self.addresses = [f"{NETWORK}.{number}" for number in range(1, count + 1)]
        self.names = {
            address: f"vf-{address.rpartition('.')[2]}-{os.getpid()}" for address in self.addresses
        }
        # the path of a socket has at most 107 characters
        self.ray_folder = Path("/tmp") / f"vf-ray-{os.getpid()}"

    def __enter__(self) -> Machines:
        hub = self.names[self.addresses[0]]
        for name in self.names.values():
            ip("netns", "add", name)
        ip("-n", hub, "link", "add", "switch", "type", "bridge")
        for number, (address, name) in enumerate(self.names.items()):
            device = "switch"
            if name != hub:
                device = "cable"
                ip(
                    "-n",
                    name,
                    "link",
                    "add",
                    device,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"cable{number}",
                    "netns",
                    hub,
                )
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
        for pid in self._pids(machine):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def start(self, machine: str, *words: str, log: str, **variables: str) -> Popen[bytes]:
        """Start a command; its output is in ``<folder>/<log>.log``."""
        environ = {
            **os.environ,
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "240",
            "RAY_agent_register_timeout_ms": "240000",
            **self.variables,
            **variables,
        }
        command = ["ip", "netns", "exec", self.names[machine], *words]
        with (self.folder / f"{log}.log").open("wb") as file:
            process = Popen(
                command,
                cwd=self.folder,
                env=environ,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def finish(
        self, machine: str, *words: str, log: str, timeout_s: float = 400, **variables: str
    ) -> tuple[int, str]:
        """Exit status and output."""
        status = self.start(machine, *words, log=log, **variables).wait(timeout_s)
        return status, self.output(log)

    def output(self, log: str) -> str:
        """What a command has written so far."""
        return (self.folder / f"{log}.log").read_text(errors="replace")

    def wait_for(self, log: str, words: str, process: Popen[bytes] | None = None) -> None:
        """Wait until a command (the newest) has written ``words``."""
        process = process or self.processes[-1]
        deadline = time.monotonic() + START_S
        while words not in self.output(log):
            assert time.monotonic() < deadline, self.output(log)
            assert process.poll() is None, self.output(log)
            self._announce_ports()
            time.sleep(0.5)

    def _announce_ports(self) -> None:
        """Write the file with the port of a node's agent: Ray reads it there, waits 15 s for it and
        then ends the node.

        The port was given, but the agent itself writes the file, after imports that take longer on
        a busy machine.
        """
        for machine in self.addresses:
            for pid in self._pids(machine):
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                    node = re.search(r"raylet\0.*--node_id=(\w+)", command, re.S)
                    for session in self.ray_folder.glob("session_2*") if node else ():
                        port_file = session / f"dashboard_agent_listen_port_{node[1]}"
                        if not port_file.exists():
                            port_file.write_text(str(RAY_PORT + len(RAY_AGENTS)))

    def _pids(self, machine: str) -> list[int]:
        words = ["ip", "netns", "pids", self.names[machine]]
        return [
            int(pid)
            for pid in subprocess.run(
                words, capture_output=True, text=True, check=False
            ).stdout.split()
        ]

    def start_ray(self, *num_cpus: int, **variables: str) -> str:
        """Start a Ray cluster with a node on each machine, of so many cores; return its address."""
        address = f"{self.addresses[0]}:{RAY_PORT}"
        for number, (machine, cores) in enumerate(zip(self.addresses, num_cpus, strict=True)):
            log = (  # one after the other: nodes that start at once take the same name for a socket
                f"node{number}"
            )
            for attempt in range(ATTEMPTS):
                node = self._start_node(address, machine, cores, log, variables)
                try:
                    self.wait_for(log, "Ray runtime started", node)
                    break
                except AssertionError:
                    if attempt == ATTEMPTS - 1:
                        raise
                    self.kill(machine)
        return address

    def _start_node(
        self, address: str, machine: str, cores: int, log: str, variables: Mapping[str, str]
    ) -> Popen[bytes]:
        ray = str(Path(sys.executable).with_name("ray"))
        words = ["--num-cpus", str(cores), "--block", "--object-store-memory", str(100 * 2**20)]
        # not given, Ray waits 15 s for each, and fails
        for port, agent in enumerate(RAY_AGENTS, RAY_PORT + 1):
            words += [f"--{agent}", str(port)]
        if machine == self.addresses[0]:
            words += [
                "--head",
                "--port",
                str(RAY_PORT),
                "--include-dashboard",
                "false",
                "--no-monitor",
            ]
            words += ["--temp-dir", str(self.ray_folder)]
        else:
            words += ["--address", address]
        return self.start(
            machine, ray, "start", "--node-ip-address", machine, *words, log=log, **variables
        )


def ip(*words: str) -> None:
    """Run the command ``ip``."""
    subprocess.run(["ip", *words], check=True)
