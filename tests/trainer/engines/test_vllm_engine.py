"""The vLLM engine over HTTP: what it asks of a server, whose weights answered, several servers,
settings."""

import asyncio
import copy

import numpy as np
import openai
import pytest
import torch

from support.embedded import small_model
from support.fake_vllm import FakeVLLM
from support.training import run, small_config, small_trainer, toy_env
from verifiers.errors import ConfigError, EndpointUnreachable, WeightSyncError
from verifiers.types import ModelRequest, UserMessage
from verifiers_trainer.engines.inference import choose_engine, open_engine
from verifiers_trainer.engines.protocol import Engine
from verifiers_trainer.engines.vllm.control import server_urls
from verifiers_trainer.engines.vllm.engine import VersionedClient
from verifiers_trainer.engines.vllm.features import FIRST, features_of, parse_version
from verifiers_trainer.engines.vllm.labels import LabelReader
from verifiers_trainer.engines.vllm.weights.opening import INFERENCE_DEVICES, shares_device
from verifiers_trainer.engines.vllm.weights.protocol import run_and_version
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.run.context import server_of
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.trainer import RLTrainer


def served(**options):
    return FakeVLLM(small_model(), build_tiny_tokenizer(), **options)


def trainer_of(server, tmp_path, **settings):
    settings = {"inference": server.url, "use_lora": True, "zero_variance": "keep", **settings}
    return small_trainer(tmp_path, model=small_model(), **settings)


# --- what a server must be ------------------------------------------------------------------------


def test_features_come_with_versions():
    assert features_of(parse_version("0.11.2")) == set()
    assert features_of(None) == features_of(parse_version("99.0.0")) == set(FIRST)
    for name, first in FIRST.items():
        assert name in features_of(parse_version(first))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"raw_logprobs": True}, "raw log-probabilities.*--logprobs-mode processed_logprobs"),
        ({"token_ids": False}, "returns no token ids"),
        ({"version": "0.9.1"}, "vLLM 0.9.1, which returns no token ids; use 0.11"),
    ],
)
def test_a_server_whose_tokens_cannot_be_trained_on_is_refused_at_its_first_completion(
    tmp_path, options, said
):
    with served(**options) as server, trainer_of(server, tmp_path) as trainer:
        with pytest.raises(ConfigError, match=said):
            trainer.start_engine()
        assert server.adapters == {}


def test_another_tokenizer_is_found_by_the_first_token_that_differs(tmp_path):
    with served() as server, trainer_of(server, tmp_path) as trainer:
        server.tokenizer = copy.deepcopy(server.tokenizer)
        server.tokenizer.chat_template = "X" + server.tokenizer.chat_template
        with pytest.raises(ConfigError, match="at place 0 it has"):
            trainer.start_engine()


def test_nothing_that_answers_is_one_sentence_within_the_bound(tmp_path):
    trainer = small_trainer(tmp_path, inference="http://127.0.0.1:9/v1", vllm_server_timeout=0.5)
    with trainer:
        engine = open_engine(trainer.model, trainer.tokenizer, trainer.args, trainer.env)
        with pytest.raises(
            EndpointUnreachable, match=r"no inference server answers at http://127\.0\.0\.1:9"
        ):
            engine.start(0.5)


def test_a_server_without_the_routes_for_weights_says_so_before_training(tmp_path):
    with (
        served(dev_mode=False) as server,
        trainer_of(server, tmp_path, use_lora=False, sync_timeout=3.0) as trainer,
    ):
        with pytest.raises(WeightSyncError, match=r"pausing generation.*HTTP 404"):
            trainer.train()


