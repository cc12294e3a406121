"""Two machines: a server on one, training on the other, environments on both. Here they are network
namespaces.

Each has an address of its own and a loopback of its own; files are shared, as on a network disk.
The server is the scripted one, started by ``vf-vllm`` as on a machine with GPUs; everything else is
what users start.
"""

import json
import sys
import time
from pathlib import Path
from subprocess import Popen

import pytest

from support.namespaces import Machines, cannot
from verifiers_trainer.cli.vllm import is_up

ROOT = Path(__file__).parents[3]
FAKE = f"{sys.executable} {ROOT / 'tests/support/fake_vllm.py'}"
SERVER, TRAINER = "10.77.41.1", "10.77.41.2"
URL = f"http://{SERVER}:8000"


pytestmark = [pytest.mark.slow, pytest.mark.skipif(cannot() is not None, reason=cannot() or "")]

NODES = ROOT / "configs/accelerate/cpu-2-nodes.yaml"

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


class TrainingMachines(Machines):
    """Machines that serve and train; the environment notes on which ones it ran."""

    def serve(self, *flags: str) -> None:
        """``vf-vllm`` on the server's machine; back once its trainer could reach it."""
        words = [
            sys.executable,
            "-m",
            "verifiers_trainer.cli.vllm",
            "--model",
            "builtin:tiny",
            "--host",
            SERVER,
        ]
        server = self.start(SERVER, *words, "--vllm-command", FAKE, *flags, log="server")
        probe = (
            "import sys; from verifiers_trainer.cli.vllm import is_up; sys.exit(not"
            f" is_up({URL!r}))"
        )
        deadline = time.monotonic() + 300
        while self.finish(TRAINER, sys.executable, "-c", probe, log="probe")[0]:
            assert server.poll() is None, self.output("server")
            assert time.monotonic() < deadline, self.output("server")

    def write_files(self, method: str = "lora_dir") -> None:
        text = FILE.format(
            folder=self.folder, method=method, lora=str(method == "lora_dir").lower()
        )
        (self.folder / "run.toml").write_text(text)
        (self.folder / "digit_share.py").write_text(ENVIRONMENT)
        (self.folder / "played").mkdir(exist_ok=True)

    def train(
        self, url: str, *words: str, method: str = "lora_dir", **variables: str
    ) -> tuple[int, str]:
        self.write_files(method)
        command = [
            sys.executable,
            "-m",
            "verifiers_trainer.cli.train",
            "@",
            "run.toml",
            "--output-dir",
            "out",
        ]
        return self.finish(
            TRAINER, *command, "-v", "--vllm-url", url, *words, log="train", **variables
        )

    def start_rank(self, rank: int, *words: str) -> Popen[bytes]:
        """Start one of two ranks as a user does, with ``accelerate launch`` on its own machine."""
        machine = self.addresses[1 + rank]
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(NODES)]
        command += ["--machine_rank", str(rank), "--main_process_ip", self.addresses[1]]
        command += [
            "-m",
            "verifiers_trainer.cli.train",
            "@",
            "run.toml",
            "--output-dir",
            "out",
            "--vllm-url",
            URL,
        ]
        return self.start(machine, *command, *words, log=f"rank{rank}", GLOO_SOCKET_IFNAME="cable")

    def steps(self) -> list[dict]:
        lines = (self.folder / "out" / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "loss" in row]

    def played_on(self) -> set[str]:
        return {path.name for path in (self.folder / "played").iterdir()}


@pytest.fixture
def machines(tmp_path):
    with started(tmp_path, 2) as both:
        yield both


def started(folder: Path, count: int) -> TrainingMachines:
    return TrainingMachines(folder, count, PYTHONPATH=f"{ROOT / 'tests'}:{folder}")


@pytest.mark.parametrize("method", ["lora_dir", "reload"])
def test_the_server_is_elsewhere_and_weights_go_by_a_shared_folder(machines, method):
    machines.serve("--max-lora-rank", "8")
    assert not is_up(URL), "negative control: this machine has no way there"
    # an address that others reach is told of
    assert "can replace the weights" in machines.output("server")
    status, said = machines.train(URL, method=method)
    assert status == 0, said
    assert f"weights reach the server by {method}" in said
    assert len(machines.steps()) == 3
    assert machines.played_on() == {TRAINER}


def test_the_loopback_of_another_machine_is_not_ours(machines):
    machines.serve()
    status, said = machines.train(
        "http://127.0.0.1:8000", "--trainer.args.vllm_server_timeout", "2"
    )
    assert status != 0
    assert "no inference server answers at http://127.0.0.1:8000" in said


def test_environments_play_on_both_machines_of_a_ray_cluster(machines):
    pytest.importorskip("ray", reason="needs the extra ray")
    machines.serve("--max-lora-rank", "8")
    address = machines.start_ray(1, 1)
    wanted = ["--trainer.args.num_env_workers", "2", "--trainer.args.env_worker_backend", "ray"]
    status, said = machines.train(URL, *wanted, RAY_ADDRESS=address)
    assert status == 0, said
    assert len(machines.steps()) == 3
    assert machines.played_on() == {SERVER, TRAINER}


def test_ranks_on_two_machines_and_the_server_on_a_third_survive_a_kill(tmp_path):
    """One run: two ranks exchange gradients over the network, one machine is lost, the same
    commands resume."""
    words = "--trainer.args.max_steps 8 --trainer.args.save_steps 2 --trainer.args.rank_timeout 60".split()
    with started(tmp_path, 3) as machines:
        machines.serve("--max-lora-rank", "8")
        machines.write_files()
        ranks = [machines.start_rank(rank, *words) for rank in (0, 1)]
        deadline = time.monotonic() + 600
        while not (tmp_path / "out" / "checkpoint-4").is_dir():
            assert time.monotonic() < deadline, machines.output("rank0")
            assert all(rank.poll() is None for rank in ranks), machines.output(
                "rank0"
            ) + machines.output("rank1")
            time.sleep(0.1)
        machines.kill(machines.addresses[2])
        assert ranks[0].wait(300) != 0, "the other rank does not wait for ever"
        assert max(row["step"] for row in machines.steps()) < 8, (
            "negative control: the run was not over"
        )
        ranks = [machines.start_rank(rank, *words) for rank in (0, 1)]
        assert [rank.wait(600) for rank in ranks] == [0, 0], machines.output(
            "rank0"
        ) + machines.output("rank1")
        assert [row["step"] for row in machines.steps()] == list(range(1, 9)), "each step once"
        assert machines.played_on() == {machines.addresses[1]}, "rank 0 generates"
