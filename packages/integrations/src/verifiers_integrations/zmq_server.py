"""An environment as a server for clients of another project's `verifiers` 0.4: ``vf-serve-env ENV
--wire zmq``.

That project's trainer plays its environments through ``verifiers.v1.serve.EnvClient``: ZeroMQ with
MessagePack. The client sends a task, an endpoint and sampling arguments; this server plays the
rollout with the environment's own loop against that endpoint, and sends the record back. Promise:

* rollouts run at the same time; what fails in a rollout is the answer of that request alone, and
  the server continues;
* token ids and log-probabilities are those that were sampled; a turn that does not continue the ids
  before it starts a branch;
* an unknown reward is ``None``, with its error in the trace; that client's own sum ``trace.reward``
  leaves it out;
* ``cancel`` ends a rollout and runs its clean-up handlers, and so does the end of the server.

A request is four frames ``[client, request id, method, body]``; the methods are health, run and
cancel. An answer is ``[client, request id, "reply", body]``, after any number of ``"delta"``
frames: of a rollout there is one when it begins and one when it ends. There is no authentication,
and a request names the endpoint and the variable of its key: serve to machines you trust.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from verifiers.clients.protocol import ClientConfig
from verifiers.environments.integrations import extras
from verifiers.errors import ConfigError
from verifiers.results.rows import json_ready
from verifiers.types import SamplingArgs, StopReason
from verifiers_integrations.openenv import rows_of

if TYPE_CHECKING:
    from verifiers.environments.base import Environment

VERSION = "0.4.0"
"""The release whose client was run against this server."""
MAX_SESSIONS = 64
MAX_MESSAGE_BYTES = 64 * 2**20
TASK_FIELDS: dict[str, Sequence[Any]] = {
    "image": (None,),
    "workdir": (None,),
    "agent_user": (None,),
    "skills": ([],),
    "network_allow": (["*"], []),
    "network_block": ([],),
    "artifacts": ([],),
    "timeout": (None, dict.fromkeys(("setup", "agent", "finalize", "scoring"))),
    "resources": (None, dict.fromkeys(("cpu", "memory", "gpu", "disk"))),
}
"""Fields of a task that ask for a container or a limit -> the values with which they ask for
nothing."""
OTHER_FIELDS = "idx id name description artifact_max_bytes prompt system_prompt split".split()
STOP_CONDITIONS = {
    StopReason.ERROR: "error",
    StopReason.TIMEOUT: "agent_timeout",
    StopReason.MAX_SEQ_LEN: "max_total_tokens",
    StopReason.MAX_COMPLETION_TOKENS: "max_output_tokens",
    StopReason.PROMPT_TOO_LONG: "max_input_tokens",
}
"""Names there of limits and failures; that client calls a trace truncated by them. Other conditions
keep their name."""
TOKEN_IDS: dict[str, Any] = {"logprobs": True, "extra_body": {"return_token_ids": True}}
"""What a training client's endpoint has to return."""


class Timeout(msgspec.Struct):
    """Time limits of a request to the endpoint, in seconds; None = the default of
    ``ClientConfig``."""

    connect: float | None = None
    read: float | None = None


class Endpoint(msgspec.Struct):
    """Where a request wants its model calls sent; further fields of that client are ignored."""

    base_url: str
    api_key_var: str = "OPENAI_API_KEY"
    headers: dict[str, str] = {}
    headers_from_env: dict[str, str] = {}
    timeout: Timeout = msgspec.field(default_factory=Timeout)
    type: str = "eval"
    """"eval", or "train": the endpoint must return token ids and log-probabilities."""

    def config(self) -> ClientConfig:
        """Our settings of it. *Raises* ConfigError for a variable that is not set."""
        unset = [name for name in self.headers_from_env.values() if name not in os.environ]
        if unset:
            raise ConfigError(
                f"headers_from_env: {unset[0]} is not set where the server runs",
                key="headers_from_env",
            )
        config = ClientConfig(
            api_base_url=self.base_url,
            api_key_var=self.api_key_var,
            extra_headers=self.headers
            | {name: os.environ[var] for name, var in self.headers_from_env.items()},
        )
        limits = {"timeout": self.timeout.read, "connect_timeout": self.timeout.connect}
        return config.model_copy(
            update={name: limit for name, limit in limits.items() if limit is not None}
        )


