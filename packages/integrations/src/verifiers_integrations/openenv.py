"""An environment as a server that OpenEnv's clients reset and step: ``vf-serve-env``.

Each WebSocket at ``/ws`` is a session. ``reset`` starts a rollout of an example, and ``step`` is
the answer to its next model call: the client is the model. Promise:

* a session plays the environment's own loop, with its tools, turns, limits and rewards, over as
  many turns as it has;
* sessions run at the same time and share nothing but the environment; a session that ends cancels
  its rollout;
* the last observation of a rollout has its reward; an unknown reward is ``null``, with the reason
  in ``metadata``.

An action is ``{"content": …, "tool_calls": [{"id", "name", "arguments"}]}``, or one of OpenEnv's
actions for tools, ``{"type": "call_tool", "tool_name": …, "arguments": {…}}`` and ``{"type":
"list_tools"}``. Tasks are listed by the routes of OpenEnv's Task API. ``POST /reset`` and ``POST
/step`` are not served: they have no session.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType, web

from verifiers.clients.payload import chat_messages
from verifiers.data.messages import message_text
from verifiers.errors import ConfigError, VerifiersError
from verifiers.results.rows import json_ready
from verifiers.runtime.decoding import decode_message
from verifiers.types import AssistantMessage, ModelRequest, Response, ToolCall

if TYPE_CHECKING:
    from verifiers.environments.base import Environment

MODEL = "policy"
MAX_SESSIONS = 64
MAX_MESSAGE_BYTES = 64 * 2**20
EVALUATION = ("eval", "test", "validation")
"""Names of the evaluation set; ``train`` is the training set."""
ACTION_SCHEMA = {
    "title": "AssistantMessage",
    "type": "object",
    "properties": {
        "content": {"type": "string", "description": "What the model says."},
        "tool_calls": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "id": {"type": "string"},
                    "name": {"type": "string"},
                    "arguments": {"anyOf": [{"type": "object"}, {"type": "string"}]},
                },
                "required": ["name"],
            },
        },
        "metadata": {"type": "object"},
    },
}
OBSERVATION_SCHEMA = {
    "title": "Messages",
    "type": "object",
    "properties": {
        "messages": {
            "type": "array",
            "items": {"type": "object"},
            "description": "Messages since the last action.",
        },
        "replaces": {
            "type": "boolean",
            "description": "Whether they are the whole conversation, written anew.",
        },
        "tools": {
            "type": "array",
            "items": {"type": "object"},
            "description": "The tools of the next action.",
        },
        "text": {"type": "string", "description": "The text of the last message."},
    },
}
STATE_SCHEMA = {
    "title": "State",
    "type": "object",
    "properties": {"episode_id": {"type": "string"}, "step_count": {"type": "integer"}},
}


class BadMessage(Exception):
    """A message of a client that cannot be followed, with OpenEnv's code for it."""

    def __init__(self, message: str, code: str = "VALIDATION_ERROR"):
        super().__init__(message)
        self.code = code


