"""The real Tinker SDK against a real server on this machine: training, the direction of an update,
resuming.

Run by ``python3 tests/real/peers.py tinker``; the server's first compilation takes a minute.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("tinker", reason="tinker is not installed: python3 tests/real/peers.py tinker")

import tinker

import verifiers as vf
from real.tinker_server import serving, tiny_checkpoint
from support.integration_envs import tool_env
from support.peer_double import differences
from verifiers.rollouts.turn import Turn
from verifiers_integrations.tinker import TinkerClient, TinkerConfig, TinkerTrainer
from verifiers_integrations.tinker.data import datum
from verifiers_trainer.algorithm.packing import pack
from verifiers_trainer.algorithm.samples import rollout_samples

pytestmark = [pytest.mark.real, pytest.mark.slow]

PACKAGE = """
import verifiers as vf

def letter(completion):
    return float(completion[-1]["content"][:1].islower())

def load_environment():
    rows = [{"question": f"say {n}"} for n in range(8)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[letter]))
"""
SETTINGS = {
    "rollouts_per_example": 16, "batch_size": 64, "max_seq_len": 64, "max_tokens": 1, "save_steps": 2, "lora_rank": 8,
    "learning_rate": 3e-3, "max_off_policy_steps": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(tmp_path_factory, model):
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    with serving(tmp_path_factory.mktemp("server"), model) as url:
        yield url


@pytest.fixture
def env(tmp_path, monkeypatch):
    (tmp_path / "tinker_letters.py").write_text(PACKAGE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return vf.load_environment("tinker-letters")


def logprobs_of(training, ids):
    """Of a text but its first token, under the weights as they are now, [T - 1]."""
    sampler = training.save_weights_and_get_sampling_client()
    logprobs = sampler.compute_logprobs(tinker.ModelInput.from_ints(ids)).result()
    return np.array(logprobs[-(len(ids) - 1) :], np.float64)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_peer_has_what_was_recorded():
    assert differences("tinker") == []


def test_a_run_learns_and_goes_on_from_its_checkpoint(tmp_path, url, model, env):
    folder = tmp_path / "run"
    settings = {"model": str(model), "base_url": url, "output_dir": str(folder), **SETTINGS}
    first = TinkerTrainer(env, TinkerConfig(max_steps=4, **settings))
    first.train()
    rows = metrics(folder)
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"]
    assert max(row["sampler/log_ratio_abs"] for row in rows) < 1e-3, (
        "the sampler and the trainer are one policy"
    )
    text = list(range(10, 26))
    before = logprobs_of(first.training, text)
    second = TinkerTrainer(env, TinkerConfig(max_steps=4, **settings))
    assert second.train(resume_from_checkpoint=True) == {}, "nothing is left to train"
    third = TinkerTrainer(env, TinkerConfig(max_steps=5, **settings))
    restored = []
    train_on = third._train_on
    third._train_on = lambda batch: (
        restored.append(logprobs_of(third.training, text)) or train_on(batch)
    )
    third.train(resume_from_checkpoint=True)
    assert restored[0] == pytest.approx(before, abs=1e-4), (
        "the service gave the trained weights back"
    )
    assert not np.allclose(before, logprobs_of(third.training, text), atol=1e-3), (
        "and they were trained further"
    )
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4, 5]


def test_log_probabilities_move_in_the_direction_of_the_advantage(url, model):
    service = tinker.ServiceClient(base_url=url)
    training = service.create_lora_training_client(base_model=str(model), rank=8)
    prompt, good, bad = [5, 6, 7, 8], [20, 21, 22], [40, 41, 42]
    before = {
        name: logprobs_of(training, prompt + ids)[3:]
        for name, ids in (("good", good), ("bad", bad))
    }
    samples = [
        *rollout_samples([Turn(prompt, good, before["good"], 0)], 1.0).samples,
        *rollout_samples([Turn(prompt, bad, before["bad"], 0)], -1.0).samples,
    ]
    (rows,) = pack(
        samples, [sample.loss_mask / 6 for sample in samples], max_tokens=7, packing=False
    )
    computed = training.forward_backward(
        [datum(tinker, row) for row in rows], "importance_sampling"
    )
    stepped = training.optim_step(tinker.AdamParams(learning_rate=1e-3))
    assert computed.result().loss_fn_outputs[0]["logprobs"].to_numpy()[3:] == pytest.approx(
        before["good"] if rows[0].token_ids[-1] == 22 else before["bad"], abs=1e-4
    )
    stepped.result()
    assert logprobs_of(training, prompt + good)[3:].sum() > before["good"].sum() + 0.01
    assert logprobs_of(training, prompt + bad)[3:].sum() < before["bad"].sum() - 0.01


async def test_the_client_samples_what_the_service_says(url, model):
    sampler = await tinker.ServiceClient(base_url=url).create_sampling_client_async(
        base_model=str(model)
    )
    client = TinkerClient(sampler, max_seq_len=2000)
    env = tool_env(1)
    (rollout,) = await env.run_group(
        group_inputs=[env.get_dataset()[0]], client=client, model="m", sampling_args={"max_tokens": 6},
        state_columns=["trajectory"],
    )  # fmt: skip
    tokens = rollout["trajectory"][0]["tokens"]
    assert rollout["error"] is None
    assert 0 < len(tokens["completion_ids"]) <= 6
    assert all(value < 0 for value in tokens["completion_logprobs"])


def test_the_command(tmp_path, url, model, env):
    arguments = "\n".join(
        f"{name} = {json.dumps(value)}" for name, value in {**SETTINGS, "max_steps": 1}.items()
    )
    file = tmp_path / "tinker.toml"
    file.write_text(
        f'model = "{model}"\n[env]\nid = "tinker-letters"\n[trainer.args]\nbase_url ='
        f' "{url}"\n{arguments}\n',
        encoding="utf-8",
    )
    words = ["@", str(file), "--trainer.args.output_dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "verifiers_integrations.tinker", *words],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 1
    assert (tmp_path / "run" / "checkpoint-1" / "tinker.json").exists()
