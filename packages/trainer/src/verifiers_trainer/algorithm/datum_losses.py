"""The losses of a service that trains on single sequences (Tinker's names), as sums over tokens.

A `Datum` is a sequence of T tokens with a target for each position; every array is [T], and entry t
is of the token that follows position t. The losses are sums: who calls divides, by what is put into
weights and advantages. Of ``logp`` the trainer's log-probability of the target, ``q`` the sampler's,
A the advantage and r = exp(logp - q):

- ``cross_entropy``: -Σ w · logp
- ``importance_sampling``: -Σ r · A
- ``ppo``: -Σ min(r · A, clip(r, low, high) · A), arXiv 1707.06347, equation 7
- ``cispo``: -Σ sg[clip(r, low, high)] · A · logp, arXiv 2506.13585, equation 4
- ``dro``: -Σ (A · logp - beta/2 · (logp - q)²), arXiv 2405.19107
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """A sequence with what its loss needs."""

    token_ids: np.ndarray
    """int32 [T], T >= 1: what the model reads."""
    target_ids: np.ndarray
    """int32 [T]: the token after each position; the usual datum has ``token_ids[1:]`` and one
    more."""
    inputs: Mapping[str, np.ndarray]
    """Name of an input of the loss -> float32 [T]."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


Inputs = Mapping[str, "Tensor"]
"""Name -> [T]."""
Config = Mapping[str, float]
LossOfDatum = Callable[["Tensor", Inputs, Config], "Tensor"]
"""(log-probabilities of the targets [T], inputs, settings) -> sum over the tokens."""


@dataclass(frozen=True, slots=True)
class DatumLoss:
    """A loss with what it takes."""

    function: LossOfDatum
    needed: frozenset[str]
    optional: frozenset[str] = frozenset()
    config: Mapping[str, float] | None = None
    """Setting -> default."""


def _cross_entropy(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -(inputs["weights"] * logp).sum()


def _importance_sampling(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -((logp - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def _clipped(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    low: Tensor | float = inputs.get("clip_low_threshold", config["clip_low_threshold"])
    high: Tensor | float = inputs.get("clip_high_threshold", config["clip_high_threshold"])
    return ratio.clamp(low, high)  # type: ignore[arg-type]


def _ppo(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio, advantages = (logp - inputs["logprobs"]).exp(), inputs["advantages"]
    clipped = _clipped(ratio, inputs, config) * advantages
    return -(ratio * advantages).minimum(clipped).sum()


def _cispo(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio = (logp - inputs["logprobs"]).exp().detach()
    return -(_clipped(ratio, inputs, config) * inputs["advantages"] * logp).sum()


def _dro(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    gap = logp - inputs["logprobs"]
    return -(inputs["advantages"] * logp - 0.5 * config["beta"] * gap**2).sum()


_OF_RATIO = frozenset({"logprobs", "advantages"})
_THRESHOLDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
DATUM_LOSSES: Mapping[str, DatumLoss] = {
    "cross_entropy": DatumLoss(_cross_entropy, frozenset({"weights"})),
    "importance_sampling": DatumLoss(_importance_sampling, _OF_RATIO),
    "ppo": DatumLoss(_ppo, _OF_RATIO, frozenset(_THRESHOLDS), _THRESHOLDS),
    "cispo": DatumLoss(_cispo, _OF_RATIO, frozenset(_THRESHOLDS), _THRESHOLDS),
    "dro": DatumLoss(_dro, _OF_RATIO, config={"beta": 0.05}),
}


def datum_loss(name: str, config: Config) -> tuple[DatumLoss, dict[str, float]]:
    """(the loss ``name``, its settings with defaults). *Raises* ``ConfigError``."""
    if (loss := DATUM_LOSSES.get(name)) is None:
        raise ConfigError(
            f"there is no loss {name!r} here: use {', '.join(DATUM_LOSSES)}", field="loss_fn"
        )
    settings = dict(loss.config or {})
    if unknown := config.keys() - settings.keys():
        takes = f"takes {', '.join(settings)}" if settings else "takes none"
        raise ConfigError(
            f"the loss {name} has no setting {min(unknown)!r}: it {takes}", field="loss_fn_config"
        )
    return loss, settings | dict(config)


def check_datum(datum: Datum, name: str, vocabulary: int, max_tokens: int) -> None:
    """*Raises* ``ConfigError`` for a datum that the loss ``name`` cannot be computed of."""
    loss = DATUM_LOSSES[name]
    if not 1 <= datum.num_tokens <= max_tokens:
        raise ConfigError(
            f"a datum has {datum.num_tokens} tokens: it must have from 1 to {max_tokens}"
        )
    names = datum.inputs.keys()
    if missing := loss.needed - names:
        raise ConfigError(f"the loss {name} needs {min(missing)} in loss_fn_inputs")
    if unknown := names - loss.needed - loss.optional:
        raise ConfigError(f"the loss {name} takes no {min(unknown)} in loss_fn_inputs")
    arrays = {"target_tokens": datum.target_ids, **datum.inputs}
    for field, array in arrays.items():
        if array.shape != datum.token_ids.shape:
            raise ConfigError(
                f"{field} has the shape {list(array.shape)}, and model_input"
                f" {datum.num_tokens} tokens: give one number for each token"
            )
        if not np.isfinite(array).all():
            raise ConfigError(f"{field} has a value that is no finite number")
    for field, ids in (("model_input", datum.token_ids), ("target_tokens", datum.target_ids)):
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise ConfigError(
                f"{field} has a token id outside of the model's 0 to {vocabulary - 1}"
            )
