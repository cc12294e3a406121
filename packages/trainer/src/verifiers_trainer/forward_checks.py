"""Compares the log-probability forward with the stock model, once, when a run starts.

Architectures with recurrent or convolutional state are not kept apart by any mask, and some treat their logits in ways
that `logprobs` does not know. Each check runs a few random tokens without gradient, and leaves the model as it was.
What is done where one fails is `guards`'.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verifiers_trainer.logprobs import (
    find_causal_lm,
    install_logprob_forward,
    is_installed,
    stock_forward,
    uninstall,
)

HEAD_TOLERANCE, PACKING_TOLERANCE = 1e-4, 1e-3
HALF_TOLERANCE, HALF_SHAPE_TOLERANCE = 2e-2, 0.25
"""Half precision, of the mean: for equal shapes, and where another shape alone moves results (0.05 was measured with
a 135 M model in bfloat16 whose samples were kept apart, 0.7 where they were not)."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Outcome of a start-up check: the difference that was found and the one that is allowed, in nats."""

    difference: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance


def check_head(model: nn.Module, *, num_tokens: int = 24) -> SelfCheck:
    """Compare the installed head with the stock logits of the same random tokens; 1e-4 allowed in fp32.

    In half precision the mean difference is compared with `HALF_TOLERANCE`. Every rank of a sharded run must call it.
    """
    with _quiet(model):
        tokens = _random_tokens(model, num_tokens)
        ours = model(input_ids=tokens).logprobs[1:]
        with stock_forward(model):
            logits = model(input_ids=tokens, attention_mask=None, use_cache=False).logits[0, :-1]
    logits = logits.to(ours.dtype)
    stock = torch.log_softmax(logits, dim=-1).gather(-1, tokens[0, 1:, None]).squeeze(-1)
    if _is_half(model):
        return SelfCheck(_finite((ours - stock).abs().mean()), HALF_TOLERANCE)
    return SelfCheck(_finite((ours - stock).abs().max()), HEAD_TOLERANCE)


def check_packing(model: nn.Module, *, lengths: tuple[int, int] = (11, 7)) -> SelfCheck:
    """Compare two short samples packed and alone; 1e-3 allowed in fp32. Where it fails, rows must hold one sample.

    In half precision means are compared: packed against alone loosely, and strictly the second sample before and
    after the first is exchanged, which must not move it at all. Every rank of a sharded run must call it.
    """
    first, second = lengths
    with _quiet(model):
        tokens = _random_tokens(model, first + second)
        positions = torch.cat([torch.arange(n, device=tokens.device) for n in lengths]).unsqueeze(0)
        packed = model(input_ids=tokens, position_ids=positions).logprobs
        alone = [model(input_ids=part).logprobs for part in tokens.split(list(lengths), dim=1)]
        exchanged = torch.cat([tokens[:, :first].flip(-1), tokens[:, first:]], dim=1)
        after = model(input_ids=exchanged, position_ids=positions).logprobs[first:]
    apart = (packed - torch.cat(alone)).abs()
    if not _is_half(model):
        return SelfCheck(_finite(apart.max()), PACKING_TOLERANCE)
    if (difference := _finite(apart.mean())) > HALF_SHAPE_TOLERANCE:
        return SelfCheck(difference, HALF_SHAPE_TOLERANCE)
    return SelfCheck(_finite((packed[first:] - after).abs().mean()), HALF_TOLERANCE)


def can_share(model: nn.Module) -> bool:
    """Whether a mask of our own says all there is to say: PyTorch's attention, every layer over the whole context."""
    config = find_causal_lm(model).config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if not getattr(config, "layer_types", None) else None
    return config._attn_implementation == "sdpa" and layers == {"full_attention"} and window is None


def check_sharing(model: nn.Module, *, lengths: tuple[int, int, int] = (9, 6, 4)) -> SelfCheck:
    """Compare two short samples that share a prompt with each alone, as `check_packing` does with the same tolerances.

    An infinite difference when `can_share` says no. Every rank of a sharded run must call it.
    """
    if not can_share(model):
        return SelfCheck(math.inf, PACKING_TOLERANCE)
    prompt, first, second = lengths
    with _quiet(model):
        tokens = _random_tokens(model, sum(lengths))
        device = tokens.device
        own = torch.tensor([0] * prompt + [1] * first + [2] * second, device=device)
        prompts = torch.zeros_like(own)
        positions = torch.cat([torch.arange(prompt + first), torch.arange(prompt, prompt + second)]).to(device)

        def together(ids: Tensor) -> Tensor:
            return model(input_ids=ids, position_ids=positions[None], seq_ids=own, prompt_seq_ids=prompts).logprobs

        behind = [tokens[:, prompt : prompt + first], tokens[:, prompt + first :]]
        alone = [model(input_ids=torch.cat([tokens[:, :prompt], part], dim=1)).logprobs for part in behind]
        shared = together(tokens)
        exchanged = together(torch.cat([tokens[:, :prompt], behind[0].flip(-1), behind[1]], dim=1))
    apart = (shared - torch.cat([alone[0], alone[1][prompt:]])).abs()
    if not _is_half(model):
        return SelfCheck(_finite(apart.max()), PACKING_TOLERANCE)
    if (difference := _finite(apart.mean())) > HALF_SHAPE_TOLERANCE:
        return SelfCheck(difference, HALF_SHAPE_TOLERANCE)
    return SelfCheck(_finite((shared - exchanged)[prompt + first :].abs().mean()), HALF_TOLERANCE)


def _is_half(model: nn.Module) -> bool:
    return torch.finfo(find_causal_lm(model).get_output_embeddings().weight.dtype).bits < 32


def _finite(difference: Tensor) -> float:
    return float(difference) if torch.isfinite(difference) else math.inf


@contextlib.contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradient, the log-probability forward in place; everything as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    temporary = not is_installed(model)
    if temporary:
        install_logprob_forward(model)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        if temporary:
            uninstall(model)


def _random_tokens(model: nn.Module, count: int) -> Tensor:
    lm = find_causal_lm(model)
    vocabulary = min(lm.config.get_text_config().vocab_size, 1000)  # past the first thousand stand special tokens
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (1, count), generator=generator)
    return tokens.to(lm.get_input_embeddings().weight.device)
