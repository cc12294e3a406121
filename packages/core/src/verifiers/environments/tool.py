"""``ToolEnv``: the model calls typed Python functions until it answers without a call.

Promise: every tool call of an assistant message gets exactly one tool message, in the order of the
calls. Invalid JSON, an unknown name and wrong arguments become error texts for the model, and no
result is longer than ``max_tool_result_chars``. An exception of a tool becomes an error text too,
unless it is one of ``stop_errors`` or a failure that the model did not cause (an endpoint, a
sandbox that does not start): those end the rollout.

``data.tool_schema`` builds schemas and checks arguments. This module isolates nothing: tools run
with the permissions of this process.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Unpack

from verifiers.clients.protocol import shows_tools
from verifiers.data.messages import field, normalize_chat, normalize_message
from verifiers.data.tool_schema import ToolFunction, parse_arguments, shortened, tool_name
from verifiers.environments.keywords import ConversationOptions
from verifiers.environments.multi_turn import MultiTurnEnv
from verifiers.environments.tool_answers import all_listed, as_answer, bounded, listed
from verifiers.errors import (
    ConfigError,
    RolloutError,
    ToolCallError,
    ToolParseError,
    UsageError,
    message_of,
)
from verifiers.rollouts.author_code import fault, maybe_await, passes, setup, stop
from verifiers.rollouts.state import State
from verifiers.rubrics.tool_rubric import count_calls, metric_name
from verifiers.runtime.signatures import spell_out
from verifiers.runtime.worker_threads import call_in_thread
from verifiers.types import Message, Messages, ToolCall

LATE = -1000
"""Priority of the check of a rollout's tools, after every other ``@setup``."""


class CallOptions(ConversationOptions, total=False):
    """Parameters of ``ToolEnv`` that its subclasses pass on as they are."""

    tools: Sequence[Callable[..., object]] | None
    parallel_tool_calls: bool


