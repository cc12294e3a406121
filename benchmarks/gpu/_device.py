"""Shared by the scripts of this folder: the device, its peak, the model, and the format of numbers.

``--cpu --tiny`` is for checking that a script works where there is no GPU; its numbers mean
nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # _measure

PEAK_BF16_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}
"""Dense bf16 peak by the vendor's data sheets; the first name contained in the device's counts."""
SHAPES = {
    "135m": (30, 576, 1536, 9, 3),
    "1.7b": (24, 2048, 8192, 32, 32),
}
"""SmolLM2's layers, width, width of the MLP, heads, heads of keys; for models of random weights."""


def options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cpu", action="store_true", help="run on the CPU: checks that the script works"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="half a million parameters, a few short rollouts"
    )
    parser.add_argument(
        "--shape", choices=SHAPES, help="random weights of this size, without a download"
    )
    return parser


def device(args: argparse.Namespace) -> torch.device:
    """The GPU, or with ``--cpu`` the CPU. *Raises* SystemExit when there is neither."""
    if args.cpu:
        torch.set_num_threads(1)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("no NVIDIA GPU found; --cpu --tiny checks that the script works")
    return torch.device("cuda")


def policy(args: argparse.Namespace, where: torch.device) -> tuple[Any, Any]:
    """(model, tokenizer): SmolLM2-135M or random weights of a ``--shape`` in bf16, or with
    ``--tiny`` the builtin tiny model in float32."""
    from verifiers_trainer.policy.builtin_models import (
        build_tiny_model,
        build_tiny_tokenizer,
        load_smollm2,
    )

    if args.tiny:
        return build_tiny_model().to(where), build_tiny_tokenizer()
    if args.shape:
        from transformers import LlamaConfig, LlamaForCausalLM

        layers, width, mlp_width, heads, kv_heads = SHAPES[args.shape]
        tokenizer = build_tiny_tokenizer()
        torch.manual_seed(0)
        with where:
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=49152, hidden_size=width, intermediate_size=mlp_width, num_hidden_layers=layers,
                    num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=8192,
                    tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
                )
            ).to(torch.bfloat16)  # fmt: skip
        model.config.name_or_path = model.name_or_path = f"random-{args.shape}"
        return model.eval(), tokenizer
    model, tokenizer = load_smollm2(dtype=torch.bfloat16)
    return model.to(where), tokenizer


def synchronize(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def peak_flops(where: torch.device) -> float | None:
    """bf16 operations per second by the data sheet; None for an unknown device."""
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else ""
    return next((peak for part, peak in PEAK_BF16_FLOPS.items() if part in name), None)


def peak_memory_gb(where: torch.device) -> float | None:
    """Peak memory of tensors since the last reset, in GB; None on a CPU."""
    return torch.cuda.max_memory_allocated(where) / 1e9 if where.type == "cuda" else None


def formatted(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
