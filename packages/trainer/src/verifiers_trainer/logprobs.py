"""Log-probability and entropy of every token of a packed row, in bounded memory: logits exist for a chunk at a time.

`install_logprob_forward` replaces the forward of one causal-LM *instance*, also inside a PEFT or distributed wrapper,
so the wrapper's hooks still fire. The replaced forward runs the backbone with ``use_cache=False`` and no attention
mask: only then does transformers keep samples with reset ``position_ids`` apart; with either of the two they attend
to each other without a word. The head runs in chunks. Where all logits of a row together are small, they are kept
for the backward pass; otherwise each chunk is computed again there.

`check_packing` and `check_head` compare this with the stock model and are meant to run once at start-up:
architectures with recurrent or convolutional state are not kept apart by any mask, and some treat their logits in
ways this module does not know. It computes no loss and changes no weight, buffer or configuration.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from verifiers.errors import ConfigError

CHUNK_TOKENS, CHUNK_TOKENS_CPU = 1024, 256
KEPT_LOGITS_BYTES = 64 * 2**20
"""All logits of a row, as fp32, up to which they are kept for the backward pass and not computed again."""
HEAD_TOLERANCE, PACKING_TOLERANCE = 1e-4, 1e-3
HALF_TOLERANCE, HALF_SHAPE_TOLERANCE = 2e-2, 0.25
"""Half precision, of the mean: for equal shapes, and where another shape alone moves results (0.05 was measured with
a 135 M model in bfloat16 whose samples were kept apart, 0.7 where they were not)."""

_STATE = "_logprob_head"


@dataclass
class LogprobOutput(ModelOutput):
    """What the installed forward returns for one row of T tokens."""

    logprobs: Tensor | None = None  # [T], entry t of token t; 0 where nothing predicts the token or no loss is taken
    entropy: Tensor | None = None  # [T], of the distribution token t was drawn from, without gradient; 0 likewise


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Outcome of a start-up check: the difference that was found and the one that is allowed, in nats."""

    difference: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance


