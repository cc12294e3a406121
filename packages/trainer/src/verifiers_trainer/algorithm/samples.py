"""Turn the model calls of a rollout into samples: every sampled token is trained exactly once, on
the sampled ids.

A sample is a branch of the rollout's transcript (``verifiers.rollouts.transcript``) with its
advantages and the mask of the tokens that carry loss: the sampled tokens, and on request the
environment's between turns, never the first prompt. Masks come from turn boundaries, never from
token ids, so an end token that equals the pad token is trained.

Every array here describes token t at entry t, given the tokens before it; entry 0 is never trained.
Nothing is decoded, encoded again or cut. ``batch`` decides which rewards enter the baseline,
``aggregation`` how much a token weighs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from verifiers.data.images import image_bytes, image_parts, image_url
from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.transcript import NOT_SAMPLED, Branch, branches
from verifiers.rollouts.turn import Turn
from verifiers.types import Immutable

if TYPE_CHECKING:
    import torch

    from verifiers.types import Messages

COMPONENTS = ("rl", "ce", "ref_kl")
"""Parts of the loss, of which a sample has one: its rewards ("rl"), imitation ("ce"), nearness to a
teacher ("ref_kl"). Each is a mean over its own tokens of the step."""

Array = TypeVar("Array", np.ndarray, "torch.Tensor")


def carries_loss(loss_mask: Array, weight: Array) -> Array:
    """bool [T], which tokens carry loss: those of the mask that the step weighs."""
    return loss_mask & (weight != 0)


class Sample(Immutable, frozen=True, eq=False):
    """A token sequence to learn from.

    Example, a prompt [1, 15], the completion [7, 2] and an environment's token 9 before the
    completion [2]::

        Sample(token_ids=[1, 15, 7, 2, 9, 2], loss_mask=[F, F, T, T, F, T],
               sampler_logprobs=[0, 0, -.1, -.7, 0, -.2], versions=[-2, -2, 4, 4, -2, 5],
               advantages=[0, 0, .5, .5, 0, .5])
    """

    token_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    # float32 [T], nats, log μ of the sampling policy; 0 if nothing was sampled
    sampler_logprobs: np.ndarray
    versions: np.ndarray  # int32 [T], NOT_SAMPLED if nothing was sampled
    advantages: np.ndarray  # float32 [T], 0 where masked
    inv_temperature: float = 1.0
    rollout: int = 0
    """Number of the rollout in the train batch; the samples of a forked rollout share it."""
    group: int = 0
    """Number of the group of sibling rollouts."""
    component: str = "rl"
    """The part of the loss that trains the sample, one of ``COMPONENTS``."""
    turns: tuple[tuple[int, int, int], ...] = ()
    """(index of the turn, start, end) of each completion; see ``transcript.Branch``."""
    images: tuple[bytes, ...] = ()
    """The files of the images whose placeholders the tokens have, in their order."""
    adapter: int | None = None
    """Number of the adapter that sampled it and is trained on it, where roles have their own."""
    teacher: int = 0
    """Number of the teacher that scores it, where tasks have their own."""
    teacher_prompt: np.ndarray | None = None
    """int32 [P]: the prompt that the teacher reads in place of the first one (``num_prompt``
    tokens); None: it reads what the policy read. See ``teacher_view``."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt(self) -> int:
        """Tokens before the first completion; 0 if its turns are not known."""
        return self.turns[0][1] if self.turns else 0

    @property
    def num_trained(self) -> int:
        """Tokens with loss."""
        return int(self.loss_mask.sum())

    @property
    def oldest_version(self) -> int | None:
        """Smallest policy version among the sampled tokens; None when nothing was sampled."""
        sampled = self.versions[self.versions != NOT_SAMPLED]
        return int(sampled.min()) if len(sampled) else None


def recorded_images(messages: Messages) -> tuple[bytes, ...]:
    """The files of the images that a record holds; an address, which may show another image by now,
    is none, so that a model that sees refuses the sample by its count."""
    parts = [part for part in image_parts(messages) if str(image_url(part)).startswith("data:")]
    return tuple(map(image_bytes, parts))


class RolloutSamples(Immutable, frozen=True):
    """The samples of a rollout, or the reason why it has none."""

    samples: tuple[Sample, ...]
    excluded: str | None = None
    """"overlong", "truncated", "unscored" or "empty" when the rollout carries no loss; None when it
    does."""
    num_of_role: tuple[tuple[str, int], ...] = ()
    """(role, how many of the samples are of it), one after another; the role is "" if all are
    compared together. Empty for samples that were not joined."""

    @property
    def num_forks(self) -> int:
        counts = [num for _, num in self.num_of_role] or [len(self.samples)]
        return sum(max(0, num - 1) for num in counts)


