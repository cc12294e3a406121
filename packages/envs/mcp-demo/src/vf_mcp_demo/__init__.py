"""mcp-demo: questions about warehouses whose stock is available only from an MCP server, included
in the package.

The public interface is ``load_environment``; the README describes rewards and metrics.
"""

from __future__ import annotations

import re
import sys

import verifiers as vf
from verifiers.runtime.values import Count, check_arguments
from vf_mcp_demo.catalogue import draw_rows

__all__ = ["SYSTEM_PROMPT", "load_environment"]

SYSTEM_PROMPT = (
    "You answer questions about a company's warehouses. Look up what you need with the tools. "
    "When you know the answer, give the number alone inside <answer> and </answer> tags."
)

_MARKED = re.compile(r"[\s*$`]*+(?:\\boxed\{)?([^{}\s*$`.]*+)\}?[\s*$`.]*+")
"""A number between marks."""
_NUMBER = re.compile(r"[0-9]{1,20}")


@check_arguments
def load_environment(
    num_train_examples: Count = 400,
    num_eval_examples: Count = 50,
    max_turns: Count = 8,
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.Environment:
    """The mcp-demo environment. The server starts with the first rollout and stops when the
    environment is closed.

    Args:
        num_train_examples: Training questions, 620 at most.
        num_eval_examples: Held-out questions, 152 at most; their items do not occur in training
            questions.
        max_turns: Model calls, including those with tool calls.
        seed: Determines stock and questions; equal arguments give equal questions on every machine.
        system_prompt: Default: an instruction that names the tools' use and the tags. "" sends
            none.

    Raises:
        ConfigError: An invalid argument, by name; or the MCP client is not installed.
    """
    parser = vf.XMLParser(["answer"], last=True)
    return vf.MCPEnv(
        mcp_servers=[
            {
                "name": "warehouse",
                "command": sys.executable,
                "args": ["-m", "vf_mcp_demo.server", "--seed", str(seed)],
                "description": "The stock and the prices of the warehouses.",
            }
        ],
        max_turns=max_turns,
        dataset=draw_rows(num_train_examples, seed, held_out=False),
        eval_dataset=draw_rows(num_eval_examples, seed, held_out=True),
        system_prompt=(SYSTEM_PROMPT if system_prompt is None else system_prompt) or None,
        parser=parser,
        rubric=_make_rubric(parser),
    )


def read_number(text: str | None) -> int | None:
    """The integer that an answer consists of, optionally with commas between thousands.

    >>> read_number(" 1,024\\n"), read_number("1024 cents"), read_number(None)
    (1024, None, None)
    """
    marked = _MARKED.fullmatch(text or "")
    written = marked[1] if marked else ""
    plain = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", written)
    return int(plain) if _NUMBER.fullmatch(plain) else None


def _make_rubric(parser: vf.Parser) -> vf.Rubric:
    # Coroutines run on the event loop: they take microseconds, less than a switch to a thread.
    async def correct_answer(completion: vf.Messages, answer: str) -> float:
        replies = parser.get_assistant_messages(completion)
        return float(read_number(parser.parse_answer(replies[-1:])) == int(answer))

    async def looked_up(completion: vf.Messages) -> float:
        return float(bool(parser.get_tool_messages(completion)))

    rubric = vf.Rubric([correct_answer], parser=parser)
    rubric.add_metric(looked_up)
    return rubric
