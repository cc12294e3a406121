"""What an inference engine is to the trainer: an OpenAI endpoint that can be paused and knows its policy version.

Environments only ever see ``base_url``; the trainer holds the ``Engine``. This module runs nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

TOKEN_IDS = "token_ids"
"""Responses carry the exact prompt and completion token ids."""
PROCESSED_LOGPROBS = "processed_logprobs"
"""Log-probs are of the distribution actually sampled: temperature, filters and penalties applied."""
WEIGHT_VERSIONS = "weight_versions"
"""Responses say which policy version produced each token."""
TOKEN_IN = "token_in"
"""``/v1/completions`` takes a prompt as token ids."""
PAUSE_KEEP = "pause_keep"
"""Requests in flight survive a pause and go on with the weights they then find."""
SHARED_WEIGHTS = "shared_weights"
"""The engine computes with the trainer's own parameters: a weight push moves no bytes."""
DETERMINISTIC = "deterministic"
"""A completion depends on weights, prompt, sampling parameters and request seed alone, bit for bit."""


@runtime_checkable
class Engine(Protocol):
    """An inference engine as the trainer drives it."""

    shares_weights: bool
    """Whether it computes with the trainer's own parameters, and so to the trainer's own rounding."""

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
        """What this engine can do, out of the constants of this module."""

    @property
    def version(self) -> int:
        """The policy version that tokens sampled now are labelled with."""

    def set_version(self, version: int) -> None:
        """Label every token sampled from now on with ``version``; call it inside the ``pause`` of the update."""

    def start(self, deadline_s: float) -> None:
        """Serve requests, or raise after at most ``deadline_s`` seconds."""

    def stop(self) -> None:
        """Release every thread, socket and buffer; calling it again does nothing."""

    def pause(self) -> AbstractContextManager[None]:
        """No token is computed inside the context, so that weights may change; nothing in flight is lost."""

    def health(self) -> bool:
        """Whether requests are being served."""
