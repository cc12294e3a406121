"""Methods of environments of 0.1.5 and earlier that format prompts, and convert one rollout to
token ids.

New code takes ``env.process_env_results(…)``, which reads the tokens that are recorded with each
turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from verifiers.environments.base import Environment
from verifiers.legacy import conversations

if TYPE_CHECKING:
    from datasets import Dataset

    from verifiers.data.sources import DatasetLike
    from verifiers.legacy.conversations import HasChoices


class Encoder(Protocol):
    """A tokenizer of text, for type checkers."""

    @property
    def encode(self) -> Callable[..., Iterable[int]]: ...


class ChatTemplate(Protocol):
    """A tokenizer with a chat template, for type checkers."""

    @property
    def apply_chat_template(self) -> Callable[..., Any]: ...


Tokens = tuple[list[int], list[int], list[int], list[int], list[float]]
"""Prompt ids, prompt mask (0), completion ids, completion mask, log-probabilities (0.0 outside of
responses)."""


def format_prompt(
    env: Environment,
    prompt_str: str,
    system_prompt: str | None = None,
    few_shot: Sequence[Mapping[str, object]] | None = None,
) -> list[dict[str, Any]]:
    """The messages of a question: system prompt, examples, the question."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, *map(dict, few_shot or ()), {"role": "user", "content": prompt_str}]


def format_dataset(env: Environment, dataset: DatasetLike, *args: Any, **options: Any) -> Dataset:
    """``verifiers.utils.data_utils.format_dataset``."""
    return conversations.format_dataset(dataset, *args, **options)


def parse_chat_completion_logprobs(env: Environment, chat_completion: HasChoices) -> list[float]:
    """The log-probabilities of an OpenAI chat completion."""
    return [token.logprob for token in chat_completion.choices[0].logprobs.content]


def parse_chat_completion_tokens(env: Environment, chat_completion: HasChoices) -> list[int]:
    """The token ids of an OpenAI chat completion of a server that writes them as
    ``token_id:97``."""
    return [_token_id(token.token) for token in chat_completion.choices[0].logprobs.content]


def parse_completion_logprobs(env: Environment, completion: HasChoices) -> list[float]:
    """The log-probabilities of an OpenAI text completion."""
    return list(completion.choices[0].logprobs.token_logprobs)


def parse_completion_tokens(env: Environment, completion: HasChoices) -> list[int]:
    """The token ids of an OpenAI text completion, as of a chat completion."""
    return [_token_id(token) for token in completion.choices[0].logprobs.tokens]


def process_chat_format_vllm(
    env: Environment,
    prompt: Sequence[Mapping[str, object]],
    completion: Sequence[Mapping[str, object]],
    state: Mapping[str, Any],
    processing_class: ChatTemplate,
    mask_env_responses: bool = False,
) -> Tokens:
    """The tokens of a conversation: assistant messages from ``state["responses"]``, the others by
    the template."""
    history = [dict(message) for message in prompt]
    prompt_ids = list(
        processing_class.apply_chat_template(conversation=history, add_generation_prompt=True)
    )
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    responses = iter(state["responses"])
    for message in map(dict, completion):
        if message["role"] == "assistant":
            response = next(responses)
            new = parse_chat_completion_tokens(env, response)
            logprobs += parse_chat_completion_logprobs(env, response)
        else:
            before = processing_class.apply_chat_template(conversation=history)
            new = list(
                processing_class.apply_chat_template(conversation=[*history, message])[
                    len(before) :
                ]
            )
            logprobs += [0.0] * len(new)
        ids += new
        mask += [int(message["role"] == "assistant" or not mask_env_responses)] * len(new)
        history.append(message)
    return prompt_ids, [0] * len(prompt_ids), ids, mask, logprobs


def process_completion_format_vllm(
    env: Environment,
    prompt: str,
    completion: str,
    state: Mapping[str, Any],
    processing_class: Encoder,
    mask_env_responses: bool = False,
) -> Tokens:
    """The tokens of a text: responses where ``state["responses_start_idx"]`` says, the rest
    encoded."""
    prompt_ids = list(processing_class.encode(prompt))
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    end = 0

    def encode(text: str) -> None:
        new = list(processing_class.encode(text)) if text else []
        ids.extend(new)
        mask.extend([int(not mask_env_responses)] * len(new))
        logprobs.extend([0.0] * len(new))

    for response, start in zip(state["responses"], state["responses_start_idx"], strict=True):
        encode(completion[end:start])
        new = parse_completion_tokens(env, response)
        ids += new
        mask += [1] * len(new)
        logprobs += parse_completion_logprobs(env, response)
        end = start + len(response.choices[0].text)
    encode(completion[end:])
    return prompt_ids, [0] * len(prompt_ids), ids, mask, logprobs


def _token_id(token: str) -> int:
    return int(token.rpartition(":")[2])
