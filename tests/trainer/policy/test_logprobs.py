"""The chunked head against the stock one, samples kept apart in a row, and installation per
instance.

Source: logprobs.py.
"""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    CohereConfig,
    FalconMambaConfig,
    Gemma2Config,
    GraniteConfig,
    Lfm2Config,
    PhiConfig,
)

from support.tiny_models import VOCABULARY, build, tiny_gpt2, tiny_llama, tiny_qwen3
from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.prefix_tree import node_ids
from verifiers_trainer.policy import logprobs as logprobs_module
from verifiers_trainer.policy.forward_checks import HEAD_TOLERANCE, check_head, check_packing
from verifiers_trainer.policy.logprobs import (
    Layout,
    LogitTransform,
    chunked_logprobs,
    find_causal_lm,
    install_logprob_forward,
    is_installed,
    stock_forward,
    uninstall,
)

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LENGTHS = (9, 5, 12, 1, 4)


def with_lora(model: nn.Module, **fields) -> nn.Module:
    torch.manual_seed(1)
    wrapped = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **fields)
    )
    return wrapped.eval()


MODELS = {
    "llama": tiny_llama,
    "qwen3, tied": tiny_qwen3,
    "phi, head with bias": lambda: build(PhiConfig(**SHAPE)),
    "gemma2, soft cap": lambda: build(
        Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=3.0, sliding_window=4),
        attention="eager",
    ),
    "cohere, scaled": lambda: build(CohereConfig(**SHAPE, logit_scale=0.25)),
    "granite, divided": lambda: build(GraniteConfig(**SHAPE, logits_scaling=4.0)),
    "gpt2": lambda: tiny_gpt2(torch.float32),
    "lora": lambda: with_lora(tiny_llama(), target_modules="all-linear"),
    "lora on the head": lambda: with_lora(tiny_llama(), target_modules=["q_proj", "lm_head"]),
    "lora, head saved": lambda: with_lora(
        tiny_llama(), target_modules=["q_proj"], modules_to_save=["lm_head"]
    ),
}
EVERY_MODEL = pytest.mark.parametrize("name", list(MODELS))


