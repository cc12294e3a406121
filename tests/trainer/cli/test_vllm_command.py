"""``vf-vllm``: the command it builds, what it refuses, and a server that it starts and ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.version import Version

from verifiers.errors import ConfigError
from verifiers_trainer.cli import vllm_command
from verifiers_trainer.cli.vllm import COMMAND
from verifiers_trainer.cli.vllm_command import (
    Executable,
    ServerRequest,
    as_flags,
    build,
    num_gpus,
    require_device,
)

ROOT = Path(__file__).parents[3]
FAKE = f"{sys.executable} {ROOT / 'tests/support/fake_vllm.py'}"
NEW = Executable(("vllm",), Version("0.33.0"), False, "on the path")


def built(*flags, executable=NEW, **wanted):
    return build(ServerRequest("Qwen/Qwen2.5-7B-Instruct", list(flags), **wanted), executable)


SEEDS = {
    "--data-parallel-size 6 --enforce-eager --disable-log-requests": {},
    "--data-parallel-size 4 --enforce-eager --disable-log-requests": {"host": "0.0.0.0"},
    "--tensor-parallel-size 4 --max-model-len 8192 --dtype bfloat16 "
    "--gpu-memory-utilization 0.9 --enable-prefix-caching": {"host": "0.0.0.0"},
    "--tensor-parallel-size 4": {},
    "--enable-auto-tool-choice --tool-call-parser hermes": {},
}


@pytest.mark.parametrize("flags", SEEDS)
def test_every_documented_flag_is_passed_on(flags):
    made = built(*flags.split(), **SEEDS[flags])
    assert made.words[:3] == ["vllm", "serve", "Qwen/Qwen2.5-7B-Instruct"]
    kept = flags.replace(" --disable-log-requests", "")
    assert kept in " ".join(made.words)
    assert "--disable-log-requests" not in made.words
    assert any("--disable-log-requests" in note for note in made.notes) == ("log-requests" in flags)
    assert any("control routes" in note for note in made.notes) == ("host" in SEEDS[flags])


def test_what_training_needs_is_switched_on_unless_it_was_given():
    made = built(with_lora=True)
    assert made.words[made.words.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert "--enable-lora" in made.words
    assert made.variables == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    command = built("--logprobs-mode", "raw_logprobs", "--max-loras=5", "--max-lora-rank", "20")
    assert command.words.count("--logprobs-mode") == 1
    text = " ".join(command.words)
    assert "--max-loras=5" in text
    assert "--max-cpu-loras 7" in text
    assert "--max-lora-rank 32" in text
    assert "--enable-lora" not in built(with_lora=False).words
    assert "--enable-lora" not in built().words, "all weights may be trained"
    assert "--enable-lora" in built("--max-lora-rank", "16").words
    assert "--enable-lora" not in built("--no-enable-lora").words
    assert made.words[made.words.index("--generation-config") + 1] == "vllm"
    assert built("--generation-config", "auto").words.count("--generation-config") == 1
    without = built(with_updates=False)
    assert "--generation-config" not in without.words
    assert without.variables == {}
    assert "--enable-lora" not in without.words


@pytest.fixture
def gpus(monkeypatch):
    """Make the machine have a number of GPUs."""

    def have(count):
        monkeypatch.setattr(vllm_command, "num_nvidia_devices", lambda: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return have


def test_the_backend_of_weight_transfer_is_that_of_the_trainer_where_there_are_gpus(
    gpus, monkeypatch
):
    """The trainer's ``auto`` takes ipc on a machine with one GPU, and nccl between GPUs."""
    gpus(2)
    assert '{"backend": "nccl"}' in built().words
    assert any("another GPU (nccl)" in note for note in built().notes)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # the trainer has the other
    assert '{"backend": "nccl"}' in built().words
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in built().variables
    older = Executable(("vllm",), Version("0.12"), False, "")
    assert "--weight-transfer-config" not in built(executable=older).words
    gpus(1)
    beside_a_trainer = built("--gpu-memory-utilization", "0.3")
    for made in (
        built(),
        beside_a_trainer,
        built("--weight-transfer-config", '{"backend": "ipc"}'),
    ):
        assert made.words.count('{"backend": "ipc"}') == 1
        assert made.variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert any("the only GPU here (ipc)" in note for note in built().notes)
    as_set = built("--weight-transfer-config", '{"backend": "nccl"}')
    assert not any("weights are taken" in note for note in as_set.notes)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "--weight-transfer-config" not in built().words


def test_the_server_module_takes_the_model_as_a_flag():
    module = Executable(
        ("python", "-m", "vllm.entrypoints.openai.api_server"), Version("0.32"), True, "as given"
    )
    assert built(executable=module).words[3:5] == ["--model", "Qwen/Qwen2.5-7B-Instruct"]


