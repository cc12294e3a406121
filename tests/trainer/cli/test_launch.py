"""``vf-train`` with a server beside it, one command: real processes, a scripted
server as ``vllm``."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verifiers.errors import ConfigError
from verifiers_trainer.cli.launch import decide, trainer_words

ROOT = Path(__file__).parents[3]
FAKE = f"{sys.executable} {ROOT / 'tests/support/fake_vllm.py'}"
FILE = """
model = "builtin:tiny"
[env]
id = "digit-share"
[inference]
gpus = 1
[inference.args]
enable_auto_tool_choice = true
tool_call_parser = "hermes"
[trainer]
gpus = 1
[trainer.args]
batch_size = 8
rollouts_per_example = 4
micro_batch_size = 4
max_seq_len = 512
max_tokens = 4
max_steps = {steps}
zero_variance = "keep"
lora_rank = 4
"""

ENVIRONMENT = """
import verifiers as vf

def digits(completion, **_):
    text = completion[-1]["content"] or ""
    return sum(c.isdigit() for c in text) / max(1, len(text))

def load_environment():
    rows = [{"question": f"q{n}"} for n in range(40)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[digits]))
"""


@pytest.fixture
def start(tmp_path):
    """Starts ``vf-train`` with the fake as ``vllm``; whatever is left at the end is killed."""
    started = []

    def starter(*words, steps=2, **variables):
        (tmp_path / "run.toml").write_text(FILE.format(steps=steps))
        (tmp_path / "digit_share.py").write_text(ENVIRONMENT)
        environ = {
            **os.environ,
            "VF_VLLM": FAKE,
            "PYTHONPATH": f"{ROOT / 'tests'}:{tmp_path}",
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        command = [
            sys.executable,
            "-m",
            "verifiers_trainer.cli.train",
            "@",
            "run.toml",
            "--output-dir",
            "out",
            *words,
        ]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield starter
    for process in started:
        process.kill()
        process.wait()


def children_of(pid):
    """Processes below ``pid``, whatever session they lead."""
    pids_found, pids = [], [pid]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) in pids:
            pids_found.append(int(stat.parent.name))
    return pids_found + [below for child in pids_found for below in children_of(child)]


def all_gone(pids, within_s=30.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() and "Z" not in state_of(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def state_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


# --- the decision ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "url", "gpus", "devices", "expected"),
    [
        ("auto", None, {"inference": 2, "trainer": 1}, "0123", (("0", "1"), ("2",))),
        ("vllm", None, {}, "57", (("5",), ("7",))),
        ("auto", None, {"inference": 2, "trainer": 2}, "012", None),
        ("auto", None, {}, "", None),
        ("embedded", None, {"inference": 1}, "01", None),
        ("auto", "http://127.0.0.1:8000", {"inference": 1}, "01", None),
    ],
)
def test_devices_are_split_in_order_and_a_server_is_started_where_it_can_be(
    monkeypatch, engine, url, gpus, devices, expected
):
    monkeypatch.setenv("VF_VLLM", "vllm")
    decision = decide(engine, url, gpus, tuple(devices))
    assert decision.launches == (expected is not None)
    assert decision.url == url
    if expected:
        assert (decision.inference_devices, decision.trainer_devices) == expected


def test_a_server_that_was_asked_for_and_cannot_be_had_is_refused(monkeypatch):
    monkeypatch.delenv("VF_VLLM", raising=False)
    with pytest.raises(ConfigError, match="2 for inference and 1 for the trainer, of 2 devices"):
        decide("vllm", None, {"inference": 2}, ("0", "1"))
    with pytest.raises(ConfigError, match="needs a GPU, or a CPU build of vLLM in VF_VLLM"):
        decide("vllm", None, {}, ())
    with pytest.raises(ConfigError, match="exclude each other"):
        decide("embedded", "http://127.0.0.1:8000", {}, ())


def test_several_devices_train_in_a_process_each_also_without_a_server(monkeypatch):
    monkeypatch.setenv("VF_VLLM", "vllm")
    for engine, url in (("embedded", None), ("auto", "http://127.0.0.1:8000"), ("auto", None)):
        decision = decide(engine, url, {"trainer": 2}, ("4", "5"))
        assert (decision.launches, decision.trainer_devices) == (False, ("4", "5"))
        words = trainer_words(decision, ["@", "run.toml"])
        assert words[words.index("--num_processes") + 1] == "2"
        assert words[-2:] == ["@", "run.toml"]
    with pytest.raises(ConfigError, match=r"trainer\.gpus is 3, but there are 2 devices"):
        decide("auto", None, {"trainer": 3}, ("4", "5"))
    assert "accelerate" not in " ".join(trainer_words(decide("auto", None, {}, ("0",)), []))


# --- the processes --------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_command_trains_on_a_server_of_its_own_and_leaves_nothing(start, tmp_path):
    process = start("--engine", "vllm", "--json")
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert (summary["ok"], summary["step"]) == (True, 2)
    assert "inference | fake vllm: builtin:tiny" in err
    # the fake reads that one itself
    assert "--max-lora-rank" not in err.split("fake vllm:")[1].split("\n")[0]
    for flag in (
        "--enable-auto-tool-choice",
        "--tool-call-parser hermes",
        "--max-model-len 512",
        "--max-loras 3",
    ):
        assert flag in err
    assert "weights reach the server by lora_dir" in err
    assert "fake vllm: stopped" in err
    assert "fake vllm: builtin:tiny" in (tmp_path / "out/inference.log").read_text()
    assert (tmp_path / "out/metrics.jsonl").read_text().count("reward/mean") == 2


@pytest.mark.slow
def test_a_server_that_dies_ends_the_trainer_and_its_last_lines_are_said(start):
    process = start("--engine", "vllm", steps=10_000, FAKE_VLLM_DIES_AFTER_S="20")
    _, err = process.communicate(timeout=500)
    assert process.returncode == 3
    last = err[err.index("the inference server exited with code") :]
    assert "fake vllm: out of memory" in last
    assert "the trainer was stopped" in last


@pytest.mark.slow
def test_a_server_that_cannot_start_is_said_before_anything_is_trained(start, tmp_path):
    process = start("--engine", "vllm", FAKE_VLLM_FAILS="1")
    _, err = process.communicate(timeout=500)
    assert process.returncode == 3
    assert "fake vllm: cannot start" in err
    assert not (tmp_path / "out/metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_whatever_ends_the_command_ends_both_processes(start, tmp_path, number):
    process = start("--engine", "vllm", steps=10_000)
    metrics, deadline = tmp_path / "out/metrics.jsonl", time.monotonic() + 400
    while not (metrics.exists() and metrics.read_text().count("reward/mean")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    pids = children_of(process.pid)
    assert len(pids) >= 3  # vf-vllm, the server, the trainer
    process.send_signal(number)
    process.communicate(timeout=100)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert all_gone(pids)