def packed_row(lengths=LENGTHS, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(
        0, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(seed)
    )
    return tokens, torch.cat([torch.arange(n) for n in lengths])


def stock_logprobs(
    model: nn.Module, tokens: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs [T] of one sample by the stock forward, entry 0 zero."""
    with stock_forward(model):
        logits = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0, :-1] / temperature
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None]).squeeze(-1)
    return torch.cat([chosen.new_zeros(1), chosen])


def gradients(model: nn.Module, value: torch.Tensor) -> torch.Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients_found = torch.autograd.grad(
        value, parameters, allow_unused=True, materialize_grads=True
    )
    return torch.cat([g.flatten() for g in gradients_found])


# --- the head -------------------------------------------------------------------------------------


@EVERY_MODEL
def test_packed_values_and_gradients_equal_the_stock_model_sample_by_sample(name):
    model = MODELS[name]()
    install_logprob_forward(model, chunk_tokens=8)
    tokens, positions = packed_row()
    ours = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        labels=tokens[None],
        inv_temperature=1 / 0.7,
    )
    stock = torch.cat([stock_logprobs(model, part, 0.7) for part in tokens.split(LENGTHS)])
    coefficients = torch.randn(len(tokens), generator=torch.Generator().manual_seed(1))
    assert torch.allclose(ours.logprobs, stock, atol=1e-5)
    mine, theirs = (
        gradients(model, (coefficients * values).sum()) for values in (ours.logprobs, stock)
    )
    assert (mine - theirs).norm() / theirs.norm() < 1e-5
    assert check_head(model).ok
    assert check_packing(model).ok


EQUAL, UNEQUAL = (30, 28, 30, 29, 30, 27, 30, 30), (100, 2, 2, 2, 2, 2, 2, 2)


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        (name, shared)
        for name in MODELS
        for shared in (False, True)
        if not (shared and "gemma2" in name)
    ],
)  # windows are no part of the mask: there prompts are not shared
def test_samples_side_by_side_have_the_values_and_gradients_of_one_row(name, shared):
    model = MODELS[name]()
    install_logprob_forward(model)
    tokens, positions = packed_row(EQUAL)
    row = {"input_ids": tokens, "position_ids": positions}
    if shared:  # four trees of two samples
        common = [0, 20] * 4
        starts = np.cumsum([0, *EQUAL[:-1]])
        for number in range(1, 8, 2):
            first, second = (slice(start, start + 20) for start in starts[number - 1 : number + 1])
            tokens[second] = tokens[first]
        row["node_ids"] = torch.from_numpy(node_ids(EQUAL, common))
    coefficients = torch.randn(len(tokens), generator=torch.Generator().manual_seed(1))
    side_by_side, one_row = model(**row).logprobs, model(**row, as_one_row=True).logprobs
    assert torch.allclose(side_by_side, one_row, atol=1e-5)
    mine, theirs = (
        gradients(model, (coefficients * values).sum()) for values in (side_by_side, one_row)
    )
    assert (mine - theirs).norm() / theirs.norm() < 1e-5


@pytest.mark.parametrize(
    ("lengths", "attention", "shape"),
    [
        (EQUAL, "sdpa", (8, 30)),
        (UNEQUAL, "sdpa", (1, sum(UNEQUAL))),  # seven rows of padding would cost more than the mask
        ((30,), "sdpa", (1, 30)),
        (EQUAL, "flash_attention_2", (1, sum(EQUAL))),  # computes no pair of two samples
    ],
)
def test_the_cheaper_layout_is_chosen(lengths, attention, shape):
    model = tiny_llama()
    model.config._attn_implementation = attention
    layout = Layout.of(model, *packed_row(lengths), None, as_one_row=False)
    assert layout.input_ids.shape == layout.position_ids.shape == shape


@pytest.mark.parametrize(("as_one_row", "has_mask"), [(False, False), (True, True)])
def test_samples_side_by_side_are_attended_to_without_a_mask(monkeypatch, as_one_row, has_mask):
    """An explicit mask rules out the flash kernel; the samples of a row as it stands need it."""
    model, calls = tiny_llama(), []
    plain = torch.nn.functional.scaled_dot_product_attention

    def recorded(*arguments, attn_mask=None, is_causal=False, **options):
        calls.append((attn_mask is not None, is_causal))
        return plain(*arguments, attn_mask=attn_mask, is_causal=is_causal, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    install_logprob_forward(model)
    tokens, positions = packed_row([60, 50, 55])
    model(input_ids=tokens[None], position_ids=positions[None], as_one_row=as_one_row)
    assert set(calls) == {(has_mask, not has_mask)}


def by_lengths(module, query, key, value, attention_mask, cu_seq_lens_q=None, **keywords):
    """Attention as FlashAttention's variable-length kernel defines it, from the samples' bounds
    alone."""
    assert attention_mask is None
    bounds = [0, query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    if cu_seq_lens_q is not None:
        assert cu_seq_lens_q.dtype == torch.int32
        assert keywords["cu_seq_lens_k"] is cu_seq_lens_q
        longest = max(end - start for start, end in itertools.pairwise(bounds))
        assert keywords["max_length_q"] == keywords["max_length_k"] == longest
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(states[:, :, start:end] for states in (query, key, value)),
            is_causal=True,
            enable_gqa=True,
        )
        for start, end in itertools.pairwise(bounds)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


@pytest.mark.parametrize("full_head", [False, True])
def test_flash_attention_is_told_the_lengths_of_the_samples(monkeypatch, full_head):
    """It would read the positions back from the device in every layer to find them."""
    AttentionInterface.register("flash_by_lengths", by_lengths)
    model = tiny_llama()
    model.config._attn_implementation = "flash_by_lengths"
    install_logprob_forward(model, full_head=full_head)
    tokens, positions = packed_row()

    def logprobs() -> torch.Tensor:
        return model(input_ids=tokens, position_ids=positions).logprobs

    alone = torch.cat([model(input_ids=part).logprobs for part in tokens.split(LENGTHS)])
    assert torch.allclose(logprobs(), alone, atol=1e-5)
    monkeypatch.setattr(logprobs_module, "_flash_lengths", lambda positions, device: {})
    assert not torch.allclose(logprobs(), alone, atol=1e-2)  # one sample would attend to another


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_packed_equals_unpacked_in_every_mode(attention, training, recompute):
    model = tiny_llama(attention=attention)
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    install_logprob_forward(model)
    model.train(training)
    tokens, positions = packed_row()
    packed = model(input_ids=tokens, position_ids=positions).logprobs
    alone = torch.cat([model(input_ids=part).logprobs for part in tokens.split(LENGTHS)])
    assert torch.allclose(packed, alone, atol=1e-5)
    mine, theirs = gradients(model, packed.sum()), gradients(model, alone.sum())
    assert (mine - theirs).norm() / theirs.norm() < 1e-5
    assert check_packing(model).ok
    assert model.training is training


def test_entropy_is_that_of_the_sampled_distribution_and_carries_no_gradient():
    model = tiny_llama()
    install_logprob_forward(model)
    tokens, _ = packed_row((6,))
    out = model(input_ids=tokens, inv_temperature=torch.full((6,), 2.0))
    with stock_forward(model):
        logits = 2 * model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(out.entropy[1:], expected, atol=1e-5)
    assert out.entropy[0] == 0
    assert not out.entropy.requires_grad


def test_temperature_may_differ_from_sample_to_sample():
    model = tiny_llama()
    install_logprob_forward(model)
    tokens, positions = packed_row((6, 7))
    inverse = torch.cat([torch.full((6,), 1 / 0.5), torch.full((7,), 1 / 2.0)])
    out = model(input_ids=tokens, position_ids=positions, inv_temperature=inverse).logprobs
    expected = [
        stock_logprobs(model, part, t)
        for part, t in zip(tokens.split((6, 7)), (0.5, 2.0), strict=True)
    ]
    assert torch.allclose(out, torch.cat(expected), atol=1e-5)


def test_a_loss_mask_spares_the_head_and_changes_nothing_else():
    model = tiny_llama()
    install_logprob_forward(model, chunk_tokens=4)
    tokens, positions = packed_row()
    mask = torch.rand(len(tokens), generator=torch.Generator().manual_seed(2)) < 0.5
    full = model(input_ids=tokens, position_ids=positions).logprobs
    masked = model(input_ids=tokens, position_ids=positions, loss_mask=mask).logprobs
    assert torch.allclose(masked, torch.where(mask, full, 0.0), atol=1e-6)
    seen = []
    handle = model.lm_head.register_forward_hook(
        lambda module, inputs, output: seen.append(len(inputs[0]))
    )
    model(input_ids=tokens, position_ids=positions, loss_mask=mask)
    handle.remove()
    assert sum(seen) == int((mask & (positions != 0)).sum())


def head_products(model, monkeypatch):
    """A list that grows with every product of hidden states and the head's weight."""
    config, linear, seen = find_causal_lm(model).config, nn.functional.linear, []

    def counted(hidden, weight, *args):
        seen.extend([1] if weight.shape == (config.vocab_size, config.hidden_size) else [])
        return linear(hidden, weight, *args)

    monkeypatch.setattr(nn.functional, "linear", counted)
    return seen


@pytest.mark.parametrize("num_chunks", [1, 3, 50])
def test_the_head_is_called_once_whatever_the_number_of_chunks(num_chunks, monkeypatch):
    """What gathers a split weight does it around a call: ranks with different numbers of chunks
    would wait for ever."""
    model = tiny_llama()
    install_logprob_forward(model)
    tokens, positions = packed_row()
    calls, chunks = [], head_products(model, monkeypatch)
    handle = model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    out = model(input_ids=tokens, position_ids=positions, num_chunks=num_chunks).logprobs
    assert (len(calls), len(chunks)) == (1, num_chunks)
    assert "forward" not in model.lm_head.__dict__
    handle.remove()
    assert torch.allclose(out, model(input_ids=tokens, position_ids=positions).logprobs, atol=1e-6)


def test_a_row_with_nothing_to_learn_still_reaches_every_parameter():
    model = tiny_llama()
    install_logprob_forward(model)
    model(input_ids=torch.tensor([0]), position_ids=torch.tensor([0])).logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_full_head_gives_the_same_values_and_gradients():
    model = MODELS["gemma2, soft cap"]()
    tokens, positions = packed_row()
    install_logprob_forward(model)
    chunked = model(input_ids=tokens, position_ids=positions).logprobs
    install_logprob_forward(model, full_head=True)
    full = model(input_ids=tokens, position_ids=positions).logprobs
    assert torch.allclose(chunked, full, atol=1e-5)
    assert torch.allclose(gradients(model, chunked.sum()), gradients(model, full.sum()), atol=1e-4)
    assert check_head(model).ok


def test_hidden_states_and_a_module_are_enough():
    hidden, head = torch.randn(1, 10, 8, dtype=torch.float64), nn.Linear(8, 20).double()
    labels = torch.randint(0, 20, (1, 10))
    logprobs, entropy = chunked_logprobs(hidden, head, labels, chunk_tokens=3)
    expected = torch.log_softmax(head(hidden[0]), -1).gather(-1, labels[0, :, None]).squeeze(-1)
    assert torch.allclose(logprobs, expected, atol=1e-12)
    assert entropy.shape == (10,)


def test_a_half_precision_head_is_followed_by_fp32():
    model = tiny_llama(torch.bfloat16)
    install_logprob_forward(model)
    out = model(input_ids=packed_row((8,))[0])
    assert out.logprobs.dtype == out.entropy.dtype == torch.float32
    assert check_head(model).ok
    assert check_packing(model).ok


def test_autocast_does_not_reach_a_full_precision_head():
    hidden, head, labels = torch.randn(6, 8), nn.Linear(8, 20), torch.arange(6)
    expected, _ = chunked_logprobs(hidden, head, labels)
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = chunked_logprobs(hidden, head, labels)
    assert torch.equal(inside, expected)


class LargestOutput(TorchDispatchMode):
    """Records the number of elements of the largest tensor any operation made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize(("full_head", "bound"), [(False, 16 * 3000), (True, 200 * 3000)])
def test_logits_of_more_than_a_chunk_never_exist(full_head, bound):
    model = tiny_llama(vocab_size=3000, hidden_size=8, intermediate_size=16, num_hidden_layers=1)
    install_logprob_forward(model, chunk_tokens=16, full_head=full_head)
    tokens = torch.arange(200)
    with LargestOutput() as largest:
        model(input_ids=tokens).logprobs.sum().backward()
    assert largest.elements == bound  # negative control: all logits at once with the full head


@pytest.mark.parametrize("name", ["llama", "qwen3, tied", "lora on the head", "lora, head saved"])
@pytest.mark.parametrize(
    ("kept_bytes", "num_products"), [(None, 5), (0, 10)], ids=["small", "large"]
)
def test_small_logits_are_kept_for_the_gradient_and_large_ones_made_again(
    name, kept_bytes, num_products, monkeypatch
):
    model = MODELS[name]()
    install_logprob_forward(model, chunk_tokens=6)
    tokens, positions = packed_row()  # 26 tokens that something predicts: five chunks

    def gradient():
        return gradients(
            model,
            model(input_ids=tokens, position_ids=positions, inv_temperature=1.3).logprobs.sum(),
        )

    expected = gradient()
    if kept_bytes is not None:
        monkeypatch.setattr(logprobs_module, "STORED_LOGITS_BYTES", kept_bytes)
    products = head_products(model, monkeypatch)
    assert torch.equal(gradient(), expected)
    assert len(products) == num_products


def test_logits_of_unknown_size_and_those_of_a_fixed_number_of_head_calls_are_made_again():
    head, hidden, labels = nn.Linear(8, 20), torch.randn(6, 8, requires_grad=True), torch.arange(6)

    def calls(head_function, **options):
        seen = []

        def counted(values):
            seen.append(1)
            return head_function(values)

        if isinstance(head_function, nn.Module):
            counted.weight = head_function.weight
        chunked_logprobs(hidden, counted, labels, **options)[0].sum().backward()
        return len(seen)

    assert calls(head) == 1
    assert calls(head, num_chunks=1) == 2
    assert calls(lambda values: head(values)) == 2


@pytest.mark.parametrize(
    ("fitting", "num_chunks"), [(600, 2), (100, 5)], ids=["small vocabulary", "large"]
)
def test_a_chunk_on_a_cpu_is_256_tokens_or_as_many_as_make_a_block_that_is_given_back(
    fitting, num_chunks, monkeypatch
):
    head = nn.Linear(4, 50)
    hidden = torch.randn(1200, 4)
    labels = torch.zeros(1200, dtype=torch.int64)
    monkeypatch.setattr(logprobs_module, "STORED_LOGITS_BYTES", fitting * 50 * 4)
    chunks = []

    def counted(values):
        chunks.append(len(values))
        return head(values)

    counted.weight = head.weight
    chunked_logprobs(hidden, counted, labels)
    assert chunks == [1200 // num_chunks] * num_chunks


# --- samples kept apart ---------------------------------------------------------------------------


def test_without_use_cache_false_samples_see_each_other():
    """The trap itself, in the stock model: position ids alone do not isolate."""
    model = tiny_llama()
    tokens, positions = packed_row((9, 5))
    with torch.no_grad():
        alone = model(input_ids=tokens[None, 9:]).logits[0]
        leaking = model(input_ids=tokens[None], position_ids=positions[None]).logits[0, 9:]
        masked = model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=torch.ones(1, 14),
            use_cache=False,
        ).logits[0, 9:]
        apart = model(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[
            0, 9:
        ]
    assert (leaking - alone).abs().max() > 0.1
    assert (masked - alone).abs().max() > 0.1
    assert (apart - alone).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_packing_check_finds_a_backbone_that_keeps_a_cache(dtype):
    model = tiny_llama(dtype)
    install_logprob_forward(model)
    backbone = model.model.forward
    model.model.forward = lambda **arguments: backbone(**{**arguments, "use_cache": True})
    result = check_packing(model)
    assert not result.ok
    assert result.difference > result.tolerance


@pytest.mark.parametrize(
    "config",
    [
        FalconMambaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=1,
            state_size=4,
            bos_token_id=1,
            eos_token_id=2,
        ),
        Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
    ],
    ids=["recurrent", "convolutional"],
)
def test_the_packing_check_finds_state_that_no_mask_resets(config):
    assert not check_packing(build(config, attention="eager")).ok


def test_a_mask_or_a_cache_from_the_caller_is_refused():
    model = tiny_llama()
    install_logprob_forward(model)
    tokens = torch.tensor([[1, 5, 6]])
    with pytest.raises(TypeError, match="attention_mask=None and use_cache=False"):
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    with pytest.raises(TypeError, match="attention_mask=None and use_cache=False"):
        model(input_ids=tokens, use_cache=True)
    with pytest.raises(TypeError, match="one row"):
        model(input_ids=tokens.expand(2, 3))
    with pytest.raises(TypeError, match="does not take past_key_values"):
        model(input_ids=tokens, past_key_values=object())


@EVERY_MODEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_right_head_differs_by_less_than_the_one_bound_in_every_precision(name, dtype):
    """Float32 weights are computed in bfloat16 by autocast: both heads then see the same rounded
    states."""
    model = MODELS[name]().to(dtype)
    install_logprob_forward(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        assert check_head(model).difference <= 1e-5 < HEAD_TOLERANCE


def test_the_head_check_finds_a_transform_it_does_not_know():
    model = MODELS["granite, divided"]()
    lm = install_logprob_forward(model)
    assert check_head(model).ok
    lm._logprob_head.transform = LogitTransform()
    assert not check_head(model).ok


def test_checks_leave_an_untouched_model_untouched():
    model = tiny_llama()
    model.train()
    model.lm_head.eval()
    assert check_head(model).ok
    assert check_packing(model).ok
    assert not is_installed(model)
    assert "forward" not in model.__dict__
    assert model.training
    assert not model.lm_head.training


@EVERY_MODEL
@pytest.mark.parametrize("chunk_tokens", [4, None])
def test_the_entropy_has_the_gradient_of_the_stock_distributions(name, chunk_tokens):
    """Over the whole vocabulary, at the temperature of sampling."""
    model = MODELS[name]()
    install_logprob_forward(model, chunk_tokens=chunk_tokens)
    tokens, positions = packed_row()
    row = {"input_ids": tokens[None], "position_ids": positions[None], "inv_temperature": 1 / 0.7}
    ours = model(**row, entropy_gradient=True).entropy
    stock = []
    with stock_forward(model):
        for part in tokens.split(LENGTHS):
            log_p = torch.log_softmax(
                model(input_ids=part[None], use_cache=False).logits[0, :-1] / 0.7, -1
            )
            stock += [log_p.new_zeros(1), -(log_p.exp() * log_p).sum(-1)]
    expected = torch.cat(stock)
    assert torch.allclose(ours, expected, atol=1e-4)
    mine, theirs = (gradients(model, values.sum()) for values in (ours, expected))
    assert (mine - theirs).norm() / theirs.norm() < 1e-4
    assert not model(**row).entropy.requires_grad  # negative control


# --- installation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "lora"])
def test_a_copy_made_before_shares_weights_and_keeps_the_stock_forward(name):
    model = MODELS[name]()
    engine = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    install_logprob_forward(model)
    tokens = torch.tensor([[1, 5, 6, 7]])
    assert engine(input_ids=tokens).logits.shape == (1, 4, VOCABULARY)
    assert not is_installed(engine)
    assert next(engine.parameters()) is next(model.parameters())
    assert engine.generate(input_ids=tokens, max_new_tokens=2, do_sample=False).shape[1] >= 5


@pytest.mark.parametrize("name", ["llama", "lora"])
def test_a_copy_made_afterwards_can_be_given_its_stock_forward_back(name):
    model = MODELS[name]()
    install_logprob_forward(model)
    engine = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    assert find_causal_lm(engine).forward.__self__ is find_causal_lm(engine)
    uninstall(engine)
    tokens = torch.tensor([[1, 5, 6, 7]])
    assert engine(input_ids=tokens).logits.shape == (1, 4, VOCABULARY)
    assert is_installed(model)
    assert model(input_ids=tokens).logprobs.shape == (4,)


def test_uninstalling_gives_back_a_forward_the_instance_had_of_its_own():
    model = tiny_llama()
    calls, stock = [], model.forward

    def wrapped(*args, **kwargs):
        calls.append(1)
        return stock(*args, **kwargs)

    model.forward = wrapped
    install_logprob_forward(model)
    install_logprob_forward(model, chunk_tokens=2)  # again, with other settings
    uninstall(model)
    uninstall(model)
    assert model.forward is wrapped
    model(input_ids=torch.tensor([[1, 5]]))
    assert calls == [1]


def test_the_stock_forward_is_lent_and_taken_back_even_after_an_error():
    model = tiny_llama()
    install_logprob_forward(model)

    def interrupted():
        with stock_forward(model):
            assert model(input_ids=torch.tensor([[1, 5]])).logits is not None
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert is_installed(model)
    assert model(input_ids=torch.tensor([[1, 5]])).logprobs is not None


def test_wrappers_are_looked_through_and_hooks_still_fire():
    class Wrapper(nn.Module):  # as DistributedDataParallel: the model is its `module`
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, **arguments):
            return self.module(**arguments)

    model = with_lora(tiny_llama(), target_modules=["q_proj"])
    wrapped = Wrapper(model)
    assert install_logprob_forward(wrapped) is model.get_base_model()
    fired = []
    model.get_base_model().register_forward_hook(lambda *_: fired.append(1))
    assert wrapped(input_ids=torch.tensor([[1, 5]])).logprobs.shape == (2,)
    assert fired == [1]


def test_installing_changes_neither_weights_nor_what_is_saved(tmp_path):
    model = tiny_llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    install_logprob_forward(model)
    model.save_pretrained(tmp_path)
    assert model.state_dict().keys() == before.keys()
    loaded = type(model).from_pretrained(tmp_path)
    assert "forward" not in loaded.__dict__
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ConfigError, match="Linear holds no causal language model"):
        install_logprob_forward(nn.Linear(2, 2))


def test_a_difference_that_is_not_a_number_is_not_ok():
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    assert not check_head(model).ok
