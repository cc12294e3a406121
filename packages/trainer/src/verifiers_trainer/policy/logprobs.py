"""Compute log-probability and entropy of every token of a packed row in bounded memory: logits of a
chunk at a time.

`install_logprob_forward` replaces the forward of a causal-LM *instance*, also inside a PEFT or
distributed wrapper, so the wrapper's hooks still fire. The replaced forward runs the backbone with
``use_cache=False`` and no attention mask: only then does transformers separate samples with reset
``position_ids``; with either, they silently attend to each other. Samples with a common prefix,
which is computed once (``prefix_tree``), get an explicit mask instead. The head runs in chunks. If
all logits of a row together are small, they are stored for the backward pass; otherwise each chunk
is recomputed there.

`forward_checks` compares this with the stock model. No weight, buffer or configuration is changed.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.packing import forward_arguments, image_files, sent
from verifiers_trainer.algorithm.prefix_tree import Nodes
from verifiers_trainer.algorithm.teacher_view import TeacherView
from verifiers_trainer.engines import role_adapters
from verifiers_trainer.engines.embedded.model_inputs import keep_precision
from verifiers_trainer.engines.processing import NEVER, placeholder_ids, processing_of
from verifiers_trainer.policy.sizes import CHUNK_TOKENS, CHUNK_TOKENS_CPU, STORED_LOGITS_BYTES

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.modeling_utils import PreTrainedModel

_STATE = "_logprob_head"


@dataclass
class LogprobOutput(ModelOutput):
    """The result of the installed forward for a row of T tokens."""

    # [T], entry t of token t; 0 if nothing predicts the token or no loss is taken
    logprobs: Tensor | None = None
    # [T], nats, of the distribution token t was drawn from; 0 as above
    entropy: Tensor | None = None
    reverse_kl: Tensor | None = None  # [T], KL(π‖teacher) of that; None without a teacher
    forward_kl: Tensor | None = None  # [T], KL(teacher‖π)
    # [C, D], the states before the head of each token, or of each node; with ``states_only``
    states: Tensor | None = None


# --- the head -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """An architecture's transform of its logits: ``softcap·tanh(scale·logits / softcap)``, but of
    the ids ``never``, which stand for images and which no policy samples."""

    scale: float = 1.0
    softcap: float | None = None
    never: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: PreTrainedConfig) -> LogitTransform:
        """Of a transformers configuration (Cohere, Granite, Falcon-H1, Gemma and their like)."""
        never, config = placeholder_ids(config), config.get_text_config()
        scale = 1.0
        for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
            scale *= getattr(config, name, None) or 1.0
        scaling = getattr(config, "logits_scaling", None) or 1.0
        scale = scale * scaling if config.model_type.startswith("hyperclovax") else scale / scaling
        softcap = getattr(config, "final_logit_softcapping", None) or getattr(
            config, "logits_soft_cap", None
        )
        return cls(scale, softcap, never)

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if not self.never:
            return logits
        never = torch.tensor(self.never, device=logits.device)
        return logits.index_fill(-1, never, NEVER)

    @property
    def of_ids(self) -> LogitTransform | None:
        """What is left of it after the stock head."""
        return LogitTransform(never=self.never) if self.never else None


@dataclass(frozen=True, slots=True)
class TeacherStates:
    """A teacher's distributions, as its states before the head; ``states_of`` computes them."""

    hidden: Tensor
    """[C', D'], of each token of its view of a row, or of each node."""
    head: Callable[[Tensor], Tensor]
    transform: Callable[[Tensor], Tensor] | None
    view: TeacherView
    """What it read, and where the tokens of the policy's row are in it."""
    top_k: int | None = None
    """Compare the probabilities of its likeliest tokens, so many, and of all the others together;
    None: of each token."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """The part of N tokens that one teacher scores."""

    head: _Chunk
    hidden: Tensor  # [n, D']
    rows: Tensor | None  # int64 [n]: which of them; None: all


def states_of(
    model: nn.Module,
    view: TeacherView,
    device: torch.device | str,
    *,
    forward: Callable[..., Any] | None = None,
    head: Callable[[Tensor], Tensor] | None = None,
    top_k: int | None = None,
) -> TeacherStates:
    """The states of ``model`` as a teacher of what it reads, without a gradient.

    ``forward`` and ``head`` replace those of ``model``, for a copy of its weights.
    """
    lm = find_causal_lm(model)
    state: _Installed = getattr(lm, _STATE)
    arguments = forward_arguments(view.row.to_tensors(device), view.row)
    with torch.no_grad():
        hidden = (forward or model)(**arguments, states_only=True).states
    if state.full_head:
        return TeacherStates(hidden, nn.Identity(), state.transform.of_ids, view, top_k)
    return TeacherStates(hidden, head or lm.get_output_embeddings(), state.transform, view, top_k)


def chunked_logprobs(
    hidden: Tensor,
    head: nn.Module | Callable[[Tensor], Tensor],
    labels: Tensor,
    inv_temperature: Tensor | float = 1.0,
    *,
    transform: Callable[[Tensor], Tensor] | None = None,
    chunk_tokens: int | None = None,
    num_chunks: int | None = None,
    teachers: Sequence[_Scored] = (),
    entropy_gradient: bool = False,
) -> tuple[Tensor, ...]:
    """(log-prob of ``labels``, entropy), both [N], of the distributions that ``head`` makes of
    ``hidden`` [N, D].

    The entropy carries a gradient with ``entropy_gradient`` alone. With ``teachers``, one for each
    token, also KL(π‖teacher) and KL(teacher‖π) [N] over the vocabulary, at the same temperature,
    with their gradients, which are exactly 0 where both distributions are equal.

    A leading dimension of 1 is dropped from every input. ``inv_temperature`` is [N] or one number.
    ``head`` runs outside autocast in the precision of its weight; everything after it is at least
    fp32. Logits are made in chunks of ``chunk_tokens`` (default: see `_chunk_tokens`), and
    recomputed for the gradient unless those of all N tokens are known to fit
    ``STORED_LOGITS_BYTES``. ``num_chunks`` fixes the number of chunks instead, all of them
    recomputed.

    A module is called once, with the chunks inside that call: FSDP2 and DeepSpeed gather a split
    weight around a call, and ranks may have different numbers of chunks.
    """
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    inv_temperature = (
        torch.as_tensor(inv_temperature, device=hidden.device).reshape(-1).expand(len(labels))
    )
    weight: Tensor | None = getattr(head, "weight", None)
    size = chunk_tokens or _chunk_tokens(hidden.device.type, weight)
    # a teacher that shares the module of the head would run the chunks within a chunk
    stock = head.forward if isinstance(head, nn.Module) else head
    of_policy = _Chunk(stock, weight, transform, entropy_gradient=entropy_gradient)
    parts: list[tuple[_Chunk, Tensor | None, list[Tensor]]] = [
        (
            replace(
                of_policy,
                teacher=replace(its.head, head=stock) if its.head.head is head else its.head,
            ),
            its.rows,
            [its.hidden],
        )
        for its in teachers
    ] or [(of_policy, None, [])]

    def in_chunks(hidden: Tensor) -> tuple[Tensor, ...]:
        recompute = torch.is_grad_enabled() and (
            num_chunks is not None or not _is_small(weight, len(labels))
        )
        pieces = []
        for run, rows, its in parts:
            columns = [hidden, labels, inv_temperature]
            if rows is not None:
                columns = [column[rows] for column in columns]
            count = len(columns[0])
            sizes = _even_sizes(count, num_chunks or max(1, math.ceil(count / size)))
            for chunk in zip(*(column.split(sizes) for column in (*columns, *its)), strict=True):
                pieces.append(
                    checkpoint(run, *chunk, use_reentrant=False) if recompute else run(*chunk)
                )
        values = [torch.cat(column) for column in zip(*pieces, strict=True)]
        if len(parts) == 1 and parts[0][1] is None:
            return tuple(values)
        order = torch.cat([rows for _, rows, _ in parts if rows is not None])
        return tuple(torch.empty_like(part).index_put((order,), part) for part in values)

    if not isinstance(head, nn.Module):
        return in_chunks(hidden)
    with _restored_forward(head):
        head.forward = in_chunks
        result: tuple[Tensor, ...] = head(hidden)
        return result


@contextlib.contextmanager
def _restored_forward(head: nn.Module) -> Iterator[None]:
    """At the end of the block take off the forward that it has set on the instance."""
    before = head.__dict__.get("forward")
    try:
        yield
    finally:
        del head.forward
        if before is not None:
            head.forward = before


@dataclass(frozen=True, slots=True)
class _Chunk:
    head: Callable[[Tensor], Tensor]
    weight: Tensor | None
    transform: Callable[[Tensor], Tensor] | None
    teacher: _Chunk | None = None
    entropy_gradient: bool = False
    top_k: int | None = None
    """Of a teacher: how many tokens are compared one by one, see ``TeacherStates``."""

    def __call__(
        self,
        hidden: Tensor,
        labels: Tensor,
        inv_temperature: Tensor,
        teacher_hidden: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            logits = self.logits(hidden, inv_temperature)
            log_z = torch.logsumexp(logits, dim=-1)
            logprobs = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - log_z
            divergence: tuple[Tensor, ...] = ()
            if self.teacher is not None and teacher_hidden is not None:
                log_pi = logits - log_z.unsqueeze(-1)
                with torch.no_grad():
                    of_teacher = self.teacher.logits(teacher_hidden, inv_temperature)
                    # as that of the policy, so that equal logits give equal numbers
                    log_teacher = of_teacher - torch.logsumexp(of_teacher, -1, keepdim=True)
                if (k := self.teacher.top_k) is not None and k < log_teacher.shape[-1]:
                    likeliest = log_teacher.topk(k, dim=-1).indices
                    log_pi, log_teacher = (_with_tail(v, likeliest) for v in (log_pi, log_teacher))
                divergence = divergences(log_pi, log_teacher)
            if self.entropy_gradient and torch.is_grad_enabled():
                entropy = log_z - (torch.softmax(logits, dim=-1) * logits).sum(-1)
            else:
                with torch.no_grad():  # last, so that the recomputation stops before it
                    entropy = torch.special.entr(torch.softmax(logits, dim=-1)).sum(-1)
        return logprobs, entropy, *divergence

    def logits(self, hidden: Tensor, inv_temperature: Tensor) -> Tensor:
        """[N, V], divided by the temperature, in at least fp32."""
        if self.weight is not None and self.weight.is_floating_point():
            hidden = hidden.to(self.weight.dtype)
        logits = self.head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.transform is not None:
            logits = self.transform(logits)
        return logits * inv_temperature.to(logits.dtype).unsqueeze(-1)


def divergences(log_pi: Tensor, log_teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL(π‖teacher) and KL(teacher‖π) [N] of distributions [N, V], with their gradients.

    The gradients leave out Σ π·∇log π, which is the gradient of 1: for equal distributions rounding
    would make of it a gradient that is not 0.

    >>> equal = torch.tensor([[0.3, 0.7]]).log().requires_grad_()
    >>> sum(divergences(equal, equal.detach())).sum().backward()
    >>> equal.grad.tolist()
    [[0.0, 0.0]]
    """
    pi, teacher = log_pi.exp(), log_teacher.exp()
    gap = (log_pi - log_teacher).detach()
    forward = -(teacher * gap).sum(-1)
    moved = ((pi.detach() - teacher) * log_pi).sum(-1)
    return (pi * gap).sum(-1), forward + (moved - moved.detach())