class Session:
    """One rollout at a time, whose model is at the other end of a socket."""

    def __init__(self, env: Environment):
        self._env = env
        self.episode_id, self.num_steps = "", 0
        self._task: dict[str, object] = {}
        self._rollout: asyncio.Task[Any] | None = None
        self._calls: asyncio.Queue[tuple[ModelRequest, asyncio.Future[Response]]] = asyncio.Queue()
        self._answer: asyncio.Future[Response] | None = None
        self._seen: list[Any] = []
        self._tools: list[dict[str, object]] = []

    async def reset(self, data: Mapping[str, object]) -> dict[str, object]:
        """Start the rollout of the example that ``data`` names. *Raises* BadMessage where it names
        none."""
        row, task = _example(self._env, data)
        await self.close()
        self._calls = asyncio.Queue()
        self._seen, self._task, self.num_steps = [], task, 0
        self.episode_id = str(data.get("episode_id") or uuid.uuid4())
        self._rollout = asyncio.create_task(
            self._env.run_rollout(
                row, self, MODEL, sampling_args={}, state_columns=["final_env_response"]
            )
        )
        return await self._observe()

    async def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the model call that waits. *Raises* BadMessage without such a call, or for an
        action that is none."""
        if action.get("type") == "list_tools":
            return {"observation": {"tools": self._tools}, "reward": None, "done": False}
        if self._answer is None:
            raise BadMessage("the episode is over; reset starts another", "EXECUTION_ERROR")
        message = _message_of(action, self.num_steps)
        reason = "tool_calls" if message.tool_calls else "stop"
        self._seen.append(message)
        self.num_steps += 1
        self._answer.set_result(Response(message, finish_reason=reason, model=MODEL))
        self._answer = None
        return await self._observe()

    def state(self) -> dict[str, Any]:
        """The id of the episode, how many steps it took, and the task."""
        return {"episode_id": self.episode_id, "step_count": self.num_steps, **self._task}

    async def close(self) -> None:
        """Cancel the rollout, and wait for its clean-up handlers."""
        self._answer = None
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._rollout
        self._rollout = None

    async def complete(self, request: ModelRequest) -> Response:
        """A model call of the rollout; it waits for the next step."""
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        await self._calls.put((request, answer))
        return await answer

    async def _observe(self) -> dict[str, object]:
        """What the rollout asks next, or how it ended."""
        assert self._rollout is not None
        next_call = asyncio.create_task(self._calls.get())
        await asyncio.wait({next_call, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if next_call.done():
            request, self._answer = next_call.result()
            return self._asks(request)
        next_call.cancel()
        return self._ended(self._rollout.result())

    def _asks(self, request: ModelRequest) -> dict[str, object]:
        prompt = chat_messages(request.prompt)
        follows = [_plain(message) for message in prompt[: len(self._seen)]] == [
            _plain(seen) for seen in self._seen
        ]
        new = prompt[len(self._seen) :] if follows else prompt
        self._seen, self._tools = [*prompt], [_mcp_tool(tool) for tool in request.tools or ()]
        observation = {**_as_observation(new), "replaces": not follows, "tools": self._tools}
        return {"observation": observation, "reward": None, "done": False}

    def _ended(self, output: Mapping[str, Any]) -> dict[str, Any]:
        reward, error = output["reward"], output["error"]
        new = output["completion"]
        prompt = output["prompt"]
        conversation = [*prompt, *new] if not isinstance(new, str) else []
        metadata = {
            "metrics": json_ready(output["metrics"]),
            "stop_condition": output["stop_condition"],
            "is_truncated": output["is_truncated"],
            "error": None if error is None else error["error_chain_repr"] or error["error"],
        }
        observation = {
            **_as_observation(conversation[len(self._seen) :]),
            "replaces": False,
            "tools": [],
        }
        reward_or_none = None if math.isnan(reward) else reward
        return {
            "observation": observation,
            "reward": reward_or_none,
            "done": True,
            "metadata": metadata,
        }


class EnvServer:
    """Serves an environment to as many as ``max_sessions`` sessions at once; ``app()`` is the
    aiohttp application."""

    def __init__(self, env: Environment, max_sessions: int = MAX_SESSIONS):
        if max_sessions < 1:
            raise ConfigError(f"max_sessions is {max_sessions}; it must be 1 or more")
        self.env, self.max_sessions, self.num_sessions = env, max_sessions, 0
        self.name = env.env_id or type(env).__name__

    def app(self) -> web.Application:
        """The routes; closing it closes the environment."""
        app = web.Application()
        app.add_routes([
            web.get("/ws", self._session),
            web.get("/health", self._health),
            web.get("/metadata", self._metadata),
            web.get("/schema", self._schema),
            web.post("/reset", self._no_session),
            web.post("/step", self._no_session),
            web.get("/list_environments", self._names),
            web.get("/{name}/splits", self._splits),
            *(web.post(f"/{{name}}/{route}", self._tasks) for route in ("tasks", "num_tasks", "task", "task_range")),
        ])  # fmt: skip
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        await self.env.aclose()

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def _names(self, _: web.Request) -> web.Response:
        return web.json_response([self.name])

    async def _metadata(self, _: web.Request) -> web.Response:
        about = (type(self.env).__doc__ or "").strip().partition("\n")[0]
        return web.json_response(
            {"name": self.name, "description": about, "version": self.env.env_version or None}
        )

    async def _schema(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"action": ACTION_SCHEMA, "observation": OBSERVATION_SCHEMA, "state": STATE_SCHEMA}
        )

    async def _no_session(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"detail": f"{request.path} has no session; use the WebSocket at /ws"}, status=501
        )

    async def _splits(self, _: web.Request) -> web.Response:
        sets = {"train": self.env.dataset, "eval": self.env.eval_dataset}
        kinds = {"train": "train", "eval": "validation"}
        return web.json_response(
            [{"name": name, "type": kinds[name]} for name, rows in sets.items() if rows is not None]
        )

    async def _tasks(self, request: web.Request) -> web.Response:
        try:
            body = decode_message(await request.read())
            if not isinstance(body, Mapping):
                raise ValueError("the body is not an object")
            rows = rows_of(self.env, str(body.get("split", "train")))
            route = request.path.rpartition("/")[2]
            if route == "num_tasks":
                return web.json_response({"num_tasks": len(rows)})
            if route == "task":
                return web.json_response({"task": _task(rows, int(body["index"]))})
            first, end, _ = slice(body.get("start"), body.get("stop")).indices(len(rows))
            return web.json_response({"tasks": [_task(rows, index) for index in range(first, end)]})
        except (BadMessage, KeyError, TypeError, ValueError) as error:
            return web.json_response({"detail": str(error)}, status=400)

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, heartbeat=30)
        await socket.prepare(request)
        if self.num_sessions >= self.max_sessions:
            refused = {
                "message": f"all {self.max_sessions} sessions are in use",
                "code": "CAPACITY_REACHED",
            }
            await socket.send_json({"type": "error", "data": refused})
            await socket.close()
            return socket
        self.num_sessions += 1
        session = Session(self.env)
        try:
            await self._serve(socket, session)
        finally:
            self.num_sessions -= 1
            await session.close()
        return socket

    async def _serve(self, socket: web.WebSocketResponse, session: Session) -> None:
        """Answer messages in order; a client that leaves while its rollout works ends the session
        at once."""
        incoming: asyncio.Queue[Any] = asyncio.Queue(1)

        async def read() -> None:
            async for message in socket:
                if message.type == WSMsgType.TEXT:
                    await incoming.put(message.data)
            await incoming.put(None)

        reader = asyncio.create_task(read())
        try:
            while (text := await incoming.get()) is not None:
                answering = asyncio.create_task(_answer_to(text, session))
                await asyncio.wait({answering, reader}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    answering.cancel()
                    return
                if (answer := answering.result()) is None:
                    return
                await socket.send_str(json.dumps(answer))
        finally:
            reader.cancel()


async def _answer_to(text: str, session: Session) -> dict[str, object] | None:
    """The answer to a message; None to ``close``."""
    try:
        message = decode_message(text)
    except ValueError as error:
        return _error(f"the message is not JSON: {error}", "INVALID_JSON")
    kind = message.get("type") if isinstance(message, dict) else None
    data = message.get("data") or {} if isinstance(message, dict) else {}
    try:
        match kind:
            case "reset":
                return {"type": "observation", "data": await session.reset(data)}
            case "step":
                return {"type": "observation", "data": await session.step(data)}
            case "state":
                return {"type": "state", "data": session.state()}
            case "close":
                return None
        return _error(
            f"a message of type {kind!r} is not one of reset, step, state, close", "UNKNOWN_TYPE"
        )
    except BadMessage as error:
        return _error(str(error), error.code)
    except VerifiersError as error:
        return _error(str(error), "EXECUTION_ERROR")


def _error(message: str, code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


def rows_of(env: Environment, split: str) -> Any:
    """The rows of a split. *Raises* BadMessage for a split that the environment does not have."""
    if split != "train" and split not in EVALUATION:
        raise BadMessage(f"the split {split!r} is not one of train, {', '.join(EVALUATION)}")
    rows = env.dataset if split == "train" else env.eval_dataset
    if rows is None:
        raise BadMessage(f"the environment has no split {split!r}")
    return rows


def _task(rows: Sequence[Mapping[str, object]], index: int) -> dict[str, object]:
    """The prompt of a row, without its answer."""
    if not -len(rows) <= index < len(rows):
        raise BadMessage(f"the index {index} is outside of {len(rows)} tasks")
    row = rows[index]
    return {
        "index": index,
        "example_id": row["example_id"],
        "prompt": json_ready(row["prompt"]),
        "task": row["task"],
    }


def _example(env: Environment, data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(row, its place) of ``split`` and ``index``; without an index the seed chooses, without
    either the first row."""
    split = data.get("split") or ("train" if env.dataset is not None else "eval")
    rows = rows_of(env, str(split))
    number_in_data = data.get("index")
    index = number_in_data if number_in_data is not None else (data.get("seed") or 0) % len(rows)
    if not isinstance(index, int) or not 0 <= index < len(rows):
        raise BadMessage(f"the index {index!r} is outside of the {len(rows)} tasks of {split}")
    return dict(rows[index]), {"split": split, "index": index}


