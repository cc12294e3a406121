"""A server that cuts or sharpens the distribution after it computed its log-probabilities is found by
the tokens that it draws."""

import logging

import numpy as np
import pytest
import torch

from support.embedded import small_model
from support.fake_vllm import FakeVLLM
from support.training import metrics_of, run, small_trainer
from verifiers.errors import ConfigError
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.run.sampled_tokens import MAX_DRAWS, Position, best_position
from verifiers_trainer.settings.sampling import plain

STEPS = {"max_steps": 2, "zero_variance": "keep", "max_off_policy_steps": 0, "max_seq_len": 200}


def uneven_model():
    """Its logits differ as those of a trained model do: log-probabilities vary by 2 nats."""
    model = small_model()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    return model


def trained(server, folder, model, **settings):
    return small_trainer(folder, model=model, inference=server.url, **{**STEPS, **settings})


@pytest.fixture
def model():
    return uneven_model()


@pytest.mark.parametrize(
    ("forced", "said"),
    [
        ({"top_p": 0.95}, r"look cut off: the likeliest tokens that sum to 0\.9"),
        ({"temperature": 0.97}, r"look sampled at temperature 0\.9[5-8]"),
        ({"top_k": 20}, "look cut off"),
    ],
)
def test_a_sampler_of_its_own_ends_the_run_though_log_probabilities_agree(
    tmp_path, model, forced, said
):
    with FakeVLLM(model, build_tiny_tokenizer()) as server:
        server.forced = forced
        with pytest.raises(ConfigError, match=said) as raised:
            trained(server, tmp_path, model).train()
        assert "the distribution that the settings name" in str(raised.value)


def test_without_the_draws_nothing_else_sees_it(tmp_path, model, monkeypatch):
    """Negative control."""
    monkeypatch.setattr("verifiers_trainer.run.sampled_tokens.SampledTokens.ask", lambda *_: None)
    with FakeVLLM(model, build_tiny_tokenizer()) as server:
        server.forced = {"temperature": 0.97}
        assert len(run(trained(server, tmp_path, model)).steps) == 2


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_p": 0.9}])
def test_defaults_of_the_model_change_nothing_and_every_request_says_the_same(
    tmp_path, model, settings, caplog
):
    caplog.set_level(logging.INFO)
    with FakeVLLM(model, build_tiny_tokenizer()) as server:
        server.defaults = {
            "top_p": 0.8,
            "top_k": 20,
            "repetition_penalty": 1.05,
            "temperature": 0.6,
        }
        run(trained(server, tmp_path, model, **settings))
    names = plain(1.0)
    rollout = next(b for b in server.bodies if b.get("max_completion_tokens", 0) > 1)
    assert {name: rollout[name] for name in names} == plain(1.0) | settings
    for body in server.bodies:  # probe, canary and draws, too
        others = {"temperature": body["temperature"], "top_p": body["top_p"]}
        assert {name: body[name] for name in names} == plain(1.0) | settings | others
        assert others["temperature"] in (rollout["temperature"], 1.0, 0.1)
        assert others["top_p"] in (rollout["top_p"], 1.0)
    (step, _) = [line for line in metrics_of(tmp_path) if "loss" in line]
    assert step["sampler/draws"] >= 512
    assert abs(step["sampler/draws_temperature"] / rollout["temperature"] - 1) < 0.02
    assert step["sampler/draws_kept"] > 0.999
    assert "tokens drawn at one position" in caplog.text


def test_a_server_that_takes_no_n_is_a_warning(tmp_path, model, caplog):
    class Single(FakeVLLM):
        async def _v1_completions(self, body, request):
            return await super()._v1_completions({**body, "n": 1}, request)

    with Single(model, build_tiny_tokenizer()) as server:
        assert len(run(trained(server, tmp_path, model)).steps) == 2
    assert "the sampled tokens were not tested: " in caplog.text


# --- the statistics -------------------------------------------------------------------------------


def zipf(size=2000, power=1.3):
    p = 1 / np.arange(1, size + 1) ** power
    return p / p.sum()


def sampled(p, count, temperature=1.0, top_p=1.0, seed=0):
    q = p ** (1 / temperature)
    q = np.where(p.cumsum() - p < top_p, q, 0.0)
    return np.random.default_rng(seed).choice(len(p), count, p=q / q.sum())


def test_false_alarms_are_rare_and_what_shall_be_told_is():
    position = Position([1], zipf())
    n = position.num_draws
    assert n < MAX_DRAWS
    assert position.smallest_change == pytest.approx(0.03, rel=0.01)
    looks = [position.compare(sampled(position.probabilities, n, seed=s))[1] for s in range(200)]
    assert looks == [""] * 200
    for seed in range(20):
        cut = position.compare(sampled(position.probabilities, n, top_p=0.95, seed=seed))
        assert cut[1].startswith("cut off")
    sharper = [position.compare(sampled(zipf(), n, 0.97, seed=seed))[1] for seed in range(20)]
    assert sum("temperature 0.9" in text for text in sharper) >= 18
    penalised = zipf() * np.where(
        np.arange(2000) % 3, 1.0, 0.5
    )  # as repetition_penalty lowers some
    penalised /= penalised.sum()
    drawn = np.random.default_rng(0).choice(2000, n, p=penalised)
    assert position.compare(drawn)[1].startswith("sampled ")


def test_an_even_distribution_says_that_it_tells_little():
    even = Position([1], np.full(100, 0.01))
    assert even.num_draws == MAX_DRAWS
    assert even.smallest_change > 1
    assert even.compare(np.arange(MAX_DRAWS) % 100)[1] == ""


def test_the_position_is_where_log_probabilities_vary_most(model):
    from verifiers_trainer.policy.logprobs import install_logprob_forward

    install_logprob_forward(model)
    ids = list(range(20, 60))
    best = best_position(model, ids, 0.7)
    assert best.prompt == ids[: len(best.prompt)]
    assert best.probabilities.sum() == pytest.approx(1)
    assert all(best.variance >= best_position(model, ids[:n], 0.7).variance - 1e-6 for n in (5, 30))
