"""``TinkerClient``: a client for environments, with tools, over a sampling client of the service.

Token ids in and out, with the log-probability of each by the service, and the policy version at the
time of the request. A request in flight when the weights change is finished with the old weights.

The service returns log-probabilities of the unprocessed distribution. With a temperature other than
1, top_p or top_k they differ from those of the sampled distribution, which is valid for evaluation
but not for training (``TinkerConfig`` has no such setting).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.clients.payload import NEUTRAL
from verifiers.errors import ConfigError
from verifiers.runtime.install_lines import install_line
from verifiers.types import SamplingArgs
from verifiers_integrations.peers import Peer
from verifiers_integrations.token_client import TokenClient

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

TINKER = Peer(
    "tinker",
    "tinker",
    ("0.24.1", "0.25.0", "0.38.0"),
    lambda: install_line("verifiers-trainer", "tinker"),
)
SAMPLING = ("temperature", "top_p", "top_k", "seed")


class TinkerClient(TokenClient):
    """A client over a Tinker sampling client.

    tokenizer: of the sampled model; None takes that of the sampling client.
    version: the policy version of every completion. For other arguments see ``TokenClient``.
    Without ``max_seq_len`` the service bounds requests without ``max_tokens``.
    """

    def __init__(
        self,
        sampling_client: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        version: int = -1,
        **options: Any,
    ):
        self.sdk = TINKER.load()
        self._sampler, self._version = sampling_client, version
        self._max_length: int | None = options.get("max_seq_len")
        super().__init__(self._sample, tokenizer or sampling_client.get_tokenizer(), **options)

    def set_sampling_client(self, sampling_client: object, version: int = -1) -> None:
        """Use other weights for new requests."""
        self._sampler, self._version = sampling_client, version

    async def _sample(self, prompt_ids: list[int], sampling: dict[str, object]) -> Sequence[object]:
        sampler, version = self._sampler, self._version
        output = await sampler.sample_async(
            prompt=self.sdk.ModelInput.from_ints(prompt_ids),
            num_samples=1,
            sampling_params=self.sdk.SamplingParams(**self._params(len(prompt_ids), sampling)),
        )
        (sequence,) = output.sequences
        return list(sequence.tokens), sequence.logprobs, sequence.stop_reason, version

    def _params(self, prompt_length: int, sampling: SamplingArgs) -> dict[str, object]:
        """Return the arguments of ``SamplingParams``. *Raises* ConfigError for arguments without a
        counterpart."""
        params = {name: sampling[name] for name in SAMPLING if name in sampling}
        accepted = {*SAMPLING, "max_tokens", "stop", "stop_token_ids"}
        unknown = {
            name
            for name, value in sampling.items()
            if name not in accepted and value not in NEUTRAL.get(name, ())
        }
        if unknown:
            raise ConfigError(
                f"Tinker has no sampling argument {', '.join(sorted(unknown))}: remove it",
                key=min(unknown),
            )
        remaining = None if self._max_length is None else self._max_length - prompt_length
        if bounds := [
            bound for bound in (remaining, sampling.get("max_tokens")) if bound is not None
        ]:
            params["max_tokens"] = min(bounds)
        params["stop"] = self._stop(sampling.get("stop"), sampling.get("stop_token_ids"))
        return params

    def _stop(
        self, texts: str | Iterable[str] | None, token_ids: Iterable[int] | None
    ) -> list[object]:
        """Return the stops for the service, all ids or all texts, including the end token of the
        tokenizer."""
        texts = [texts] if isinstance(texts, str) else list(texts or [])
        if texts and token_ids:
            raise ConfigError(
                "Tinker stops at texts or at token ids, not both: give stop or stop_token_ids",
                key="stop",
            )
        if texts:
            return [self.tokenizer.eos_token, *texts]
        return list(dict.fromkeys([self.tokenizer.eos_token_id, *(token_ids or [])]))
