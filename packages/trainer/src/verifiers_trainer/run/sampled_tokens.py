"""Test at the start of a run that a server samples from the distribution that the settings name.

Log-probabilities cannot show it: a server that cuts or sharpens the distribution after it computed
them returns those of the distribution that was asked for. So the server draws many tokens at one
position, and their frequencies are compared with the policy's distribution there. The position is
the one of a fixed prompt where a change of the temperature shows best. Engines that share the
trainer's weights sample by the trainer's own code and draw nothing.

The cost is named in the log and in ``time/draws``: at most ``MAX_DRAWS`` tokens after one prompt of
at most ``scoring.NUM_PROMPT`` tokens, asked beside the first rollouts.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from verifiers.errors import ConfigError, WeightSyncError
from verifiers_trainer.policy.forward_checks import quiet
from verifiers_trainer.policy.logprobs import find_causal_lm, precision_kept, stock_forward
from verifiers_trainer.policy.scoring import fixed_prompts

if TYPE_CHECKING:
    from verifiers_trainer.engines.vllm.engine import VLLMEngine
    from verifiers_trainer.run.context import TrainingRun

log = logging.getLogger(__name__)
MIN_CHANGE = 0.03
"""Change of the temperature, as a share of it, that the draws shall tell."""
MIN_DRAWS, MAX_DRAWS = 512, 16_384
Z = 4.9
"""Standard errors from which a deviation counts: one false alarm in a million runs."""
POWER_Z = Z + 1.65
"""Standard errors that a change must have to be found in 95 of 100 runs."""
LEAST_TEMPERATURE, LEAST_SHARE = 0.01, 0.1
"""Deviations that rounding may cause at a server: of the temperature, and of a token's share."""


@dataclass(frozen=True)
class Position:
    """A prompt, and the policy's distribution [V] of the token after it at the temperature."""

    prompt: list[int]  # [P], token ids
    probabilities: np.ndarray  # [V]
    temperature: float = 1.0

    @property
    def variance(self) -> float:
        """Of log p under p, in nats²: the distribution at the temperature T·(1 - ε) has a mean log p
        that is ε times it larger."""
        return self._moments()[1]

    @property
    def num_draws(self) -> int:
        """As many as tell ``MIN_CHANGE``, within bounds."""
        needed = (POWER_Z / MIN_CHANGE) ** 2 / max(self.variance, 1e-9)
        return int(min(max(needed, MIN_DRAWS), MAX_DRAWS))

    @property
    def smallest_change(self) -> float:
        """The smallest change of the temperature, as a share of it, that ``num_draws`` tell."""
        return POWER_Z / math.sqrt(self.num_draws * max(self.variance, 1e-9))

    def _moments(self) -> tuple[float, float]:
        p = self.probabilities[self.probabilities > 0]
        mean = float((p * np.log(p)).sum())
        return mean, float((p * np.log(p) ** 2).sum()) - mean**2

    def compare(self, tokens: np.ndarray) -> tuple[dict[str, float], str]:
        """(metrics of the draws [N], what they look like, or nothing where they look as they should).

        Three tests: the mean log p (the score of the temperature), the tail beyond the least likely
        token that was drawn (top_p, top_k, min_p), and Pearson's χ² (anything else).
        """
        p, n = self.probabilities, len(tokens)
        mean, variance = self._moments()
        with np.errstate(divide="ignore"):
            drawn = np.log(p[tokens])
        sharper = (float(drawn.mean()) - mean) / variance if variance else 0.0
        drawn_mass = float(p[p >= p[tokens].min()].sum())
        numbers = {
            "sampler/draws": float(n),
            "sampler/draws_temperature": self.temperature * (1 - sharper),
            "sampler/draws_kept": drawn_mass,
        }
        chi, share = _pearson(p, tokens)
        if drawn_mass < 1 and n * -math.log(drawn_mass) > -math.log(1e-6):
            return (
                numbers,
                f"cut off: the likeliest tokens that sum to {drawn_mass:.3g} alone were drawn",
            )
        if abs(sharper) > LEAST_TEMPERATURE and abs(sharper) * math.sqrt(n * variance) > Z:
            return numbers, f"sampled at temperature {self.temperature * (1 - sharper):.3g}"
        if chi > Z and share > LEAST_SHARE:
            return numbers, f"sampled from another distribution (shares differ by {share:.0%})"
        return numbers, ""


