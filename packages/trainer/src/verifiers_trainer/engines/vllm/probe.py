"""Check the first completions of a server: equal prompt tokens, token ids, and processed
log-probabilities.

Short prompts, in a chat also with a system prompt and an earlier turn, are sampled at two
temperatures. The spread of the likely tokens grows with
1 / temperature in processed log-probabilities, and is constant in raw log-probabilities; logits of
a server are rounded, and not equally in every call. Wrong weights are detected by the ratio of the
first step (``run.sanity_checks``).

Requests have the sampling arguments of rollouts, whatever a server's defaults are, so that the
first completion is refused if a rollout would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.clients.payload import limit_name, to_fields
from verifiers.errors import ConfigError, WeightSyncError
from verifiers.types import ModelRequest
from verifiers_trainer.engines.rendering import PROMPTS, Conversation, conversations, difference
from verifiers_trainer.engines.vllm.control import Server

if TYPE_CHECKING:
    from verifiers_trainer.engines.http.chat import Tokenizer

LOW = 0.1
"""The other temperature; the first is 1."""
NUM_LIKELY = 5
"""Number of likely tokens to request: servers include the sampled token, so the last of them need
not be likely."""
ROUNDING = 0.25
"""Nats by which rounding changes a spread from call to call: each of its two logits by one step of
bfloat16, which is 0.125 from 16 to 32."""
STAGE, DRAWS_STAGE = "the first completion", "drawing tokens at one position"
COMPLETIONS = "/v1/completions"
DRAWS_AT_ONCE = 512
TIMEOUT_S = 120.0


def check_server(
    server: Server,
    model: str,
    tokenizer: Tokenizer,
    in_chat: bool,
    sampling: Mapping[str, Any] = MappingProxyType({}),
) -> str | None:
    """A warning of what could not be checked, or None. Raises ``ConfigError`` if unusable.

    sampling: the arguments of rollouts, without those that reshape the distribution.
    """
    spreads = {1.0: 0.0, LOW: 0.0}
    limit = sampling.get("truncate_prompt_tokens") or 0
    prompts: Sequence[tuple[str | Conversation, list[int]]] = (
        conversations(tokenizer)
        if in_chat
        else [(prompt, list(tokenizer(prompt)["input_ids"])) for prompt in PROMPTS]
    )
    for (prompt, prompt_tokens), temperature in product(prompts, spreads):
        answer = _ask(server, model, prompt, in_chat, {**sampling, "temperature": temperature})
        choice = answer["choices"][0]
        prompt_ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if not prompt_ids or not choice.get("token_ids"):
            raise ConfigError(
                f"{server.url} returns no token ids (return_token_ids): tokens would have to be"
                " guessed from text, which is not the identity for any tokenizer; use vLLM 0.11 or"
                " newer"
            )
        if differs := difference(prompt, prompt_ids, prompt_tokens[-limit:]):
            raise ConfigError(f"{server.url} {differs}")
        if (spread := _spread(choice)) is None:
            return (
                f"{server.url} does not list likely tokens, so that its log-probabilities may"
                " be raw"
            )
        spreads[temperature] += spread / len(prompts)
    if abs(LOW * spreads[LOW] - spreads[1.0]) > ROUNDING:
        raise ConfigError(
            f"{server.url} returns raw log-probabilities, which are those of another distribution"
            f" than the one sampled whenever the temperature is not 1 (likely tokens are"
            f" {spreads[1.0]:.2g} nats apart at temperature 1, and {spreads[LOW]:.2g} at {LOW}):"
            " start it with vf-vllm, or with --logprobs-mode processed_logprobs"
        )
    if abs(spreads[LOW] - spreads[1.0]) <= ROUNDING:
        return (
            f"{server.url} finds likely tokens equally likely ({spreads[1.0]:.2g} nats apart), so"
            " that its log-probabilities may be raw"
        )
    return None


def draw(
    server: Server, prompt: Sequence[int], count: int, sampling: Mapping[str, object]
) -> np.ndarray:
    """``count`` tokens [count] that follow ``prompt``, sampled with the arguments of rollouts.

    Raises ``WeightSyncError`` for a server that answers with others.
    """
    tokens: list[int] = []
    body = request_body(server, list(prompt), False, sampling)
    while len(tokens) < count:
        part = min(DRAWS_AT_ONCE, count - len(tokens))
        numbered = {**body, "n": part, "seed": len(tokens)}
        answer = server.call("POST", COMPLETIONS, numbered, stage=DRAWS_STAGE, timeout_s=TIMEOUT_S)
        ids = [choice.get("token_ids") or [-1] for choice in answer["choices"]]
        if len(ids) != part or min(drawn[0] for drawn in ids) < 0:
            raise WeightSyncError(
                f"{server.url} answers {len(ids)} choices with token ids where n is {part}",
                stage=DRAWS_STAGE,
                url=server.url,
            )
        tokens += [drawn[0] for drawn in ids]
    return np.array(tokens)


def request_body(
    server: Server,
    prompt: str | list[int] | Conversation,
    in_chat: bool,
    sampling: Mapping[str, object],
) -> dict[str, object]:
    """What the client of rollouts sends for one token after ``prompt``."""
    arguments = {**sampling, "max_tokens": 1}
    request = ModelRequest(
        prompt,
        server.serving.model,
        "chat" if in_chat else "completion",
        sampling_args=arguments,
        seed=0,
        require_tokens=True,
    )
    return to_fields(request, limit_name((), is_older=not in_chat))


def _ask(
    server: Server,
    model: str,
    prompt: str | Conversation,
    in_chat: bool,
    sampling: Mapping[str, object],
) -> Any:
    likely = {"top_logprobs": NUM_LIKELY} if in_chat else {"logprobs": NUM_LIKELY}
    body = request_body(server, prompt, in_chat, {**sampling, **likely}) | {"model": model}
    path = "/v1/chat/completions" if in_chat else COMPLETIONS
    try:
        return server.call("POST", path, body, stage=STAGE, timeout_s=TIMEOUT_S)
    except WeightSyncError as error:
        raise ConfigError(
            f"the inference server refuses what training asks for: {error}"
        ) from error


def _spread(choice: Mapping[str, Any]) -> float | None:
    """Nats from the first to the last of the likely tokens of the first position; None when they
    are not listed."""
    logprobs = choice.get("logprobs") or {}
    if content := logprobs.get("content"):
        listed = [entry["logprob"] for entry in content[0].get("top_logprobs") or ()]
    else:
        listed = list(((logprobs.get("top_logprobs") or [None])[0] or {}).values())
    likely = sorted(listed, reverse=True)[: NUM_LIKELY - 1]  # without the sampled token
    return likely[0] - likely[-1] if len(likely) == NUM_LIKELY - 1 else None
