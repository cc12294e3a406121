r"""Python that a model writes in fenced blocks of its reply, for models that are not shown tools.

Promise: what runs is what a reader of Markdown takes for a Python block, and nothing else. Fences are CommonMark's
(https://spec.commonmark.org, "Fenced code blocks", of backticks): a line of three or more backticks and a language, by
itself and indented by three spaces at most, opens a block; a line of as many backticks or more and nothing else closes
it. Its language is ``python`` or ``py``, in any case; a block in another language or in none is text, and a fence
inside of one opens nothing. All blocks of a reply are one cell, in their order: only the last expression of the last
block is shown, and an exception ends the cell. What stands before ``</think>`` is a thought and no part of the reply;
nor is anything of a reply that begins with ``<think>`` and never ends it.

Pure: runs nothing. When the cell runs, and in what, is ``environments.python``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from verifiers.data.messages import field
from verifiers.types import Message, Messages

LANGUAGES = frozenset(("python", "py"))
BLOCKS_PROMPT = """\
You can run Python code. Write it in a block that begins with a line ```python and ends with a line ```. Then stop: \
the next message shows what the code printed. Variables stay for your next block. When you know the answer, write it \
without a code block.

Example of a block:
```python
print(sum(n * n for n in range(1, 11)))
```
The next message is then:
Output:
385"""
"""Instructions for the model about the form, unless the environment's author writes it."""
BLOCKS_REMINDER = "Write Python code that computes the answer, in a ```python block."
"""The end of the first question, unless the author writes it: small models forget what the system prompt says."""
NOT_CLOSED = "(the code block was cut off by the length limit of a reply; close it with a line ```, and write less)"
_FENCE = re.compile(r"( {0,3})(`{3,})[ \t]*([^`]*)")


@dataclass(frozen=True, slots=True)
class Blocks:
    """The Python blocks of one reply."""

    code: str | None = None
    """The cell; None when no block was closed."""
    open_code: str | None = None
    """What stands in a last block that was not closed; None when all are."""

    def cell(self, is_cut_off: bool) -> str | None:
        """What is to run: a block that is open because the model stopped there is whole, one that was cut off is not.

        A model stops in a block where the closing fence is a stop string.
        """
        if self.open_code is None or is_cut_off:
            return self.code
        return self.open_code if self.code is None else f"{self.code}\n{self.open_code}"

    def __bool__(self) -> bool:
        return self.code is not None or self.open_code is not None


def code_blocks(reply: str) -> Blocks:
    r"""The Python blocks of a reply.

    >>> code_blocks("First\n```python\nx = 6\n```\nthen\n```py\nx * 7\n```").code
    'x = 6\nx * 7'
    >>> code_blocks("```\nx\n```\nand `python`"), code_blocks("```python\nx = ").open_code
    (Blocks(code=None, open_code=None), 'x = ')
    """
    closed: list[str] = []
    lines: list[str] | None = None
    indent, fence, is_python = 0, "", False
    _, is_over, text_after_thought = reply.rpartition("</think>")
    if not is_over and reply.lstrip().startswith("<think>"):
        return Blocks()
    for line in text_after_thought.replace("\r\n", "\n").split("\n"):
        found = _FENCE.fullmatch(line)
        if lines is None:
            if found is not None:
                indent, fence, language = len(found[1]), found[2], found[3].split()
                lines, is_python = [], bool(language) and language[0].lower() in LANGUAGES
        elif found is not None and found[2].startswith(fence) and not found[3].strip():
            closed += ["\n".join(lines)] if is_python else []
            lines = None
        else:
            spaces = len(line) - len(line.lstrip(" "))
            lines.append(line[min(indent, spaces) :])
    return Blocks("\n".join(closed) if closed else None, "\n".join(lines) if lines is not None and is_python else None)


def output_text(text: str) -> str:
    """The user message that shows what a cell printed."""
    return f"Output:\n{text}"


def with_reminder(prompt: Messages, reminder: str) -> Messages:
    """The prompt with a sentence at the end of its last user message; one without such a message is as it was.

    >>> with_reminder([{"role": "user", "content": "6 * 7?"}], "Compute it.")
    [{'role': 'user', 'content': '6 * 7?\\n\\nCompute it.'}]
    """
    users = [place for place, message in enumerate(prompt) if field(message, "role") == "user"]
    if not users:
        return prompt
    said: Any = prompt[users[-1]]
    text = f"\n\n{reminder}"
    content = said["content"] + text if isinstance(said["content"], str) else [*said["content"], _part(text)]
    reminded: Any = list(prompt)
    reminded[users[-1]] = Message({**said, "content": content})
    messages: Messages = reminded
    return messages


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
