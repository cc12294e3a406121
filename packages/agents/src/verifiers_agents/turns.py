"""``AgentTurns``: the model calls of an agent program are the turns of a rollout.

Promise: the agent's request is the next prompt of the rollout, and the model's completion answers
it; the end of the process ends the rollout. A request that cannot be answered, an agent that dies,
hangs or floods, and a limit that is reached are each one sentence on that rollout, whose finished
turns stay. When a rollout is over, nothing of its agent runs.

An environment inherits it, calls ``set_agent`` in its constructor and opens the sandbox in
``open_process``. A rollout that ``prepare_agent`` did not prepare has no agent, and is that of the
environment's other base class. ``gateway`` serves the calls, ``process`` runs the program,
``conversation`` says which calls belong together.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifiers.clients.dialects import DIALECTS
from verifiers.clients.payload import MAX_TOKENS_ALIASES
from verifiers.clients.protocol import ClientLike
from verifiers.data.messages import message_text, normalize_chat
from verifiers.environments.multi_turn import MultiTurnEnv
from verifiers.errors import (
    AgentError,
    AgentFailure,
    ConfigError,
    ModelError,
    ModelRefused,
    OverlongPromptError,
    SandboxLimit,
)
from verifiers.rollouts.author_code import Hook, cleanup, maybe_await, setup, stop
from verifiers.rollouts.state import State, TrajectoryStep
from verifiers.types import Message, Messages, Response
from verifiers_agents.agent import Agent, Installed, find_agent, find_installed
from verifiers_agents.conversation import ROLES, Conversation, Role
from verifiers_agents.gateway import Call, Route, gateway
from verifiers_agents.process import AgentProcess, Ending, script_of

FIRST, LAST = 1000, -1000
"""Priorities of the clean-up outside the range of subclasses: the agent ends first, its sandbox
closes last."""
TRAINED_ROLES: tuple[Role, ...] = ("main", "subagent", "summary")
MAX_IDLE_S = 600.0
AgentFunction = Callable[[State], Awaitable[object]]
SAMPLING = frozenset("temperature top_p stop tool_choice response_format".split())
"""Sampling arguments of the agent's requests that count where the run sets none of that name."""
TRAINED_SAMPLING = frozenset(("stop",))
"""Those of them that count in training, where others would change the distribution
that is trained."""


@dataclass(slots=True, eq=False)
class AgentRun:
    """The agent of a running rollout: ``state["agent_run"]``."""

    route: Route
    conversation: Conversation = field(default_factory=Conversation)
    steps: list[TrajectoryStep] = field(default_factory=list)
    call: Call | None = None
    """The call that the rollout is about to answer."""
    calls: list[Call] = field(default_factory=list)
    process: AgentProcess | None = None
    task: asyncio.Task[object] | None = None
    """Runs the agent; its end is the end of the rollout."""

    async def next_call(self, idle_s: float) -> Call | None:
        """The next call; None when the agent has ended. *Raises* TimeoutError after ``idle_s``
        without either."""
        assert self.task is not None
        waiting = asyncio.ensure_future(self.route.next())
        try:
            done, _ = await asyncio.wait(
                {waiting, self.task}, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED
            )
            if self.task in done:
                return None
            if waiting not in done:
                raise TimeoutError
            return waiting.result()
        finally:
            waiting.cancel()


def side_calls(state: State) -> float:
    """Calls beside the agent's conversations, such as for a title; they are recorded, and not
    trained."""
    return float(_roles(state).count("side"))


def subagent_calls(state: State) -> float:
    """Calls of conversations that the agent's main conversation started."""
    return float(_roles(state).count("subagent"))


def history_rewrites(state: State) -> float:
    """How often the agent replaced its history, so that a new sample begins."""
    return float((state.get("agent") or {}).get("rewrites", 0))


def _roles(state: State) -> list[str]:
    return [str(step["extras"].get("role", "main")) for step in state["trajectory"]]


def agent_failed(state: State) -> float:
    """1 if the agent program failed, else 0."""
    return float(isinstance(state["error"], AgentError))