def _pearson(p: np.ndarray, tokens: np.ndarray) -> tuple[float, float]:
    """(χ² of the counts in standard errors, by Wilson and Hilferty's approximation of 1931; the
    share by which probabilities differ, root mean square, beyond chance). Tokens that are expected
    less than ten times are counted together."""
    expected, n = p * len(tokens), len(tokens)
    counts = np.bincount(tokens, minlength=len(p))
    is_large = expected >= 10
    e = np.append(expected[is_large], expected[~is_large].sum())
    c = np.append(counts[is_large], counts[~is_large].sum())
    e, c = e[e > 0], c[e > 0]
    df = len(e) - 1
    if df < 1:
        return 0.0, 0.0
    chi = float(((c - e) ** 2 / e).sum())
    spread = 2 / (9 * df)
    return (
        ((chi / df) ** (1 / 3) - (1 - spread)) / math.sqrt(spread),
        math.sqrt(max(0.0, chi - df) / n),
    )


def best_position(
    model: torch.nn.Module, prompt: Sequence[int], temperature: float = 1.0
) -> Position:
    """The prefix of ``prompt`` after which the log-probability of the next token varies most."""
    head = find_causal_lm(model).get_output_embeddings()
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    with quiet(model), stock_forward(model), precision_kept(head):
        logits = model(input_ids=ids, attention_mask=None, use_cache=False).logits[0]
    log_p = torch.log_softmax(logits.float() / temperature, -1)  # [T, V]
    mean = (log_p.exp() * log_p).sum(-1, keepdim=True)
    variance = (log_p.exp() * (log_p - mean) ** 2).nan_to_num().sum(-1)  # [T]
    best = int(variance.argmax())
    probabilities = log_p[best].double().exp().cpu().numpy()
    return Position(list(prompt[: best + 1]), probabilities / probabilities.sum(), temperature)


class SampledTokens:
    """The test of a run, on rank 0: ``ask`` when the servers have the weights, ``check`` before these
    change."""

    def __init__(self, run: TrainingRun):
        self._run = run
        self._pending: tuple[Position, Future[dict[str, np.ndarray]], float] | None = None

    def ask(self, engine: VLLMEngine) -> None:
        """Have every server draw, without waiting."""
        settings = self._run.settings
        limit = min(settings.max_seq_len, settings.max_prompt_len or settings.max_seq_len)
        prompt = fixed_prompts(self._run.tokenizer, limit)[0]
        with self._run.policy_of_rank_0() as model:
            position = best_position(model, prompt, settings.temperature)
        future: Future[dict[str, np.ndarray]] = Future()

        def work() -> None:
            try:
                future.set_result(engine.draw(position.prompt, position.num_draws))
            except BaseException as error:  # noqa: BLE001 - raised again where the draws are read
                future.set_exception(error)

        threading.Thread(target=work, name="verifiers-draws", daemon=True).start()
        self._pending = position, future, time.monotonic()

    def check(self) -> dict[str, float]:
        """The metrics of the draws; waits for them, and is empty after the first time.

        Raises ``ConfigError`` for a server whose draws are from another distribution.
        """
        if self._pending is None:
            return {}
        (position, future, began), self._pending = self._pending, None
        try:
            draws = future.result()
        except WeightSyncError as error:
            log.warning("the sampled tokens were not tested: %s", error)
            return {}
        numbers: dict[str, float] = {}
        for url, tokens in draws.items():
            numbers, looks = position.compare(tokens)
            if looks:
                raise ConfigError(
                    f"{url} does not sample from the distribution that the settings name (temperature"
                    f" {position.temperature:g}): {len(tokens)} tokens drawn at one position look"
                    f" {looks}. Start it with vf-vllm, or with --generation-config vllm and without"
                    " a sampler of its own"
                )
        numbers["time/draws"] = elapsed_s = time.monotonic() - began
        log.info(
            "%d tokens drawn at one position (%.1f s beside the first rollouts) are sampled as set:"
            " a temperature off by %.2g %% or a top_p of %.4g would have been seen%s",
            numbers["sampler/draws"],
            elapsed_s,
            100 * position.smallest_change,
            1e-6 ** (1 / position.num_draws),
            ""
            if position.smallest_change <= 1.01 * MIN_CHANGE
            else f" (the policy is too even to tell {MIN_CHANGE:.0%} by so few)",
        )
        return numbers