def test_a_server_without_adapters_gets_the_merged_weights_unless_adapters_are_asked_for(
    tmp_path, caplog
):
    caplog.set_level("INFO")
    with served(lora=False) as server:
        log = run(trainer_of(server, tmp_path, use_lora=True, max_steps=2, max_off_policy_steps=0))
        assert log.steps[-1]["sampler/log_ratio_abs"] < 1e-5
        assert server.adapters == {}
        assert "the adapter is merged, since" in caplog.text
        assert (
            "was started without adapters (vf-vllm --max-lora-rank N switches them on)"
            in caplog.text
        )
        with trainer_of(
            server, tmp_path / "asked", use_lora=True, weight_sync="lora_dir"
        ) as trainer:
            with pytest.raises(
                ConfigError, match=r"weight_sync='lora_dir' cannot be used: .* without adapters"
            ):
                trainer.start_engine()


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "version"), [(True, "0.12.0"), (True, "0.33.0"), (False, "0.32.0"), (False, "0.33.0")]
)
def test_every_completion_has_the_version_that_sampled_it_and_no_token_is_older_than_the_lag(
    tmp_path, lora, version
):
    with served(version=version) as server:
        server.token_delay_s = 0.01  # requests in flight while weights change
        log = run(trainer_of(server, tmp_path, use_lora=lora, max_steps=4, max_off_policy_steps=1))
        assert len(log.steps) == 4
        assert all(step["staleness/max"] <= 1 for step in log.steps)
        assert log.steps[0]["sampler/log_ratio_abs"] < 1e-5
        assert all(step["time/sync"] > 0 for step in log.steps)
    if lora:
        assert len(set(server.unloaded)) == len(server.unloaded)
    else:
        assert server.paths().count("/resume") == server.paths().count("/pause") == 5


@pytest.mark.parametrize(("version", "versions"), [("0.33.0", {0, 1}), ("0.32.0", {0})])
def test_an_answer_during_an_update_has_a_version_per_token_where_the_server_reports_it(
    tmp_path, version, versions
):
    """Without the server's spans the whole answer counts as old as its beginning."""
    with served(version=version) as server, trainer_of(server, tmp_path, use_lora=False) as trainer:
        client, server.token_delay_s = trainer.client, 0.05

        async def answered():
            request = ModelRequest(
                [UserMessage("count")], "", sampling_args={"max_tokens": 12}, seed=5
            )
            answer = asyncio.create_task(client.complete(request))
            while not server.sessions:  # noqa: ASYNC110 - the server runs in another thread
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.15)
            await asyncio.to_thread(update)
            return await answer

        def update():
            with trainer.server.weight_update(1), torch.no_grad():
                next(iter(trainer.model.parameters())).add_(0.1)

        server.sessions.clear()
        response = asyncio.run(answered())
    assert set(np.atleast_1d(response.tokens.version).tolist()) == versions
    assert response.version == 0


def test_it_is_an_engine_and_leaves_nothing_behind(tmp_path):
    with served() as server, trainer_of(server, tmp_path) as trainer:
        trainer.start_engine()
        engine = trainer.engine
        assert isinstance(engine, Engine)
        assert engine.health()
        assert engine.version == 0
        assert list(server.adapters) == [engine.served_model]
        trainer.close()
        assert server.adapters == {}
        assert not engine.health()
        with pytest.raises(EndpointUnreachable):
            engine.base_url


def test_weights_that_did_not_change_are_not_pushed_again_and_changed_ones_are_under_a_new_name(
    tmp_path,
):
    with served() as server, trainer_of(server, tmp_path) as trainer:
        trainer.start_engine()
        first = trainer.engine.served_model
        trainer.engine.set_version(0)
        assert trainer.engine.served_model == first
        with torch.no_grad():
            next(p for p in trainer.model.parameters() if p.requires_grad).add_(0.1)
        trainer.engine.set_version(0)
        assert trainer.engine.served_model != first


class Padded(FakeVLLM):
    """Answers every fifth completion with a token id that the trained model does not have."""

    number = 0

    def _reply(self, prompt, made, choice, body):
        reply = super()._reply(prompt, made, choice, body)
        self.number += 1
        if self.number % 5 == 0:
            choice["token_ids"] = [*choice["token_ids"][:-1], 4000]
        return reply


