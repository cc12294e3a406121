"""What the checks at the beginning of a run find in half precision, where rounding hides small
faults."""

from contextlib import nullcontext

import pytest
import torch
from transformers import Qwen3MoeConfig

from support.tiny_models import VOCABULARY, build, tiny_llama
from support.training import small_trainer
from verifiers_trainer.policy.forward_checks import (
    HALF_PLACE_TOLERANCE,
    HALF_SHAPE_TOLERANCE,
    HALF_TOLERANCE,
    attention_kernels,
    check_packing,
    check_sharing,
)
from verifiers_trainer.policy.logprobs import find_causal_lm, install_logprob_forward
from verifiers_trainer.run import sanity_checks

CHECKS = [check_packing, check_sharing]
PRECISIONS = {
    "bf16": (torch.bfloat16, nullcontext),
    "fp16": (torch.float16, nullcontext),
    "float32 weights, bf16 forward": (torch.float32, lambda: torch.autocast("cpu", torch.bfloat16)),
}


def mixture(dtype):
    """Experts, whose batches change with what else is in the row."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return build(Qwen3MoeConfig(vocab_size=VOCABULARY, **sizes, **heads, **experts), dtype)


def hooked(model, change):
    """The model with its first layer's hidden states [1, T, D] changed."""
    install_logprob_forward(model)

    def hook(module, args, out):
        hidden = out[0] if isinstance(out, tuple) else out
        changed = change(hidden.float()).to(hidden.dtype)
        return (changed, *out[1:]) if isinstance(out, tuple) else changed

    find_causal_lm(model).model.layers[0].register_forward_hook(hook)
    return model


def leak(strength):
    """Every token gets a part of the mean of all before it in the row, whichever sample they are
    of."""
    return lambda hidden: (
        hidden + strength * hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[:, None]
    )


def by_place(hidden):
    """Every token gets something that depends on its place in the row, and on no other token."""
    return hidden + hidden.std() * torch.cos(torch.arange(hidden.shape[1]) / 3.0)[:, None]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("make", [tiny_llama, mixture])
def test_samples_that_are_kept_apart_pass_in_half_precision(make, check, precision):
    dtype, rounding = PRECISIONS[precision]
    with rounding():
        result = check(make(dtype), is_half=True)
    assert result.ok
    assert result.difference < HALF_PLACE_TOLERANCE


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("make", "strength"), [(tiny_llama, 0.03), (mixture, 0.01)])
def test_a_leak_below_what_rounding_moves_between_shapes_is_found(make, strength, check, precision):
    """Bounds wide enough for another shape's rounding would let it pass: it is smaller than they
    are."""
    dtype, rounding = PRECISIONS[precision]
    with rounding():
        result = check(hooked(make(dtype), leak(strength)), is_half=True)
    assert not result.ok
    assert result.difference < HALF_TOLERANCE < HALF_SHAPE_TOLERANCE


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("check", CHECKS)
def test_a_sample_that_depends_on_its_place_alone_is_found(check, precision):
    dtype, rounding = PRECISIONS[precision]
    with rounding():
        result = check(hooked(tiny_llama(dtype), by_place), is_half=True)
    assert not result.ok
    assert result.tolerance >= HALF_PLACE_TOLERANCE  # no exchange of tokens shows it


@pytest.mark.parametrize("strength", [0.0, 0.1])
def test_a_run_in_bf16_with_weights_in_float32_gives_up_packing_for_a_leak_alone(
    tmp_path, caplog, strength
):
    trainer = small_trainer(tmp_path)
    trainer.args.derive(bf16=True)
    hooked(trainer.model, leak(strength))
    with torch.autocast("cpu", torch.bfloat16):
        sanity_checks.check_forward(trainer.model, trainer.args)
    assert trainer.args.packing == trainer.args.share_prompts == (strength == 0)
    assert ("packed samples see each other" in caplog.text) == (strength > 0)


@pytest.mark.parametrize(
    ("largest", "expected"), [(None, 1), (0, 3)], ids=["small model", "large model"]
)
def test_a_small_model_is_checked_by_one_thread(largest, expected, tmp_path, monkeypatch):
    """The large model is the negative control: it has the threads of the process, which are what
    they were after it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if largest is not None:
        monkeypatch.setattr("verifiers_trainer.engines.embedded.threads.SMALL_PARAMETERS", largest)
    before, used, trainer = torch.get_num_threads(), [], small_trainer(tmp_path)
    trainer.model.model.register_forward_pre_hook(lambda *_: used.append(torch.get_num_threads()))
    torch.set_num_threads(3)
    try:
        sanity_checks.check_forward(trainer.model, trainer.args)
        assert set(used) == {expected}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_what_computes_attention_is_seen_where_it_runs():
    kernel = "scaled_dot_product_flash_attention_for_cpu"
    assert attention_kernels(tiny_llama()) == [kernel, kernel]
    assert attention_kernels(tiny_llama(attention="eager")) == ["matrix products"] * 2
