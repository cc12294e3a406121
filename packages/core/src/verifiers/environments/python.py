"""``PythonEnv``: the model runs Python in one interpreter per rollout, which keeps its state
between calls.

Promise: definitions of a call are available in the next; the value of a trailing expression is
shown as ``Out[n]: …`` and an exception as its traceback; a call past its time limit is stopped, and
its output says that the variables are lost. A rollout installs nothing: packages come from the
Python environment in which ``verifiers`` is installed.

Code comes from calls of the tool ``python``, or from fenced code blocks of a reply (``code_from``),
for models whose chat template shows no tools. ``code_blocks`` extracts the blocks;
``environments.sandbox`` opens, limits and closes the sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from verifiers.clients.protocol import shows_tools
from verifiers.data.messages import field, message_text
from verifiers.environments.code_blocks import (
    BLOCKS_PROMPT,
    BLOCKS_REMINDER,
    NOT_CLOSED,
    Blocks,
    code_blocks,
    output_text,
    with_reminder,
)
from verifiers.environments.sandbox import SandboxEnv, SandboxOptions, sandbox_ready_wait_time
from verifiers.environments.sandbox_text import python_text
from verifiers.errors import ConfigError
from verifiers.rollouts.author_code import setup, stop
from verifiers.rollouts.state import State
from verifiers.runtime.signatures import spell_out
from verifiers.types import Messages, SystemMessage, ToolCall, UserMessage

DEFAULT_PACKAGES = "numpy sympy scipy"
CODE_SOURCES = ("tool", "blocks", "auto")


def python_ready_wait_time(state: State) -> float:
    """Seconds until the rollout's interpreter was ready; it comes with the sandbox."""
    return sandbox_ready_wait_time(state)


