"""Two machines: a server on one, training on the other, environments on both. Here they are network namespaces.

Each has an address of its own and a loopback of its own; files are shared, as on a network disk. The server is the
scripted one, started by ``vf-vllm`` as on a machine with GPUs; everything else is what users start.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verifiers_trainer.cli.vllm import is_up

ROOT = Path(__file__).parents[3]
FAKE = f"{sys.executable} {ROOT / 'tests/support/fake_vllm.py'}"
SERVER, TRAINER = "10.77.41.1", "10.77.41.2"
URL = f"http://{SERVER}:8000"
RAY_PORT = 6391


def cannot() -> str | None:
    """Why there can be no two machines here."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not there"
    name = f"vf-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces are not allowed here"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


pytestmark = [pytest.mark.slow, pytest.mark.skipif(cannot() is not None, reason=cannot() or "")]

FILE = """
model = "builtin:tiny"
[env]
id = "digit_share"
[env.args]
folder = "{folder}"
[trainer.args]
batch_size = 8
rollouts_per_example = 4
micro_batch_size = 4
max_seq_len = 512
max_tokens = 4
max_steps = 3
zero_variance = "keep"
max_off_policy_steps = 0
lora_rank = 4
learning_rate = 1e-3
sync_dir = "{folder}/sync"
weight_sync = "{method}"
use_lora = {lora}
"""

ENVIRONMENT = """
import subprocess
from pathlib import Path
import verifiers as vf

def load_environment(folder: str):
    def digits(completion, **_):
        (address,) = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
        (Path(folder) / "played" / address).touch()
        text = completion[-1]["content"] or ""
        return sum(c.isdigit() for c in text) / max(1, len(text))

    rows = [{"question": f"q{n}"} for n in range(40)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[digits]))
"""


class Machines:
    """Two namespaces with a cable between them; ``start`` runs a command on one of them."""

    def __init__(self, folder: Path):
        self.folder, self.processes = folder, []
        self.names = {SERVER: f"vf-a-{os.getpid()}", TRAINER: f"vf-b-{os.getpid()}"}

    def __enter__(self):
        (one, other), (near, far) = self.names.values(), ("vfa", "vfb")
        for name in (one, other):
            ip("netns", "add", name)
        ip("-n", one, "link", "add", near, "type", "veth", "peer", "name", far, "netns", other)
        for (address, name), device in zip(self.names.items(), (near, far), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            for each in ("lo", device):
                ip("-n", name, "link", "set", each, "up")
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], check=False)

    def start(self, machine: str, *words: str, log: str, **variables: str) -> subprocess.Popen:
        environ = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'tests'}:{self.folder}",
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            **variables,
        }
        command = ["ip", "netns", "exec", self.names[machine], *words]
        with (self.folder / f"{log}.log").open("wb") as file:
            process = subprocess.Popen(command, cwd=self.folder, env=environ, stdout=file, stderr=file)
        self.processes.append(process)
        return process

    def finish(self, machine: str, *words: str, log: str, **variables: str) -> tuple[int, str]:
        """Exit status and what was said."""
        status = self.start(machine, *words, log=log, **variables).wait(400)
        return status, self.said(log)

    def said(self, log: str) -> str:
        return (self.folder / f"{log}.log").read_text(errors="replace")

    def wait_for(self, log: str, words: str) -> None:
        deadline = time.monotonic() + 300
        while words not in self.said(log):
            assert time.monotonic() < deadline, self.said(log)
            assert self.processes[-1].poll() is None, self.said(log)
            time.sleep(0.5)

    def serve(self, *flags: str) -> None:
        """``vf-vllm`` on the server's machine; back once its trainer could reach it."""
        words = [sys.executable, "-m", "verifiers_trainer.cli.vllm", "--model", "builtin:tiny", "--host", SERVER]
        server = self.start(SERVER, *words, "--vllm-command", FAKE, *flags, log="server")
        probe = f"import sys; from verifiers_trainer.cli.vllm import is_up; sys.exit(not is_up({URL!r}))"
        deadline = time.monotonic() + 120
        while self.finish(TRAINER, sys.executable, "-c", probe, log="probe")[0]:
            assert server.poll() is None, self.said("server")
            assert time.monotonic() < deadline, self.said("server")

    def train(self, url: str, *words: str, method: str = "lora_dir", **variables: str) -> tuple[int, str]:
        text = FILE.format(folder=self.folder, method=method, lora=str(method == "lora_dir").lower())
        (self.folder / "run.toml").write_text(text)
        (self.folder / "digit_share.py").write_text(ENVIRONMENT)
        (self.folder / "played").mkdir(exist_ok=True)
        command = [sys.executable, "-m", "verifiers_trainer.cli.train", "@", "run.toml", "--output-dir", "out"]
        return self.finish(TRAINER, *command, "-v", "--vllm-url", url, *words, log="train", **variables)

    def steps(self) -> list[dict]:
        lines = (self.folder / "out" / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "loss" in row]

    def played_on(self) -> set[str]:
        return {path.name for path in (self.folder / "played").iterdir()}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def machines(tmp_path):
    with Machines(tmp_path) as both:
        yield both


