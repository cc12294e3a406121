"""``ToolEnv``: the model calls typed Python functions until it answers without a call.

Promise: every tool call of an assistant message gets exactly one answer, in the order of the calls, whatever the model
wrote: broken JSON, an unknown name and wrong arguments are texts that the model can read, and no answer is longer than
``max_tool_result_chars``. An exception of a tool becomes such a text too, unless it is one of ``stop_errors`` or
a failure that the model did not cause (an endpoint, a sandbox that does not start): those end the rollout.

Schemas and the check of arguments are in ``tools``. This module isolates nothing: a tool runs with the author's rights,
and the author decides what a model may make it do.
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
from verifiers.environments.multi_turn import ConversationOptions, MultiTurnEnv
from verifiers.environments.tool_answers import as_answer, bounded
from verifiers.errors import ConfigError, RolloutError, ToolCallError, ToolParseError, UsageError
from verifiers.rollouts.author_code import fault, passes
from verifiers.rollouts.decorators import setup, stop
from verifiers.rollouts.state import State
from verifiers.rubrics.tool_rubric import count_calls, metric_name
from verifiers.runtime.signatures import spell_out
from verifiers.runtime.sync_async import maybe_await
from verifiers.runtime.threads import call_in_thread
from verifiers.types import Message, Messages, ToolCall

LATE = -1000
"""Priority of what looks at a rollout's tools when every other ``@setup`` has run."""


class CallOptions(ConversationOptions, total=False):
    """Parameters of ``ToolEnv`` that its subclasses pass on as they are."""

    tools: Sequence[Callable[..., Any]] | None
    parallel_tool_calls: bool


