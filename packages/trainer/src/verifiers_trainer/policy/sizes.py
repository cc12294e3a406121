"""Sizes of a dense decoder, and the bytes that a packed row takes on its way through it: arithmetic,
without torch.

``vf-train --plan`` and the error of a device without memory count alike. The coefficients are what
torch saves for the backward pass of transformers' layers (Llama, Qwen), and tests compare them with
torch's own accounting of models without storage. Not counted: experts, Liger's kernels (which save
less) and memory that the allocator cannot use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FLOAT32, HALF = 4, 2
"""Bytes of a number."""
NF4 = 0.5 + 1 / 64 + FLOAT32 / (64 * 256)
"""Bytes of a weight in four bits: with a scale of 8 bits for each 64, and one of theirs for 256."""
ADAMW_BYTES = 2 * FLOAT32
"""State of AdamW for a trained parameter: two moments."""
CHUNK_TOKENS, CHUNK_TOKENS_CPU = 1024, 256
"""Tokens whose logits exist at a time: the head is computed in chunks."""
STORED_LOGITS_BYTES = 64 * 2**20
"""Bytes of all logits of a row, as fp32, up to which they are stored for the backward pass and not
recomputed; on a CPU, of a chunk."""
LOGITS_COPIES = 4
"""Logits of a chunk in float32 at the end of its backward pass: themselves, over the temperature,
their probabilities, their gradient."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a dense decoder with gated MLPs: Llama, Mistral, Qwen2, Qwen3."""

    layers: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    tied: bool = True
    """Whether the head is the embedding."""
    qk_norm: bool = False
    qkv_bias: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Architecture:
        """Of the object in a ``config.json``. *Raises* KeyError for a size that is missing."""
        heads, kind = config["num_attention_heads"], config.get("model_type", "")
        return cls(
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            mlp_width=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_width=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=kind.startswith("qwen3"),
            qkv_bias=kind.startswith("qwen2"),
        )

    @property
    def attention_width(self) -> int:
        """Queries of a token, over all heads."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Keys of a token, over all heads; values are as many."""
        return self.kv_heads * self.head_width

    @property
    def layer_matrices(self) -> int:
        """Weights of a layer's matrices."""
        attention = 2 * self.width * (self.attention_width + self.kv_width)
        return attention + 3 * self.width * self.mlp_width

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer."""
        biases = (self.attention_width + 2 * self.kv_width) * self.qkv_bias
        norms = 2 * self.width + 2 * self.head_width * self.qk_norm
        return self.layer_matrices + biases + norms

    @property
    def root_parameters(self) -> int:
        """Weights outside the layers: embedding, last norm, and a head that is not tied."""
        return self.vocabulary * self.width * (1 if self.tied else 2) + self.width

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return self.root_parameters + self.layers * self.layer_parameters

    def base_bytes(self, number: int, quantize: str | None) -> float:
        """Bytes of all weights where a number has ``number``, with the layers' matrices in four
        bits if ``quantize`` is set."""
        in_four_bits = self.layers * self.layer_matrices if quantize else 0
        return number * (self.parameters - in_four_bits) + NF4 * in_four_bits

    def adapter_parameters(self, rank: int) -> int:
        """Weights of a LoRA adapter on every linear layer but the head: rank x (inputs + outputs)
        each."""
        attention = 2 * (self.width + self.attention_width) + 2 * (self.width + self.kv_width)
        return self.layers * rank * (attention + 3 * (self.width + self.mlp_width))

    @property
    def kv_numbers(self) -> int:
        """Keys and values of a token, over all layers."""
        return 2 * self.layers * self.kv_width


@dataclass(frozen=True, slots=True)
class RowPass:
    """How forward and backward pass of a packed row are computed."""

    rank: int | None = None
    """Of the LoRA adapter; None: all weights are trained."""
    number: int = FLOAT32
    """Bytes of a number that layers compute with: autocast in ``HALF`` on an accelerator."""
    checkpointing: bool = False
    """Whether activations are computed again in the backward pass."""
    masked: bool = True
    """Whether attention gets a matrix [T, T] that says which tokens see which: rows of several
    samples, without FlashAttention."""

    def layer_bytes(self, model: Architecture) -> int:
        """What a layer keeps of a token for its backward pass.

        Norms compute in float32; residuals of trained models are float32, and autocast rounds a
        copy for each matrix. Frozen matrices keep no inputs, adapters a hidden state of their rank.

        >>> model = Architecture(28, 1024, 3072, 16, 8, 128, 151936)
        >>> RowPass().layer_bytes(model), RowPass(rank=8, number=HALF).layer_bytes(model)
        (106496, 63600)
        """
        frozen, half = self.rank is not None, self.number == HALF
        queries, keys = model.attention_width, model.kv_width
        width = 16 + 8 * (not frozen) + 2 * half
        num_bytes = width * model.width + 2 * self.number * (queries + keys + 2 * model.mlp_width)
        num_bytes += 2 * queries * (frozen and half) + 7 * self.number * (self.rank or 0)
        of_norm = FLOAT32 + self.number * (not frozen)  # as given, and normalised
        num_bytes += of_norm * (queries + keys) * model.qk_norm
        return (
            num_bytes + 2 * self.number * (queries - keys) * self.masked
        )  # keys of every query head

    def activation_bytes(self, model: Architecture, tokens: int) -> float:
        """What the layers keep of a row of ``tokens``; with checkpointing their inputs alone."""
        residual = self.number if self.rank is not None else FLOAT32
        mask = self.number * tokens**2 * self.masked
        if self.checkpointing:
            return (model.layers + 2) * residual * model.width * tokens + mask
        num_bytes = model.layers * (self.layer_bytes(model) * tokens + mask)
        return num_bytes + 2 * residual * model.width * tokens

    def logits_bytes(self, model: Architecture, tokens: int) -> float:
        """Logits of a chunk, and the gradient of a trained head beside the sum of earlier ones."""
        on_cpu = max(CHUNK_TOKENS_CPU, STORED_LOGITS_BYTES // (FLOAT32 * model.vocabulary))
        chunk = min(tokens, on_cpu if self.number == FLOAT32 else CHUNK_TOKENS)
        if self.rank is None:
            of_head = FLOAT32 * model.vocabulary * model.width
        else:
            of_head = 2 * self.number * chunk * model.vocabulary * (self.number == HALF)
        return LOGITS_COPIES * FLOAT32 * chunk * model.vocabulary + of_head

    def row_bytes(self, model: Architecture, tokens: int) -> float:
        """Most bytes of a row at a time: what is kept, and logits, or with checkpointing one layer
        computed again where that is more."""
        again = 0.0
        if self.checkpointing:
            gradients = self.number * (4 * model.mlp_width + 5 * model.width)
            of_layer = self.layer_bytes(model) + gradients
            again = of_layer * tokens + self.number * tokens**2 * self.masked
        return self.activation_bytes(model, tokens) + max(self.logits_bytes(model, tokens), again)