def _with_tail(logprobs: Tensor, likeliest: Tensor) -> Tensor:
    """[N, k + 1]: the log-probabilities of the tokens ``likeliest`` [N, k], and of all the others
    together, of [N, V]."""
    unlikely = logprobs.scatter(-1, likeliest, -math.inf)
    tail = torch.logsumexp(unlikely, dim=-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, likeliest), tail], dim=-1)


def _chunk_tokens(device: str, weight: Tensor | None) -> int:
    """1024; on a CPU at least 256, and as many as fit ``STORED_LOGITS_BYTES`` with a small
    vocabulary.

    The C library maps a block of 32 MiB or more separately and returns it to the system when freed;
    smaller blocks stay in the heap, fragmented by longer-lived blocks, and memory grows with the
    number of chunks.
    """
    if device != "cpu":
        return CHUNK_TOKENS
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return CHUNK_TOKENS_CPU
    return max(CHUNK_TOKENS_CPU, STORED_LOGITS_BYTES // (4 * weight.shape[0]))


def _is_small(weight: Tensor | None, num_tokens: int) -> bool:
    """Whether the logits of so many tokens are small; not if the vocabulary is not known."""
    if not isinstance(weight, Tensor) or weight.ndim != 2:  # a partitioned weight has another shape
        return False
    return num_tokens * weight.shape[0] * 4 <= STORED_LOGITS_BYTES


def _even_sizes(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


# --- the forward ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Installed:
    """What the installed forward reads at each call; ``transform`` to ``full_head`` are what a
    caller may change."""

    transform: LogitTransform
    chunk_tokens: int | None
    full_head: bool
    previous: Callable[..., Any] | None  # the forward that was set on the instance before
    forward: Callable[..., Any]  # the function that replaced it
    is_on: bool = True

    def stock(self, lm: PreTrainedModel) -> Callable[..., Any]:
        return self.previous or MethodType(type(lm).forward, lm)


def find_causal_lm(model: nn.Module) -> Any:
    """The causal-LM module inside DDP, ``torch.compile`` and PEFT wrappers. Raises ConfigError when
    there is none."""
    inner: object = model
    while True:
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif isinstance(
            wrapped := getattr(inner, "module", None) or getattr(inner, "_orig_mod", None),
            nn.Module,
        ):
            inner = wrapped
        else:
            break
    if getattr(inner, "get_output_embeddings", lambda: None)() is None:
        raise ConfigError(
            f"{type(model).__name__} holds no causal language model with an output head"
        )
    return inner


def install_logprob_forward(
    model: nn.Module, *, chunk_tokens: int | None = None, full_head: bool = False
) -> nn.Module:
    """Make ``model(...)`` return `LogprobOutput` on this instance only; returns the causal-LM
    module it changed.

    Afterwards ``model(input_ids=, position_ids=, labels=, inv_temperature=, loss_mask=,
    num_chunks=)`` takes one row, [T] or [1, T]; entry t of every argument and result describes
    token t. ``labels`` defaults to ``input_ids``, which are the same tokens, not shifted. With
    ``loss_mask`` the head is computed only where it is True. With the ``node_ids`` [T] of a row (see
    `packing.PackedRow`) each node of its prefix trees is computed once; the results are [T] all the
    same. ``images`` [bytes], the files end to end, and ``image_ends`` are those of a row with a
    sample that has images. ``adapter`` [1] is the number of the role whose adapter computes the
    row, and those without one until another is named. With ``teacher``, a model with
    the same forward and vocabulary, the result has ``reverse_kl`` and ``forward_kl``. ``entropy``
    carries a gradient with ``entropy_gradient``. ``full_head`` goes through the stock head and
    holds all logits: for architectures that fail `check_head`.

    The forward is replaced once and reads its settings at each call: accelerate wraps it in
    autocast, and a second replacement would take that wrapper off. Installing again therefore only
    changes settings. A deep copy made afterwards carries the replaced forward. Raises ConfigError
    when there is no causal LM.
    """
    lm = find_causal_lm(model)
    transform = LogitTransform.of(lm.config)
    state: _Installed | None = lm.__dict__.get(_STATE)
    if state is not None:
        state.transform = transform
        state.chunk_tokens = chunk_tokens
        state.full_head = full_head
        state.is_on = True
        return lm

    @functools.wraps(type(lm).forward)  # ``generate`` reads the parameters
    def forward(self: PreTrainedModel, *arguments: Any, **keywords: Any) -> Any:
        state: _Installed = self.__dict__[_STATE]
        if state.is_on:
            return _logprob_forward(self, *arguments, **keywords)
        return state.stock(self)(*arguments, **keywords)

    previous = lm.__dict__.get("forward")
    lm.__dict__[_STATE] = _Installed(transform, chunk_tokens, full_head, previous, forward)
    lm.forward = MethodType(forward, lm)
    return lm


def is_installed(model: nn.Module) -> bool:
    """Whether the log-probability forward is in force on this instance."""
    state: _Installed | None = find_causal_lm(model).__dict__.get(_STATE)
    return state is not None and state.is_on


def uninstall(model: nn.Module) -> None:
    """Restore the instance's previous forward; do nothing when none was installed.

    A forward that something has wrapped meanwhile stays where it is and calls the previous forward.
    """
    lm = find_causal_lm(model)
    state: _Installed | None = lm.__dict__.get(_STATE)
    if state is None:
        return
    state.is_on = False
    if getattr(lm.forward, "__func__", None) is state.forward:
        del lm.__dict__[_STATE], lm.__dict__["forward"]
        if state.previous is not None:
            lm.forward = state.previous


@contextlib.contextmanager
def stock_forward(model: nn.Module) -> Iterator[None]:
    """Have the stock forward in force for the block, which returns logits, within all that wraps
    it; the log-probability forward is installed."""
    state: _Installed = find_causal_lm(model).__dict__[_STATE]
    was_on, state.is_on = state.is_on, False
    try:
        yield
    finally:
        state.is_on = was_on


def _logprob_forward(
    self: PreTrainedModel,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    labels: Tensor | None = None,
    inv_temperature: Tensor | float = 1.0,
    loss_mask: Tensor | None = None,
    num_chunks: int | None = None,
    use_cache: bool | None = None,
    node_ids: Tensor | None = None,
    teachers: Sequence[TeacherStates] = (),
    states_only: bool = False,
    as_one_row: bool = False,
    entropy_gradient: bool = False,
    images: Tensor | None = None,
    image_ends: Tensor | None = None,
    adapter: Tensor | None = None,
    **kwargs: object,
) -> LogprobOutput:
    if refused := [
        name for name, value in kwargs.items() if value is not None and name != "return_dict"
    ]:
        raise TypeError(f"the log-probability forward does not take {', '.join(refused)}")
    if attention_mask is not None or use_cache:
        raise TypeError(
            "packed rows need attention_mask=None and use_cache=False; samples attend to each other"
            " otherwise"
        )
    if input_ids is None or input_ids.numel() != input_ids.shape[-1]:
        raise TypeError("the log-probability forward takes one row of input_ids, [T] or [1, T]")
    if adapter is not None and role_adapters.roles_of(self):
        role_adapters.select(self, int(adapter))
    tokens = input_ids.reshape(-1)
    device = tokens.device
    # shapes depend on these, so they are read on the host: on a device each would stall it
    positions = torch.arange(len(tokens))
    if position_ids is not None:
        positions = position_ids.reshape(-1).cpu()
    labels = tokens if labels is None else labels.reshape(-1)
    is_predicted = positions.numpy() != 0  # the first token of a sample has no context
    is_predicted[0] = False
    if loss_mask is not None:
        is_predicted &= loss_mask.reshape(-1).cpu().numpy()
    index = torch.from_numpy(np.flatnonzero(is_predicted))
    nodes, of_index = None, None
    before, predicted = index - 1, index
    reads = _Reads.of(teachers, is_predicted)
    computed, computed_positions = tokens, positions
    if node_ids is not None:
        attention = self.config.get_text_config()._attn_implementation
        if attention != "sdpa":  # eager attention would add the mask, flash attention drop it
            raise TypeError(
                f"prefix trees need the mask of PyTorch's attention: load the model with"
                f" attn_implementation='sdpa', not {attention!r}, or give rows without node_ids"
            )
        row_nodes = node_ids.reshape(-1).cpu().numpy()
        nodes = Nodes.of(row_nodes, positions.numpy())
        # a node that several samples are trained on goes through the head once, for each state of
        # its teacher
        num_states = reads.states.max(initial=0) + 1
        pairs = row_nodes[is_predicted].astype(np.int64) * num_states + reads.states
        pairs, inverse = np.unique(pairs, return_inverse=True)
        unique, reads = pairs // num_states, replace(reads, states=pairs % num_states)
        before, predicted, of_index, computed_index = (
            torch.from_numpy(array)
            for array in (nodes.parent[unique], nodes.token[unique], inverse, nodes.token)
        )
        computed_positions = positions[computed_index]
        computed, of_index = tokens[sent(computed_index, device)], sent(of_index, device)
    index, before, predicted = (sent(of, device) for of in (index, before, predicted))
    if isinstance(inv_temperature, Tensor) and inv_temperature.numel() > 1:
        inv_temperature = inv_temperature.reshape(-1)[predicted]
    layout = Layout.of(self, computed, computed_positions, nodes, as_one_row=as_one_row)
    never = getattr(self, _STATE).transform.never
    if never and loss_mask is not None and np.isin(tokens.cpu(), never)[is_predicted].any():
        raise ConfigError(
            "placeholders of images carry loss, which no policy samples: leave mask_env_responses"
            " on where the environment answers with images"
        )
    layout = replace(layout, further=_of_images(self, layout, images, image_ends))
    source, head, transform = _outputs(self, layout)
    if states_only:
        return LogprobOutput(states=source)
    logprobs, entropy, *divergence = chunked_logprobs(
        source[before],
        head,
        labels[predicted],
        inv_temperature,
        transform=transform,
        chunk_tokens=getattr(self, _STATE).chunk_tokens,
        num_chunks=num_chunks,
        teachers=reads.parts(device),
        entropy_gradient=entropy_gradient,
    )
    empty = torch.zeros(len(tokens), dtype=logprobs.dtype, device=tokens.device)

    def in_the_row(values: Tensor) -> Tensor:
        return empty.index_put((index,), values if of_index is None else values[of_index])

    return LogprobOutput(*map(in_the_row, (logprobs, entropy, *divergence)))


@dataclass(frozen=True, slots=True)
class _Reads:
    """Which state of which teacher predicts each of N tokens."""

    teachers: Sequence[TeacherStates]
    states: np.ndarray
    """int64 [N]: the state before a token, those of the teachers numbered one after another; 0
    without teachers."""

    @classmethod
    def of(cls, teachers: Sequence[TeacherStates], is_predicted: np.ndarray) -> _Reads:
        """Of the tokens ``is_predicted`` [T] of a row."""
        states = np.full(len(is_predicted), -1 if teachers else 0)
        begin = 0
        for teacher in teachers:
            view, row = teacher.view, teacher.view.row
            before = np.arange(row.num_tokens) - 1
            if row.node_ids is not None:
                before = Nodes.of(row.node_ids, row.position_ids).parent[row.node_ids]
            is_read = is_predicted & (view.index >= 0)
            states[is_read] = begin + before[view.index[is_read]]
            begin += len(teacher.hidden)
        states = states[is_predicted]
        if (states < 0).any():
            raise TypeError("a token with loss has no teacher that reads it")
        return cls(teachers, states)

    def parts(self, device: torch.device | str) -> list[_Scored]:
        """The states of each teacher, in the order of the tokens."""
        parts, begin = [], 0
        for teacher in self.teachers:
            end = begin + len(teacher.hidden)
            rows = np.flatnonzero((self.states >= begin) & (self.states < end))
            before = sent(torch.from_numpy(self.states[rows] - begin), device)
            weight = getattr(teacher.head, "weight", None)
            head = _Chunk(teacher.head, weight, teacher.transform, top_k=teacher.top_k)
            is_only = len(self.teachers) == 1
            at = None if is_only else sent(torch.from_numpy(rows), device)
            parts.append(_Scored(head, teacher.hidden[before], at))
            begin = end
        return parts


@contextlib.contextmanager
def precision_kept(head: nn.Module) -> Iterator[None]:
    """Run ``head`` in the precision of its weight for the block, as a chunk does; restore its
    forward after it."""
    with _restored_forward(head):
        keep_precision(head)
        yield


def visible_tokens(first: Tensor, last: Tensor) -> Tensor:
    """bool [..., C, C], True where a node (row) attends to another (column): to those on its own
    path, which stand before it and whose samples include its first; see `prefix_tree.Nodes`.

    >>> visible_tokens(torch.tensor([0, 0, 0, 1]), torch.tensor([1, 1, 0, 1])).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """
    return (first.unsqueeze(-1) <= last.unsqueeze(-2)).tril()


@dataclass(frozen=True, slots=True)
class Layout:
    """How the backbone gets a packed row of T tokens: as it stands, B = 1 and L = T, or its parts
    side by side.

    A part is a sample, or a prefix tree. Attention that is computed as a matrix
    costs T² per head for a row as it stands, although most of it is masked, and B·L² for parts side
    by side, which are padded on the right to the longest: nothing before attends to padding.
    """

    input_ids: Tensor  # int64 [B, L]
    position_ids: Tensor  # int64 [B, L]
    visible: Tensor | None  # bool [B, 1, L, L]; None: every token attends to its own part so far
    # int64 [T], where each token of the row is in B·L; None: in the same place
    index: Tensor | None
    # the samples' lengths as flash attention takes them; without them it reads the positions back
    # from the device in every layer
    flash_lengths: dict[str, Tensor | int] = field(default_factory=dict)
    # what a model that sees takes beside a row, see `engines.processing`
    further: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        lm: PreTrainedModel,
        tokens: Tensor,
        positions: Tensor,
        nodes: Nodes | None,
        *,
        as_one_row: bool,
    ) -> Layout:
        """The cheaper layout, by the operations of a layer of ``lm``; the row as it stands for
        flash attention.

        ``tokens`` and ``positions`` are int64 [T], of the nodes if a row has trees; all but
        ``tokens`` are on the host.
        """
        config = lm.config.get_text_config()
        device = tokens.device
        if not as_one_row and config._attn_implementation in ("sdpa", "eager"):
            begins = positions.numpy() == 0
            begins[0] = True
            part_ids = begins.cumsum() - 1
            lengths = np.bincount(part_ids)
            batch, longest = len(lengths), int(lengths.max())
            one_row = layer_cost(len(tokens), len(tokens) ** 2, config.hidden_size)
            if layer_cost(batch * longest, batch * longest**2, config.hidden_size) < one_row:
                columns = np.arange(len(tokens)) - (lengths.cumsum() - lengths)[part_ids]
                index = torch.from_numpy(part_ids * longest + columns)
                return cls._side_by_side(tokens, positions, nodes, (batch, longest), index)
        on_device = sent(positions, device)[None]
        if nodes is None:
            is_flash = "flash" in config._attn_implementation
            bounds = _flash_lengths(positions.numpy(), device) if is_flash else {}
            return cls(tokens[None], on_device, None, None, bounds)
        first, last = (sent(torch.from_numpy(ids), device) for ids in (nodes.first, nodes.last))
        return cls(tokens[None], on_device, visible_tokens(first, last)[None, None], None)

    @classmethod
    def _side_by_side(
        cls,
        tokens: Tensor,
        positions: Tensor,
        nodes: Nodes | None,
        shape: tuple[int, int],
        index: Tensor,
    ) -> Layout:
        device = tokens.device
        index = sent(index, device)

        def padded(values: Tensor, padding: int) -> Tensor:
            empty = torch.full((shape[0] * shape[1],), padding, dtype=values.dtype, device=device)
            return empty.index_put((index,), sent(values, device)).reshape(shape)

        # transformers takes a position that goes back for the start of another sample
        if nodes is None:
            return cls(
                padded(tokens, 0), torch.arange(shape[1], device=device).expand(shape), None, index
            )
        # padding attends to what is before it, and nothing to padding
        first, last = (padded(torch.from_numpy(part), -1) for part in (nodes.first, nodes.last))
        visible = visible_tokens(first, last)[:, None]
        return cls(padded(tokens, 0), padded(positions, 0), visible, index)


def _flash_lengths(positions: np.ndarray, device: torch.device) -> dict[str, Tensor | int]:
    """The variable-length arguments of transformers' FlashAttentionKwargs for samples side by side
    in a row: each starts at position 0."""
    begins = np.flatnonzero(positions == 0)
    bounds = np.concatenate([[0], begins[begins > 0], [len(positions)]]).astype(np.int32)
    ends, longest = sent(torch.from_numpy(bounds), device), int(np.diff(bounds).max())
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def layer_cost(num_tokens: int, num_pairs: int, hidden: int) -> int:
    """Multiplications of a layer over 2·hidden: 12·hidden² for each token, and 2·hidden for each
    pair that attends.

    >>> layer_cost(512, 512**2, 128), layer_cost(16 * 48, 16 * 48**2, 128)
    (655360, 626688)
    """
    return 6 * hidden * num_tokens + num_pairs


def _outputs(
    lm: PreTrainedModel, layout: Layout
) -> tuple[Tensor, Callable[[Tensor], Tensor], LogitTransform | None]:
    """Hidden states [T, D], the head and what follows it; with the full head logits [T, V] and
    nothing to do."""
    state: _Installed = getattr(lm, _STATE)
    arguments = {
        "input_ids": layout.input_ids,
        "position_ids": layout.position_ids,
        "attention_mask": layout.visible,
        "use_cache": False,
        **layout.flash_lengths,
        **layout.further,
    }
    if state.full_head:
        with precision_kept(lm.get_output_embeddings()):
            logits = _in_the_row(state.stock(lm)(**arguments).logits, layout)
            return logits, nn.Identity(), state.transform.of_ids
    states = _in_the_row(_backbone(lm)(**arguments).last_hidden_state, layout)
    return states, lm.get_output_embeddings(), state.transform


def _of_images(
    lm: PreTrainedModel, layout: Layout, images: Tensor | None, image_ends: Tensor | None
) -> dict[str, Tensor]:
    """The inputs of a model that sees, of a row of one sample if it has images; nothing for a model
    of text."""
    if (processing := processing_of(lm)) is None:
        if images is not None:
            raise TypeError(f"{type(lm).__name__} takes no images, and the row has some")
        return {}
    arrays = (None if part is None else part.cpu().numpy() for part in (images, image_ends))
    files = image_files(*arrays)
    return processing.arguments(lm, layout.input_ids, files, is_trained=lm.training)


def _backbone(lm: PreTrainedModel) -> nn.Module:
    """The part of ``lm`` before the head; some classes name none."""
    from transformers.modeling_utils import PreTrainedModel

    parts = [child for child in lm.children() if isinstance(child, PreTrainedModel)]
    for part in (lm.base_model, lm.get_decoder(), *parts):
        if part is not lm:
            return part
    raise ConfigError(f"{type(lm).__name__} has no part before its head that can be called")


def _in_the_row(values: Tensor, layout: Layout) -> Tensor:
    """[B, L, D] as [T, D], in the order of the row."""
    flat = values.flatten(0, 1)
    return flat if layout.index is None else flat[layout.index]
