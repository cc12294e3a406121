"""Requests and results of a generation loop: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np

from verifiers.errors import ModelRefused

if TYPE_CHECKING:
    from verifiers_trainer.engines.lora import LoraWeights

FinishReason = Literal["stop", "length", "abort"]


class BadRequest(ModelRefused):
    """A request that cannot be served; ``field`` is that of the body which is wrong."""

    def __init__(
        self, message: str, field: str | None = None, code: str | None = None, status: int = 400
    ):
        super().__init__(message, field=field, code=code, status=status)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a completion. Neutral values disable a rule; ``temperature=0`` is
    greedy.

    >>> SamplingParams(max_tokens=16, temperature=0.7, seed=3).top_k
    0
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Texts that end the completion; the tokens that spell them stay in ``token_ids``."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the completion, end-of-turn ids too; the sampled id stays in ``token_ids``."""
    min_tokens: int = 0
    """Stop rules apply only from this number of tokens on."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, addend to its logit)."""
    top_logprobs: int = 0
    """Number of most likely tokens to report at each position, beside the sampled token."""
    prompt_logprobs: int | None = None
    """Report the log-prob of each prompt token and of this number of most likely tokens; None
    reports none."""

    @property
    def penalised(self) -> bool:
        """Whether the distribution depends on earlier tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


PromptKey: TypeAlias = "tuple[bytes, tuple[bytes, ...], LoraWeights | None]"
OnToken = Callable[[int, float, "Alternatives | None"], None]
"""(token id, log-prob, most likely tokens of the position if requested)."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A completion to produce; compared by identity."""

    request_id: str
    prompt_ids: np.ndarray
    """int32 [P], P >= 1."""
    params: SamplingParams
    on_token: OnToken | None = None
    """Called for each sampled token but the last, on the generation thread: it must not block."""
    images: tuple[bytes, ...] = ()
    """The files of the images whose placeholders the prompt has."""
    adapter: LoraWeights | None = None
    """What is computed with it beside the model of the loop; its version, if it has one, labels the
    tokens."""

    @property
    def prompt_key(self) -> PromptKey:
        """Equal for equal prompts to the same weights."""
        return self.prompt_ids.tobytes(), self.images, self.adapter

    @property
    def max_length(self) -> int:
        """Maximum length of the sequence in tokens, prompt included."""
        return len(self.prompt_ids) + self.params.max_tokens


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The most likely tokens of a position, best first."""

    token_ids: np.ndarray
    """int32 [K]."""
    logprobs: np.ndarray
    """float32 [K]; -inf for tokens that a filter excludes."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probs of a prompt of P tokens: P-1 entries, because the first token has none."""

    logprobs: np.ndarray
    """float32 [P-1], at temperature 1, without filters."""
    ranks: np.ndarray
    """int32 [P-1], 1 for the most likely token."""
    alternatives: list[Alternatives]
    """P-1 entries; empty when no alternatives were requested."""


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """A finished completion, or its ``error``."""

    request: GenerationRequest
    token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32 [T], the sampled stop token included."""
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    """float32 [T], of the distribution each token was sampled from."""
    versions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32 [T], the policy version that sampled each token."""
    alternatives: list[Alternatives] = field(default_factory=list)
    """T entries when the request has ``top_logprobs``."""
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason = "abort"
    stop_text: str | None = None
    """The ``stop`` text that ended the completion."""
    error: str | None = None


OnFinished = Callable[[list[Generation]], None]
"""Receives the completions that a decoding step finished, on the generation thread."""


class Generator(Protocol):
    """A generation loop in its own thread."""

    def start(self, on_finished: OnFinished, deadline_s: float) -> None: ...

    def stop(self) -> None: ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; raises ModelUnavailable when the loop is stopped."""

    def abort(self, request_id: str) -> None:
        """Drop a request, queued or running; unknown ids are ignored."""

    def pause(self) -> AbstractContextManager[None]: ...

    @property
    def alive(self) -> bool: ...
