"""Sanity checks run before an optimizer step: all inputs are finite, and sampler and trainer agree.

A mask or a bound on a ratio can hide a NaN from the loss, so the inputs are checked too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch

from verifiers.errors import ConfigError, NonFiniteLoss
from verifiers.rollouts.turn import Turn
from verifiers.storage.proof import ALARM
from verifiers_trainer.algorithm.batch import Group, TrainBatch
from verifiers_trainer.algorithm.diagnostics import MIN_COMPARED, RatioMeter
from verifiers_trainer.algorithm.packing import PackedRow, forward_arguments
from verifiers_trainer.engines.embedded.threads import threads_for
from verifiers_trainer.engines.processing import processing_of
from verifiers_trainer.policy.checkpoint_files import write_json
from verifiers_trainer.policy.forward_checks import (
    attention_kernels,
    check_head,
    check_packing,
    check_sharing,
    layer_dtype,
    rounding_noise,
)
from verifiers_trainer.policy.logprobs import install_logprob_forward
from verifiers_trainer.policy.scoring import scored
from verifiers_trainer.settings.config import RLConfig

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from verifiers_trainer.run.context import TrainingRun

T = TypeVar("T")

log = logging.getLogger(__name__)

DUMPED = ("token_ids", "sampler_logprobs", "advantage", "weight", "version")
POLICY_LOGPROB, SAMPLED_LOGPROB = "log-probability of the policy", "sampled log-probability"
OF_THE_WEIGHTS = (POLICY_LOGPROB, SAMPLED_LOGPROB)
"""Values whose NaN or infinity says that the weights themselves are bad."""
FP32_NOISE = 2.5e-5
"""Nats per token that sampler and trainer may differ by in float32, or less."""
END = 4.0
"""Multiple of the noise at which a disagreement of sampler and trainer ends the run."""
NUM_NOISE_ROWS = 4
"""Most rows on which rounding is measured, each by two forward passes."""
NUM_FIRST = 4
"""Comparisons after which the noise is as the sampler and the trainer had it in these."""


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
        kernels = attention_kernels(model)
        log.info("attention of a sample: %s; of several packed in a row: %s", *kernels)
        head = check_head(model)
        if not head.ok:
            log.warning(
                "the chunked head differs from the stock one by %.2g: the full head is used",
                head.difference,
            )
            install_logprob_forward(model, full_head=True)
        of_images = processing_of(model)
        if of_images is not None and config.packing and not of_images.packs_text(model):
            log.info("a model with positions of its own has a sample in a row: no packing")
            config.packing = False
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
    for group in sorted(groups, key=lambda group: group.index):
        for rollout in group.rollouts:
            if rollout.turns and all(_is_of(turn, version) for turn in rollout.turns):
                return scored(model, [rollout.turns], version, config.device, config.temperature)
    return RatioMeter(version)


def _is_of(turn: Turn, version: int) -> bool:
    """Whether one policy version sampled all tokens of a turn."""
    if isinstance(turn.version, int):
        return turn.version == version
    return bool((turn.version == version).all())


def noise_of(
    model: torch.nn.Module, meter: RatioMeter, dtype: torch.dtype | None = None
) -> list[float]:
    """The rounding noise of the compared tokens of some rows, as computed or of a dtype: [sum in
    nats, tokens]. Of several, since it differs by the text: certain tokens have hardly any."""
    total = count = 0.0
    for packed, _, current in _spread([row for row in meter.rows if row[2].any()]):
        tensors = packed.to_tensors() if isinstance(packed, PackedRow) else packed
        device = next(model.parameters()).device
        arguments = {name: value.to(device) for name, value in forward_arguments(tensors).items()}
        noise = rounding_noise(model, arguments, dtype).to(current.device)[current]
        total, count = total + float(noise.sum()), count + float(current.sum())
    return [total, count]


def _spread(rows: Sequence[T]) -> list[T]:
    """At most ``NUM_NOISE_ROWS``, the first and the last with them."""
    if len(rows) <= NUM_NOISE_ROWS:
        return list(rows)
    return [rows[i] for i in np.linspace(0, len(rows) - 1, NUM_NOISE_ROWS).astype(int)]


def mean_noise(
    model: torch.nn.Module, meter: RatioMeter, dtype: torch.dtype | None = None
) -> float:
    """``noise_of`` a token, in nats."""
    total, count = noise_of(model, meter, dtype)
    return total / max(1.0, count)


def noise_of_step(run: TrainingRun, meter: RatioMeter, dtype: torch.dtype | None = None) -> float:
    """``mean_noise`` of a step's meter: of each rank's row, of a split policy of rank 0's. A
    collective, but for a meter of a whole policy that is not shared."""
    if meter.is_shared and run.full_copy is None:
        numbers = noise_of(run.model, meter, dtype)
        total, count = run.ranks.gather(numbers, "the noise of the step").sum(0).tolist()
        return float(total / max(1.0, count))

    def measure() -> float:
        with run.policy_of_rank_0() as model:
            return mean_noise(model, meter, dtype)

    is_whole = run.full_copy is None
    return measure() if is_whole else run.ranks.share(measure, "the noise of the step")


class Noise(Protocol):
    """Gives the mean rounding noise of the tokens of a meter in nats, as computed or of a dtype."""

    def __call__(self, meter: RatioMeter, dtype: torch.dtype | None = None) -> float: ...


class Agreement:
    """Requires equal log-probabilities in sampler and trainer for tokens of the present weights.

    What both may differ by is measured: the ``rounding_noise`` of the first tokens compared, and,
    after ``NUM_FIRST`` comparisons, the share of it that sampler and trainer had in these. It is
    measured anew, on the tokens in question, before anything is said of them.
    """

    def __init__(
        self,
        config: RLConfig | None,
        tokenizer: PreTrainedTokenizerBase,
        temperature: float = 1.0,
        least: float = FP32_NOISE,
    ):
        """``config``: the settings of sampling; None: ``temperature``, and nothing else. ``least``:
        the noise in any case, nats per token."""
        self._config, self._tokenizer = config, tokenizer
        self._temperature, self._least = temperature, max(least, FP32_NOISE)
        self._rounding, self._share = 0.0, 1.0
        self._shares: list[float] = []

    @property
    def noise(self) -> float:
        """Nats per token."""
        return max(self._least, self._share * self._rounding)

    def check(self, meter: RatioMeter, measure: Noise, what: str = "") -> dict[str, float]:
        """The metrics of a comparison; ``measure`` gives the mean rounding noise of its tokens.

        Raises ``ConfigError`` with what is known of a disagreement of ``END`` times the noise.
        Judges nothing when top-k and the like reshape the sampled distribution; of fewer than
        ``MIN_COMPARED`` tokens the disagreement is NaN, unknown.
        """
        if self._config is not None and self._config.reshaping:
            return {}
        compared = {"sampler/compared": meter.num_current}
        if meter.num_current < MIN_COMPARED:
            return compared | {"sampler/disagreement": math.nan}
        if not self._rounding or not meter.disagreement(self.noise) <= ALARM:
            self._rounding = measure(meter)
        multiple = meter.disagreement(self.noise)
        if not multiple <= END:
            raise ConfigError(
                self._sentence(meter, what, measure(meter, torch.bfloat16)), disagreement=multiple
            )
        numbers = compared | {"sampler/noise": self.noise, "sampler/disagreement": multiple}
        if len(self._shares) < NUM_FIRST:
            self._shares.append(meter.mean_abs / max(self._least, self._rounding))
            if len(self._shares) == NUM_FIRST:
                self._share = min(max(sum(self._shares) / NUM_FIRST, 0.5), 1.5)
        return numbers

    def _sentence(self, meter: RatioMeter, what: str, half: float) -> str:
        means, tokens = meter.furthest()
        by_answer = ", ".join(f"{mean:.2g} in answer {n}" for n, mean in list(means.items())[:4])
        furthest = "; ".join(
            f"{self._tokenizer.decode([token])!r} (token {token}, place {position}, answer {answer})"
            f" by {d:+.2g}"
            for token, position, answer, d in tokens
        )
        temperature = self._temperature if self._config is None else self._config.temperature
        slope, _ = meter.sharpness()
        looks = temperature * (1 + slope / 2) / (1 - slope / 2) if abs(slope) < 1 else temperature
        if meter.disagreement(half) <= 1:
            hint = (
                f" bfloat16 explains it ({half:.2g} nats per token): compute in one precision, with"
                " --dtype float32 at the server or bf16 = true here."
            )
        elif slope:
            hint = f" The tokens look sampled at temperature {looks:.2g}."
        else:
            hint = ""
        return (
            f"{what or f'with identical weights (version {meter.version})'}, sampler and trainer disagree by"
            f" {meter.mean_abs:.2g} nats per token ({meter.max_abs:.2g} at most;"
            f" {END * self.noise:.2g} allowed): check that both use the same tokenizer, chat"
            f" template, dtype and temperature ({temperature:g}) in every turn, and that the server"
            f" returns processed log-probabilities. On average {by_answer}; furthest:"
            f" {furthest}.{hint}"
        )


class Agreements:
    """An ``Agreement`` for each role with an adapter of its own, so that the tokens of one do not
    hide that another's adapter is an old one; else one for all tokens."""

    def __init__(self, new: Callable[[], Agreement], roles: Sequence[str] = ()):
        self._roles = tuple(roles)
        self._agreements = [new() for _ in self._roles or ("",)]

    def check(self, meter: RatioMeter, measure: Noise, what: str = "") -> dict[str, float]:
        """The metrics of a comparison, as `Agreement.check`: those of the role that is furthest
        apart, and ``<name>/<role>`` of each."""
        if not self._roles:
            return self._agreements[0].check(meter, measure, what)
        numbers: dict[str, float] = {}
        parts: list[dict[str, float]] = []
        what = what or f"with identical weights (version {meter.version})"
        for number, (role, agreement) in enumerate(zip(self._roles, self._agreements, strict=True)):
            of_role = agreement.check(
                meter.of_adapter(number), measure, f"in the role {role!r}, {what}"
            )
            numbers |= {f"{name}/{role}": value for name, value in of_role.items()}
            parts.append(of_role)
        if not numbers:
            return {}
        measured = [part for part in parts if not math.isnan(part["sampler/disagreement"])] or parts
        worst = max(measured, key=lambda part: part["sampler/disagreement"])
        compared = sum(part["sampler/compared"] for part in measured)
        return {**worst, "sampler/compared": compared, **numbers}