class ToolEnv(MultiTurnEnv):
    """An environment whose actions are function calls.

    Args:
        tools: Functions that the model may call, sync or async. Names, types and docstrings become
            the schema.
        max_turns: Model calls after which a rollout ends.
        error_formatter: Function from an exception to the text that the model reads.
        stop_errors: Exception classes that end the rollout instead.
        parallel_tool_calls: Run the calls of a message together; their results keep the order of
            the calls.
        max_tool_result_chars: Longer results of a tool are cut to this many characters.

    Further parameters are those of ``MultiTurnEnv``.

    *Raises* ConfigError for a tool without a usable schema, two tools of one name, or completion
    mode.

    >>> from verifiers.testing import ScriptedClient
    >>> def square(n: int) -> int:
    ...     return n * n
    >>> env = vf.ToolEnv(tools=[square], dataset=[{"question": "What is 12 squared?", "answer": "144"}])
    >>> client = ScriptedClient([vf.ToolCall("c1", "square", {"n": 12}), "It is 144."])
    >>> [message.content for message in env.evaluate(client, "m")["completions"][0]]
    [None, '144', 'It is 144.']
    """

    max_calls_per_turn: int = 128
    """Most calls of an assistant message that run; the others get an error text."""
    remedy: str = ""
    """Advice appended to the warning about a chat template that shows no tools."""

    @spell_out(ConversationOptions, MultiTurnEnv.__init__)
    def __init__(
        self,
        tools: Sequence[Callable[..., object]] | None = None,
        max_turns: int = 10,
        error_formatter: Callable[[Exception], str] = str,
        stop_errors: Sequence[type[BaseException]] | None = None,
        parallel_tool_calls: bool = False,
        max_tool_result_chars: int = 200_000,
        **parameters: Unpack[ConversationOptions],
    ):
        super().__init__(max_turns=max_turns, **parameters)
        if self.message_type != "chat":
            raise ConfigError('tools need chat messages; drop message_type="completion"')
        if max_tool_result_chars < 1:
            raise ConfigError(
                f"max_tool_result_chars is {max_tool_result_chars}; it must be at least 1"
            )
        self.error_formatter = error_formatter
        self.stop_errors = _exception_classes(stop_errors or ())
        self.parallel_tool_calls = parallel_tool_calls
        self.max_tool_result_chars = max_tool_result_chars
        self.tools: list[Callable[..., object]] = []
        self.tool_map: dict[str, Callable[..., Any]] = {}
        """Name -> the callable as passed."""
        self._functions: dict[str, ToolFunction] = {}
        self._warned_of_hidden_tools = False
        self._measure(None)
        for tool in tools or ():
            self.add_tool(tool)

    # --- the tools --------------------------------------------------------------------------------

    def add_tool(self, tool: Callable[..., object] | ToolFunction) -> None:
        """Offer a callable to the model. *Raises* ConfigError as the constructor."""
        self._add(tool if isinstance(tool, ToolFunction) else ToolFunction.of(tool))

    def _add(self, tool: ToolFunction) -> None:
        if tool.name in _names(self.tool_defs):
            raise ConfigError(f"two tools are called {tool.name!r}; rename one of them")
        if unclear := tool.unclear():
            self.warn_once(f"the model sees too little of the tool {tool.name!r}: it has {unclear}")
        schema = tool.visible_schema("state")
        if schema is not None and schema.get("type", "object") == "object":
            self.warn_once(
                f"the model is asked for the parameter 'state' of the tool {tool.name!r}; a"
                " vf.StatefulToolEnv fills it in: add_tool(tool, args_to_skip=['state']) and"
                " update_tool_args"
            )
        self.tools.append(tool.function)
        self.tool_map[tool.name], self._functions[tool.name] = tool.function, tool
        self.tool_defs = [*self.tool_defs, tool.definition]  # running rollouts keep their list
        self._measure(tool.name)

    def remove_tool(self, tool: Callable[..., object] | ToolFunction) -> None:
        """Withdraw a callable. *Raises* ConfigError when it is not a tool of this environment."""
        name, function = (
            (tool.name, tool.function)
            if isinstance(tool, ToolFunction)
            else (tool_name(tool), tool)
        )
        if self.tool_map.get(name) != function:
            raise ConfigError(
                f"{name!r} is not a tool of this {type(self).__name__}; it has: {self._tool_names()}"
            )
        self.tools.remove(function)
        del self.tool_map[name], self._functions[name]
        self.tool_defs = [
            definition for definition in self.tool_defs if _names([definition]) != {name}
        ]

    def _measure(self, tool: str | None) -> None:
        """Add the metric that counts the calls of a tool (None: of all tools)."""
        if metric_name(tool) not in self.monitor_rubric.get_reward_func_names():
            self.monitor_rubric.add_metric(_of_trajectory(tool, self.num_calls))

    def num_calls(self, state: State, messages: Messages, tool: str | None) -> float:
        """Count the calls in the messages of a turn: all, or those of ``tool``; the metrics sum
        over turns."""
        return count_calls(messages, tool)

    # --- one turn ---------------------------------------------------------------------------------

    @setup(priority=LATE)
    async def note_hidden_tools(self, state: State) -> None:
        """Warn once if the chat template of the model shows no tools."""
        if self._warned_of_hidden_tools or not state["tool_defs"]:
            return
        if await shows_tools(self.client_of(state)) is False and not self._warned_of_hidden_tools:
            self._warned_of_hidden_tools = True
            self.logger.warning(
                "the chat template of %s shows no tools, so the model does not know that it can"
                " call %s%s",
                state["model"],
                ", ".join(sorted(_names(state["tool_defs"]))),
                self.remedy,
            )

    @stop
    def no_tools_called(self, state: State) -> Any:
        """Stop when the last assistant message has no tool call."""
        return bool(state["trajectory"]) and not count_calls(
            state["trajectory"][-1]["completion"][-1:]
        )

    async def env_response(self, messages: Messages, state: State, **_: object) -> Messages:
        """Return the results of the tool calls of the last message, in their order."""
        calls: list[ToolCall] = normalize_chat([messages[-1]])[0].tool_calls or []
        run, excess = calls[: self.max_calls_per_turn], calls[self.max_calls_per_turn :]
        work = (self._answer(call, messages, state) for call in run)
        answers = (
            await _together(work) if self.parallel_tool_calls else [await call for call in work]
        )
        if excess:
            refusal = ToolCallError(
                f"not run: one message may make {self.max_calls_per_turn} tool calls at most"
            )
            answers += [
                as_answer(self._error_text(call["name"], refusal), call["id"]) for call in excess
            ]
        return answers

    async def call_tool(
        self, tool_name: str, tool_args: dict[str, object], tool_call_id: str, **kwargs: Any
    ) -> Message:
        """Call one tool and return its result as a message. Exceptions become error texts.

        ``tool_args`` are checked and converted to the declared types; ``kwargs`` holds ``state``.
        """
        function = self.tool_map.get(tool_name)
        if function is None:
            raise self._unknown(tool_name)
        tool = self._functions.get(tool_name)
        if tool is not None and tool.is_async:
            result = await function(**tool_args)
        else:
            result = await self._in_thread(
                tool_name, functools.partial(function, **tool_args), kwargs.get("state")
            )
        result = await all_listed(await maybe_await(result), self.max_tool_result_chars)
        return as_answer(result, tool_call_id)

    async def prepare_arguments(
        self, call: ToolCall, messages: Messages, state: State
    ) -> dict[str, object]:
        """Return the arguments of a call as the tool receives them. *Raises* ToolError for a call
        that cannot run."""
        arguments = self.parsed_arguments(call, state)
        tool = self._functions.get(call["name"])
        return arguments if tool is None else tool.arguments(arguments)

    def parsed_arguments(self, call: ToolCall, state: State) -> dict[str, object]:
        """Return the arguments that the model wrote. *Raises* ToolError for an unknown tool or text
        that is no JSON."""
        if call["name"] not in self.tool_map and call["name"] not in _names(
            state["tool_defs"] or ()
        ):
            raise self._unknown(call["name"])
        return parse_arguments(call["arguments"])

    async def _answer(self, call: ToolCall, messages: Messages, state: State) -> Message:
        name, call_id = call["name"], call["id"]
        if _takes_state(getattr(self.call_tool, "__func__", self.call_tool)):
            extras = {"state": state}
        else:
            extras = {}
        try:
            arguments = await self.prepare_arguments(call, messages, state)
            async with nullcontext() if state.run is None else state.run.tool_slot:
                result = await maybe_await(self.call_tool(name, arguments, call_id, **extras))
            if isinstance(result, Mapping) and "role" in result:
                result = normalize_message(result) if not isinstance(result, Message) else result
            message = as_answer(result, call_id)
        except BaseException as error:  # noqa: BLE001  becomes a text for the model, or _error_text raises it again
            text = self._error_text(name, error)
            state.record.tool_errors.append(f"{name}: {shortened(text)}")
            message = as_answer(text, call_id)
        return bounded(message, self.max_tool_result_chars)

    def _error_text(self, tool: str, error: BaseException) -> str:
        """Return the text of an error for the model. *Raises* the error if it ends the rollout or
        the run."""
        if not isinstance(error, RolloutError):
            if passes(error):
                raise error
            # a setting; SystemExit and the like
            if isinstance(error, UsageError) or not isinstance(error, Exception):
                raise fault(tool, error) from error
        failure = error if isinstance(error, RolloutError) else _call_error(tool, error)
        causes = (error, failure, error.__cause__ if isinstance(error, ToolParseError) else None)
        if any(isinstance(cause, self.stop_errors) for cause in causes):
            raise failure
        # not caused by the model, which cannot correct it: the reward is unknown
        if not failure.scorable:
            raise failure
        try:
            as_text = message_of if self.error_formatter is str else self.error_formatter
            return str(as_text(error)) or type(error).__name__
        except Exception as failed:
            raise fault("error_formatter", failed) from failed

    async def _in_thread(
        self, tool: str, call: Callable[[], object], state: State | None
    ) -> object:
        """Call a synchronous tool in a thread.

        A thread cannot be killed: a thread that runs past the time limit of the rollout is
        abandoned.
        """
        run_limit_s = None if state is None or state.run is None else state.run.rollout_timeout_s
        limits_s = [limit for limit in (run_limit_s, self.timeout_seconds) if limit is not None]

        def call_tool() -> object:
            return listed(call(), self.max_tool_result_chars)

        call_tool.__name__ = tool
        return await call_in_thread(call_tool, limit_s=min(limits_s, default=None))

    def _unknown(self, name: str) -> ToolCallError:
        return ToolCallError(
            f"there is no tool '{shortened(name)}'; the tools are: {self._tool_names()}"
        )

    def _tool_names(self) -> str:
        return ", ".join(self.tool_map) or "none"


