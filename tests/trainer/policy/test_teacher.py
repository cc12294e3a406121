"""On-policy distillation: the teacher scores what the policy sampled, in this process or on a
server."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.training import run, small_config, small_policy, small_trainer, toy_env
from verifiers.errors import ConfigError, EndpointUnreachable, RunMismatch
from verifiers_trainer.algorithm.packing import forward_arguments, pack
from verifiers_trainer.algorithm.samples import Sample
from verifiers_trainer.algorithm.teacher_view import teacher_views
from verifiers_trainer.engines.embedded.engine import EmbeddedEngine
from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer
from verifiers_trainer.policy.loading import get_model
from verifiers_trainer.policy.logprobs import install_logprob_forward, states_of
from verifiers_trainer.policy.teacher import EndpointTeacher, Teacher
from verifiers_trainer.settings.config import RLConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher with opinions: other random weights, and sharper."""
    folder = tmp_path_factory.mktemp("teacher")
    model, tokenizer = small_policy(seed=5), build_tiny_tokenizer()
    with torch.no_grad():
        model.model.norm.weight *= 12  # a sharper distribution than the policy's
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def distilled(path, folder, **settings):
    return small_trainer(path, **{"loss": "distill"} | settings, teacher=str(folder))


def scored_rows(trainer):
    """The packed rows of a step with the teacher's log-probabilities."""
    kept = []
    step = trainer.training_step
    trainer.training_step = lambda model, inputs, n=None: (
        step(model, inputs, n),
        kept.extend(inputs.rows_R[0]),
    )[0]
    run(trainer)
    return kept


def divergence(policy, teacher, rows):
    """KL(policy‖teacher) in the mean over the tokens with loss."""
    for model in (policy, teacher):
        install_logprob_forward(model)
    terms = []
    with torch.no_grad():
        for row in rows:
            tensors = row.to_tensors()
            states = [states_of(teacher, view, "cpu") for view in teacher_views(row)]
            out = policy(**forward_arguments(tensors), teachers=states)
            terms.append(out.reverse_kl[tensors["loss_mask"]])
    return float(torch.cat(terms).mean())


@pytest.mark.parametrize(  # of one noisy, one not
    ("loss", "rate", "steps", "batch"), [("distill", 2e-2, 30, 32), ("gkd", 1e-2, 15, 8)]
)
def test_the_policy_comes_nearer_to_its_teacher_whatever_the_rewards(
    tmp_path, folder, loss, rate, steps, batch
):
    """All rewards are equal: a policy gradient would have nothing to learn from."""
    env = toy_env(reward=lambda **_: 1.0)
    settings = {
        "learning_rate": rate,
        "max_steps": steps,
        "batch_size": batch,
        "deterministic": True,
    }
    trainer = distilled(tmp_path, folder, env=env, loss=loss, **settings)
    log = run(trainer)
    rows, teacher = trainer.batch.rows_R[0], get_model(str(folder))
    nearer = divergence(trainer.model, teacher, rows)
    before = divergence(small_policy(), teacher, rows)
    assert nearer < 0.8 * before
    assert log.steps[0]["groups/dead"] == 0


