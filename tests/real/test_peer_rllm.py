"""The scripts of ``examples/verifiers_env`` through the real hydra, on rLLM's recorded shapes of
both ages.

Run by ``python3 tests/real/peers.py rllm``. rLLM itself is on no package index: its trainer here
plays one batch and says what it was given. hydra refuses a key that a recorded configuration does
not have.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hydra", reason="hydra is not installed: python3 tests/real/peers.py rllm")

from support.rllm_package import write

pytestmark = pytest.mark.real
EXAMPLE = Path(__file__).parents[2] / "examples/verifiers_env"


@pytest.fixture(scope="module", params=["unified", "older"])
def path(request, tmp_path_factory):
    return request.param, str(write(tmp_path_factory.mktemp(request.param), request.param))


def run(path, script, *words, cwd):
    variables = {**os.environ, "PYTHON": sys.executable, "ENV_ID": "alphabet-sort", "MODEL": "m"}
    variables["PYTHONPATH"] = os.pathsep.join([path, str(EXAMPLE.parents[1] / "tests")])
    command = ["bash", EXAMPLE / script, f"hydra.run.dir={cwd}", *words]
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, check=False, timeout=300
    )


def told_by(ran):
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.partition("TRAINED ")[2])


def test_the_quick_test(path, tmp_path):
    age, folder = path
    told = told_by(run(folder, "test_train.sh", cwd=tmp_path))
    config = told["config"]
    ours = config["rllm"] if age == "unified" else config
    assert (told["backend"], told["train"], len(told["steps"])) == ("tinker", 20, 4)
    assert (ours["trainer"]["total_epochs"], ours["trainer"]["logger"]) == (1, ["console", "wandb"])
    assert (config["model"], config["training"]["group_size"]) == (
        {"name": "m", "lora_rank": 32},
        16,
    )
    assert config["data"]["train_batch_size"] == 4
    sampling = ours["rollout"]["train"] if age == "unified" else config["sampling"]
    assert sampling["temperature"] == 1.0


def test_the_verl_script_and_the_guides_arguments(path, tmp_path):
    age, folder = path
    words = [
        "+verifiers.env_args.max_turns=5",
        '+verifiers.env_args.difficulty="hard"',
        "+verifiers.max_samples=3",
    ]
    told = told_by(run(folder, "train_verifiers.sh", *words, cwd=tmp_path))
    config = told["config"]
    assert (told["backend"], told["train"], told["turns"]) == ("verl", 3, 5)
    assert config["actor_rollout_ref"]["model"]["path"] == "m"
    assert (config["trainer"]["n_gpus_per_node"], config["trainer"]["total_epochs"]) == (8, 10)
    assert config["data"]["train_batch_size"] == 64
    assert age == "unified" or config["rllm"]["workflow"]["use_workflow"] is True


def test_tinker_at_another_temperature_is_one_sentence(path, tmp_path):
    ran = run(path[1], "train_verifiers_tinker.sh", "sampling.temperature=0.6", cwd=tmp_path)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
    assert "trains only on samples of temperature 1.0" in ran.stderr


def test_an_environment_that_is_not_there_is_one_sentence(path, tmp_path):
    ran = run(path[1], "train_verifiers.sh", "verifiers.env_id=alphabet-sorte", cwd=tmp_path)
    assert (ran.returncode, "Traceback" in ran.stderr) == (2, False), ran.stderr
    assert "alphabet-sort" in ran.stderr
