"""Check the first completions of a server: equal prompt tokens, token ids, and processed
log-probabilities.

One short prompt is sampled at two temperatures. The gap between the two likeliest tokens grows with
1 / temperature in processed log-probabilities, and is constant in raw log-probabilities. Wrong
weights are detected by the ratio of the first step (``run.sanity_checks``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError, WeightSyncError
from verifiers_trainer.engines.vllm.control import Server

if TYPE_CHECKING:
    from verifiers_trainer.engines.http.chat import Tokenizer

MESSAGES = [{"role": "user", "content": "Say hi."}]
PLAIN = "Say hi."
TEMPERATURES = (1.0, 0.5)
NUM_LIKELY = 5
"""Number of likely tokens to request: servers include the sampled token, so 2 need not be the two
likeliest."""
SMALLEST_GAP = 1e-3
"""Nats; the gap of two equally likely tokens is not informative."""
STAGE = "the first completion"
TIMEOUT_S = 120.0


def check_server(server: Server, model: str, tokenizer: Tokenizer, in_chat: bool) -> str | None:
    """Return a warning on what could not be checked, or None. Raises ``ConfigError`` for unusable
    completions."""
    expected = _expected_ids(tokenizer, in_chat)
    gaps: list[float] = []
    for temperature in TEMPERATURES:
        answer = _ask(server, model, in_chat, temperature)
        choice = answer["choices"][0]
        _require_token_ids(server, answer, choice)
        _require_same_tokens(
            server, answer.get("prompt_token_ids") or choice.get("prompt_token_ids"), expected
        )
        if (gap := _gap(choice)) is None:
            return (
                f"{server.url} does not list likely tokens, so that its log-probabilities may"
                " be raw"
            )
        gaps.append(gap)
    if gaps[0] < SMALLEST_GAP:
        return f"{server.url} finds all tokens as likely, so that its log-probabilities may be raw"
    if gaps[1] < 1.5 * gaps[0]:
        raise ConfigError(
            f"{server.url} returns raw log-probabilities, which are those of another distribution"
            " than the one sampled whenever the temperature is not 1: start it with vf-vllm, or"
            " with --logprobs-mode processed_logprobs"
        )
    return None


def _expected_ids(tokenizer: Tokenizer, in_chat: bool) -> list[int]:
    if not in_chat:
        return list(tokenizer(PLAIN)["input_ids"])
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _ask(server: Server, model: str, in_chat: bool, temperature: float) -> Any:
    body = {
        "model": model,
        "max_tokens": 1,
        "temperature": temperature,
        "seed": 0,
        "return_token_ids": True,
    }
    if in_chat:
        body |= {"messages": MESSAGES, "logprobs": True, "top_logprobs": NUM_LIKELY}
    else:
        body |= {"prompt": PLAIN, "logprobs": NUM_LIKELY}
    path = "/v1/chat/completions" if in_chat else "/v1/completions"
    try:
        return server.call("POST", path, body, stage=STAGE, timeout_s=TIMEOUT_S)
    except WeightSyncError as error:
        raise ConfigError(
            f"the inference server refuses what training asks for: {error}"
        ) from error


def _require_token_ids(
    server: Server, answer: Mapping[str, Any], choice: Mapping[str, Any]
) -> None:
    prompt_ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    if not prompt_ids or not choice.get("token_ids"):
        raise ConfigError(
            f"{server.url} returns no token ids (return_token_ids): tokens would have to be guessed"
            " from text, which is not the identity for any tokenizer; use vLLM 0.11 or newer"
        )


def _require_same_tokens(server: Server, actual: Sequence[int], expected: Sequence[int]) -> None:
    for position, (theirs, ours) in enumerate(zip_longest(actual, expected)):
        if theirs != ours:
            raise ConfigError(
                f"{server.url} renders the same messages as other tokens: at place {position} it"
                f" has {theirs}, the trainer {ours} (of {len(actual)} and {len(expected)}); give"
                " both the same tokenizer and chat template"
            )


def _gap(choice: Mapping[str, Any]) -> float | None:
    """Nats between the two likeliest tokens of the first position; None when they are
    not listed."""
    logprobs = choice.get("logprobs") or {}
    if content := logprobs.get("content"):
        likely = [entry["logprob"] for entry in content[0].get("top_logprobs") or ()]
    else:
        likely = list(((logprobs.get("top_logprobs") or [None])[0] or {}).values())
    if len(likely) < NUM_LIKELY - 1:
        return None
    best, second = sorted(likely, reverse=True)[:2]
    return best - second