def _call_error(tool: str, error: Exception) -> ToolCallError:
    wrapped = ToolCallError(
        f"the tool {tool!r} raised {type(error).__name__}: {shortened(message_of(error))}"
    )
    wrapped.__cause__ = error
    return wrapped


def _names(definitions: Iterable[Mapping[str, object]]) -> set[str]:
    return {field(definition.get("function") or definition, "name") for definition in definitions}


def _of_trajectory(tool: str | None, num_calls: Callable[..., float]) -> Callable[..., float]:
    """Return the metric that counts sampled calls, including those of turns that the conversation
    dropped."""

    def count(state: State) -> float:
        return sum(
            (num_calls(state, step["completion"], tool) for step in state["trajectory"]), 0.0
        )

    count.__name__ = metric_name(tool)
    return count


def _exception_classes(
    classes_or_class: type[BaseException] | Iterable[type[BaseException]],
) -> tuple[type[BaseException], ...]:
    classes = (classes_or_class,) if isinstance(classes_or_class, type) else tuple(classes_or_class)
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, BaseException)):
            raise ConfigError(f"stop_errors takes exception classes, not {shortened(cls)}")
    return classes


@functools.lru_cache(maxsize=256)
def _takes_state(call_tool: Callable[..., object]) -> bool:
    parameters = inspect.signature(call_tool).parameters
    return "state" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


async def _together(work: Iterable[Coroutine[object, object, Message]]) -> list[Message]:
    """Await all and return the results in order. When a call raises, the others are cancelled and
    awaited first."""
    tasks = [asyncio.ensure_future(call) for call in work]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
