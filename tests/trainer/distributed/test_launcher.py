"""A launcher's file that splits no model although it seems to is reported before anything is
loaded."""

import os
import subprocess
import sys

import pytest

from verifiers_trainer.distributed.launcher import unused_split

DOCUMENTED = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
downcast_bf16: 'no'
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "zero3.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("flag", ["--config-file {}", "--config_file {}", "--config_file={}"])
def test_the_documented_file_splits_nothing_and_that_is_said(file, flag):
    path = file(DOCUMENTED)
    said = unused_split(["python", "accelerate", "launch", *flag.format(path).split(), "train.py"])
    assert said.startswith(
        f"{path} has a deepspeed_config, which has no effect with distributed_type MULTI_GPU"
    )
    assert said.endswith("Set distributed_type: DEEPSPEED to split it")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DOCUMENTED.replace("MULTI_GPU", "DEEPSPEED"), []),
        (DOCUMENTED.partition("deepspeed_config")[0], []),
        (DOCUMENTED, ["--use_deepspeed"]),
    ],
)
def test_files_that_do_what_they_say_are_not_reported(file, text, words):
    assert unused_split(["accelerate", "launch", "--config-file", file(text), *words]) is None


@pytest.mark.slow
def test_it_is_said_before_the_model_is_loaded(file, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import verifiers as vf\nvf.get_model_and_tokenizer('no/such')\n")
    path = file(DOCUMENTED.replace("num_processes: 4", "num_processes: 1"))
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--cpu",
        "--config_file",
        path,
    ]
    done = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert "deepspeed_config, which has no effect with distributed_type MULTI_GPU" in done.stderr, (
        done.stderr
    )