# --- the head ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What an architecture does to the output of its head: ``softcap·tanh(scale·logits / softcap)``."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitTransform:
        """Read from a transformers configuration (Cohere, Granite, Falcon-H1, Gemma and their like)."""
        config = config.get_text_config()
        scale = 1.0
        for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
            scale *= getattr(config, name, None) or 1.0
        scaling = getattr(config, "logits_scaling", None) or 1.0
        scale = scale * scaling if config.model_type.startswith("hyperclovax") else scale / scaling
        softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
        return cls(scale, softcap)

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def chunked_logprobs(
    hidden: Tensor,
    head: nn.Module | Callable[[Tensor], Tensor],
    labels: Tensor,
    inv_temperature: Tensor | float = 1.0,
    *,
    transform: Callable[[Tensor], Tensor] | None = None,
    chunk_tokens: int | None = None,
    num_chunks: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-prob of ``labels``, entropy), both [N], of the distributions that ``head`` makes of ``hidden`` [N, D].

    A leading dimension of 1 is dropped from every input. ``inv_temperature`` is [N] or one number. ``head`` runs
    outside autocast in the precision of its weight; everything after it is at least fp32. Logits are made in chunks
    of ``chunk_tokens`` (default 1024, 256 on a CPU), and recomputed for the gradient unless those of all N tokens are
    known to fit ``KEPT_LOGITS_BYTES``. ``num_chunks`` fixes the number of head calls of a pass instead: ranks of a
    ZeRO-3 run must agree on it, because each call gathers the weights, and there logits are always recomputed.
    """
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    inv_temperature = torch.as_tensor(inv_temperature, device=hidden.device).reshape(-1).expand(len(labels))
    size = chunk_tokens or (CHUNK_TOKENS_CPU if hidden.device.type == "cpu" else CHUNK_TOKENS)
    sizes = _even_sizes(len(labels), num_chunks or max(1, math.ceil(len(labels) / size)))
    run = _Chunk(head, transform)
    recompute = torch.is_grad_enabled() and (num_chunks is not None or not _is_small(head, len(labels)))
    pieces = []
    for chunk in zip(hidden.split(sizes), labels.split(sizes), inv_temperature.split(sizes), strict=True):
        pieces.append(checkpoint(run, *chunk, use_reentrant=False) if recompute else run(*chunk))
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


@dataclass(frozen=True, slots=True)
class _Chunk:
    head: Callable[[Tensor], Tensor]
    transform: Callable[[Tensor], Tensor] | None

    def __call__(self, hidden: Tensor, labels: Tensor, inv_temperature: Tensor) -> tuple[Tensor, Tensor]:
        weight = getattr(self.head, "weight", None)
        with torch.autocast(hidden.device.type, enabled=False):
            if weight is not None and weight.is_floating_point():
                hidden = hidden.to(weight.dtype)
            logits = self.head(hidden)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            if self.transform is not None:
                logits = self.transform(logits)
            logits = logits * inv_temperature.to(logits.dtype).unsqueeze(-1)
            log_z = torch.logsumexp(logits, dim=-1)
            logprobs = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - log_z
            with torch.no_grad():  # last, so that the recomputation stops before it
                entropy = torch.special.entr(torch.softmax(logits, dim=-1)).sum(-1)
        return logprobs, entropy


def _is_small(head: Any, num_tokens: int) -> bool:
    """Whether the logits of so many tokens are small; a head whose vocabulary is not known counts as large."""
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:  # a partitioned weight has another shape
        return False
    return num_tokens * weight.shape[0] * 4 <= KEPT_LOGITS_BYTES


def _even_sizes(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


# --- the forward ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Installed:
    transform: LogitTransform
    chunk_tokens: int | None
    full_head: bool
    previous: Callable[..., Any] | None  # a forward the instance already had of its own


def find_causal_lm(model: nn.Module) -> Any:
    """The causal-LM module inside DDP, ``torch.compile`` and PEFT wrappers. Raises ConfigError when there is none."""
    inner: Any = model
    while True:
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif isinstance(wrapped := getattr(inner, "module", None) or getattr(inner, "_orig_mod", None), nn.Module):
            inner = wrapped
        else:
            break
    if getattr(inner, "get_output_embeddings", lambda: None)() is None:
        raise ConfigError(f"{type(model).__name__} holds no causal language model with an output head")
    return inner


def install_logprob_forward(model: nn.Module, *, chunk_tokens: int | None = None, full_head: bool = False) -> nn.Module:
    """Make ``model(...)`` return `LogprobOutput` on this instance only; returns the causal-LM module it changed.

    Afterwards ``model(input_ids=, position_ids=, labels=, inv_temperature=, loss_mask=, num_chunks=)`` takes one row,
    [T] or [1, T]; entry t of every argument and result describes token t. ``labels`` defaults to ``input_ids``, which
    are the same tokens, not shifted ones. With ``loss_mask`` the head is computed only where it is True.
    ``full_head`` goes through the stock head and holds all logits: for architectures `check_head` refuses.

    A deep copy made afterwards carries the replaced forward; `uninstall` gives it the stock one back. Installing
    again replaces the earlier settings. Raises ConfigError when there is no causal LM.
    """
    lm = find_causal_lm(model)
    uninstall(lm)
    state = _Installed(LogitTransform.of(lm.config), chunk_tokens, full_head, lm.__dict__.get("forward"))
    setattr(lm, _STATE, state)
    lm.forward = MethodType(_logprob_forward, lm)
    return lm


def is_installed(model: nn.Module) -> bool:
    """Whether this instance answers with log-probabilities."""
    return _STATE in find_causal_lm(model).__dict__


def uninstall(model: nn.Module) -> None:
    """Give the instance its own forward back; nothing happens when none was installed."""
    lm = find_causal_lm(model)
    state: _Installed | None = lm.__dict__.pop(_STATE, None)
    if state is not None:
        lm.__dict__.pop("forward", None)
        if state.previous is not None:
            lm.forward = state.previous


@contextlib.contextmanager
def stock_forward(model: nn.Module) -> Iterator[None]:
    """Inside the block the causal LM answers with logits; whatever stood there before comes back afterwards."""
    lm = find_causal_lm(model)
    own = {name: lm.__dict__[name] for name in ("forward", _STATE) if name in lm.__dict__}
    uninstall(lm)
    try:
        yield
    finally:
        lm.__dict__.pop("forward", None)
        lm.__dict__.update(own)


def _logprob_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    labels: Tensor | None = None,
    inv_temperature: Tensor | float = 1.0,
    loss_mask: Tensor | None = None,
    num_chunks: int | None = None,
    use_cache: bool | None = None,
    **others: Any,
) -> LogprobOutput:
    if refused := [name for name, value in others.items() if value is not None and name != "return_dict"]:
        raise TypeError(f"the log-probability forward does not take {', '.join(refused)}")
    if attention_mask is not None or use_cache:
        raise TypeError("packed rows need attention_mask=None and use_cache=False; otherwise samples see each other")
    if input_ids is None or input_ids.numel() != input_ids.shape[-1]:
        raise TypeError("the log-probability forward takes one row of input_ids, [T] or [1, T]")
    tokens = input_ids.reshape(-1)
    positions = torch.arange(len(tokens), device=tokens.device) if position_ids is None else position_ids.reshape(-1)
    labels = tokens if labels is None else labels.reshape(-1)
    wanted = positions != 0
    wanted[0] = False
    if loss_mask is not None:
        wanted = wanted & loss_mask.reshape(-1)
    index = wanted.nonzero().squeeze(-1)
    if isinstance(inv_temperature, Tensor) and inv_temperature.numel() > 1:
        inv_temperature = inv_temperature.reshape(-1)[index]
    source, head, transform = _outputs(self, tokens.unsqueeze(0), positions.unsqueeze(0))
    logprobs, entropy = chunked_logprobs(
        source[index - 1],
        head,
        labels[index],
        inv_temperature,
        transform=transform,
        chunk_tokens=getattr(self, _STATE).chunk_tokens,
        num_chunks=num_chunks,
    )
    empty = torch.zeros(len(tokens), dtype=logprobs.dtype, device=tokens.device)
    return LogprobOutput(empty.index_put((index,), logprobs), empty.index_put((index,), entropy))


def _outputs(
    lm: Any, input_ids: Tensor, position_ids: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor], LogitTransform | None]:
    """Hidden states [T, D], the head and what follows it; with the full head logits [T, V] and nothing to do."""
    state: _Installed = getattr(lm, _STATE)
    arguments = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": None, "use_cache": False}
    if state.full_head:
        forward = state.previous or MethodType(type(lm).forward, lm)
        return forward(**arguments).logits[0], nn.Identity(), None
    backbone = lm.base_model if lm.base_model is not lm else lm.get_decoder()
    return backbone(**arguments).last_hidden_state[0], lm.get_output_embeddings(), state.transform


# --- start-up checks --------------------------------------------------------------------------------------------


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