METRICS = (side_calls, subagent_calls, history_rewrites, agent_failed)


class AgentTurns(MultiTurnEnv):
    """An environment whose turns are the model calls of an agent program."""

    agent: str | Agent | AgentFunction | None = None
    command: Sequence[str] | None = None
    dialect: str | None = None
    agent_args: Sequence[str] = ()
    seen_tools: Sequence[str] | None = None
    """Names of the agent's tools that the model sees; None for all."""
    collect: Sequence[str] = ()
    """Patterns of files in the work folder that are read at the end."""
    keep_workdirs: str | Path | None = None
    score_failures: bool = True
    """Whether a program that fails after its model has answered is scored: else a model that ends
    its agent, or the process that runs it, leaves no reward and so is not trained on what it
    did."""

    def set_agent(
        self,
        agent: str | Agent | AgentFunction | None,
        command: Sequence[str] | None,
        dialect: str | None,
        agent_args: Sequence[str],
        trained_roles: Sequence[Role],
        history: str,
        max_idle_seconds: float,
        score_failures: bool,
    ) -> None:
        """Set the agent of the rollouts. *Raises* ConfigError for an invalid parameter."""
        if agent is not None and command is not None:
            raise ConfigError(
                "pass agent= (a name or an Agent) or command=[…], and not both", key="agent"
            )
        if dialect is not None and dialect not in DIALECTS:
            raise ConfigError(
                f"dialect is {dialect!r}; it must be one of {', '.join(DIALECTS)}", key="dialect"
            )
        if history not in ("exact", "template"):
            raise ConfigError(
                f'history is {history!r}; it must be "exact" or "template"', key="history"
            )
        if unknown := sorted({*trained_roles} - {*ROLES}):
            raise ConfigError(
                f"trained_roles has {unknown[0]!r}; roles are {', '.join(ROLES)}",
                key="trained_roles",
            )
        if isinstance(command, str) or isinstance(agent_args, str):
            raise ConfigError("command and agent_args are lists of texts, not one text")
        self.agent, self.dialect = agent, dialect
        self.command = None if command is None else [str(word) for word in command]
        self.agent_args = [str(word) for word in agent_args]
        self.trained_roles = tuple(trained_roles)
        self.history = history
        self.max_idle_seconds = max_idle_seconds
        self.score_failures = score_failures

    def identity(self) -> dict[str, Any]:
        """The parameters, and the version of an installed agent."""
        described = super().identity()
        with contextlib.suppress(ConfigError):
            if (installed := self.installed(self.described_agent())) is not None:
                described["agent_version"] = installed.version
        return described

    # --- methods to override ----------------------------------------------------------------------

    async def run_agent(self, state: State) -> object:
        """Run the agent to its end: the program in its sandbox, or the function of ``agent=``.

        Override it for a framework in this process; its model calls go to
        ``vf.model_gateway(state)``.
        """
        run = agent_run(state)
        if run.process is None:
            assert callable(self.agent)
            return await maybe_await(self.agent(state))
        await run.process.run()
        return None

    def prompt_for_agent(self, state: State) -> str:
        """The task as the agent is given it: the texts of the row's prompt."""
        return "\n\n".join(filter(None, map(message_text, state["prompt"])))

    async def open_process(
        self, agent: Agent, installed: Installed | None, route: Route, state: State
    ) -> AgentProcess:
        """Prepare the agent in a sandbox of the rollout."""
        raise NotImplementedError(f"{type(self).__name__} must define open_process")

    def agent_seconds_left(self, state: State) -> float:
        """Seconds until a stop condition ends the agent, by a limit other than those of every
        rollout."""
        return math.inf

    # --- one rollout ------------------------------------------------------------------------------

    @setup(priority=FIRST)
    async def prepare_agent(self, state: State) -> None:
        """Find the agent, so that an invalid setting ends the run before the first model call, and
        open the rollout's route to the model. The agent starts after every other preparation."""
        agent = self.described_agent()
        installed = self.installed(agent)
        offered = self.dialect or (agent.dialect if agent is not None else None)
        state["agent_run"] = AgentRun(gateway().open((offered,) if offered else tuple(DIALECTS)))
        state["agent"], state["files"] = {"name": _name(self.agent, agent)}, {}
        state.saved_columns = ("agent", "files")
        if agent is not None:
            state["agent"] |= {
                "command": list(agent.command),
                "version": installed.version if installed else None,
            }

    async def _start(self, run: AgentRun, state: State) -> None:
        agent = self.described_agent()
        if agent is not None:
            run.process = await self.open_process(agent, self.installed(agent), run.route, state)
        run.task = asyncio.ensure_future(self.run_agent(state))

    def described_agent(self) -> Agent | None:
        """The agent as data; None for a framework in this process. *Raises* ConfigError for an
        unknown name."""
        if isinstance(self.agent, Agent):
            agent = self.agent
        elif isinstance(self.agent, str):
            agent = find_agent(self.agent)
        elif self.command is not None and not self._runs_in_process:
            script = script_of([Path(word).name for word in self.command[:2]])
            name = " ".join(filter(None, (self.command[0], script)))
            agent = Agent(name, tuple(self.command), self.dialect)
        else:
            return None
        return agent.with_arguments(self.agent_args)

    @property
    def _runs_in_process(self) -> bool:
        """Whether a subclass runs the agent itself."""
        return type(self).run_agent is not AgentTurns.run_agent

    def installed(self, agent: Agent | None) -> Installed | None:
        """Where the agent is installed; None for an agent that is not installed. *Raises*
        ConfigError when it is missing."""
        if agent is None or not agent.registry:
            return None
        version = self.agent.partition("@")[2] if isinstance(self.agent, str) else ""
        return find_installed(agent, version)

    @stop(priority=50)
    async def agent_ended(self, state: State) -> bool:
        """Wait for the agent's next call; holds when the agent has ended instead."""
        run = _running(state)
        if run is None or run.call is not None:  # asked again before the call was answered
            return False
        with Hook(state, "the agent"):
            if run.task is None:
                await self._start(run, state)
            left_s = self.agent_seconds_left(state)
            try:
                run.call = await run.next_call(min(self.max_idle_seconds, left_s))
            except TimeoutError:
                if left_s <= self.max_idle_seconds:
                    # a timer of uvloop may end a millisecond early
                    await asyncio.sleep(max(0.0, self.agent_seconds_left(state)) + 0.01)
                    return False
                raise SandboxLimit(
                    f"the agent {state['agent']['name']!r} was ended: it neither called the model"
                    f" nor ended for {self.max_idle_seconds:g} s (max_idle_seconds)",
                    limit="wall",
                ) from None
            if run.call is None:
                assert run.task is not None
                try:
                    run.task.result()  # raises the agent's error
                    await self._check_end(run, state)
                except AgentError as error:
                    if not self._is_scored(run):
                        raise
                    raise AgentFailure(str(error)) from error
        return run.call is None

    def _is_scored(self, run: AgentRun) -> bool:
        """Whether a failure of the program is scored: its model has answered it before."""
        return self.score_failures and run.process is not None and bool(run.steps)

    async def _check_end(self, run: AgentRun, state: State) -> None:
        """*Raises* AgentError for an agent that failed, or never called the model.

        An agent that fails because a limit of tokens cut the last answer is no error: the rollout
        is truncated, and scored.
        """
        if run.process is not None:
            await self._collect(run, state)
            was_cut = bool(run.steps) and run.steps[-1]["is_truncated"]
            try:
                run.process.check_exit_code()
            except AgentError as error:
                if not was_cut:  # else some agents fail: that is the model's doing
                    raise AgentError(_with_refusals(str(error), run)) from None
        if not run.steps:
            end, name = "", state["agent"]["name"]
            if run.process is not None:
                end = (
                    " (its address is in OPENAI_BASE_URL and"
                    f" ANTHROPIC_BASE_URL){run.process.last_lines()}"
                )
            raise AgentError(
                _with_refusals(f"the agent {name!r} ended without a model call{end}", run)
            )

    def turns_so_far(self, state: State) -> int:
        """The turns that a limit of turns counts: all but side calls."""
        run = _running(state)
        if run is None:
            return len(state["trajectory"])
        roles = run.conversation.roles()
        return len(roles) - roles.count("side")

    @stop
    def max_turns_reached(self, state: State) -> bool:
        """Whether the agent asks for more turns than ``max_turns``; side calls are not counted."""
        return 0 < self.max_turns <= self.turns_so_far(state)

    async def get_prompt_messages(self, state: State) -> Messages:
        """The prompt of the agent's call, with the messages that are known as they were sampled."""
        run = _running(state)
        if run is None:
            return await super().get_prompt_messages(state)
        assert run.call is not None
        return run.conversation.restored(run.call.request.messages)

    async def get_model_response(
        self,
        state: State,
        prompt: Messages,
        client: ClientLike | None = None,
        model: str | None = None,
        tool_defs: Sequence[Mapping[str, object]] | None = None,
        sampling_args: Mapping[str, object] | None = None,
    ) -> Response:
        """A completion of the agent's call, with its tools and those of its sampling arguments
        that count."""
        run = _running(state)
        if run is None or (call := run.call) is None:
            return await super().get_model_response(
                state, prompt, client, model, tool_defs, sampling_args
            )
        offered = [
            tool
            for tool in call.request.tools
            if self.seen_tools is None or tool.name in self.seen_tools
        ]
        if offered and not state["tool_defs"]:
            state["tool_defs"] = offered
        arguments = {**self._sampling(state, call), **(sampling_args or {})}
        try:
            return await super().get_model_response(
                state, prompt, client, model, tool_defs or offered, arguments
            )
        except BaseException as error:  # the agent waits: it learns of every failure; raised again
            call.refuse(*_refusal(error))
            if isinstance(error, OverlongPromptError) and "main" not in run.conversation.roles():
                raise AgentError(
                    f"the first prompt of the agent {state['agent']['name']!r} is too long, so that"
                    f" nothing was measured: {error}"
                ) from error
            if isinstance(error, ModelRefused) and self._is_scored(run):
                name = state["agent"]["name"]
                raise AgentFailure(
                    f"a request of the agent {name!r} was refused: {error}"
                ) from error
            raise

    def _sampling(self, state: State, call: Call) -> dict[str, object]:
        """The sampling arguments of the agent's request that count in this run."""
        settings = {**self.sampling_args, **(state["sampling_args"] or {})}
        theirs = call.request.sampling_args
        is_training = state.run is not None and state.run.require_tokens
        counted = TRAINED_SAMPLING if is_training else SAMPLING
        merged = {
            name: value
            for name, value in theirs.items()
            if name in counted and name not in settings
        }
        if merged.get("tool_choice") == "auto":
            del merged["tool_choice"]
        if theirs.get("max_tokens") is not None:
            name = next(
                (alias for alias in MAX_TOKENS_ALIASES if settings.get(alias) is not None),
                "max_tokens",
            )
            merged[name] = min(theirs["max_tokens"], settings.get(name) or theirs["max_tokens"])
        return merged

    async def add_model_response(
        self, state: State, prompt_messages: Messages, response: Response
    ) -> None:
        """Record the turn, and answer the agent's call."""
        await super().add_model_response(state, prompt_messages, response)
        run = _running(state)
        if run is None:
            return
        call, run.call = run.call, None
        assert call is not None
        assert isinstance(prompt_messages, list)
        tools = [tool.name for tool in call.request.tools]
        run.conversation.add(prompt_messages, response.message, tools, call.echo(response))
        run.steps.append(state["trajectory"][-1])
        run.calls.append(call)
        call.answer(response)

    def render_completion(self, state: State) -> Any:
        """Set the role of each turn, and ``state["completion"]``: what followed the first prompt of
        the main turns."""
        run = _running(state)
        if run is None:
            return super().render_completion(state)
        conversation: list[Message] = []
        before: list[Message] = []
        for step, role in zip(run.steps, run.conversation.roles(), strict=True):
            step["extras"]["role"] = role
            step["extras"]["is_trained"] = role in self.trained_roles
            if role == "main":
                prompt = list(step["prompt"])
                if before and prompt[: len(before)] == before:
                    conversation += prompt[len(before) :]
                elif before:  # the agent replaced its history, or dropped a reply
                    conversation += _not_shown_yet(before, prompt)
                conversation += step["completion"]
                before = [*prompt, *step["completion"]]
        final = state["final_env_response"]
        state["completion"] = conversation + (normalize_chat(final) if final is not None else [])

    @cleanup(priority=FIRST)
    async def finish_agent(self, state: State) -> None:
        """End the agent, read its log and files, and close its route."""
        run = _running(state)
        if run is None:
            return
        run.route.close(_why_over(state))
        if run.task is not None and not run.task.done():
            run.task.cancel()
            await asyncio.wait([run.task])
        if run.task is not None and not run.task.cancelled():
            # it is the rollout's error already, or came after the rollout's end
            run.task.exception()
        await self._collect(run, state)
        ending = run.process.ending if run.process is not None else Ending()
        state["agent"] |= {
            "ended": _why_over(state),
            "exit_code": ending.exit_code,
            "seconds": round(ending.seconds, 3),
            "log": ending.log,
            "log_bytes": ending.log_bytes,
            "roles": run.conversation.roles(),
            "rewrites": run.conversation.num_rewrites,
            "repeats": sum(call.num_repeats for call in run.calls),
            "left": ending.left_processes,
            "notes": [*ending.notes, *run.route.refusals],
        }

    async def _collect(self, run: AgentRun, state: State) -> None:
        """Read the log and the files, once."""
        if run.process is None or run.process.is_collected:
            return
        info = state["info"] if isinstance(state["info"], Mapping) else {}
        patterns = [*self.collect, *(info.get("collect") or ())]
        keep = (
            Path(self.keep_workdirs) / state["trajectory_id"]
            if self.keep_workdirs is not None
            else None
        )
        await run.process.collect(patterns, keep)
        state["files"] = run.process.ending.files

    @cleanup(priority=LAST)
    async def close_agent(self, state: State) -> None:
        """Close the sandbox of the agent."""
        run = state.pop("agent_run", None)
        if isinstance(run, AgentRun) and run.process is not None:
            await run.process.close()


