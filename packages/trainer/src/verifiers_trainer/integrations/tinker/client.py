"""``TinkerClient``: the service's sampling client as a client that environments can talk to, with tools.

Promise: ids in and ids out, with the log-probability the service gives for each, and the policy version that was
being sampled when the request was sent. A request in flight when the weights change ends with the old ones.

The service's log-probabilities are those of the model itself. With a temperature other than 1, top_p or top_k they are
not those of what was sampled: fine for an evaluation, not for training (``TinkerConfig`` has no such setting).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verifiers.errors import ConfigError
from verifiers_trainer.integrations.peers import Peer
from verifiers_trainer.integrations.token_client import TokenClient

TINKER = Peer("tinker", "tinker", ("0.24.1",), "pip install 'verifiers-trainer[tinker]'")
TAKEN = ("temperature", "top_p", "top_k", "seed")


class TinkerClient(TokenClient):
    """A client over a Tinker sampling client.

    tokenizer: of the sampled model; None asks the sampling client for it.
    version: the policy version that every completion says it was sampled by.
    The other arguments are ``TokenClient``'s. Without ``max_seq_len`` the service bounds what has no ``max_tokens``.
    """

    def __init__(self, sampling_client: Any, tokenizer: Any = None, *, version: int = -1, **options: Any):
        self.sdk = TINKER.load()
        self._sampler, self._version = sampling_client, version
        self._longest: int | None = options.get("max_seq_len")
        super().__init__(self._sample, tokenizer or sampling_client.get_tokenizer(), **options)

    def set_sampling_client(self, sampling_client: Any, version: int = -1) -> None:
        """Sample new requests with other weights."""
        self._sampler, self._version = sampling_client, version

    async def _sample(self, prompt_ids: list[int], sampling: dict[str, Any]) -> Sequence[Any]:
        sampler, version = self._sampler, self._version
        made = await sampler.sample_async(
            prompt=self.sdk.ModelInput.from_ints(prompt_ids),
            num_samples=1,
            sampling_params=self.sdk.SamplingParams(**self._params(len(prompt_ids), sampling)),
        )
        (one,) = made.sequences
        return list(one.tokens), one.logprobs, one.stop_reason, version

    def _params(self, prompt_length: int, sampling: dict[str, Any]) -> dict[str, Any]:
        """The arguments of ``SamplingParams``. Raises ConfigError for sampling that the service does not have."""
        params = {name: sampling[name] for name in TAKEN if name in sampling}
        unknown = sampling.keys() - {*TAKEN, "max_tokens", "stop", "stop_token_ids"}
        if unknown:
            raise ConfigError(f"Tinker samples without {', '.join(sorted(unknown))}: leave it out", key=min(unknown))
        room = None if self._longest is None else self._longest - prompt_length
        if bounds := [bound for bound in (room, sampling.get("max_tokens")) if bound is not None]:
            params["max_tokens"] = min(bounds)
        params["stop"] = self._stop(sampling.get("stop"), sampling.get("stop_token_ids"))
        return params

    def _stop(self, texts: Any, token_ids: Any) -> list[Any]:
        """Stops as the service takes them, all ids or all texts, with the tokenizer's own end among them."""
        texts = [texts] if isinstance(texts, str) else list(texts or [])
        if texts and token_ids:
            raise ConfigError(
                "Tinker stops at texts or at token ids, not both: give stop or stop_token_ids", key="stop"
            )
        if texts:
            return [self.tokenizer.eos_token, *texts]
        return list(dict.fromkeys([self.tokenizer.eos_token_id, *(token_ids or [])]))
