"""The promise: no gradient from tokens of a policy other than the one recorded, nor older than the
lag allows.

A real trainer against a scripted vLLM server that really samples: restarted with its first weights,
dying in the middle of an update, accepting and never answering.
"""

import contextlib
import copy
import threading
import time
import urllib.error
import urllib.request

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from support.embedded import small_model
from support.fake_vllm import NO_LABEL, FakeVLLM
from support.pipeline import Policy, advance, pipeline
from support.training import small_trainer
from verifiers.errors import WeightSyncError
from verifiers_trainer.engines.vllm.engine import VLLMEngine
from verifiers_trainer.engines.vllm.weights.export import exported
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer

STEPS = 4
WAYS = [
    pytest.param(True, "0.32.0", id="adapters by name"),
    pytest.param(False, "0.33.0", id="versions in every answer"),
    pytest.param(False, "0.32.0", id="label asked for afterwards"),
]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def served(base, **options):
    return FakeVLLM(copy.deepcopy(base), build_tiny_tokenizer(), **options)


class Restarts(TrainerCallback):
    """Restarts the server after a step, and keeps the weights of every policy version and all that
    was trained."""

    def __init__(self, server, after_step):
        self.server, self.after_step, self.trainer = server, after_step, None
        self.weights, self.trained = {}, []

    def watch(self, trainer):
        self.trainer = trainer
        trainer.add_callback(self)
        self.weights[0] = {name: tensor.clone() for name, tensor in exported(trainer.model).items()}
        return trainer

    def on_step_end(self, args, state, control, **_):
        copied = {name: tensor.clone() for name, tensor in exported(self.trainer.model).items()}
        self.weights[state.global_step] = copied
        turns = [t for group in self.trainer.batch.groups for r in group.rollouts for t in r.turns]
        self.trained.append((state.global_step - 1, turns))
        if state.global_step == self.after_step:
            self.server.restart()

    def errors(self, base):
        """How far every trained token's log-probability is from that of the version it is recorded
        under."""
        messages = []
        for _, turns in self.trained:
            for turn in turns:
                model = copy.deepcopy(base).eval()
                model.load_state_dict(self.weights[int(turn.version)], strict=False)
                ids = torch.tensor([[*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()]])
                with torch.no_grad():
                    logits = model(ids, use_cache=False).logits[0].float()
                at = slice(len(turn.prompt_ids) - 1, -1)
                logprobs = torch.log_softmax(logits[at], -1).gather(
                    1, ids[0, len(turn.prompt_ids) :, None]
                )[:, 0]
                messages.append(
                    float((logprobs - torch.from_numpy(turn.sampler_logprobs)).abs().max())
                )
        return messages


def train_over_a_restart(tmp_path, lora, version, lag=0, checks_sampler=True):
    base = small_model()
    with served(base, version=version) as server:
        log = Restarts(server, after_step=2)
        settings = {
            "use_lora": lora,
            "learning_rate": 0.05,
            "max_off_policy_steps": lag,
            "max_grad_norm": 0.0,
        }
        trainer = small_trainer(
            tmp_path,
            model=copy.deepcopy(base),
            inference=server.url,
            max_steps=STEPS,
            zero_variance="keep",
            **settings,
        )
        trainer.checks_sampler = checks_sampler
        log.watch(trainer).train()
        assert server.starts == 2
        return base, server, log


# --- 37: inference restarts with base weights between steps ---------------------------------------


@pytest.mark.parametrize(("lora", "version"), WAYS)
def test_a_server_that_comes_back_with_its_first_weights_gets_the_present_ones_and_none_of_its_tokens_is_trained(
    tmp_path, lora, version, caplog
):
    base, _, log = train_over_a_restart(tmp_path, lora, version)
    assert len(log.trained) == STEPS
    assert all(int(turn.version) == made_at for made_at, turns in log.trained for turn in turns)
    assert max(log.errors(base)) < 1e-3
    assert "had lost the weights of this run" in caplog.text


def test_without_looking_whose_weights_answered_tokens_of_the_first_weights_are_trained(
    tmp_path, monkeypatch
):
    """Negative control: an answer is taken for one of the version that was pushed last."""

    async def believed(engine, server, serving, response):
        return serving.version

    monkeypatch.setattr(VLLMEngine, "sampled_by", believed)
    base, server, log = train_over_a_restart(
        tmp_path, lora=False, version="0.32.0", checks_sampler=False
    )
    assert any(NO_LABEL in answer["labels"] for answer in server.answers)
    assert max(log.errors(base)) > 0.05


# --- 38: inference dies during a push; accepts and never answers ----------------------------------


def open_engine(server, tmp_path, **settings):
    """(trainer, engine): the engine started, with version 0 pushed."""
    trainer = small_trainer(tmp_path, model=small_model(), inference=server.url, **settings)
    trainer.start_engine()
    return trainer, trainer.engine


def change(trainer):
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)


