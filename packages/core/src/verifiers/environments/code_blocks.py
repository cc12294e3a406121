r"""Extract Python from fenced code blocks of a reply, for models whose chat template shows no
tools.

Promise: exactly the Python blocks of the Markdown run. Fences are those of CommonMark
(https://spec.commonmark.org, "Fenced code blocks", backticks only): a line of three or more
backticks and an info string, indented by at most three spaces, opens a block; a line of at least as
many backticks and nothing else closes it. The language is ``python`` or ``py``, with a version or not, in any
case; a block in another language or without a name is text, and a fence inside it opens no block. All
blocks of a reply form one cell, in order: only the last expression of the last block is shown, and
an exception ends the cell. Reasoning is ignored (``data.text.split_reasoning``).

This module runs no code; ``environments.python`` does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from verifiers.data.messages import field
from verifiers.data.text import split_reasoning
from verifiers.types import Message, Messages

_LANGUAGE = re.compile(r"\{?\.?(?:i?python|py)[\d.]*(?![\w+#-])", re.IGNORECASE)
"""Also as Pandoc and notebooks write it: ``{python}``, ``{.python}``, ``ipython3``."""
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
"""Default instructions for the model about code blocks."""
BLOCKS_REMINDER = "Write Python code that computes the answer, in a ```python block."
"""Default last sentence of the question: small models lose track of the system prompt."""
NOT_CLOSED = (
    "(the code block was cut off by the length limit of a reply; close it with a line ```, and"
    " write less)"
)
_FENCE = re.compile(r"( {0,3})(`{3,})[ \t]*([^`]*)")


@dataclass(frozen=True, slots=True)
class Blocks:
    """The Python blocks of a reply."""

    code: str | None = None
    """The code of all closed blocks; None without a block."""
    open_code: str | None = None
    """The code of an unclosed last block; None when all are closed."""

    def cell(self, is_truncated: bool) -> str | None:
        """Return the code to run: an unclosed block counts unless the reply was truncated.

        A model stops inside a block when the closing fence is a stop string.
        """
        if self.open_code is None or is_truncated:
            return self.code
        return self.open_code if self.code is None else f"{self.code}\n{self.open_code}"

    def __bool__(self) -> bool:
        return self.code is not None or self.open_code is not None


def code_blocks(reply: str) -> Blocks:
    r"""Return the Python blocks of a reply.

    >>> code_blocks("First\n```python\nx = 6\n```\nthen\n```py\nx * 7\n```").code
    'x = 6\nx * 7'
    >>> code_blocks("```\nx\n```\nand `python`"), code_blocks("```python\nx = ").open_code
    (Blocks(code=None, open_code=None), 'x = ')
    """
    closed: list[str] = []
    lines: list[str] | None = None
    indent, fence, is_python = 0, "", False
    for line in split_reasoning(reply)[1].replace("\r\n", "\n").split("\n"):
        match = _FENCE.fullmatch(line)
        if lines is None:
            if match is not None:
                indent, fence = len(match[1]), match[2]
                lines, is_python = [], _LANGUAGE.match(match[3]) is not None
        elif match is not None and match[2].startswith(fence) and not match[3].strip():
            closed += ["\n".join(lines)] if is_python else []
            lines = None
        else:
            spaces = len(line) - len(line.lstrip(" "))
            lines.append(line[min(indent, spaces) :])
    return Blocks(
        "\n".join(closed) if closed else None,
        "\n".join(lines) if lines is not None and is_python else None,
    )


def output_text(text: str) -> str:
    """Return the user message that shows the output of a cell."""
    return f"Output:\n{text}"


def with_reminder(prompt: Messages, reminder: str) -> Messages:
    """Append a sentence to the last user message of a prompt; a prompt without such a message is
    returned unchanged.

    >>> with_reminder([{"role": "user", "content": "6 * 7?"}], "Compute it.")
    [{'role': 'user', 'content': '6 * 7?\\n\\nCompute it.'}]
    """
    users = [index for index, message in enumerate(prompt) if field(message, "role") == "user"]
    if not users:
        return prompt
    last: Any = prompt[users[-1]]
    text = f"\n\n{reminder}"
    content = (
        last["content"] + text
        if isinstance(last["content"], str)
        else [*last["content"], _part(text)]
    )
    reminded: Any = list(prompt)
    reminded[users[-1]] = Message({**last, "content": content})
    messages: Messages = reminded
    return messages


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
