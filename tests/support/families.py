"""A tiny random model of every causal language model class of transformers, and what training it
shows.

A configuration is the class's own with the sizes in ``SIZES`` that it has; ``ODD`` holds what a
family needs beside that.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import verifiers as vf
from verifiers_trainer.policy.loading import get_tokenizer

WIDTH, LAYERS, POSITIONS = 32, 2, 256
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "dim_model", "embed_dim"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size", "hidden_dim", "lru_width"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 1),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim", "dim_head"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dim_ff", "d_ff", "n_inner"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "block_ff_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("seq_length", "max_sequence_length", "max_target_positions"), POSITIONS),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "intermediate_size_mlp"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "decoder_sparse_step"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "mamba_state_dim"), 8),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 8),
    "mamba_expand": 2,
    "mamba_d_ssm": 64,
    "query_pre_attn_scalar": 16,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
}
"""Name of a size in a configuration -> a small one."""
ODD: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"n_head": 4, "num_attention_heads": 4, "rotary_dim": 4},
    "diffllama": {"num_key_value_heads": 2},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 2},
    "falcon_h1": {"mamba_expand": 1, "mamba_n_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8},
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "longcat_flash": {"num_layers": 1, "num_hidden_layers": 2},
    "mamba2": {"num_heads": 4},
    "minicpm3": {"dim_model_base": 32},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family's configuration needs besides."""
DERIVED = ("head_dim", "kv_channels", "num_key_value_heads", "num_experts_per_tok")
"""Sizes that are set although they are None by default."""
OTHER_INPUTS = ("vision_config", "audio_config", "vq_config", "img_processor", "audio_encoder")
"""Keys of configurations of models that take more than text."""


def names() -> list[str]:
    """The model types of every causal language model class."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(name: str) -> Any:
    """A small configuration of the model type ``name`` for the tokenizer ``builtin:tiny``."""
    tokenizer = get_tokenizer("builtin:tiny")
    ends = {
        f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")
    }
    default = CONFIG_MAPPING[name]()
    fields = default.to_dict()
    keys = getattr(type(default), "attribute_map", {}) | fields
    if more := [key for key in OTHER_INPUTS if key in keys]:
        raise NotImplementedError(f"takes more than text ({more[0]})")
    sizes = {
        key: value
        for key, value in SIZES.items()
        if key in keys and (keys[key] is not None or key in DERIVED)
    }
    if "kv_lora_rank" in fields:  # its keys are those of every head
        sizes |= {"num_key_value_heads": 2, "head_dim": 8}
    kinds = list(dict.fromkeys(fields.get("layer_types") or ()))
    if len(kinds) > 1 and isinstance(kinds[0], str):  # each kind of layer once
        sizes |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    ends = {key: token for key, token in ends.items() if token is not None}
    vocabulary = {"vocab_size": 64 * math.ceil(len(tokenizer) / 64)}
    config = type(default)(**{**sizes, **vocabulary, **ends, **ODD.get(name, {})})
    if "is_decoder" in keys:
        config.is_decoder = True
    return config


def tiny_folder(name: str, folder: Path) -> Path:
    """Write a tiny random model of the type ``name`` with its tokenizer."""
    config = tiny_config(name)
    with torch.device("meta"):  # counted before any memory is taken
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > 20_000_000:
        raise NotImplementedError(f"has no small configuration here ({size / 1e6:.0f} million)")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if not torch.isfinite(parameter).all():  # memory that the class left as it was
                parameter.copy_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    get_tokenizer("builtin:tiny").save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True)
class Trained:
    """What three steps of one class showed, with all weights or an adapter."""

    name: str
    kind: str
    """``full`` or ``adapter``."""
    outcome: str
    """``exact``, ``exact, a sample a row``, ``vLLM only`` or ``not``."""
    apart: float | None = None
    """Nats per token between sampler and trainer, the most of the three steps."""
    why: str = ""
    """The sentence that refused it, or what went wrong."""


def seen(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """``trained`` in both ways as rows of a table; one row for a class without a tiny model."""
    torch.set_num_threads(1)
    try:
        base = tiny_folder(name, folder / "base")
    except Exception as error:  # noqa: BLE001 - told, whatever it is
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield from (asdict(Trained(name, kind, "not run", None, why)) for kind in KINDS)
        return
    for kind in KINDS:
        yield asdict(trained(name, kind, base, folder / kind))


KINDS = ("full", "adapter")


def vowels(completion: Any) -> float:
    text = completion[-1].content
    return sum(letter in "aeiou " for letter in text) / max(1, len(text))


def trained(name: str, kind: str, base: Path, folder: Path) -> Trained:
    """Train the model in ``base`` for two steps, resume for a third, save, reload and compare."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            packs = _two_and_one(kind, base, folder)
            apart = _reloads(kind, base, folder)
    except Exception as error:  # noqa: BLE001 - told, whatever it is
        why = " ".join(str(error).replace(f"{folder}/", "").split())[:300]
        is_refusal = "use a vLLM server" in why
        return Trained(
            name, kind, "vLLM only" if is_refusal else "not", None, f"{type(error).__name__}: {why}"
        )
    return Trained(name, kind, "exact" if packs else "exact, a sample a row", apart)


def _two_and_one(kind: str, base: Path, folder: Path) -> bool:
    """Whether samples are packed."""
    rows = [{"question": f"Number {n}"} for n in range(8)]
    for steps in (2, 3):
        env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[vowels]))
        config = vf.RLConfig(
            run_name="r",
            output_dir=str(folder),
            use_lora=kind == "adapter",
            rollouts_per_example=4,
            batch_size=8,
            max_steps=steps,
            max_tokens=6,
            max_seq_len=64,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            save_strategy="steps",
            save_steps=2,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = vf.RLTrainer(str(base), env, config)
        trainer.train(resume_from_checkpoint=steps == 3)
    trainer.save_model()
    torch.save(_logits(trainer.model), folder / "logits.pt")
    return trainer.args.packing


IDS = torch.arange(5, 25)[None]


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    from verifiers_trainer.policy.logprobs import find_causal_lm, uninstall

    uninstall(model)
    lm = find_causal_lm(model).eval()
    return lm(input_ids=IDS, use_cache=False).logits


def _read_otherwise(model: Any, folder: Path) -> str:
    """Which weights transformers changes when it reads a file, if any."""
    file = folder / "model.safetensors"
    weights = load_file(file) if file.exists() else {}
    state = model.state_dict()
    names = [n for n, w in weights.items() if n in state and not torch.equal(w, state[n])]
    return f": transformers reads {names[0]} otherwise than the file has it" if names else ""


def _reloads(kind: str, base: Path, folder: Path) -> float:
    """Nats that sampler and trainer were apart; *raises* AssertionError when what was saved is not
    what was trained."""
    expected = torch.load(folder / "logits.pt")
    if kind == "full":
        models = [AutoModelForCausalLM.from_pretrained(folder)]
    else:
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        assert (_logits(adapted) - expected).abs().max() < 1e-4, "the saved adapter is another"
        models = [adapted.merge_and_unload()]
    for model in models:
        assert (_logits(model) - expected).abs().max() < 1e-4, (
            f"the saved model is another{_read_otherwise(model, folder)}"
        )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 3, f"{len(steps)} steps instead of 3"
    assert max(step["grad_norm"] for step in steps) > 0, "no gradient"
    values = [step.get("sampler/log_ratio_abs") for step in steps]
    apart = max(value for value in values if value is not None)
    assert apart < 1e-5, f"sampler and trainer are {apart:.1e} nats apart"
    return apart
