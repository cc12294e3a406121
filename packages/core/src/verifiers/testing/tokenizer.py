"""A tokenizer of 256 bytes and a few special tokens, with a chat template, for tests without a
model.

The promise: ``decode(encode(text)) == text`` for every text; the ids of a rendered conversation
begin with the ids of the conversation before it (context only increases) unless ``keep_reasoning``
is off, which drops earlier ``<think>`` parts as some model families do and so gives the
increasing-context check something to find.

Text inside a message is encoded as bytes only: a model that writes ``<|end|>`` writes eight bytes,
not the token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_SPACE = re.compile(r"\s*")
_SPECIAL = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 and up `SPECIAL_TOKENS`; calls are those of a transformers
    tokenizer.

    >>> ByteTokenizer().apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    [259, 104, 105, 257, 260]
    """

    name_or_path = "byte"
    pad_token, eos_token = SPECIAL_TOKENS[0], SPECIAL_TOKENS[1]
    pad_token_id, eos_token_id, bos_token_id = 256, 257, None
    padding_side = "right"
    vocab_size = 256 + len(SPECIAL_TOKENS)

    def __init__(self, keep_reasoning: bool = True):
        self.keep_reasoning = keep_reasoning

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str | Sequence[str], **_: object) -> dict[str, object]:
        """``{"input_ids", "attention_mask"}`` of a text, or lists of them."""
        if isinstance(text, str):
            ids = self.encode(text)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        rows = [self.encode(item) for item in text]
        return {"input_ids": rows, "attention_mask": [[1] * len(ids) for ids in rows]}

    def encode(self, text: str, add_special_tokens: bool = False, **_: object) -> list[int]:
        """The ids of a text; special tokens written in it become their ids."""
        ids: list[int] = []
        position = 0
        for match in _SPECIAL.finditer(text):
            ids += _bytes(text[position : match.start()])
            ids.append(self.convert_tokens_to_ids(match[0]))
            position = match.end()
        return ids + _bytes(text[position:])

    def decode(
        self, token_ids: int | Iterable[int], skip_special_tokens: bool = False, **_: object
    ) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        parts: list[bytes] = []
        for token_id in [token_ids] if isinstance(token_ids, int) else token_ids:
            if token_id < 256:
                parts.append(bytes([token_id]))
            elif not skip_special_tokens:
                parts.append(SPECIAL_TOKENS[token_id - 256].encode())
        return b"".join(parts).decode("utf-8", "replace")

    def convert_tokens_to_ids(self, token: str) -> int:
        """The id of a special token. Raises: ``ValueError`` for another text."""
        return 256 + SPECIAL_TOKENS.index(token)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **_: object,
    ) -> list[int] | str:
        """The conversation as ids (or as text): role token, content, end token of each message."""
        messages = list(conversation)
        if tools:
            listing = json.dumps([tool.get("function", tool) for tool in tools])
            messages.insert(0, {"role": "system", "content": f"Tools: {listing}"})
        last_user = max(
            (i for i, message in enumerate(messages) if message["role"] == "user"), default=-1
        )
        ids: list[int] = []
        for i, message in enumerate(messages):
            content = self.render(message)
            if message["role"] == "assistant" and not self.keep_reasoning and i < last_user:
                content = _without_reasoning(content)
            ids.append(self.convert_tokens_to_ids(f"<|{message['role']}|>"))
            ids += [*_bytes(content), self.eos_token_id]
        if add_generation_prompt:
            ids.append(self.convert_tokens_to_ids("<|assistant|>"))
        return ids if tokenize else self.decode(ids)

    def render(self, message: Mapping[str, Any]) -> str:
        """A message as text: reasoning in ``<think>``, content, tool calls in ``<tool_call>``."""
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(
                part.get("text", "") for part in content if part.get("type") == "text"
            )
        if reasoning := message.get("reasoning_content"):
            content = f"<think>{reasoning}</think>{content}"
        for call in message.get("tool_calls") or ():
            function = call["function"]
            content += (
                f"<tool_call>{json.dumps([function['name'], function['arguments']])}</tool_call>"
            )
        return content


def _without_reasoning(content: str) -> str:
    """A text without its ``<think>…</think>`` blocks and the white space after each."""
    parts, position, last = [], 0, content.rfind("</think>")
    while 0 <= (start := content.find("<think>", position)) < last:
        parts.append(content[position:start])
        position = content.index("</think>", start) + len("</think>")
        position = _SPACE.match(content, position).end()  # type: ignore[union-attr]
    return "".join([*parts, content[position:]])


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", "surrogatepass"))