class ToolEnv(MultiTurnEnv):
    """An environment whose actions are function calls.

    ``error_formatter`` turns an exception into the text that the model reads. ``stop_errors``: exception classes that
    end the rollout instead. ``parallel_tool_calls`` runs the calls of one message together; their answers keep the
    order of the calls. ``max_tool_result_chars`` bounds the text of one answer. Further parameters are those of
    ``MultiTurnEnv``.

    *Raises* ConfigError for a tool without a usable schema, two tools of one name, or completion mode.

    >>> from verifiers.testing import ScriptedClient
    >>> def square(n: int) -> int:
    ...     return n * n
    >>> env = vf.ToolEnv(tools=[square], dataset=[{"question": "What is 12 squared?", "answer": "144"}])
    >>> client = ScriptedClient([vf.ToolCall("c1", "square", {"n": 12}), "It is 144."])
    >>> [message.content for message in env.evaluate(client, "m")["completions"][0]]
    [None, '144', 'It is 144.']
    """

    max_calls_per_turn: int = 128
    """Calls of one assistant message that are run; further ones are answered with a text that says so."""
    remedy: str = ""
    """What a model can do that is not shown tools; the end of a warning."""

    @spell_out(ConversationOptions, MultiTurnEnv.__init__)
    def __init__(
        self,
        tools: Sequence[Callable[..., Any]] | None = None,
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
            raise ConfigError(f"max_tool_result_chars is {max_tool_result_chars}; it must be at least 1")
        self.error_formatter = error_formatter
        self.stop_errors = _exception_classes(stop_errors or ())
        self.parallel_tool_calls = parallel_tool_calls
        self.max_tool_result_chars = max_tool_result_chars
        self.tools: list[Callable[..., Any]] = []
        self.tool_map: dict[str, Callable[..., Any]] = {}
        """Callable by name, as the author gave it."""
        self._functions: dict[str, ToolFunction] = {}
        self._warned_of_hidden_tools = False
        self._measure(None)
        for tool in tools or ():
            self.add_tool(tool)

    # --- the tools ----------------------------------------------------------------------------------------------

    def add_tool(self, tool: Callable[..., Any] | ToolFunction) -> None:
        """Offer a callable to the model. *Raises* ConfigError as the constructor."""
        self._add(tool if isinstance(tool, ToolFunction) else ToolFunction.of(tool))

    def _add(self, tool: ToolFunction) -> None:
        if tool.name in _names(self.tool_defs):
            raise ConfigError(f"two tools are called {tool.name!r}; rename one of them")
        self.tools.append(tool.function)
        self.tool_map[tool.name], self._functions[tool.name] = tool.function, tool
        self.tool_defs = [*self.tool_defs, tool.definition]  # rollouts under way keep the list they began with
        self._measure(tool.name)

    def remove_tool(self, tool: Callable[..., Any] | ToolFunction) -> None:
        """Offer a callable no longer. *Raises* ConfigError when it is none of the tools."""
        name, function = (tool.name, tool.function) if isinstance(tool, ToolFunction) else (tool_name(tool), tool)
        if self.tool_map.get(name) != function:
            raise ConfigError(f"{name!r} is no tool of this {type(self).__name__}; it has: {self._known()}")
        self.tools.remove(function)
        del self.tool_map[name], self._functions[name]
        self.tool_defs = [definition for definition in self.tool_defs if _names([definition]) != {name}]

    def _measure(self, tool: str | None) -> None:
        """Count the calls of a tool (None: of all) on every rollout."""
        if metric_name(tool) not in self.monitor_rubric.get_reward_func_names():
            self.monitor_rubric.add_metric(_of_trajectory(tool, self.num_calls))

    def num_calls(self, state: State, messages: Messages, tool: str | None) -> float:
        """How many calls the messages of one model call make: all, or those of ``tool``; the metrics add them up."""
        return count_calls(messages, tool)

    # --- one turn -----------------------------------------------------------------------------------------------

    @setup(priority=LATE)
    async def note_hidden_tools(self, state: State) -> None:
        """Warn once if the model's chat template does not show tools, so that the model cannot see them."""
        if self._warned_of_hidden_tools or not state["tool_defs"]:
            return
        if await shows_tools(self.client_of(state)) is False and not self._warned_of_hidden_tools:
            self._warned_of_hidden_tools = True
            self.logger.warning(
                "the chat template of %s shows no tools, so the model does not know that it can call %s%s",
                state["model"],
                ", ".join(sorted(_names(state["tool_defs"]))),
                self.remedy,
            )

    @stop
    def no_tools_called(self, state: State) -> bool:
        """The last assistant message calls nothing: the model is done."""
        return bool(state["trajectory"]) and not count_calls(state["trajectory"][-1]["completion"][-1:])

    async def env_response(self, messages: Messages, state: State, **_: Any) -> Messages:
        """The answers to the tool calls of the last message, in their order."""
        calls: list[ToolCall] = normalize_chat([messages[-1]])[0].tool_calls or []
        run, left_over = calls[: self.max_calls_per_turn], calls[self.max_calls_per_turn :]
        work = (self._answer(call, messages, state) for call in run)
        answers = await _together(work) if self.parallel_tool_calls else [await one for one in work]
        if left_over:
            refusal = ToolCallError(f"not run: one message may make {self.max_calls_per_turn} tool calls at most")
            answers += [as_answer(self._error_text(call["name"], refusal), call["id"]) for call in left_over]
        return answers

    async def call_tool(self, tool_name: str, tool_args: dict[str, Any], tool_call_id: str, **kwargs: Any) -> Message:
        """Call one tool and make its result a message; override to call otherwise. Exceptions become error texts.

        ``tool_args`` are checked and in the declared types; ``kwargs`` holds ``state``.
        """
        function = self.tool_map.get(tool_name)
        if function is None:
            raise self._unknown(tool_name)
        described = self._functions.get(tool_name)
        if described is not None and described.is_async:
            result = await function(**tool_args)
        else:
            result = await self._in_thread(tool_name, functools.partial(function, **tool_args), kwargs.get("state"))
        return as_answer(await maybe_await(result), tool_call_id)

    async def prepare_arguments(self, call: ToolCall, messages: Messages, state: State) -> dict[str, Any]:
        """The arguments of a call as the tool receives them. *Raises* ToolError for what cannot be called."""
        name = call["name"]
        if name not in self.tool_map and name not in _names(state["tool_defs"] or ()):
            raise self._unknown(name)
        given = parse_arguments(call["arguments"])
        described = self._functions.get(name)
        return given if described is None else described.arguments(given)

    async def _answer(self, call: ToolCall, messages: Messages, state: State) -> Message:
        name, call_id = call["name"], call["id"]
        extras = {"state": state} if _takes_state(getattr(self.call_tool, "__func__", self.call_tool)) else {}
        try:
            arguments = await self.prepare_arguments(call, messages, state)
            async with nullcontext() if state.run is None else state.run.tool_slot:
                answer = await maybe_await(self.call_tool(name, arguments, call_id, **extras))
            if isinstance(answer, Mapping) and "role" in answer:
                answer = normalize_message(answer) if not isinstance(answer, Message) else answer
            answer = as_answer(answer, call_id)
        except BaseException as error:  # noqa: BLE001  becomes a text for the model, or _error_text raises it again
            answer = as_answer(self._error_text(name, error), call_id)
        return bounded(answer, self.max_tool_result_chars)

    def _error_text(self, tool: str, error: BaseException) -> str:
        """The text of an error for the model. *Raises* the error if it ends the rollout or the run."""
        if not isinstance(error, RolloutError):
            if passes(error):
                raise error
            if isinstance(error, UsageError) or not isinstance(error, Exception):  # a setting; SystemExit and the like
                raise fault(tool, error) from error
        failure = error if isinstance(error, RolloutError) else _call_error(tool, error)
        named_by_author = (error, failure, error.__cause__ if isinstance(error, ToolParseError) else None)
        if any(isinstance(one, self.stop_errors) for one in named_by_author):
            raise failure
        if not failure.scorable:  # not the model's doing: the reward is unknown, and the model cannot mend it
            raise failure
        try:
            return str(self.error_formatter(error)) or type(error).__name__
        except Exception as broken:
            raise fault("error_formatter", broken) from broken

    async def _in_thread(self, tool: str, call: Callable[[], Any], state: State | None) -> Any:
        """Call a synchronous tool off the event loop.

        A thread cannot be killed: when the rollout's time is over, one that has not come back is written off.
        """
        run_limit_s = None if state is None or state.run is None else state.run.rollout_timeout_s
        limits_s = [limit for limit in (run_limit_s, self.timeout_seconds) if limit is not None]

        def named() -> Any:
            return call()

        named.__name__ = tool
        return await call_in_thread(named, limit_s=min(limits_s, default=None))

    def _unknown(self, name: str) -> ToolCallError:
        return ToolCallError(f"there is no tool '{shortened(name)}'; the tools are: {self._known()}")

    def _known(self) -> str:
        return ", ".join(self.tool_map) or "none"


def _call_error(tool: str, error: Exception) -> ToolCallError:
    wrapped = ToolCallError(f"the tool {tool!r} raised {type(error).__name__}: {shortened(str(error))}")
    wrapped.__cause__ = error
    return wrapped


def _names(definitions: Iterable[Mapping[str, Any]]) -> set[str]:
    return {field(definition.get("function") or definition, "name") for definition in definitions}


def _of_trajectory(tool: str | None, num_calls: Callable[..., float]) -> Callable[..., float]:
    """A metric of the calls that were sampled, also where a conversation does not keep all of its turns."""

    def count(state: State) -> float:
        return sum((num_calls(state, step["completion"], tool) for step in state["trajectory"]), 0.0)

    count.__name__ = metric_name(tool)
    return count


def _exception_classes(given: Any) -> tuple[type[BaseException], ...]:
    classes = (given,) if isinstance(given, type) else tuple(given)
    for one in classes:
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            raise ConfigError(f"stop_errors takes exception classes, not {shortened(one)}")
    return classes


@functools.lru_cache(maxsize=256)
def _takes_state(call_tool: Callable[..., Any]) -> bool:
    parameters = inspect.signature(call_tool).parameters
    return "state" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


async def _together(work: Iterable[Coroutine[Any, Any, Message]]) -> list[Message]:
    """The results in order. When one raises the others are cancelled and awaited before it is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