def test_a_token_id_beyond_the_vocabulary_is_a_fault_of_its_rollout(tmp_path, monkeypatch, caplog):
    with Padded(small_model(), build_tiny_tokenizer()) as server:
        log = run(trainer_of(server, tmp_path / "a", max_error_fraction=0.5))
        assert len(log.steps) == 2
        assert sum(step["rollouts/errors"] for step in log.steps) > 0
        assert "4000 is no token id (0 to" in caplog.text

        monkeypatch.setattr(VersionedClient, "_check_vocabulary", lambda *_: None)
        with pytest.raises(IndexError):  # negative control
            run(trainer_of(server, tmp_path / "b", max_error_fraction=0.5))


def test_weights_move_every_second_step_when_that_is_asked_for(tmp_path):
    with served() as server:
        settings = {"sync_every": 2, "max_off_policy_steps": 1, "max_steps": 4}
        log = run(trainer_of(server, tmp_path, **settings))
        assert all(step["staleness/max"] <= 1 for step in log.steps)
        assert server.paths().count("/v1/load_lora_adapter") == 3  # versions 0, 2, 4
    with pytest.raises(ConfigError, match=r"sync_every is 3.*use at most 2"):
        small_config(tmp_path, sync_every=3, max_off_policy_steps=1).resolve()


def test_several_servers_all_follow_and_a_rollout_stays_with_one(tmp_path):
    with served() as first, served() as two:
        url = f"{first.url},{two.url}"
        log = run(trainer_of(first, tmp_path, inference=url, max_steps=2))
        assert len(log.steps) == 2
        for server in (first, two):
            assert server.paths().count("/v1/load_lora_adapter") == 3
            assert [session for session in server.sessions if session]
        assert not {s for s in first.sessions if s} & {s for s in two.sessions if s}


def test_a_client_of_the_server_is_enough(tmp_path):
    with served() as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY")
        config = small_config(tmp_path, use_lora=True, zero_variance="keep")
        with RLTrainer(
            small_model(), toy_env(), config, build_tiny_tokenizer(), client=client
        ) as trainer:
            trainer.train()
        assert server.paths().count("/v1/load_lora_adapter") == 3
    with pytest.raises(ConfigError, match="no base_url"):
        server_of(object())


# --- the label, asked for once for many -----------------------------------------------------------


async def test_many_completions_share_one_question_that_was_sent_after_each_of_them():
    asked, release = [], asyncio.Event()

    async def read():
        asked.append(len(asked))
        number = len(asked)
        await release.wait()
        return str(number)

    reader = LabelReader(read)
    first = asyncio.ensure_future(reader.after_now())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(asked) == 1
    later = [asyncio.ensure_future(reader.after_now()) for _ in range(20)]
    await asyncio.sleep(0.01)
    assert len(asked) == 1  # the one under way was sent before they came
    release.set()
    assert await first == "1"
    assert set(await asyncio.gather(*later)) == {"2"}
    assert len(asked) == 2


# --- settings -------------------------------------------------------------------------------------


