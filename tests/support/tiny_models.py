"""Causal language models of a few thousand random parameters, for tests that need real attention
and a real head."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel, Qwen3Config

VOCABULARY = 61


def tiny_llama(
    dtype: torch.dtype = torch.float32, attention: str = "sdpa", **overrides: Any
) -> PreTrainedModel:
    """Two layers, width 32; logits spread enough that leaks and wrong heads show."""
    return _build(LlamaConfig, dtype, attention, overrides)


def tiny_qwen3(
    dtype: torch.dtype = torch.float32, attention: str = "sdpa", **overrides: Any
) -> PreTrainedModel:
    """As `tiny_llama`, with Qwen3's per-head norms and a tied head."""
    return _build(
        Qwen3Config, dtype, attention, {"head_dim": 8, "tie_word_embeddings": True, **overrides}
    )


def tiny_gpt2(dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> PreTrainedModel:
    """One layer without any part that computes in fp32 on its own: exact in fp64, as Llama's norms
    are not."""
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=512, n_embd=32, n_layer=1, n_head=4, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, **ends,
    )  # fmt: skip
    return build(config, dtype, attention)


def build(
    config: Any, dtype: torch.dtype = torch.float32, attention: str = "sdpa"
) -> PreTrainedModel:
    """A model of any configuration, its matrices scaled up so that its distributions are far from
    uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model.eval()


def _build(
    config_type: type, dtype: torch.dtype, attention: str, overrides: dict[str, Any]
) -> PreTrainedModel:
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return build(config_type(**{**shape, **overrides}), dtype, attention)
