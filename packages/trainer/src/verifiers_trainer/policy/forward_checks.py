"""Compare the log-probability forward with the stock model when a run starts.

No mask separates packed samples in architectures with recurrent or convolutional state, and some
architectures transform their logits in ways that `logprobs` does not know. Each check runs a few
random tokens without gradient and leaves the model unchanged. ``run.sanity_checks`` decides what a
failed check changes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from verifiers_trainer.algorithm.prefix_tree import node_ids
from verifiers_trainer.engines.embedded.kv_cache import has_states
from verifiers_trainer.engines.processing import language_part, placeholder_ids
from verifiers_trainer.policy.compiled import as_written
from verifiers_trainer.policy.logprobs import (
    LogitTransform,
    find_causal_lm,
    install_logprob_forward,
    is_installed,
    precision_kept,
    stock_forward,
    uninstall,
)

HEAD_TOLERANCE, PACKING_TOLERANCE = 1e-4, 1e-3
LEAK_TOLERANCE = 1e-5
"""Nats in float32 that exchanging the sample before may change a sample. 0 measured where a mask
separates them. Nothing is allowed where layers have states: what leaks through random weights is as
small as rounding, and grows with training."""
HALF_TOLERANCE = 2e-2
"""Mean difference in half precision, in nats, where the shapes are equal."""
HALF_PLACE_TOLERANCE, HALF_SHAPE_TOLERANCE = 5e-2, 0.25
"""Least and greatest allowed mean difference in half precision, in nats, between two positions in a
row. Measured with a 135 M model in bfloat16 with separate samples: 0.024, and 0.09 between rows of
different lengths."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Outcome of a start-up check: the measured difference and the allowed difference, in nats."""

    difference: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance


def check_head(model: nn.Module, *, num_tokens: int = 24) -> SelfCheck:
    """Compare the installed head with the stock logits of the same random tokens; 1e-4 allowed.

    Both are computed within what wraps the model's forward, such as autocast, with the head in the
    precision of its weight, of as many tokens, and fp32 after it: only what the head computes can
    differ, so one bound serves every precision. Every rank of a sharded run must call it.
    """
    with quiet(model):
        tokens = _random_tokens(model, num_tokens)
        head = find_causal_lm(model).get_output_embeddings()
        ours = model(input_ids=tokens).logprobs[1:]
        with stock_forward(model), precision_kept(head):
            hooks = [
                head.register_forward_pre_hook(lambda module, hidden: (hidden[0][:, :-1],)),
                head.register_forward_hook(lambda module, hidden, logits: _at_least_fp32(logits)),
            ]
            logits = model(input_ids=tokens, attention_mask=None, use_cache=False).logits[0]
            for hook in hooks:
                hook.remove()
        if (of_ids := LogitTransform.of(find_causal_lm(model).config).of_ids) is not None:
            logits = of_ids(logits)
    stock = torch.log_softmax(logits, dim=-1).gather(-1, tokens[0, 1:, None]).squeeze(-1)
    return SelfCheck(_finite((ours - stock).abs().max()), HEAD_TOLERANCE)


def _at_least_fp32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _first_tensor(output: Any) -> Tensor:
    """What a layer computed; some return a tuple."""
    return (
        output if isinstance(output, Tensor) else next(t for t in output if isinstance(t, Tensor))
    )