@pytest.mark.parametrize("method", ["lora_dir", "reload"])
def test_the_server_is_elsewhere_and_weights_go_by_a_shared_folder(machines, method):
    machines.serve("--max-lora-rank", "8")
    assert not is_up(URL), "negative control: this machine has no way there"
    assert "can replace the weights" in machines.said("server")  # an address that others reach is told of
    status, said = machines.train(URL, method=method)
    assert status == 0, said
    assert f"weights reach the server by {method}" in said
    assert len(machines.steps()) == 3
    assert machines.played_on() == {TRAINER}


def test_the_loopback_of_another_machine_is_not_ours(machines):
    machines.serve()
    status, said = machines.train("http://127.0.0.1:8000", "--trainer.args.vllm_server_timeout", "2")
    assert status != 0
    assert "no inference server answers at http://127.0.0.1:8000" in said


def test_environments_play_on_both_machines_of_a_ray_cluster(machines):
    pytest.importorskip("ray", reason="needs the extra ray")
    ray = str(Path(sys.executable).with_name("ray"))
    short = Path("/tmp") / f"vf-ray-{os.getpid()}"  # the path of a socket has at most 107 characters
    common = ["--num-cpus", "1", "--block", "--object-store-memory", str(100 * 2**20)]
    agents = (
        "dashboard-agent-grpc-port",
        "metrics-export-port",
        "runtime-env-agent-port",
        "dashboard-agent-listen-port",
    )
    for number, agent in enumerate(agents, RAY_PORT + 1):  # of ports it must be told, Ray waits 15 s and then gives up
        common += [f"--{agent}", str(number)]
    machines.serve("--max-lora-rank", "8")
    patient = {"RAY_raylet_start_wait_time_s": "240"}
    head = ["start", "--head", "--node-ip-address", SERVER, "--port", str(RAY_PORT), "--include-dashboard", "false"]
    machines.start(SERVER, ray, *head, "--temp-dir", str(short), *common, log="head", **patient)
    machines.wait_for("head", "Ray runtime started")
    address = f"{SERVER}:{RAY_PORT}"
    node = ["start", "--address", address, "--node-ip-address", TRAINER]
    machines.start(TRAINER, ray, *node, *common, log="node", **patient)
    machines.wait_for("node", "Ray runtime started")
    try:
        wanted = ["--trainer.args.num_env_workers", "2", "--trainer.args.env_worker_backend", "ray"]
        status, said = machines.train(URL, *wanted, RAY_ADDRESS=address)
        assert status == 0, said
        assert len(machines.steps()) == 3
        assert machines.played_on() == {SERVER, TRAINER}
    finally:
        shutil.rmtree(short, ignore_errors=True)