class PythonEnv(SandboxEnv):
    """A ``SandboxEnv`` whose tool is ``python(code)``.

    Args:
        pip_install_packages: What the code can import besides the standard library, as pip names
            it, separated by spaces or as a list. A package that is not installed where
            ``verifiers`` is raises a ConfigError at the first rollout that names the command to
            install it.
        max_startup_wait_seconds: Time limit of the start of an interpreter.
        code_from: "tool" (calls of ``python``); "blocks" (the Python blocks of a reply are run as
            one cell, a user message shows the output, and a reply without a block ends the
            rollout); "auto" ("blocks" if the client reports that the chat template of the model
            shows no tools, else "tool"). The source used in a rollout is ``state["code_from"]``.
        blocks_system_prompt: System prompt with "blocks"; default: ``system_prompt`` and an
            explanation with an example; ``""`` leaves it out.
        blocks_reminder: End of the last user message of the prompt with "blocks"; ``""`` leaves it
            out.

    Further parameters are ``SandboxEnv``'s. What runs in the rollout's interpreter shares it with
    the model's code; ``run_check`` checks ``artifacts`` in a fresh interpreter.

    >>> from verifiers.testing import ScriptedClient
    >>> env = vf.PythonEnv("", dataset=[{"question": "6 * 7?"}], code_from="blocks", sandbox="unsafe_subprocess")
    >>> client = ScriptedClient(["Let me see.\\n```python\\nprint(6 * 7)\\n```", "It is 42."])
    >>> [message.content for message in env.evaluate(client, "m")["completions"][0][1:]]
    ['Output:\\n42', 'It is 42.']
    """

    remedy = '; code_from="blocks" (or "auto") runs the Python blocks of its replies instead'

    @spell_out(SandboxOptions, SandboxEnv.__init__)
    def __init__(
        self,
        pip_install_packages: str | Sequence[str] = DEFAULT_PACKAGES,
        max_startup_wait_seconds: float = 30,
        code_from: str = "tool",
        blocks_system_prompt: str | None = None,
        blocks_reminder: str = BLOCKS_REMINDER,
        **parameters: Unpack[SandboxOptions],
    ):
        if code_from not in CODE_SOURCES:
            raise ConfigError(
                f"code_from is {code_from!r}; it must be one of {', '.join(CODE_SOURCES)}",
                key="code_from",
            )
        self.packages = distributions(pip_install_packages)
        self.code_from = code_from
        system_prompt = parameters.get("system_prompt")
        if blocks_system_prompt is None:
            blocks_system_prompt = (
                f"{system_prompt}\n\n{BLOCKS_PROMPT}" if system_prompt else BLOCKS_PROMPT
            )
        self.blocks_system_prompt, self.blocks_reminder = blocks_system_prompt, blocks_reminder
        if code_from == "blocks":
            parameters["system_prompt"] = blocks_system_prompt or None
        super().__init__(max_startup_wait_seconds=max_startup_wait_seconds, **parameters)

    def set_code_from(self, code_from: str) -> None:
        """Always *raises* ConfigError: the prompts are built by the constructor."""
        raise ConfigError("code_from is fixed at construction: pass it to load_environment")

    def add_sandbox_tools(self) -> None:
        """Offer ``python``; with ``code_from="blocks"`` it exists but is not shown to the model."""
        self.add_tool(self.python, args_to_skip=["state"])
        if self.code_from == "blocks":
            self.tool_defs = _without_python(self.tool_defs)

    def measured(self) -> list[Callable[[State], float]]:
        """Metrics of ``SandboxEnv``, and the start time of the interpreter."""
        return [*super().measured(), python_ready_wait_time]

    async def python(self, code: str, state: State) -> str:
        """Run Python code and see what it prints. Variables stay for the next call; there is no
        network.

        Args:
            code: Python statements; the value of a last expression is shown without print.
        """
        result = await self.run_code(state, code)
        number = state["num_cells"] = state.get("num_cells", 0) + 1
        if result.timed_out:
            state["num_cells"] = 0  # the next cell runs in a new interpreter
        return python_text(result, number, self.timeout_per_command_seconds)

    # --- code in blocks ---------------------------------------------------------------------------

    @setup(priority=1)
    async def choose_form(self, state: State) -> None:
        """Set the source of code for this rollout, and adapt the prompt to it."""
        source = self.code_from
        if source == "auto":
            source = "blocks" if await shows_tools(self.client_of(state)) is False else "tool"
            if source == "blocks":
                state["tool_defs"] = _without_python(state["tool_defs"])
        if source == "blocks":
            state["prompt"] = self._prompt_of_blocks(state["prompt"])
            if self.blocks_reminder:
                state["prompt"] = with_reminder(state["prompt"], self.blocks_reminder)
        state["code_from"] = source

    def _prompt_of_blocks(self, prompt: Messages) -> Messages:
        """Replace ``system_prompt`` by ``blocks_system_prompt``, or append it to the system message
        of the row."""
        first: object = prompt[0] if prompt else None
        messages_after: Messages = prompt[1:] if field(first, "role") == "system" else prompt
        system = message_text(first) if field(first, "role") == "system" else ""
        parts = ("" if system == self.system_prompt else system, self.blocks_system_prompt)
        text = "\n\n".join(part for part in parts if part)
        return [SystemMessage(text), *messages_after] if text else messages_after

    @stop
    def no_tools_called(self, state: State) -> Any:
        """Stop when the last assistant message has no tool call; with code blocks, see
        ``no_code_block``."""
        return state.get("code_from") != "blocks" and super().no_tools_called(state)

    @stop
    def no_code_block(self, state: State) -> bool:
        """Stop when the last assistant message has neither a Python block nor a tool call."""
        if state.get("code_from") != "blocks" or not super().no_tools_called(state):
            return False
        return not _blocks_of(state["trajectory"][-1]["completion"])

    def num_calls(self, state: State, messages: Messages, tool: str | None) -> float:
        """Count the calls; with code blocks, a reply that contains Python counts as a call of
        ``python``."""
        in_blocks = (
            state.get("code_from") == "blocks"
            and tool in (None, "python")
            and bool(_blocks_of(messages))
        )
        return super().num_calls(state, messages, tool) + in_blocks

    async def env_response(self, messages: Messages, state: State, **_: object) -> Messages:
        """Return the results of the tool calls of the last message, then, with code blocks, the
        output of its cell."""
        results = await super().env_response(messages, state)
        if state.get("code_from") != "blocks" or not (blocks := _blocks_of(messages[-1:])):
            return results
        is_truncated = bool(state["trajectory"][-1]["is_truncated"])
        code, texts = blocks.cell(is_truncated), []
        if code is not None:
            call = ToolCall("", "python", json.dumps({"code": code}))
            texts.append(message_text(await self._answer(call, messages, state)))
        if is_truncated and blocks.open_code is not None:
            state["sandbox"].num_errors += 1
            texts.append(NOT_CLOSED)
        return [*results, UserMessage(output_text("\n".join(texts)))]


def _blocks_of(messages: Messages) -> Blocks:
    """Return the Python blocks of the last message."""
    return code_blocks(message_text(messages[-1]) if messages else "")


def _without_python(tool_defs: Sequence[Any]) -> list[object]:
    return [tool for tool in tool_defs if field(tool.get("function") or tool, "name") != "python"]


def distributions(packages: str | Sequence[str]) -> tuple[str, ...]:
    """Return the distinct names of packages, without versions.

    >>> distributions("numpy sympy>=1.12 numpy")
    ('numpy', 'sympy')

    *Raises* ConfigError for anything but a package name, such as an option of pip.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    names: dict[str, None] = {}
    for text in packages.split() if isinstance(packages, str) else packages:
        try:
            names[Requirement(text).name] = None
        except InvalidRequirement as error:
            raise ConfigError(
                f"pip_install_packages has {text!r}, which is not a package name; write names"
                " separated by spaces",
                key="pip_install_packages",
            ) from error
    return tuple(names)