class RunRequest(msgspec.Struct):
    """The body of ``run``."""

    task_data: dict[str, object]
    client: Endpoint
    model: str
    sampling: SamplingArgs = {}


class CancelRequest(msgspec.Struct):
    """The body of ``cancel``."""

    request_id: str


class ZmqServer:
    """Serves an environment at ``address``, with as many as ``max_sessions`` rollouts at once; the
    others wait.

    *Raises* ConfigError for an environment whose rewards compare the rollouts of a group, and
    without pyzmq.
    """

    def __init__(self, env: Environment, address: str, max_sessions: int = MAX_SESSIONS):
        if max_sessions < 1:
            raise ConfigError(f"max_sessions is {max_sessions}; it must be 1 or more")
        self._zmq = extras.ZMQ.load("--wire zmq")
        self.env, self.address, self.max_sessions = env, address, max_sessions
        self.name = env.env_id or type(env).__name__
        if env.rubric.has_group_rewards:
            raise ConfigError(
                f"{self.name} scores the rollouts of a group together, and a request of this wire"
                " is one rollout; serve an environment whose functions score one rollout"
            )
        self._slots = asyncio.Semaphore(max_sessions)
        self._runs: dict[tuple[bytes, bytes], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: Any = None

    async def serve(self, started: Callable[[str], None], ended: asyncio.Event) -> None:
        """Answer until ``ended`` is set, then cancel the rollouts that run, and close the
        environment.

        ``started`` receives the address with the port that was bound. *Raises* ConfigError when it
        cannot be bound.
        """
        import zmq.asyncio

        context = zmq.asyncio.Context()
        self._socket = context.socket(self._zmq.ROUTER)
        self._socket.setsockopt(self._zmq.LINGER, 2000)
        self._socket.setsockopt(self._zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.set_hwm(0)  # a full queue would drop answers
        try:
            try:
                self._socket.bind(self.address)
            except self._zmq.ZMQError as error:
                raise ConfigError(
                    f"{self.address} cannot be listened at: {error}; give --port"
                ) from error
            started(self._socket.getsockopt_string(self._zmq.LAST_ENDPOINT))
            receiving = asyncio.create_task(self._receive())
            ending = asyncio.create_task(ended.wait())
            try:
                await asyncio.wait({receiving, ending}, return_when=asyncio.FIRST_COMPLETED)
                if receiving.done():
                    receiving.result()
            finally:
                receiving.cancel()
                ending.cancel()
                await self._close()
        finally:
            self._socket.close()
            context.term()

    async def _close(self) -> None:
        for run in self._runs.values():
            run.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.env.aclose()

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 4:
                continue  # without a request id there is nothing to answer to
            client, request, method, body = frames
            task = asyncio.create_task(self._answer(client, request, method, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if method == b"run":
                self._runs[client, request] = task
                task.add_done_callback(functools.partial(self._forget, (client, request)))

    def _forget(self, key: tuple[bytes, bytes], _: asyncio.Task[None]) -> None:
        self._runs.pop(key, None)

    async def _answer(self, client: bytes, request: bytes, method: bytes, body: bytes) -> None:
        async def send(route: bytes, value: Mapping[str, object]) -> None:
            await self._socket.send_multipart(
                [client, request, route, msgspec.msgpack.encode(value)]
            )

        try:
            match method:
                case b"health":
                    answer: dict[str, object] = {}
                case b"cancel":
                    run_id = msgspec.msgpack.decode(body, type=CancelRequest).request_id.encode()
                    run = self._runs.get((client, run_id))
                    answer = {"cancelled": run is not None and run.cancel()}
                case b"run":
                    rollout = msgspec.msgpack.decode(body, type=RunRequest)
                    async with self._slots:
                        answer = await self._run(rollout, lambda delta: send(b"delta", delta))
                case _:
                    raise ConfigError(f"unknown method {method.decode(errors='replace')!r}")
        except asyncio.CancelledError:
            await send(b"reply", {"success": False, "error": "Cancelled: rollout aborted"})
            return
        except Exception as error:  # noqa: BLE001  # the answer of this request; the server continues
            await send(b"reply", {"success": False, "error": f"{type(error).__name__}: {error}"})
            return
        await send(b"reply", {"success": True, "error": None, **answer})

    async def _run(
        self, request: RunRequest, send: Callable[[dict[str, object]], Any]
    ) -> dict[str, Any]:
        """Play the rollout, sending its trace; the fields of the last answer. *Raises* whatever it
        cannot play."""
        row, config = row_of(self.env, request.task_data), request.client.config()
        sampling = {name: value for name, value in request.sampling.items() if value is not None}
        trains = request.client.type == "train"
        if trains:
            body = {**(sampling.get("extra_body") or {}), **TOKEN_IDS["extra_body"]}
            sampling |= {**TOKEN_IDS, "extra_body": body}
        began, trace = time.time(), uuid.uuid4().hex
        task = {"type": self.name, "data": request.task_data, "key": None, "hash": None}
        agent = {
            "config": {
                "runtime": {"type": "subprocess"},
                "model": request.model,
                "sampling": request.sampling,
            }
        }
        opened = {
            "version": 1,
            "id": trace,
            "verifiers": {"version": VERSION, "commit": None},
            "task": task,
        }
        await send({
            "trace": trace,
            "open": opened,
            "set": {
                "agent": agent | {"name": "agent", "trainable": True},
                **{"tools": [], "rewards": {}, "metrics": {}, "info": {}, "root_reply": None},
                **{"is_completed": False, "ok": False, "stop_condition": None, "is_timeout": False},
                "timing": {"start": began},
            },
        })  # fmt: skip
        output = await self.env.run_rollout(
            row, config, request.model, sampling_args=sampling, state_columns=["trajectory"]
        )
        steps = output["trajectory"]
        if trains and any(step["tokens"] is None for step in steps):
            raise ConfigError(
                f"{request.client.base_url} returned no token ids and log-probabilities for the"
                " request option return_token_ids; a training client needs an endpoint that does"
            )
        nodes, calls = graph_of(steps, tools := tools_of(output["tool_defs"]), request)
        used = output["token_usage"] or {}
        counts = {
            "num_input_tokens": used.get("input_tokens", 0),
            "num_output_tokens": used.get("output_tokens", 0),
        }
        counts["num_total_tokens"] = sum(counts.values())
        ended = {**_outcome(output, began), "tools": tools, **counts}
        errors = _errors(output["error"])
        await send({"trace": trace, "nodes": nodes, "calls": calls, "errors": errors, "set": ended})
        head = {
            "id": uuid.uuid4().hex,
            "env": {"id": self.name, "name": None},
            "task": task,
            "group": None,
            "run": None,
            "ok": ended["ok"],
            "is_timeout": ended["is_timeout"],
            "errors": [],
            **counts,
        }
        return {"head": head, "traces": [{"id": trace, "nodes": len(nodes), "calls": len(calls)}]}


def row_of(env: Environment, task: Mapping[str, object]) -> dict[str, Any]:
    """The row that a task asks for: its own ``prompt`` or ``question``, else row ``idx`` of the
    ``split``.

    A ``system_prompt`` replaces the environment's; columns beside the task's fields are columns of
    the row.

    *Raises* ConfigError for a task that names no row, or that asks for a container or a limit of
    its own.
    """
    for name, neutral in TASK_FIELDS.items():
        if name in task and task[name] not in neutral:
            raise ConfigError(
                f"the task sets {name}, which this environment cannot follow; leave it out"
            )
    columns = {
        name: value
        for name, value in task.items()
        if name not in TASK_FIELDS and name not in OTHER_FIELDS
    }
    prompt, system = task.get("prompt"), task.get("system_prompt")
    question = prompt if isinstance(prompt, str) else columns.get("question")
    if prompt is None and question is None:
        return _own_row(env, task)
    if isinstance(prompt, list) or system is not None:
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": question}]
        head = [{"role": "system", "content": system}] if system is not None else []
        columns["prompt"] = [*head, *messages]
        columns.pop("question", None)
    else:
        columns["question"] = question
    if isinstance(task.get("idx"), int):
        columns["example_id"] = task["idx"]
    return columns


def _own_row(env: Environment, task: Mapping[str, object]) -> dict[str, object]:
    split = task.get("split") or ("train" if env.dataset is not None else "eval")
    rows, index = rows_of(env, str(split)), task.get("idx")
    if not isinstance(index, int) or not 0 <= index < len(rows):
        raise ConfigError(
            f"the task has no prompt, and its idx {index!r} is none of the {len(rows)} rows of"
            f" {split}; give one"
        )
    return dict(rows[index])


def graph_of(
    steps: Sequence[Mapping[str, Any]], tools: list[dict[str, object]], request: RunRequest
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """(nodes, calls) of a trajectory: a node for each message, whose token ids continue those of
    its parents.

    The ids between two completions belong to the last message between them. A turn whose prompt
    does not continue the messages and ids of the turn before begins a branch, with the whole prompt
    as new nodes.
    """
    nodes: list[dict[str, object]] = []
    calls: list[dict[str, object]] = []
    path: list[int] = []
    messages: list[dict[str, Any]] = []
    ids: list[int] = []
    for step in steps:
        prompt = [message_of(message) for message in _messages(step["prompt"], "user")]
        replies = _messages(step["completion"], "assistant")
        reply = message_of(replies[0]) if len(replies) else _EMPTY
        tokens = step["tokens"]
        prompt_ids = [] if tokens is None else [int(token) for token in tokens["prompt_ids"]]
        if prompt[: len(messages)] != messages or prompt_ids[: len(ids)] != ids:
            path, messages, ids = [], [], []
        new, new_ids = prompt[len(messages) :], prompt_ids[len(ids) :]
        for position, message in enumerate(new):
            ids_before = new_ids if position == len(new) - 1 else []
            nodes.append(_node(path[-1] if path else None, message, ids_before, [], tools))
            path.append(len(nodes) - 1)
        sampled = [] if tokens is None else [int(token) for token in tokens["completion_ids"]]
        scaffold = [] if new else new_ids  # no message between two completions has them
        node = _node(path[-1] if path else None, reply, scaffold, sampled, tools)
        node["sampled"] = True
        if tokens is not None:
            node["logprobs"] = [float(logprob) for logprob in tokens["completion_logprobs"]]
        nodes.append(node)
        path.append(len(nodes) - 1)
        messages, ids = [*prompt, reply], [*prompt_ids, *sampled]
        calls.append(_call(step, path[-1], request))
    return nodes, calls


_EMPTY = {
    "role": "assistant",
    "content": "",
    "reasoning_content": None,
    "tool_calls": None,
    "provider_state": None,
}


def _node(
    parent: int | None,
    message: Mapping[str, object],
    prompt_ids: list[int],
    sampled: list[int],
    tools: Sequence[Mapping[str, object]],
) -> dict[str, object]:
    mask = [False] * len(prompt_ids) + [True] * len(sampled)
    node: dict[str, object] = {
        "parent": parent,
        "semantic_parents": [],
        "message": message,
        "sampled": False,
        "timestamp": time.time(),
        "token_ids": [*prompt_ids, *sampled],
        "mask": mask,
        "is_content": mask,
        "logprobs": [],
    }
    return node | ({"tools": tools} if parent is None else {})


def _call(step: Mapping[str, object], node: int, request: RunRequest) -> dict[str, Any]:
    response = step["response"]
    reason = getattr(response, "finish_reason", None)
    if step["is_truncated"]:
        reason = "length"
    call = {
        "node": node,
        "model": request.model,
        "sampling": request.sampling,
        "endpoint": "/chat/completions",
        "finish_reason": reason if reason in ("stop", "length", "tool_calls") else None,
        "time": {},
    }
    if (usage := getattr(response, "usage", None)) is not None:
        call["usage"] = {
            "prompt_tokens": usage.prompt_tokens - usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_input_tokens": usage.cached_tokens or None,
            "reasoning_tokens": usage.reasoning_tokens or None,
        }
    return call


def _messages(
    messages: Sequence[Mapping[str, object]] | str, role: str
) -> Sequence[Mapping[str, Any]]:
    return [{"role": role, "content": messages}] if isinstance(messages, str) else messages


def message_of(message: Mapping[str, object]) -> dict[str, Any]:
    """A message of ours as one of theirs: text and images; audio becomes the text ``[audio]``."""
    plain = json_ready({name: value for name, value in message.items() if value is not None})
    role, content = plain.get("role"), plain.get("content")
    if isinstance(content, list):
        content = [_part(part) for part in content]
    if role == "assistant":
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        calls = [_tool_call(call) for call in plain.get("tool_calls") or ()] or None
        thought = plain.get("reasoning_content")
        return _EMPTY | {"content": content, "reasoning_content": thought, "tool_calls": calls}
    if role == "tool":
        return {
            "role": "tool",
            "tool_call_id": plain.get("tool_call_id") or "",
            "content": content or "",
            "name": plain.get("name"),
        }
    return {
        "role": "system" if role in ("system", "developer") else "user",
        "content": content or "",
    }


def _part(part: Mapping[str, object]) -> dict[str, Any]:
    match part.get("type"):
        case "text":
            return {"type": "text", "text": part.get("text", "")}
        case "image_url":
            image = part["image_url"]
            return {
                "type": "image_url",
                "image_url": {"url": image["url"] if isinstance(image, Mapping) else image},
            }
        case "input_audio":
            return {"type": "text", "text": "[audio]"}
    return {"type": "text", "text": msgspec.json.encode(part).decode()}


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {
        "id": call.get("id") or "",
        "type": "function",
        "name": function["name"],
        "arguments": text,
    }


def tools_of(tools: Sequence[Any] | None) -> list[dict[str, object]]:
    """The tools of a rollout, as the wire has them."""
    flat = [tool.get("function") or tool for tool in tools or ()]
    return [
        {
            "type": "function",
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": json_ready(tool.get("parameters") or {"type": "object"}),
        }
        for tool in flat
    ]


def _outcome(output: Mapping[str, Any], began: float) -> dict[str, Any]:
    """Rewards, metrics and how the rollout ended; NaN is None."""
    reward, times = output["reward"], output["timing"]
    score = None if math.isnan(reward) else {"score": reward, "weight": 1.0}
    generated = times.get("generation_ms", 0.0) / 1000
    model = min(times.get("model_ms", 0.0) / 1000, generated)
    scored = generated + times.get("scoring_ms", 0.0) / 1000
    reason = output["stop_condition"]
    return {
        "rewards": {"reward": score},
        "metrics": {
            name: None if math.isnan(value) else value for name, value in output["metrics"].items()
        },
        "info": json_ready(output["info"]) | {"example_id": output["example_id"]},
        "is_completed": True,
        "ok": output["error"] is None and score is not None,
        "stop_condition": STOP_CONDITIONS.get(reason, reason),
        "is_timeout": reason == StopReason.TIMEOUT,
        "timing": {
            "start": began,
            "agent": {
                "start": began,
                "end": began + generated,
                "model": {"duration": model},
                "harness": {"duration": generated - model},
            },
            "scoring": {"start": began + generated, "end": began + scored},
        },
    }


def _errors(error: Mapping[str, object] | None) -> list[dict[str, object]]:
    if error is None:
        return []
    message = error.get("error_chain_repr") or error.get("message") or error["error"]
    return [{"type": error["error"], "message": message, "traceback": error.get("traceback")}]
