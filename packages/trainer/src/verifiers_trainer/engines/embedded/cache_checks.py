"""What a model's cache can do, measured with a few random tokens when the engine starts.

A class may mask padding wrongly in its recurrent layers, or continue a state wrongly with several
tokens: both change what is sampled without an error. What fails here is not done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from verifiers.errors import ConfigError
from verifiers_trainer.engines.embedded.kv_cache import BatchCache
from verifiers_trainer.engines.embedded.model_inputs import ForwardPass

_LONG, _SHORT, _STEPS = 9, 6, 3
_TOLERANCE, _ROUNDING, _HALF_TOLERANCE = 1e-3, 1e-5, 0.25
"""Nats: greatest difference of a log-probability with and without a cache in float32; the least that
is allowed between rows together and alone, else four times what the cache differs by; and the mean
difference in half precision, where shapes change the rounding."""
_FAILURES = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a class raises that does not know such a pass."""


@dataclass(frozen=True, slots=True)
class CacheAbilities:
    """What leaves the log-probabilities of a row as they are alone."""

    joins: bool = True
    """Rows of different lengths decode together, leave and join."""
    pads: bool = True
    """Prompts of different lengths are prefilled in one pass, padded on the left."""
    continues: bool = True
    """A pass of several tokens follows another."""

    @property
    def missing(self) -> str:
        """What must be done otherwise, in words; empty if nothing."""
        ways = {
            "rows of different lengths decode one after another": not self.joins,
            "prompts of different lengths are prefilled one after another": not self.pads,
            "prompts are scored in one piece": not self.continues,
        }
        return ", ".join(way for way, is_needed in ways.items() if is_needed)


def measured(forward: ForwardPass, vocabulary: int, device: torch.device) -> CacheAbilities:
    """The abilities of the cache of a model, in some twenty passes of at most ten tokens.

    *Raises* ConfigError for a model that computes something else with a cache than without.
    """
    draws = torch.Generator().manual_seed(0)
    shape = (2, _LONG + _STEPS)
    ids_2T = torch.randint(0, min(vocabulary, 1000), shape, generator=draws).to(device)
    prompts = [ids_2T[:1, :_LONG], ids_2T[1:, :_SHORT]]
    next_2S = torch.cat([ids_2T[:1, _LONG:], ids_2T[1:, _SHORT : _SHORT + _STEPS]])
    starts_2 = torch.tensor([0, _LONG - _SHORT], device=device)

    def prefill(
        ids_BT: torch.Tensor, starts_B: torch.Tensor | None = None
    ) -> tuple[BatchCache, torch.Tensor]:
        cache = forward.new_cache()
        return cache, forward(ids_BT, cache, starts_B)

    def steps(
        cache: BatchCache, next_BS: torch.Tensor, starts_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.stack([forward(ids_B1, cache, starts_B) for ids_B1 in next_BS.split(1, 1)], 1)

    def alone(row: int) -> torch.Tensor:
        cache, logits_1V = prefill(prompts[row])
        cache.select(torch.tensor([0, 0], device=device))  # as siblings of a group do
        siblings_2SV = steps(cache, next_2S[row : row + 1].expand(2, -1))
        return torch.cat([logits_1V[:, None], siblings_2SV[1:]], 1)

    def joined() -> torch.Tensor:
        cache, long_1V = prefill(prompts[0])
        of_short, short_1V = prefill(prompts[1])
        cache.append_rows(of_short)
        both_21V = steps(cache, next_2S[:, :1], starts_2)
        cache.select(torch.tensor([1], device=device), int(starts_2[1]))
        short_1SV = steps(cache, next_2S[1:, 1:])
        # the long row has left: what it would have computed is taken from it alone
        long_1SV = expected_2SV[:1, 2:]
        first_21V = torch.cat([long_1V, short_1V])[:, None]
        return torch.cat([first_21V, both_21V, torch.cat([long_1SV, short_1SV])], 1)

    def padded() -> torch.Tensor:
        ids_2T = torch.cat([prompts[0], torch.nn.functional.pad(prompts[1], (int(starts_2[1]), 0))])
        cache, logits_2V = prefill(ids_2T, starts_2)
        return torch.cat([logits_2V[:, None], steps(cache, next_2S, starts_2)], 1)

    def continued() -> torch.Tensor:
        cache, _ = prefill(prompts[0][:, :4])
        logits_1V = forward(prompts[0][:, 4:], cache, None)
        long_1SV = torch.cat([logits_1V[:, None], steps(cache, next_2S[:1])], 1)
        return torch.cat([long_1SV, expected_2SV[1:]])

    def without_cache() -> torch.Tensor:
        passes = [
            forward.without_cache(torch.cat([prompt, next_2S[row : row + 1]], 1))
            for row, prompt in enumerate(prompts)
        ]
        return torch.cat([logits_1TV[:, -1 - _STEPS :] for logits_1TV in passes])

    is_half = torch.finfo(forward.dtype).bits < 32

    def apart(values: torch.Tensor, references: torch.Tensor) -> float:
        difference = (values.float().log_softmax(-1) - references.float().log_softmax(-1)).abs()
        return float(difference.mean() if is_half else difference.max())

    def holds(compute: Callable[[], torch.Tensor]) -> bool:
        try:
            return apart(compute(), expected_2SV) <= allowed
        except _FAILURES:
            return False

    cannot = f"the embedded engine cannot serve {forward.name}"
    try:
        expected_2SV = torch.cat([alone(0), alone(1)])
        stock_2SV = without_cache()
    except _FAILURES as error:
        raise ConfigError(
            f"{cannot}, whose forward pass with a cache fails ({type(error).__name__}: {error});"
            " use a vLLM server"
        ) from error
    difference = apart(expected_2SV, stock_2SV)
    if not difference <= (_HALF_TOLERANCE if is_half else _TOLERANCE):
        raise ConfigError(
            f"{cannot}: with its cache it computes other log-probabilities than without"
            f" ({difference:.2g} nats apart); use a vLLM server"
        )
    allowed = _HALF_TOLERANCE if is_half else max(_ROUNDING, 4 * difference)
    joins = holds(joined)
    return CacheAbilities(joins, joins and holds(padded), holds(continued))