def _running(state: State) -> AgentRun | None:
    run = state.get("agent_run")
    return run if isinstance(run, AgentRun) else None


def agent_run(state: State) -> AgentRun:
    """The agent of a running rollout. *Raises* ConfigError for a rollout without an agent."""
    run = _running(state)
    if run is None:
        raise ConfigError(
            "this rollout has no agent: vf.model_gateway(state) serves a running rollout of"
            " vf.AgentEnv"
        )
    return run


def _name(program: object, agent: Agent | None) -> str:
    if agent is not None:
        return agent.name
    return str(getattr(program, "__name__", "") or type(program).__name__)


def _not_shown_yet(before: Sequence[Message], prompt: Messages) -> list[Message]:
    """What the agent shows since its last reply, but what the conversation ``before`` has there."""
    messages = normalize_chat(prompt)
    replies = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    pairs = enumerate(zip(before, messages, strict=False))
    shared = next((n for n, (old, new) in pairs if old != new), min(len(before), len(messages)))
    return messages[max(shared, replies[-1] + 1) :] if replies else []


def _refusal(error: BaseException) -> tuple[int, str]:
    """The status and sentence with which a failed model call is answered."""
    if isinstance(error, OverlongPromptError):
        return 400, f"the prompt is too long: {error}"
    if isinstance(error, ModelError):
        return (
            error.status if isinstance(error.status, int) else 502
        ), f"the model did not answer: {error}"
    return 503, "the rollout was ended while the model answered"


def _why_over(state: State) -> str:
    error = state["error"]
    if error is not None:
        return f"{type(error).__name__}: {error}"
    return str(state["stop_condition"] or "cancelled")


def _with_refusals(sentence: str, run: AgentRun) -> str:
    return "; ".join(
        [sentence, *(refusal for refusal in run.route.refusals if refusal not in sentence)]
    )
