"""``OpenEnvEnv``: episodes of an environment that an OpenEnv server runs.

Promise: one WebSocket session per rollout, closed after it. The reward of a step is stored on its
turn, and the rollout's is their sum; an episode in which the server gave none has an unknown
reward. An action that cannot be read, here or at the server, ends the episode with reward 0 for
that step. A failure of the server, and an answer of it that cannot be read, end the rollout with an
unknown reward.

What an action is, the server's schema says: tools are offered to the model as tools; the message of
a server of ``vf-serve-env`` is the model's; of an action with one required field the answer is its
value; any other action is a JSON object. Nothing of OpenEnv is imported.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import aiohttp

from verifiers.clients.reply import excerpt
from verifiers.data.messages import message_text
from verifiers.environments.integrations.episodes import add_rows, opened, seed_of
from verifiers.environments.keywords import MultiTurnOptions
from verifiers.environments.multi_turn import MultiTurnEnv
from verifiers.environments.tool_answers import check_definitions, cut_description
from verifiers.errors import ConfigError, InfraError
from verifiers.rollouts.author_code import cleanup, maybe_await, passes, sums_turns
from verifiers.rollouts.state import State, TrajectoryStep
from verifiers.rollouts.values import number
from verifiers.rubrics import Rubric
from verifiers.runtime.bounded import MAX_OUTPUT_BYTES, read_chunks
from verifiers.runtime.decoding import decode_message
from verifiers.runtime.http_clients import open_session, tls_fault
from verifiers.runtime.signatures import spell_out
from verifiers.storage.identity import Free
from verifiers.types import Message, Messages, Tool, ToolMessage, UserMessage

if TYPE_CHECKING:
    from verifiers.types import ToolCall

MAX_MESSAGE_BYTES = 64 * 2**20
SCALARS = {"string": str, "integer": int, "number": float}


@sums_turns
def sum_of_given_rewards(state: State) -> float:
    """Return the sum of the rewards that the server gave. *Raises* ValueError when it gave none."""
    rewards = [step["reward"] for step in state["trajectory"] if step["reward"] is not None]
    if not rewards:
        reason = (state.get("openenv_metadata") or {}).get("error")
        raise ValueError(f"the server gave no reward{f': {reason}' if reason else ''}")
    return float(sum(rewards))


class ActionRefused(ValueError):
    """The server does not take an action."""


class OpenEnvEnv(MultiTurnEnv):
    """Episodes of an OpenEnv server.

    Args:
        url: The server's address, ``http://HOST:PORT``.
        action_parser: Function from the text of the model's message to the action, a dict; the
            default follows the server's schema. May be async.
        obs_to_text: Function from an observation, a dict, to the content of a user message; the
            default takes its text, or the whole as JSON. May be async.
        reset_args: Arguments of every reset; ``info["reset"]`` of a row adds its own, such as
            ``split`` and ``index`` of a task.
        num_train_episodes: Rows to train on.
        num_eval_episodes: Rows to evaluate on.
        max_episode_steps: Actions after which an episode ends; None = no limit here.
        seed: The seed of a row is ``seed + example_id``.
        connect_timeout_s: Time limit of a connection; while all sessions are in use it is tried
            again.
        step_timeout_s: Time limit of a reset and of a step.

    Example::

        env = vf.OpenEnvEnv("http://127.0.0.1:8000", num_train_episodes=100)

    ``state["openenv_metadata"]`` is the metadata of the last observation. Further parameters are
    ``MultiTurnEnv``'s.
    """

    @spell_out(MultiTurnOptions, MultiTurnEnv.__init__)
    def __init__(
        self,
        url: str,
        action_parser: Callable[[str], object] | None = None,
        obs_to_text: Callable[[Mapping[str, object]], object] | None = None,
        reset_args: Mapping[str, object] | None = None,
        num_train_episodes: Annotated[
            int, Free("how many rows; every row has a content hash")
        ] = 1000,
        num_eval_episodes: Annotated[int, Free("how many rows; every row has a content hash")] = 20,
        max_episode_steps: int | None = None,
        seed: int = 0,
        connect_timeout_s: Annotated[float, Free("how long a connection may take")] = 60.0,
        step_timeout_s: Annotated[float, Free("how long a step may take")] = 300.0,
        **parameters: Unpack[MultiTurnOptions],
    ):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"url is {url!r}; give the server's address, such as http://127.0.0.1:8000",
                key="url",
            )
        add_rows(parameters, num_train_episodes, num_eval_episodes, seed)
        if parameters.get("rubric") is None:
            parameters["rubric"] = Rubric(funcs=[sum_of_given_rewards])
        super().__init__(**parameters)
        self.url = url.rstrip("/")
        self.action_parser = action_parser
        if obs_to_text is not None and type(self).obs_to_text is OpenEnvEnv.obs_to_text:
            self.obs_to_text = obs_to_text  # type: ignore[assignment]
        self.reset_args = dict(reset_args or {})
        self.seed = seed
        self.max_episode_steps = max_episode_steps
        self.connect_timeout_s, self.step_timeout_s = connect_timeout_s, step_timeout_s

    def obs_to_text(self, observation: Mapping[str, object]) -> Any:
        """The content of the user message for an observation; may be async. An override wins over
        the parameter."""
        for name in ("text", "prompt", "message", "result"):
            if isinstance(observation.get(name), str):
                return observation[name]
        fields = {
            name: value
            for name, value in observation.items()
            if name != "metadata" and value is not None
        }
        return json.dumps(fields, ensure_ascii=False) if fields else ""

    # --- one episode ------------------------------------------------------------------------------

    async def setup_state(self, state: State) -> None:
        """Open a session, reset it, and append the first observation to the prompt."""
        session = state["openenv_session"] = await _Session.open(
            self.url, self.connect_timeout_s, self.step_timeout_s
        )
        row_args = state["info"].get("reset") or {}
        args = {"seed": seed_of(state, self.seed), **self.reset_args, **row_args}
        result = await session.ask("reset", args)
        observation, state["openenv_metadata"] = _observation(result), result.get("metadata") or {}
        if session.takes_messages and self.action_parser is None:
            prompt: list[Any] = [*self.as_prompt(state["prompt"])]
            state["prompt"] = [
                *(message for message in prompt if message["content"]),
                *_messages(observation),
            ]
            state["tool_defs"] = _tools(observation, self.url)
            return
        if session.takes_tools and self.action_parser is None:
            offered = await session.ask("step", {"type": "list_tools"})
            state["tool_defs"] = _tools(_observation(offered), self.url)
        content = await maybe_await(self.obs_to_text(observation))
        if self.action_parser is None and (form := session.form_of_answers()):
            content = f"{content}\n\n{form}" if content else form
        state["prompt"] = opened(self.as_prompt(state["prompt"]), content)

    async def add_trajectory_step(self, state: State, step: TrajectoryStep) -> None:
        """Perform the actions of the turn here, before a turn limit can end the rollout."""
        await maybe_await(super().add_trajectory_step(state, step))
        session, completion = state["openenv_session"], step["completion"]
        if isinstance(completion, str):
            message = Message(role="assistant", content=completion)
        else:
            message = completion[-1]
        rewards: list[float] = []
        replies: list[object] = []
        is_done = False
        try:
            actions = await self._actions(message, session)
        except Exception as error:
            if passes(error) or isinstance(error, InfraError):
                raise
            _end_unread(state, step, error)
            return
        for action, call_id in actions:
            try:
                result = await session.ask("step", action)
            except ActionRefused as error:
                _end_unread(state, step, error)
                return
            if (reward := result.get("reward")) is not None:
                rewards.append(session.reward_of(reward))
            state["openenv_metadata"] = result.get("metadata") or {}
            replies += await self._replies(_observation(result), call_id, session)
            is_done = bool(result.get("done"))
            if is_done:
                break
        step["reward"] = sum(rewards) if rewards else None
        is_cut = len(state["trajectory"]) == self.max_episode_steps
        step["extras"] |= {"terminated": is_done, "truncated": is_cut and not is_done}
        if is_done or is_cut:
            state["final_env_response"] = replies
        else:
            state["openenv_replies"] = replies

    def env_response(self, messages: Messages, state: State, **_: Any) -> Messages:
        """Return the observations after the last actions."""
        replies: Messages = state["openenv_replies"]
        return replies

    @cleanup
    async def close_openenv_session(self, state: State) -> None:
        """Close the session of the rollout."""
        session = state.pop("openenv_session", None)
        state.pop("openenv_replies", None)
        if session is not None:
            await session.close()

    async def _actions(
        self, message: Message, session: _Session
    ) -> list[tuple[dict[str, object], str | None]]:
        """The actions of a turn, each with the id of its tool call. *Raises* ValueError without
        a call."""
        text = message_text(message)
        if self.action_parser is not None:
            return [(await maybe_await(self.action_parser(text)), None)]
        calls = message.tool_calls or []
        if session.takes_messages:
            wire = [
                {"id": call["id"], "name": call.name, "arguments": call.arguments} for call in calls
            ]
            return [({"content": text} | ({"tool_calls": wire} if wire else {}), None)]
        if session.takes_tools:
            if not calls:
                raise ValueError("it calls no tool")
            return [(_tool_action(call), call["id"]) for call in calls]
        answer = await maybe_await(self.parser.parse_answer([message]))
        return [(session.action_of(answer), None)]

    async def _replies(
        self, observation: Mapping[str, object], call_id: str | None, session: _Session
    ) -> Messages:
        if session.takes_messages and self.action_parser is None:
            return _messages(observation)
        if call_id is not None:
            return [ToolMessage(_result_of(observation), tool_call_id=call_id)]
        content = await maybe_await(self.obs_to_text(observation))
        return self.as_prompt([{"role": "user", "content": content}])


class _Session:
    """A WebSocket to the server, with the schema of its actions."""

    def __init__(
        self,
        url: str,
        http: aiohttp.ClientSession,
        socket: aiohttp.ClientWebSocketResponse,
        schema: Mapping[str, Any],
        timeout_s: float,
    ):
        self.url, self._http, self._socket, self._schema = url, http, socket, schema
        self._timeout_s = timeout_s
        self._fields = {
            name: kind
            for name, kind in (schema.get("properties") or {}).items()
            if name != "metadata"
        }
        self.takes_messages = {"content", "tool_calls"} <= self._fields.keys()
        self.takes_tools = {"tool_name", "arguments"} <= self._fields.keys()

    @classmethod
    async def open(cls, url: str, connect_timeout_s: float, timeout_s: float) -> _Session:
        """*Raises* InfraError when the server is not reached, or has no session in time."""
        http = open_session(
            url, timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        )
        async with AsyncExitStack() as undo:
            undo.push_async_callback(http.close)
            try:
                async with asyncio.timeout(connect_timeout_s):
                    async with http.get(f"{url}/schema") as response:
                        response.raise_for_status()
                        what = f"{url}/schema"
                        content = await read_chunks(
                            response.content.iter_any(), MAX_OUTPUT_BYTES, what
                        )
                        schema = decode_message(content)["action"]
                    while True:
                        socket = await http.ws_connect(f"{url}/ws", max_msg_size=MAX_MESSAGE_BYTES)
                        session = cls(url, http, socket, schema, timeout_s)
                        # a server whose sessions are all in use says so before it reads anything
                        try:
                            await session.ask("state", {})
                            undo.pop_all()
                            return session
                        except InfraError as error:
                            if "CAPACITY_REACHED" not in str(error):
                                raise
                            await socket.close()
                            await asyncio.sleep(0.2)
            except (
                TimeoutError,
                aiohttp.ClientError,
                OSError,
                KeyError,
                TypeError,
                ValueError,
            ) as error:
                why = str(error) or f"nothing within {connect_timeout_s:g} s"
                why = tls_fault(error) or f"{why}; start it, or correct url"
                raise InfraError(f"the OpenEnv server at {url} gave no session: {why}") from error

    async def ask(self, kind: str, data: Mapping[str, object]) -> dict[str, object]:
        """The data of the answer. *Raises* ActionRefused; InfraError when the server fails, is
        silent or gone."""
        message = {"type": kind} if kind == "state" else {"type": kind, "data": data}
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send_str(json.dumps(message))
                received = await self._socket.receive()
        except TimeoutError as error:
            raise InfraError(
                f"the OpenEnv server at {self.url} gave no {kind} within {self._timeout_s:g} s"
            ) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise InfraError(
                f"the OpenEnv server at {self.url} closed the session: {error}"
            ) from error
        if received.type != aiohttp.WSMsgType.TEXT:
            raise InfraError(f"the OpenEnv server at {self.url} closed the session")
        try:
            answer = decode_message(received.data)
            data = answer.get("data") or {}
            is_error, _ = answer.get("type") == "error", data.keys()
        except (ValueError, AttributeError) as error:
            raise InfraError(
                f"the OpenEnv server at {self.url} answered {kind} with what cannot be read"
                f" ({type(error).__name__}: {error}): {excerpt(received.data[:2000].encode())!r}"
            ) from error
        if not is_error:
            return data
        text, code = data.get("message") or "no message", data.get("code")
        if code == "VALIDATION_ERROR" and kind == "step":
            raise ActionRefused(f"{text}{_details(data.get('errors'))}")
        raise InfraError(f"the OpenEnv server at {self.url} refused {kind}: {text} ({code})")

    def reward_of(self, reward: object) -> float:
        """The reward of a step. *Raises* InfraError for what is no number."""
        if math.isnan(value := number(reward)):
            raise InfraError(
                f"the OpenEnv server at {self.url} gave the reward {str(reward)[:60]!r}, which is"
                " no number"
            )
        return value

    def form_of_answers(self) -> str:
        """How an answer is written, where it is neither a tool call nor the value of a field."""
        if self.takes_tools or self._only_field():
            return ""
        return (
            "Answer with a JSON object of this schema:"
            f" {json.dumps({'type': 'object', 'properties': self._fields})}"
        )

    def action_of(self, answer: object) -> dict[str, object]:
        """The action of an answer. *Raises* ValueError."""
        if answer is None:
            raise ValueError("there is no action in it")
        if field := self._only_field():
            return {field: SCALARS[self._fields[field]["type"]](answer)}
        action = decode_message(str(answer))
        if not isinstance(action, dict):
            raise ValueError("it is not a JSON object")
        return action

    def _only_field(self) -> str | None:
        needed = self._schema.get("required") or list(self._fields)
        is_plain = len(needed) == 1 and self._fields.get(needed[0], {}).get("type") in SCALARS
        return needed[0] if is_plain else None

    async def close(self) -> None:
        """Close the session and its connection."""
        await self._socket.close()
        await self._http.close()


def _end_unread(state: State, step: TrajectoryStep, error: Exception) -> None:
    """End an episode whose action could not be read, here or at the server: the model's fault."""
    step["reward"], step["extras"]["action_error"] = 0.0, f"{type(error).__name__}: {error}"
    text = f"Your action could not be read ({error}). The episode is over."
    state["final_env_response"] = [UserMessage(text)]


