"""The dry run tries every part once, and each part that is broken is found there."""

from __future__ import annotations

from dataclasses import replace

import pytest

import verifiers as vf
from support.training import small_config, small_policy, toy_env
from verifiers_trainer.cli.preflight import CHECKS, _Probe, preflight
from verifiers_trainer.engines import inference


@pytest.fixture
def findings(tmp_path):
    """The findings of a dry run by name; of a model that says where its tokenizer is."""

    def look(env=None, model=None, **settings):
        model = model if model is not None else small_policy()
        model.config._name_or_path = model.name_or_path = "builtin:tiny"
        settings = {"report_to": "none", **settings}
        findings_made = preflight(
            model, env or toy_env(), small_config(tmp_path / "run", **settings), tmp_path / "probe"
        )
        return {finding.name: finding for finding in findings_made}

    return look


def test_everything_is_tried_and_found_in_order(findings):
    findings_made = findings()
    assert list(findings_made) == [name for name, _ in CHECKS]
    assert all(finding.ok for finding in findings_made.values()), findings_made
    assert "reward digits" in findings_made["environment"].message.replace("rewards", "reward")
    assert "serves version 1" in findings_made["weight push"].message


def test_the_forward_pass_is_checked_on_the_model_as_training_prepared_it(tmp_path, monkeypatch):
    """bf16 is accelerate's wrapper around the forward, which is there once training has begun."""
    before = _Probe.train

    def train(self, *arguments, **keywords):
        self.args.__dict__["bf16"] = self.accelerator.native_amp = True
        monkeypatch.setattr(self.accelerator.state, "_mixed_precision", "bf16")
        return before(self, *arguments, **keywords)

    monkeypatch.setattr(_Probe, "train", train)
    config = small_config(tmp_path / "run", report_to="none")
    findings_made = preflight(small_policy(), toy_env(), config, tmp_path / "probe")
    forward = next(finding for finding in findings_made if finding.name == "forward")
    assert forward.ok
    assert "the layers compute in bfloat16" in forward.message


def test_a_model_that_earns_nothing_yet_is_tried_all_the_same(findings):
    findings_made = findings(toy_env(lambda completion, **_: 0.0))
    assert findings_made["optimizer step"].ok
    assert "mean reward 0.000" in findings_made["rollouts"].message


def test_a_tracker_that_is_not_there_is_a_note(findings, monkeypatch):
    monkeypatch.setattr("verifiers_trainer.cli.preflight.find_spec", lambda _: None)
    assert findings(report_to="trackio")["tracker trackio"].ok is None


def changed_tokens(monkeypatch, change):
    """Let the engine's answers reach the trainer with other tokens."""
    plain = inference.policy_client

    class Changed:
        def __init__(self, engine):
            self.client = plain(engine)

        async def complete(self, request):
            response = await self.client.complete(request)
            return replace(response, tokens=change(response.tokens))

        async def aclose(self):
            await self.client.aclose()

    monkeypatch.setattr(inference, "policy_client", Changed)


def last(by_name):
    name, finding = list(by_name.items())[-1]
    assert finding.ok is False, by_name
    return name, finding.message


def test_log_probabilities_of_another_distribution_are_found(findings, monkeypatch):
    changed_tokens(
        monkeypatch,
        lambda tokens: replace(tokens, completion_logprobs=tokens.completion_logprobs - 0.3),
    )
    name, said = last(findings())
    assert name == "optimizer step"
    assert "sampler and trainer disagree by 0.3 nats per token" in said


def test_answers_without_tokens_are_found(findings, monkeypatch):
    changed_tokens(monkeypatch, lambda tokens: None)
    name, said = last(findings(generation_timeout=20.0))
    assert name in ("optimizer step", "tokens")
    assert said


def test_answers_that_name_no_policy_version_are_found(findings, monkeypatch):
    changed_tokens(monkeypatch, lambda tokens: replace(tokens, version=-1))
    assert "which policy version sampled its tokens" in last(findings())[1]


def test_a_tokenizer_of_another_model_is_found(findings):
    model = small_policy()
    model.resize_token_embeddings(60)
    assert last(findings(model=model)) == ("tokenizer", "110 tokens, 60 of them with an embedding")


def test_a_prompt_that_leaves_no_room_is_found(findings):
    env = vf.SingleTurnEnv(
        dataset=[{"question": "a" * 80}] * 4, rubric=vf.Rubric(funcs=[lambda completion: 0.0])
    )
    name, said = last(findings(env))
    assert name == "example"
    assert "raise max_seq_len above 99" in said
