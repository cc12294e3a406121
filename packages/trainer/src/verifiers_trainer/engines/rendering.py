"""Whether a server renders conversations as the tokens that the trainer would: with the same chat
template, and with every message. A gateway that leaves out the system prompt, or earlier turns,
answers as if nothing was wrong, and trains a policy for other prompts than those it gets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from jinja2 import TemplateError

if TYPE_CHECKING:
    from verifiers_trainer.engines.http.chat import Tokenizer

Conversation = list[dict[str, str]]
PROMPTS = ("Say hi.", "Name a colour.", "Count to three.", "What is two plus two?")
_SYSTEM = {"role": "system", "content": "Answer in one word."}
_EARLIER = [{"role": "user", "content": "What is one plus one?"}]
_EARLIER += [{"role": "assistant", "content": "Two."}]


def conversations(tokenizer: Tokenizer) -> list[tuple[Conversation, list[int]]]:
    """(messages, the ids of their tokens): with and without a system prompt and an earlier turn,
    those that the template renders."""
    rendered = []
    for number, prompt in enumerate(PROMPTS):
        system, earlier = [_SYSTEM] * (number % 2), _EARLIER * (number // 2)
        messages = [*system, *earlier, {"role": "user", "content": prompt}]
        try:
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except TemplateError:  # it takes no system prompt
            if not number:
                raise
            continue
        rendered.append((messages, list(tokenizer(text, add_special_tokens=False)["input_ids"])))
    return rendered


def difference(
    messages: Sequence[dict[str, str]] | str, actual: Sequence[int], expected: Sequence[int]
) -> str | None:
    """Where a server's tokens of ``messages`` differ from ``expected``; None if they are equal."""
    for position, (theirs, ours) in enumerate(zip_longest(actual, expected)):
        if theirs != ours:
            roles = "" if isinstance(messages, str) else ", ".join(m["role"] for m in messages)
            return (
                f"renders the same messages{f' ({roles})' if roles else ''} as other tokens: at place"
                f" {position} it has {theirs}, the trainer {ours} (of {len(actual)} and"
                f" {len(expected)}); give both the same tokenizer and chat template, and let nothing"
                " in between leave messages out"
            )
    return None