def layer_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype that the model's first linear layer for text computes in, measured; None for a
    model without such a layer."""
    dtypes: list[torch.dtype] = []
    sees = placeholder_ids(find_causal_lm(model).config)
    part = language_part(model) if sees else model
    layer = next((layer for layer in part.modules() if isinstance(layer, nn.Linear)), None)
    if layer is None:
        return None
    hook = layer.register_forward_hook(
        lambda module, hidden, out: dtypes.append(_first_tensor(out).dtype)
    )
    with quiet(model):
        model(input_ids=_random_tokens(model, 2))
    hook.remove()
    return dtypes[0]


def attention_kernels(model: nn.Module) -> list[str]:
    """What computes the attention of a row of one sample, and of a packed row as it stands:
    operators that ran, by name. Every rank of a sharded run must call it."""
    with quiet(model):
        tokens = _random_tokens(model, 12)
        names = []
        for sizes in ([12], [8, 4]):
            positions = torch.cat([torch.arange(size) for size in sizes])[None]
            with _AttentionNames() as seen:
                model(input_ids=tokens, position_ids=positions, as_one_row=True)
            names.append(seen.name)
    return names


class _AttentionNames(TorchDispatchMode):
    """The name of the attention operator that runs in the block."""

    name = "matrix products"

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if "attention" in func.name() or "attn" in func.name():
            self.name = func.name().partition("::")[2].strip("_")
        return func(*args, **(kwargs or {}))


def rounding_noise(
    model: nn.Module, arguments: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    """|difference| of the log-probabilities [T] of a row when every layer rounds otherwise, nats.

    What two kernels of this precision may differ by: each output is multiplied by 1 + u ε, u
    uniform in ±1/2 and ε the spacing of its dtype, or of ``dtype`` (J. Vignes, "A stochastic arithmetic", 1993).
    Every rank of a sharded run must call it.
    """
    device = arguments["input_ids"].device
    draws = torch.Generator(device).manual_seed(0)

    def round_otherwise(module: nn.Module, inputs: object, out: object) -> object:
        if not (isinstance(out, Tensor) and out.is_floating_point()):
            return None
        shift = torch.rand(out.shape, generator=draws, device=device) - 0.5
        return (out.float() * (1 + shift * torch.finfo(dtype or out.dtype).eps)).to(out.dtype)

    with quiet(model):
        plain = model(**arguments).logprobs
        computing = [module for module in model.modules() if module._parameters]
        hooks = [module.register_forward_hook(round_otherwise) for module in computing]
        try:
            return (model(**arguments).logprobs - plain).abs()
        finally:
            for hook in hooks:
                hook.remove()


def check_packing(
    model: nn.Module, *, lengths: tuple[int, int] = (11, 7), is_half: bool = False
) -> SelfCheck:
    """Compare two short samples packed and alone; 1e-3 allowed in fp32, and 1e-5 (0 with states)
    between a sample behind two others. If it fails, rows must hold one sample.

    In half precision (of the weights, or with ``is_half`` of the forward pass) rows of a shape
    are compared, see `_apart_in_half`. Every rank of a sharded run must call it.
    """
    with quiet(model):
        first, second, third = _random_tokens(model, 2 * lengths[0] + lengths[1]).split(
            [*lengths, lengths[0]], dim=1
        )

        def together(*parts: Tensor) -> Sequence[Tensor]:
            sizes = [part.shape[1] for part in parts]
            positions = torch.cat([torch.arange(size, device=first.device) for size in sizes])
            row = {"input_ids": torch.cat(parts, dim=1), "position_ids": positions[None]}
            return model(**row, as_one_row=True).logprobs.split(sizes)

        if is_half or _is_half(model):
            return _apart_in_half(together, first, third, second)
        packed, alone = together(first, second), [*together(first), *together(second)]
        moved = (packed[1] - together(third, second)[1]).abs().max()
        rounding = (together(second, first)[0] - together(second, third)[0]).abs().max()
    allowed = 0.0 if has_states(find_causal_lm(model)) else LEAK_TOLERANCE
    exchanged = SelfCheck(_finite(moved), max(allowed, 4 * _finite(rounding)))
    return _compared(packed, alone) if exchanged.ok else exchanged


Together = Callable[..., Sequence[Tensor]]
"""Samples to their log-probabilities in one row, in order; without those of a prompt they share."""


def _apart_in_half(together: Together, first: Tensor, third: Tensor, second: Tensor) -> SelfCheck:
    """Whether the second sample is independent of the first, within the rounding of half precision.

    Rounding depends on shapes, so the first sample is exchanged for another of the same length,
    which changes nothing where samples are separate. The allowed difference is measured by
    exchanging the sample *after*, which a causal model cannot see. Comparing with the same sample
    at the head of the row shows that its positions start at zero.
    """
    behind, ahead = together(first, second)[-1], together(second, first)[-2]
    moved = _mean_difference(behind, together(third, second)[-1])
    rounding = _mean_difference(ahead, together(second, third)[-2])
    of_shape = _mean_difference(ahead, together(second)[-1])
    exchanged = SelfCheck(moved, min(max(PACKING_TOLERANCE, 4 * rounding), HALF_TOLERANCE))
    placed = SelfCheck(
        _mean_difference(behind, ahead),
        min(max(HALF_PLACE_TOLERANCE, 2 * of_shape), HALF_SHAPE_TOLERANCE),
    )
    return placed if exchanged.ok else exchanged


def can_share(model: nn.Module) -> bool:
    """Whether an explicit mask is the whole attention pattern: SDPA, and every layer over the full
    context."""
    config = find_causal_lm(model).config.get_text_config()
    is_full = getattr(config, "sliding_window", None) is None
    if layers := getattr(config, "layer_types", None):
        is_full = set(layers) == {"full_attention"}
    return config._attn_implementation == "sdpa" and is_full


def check_sharing(
    model: nn.Module, *, lengths: tuple[int, int, int] = (9, 6, 4), is_half: bool = False
) -> SelfCheck:
    """Compare two short samples that share a prompt with each alone, as `check_packing` does with
    the same tolerances.

    The difference is infinite when `can_share` is False. Every rank of a sharded run must call it.
    """
    if not can_share(model):
        return SelfCheck(math.inf, PACKING_TOLERANCE)
    with quiet(model):
        tokens = _random_tokens(model, sum(lengths) + lengths[1])
        prompt, first, second, third = tokens.split([*lengths, lengths[1]], dim=1)

        def together(*parts: Tensor) -> Sequence[Tensor]:
            sizes = [prompt.shape[1] + part.shape[1] for part in parts]
            common = [0] + [prompt.shape[1]] * (len(parts) - 1)
            out = model(
                input_ids=torch.cat([t for part in parts for t in (prompt, part)], dim=1),
                position_ids=torch.cat([torch.arange(size) for size in sizes])[None],
                node_ids=torch.from_numpy(node_ids(sizes, common)),
                as_one_row=True,
            )
            return [logprobs[prompt.shape[1] :] for logprobs in out.logprobs.split(sizes)]

        if is_half or _is_half(model):
            return _apart_in_half(together, first, third, second)
        shared = together(first, second)
        unshared = [
            model(input_ids=torch.cat([prompt, part], dim=1)).logprobs[prompt.shape[1] :]
            for part in (first, second)
        ]
    return _compared(shared, unshared)


def _compared(packed: Sequence[Tensor], alone: Sequence[Tensor]) -> SelfCheck:
    difference = (torch.cat([*packed]) - torch.cat([*alone])).abs().max()
    return SelfCheck(_finite(difference), PACKING_TOLERANCE)


def _is_half(model: nn.Module) -> bool:
    return torch.finfo(find_causal_lm(model).get_output_embeddings().weight.dtype).bits < 32


def _finite(difference: Tensor) -> float:
    return float(difference) if torch.isfinite(difference) else math.inf


def _mean_difference(first: Tensor, second: Tensor) -> float:
    return _finite((first - second).abs().mean())


@contextlib.contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradient, layers as they are written, the log-probability forward
    installed; all restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    temporary = not is_installed(model)
    if temporary:
        install_logprob_forward(model)
    model.eval()
    try:
        with torch.no_grad(), as_written(model):
            yield
    finally:
        for module, training in modes:
            module.training = training
        if temporary:
            uninstall(model)


def _random_tokens(model: nn.Module, count: int) -> Tensor:
    lm = find_causal_lm(model)
    # special tokens come later in most vocabularies
    vocabulary = min(lm.config.get_text_config().vocab_size, 1000)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (1, count), generator=generator)
    for placeholder in placeholder_ids(lm.config):  # of an image that there is not
        tokens[tokens == placeholder] = 0
    return tokens.to(lm.get_input_embeddings().weight.device)