@pytest.mark.parametrize("num_chunks", [None, 3], ids=["stored", "recomputed"])
def test_the_divergences_over_the_vocabulary_are_those_of_the_stock_models(num_chunks):
    """Value and gradient in float64, at a temperature; of no other token than those with loss."""
    policy, teacher = small_policy().double(), small_policy(seed=5).double()
    teacher.model.norm.weight.data *= 12
    ids = torch.randint(4, 100, (1, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(12) >= 5
    log_pi, log_t = (
        m(input_ids=ids).logits[0, 4:-1].div(0.7).log_softmax(-1) for m in (policy, teacher)
    )
    expected = (log_pi.exp() * (log_pi - log_t)).sum(-1), (log_t.exp() * (log_t - log_pi)).sum(-1)
    parameters = list(policy.parameters())
    gradients = [
        torch.autograd.grad(terms_T.sum(), parameters, retain_graph=True) for terms_T in expected
    ]
    install_logprob_forward(policy)
    install_logprob_forward(teacher)
    arguments = {
        "input_ids": ids,
        "loss_mask": mask,
        "inv_temperature": 1 / 0.7,
        "num_chunks": num_chunks,
    }
    sample = Sample(
        ids[0].int().numpy(),
        mask.numpy(),
        *(np.zeros(12, kind) for kind in (np.float32, np.int32, np.float32)),
    )
    (row,) = pack([sample], [mask.numpy().astype(float)], max_tokens=12)[0]
    states = states_of(teacher, teacher_views(row)[0], "cpu")
    out = policy(**arguments, teachers=[states])
    for computed, value, gradient in zip(
        (out.reverse_kl, out.forward_kl), expected, gradients, strict=True
    ):
        torch.testing.assert_close(computed[mask], value)
        assert not computed[~mask].any()
        for part, expected_gradient in zip(
            torch.autograd.grad(computed.sum(), parameters, retain_graph=True),
            gradient,
            strict=True,
        ):
            # the stock norm computes in float32
            torch.testing.assert_close(part, expected_gradient, rtol=1e-5, atol=1e-6)
    # negative control: the two differ
    assert float((expected[0] - expected[1]).detach().abs().max()) > 1e-3
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert policy(**arguments).reverse_kl is None


def test_the_teacher_scores_each_token_given_those_before_it(tmp_path, folder, monkeypatch):
    """Against the stock model on each sample alone, with a shared prompt in the row; by an endpoint
    the same."""
    teacher = Teacher.open(str(folder), build_tiny_tokenizer(), "cpu")
    rows = scored_rows(distilled(tmp_path, folder, max_steps=1))
    assert any(row.node_ids is not None for row in rows)
    model, tokenizer = small_policy(seed=5), build_tiny_tokenizer()
    model.load_state_dict({name: p for name, p in teacher.model.state_dict().items()})
    with EmbeddedEngine(model, tokenizer, max_seq_len=64, concurrency=4) as engine:
        monkeypatch.setenv("VLLM_API_KEY", engine.api_key)
        for row in rows:
            tensors = row.to_tensors()
            here = torch.from_numpy(row.reference_logprobs)[tensors["loss_mask"]]
            there = EndpointTeacher(engine.base_url, tokenizer)
            served = there(**forward_arguments(tensors)).logprobs[tensors["loss_mask"]]
            torch.testing.assert_close(served, here, rtol=1e-4, atol=1e-4)
            shifted = torch.from_numpy(row.reference_logprobs).roll(1)[tensors["loss_mask"]]
            assert float((served - shifted).abs().max()) > 0.1  # negative control: one place off


def test_a_server_with_another_tokenizer_is_refused_with_the_first_token_that_differs(monkeypatch):
    model, tokenizer = small_policy(), build_tiny_tokenizer()
    ids = tokenizer("what is it, then?")["input_ids"]
    with EmbeddedEngine(model, tokenizer, max_seq_len=64, concurrency=4) as engine:
        monkeypatch.setenv("VLLM_API_KEY", engine.api_key)

        class Shifted:
            """The same size, and other texts."""

            def decode(self, ids):
                return tokenizer.decode([(token + 1) % len(tokenizer) for token in ids])

        with pytest.raises(ConfigError, match=r"token \d+ is 'h' there and 'i' here"):
            EndpointTeacher(engine.base_url, Shifted())._score(ids)
        assert len(EndpointTeacher(engine.base_url, tokenizer)._score(ids)) == len(ids)


def test_a_resumed_distillation_is_bit_for_bit_the_one_without_a_break(tmp_path, folder):
    settings = {
        "deterministic": True,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_off_policy_steps": 0,
    }
    uninterrupted = distilled(tmp_path / "whole", folder, max_steps=3, **settings)
    losses = run(uninterrupted).losses
    run(distilled(tmp_path / "parts", folder, max_steps=1, **settings))
    parts = distilled(tmp_path / "parts", folder, max_steps=3, **settings)
    assert run(parts, resume_from_checkpoint=True).losses == losses[1:]
    for parameter, changed_folder in zip(
        uninterrupted.model.parameters(), parts.model.parameters(), strict=True
    ):
        assert torch.equal(parameter, changed_folder)
    changed_folder = tmp_path / "other"
    small_policy(seed=6).save_pretrained(changed_folder)
    build_tiny_tokenizer().save_pretrained(changed_folder)
    with pytest.raises(RunMismatch, match="teacher was"):
        run(
            distilled(tmp_path / "parts", changed_folder, max_steps=4, **settings),
            resume_from_checkpoint=True,
        )


def test_the_penalty_beta_is_towards_the_teacher(tmp_path, folder):
    trainer = small_trainer(tmp_path, teacher=str(folder), beta=0.1, max_steps=1)
    assert isinstance(trainer.reference, Teacher)
    assert run(trainer).steps[0]["kl_ref"] > 1e-3
    plain = run(small_trainer(tmp_path / "plain", beta=0.1, max_steps=1))
    # negative control: the policy itself
    assert plain.steps[0]["kl_ref"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "distill"}, "the loss 'distill' needs a teacher"),
        (
            {"loss": "gkd", "teacher": "http://x/v1"},
            "set loss='distill', or give the teacher's folder",
        ),
        (
            {"loss": "distill", "teacher": "x", "beta": 0.1},
            "beta adds a penalty towards the teacher",
        ),
        ({"teacher": "x"}, "no part of the loss reads it"),
        ({"teacher": "x", "beta": 0.1, "sync_ref_model": True}, "leave one of them out"),
        ({"teacher": "http://x/v1", "loss": "distill", "temperature": 0.7}, "set temperature=1"),
        ({"teacher": "x", "loss": "distill", "tis_cap": 2.0}, "tis_cap"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        RLConfig(**settings).resolve()


def test_another_vocabulary_and_a_missing_server_are_named(tmp_path):
    tokenizer = build_tiny_tokenizer(tags=("<answer>",))
    build_tiny_model(layers=1, hidden=32, heads=2, tokenizer=tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"than the policy \(token \d+ is .* there and .* here\)"):
        small_trainer(tmp_path / "run", loss="distill", teacher=str(tmp_path))
    with pytest.raises(
        EndpointUnreachable, match=r"the teacher http://127.0.0.1:9/v1/models failed"
    ):
        EndpointTeacher("http://127.0.0.1:9/v1")._score([1, 2])
    assert small_config(tmp_path, loss="distill", teacher="x").component == "ref_kl"