def _message_of(action: Mapping[str, object], number: int) -> AssistantMessage:
    """The message of the model that an action is. *Raises* BadMessage."""
    if action.get("type") == "call_tool":
        action = {
            "tool_calls": [
                {"name": action.get("tool_name"), "arguments": action.get("arguments") or {}}
            ]
        }
    content, calls = action.get("content"), action.get("tool_calls") or []
    if (
        not isinstance(content, str | None)
        or not isinstance(calls, list)
        or (content is None and not calls)
    ):
        raise BadMessage(
            'an action is {"content": "…"} or {"tool_calls": [{"name": …, "arguments": {…}}]}'
        )
    tool_calls = []
    for position, call in enumerate(calls):
        if not isinstance(call, Mapping) or not isinstance(
            (call.get("function") or call).get("name"), str
        ):
            raise BadMessage(f"tool call {position} has no name")
        read = ToolCall.from_wire({**call, "id": call.get("id") or f"call-{number}-{position}"})
        tool_calls.append(read)
    return AssistantMessage(content, tool_calls=tool_calls or None)


def _plain(message: Mapping[str, object]) -> Any:
    return json_ready({name: value for name, value in message.items() if value is not None})


def _as_observation(messages: Sequence[Mapping[str, object]]) -> dict[str, Any]:
    plain = [_plain(message) for message in messages]
    return {"messages": plain, "text": message_text(messages[-1]) if len(plain) else ""}


def _mcp_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function") or tool
    return {
        "name": function["name"],
        "description": function.get("description") or "",
        "input_schema": json_ready(function.get("parameters") or {"type": "object"}),
    }