def _observation(result: Mapping[str, object]) -> Mapping[str, object]:
    observation = result.get("observation")
    return observation if isinstance(observation, Mapping) else {"result": observation}


def _messages(observation: Mapping[str, Any]) -> Messages:
    """The messages of a server of ``vf-serve-env``. *Raises* InfraError where it wrote the
    conversation anew."""
    if observation.get("replaces"):
        raise InfraError(
            "the served environment wrote the conversation anew, which a session cannot follow"
        )
    try:
        return [Message(**message) for message in observation.get("messages") or ()]
    except TypeError as error:
        raise InfraError(
            f"the OpenEnv server gave messages that cannot be read: {error}"
        ) from error


def _tools(observation: Mapping[str, Any], url: str) -> list[Tool]:
    """The tools of an episode. *Raises* InfraError for too many or too long ones."""
    tools = [_tool(tool) for tool in observation.get("tools") or ()]
    try:
        check_definitions(tools)
    except ValueError as error:
        raise InfraError(f"the OpenEnv server at {url}: {error}") from error
    return tools


def _tool(tool: Mapping[str, Any]) -> Tool:
    schema = (
        tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    )
    return Tool(tool["name"], cut_description(tool.get("description") or ""), schema)


def _tool_action(call: ToolCall) -> dict[str, object]:
    arguments = decode_message(call.arguments or "{}")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {call.name} are not a JSON object")
    return {"type": "call_tool", "tool_name": call.name, "arguments": arguments}


def _result_of(observation: Mapping[str, object]) -> str:
    """The text of a tool's result, or of its error."""
    error, result = observation.get("error"), observation.get("result")
    if error:
        return str(error.get("message") if isinstance(error, Mapping) else error)
    if isinstance(result, Mapping) and isinstance(result.get("data"), str):
        result = result["data"]
    return (
        result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    )


def _details(errors: object) -> str:
    if not isinstance(errors, list):
        return ""
    return ": " + "; ".join(
        f"{'.'.join(map(str, e.get('loc', ())))} {e.get('msg', '')}".strip() for e in errors
    )