def test_a_push_that_is_never_answered_ends_within_its_bound_names_what_was_awaited_and_can_be_made_again(
    tmp_path,
):
    with served(small_model()) as server:
        trainer, engine = open_engine(server, tmp_path, sync_timeout=1.5)
        with trainer:
            change(trainer)
            server.hang, server.calls[:] = {"/collective_rpc"}, []
            started = time.monotonic()
            with pytest.raises(
                WeightSyncError, match="reloading the weights of version 1"
            ) as caught:
                engine.set_version(1)
            assert time.monotonic() - started < 1.5 + 5
            assert caught.value.stage == "reloading the weights of version 1"
            assert caught.value.url == server.url
            assert 0 < caught.value.elapsed_s < 5
            assert "/resume" not in server.paths()  # half loaded, it must not answer
            assert engine.version == 0

            server.hang = set()
            engine.set_version(1)
            assert engine.version == 1
            assert trainer.generate(["hello"])


def test_training_ends_with_that_error_and_not_with_silence(tmp_path):
    with served(small_model()) as server:
        trainer = small_trainer(
            tmp_path, model=small_model(), inference=server.url, sync_timeout=1.5
        )

        def hang(path, body):
            if path == "/collective_rpc" and server.paths().count(path) == 2:
                server.hang = {path}

        server.on_call = hang
        with pytest.raises(WeightSyncError, match="reloading the weights of version 1"):
            trainer.train()
    # the step was taken, and is not lost
    saved = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert all(
        torch.equal(saved[name], value)
        for name, value in trainer.model.state_dict().items()
        if name in saved
    )


@pytest.mark.parametrize("lora", [True, False], ids=["adapters", "files"])
def test_a_server_that_dies_during_a_push_and_comes_back_gets_the_whole_of_it_again(tmp_path, lora):
    at = "/v1/load_lora_adapter" if lora else "/collective_rpc"
    with served(small_model()) as server:
        trainer, engine = open_engine(server, tmp_path, use_lora=lora)
        with trainer:
            change(trainer)

            def die(path, body):
                if path == at:
                    server.on_call = None
                    threading.Thread(target=server.restart).start()
                    time.sleep(0.5)

            server.on_call, before = die, server.paths().count(at)
            engine.set_version(1)
            assert server.starts == 2
            assert server.paths().count(at) >= before + 2
            assert engine.version == 1
            expected = exported(trainer.model)
            loaded = server.adapters.get(engine.served_model, server.model)
            state = loaded.state_dict()
            assert all(
                torch.allclose(state[name], tensor, atol=1e-6) for name, tensor in expected.items()
            )
            trainer.generate(["hello"])
            assert NO_LABEL not in server.answers[-1]["labels"] or lora


def test_a_server_that_dies_during_a_push_and_stays_away_is_an_error_within_the_bound(tmp_path):
    with served(small_model()) as server:
        trainer, engine = open_engine(server, tmp_path, sync_timeout=2.0)
        with trainer:
            change(trainer)
            server.on_call = lambda path, body: (
                threading.Thread(target=server.kill).start() or time.sleep(0.3)
            )
            started = time.monotonic()
            with pytest.raises(WeightSyncError, match="waiting for the server to come back after"):
                engine.set_version(1)
            assert time.monotonic() - started < 2.0 + 10


def test_a_plain_call_to_such_a_server_is_still_waiting():
    """Negative control: nothing ends a call that has no deadline."""
    with served(small_model()) as server:
        server.hang = {"/pause"}
        ended = threading.Event()

        def call():
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(
                    urllib.request.Request(f"{server.url}/pause?mode=keep", method="POST")
                )
            ended.set()

        threading.Thread(target=call, daemon=True).start()
        assert not ended.wait(3.0)
    assert ended.wait(10)


# --- 39: rollouts older than the lag --------------------------------------------------------------


def overtaken(lag):
    """(ages of what the next batch trains, groups dropped) when everything finished is too old all
    of a sudden."""
    policy = Policy()
    with pipeline(policy, max_off_policy_steps=lag) as source:
        source.next_batch()
        source.settle()
        for _ in range(lag + 1):
            advance(source, policy)
        batch = source.next_batch()
        turns = [
            turn for group in batch.groups for record in group.rollouts for turn in record.turns
        ]
        return [source.pipeline.version - int(turn.version) for turn in turns], batch.stats[
            "groups/dropped_stale"
        ]


@pytest.mark.parametrize("lag", [1, 2])
def test_rollouts_older_than_the_lag_are_dropped_counted_and_never_trained(lag):
    ages, dropped = overtaken(lag)
    assert max(ages) <= lag
    assert dropped > 0


def test_without_the_age_check_they_are_trained(monkeypatch):
    """Negative control."""
    from verifiers_trainer.pipeline.pipeline import Pipeline

    monkeypatch.setattr(Pipeline, "_drop_stale", lambda self: None)
    ages, dropped = overtaken(1)
    assert max(ages) > 1
    assert dropped == 0
