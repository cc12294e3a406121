"""The interface of an inference engine: an OpenAI endpoint that can be paused and labels tokens
with a policy version.

Environments use ``base_url`` alone; the trainer holds the ``Engine``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

TOKEN_IDS = "token_ids"
"""Responses carry the exact prompt and completion token ids."""
PROCESSED_LOGPROBS = "processed_logprobs"
"""Log-probs of the sampled distribution, with temperature, filters and penalties applied."""
WEIGHT_VERSIONS = "weight_versions"
"""Responses carry the policy version of each token."""
TOKEN_IN = "token_in"
"""``/v1/completions`` accepts a prompt as token ids."""
TRAINABLE = frozenset({TOKEN_IDS, PROCESSED_LOGPROBS, WEIGHT_VERSIONS, TOKEN_IN})
"""What training needs of every engine."""
PAUSE_KEEP = "pause_keep"
"""Requests in flight survive a pause and continue with the new weights."""
SHARED_WEIGHTS = "shared_weights"
"""The engine computes with the trainer's own parameters: a weight push moves no bytes."""
DETERMINISTIC = "deterministic"
"""A completion depends on weights, prompt, sampling parameters and seed alone, bit for bit."""


@runtime_checkable
class Engine(Protocol):
    """An inference engine as the trainer drives it."""

    shares_weights: bool
    """Whether it computes with the trainer's parameters, and therefore with the same rounding."""

    @property
    def base_url(self) -> str:
        """Root of the OpenAI routes, ending in ``/v1``; known once started."""

    @property
    def api_key(self) -> str:
        """Bearer token every request to ``base_url`` must carry."""

    @property
    def served_model(self) -> str:
        """The ``model`` that requests for the current policy must name."""

    @property
    def capabilities(self) -> frozenset[str]:
        """The engine's capabilities, constants of this module."""

    @property
    def version(self) -> int:
        """The policy version of tokens being sampled."""

    @property
    def num_restarts(self) -> int:
        """How often a server has lost the weights of this run, and got them again."""

    def set_version(self, version: int) -> None:
        """Label later tokens with ``version``; call it inside the ``pause`` of the update."""

    def start(self, deadline_s: float) -> None:
        """Start serving requests, or raise after at most ``deadline_s`` seconds."""

    def stop(self) -> None:
        """Release every thread, socket and buffer; idempotent."""

    def pause(self) -> AbstractContextManager[None]:
        """Context in which no token is computed, so that weights may change; requests survive."""

    def health(self) -> bool:
        """Whether requests are being served."""