def test_addresses_of_servers():
    assert server_urls("0.0.0.0:8000") == ["http://127.0.0.1:8000"]
    assert server_urls("http://a:1/v1/,http://b:2/prefix/v1") == ["http://a:1", "http://b:2/prefix"]
    for wrong in ("", "ftp://x", "http://"):
        with pytest.raises(ConfigError):
            server_urls(wrong)


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, None),
        ({"inference": "embedded"}, None),
        ({"inference": "vllm"}, "http://0.0.0.0:8000"),
        ({"vllm_server_port": 8100}, "http://0.0.0.0:8100"),
        ({"vllm_server_host": "gpu1", "inference": "vllm"}, "http://gpu1:8000"),
        ({"inference": "http://gpu1:9/v1"}, "http://gpu1:9/v1"),
        ({"inference_base_url": "http://gpu2:9/v1"}, "http://gpu2:9/v1"),
    ],
)
def test_where_to_sample_follows_from_the_settings(settings, url):
    assert RLConfig(**settings).server_url == url


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"inference": "embeded"}, 'did you mean "embedded"'),
        ({"inference_base_url": "gpu:8000"}, "must be a URL"),
        ({"inference": "embedded", "inference_base_url": "http://gpu:8000"}, "give one of them"),
        (
            {"inference": "vllm", "deterministic": True},
            "deterministic=True needs the embedded engine",
        ),
        ({"weight_sync": "ncl"}, "not 'ncl', did you mean \"nccl\""),
        ({"sync_timeout": 0}, "sync_timeout must be a number from 0.001 to 1000000000, not 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_together(tmp_path, settings, said):
    with pytest.raises(ConfigError, match=said):
        small_config(tmp_path, **settings).resolve()


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_two_runs_that_took_one_server_at_the_same_time_never_take_the_others_tokens(
    tmp_path, version
):
    """Both looked before either had pushed. Each repairs what the other did, and gives up after
    some repairs."""

    def first_token(trainer):
        arguments = {"return_weight_versions": True, "max_tokens": 2}
        request = ModelRequest([UserMessage("a")], "", sampling_args=arguments, require_tokens=True)
        response = asyncio.run(trainer.engine.open_client().complete(request))
        owner, _ = run_and_version(int(server.label))
        return owner, response.version

    settings = {"use_lora": False, "sync_timeout": 10.0}
    with served(version=version) as server:
        first, two = (trainer_of(server, tmp_path / name, **settings) for name in "ab")
        with first, two:
            first.start_engine()
            two.start_engine()
            runs = first.engine.run, two.engine.run
            assert [first_token(trainer) for trainer in (first, two, first)] == [
                (runs[0], 0),
                (runs[1], 0),
                (runs[0], 0),
            ]

            repair = first.engine._send_again

            def and_lose_it_again(*args):
                repair(*args)
                server.label = str(int(server.label) ^ 1 << 60)

            first.engine._send_again = and_lose_it_again
            server.label = str(int(server.label) ^ 1 << 60)
            with pytest.raises(
                WeightSyncError, match=r"again after 3 repairs.*give each a server of its own"
            ):
                first_token(first)


def test_a_server_that_is_there_by_chance_is_used_when_it_serves_the_same_model_and_no_other_run(
    caplog,
):
    model = small_model()
    with served(name="org/tiny") as server:
        config = RLConfig()
        # as if 8000 were that port, without asking for it
        config.derive(vllm_server_port=server.port)
        model.name_or_path = "elsewhere/tiny"
        assert choose_engine(model, config) == (server.url, "it serves the same model")
        server.adapters["policy-3f2-v7"] = server.model
        assert choose_engine(model, config) == (
            None,
            f"the server at {server.url} belongs to another run",
        )
        assert "has the weights of another run (policy-3f2-v7), so it is not used" in caplog.text
        server.adapters.clear()
        server.label = "3145735"
        assert choose_engine(model, config)[0] is None
        model.name_or_path = "other"
        assert choose_engine(model, config)[0] is None
    url, reason = choose_engine(model, config)
    assert url is None
    assert "no server answers" in reason


def test_a_device_is_shared_when_a_launcher_says_so_or_there_is_only_one(monkeypatch):
    url = ["http://127.0.0.1:8000"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    for devices, shared in (("0,1", False), ("2", True), ("3", False)):
        monkeypatch.setenv(INFERENCE_DEVICES, devices)
        assert shares_device(url, "cuda:0") == shared
    assert not shares_device(["http://elsewhere:8000"], "cuda:0")
    assert not shares_device(url, "cpu")
    monkeypatch.delenv(INFERENCE_DEVICES)
    for count, shared in ((1, True), (2, False)):
        monkeypatch.setattr(
            "verifiers_trainer.engines.vllm.weights.opening._num_physical_devices",
            lambda count=count: count,
        )
        assert shares_device(url, "cuda:0") == shared
