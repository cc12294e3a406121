"""The reference policy: what it computes, when it follows the policy, what it costs, and that it
survives a kill."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file

from support.training import files_hash, metrics_of, run, small_policy, small_trainer, weights_hash
from verifiers.errors import CheckpointError, ConfigError
from verifiers_trainer.algorithm.packing import filler_row
from verifiers_trainer.grpo import GRPOConfig
from verifiers_trainer.policy.logprobs import install_logprob_forward
from verifiers_trainer.policy.reference import FILE, Reference


def tokens(count=9):
    return torch.randint(3, 40, (1, count), generator=torch.Generator().manual_seed(1))


def adapted(model):
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()  # fresh adapters change nothing
    return wrapped


def logprobs(model, **arguments):
    with torch.no_grad():
        return model(**arguments).logprobs


# --- what it computes -----------------------------------------------------------------------------


def test_a_full_model_is_compared_with_a_copy_that_training_does_not_touch():
    model, ids = small_policy(), tokens()
    install_logprob_forward(model)
    before = logprobs(model, input_ids=ids)
    reference = Reference(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert torch.equal(reference(input_ids=ids).logprobs, before)
    assert (logprobs(model, input_ids=ids) - before).abs().max() > 1e-3
    assert not reference(input_ids=ids).logprobs.requires_grad


def test_an_adapter_is_switched_off_and_that_equals_a_frozen_copy_of_the_base():
    model = small_policy()
    base = copy.deepcopy(model)
    wrapped, ids = adapted(model), tokens()
    install_logprob_forward(wrapped)
    install_logprob_forward(base)
    reference = Reference(wrapped)
    assert reference.weights is None  # no memory
    flags = {name: parameter.requires_grad for name, parameter in wrapped.named_parameters()}
    wrapped.train()
    assert torch.allclose(
        reference(input_ids=ids).logprobs, logprobs(base, input_ids=ids), atol=1e-6
    )
    assert wrapped.training
    assert (logprobs(wrapped, input_ids=ids) - logprobs(base, input_ids=ids)).abs().max() > 1e-3
    assert {
        name: parameter.requires_grad for name, parameter in wrapped.named_parameters()
    } == flags


def test_an_adapter_that_was_partly_frozen_stays_so():
    wrapped = adapted(small_policy())
    install_logprob_forward(wrapped)
    frozen = next(parameter for name, parameter in wrapped.named_parameters() if "lora_A" in name)
    frozen.requires_grad_(False)
    Reference(wrapped)(input_ids=tokens())
    assert not frozen.requires_grad


@pytest.mark.parametrize("adapter", [False, True])
def test_a_synced_reference_is_the_mixture_of_the_rule(adapter):
    model = adapted(small_policy()) if adapter else small_policy()
    install_logprob_forward(model)
    reference = Reference(model, sync_steps=3, alpha=0.25)
    before = {name: weight.clone() for name, weight in reference.weights.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    for step in (1, 2):
        reference.after_step(step)
    assert all(torch.equal(reference.weights[name], before[name]) for name in before)
    reference.after_step(3)
    policy = dict(model.named_parameters())
    for name, old in before.items():
        assert torch.allclose(reference.weights[name], 0.25 * policy[name] + 0.75 * old)


def test_the_engines_module_does_not_see_the_reference():
    """The engine computes with the same parameters at the same time, in module
    objects of its own."""
    model, ids = small_policy(), tokens()
    initial_model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    install_logprob_forward(model)
    reference, seen = Reference(model), []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    expected = initial_model(input_ids=ids).logits
    model.model.layers[0].register_forward_hook(
        lambda *_: seen.append(initial_model(input_ids=ids).logits)
    )
    reference(input_ids=ids)
    assert torch.equal(seen[0], expected)


# --- in training ----------------------------------------------------------------------------------


def test_without_a_penalty_there_is_no_reference_and_no_pass_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(Reference, "__init__", lambda *_, **__: pytest.fail("a reference was made"))
    trainer = small_trainer(tmp_path, max_steps=1)
    assert trainer.reference is None
    log = run(trainer)
    assert "kl_ref" not in log.steps[0]


def test_the_penalty_is_zero_at_first_and_grows_as_the_policy_leaves(tmp_path):
    log = run(small_trainer(tmp_path, beta=0.01, learning_rate=1e-2, max_steps=4))
    kl = [step["kl_ref"] for step in log.steps]
    assert kl[0] == pytest.approx(0, abs=1e-9)
    assert kl[-1] > 1e-4
    assert [row["kl_ref"] for row in metrics_of(tmp_path)] == kl


def test_a_larger_beta_keeps_the_policy_nearer(tmp_path):
    def distance(beta):
        settings = {
            "learning_rate": 1e-2,
            "max_steps": 8,
            "deterministic": True,
            "lr_scheduler_type": "constant",
        }
        log = run(small_trainer(tmp_path / str(beta), beta=beta, **settings))
        return log.steps[-1]["kl_ref"]

    assert distance(5.0) < 0.5 * distance(1e-6)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_kind_of_the_penalty_is_the_one_asked_for(tmp_path, kind):
    trainer = small_trainer(tmp_path, beta=0.3, kl_type=kind)
    assert (trainer.criterion.beta, trainer.criterion.kl_type) == (0.3, kind)
    install_logprob_forward(trainer.model)
    trainer.close()


def test_a_reference_that_is_synced_every_step_is_the_policy_of_the_step_before(tmp_path):
    synced = small_trainer(
        tmp_path,
        beta=0.01,
        sync_ref_model=True,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=1.0,
        max_steps=3,
    )
    log = run(synced)
    for name, parameter in synced.model.named_parameters():
        assert torch.equal(synced.reference.weights[name], parameter)
    assert [step["kl_ref"] for step in log.steps] == pytest.approx([0, 0, 0], abs=1e-9)


def test_the_reference_is_asked_by_the_chunked_head(tmp_path, monkeypatch):
    from verifiers_trainer.policy import logprobs as module

    calls, chunked = [], module.chunked_logprobs
    monkeypatch.setattr(
        module,
        "chunked_logprobs",
        lambda *a, **k: calls.append(torch.is_grad_enabled()) or chunked(*a, **k),
    )
    counts = {}
    for beta in (0.0, 0.01):
        calls.clear()
        log = run(small_trainer(tmp_path / str(beta), beta=beta, max_steps=1, deterministic=True))
        counts[beta] = (calls.count(False), calls.count(True))
    rows = int(log.steps[0]["packing/rows"])
    # the comparisons of sampler and trainer take passes without a gradient in both runs
    assert counts[0.01] == (counts[0.0][0] + rows, counts[0.0][1])
    assert counts[0.01][1] == rows


RUN = {
    "deterministic": True,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "beta": 0.05,
}
SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}


@pytest.mark.parametrize(
    "settings", [SYNC, {}, {"use_lora": True, **SYNC}], ids=["synced", "copy", "lora synced"]
)
def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path, settings):
    uninterrupted = run(small_trainer(tmp_path / "whole", **RUN, **settings))
    parts = tmp_path / "parts"
    run(small_trainer(parts, **{**RUN, "max_steps": 2}, **settings))
    resumed = run(small_trainer(parts, **RUN, **settings), resume_from_checkpoint=True)
    assert resumed.losses == uninterrupted.losses[2:]
    end = "checkpoint-4"
    assert files_hash(parts / end, FILE) == files_hash(tmp_path / "whole" / end, FILE)


def test_without_its_file_a_checkpoint_cannot_be_continued(tmp_path, monkeypatch):
    """Negative control: a reference that is made anew from the resumed weights would end elsewhere
    without a word."""
    uninterrupted = run(small_trainer(tmp_path / "whole", **RUN, **SYNC))
    parts = tmp_path / "parts"
    run(small_trainer(parts, **{**RUN, "max_steps": 2}, **SYNC))
    with monkeypatch.context() as patched:
        patched.setattr(Reference, "load", lambda *_: None)
        anew = run(small_trainer(parts, **RUN, **SYNC), resume_from_checkpoint=True)
    assert anew.losses != uninterrupted.losses[2:]
    reference = Reference(small_policy())
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        reference.load(tmp_path)


def test_another_models_reference_is_refused(tmp_path):
    model = small_policy()
    reference = Reference(model)
    reference.save(tmp_path)
    assert load_file(tmp_path / FILE).keys() == dict(model.named_parameters()).keys()
    wrapped = Reference(adapted(small_policy()), sync_steps=1)
    with pytest.raises(CheckpointError, match="does not hold the parameters that are trained"):
        wrapped.load(tmp_path)


# --- settings -------------------------------------------------------------------------------------


def test_following_without_a_penalty_is_refused_and_grpo_follows(tmp_path):
    with pytest.raises(ConfigError, match="sync_ref_model=True and beta is 0"):
        small_trainer(tmp_path, sync_ref_model=True)
    grpo = GRPOConfig()
    assert (grpo.beta, grpo.kl_type, grpo.sync_ref_model) == (0.001, "k3", True)
    assert (grpo.ref_model_sync_steps, grpo.ref_model_mixup_alpha) == (100, 0.5)
    GRPOConfig(kl_coef=0.0).resolve()  # the default of following is no wish of the user's


def test_a_row_without_loss_has_a_reference_too():
    model = small_policy()
    install_logprob_forward(model)
    row = filler_row().to_tensors()
    made = Reference(model)(input_ids=row["token_ids"], loss_mask=row["loss_mask"])
    assert made.logprobs.tolist() == [0.0]
    assert weights_hash(model) == weights_hash(small_policy())
