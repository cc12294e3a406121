"""The real SDK and unmodified recipes of tinker-cookbook, in an environment of their own, on our
server.

Run by ``python3 tests/real/peers.py tinker-server``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from verifiers_trainer.policy.adapter_files import ADAPTER
from verifiers_trainer.policy.builtin_models import smollm2_folder

PYTHON = os.environ.get("VF_PEER_PYTHON", "")
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="run python3 tests/real/peers.py tinker-server"),
]
START_S = 180
NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""A name whose chat format, in the cookbook, is that of SmolLM2."""

PROGRAM = """
import json, sys
import tinker
from tinker import types

client = tinker.ServiceClient(base_url=sys.argv[1])
training = client.create_lora_training_client(base_model=sys.argv[2], rank=8, seed=3)
ids = list(range(5, 25))
datum = types.Datum(
    model_input=types.ModelInput.from_ints(ids[:-1]),
    loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * 19},
)
losses = []
for step in range(30):
    passed = training.forward_backward([datum, datum], "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=3e-3))
    losses.append(passed.result().metrics["loss:sum"])
    stepped.result()
    print("step", step, flush=True)
sampler = training.save_weights_and_get_sampling_client()
prompt = types.ModelInput.from_ints(ids[:8])
params = types.SamplingParams(max_tokens=6, seed=1)
sampled = sampler.sample(prompt=prompt, num_samples=3, sampling_params=params).result()
scored = sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()
state = training.save_state("last").result().path
again = client.create_training_client_from_state_with_optimizer(state)
custom = again.forward_backward_custom([datum], lambda data, logprobs: (-sum(l.sum() for l in logprobs), {}))
again.optim_step(types.AdamParams()).result()
rest = client.create_rest_client()
listed = rest.list_checkpoints(training.model_id).result().checkpoints
try:
    training.forward_backward([datum], "gspo").result()
    refused = ""
except tinker.RequestFailedError as error:
    refused = str(error)
print(json.dumps({
    "losses": losses, "tokens": [s.tokens for s in sampled.sequences], "scored": scored,
    "custom": custom.result().metrics["loss:sum"], "state": state, "refused": refused,
    "listed": [each.checkpoint_id for each in listed],
}))
"""


@contextmanager
def serving(folder: Path, model: str, *words: str, port: int = 0):
    """(process, address) of ``vf-serve``."""
    command = [sys.executable, "-m", "verifiers_trainer.cli.serve", model, "--tinker", str(folder)]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--json", *words], stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        yield process, json.loads(line)["url"]
    finally:
        process.kill()
        process.wait()


def run(folder: Path, *words: str) -> str:
    """What a program of the peer's prints."""
    environment = {**os.environ, "TINKER_API_KEY": "tml-any", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [PYTHON, "-W", "ignore", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_sdk_trains_samples_and_goes_on(tmp_path):
    with serving(tmp_path / "run", "builtin:tiny") as (_, url):
        told = json.loads(run(tmp_path, "-c", PROGRAM, url, "builtin:tiny").splitlines()[-1])
    assert told["losses"][-1] < told["losses"][0] / 2
    assert [len(tokens) for tokens in told["tokens"]] == [6, 6, 6]
    assert told["scored"][0] is None
    assert sum(told["scored"][1:]) == pytest.approx(-told["custom"], abs=1e-3)
    assert told["listed"] == ["weights/last"]
    assert "there is no loss 'gspo'" in told["refused"]
    saved = tmp_path / "run/models" / told["state"].removeprefix("tinker://")
    assert (saved / ADAPTER).is_file()


def test_a_program_goes_on_when_the_server_is_killed(tmp_path):
    with serving(tmp_path / "whole", "builtin:tiny") as (_, url):
        whole = run(tmp_path, "-c", PROGRAM, url, "builtin:tiny").splitlines()[-1]
    environment = {**os.environ, "TINKER_API_KEY": "tml-any"}
    with serving(tmp_path / "run", "builtin:tiny") as (process, url):
        program = subprocess.Popen(
            [PYTHON, "-W", "ignore", "-c", PROGRAM, url, "builtin:tiny"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        while "step 7" not in program.stdout.readline():
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(2)
        port = int(url.rpartition(":")[2])
        with serving(tmp_path / "run", "builtin:tiny", port=port):
            out, _ = program.communicate(timeout=300)
    told, expected = (json.loads(text.splitlines()[-1]) for text in (out, whole))
    assert told["losses"] == expected["losses"]
    assert told["tokens"] == expected["tokens"]


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory):
    """A folder with the tokenizer and the data sets under the names that the recipes ask for."""
    folder = tmp_path_factory.mktemp("kitchen")
    (folder / "Qwen").mkdir()
    (folder / NAME).symlink_to(smollm2_folder())
    rng = random.Random(0)
    questions, chats = [], []
    for _ in range(64):
        a, b = rng.randint(1, 4), rng.randint(1, 4)
        questions.append(
            {"question": f"How much is {a} plus {b}?", "answer": f"{a}+{b}\n#### {a + b}"}
        )
        user = {"role": "user", "content": f"Which colour has number {a}{b}?"}
        answer = {"role": "assistant", "content": "It is always blue, my friend."}
        chats.append({"messages": [user, answer]})
    for name, config, rows in (
        ("openai/gsm8k", "main", questions),
        ("HuggingFaceH4/no_robots", "default", chats),
    ):
        (folder / name).mkdir(parents=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name / "train.jsonl").write_text(lines)
        (folder / name / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {config}\n  data_files:\n  - split: train\n"
            "    path: train.jsonl\n---\n"
        )
    return folder


def recipe(folder: Path, name: str, url: str, log: Path, *words: str) -> list[dict[str, float]]:
    """The metrics of a recipe's steps."""
    run(
        folder,
        *("-m", f"tinker_cookbook.recipes.{name}"),
        *(f"base_url={url}", f"model_name={NAME}", f"log_path={log}", *words),
    )
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_unmodified_recipes_of_the_cookbook_train(kitchen, tmp_path):
    with serving(tmp_path / "run", "local", "--name", NAME, "--max-seq-len", "1024") as (_, url):
        words = ("batch_size=4", "lora_rank=8", "learning_rate=5e-4")
        steps = recipe(
            kitchen, "sl_loop", url, tmp_path / "sl", *words, "max_steps=5", "save_every=2"
        )
        assert steps[-1]["train_mean_nll"] < steps[0]["train_mean_nll"] - 0.5
        steps = recipe(
            kitchen,
            "rl_loop",
            url,
            tmp_path / "rl",
            *words,
            "group_size=4",
            "max_tokens=24",
            "max_steps=2",
            "save_every=1",
        )
        assert [step["progress/batch"] for step in steps] == [0, 1]
    saved = {path.parent.name for path in (tmp_path / "run").glob(f"models/*/*/*/{ADAPTER}")}
    assert {"000002", "000004", "final"} <= saved