def test_misspelt_flags_are_named_together_and_what_follows_a_bare_dash_is_not_looked_at():
    with pytest.raises(ConfigError) as caught:
        built(
            "--tensor-paralel-size",
            "4",
            "--quux",
            "1",
            executable=Executable(("true",), Version("0.33"), False, ""),
        )
    assert (
        "--tensor-paralel-size is not a flag of vLLM, did you mean --tensor-parallel-size"
        in str(caught.value)
    )
    assert "--quux" in str(caught.value)
    assert built(unchecked=["--quux", "1"]).words[-2:] == ["--quux", "1"]


def test_a_flag_that_only_the_installed_server_knows_is_taken(tmp_path):
    script = tmp_path / "vllm"
    script.write_text("#!/bin/sh\necho 'options: --brand-new X'\n")
    script.chmod(0o755)
    made = built(
        "--brand-new", "1", executable=Executable((str(script),), Version("0.40"), False, "")
    )
    assert "--brand-new" in made.words


def test_settings_of_a_file_are_flags():
    settings = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.9,
    }
    assert as_flags(settings) == [
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--gpu-memory-utilization",
        "0.9",
    ]


# --- which executable -----------------------------------------------------------------------------


def test_the_executable_is_the_one_given_else_found_else_made_by_uv(monkeypatch, tmp_path):
    monkeypatch.delenv("VF_VLLM", raising=False)
    monkeypatch.setattr(vllm_command, "find_spec", lambda name: None)
    there = {"uv": "/usr/bin/uv"}
    monkeypatch.setattr(vllm_command.shutil, "which", lambda name: there.get(name))
    assert vllm_command.find_executable(None).words[:3] == ("/usr/bin/uv", "tool", "run")
    there.clear()
    with pytest.raises(ConfigError, match="neither is uv"):
        vllm_command.find_executable(None)
    with pytest.raises(ConfigError, match="there is no command 'elsewhere/vllm'"):
        vllm_command.find_executable("elsewhere/vllm")
    there.update({sys.executable: sys.executable})
    assert vllm_command.find_executable(None, {"VF_VLLM": f"{sys.executable} x.py"}).words == (
        sys.executable,
        "x.py",
    )


def test_without_a_gpu_and_a_cpu_build_one_sentence_says_what_to_do():
    with pytest.raises(
        ConfigError,
        match="needs a GPU, and none is visible here: train without one on the embedded",
    ):
        require_device(NEW, {"CUDA_VISIBLE_DEVICES": ""})
    require_device(NEW, {"CUDA_VISIBLE_DEVICES": "3"})
    require_device(Executable(("vllm",), Version("0.32"), True, ""), {"CUDA_VISIBLE_DEVICES": ""})
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "0, 1"}) == 2
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0


# --- the command ----------------------------------------------------------------------------------


def test_dry_run_prints_the_command_alone_and_as_json(capfd, monkeypatch):
    monkeypatch.setenv("VF_VLLM", FAKE)
    assert COMMAND.run(["--model", "m", "--port", "8123", "--enforce-eager", "--dry-run"]) == 0
    assert capfd.readouterr().out.startswith("VLLM_SERVER_DEV_MODE=1 ")
    assert COMMAND.run(["m", "--port", "8123", "--json", "--dry-run", "--", "--anything"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["url"] == "http://127.0.0.1:8123"
    assert said["command"][2:4] == ["serve", "m"]
    assert said["command"][-1] == "--anything"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the model to serve"),
        (["--model", "m", "n"], "two models"),
        (["--model", "m", "--port", "x"], "--port"),
        (["--model", "m", "--tensor-paralel-size", "2"], "did you mean --tensor-parallel-size"),
    ],
)
def test_what_cannot_be_used_is_one_paragraph_and_exit_2(capsys, monkeypatch, words, said):
    monkeypatch.setenv("VF_VLLM", "true")
    assert COMMAND.run(words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_server_is_started_reported_and_ended_with_the_command(tmp_path, number):
    environ = {
        **os.environ,
        "VF_VLLM": FAKE,
        "PYTHONPATH": str(ROOT / "tests"),
        "PYTHONWARNINGS": "ignore",
    }
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "verifiers_trainer.cli.vllm",
            "--model",
            "builtin:tiny",
            "--port",
            str(_port()),
        ],
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = ""
    for line in process.stderr:
        said += line
        if "ready: http://127.0.0.1:" in line:
            break
    assert "ready" in said, said
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    process.send_signal(number)
    process.stderr.read()
    code = process.wait(60)
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    deadline = time.monotonic() + 30
    while Path(f"/proc/{children[0]}").exists():
        assert time.monotonic() < deadline, "the server outlived the command"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_server_that_fails_is_exit_3(tmp_path):
    environ = {
        **os.environ,
        "VF_VLLM": FAKE,
        "PYTHONPATH": str(ROOT / "tests"),
        "FAKE_VLLM_FAILS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "verifiers_trainer.cli.vllm", "--model", "builtin:tiny", "--json"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 3
    assert "cannot start" in done.stderr
    assert json.loads(done.stdout)["exit_code"] == 3


def _port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
