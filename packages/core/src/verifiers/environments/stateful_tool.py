"""``StatefulToolEnv``: tools with parameters that the model does not see and the environment fills
in.

Promise: a hidden parameter is in no schema, a call that names it gets an error text, and a tool is
never called without a hidden parameter that it requires. Everything else is in
``environments.tool``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers.data.tool_schema import ToolFunction
from verifiers.environments.tool import ToolEnv
from verifiers.errors import EnvironmentFault, ToolCallError
from verifiers.rollouts.author_code import fault, maybe_await, passes
from verifiers.rollouts.state import State
from verifiers.types import Messages, ToolCall


class StatefulToolEnv(ToolEnv):
    """A ``ToolEnv`` whose tools use the state of the rollout.

    >>> from verifiers.testing import ScriptedClient
    >>> class Purse(vf.StatefulToolEnv):
    ...     def setup_state(self, state):
    ...         state["coins"] = []
    ...     def update_tool_args(self, tool_name, tool_args, messages, state, **_):
    ...         return {**tool_args, "coins": state["coins"]}
    >>> def put(coin: int, coins: list) -> int:
    ...     coins.append(coin)
    ...     return sum(coins)
    >>> env = Purse(dataset=[{"question": "Put a 5 in."}])
    >>> env.add_tool(put, args_to_skip=["coins"])
    >>> client = ScriptedClient([vf.ToolCall("c1", "put", {"coin": 5}), "done"])
    >>> env.evaluate(client, "m")["states"][0]["coins"]
    [5]
    """

    def add_tool(
        self, tool: Callable[..., object] | ToolFunction, args_to_skip: Sequence[str] = ()
    ) -> None:
        """Offer a callable to the model without the parameters ``args_to_skip``, which
        ``update_tool_args`` fills in.

        *Raises* ConfigError as ``ToolEnv.add_tool``, and for a parameter that does not exist.
        """
        self._add(tool if isinstance(tool, ToolFunction) else ToolFunction.of(tool, args_to_skip))

    def update_tool_args(
        self,
        tool_name: str,
        tool_args: dict[str, object],
        messages: Messages,
        state: State,
        **kwargs: object,
    ) -> Any:
        """Return the arguments for the tool, given those of the model; may change ``state``. Sync
        or async."""
        return tool_args

    @property
    def skipped_args(self) -> dict[str, list[str]]:
        """Tool -> the parameters that the model does not see."""
        return {name: sorted(tool.hidden) for name, tool in self._functions.items()}

    async def prepare_arguments(
        self, call: ToolCall, messages: Messages, state: State
    ) -> dict[str, object]:
        """Call ``update_tool_args`` with the model's arguments, then check what it returns.

        *Raises* ToolError for a call that cannot run, ToolCallError for a call that names a hidden
        parameter, and for wrong arguments also when ``update_tool_args`` fails on them.
        """
        name = call["name"]
        arguments = self.parsed_arguments(call, state)
        tool = self._functions.get(name)
        if tool is not None and (hidden := sorted(tool.hidden & arguments.keys())):
            raise ToolCallError(f"wrong arguments for {name}: {hidden[0]!r} is not a parameter")
        try:
            update: Any = self.update_tool_args
            leading = (name,) if _takes_the_name(getattr(update, "__func__", update)) else ()
            updated = await maybe_await(update(*leading, dict(arguments), messages, state))
        except BaseException as error:
            if passes(error):
                raise
            if tool is not None and isinstance(error, Exception):
                # the model's mistake, when that is what made the hook fail
                tool.arguments(arguments)
            raise fault("update_tool_args", error) from error
        if not isinstance(updated, Mapping):
            kind = type(updated).__name__
            raise EnvironmentFault(
                f"update_tool_args returned {kind}; return a dict", hook="update_tool_args"
            )
        if tool is not None and (missing := sorted(tool.hidden_required - updated.keys())):
            raise EnvironmentFault(
                f"update_tool_args did not fill in {missing[0]!r} of the tool {name!r}, which"
                " args_to_skip hides",
                hook="update_tool_args",
            )
        if tool is None:
            return dict(updated)
        filled = {key: value for key, value in updated.items() if key in tool.hidden}
        return (
            tool.arguments({key: value for key, value in updated.items() if key not in filled})
            | filled
        )


@functools.lru_cache(maxsize=256)
def _takes_the_name(method: Callable[..., object]) -> bool:
    """Return False for the oldest signature, ``update_tool_args(self, tool_args, messages,
    state)``."""
    parameters = inspect.signature(method).parameters.values()
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return takes_any or positional[1:4] != ["tool_args", "messages", "state"]
