"""Sanity checks run before an optimizer step: all inputs are finite, and sampler and trainer agree.

A mask or a bound on a ratio can hide a NaN from the loss, so the inputs are checked too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import DynamicCache

from verifiers.errors import ConfigError, NonFiniteLoss
from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.batch import Group, TrainBatch
from verifiers_trainer.algorithm.diagnostics import RatioMeter
from verifiers_trainer.algorithm.packing import PackedRow, forward_arguments, pack
from verifiers_trainer.algorithm.samples import rollout_samples
from verifiers_trainer.engines.embedded.threads import threads_for
from verifiers_trainer.policy.checkpoint_files import write_json
from verifiers_trainer.policy.forward_checks import (
    check_head,
    check_packing,
    check_sharing,
    layer_dtype,
)
from verifiers_trainer.policy.logprobs import (
    find_causal_lm,
    install_logprob_forward,
    precision_kept,
    stock_forward,
)
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.settings.fields import RESHAPING

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel

log = logging.getLogger(__name__)

DUMPED = ("token_ids", "sampler_logprobs", "advantage", "weight", "version")
POLICY_LOGPROB, SAMPLED_LOGPROB = "log-probability of the policy", "sampled log-probability"
OF_THE_WEIGHTS = (POLICY_LOGPROB, SAMPLED_LOGPROB)
"""Values whose NaN or infinity says that the weights themselves are bad."""
FP32_TOLERANCE, TOLERANCE = 1e-4, 0.1
"""Nats per token between sampler and trainer, in the mean; the second on a server, and at most in
half precision: with a model of 135 M parameters in bfloat16 0.03 was measured where only the shapes
of sampling and training differ, and 0.05 to 0.07 against vLLM. Wrong tokens, raw log-probabilities
or other weights differ by several times that."""
HALF_TOLERANCE, HALF_DRIFT = 0.02, 0.005
"""The same in half precision where sampler and trainer share the weights, and of the signed mean,
in which rounding cancels; above them the rounding of the run itself is measured."""
ROUNDINGS, STANDARD_ERRORS, ROUNDED_TOKENS = 3.0, 6.0, 64
"""How many times its rounding a run may differ, the standard errors of a signed mean, and most
tokens that rounding is measured on."""


def check_forward(model: PreTrainedModel, config: RLConfig) -> None:
    """Compare our forward pass with the stock pass; on a difference fall back to the stock parts
    with a warning.

    Logs the precision that the layers compute in, as measured, and warns where it is not what is
    set.
    """
    with threads_for(model):  # the engine that sets them starts afterwards
        is_half = bool(config.bf16 or config.fp16)
        if (dtype := layer_dtype(model)) is not None:
            computed = str(dtype).removeprefix("torch.")
            log.info("the layers compute in %s", computed)
            if is_half and dtype not in (torch.bfloat16, torch.float16):
                log.warning(
                    "%s is set, and the layers compute in %s",
                    "bf16" if config.bf16 else "fp16",
                    computed,
                )
        head = check_head(model)
        if not head.ok:
            log.warning(
                "the chunked head differs from the stock one by %.2g: the full head is used",
                head.difference,
            )
            install_logprob_forward(model, full_head=True)
        if not config.packing:
            config.share_prompts = False
            return
        packed = check_packing(model, is_half=is_half)
        if not packed.ok:
            log.warning(
                "packed samples see each other (difference %.2g): packing is switched off",
                packed.difference,
            )
            config.packing = False
        config.share_prompts = (
            check_sharing(model, is_half=is_half).ok and config.share_prompts and config.packing
        )


def not_a_number(
    batch: TrainBatch, rows: Sequence[PackedRow]
) -> tuple[str, list[PackedRow]] | None:
    """The first non-finite input of the loss, by name, with its packed rows; None when all are
    finite.

    A NaN reward is an unknown reward, excluded when the batch is built.
    """
    if any(np.isinf(group.rewards).any() for group in batch.groups):
        return "reward", list(rows)
    for row in rows:
        checked = {
            SAMPLED_LOGPROB: row.sampler_logprobs,
            "advantage": row.advantage,
            "weight": row.weight,
        }
        for name, values in checked.items():
            if not np.isfinite(values[row.loss_mask]).all():
                return name, [row]
    return None


def non_finite(key: str, rows: Sequence[PackedRow], step: int, folder: Path) -> NonFiniteLoss:
    """The error for ``step``; writes the tokens of ``rows`` to ``folder``."""
    dump = folder / f"non-finite-step-{step}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        dump,
        [{name: [repr(v) for v in getattr(row, name).tolist()] for name in DUMPED} for row in rows],
    )
    return NonFiniteLoss(
        f"the {key} of step {step} is not finite; no step was taken, and the tokens are in {dump}."
        " Lower the learning rate, or look for rewards and log-probs that are not numbers",
        key=key,
        dump=str(dump),
    )


def compared_on(
    model: torch.nn.Module, groups: Sequence[Group], version: int, config: RLConfig
) -> RatioMeter:
    """Measure the first rollout that ``version`` sampled whole, by a forward pass; empty without
    such a rollout."""
    meter = RatioMeter(version)
    for packed in _sampled_whole(groups, version, config):
        row = packed.to_tensors(config.device)
        with torch.no_grad():
            logprobs = model(**forward_arguments(row, packed)).logprobs
            meter.add(logprobs, row["sampler_logprobs"], None, row)
    return meter


def _sampled_whole(groups: Sequence[Group], version: int, config: RLConfig) -> list[PackedRow]:
    """Rows of the first rollout that ``version`` sampled whole; none without such a rollout. Its
    advantages are 1."""
    for group in sorted(groups, key=lambda group: group.index):
        for rollout in group.rollouts:
            if not rollout.turns or not all(_is_of(turn, version) for turn in rollout.turns):
                continue
            samples = rollout_samples(rollout.turns, 1.0, temperature=config.temperature).samples
            weights = [sample.loss_mask.astype(np.float64) for sample in samples]
            return pack(samples, weights, max_tokens=max(sample.num_tokens for sample in samples))[
                0
            ]
    return []


def _is_of(turn: Turn, version: int) -> bool:
    """Whether one policy version sampled all tokens of a turn."""
    if isinstance(turn.version, int):
        return turn.version == version
    return bool((turn.version == version).all())


def rounding(model: PreTrainedModel, rows: Sequence[PackedRow], config: RLConfig) -> float:
    """Nats per token, in the mean, by which the log-probabilities of a sample of ``rows`` change
    where ``model`` computes its tokens one after another, as a sampler does, and not side by side:
    kernels differ with the shape. NaN without a sample."""
    packed = next((row for row in rows if row.loss_mask.any()), None)
    if packed is None:
        return math.nan
    begin = int(packed.loss_mask.argmax())
    prompt = packed.seq_ids if packed.prompt_seq_ids is None else packed.prompt_seq_ids
    ids = packed.seq_ids[begin], prompt[begin]
    columns = np.flatnonzero(np.isin(packed.seq_ids, ids))  # the sample, with a shared prompt
    columns = columns[: np.searchsorted(columns, begin) + ROUNDED_TOKENS]
    row = packed.to_tensors(config.device)
    tokens = row["token_ids"][None, columns]
    first = int(packed.loss_mask[columns].argmax())
    head, was_training = find_causal_lm(model).get_output_embeddings(), model.training
    model.eval()  # gradient checkpointing takes no cache
    with torch.no_grad():
        together = model(**forward_arguments(row, packed)).logprobs[columns]
        with stock_forward(model), precision_kept(head):
            cache, logits = DynamicCache(), []
            for piece in [tokens[:, :first], *tokens[:, first:-1].split(1, dim=1)]:
                logits.append(
                    model(input_ids=piece, past_key_values=cache, use_cache=True).logits[:, -1]
                )
    model.train(was_training)
    logp = torch.cat(logits).float() * row["inv_temperature"][columns[first:], None]
    one_by_one = logp.log_softmax(-1).gather(1, tokens[0, first:, None])[:, 0]
    differs = (together[first:] - one_by_one)[torch.from_numpy(packed.loss_mask[columns[first:]])]
    return float(differs.abs().mean())


def test_ratio(
    meter: RatioMeter,
    config: RLConfig,
    dtype: torch.dtype,
    on_server: bool,
    rounding_of: Callable[[], float] | None,
) -> None:
    """Require equal log-probabilities in sampler and trainer for tokens of the present weights.

    Raises ``ConfigError`` when the mean difference is above 1e-4 nats (0.1 against a server, whose
    precision and kernels differ). In half precision what rounding explains is allowed, which
    ``rounding_of`` measures where a bound is exceeded; 0.1 without it. Skipped when top-k and the
    like reshape the sampled distribution.
    """
    if config.sampling().keys() & RESHAPING:
        return
    is_exact = dtype == torch.float32 and not (config.bf16 or config.fp16 or on_server)
    allowed, drifts = FP32_TOLERANCE if is_exact else TOLERANCE, False
    if not is_exact and not on_server and rounding_of is not None:
        allowed, drift = HALF_TOLERANCE, HALF_DRIFT
        chance = STANDARD_ERRORS * meter.mean_abs / meter.num_current**0.5
        if not (meter.mean_abs <= allowed and abs(meter.mean) <= drift + chance):
            noise = rounding_of()
            allowed = min(TOLERANCE, max(allowed, ROUNDINGS * noise))
            drifts = not abs(meter.mean) <= max(drift, noise / 2) + chance
    on_a_side = f", but not {meter.mean:.2g} on one side" if drifts else ""
    if drifts or not meter.mean_abs <= allowed:
        raise ConfigError(
            f"with identical weights (version {meter.version}), sampler and trainer disagree by"
            f" {meter.mean_abs:.2g} nats per token ({meter.max_abs:.2g} at most; {allowed:.2g}"
            f" allowed{on_a_side}): check that both use the same tokenizer, chat template, dtype"
            f" ({dtype}) and temperature ({config.temperature:g}) in every turn, and that the"
            " server returns"
            " processed log-probabilities"
        )