def rollout_samples(
    turns: Sequence[Turn],
    advantage: float | Sequence[float],
    *,
    rollout: int = 0,
    group: int = 0,
    temperature: float = 1.0,
    max_seq_len: int | None = None,
    max_completion_len: int | None = None,
    mask_truncated: bool = False,
    is_truncated: bool = False,
    mask_env_responses: bool = True,
    component: str = "rl",
    adapter_roles: Sequence[str] = (),
) -> RolloutSamples:
    """The samples of a rollout with their advantage: one number, or one per turn (credit="turn").

    Turns are merged into samples in the order of their first turn; a sample without any completion
    token is left out. With ``mask_env_responses=False`` the environment's tokens between turns
    carry loss too (never the first prompt of a sample).

    ``adapter_roles``: the roles with an adapter of their own, where there are any; a sample then has
    that of the role that took its turns.

    A turn whose advantage is NaN carries no loss. A rollout gives no samples, and ``excluded`` says
    why, when its advantage is NaN, or that of every turn, when it is longer than ``max_seq_len``
    tokens in any sample (or than ``max_completion_len`` after its first prompt), or when a limit
    cut it (``is_truncated``) or any of its turns and ``mask_truncated`` is set. *Raises* ValueError
    when the number of advantages is not that of the turns, ConfigError for turns of several roles
    with adapters in one sample.
    """
    if isinstance(advantage, float) or np.ndim(advantage) == 0:
        per_turn = [float(advantage)] * len(turns)  # type: ignore[arg-type]
    else:
        per_turn = [float(value) for value in advantage]
    if len(per_turn) != len(turns):
        raise ValueError(
            f"{len(per_turn)} advantages for {len(turns)} turns: give one number, or one per turn"
        )
    if per_turn and all(map(math.isnan, per_turn)):
        return RolloutSamples((), "unscored")
    is_limited = max_seq_len is not None or max_completion_len is not None
    if is_limited and is_overlong(turns, max_seq_len, max_completion_len):
        return RolloutSamples((), "overlong")
    if mask_truncated and (is_truncated or any(turn.is_truncated for turn in turns)):
        return RolloutSamples((), "truncated")
    samples = []
    for branch in branches(turns):
        if not branch.sampled.any():
            continue
        if branch.sampler_logprobs is None:
            raise ValueError("a turn has other numbers of completion ids and log-probabilities")
        loss_mask = np.zeros(len(branch.token_ids), bool)
        advantages = np.zeros(len(branch.token_ids), np.float32)
        before = branch.num_prompt
        for index, start, end in branch.turns:
            if not math.isnan(per_turn[index]):
                trained = slice(start if mask_env_responses else before, end)
                loss_mask[trained], advantages[trained] = True, per_turn[index]
            before = end
        samples.append(
            Sample(
                branch.token_ids,
                loss_mask,
                branch.sampler_logprobs,
                branch.versions,
                advantages,
                inv_temperature=1.0 / temperature,
                rollout=rollout,
                group=group,
                component=component,
                adapter=_adapter_of(turns, branch, adapter_roles) if adapter_roles else None,
                turns=branch.turns,
                images=recorded_images(turns[branch.turns[-1][0]].prompt),
            )
        )
    return RolloutSamples(tuple(samples), None if samples else "empty")


def _adapter_of(turns: Sequence[Turn], branch: Branch, adapter_roles: Sequence[str]) -> int:
    """The number of the adapter of the role that took the turns of a branch."""
    roles = sorted({turns[index].acting_role for index, _, _ in branch.turns})
    if len(roles) > 1:
        raise ConfigError(
            f"turns of {' and '.join(roles)} continue each other as one conversation, and with"
            " lora_per_role each is of another policy: give the roles views that differ"
        )
    if roles[0] not in adapter_roles:
        raise ConfigError(
            f"a turn to train is of the role {roles[0]!r}, and those with an adapter are"
            f" {', '.join(adapter_roles)}: name it in trained_roles"
        )
    return adapter_roles.index(roles[0])


def joined(of_role: Mapping[str, RolloutSamples]) -> RolloutSamples:
    """The samples of a rollout's roles together; ``excluded`` says why if there is none."""
    samples = tuple(sample for part in of_role.values() for sample in part.samples)
    counts = tuple((role, len(part.samples)) for role, part in of_role.items())
    reason = next(iter(of_role.values())).excluded
    return RolloutSamples(samples, None if samples else reason, counts)


def is_overlong(
    turns: Sequence[Turn], max_seq_len: int | None, max_completion_len: int | None = None
) -> bool:
    """Whether any sample exceeds ``max_seq_len`` tokens, or ``max_completion_len`` tokens after the
    first prompt.

    A sample is as long as its last turn.
    """
    if not turns:
        return False
    bounds = [] if max_seq_len is None else [max_seq_len]
    if max_completion_len is not None:
        bounds.append(turns[0].num_prompt + max_completion_len)
    return bool(bounds) and max(turn.num_tokens for turn in turns) > min(bounds)


def turn_spans(rollout: Rollout, samples: RolloutSamples) -> list[tuple[int, int, int]]:
    """Where the completion of each turn of a rollout is in its ``samples``: (sample, start, end).

    A turn of a sample that is left out, for it has no completion token or its role is excluded, is
    at (-1, 0, 0).
    """
    spans = [(-1, 0, 0)] * len(rollout.turns)
    remaining = iter(enumerate(samples.samples))
    for role, count in samples.num_of_role or (("", len(samples.samples)),):
        members = [n for n, turn in enumerate(rollout.turns) if not role or turn.role == role]
        for number, sample in itertools.islice(remaining, count):
            for index, start, end in sample.turns:
                spans[members[index]] = number, start, end
    return spans
