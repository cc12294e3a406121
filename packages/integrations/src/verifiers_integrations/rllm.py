"""rLLM: run environments as its ``Workflow`` or ``AgentFlow``, on its verl and Tinker backends.

    AgentTrainer(config=config, workflow_class=VerifiersWorkflow, backend=config.backend, train_dataset=…,
                 workflow_args={"vf_env": env, "sampling_args": {"temperature": 1.0}}).train()

A step has the ids and log-probabilities that its engine sampled, and the weight version; the reward
is that of the environment. Rollouts are run without their siblings, so an unknown reward becomes
0.0 with ``vf_unscored = 1`` and no steps (rLLM's baseline counts the 0.0). Written for rLLM's types
of August 2026 and tested with a double of them; rLLM is not on a package index.
``examples/verifiers_env`` has scripts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from verifiers.data.messages import field
from verifiers.environments.base import Environment
from verifiers.environments.registry import load_environment
from verifiers.errors import ConfigError, OverlongPromptError
from verifiers.results.run_metadata import successes
from verifiers_integrations.common import generate_group, known_metrics, limit, row_of, worth
from verifiers_integrations.peers import Peer
from verifiers_integrations.token_client import TokenClient

RLLM = Peer("rllm", "rllm", (), lambda: "pip install git+https://github.com/rllm-org/rllm")
TRAJECTORY = "verifiers"
STOPS = {
    "prompt_too_long": "MAX_PROMPT_LENGTH_EXCEEDED",
    "timeout_reached": "TIMEOUT",
    "max_turns_reached": "MAX_TURNS_EXCEEDED",
}
"""Stop condition -> name of rLLM's termination reason."""
VERIFIERS_KEYS = ("env_id", "env_args", "sampling_args", "max_samples")
BACKENDS = ("verl", "tinker", "fireworks")


# --- configuration --------------------------------------------------------------------------------


def from_config(
    config: Mapping[str, Any],
) -> tuple[Environment, dict[str, object], list[Any], list[Any]]:
    """Return (environment, sampling arguments, train tasks, eval tasks) of ``config.verifiers`` and
    ``config.backend``.

    *Raises* ConfigError for a missing ``verifiers.env_id``, an unknown key below ``verifiers``, an
    unknown backend, or a Tinker run whose sampling temperature is not 1.0 (by the keys of either
    version).
    """
    table = _plain(config.get("verifiers") or {})
    if unknown := [name for name in table if name not in VERIFIERS_KEYS]:
        raise ConfigError(
            f"verifiers.{unknown[0]} is unknown; keys are {', '.join(VERIFIERS_KEYS)}",
            key=unknown[0],
        )
    if not table.get("env_id"):
        raise ConfigError(
            "verifiers.env_id is missing; give +verifiers.env_id=owner/name", key="verifiers.env_id"
        )
    unified = config.get("rllm") or {}
    backend = config.get("backend") or unified.get("backend") or "verl"
    if backend not in BACKENDS:
        raise ConfigError(
            f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}", key="backend"
        )
    sampling = dict(table.get("sampling_args") or {})
    rollout = (unified.get("rollout") or {}).get("train") or {}
    temperatures = [
        section.get("temperature") for section in (config.get("sampling") or {}, rollout, sampling)
    ]
    if backend == "tinker" and any(value not in (None, 1.0) for value in temperatures):
        raise ConfigError(
            "Tinker trains only on samples of temperature 1.0: give sampling.temperature=1.0",
            key="temperature",
        )
    env = load_environment(table["env_id"], **(table.get("env_args") or {}))
    train, held_out = limit(env, table.get("max_samples"))
    return env, sampling, train, held_out


def _plain(value: object) -> Any:
    """Convert containers of OmegaConf to dicts and lists."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {str(key): _plain(member) for key, member in value.items()}
    return [_plain(member) for member in value] if isinstance(value, list | tuple) else value


# --- client over a rollout engine -----------------------------------------------------------------


class RolloutEngine(Protocol):
    """What is read of rLLM's rollout engines; the first three where they take token ids."""

    @property
    def get_token_output_from_token_input(self) -> Callable[..., Any]: ...

    @property
    def assemble_model_output(self) -> Callable[..., Any]: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def get_model_response(self) -> Callable[..., Any]: ...


def rollout_engine_client(
    rollout_engine: RolloutEngine, model: str, application_id_fn: Callable[[], str]
) -> Any:
    """Return a client over a rollout engine: a ``TokenClient`` if it supports token ids, else over
    messages."""
    if not getattr(rollout_engine, "supports_token_in_token_out", False):
        return _MessageClient(rollout_engine, model, application_id_fn)

    async def generate(prompt_ids: list[int], sampling: Mapping[str, object]) -> Any:
        try:
            sampled = await rollout_engine.get_token_output_from_token_input(
                token_input=prompt_ids, application_id=application_id_fn(), **sampling
            )
        except Exception as error:
            # rLLM signals an overlong prompt by an event; the client maps other errors
            if "MAX_PROMPT_LENGTH" in str(getattr(error, "reason", "")):
                raise OverlongPromptError(
                    f"the prompt of {len(prompt_ids)} tokens is too long"
                ) from error
            raise
        output = rollout_engine.assemble_model_output(prompt_ids, sampled)
        return (
            output.completion_ids,
            output.logprobs,
            output.finish_reason,
            getattr(rollout_engine, "weight_version", None),
        )

    return TokenClient(generate, rollout_engine.tokenizer, model=model)


RolloutEngineAsyncClient = rollout_engine_client
"""Alias used by the guides."""


class _MessageClient:
    """``chat.completions.create`` over ``get_model_response``."""

    base_url, api_key = "http://rollout-engine.invalid/v1", "none"

    def __init__(
        self, rollout_engine: RolloutEngine, model: str, application_id_fn: Callable[[], str]
    ):
        self._engine, self.model, self._application_id = rollout_engine, model, application_id_fn
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(
        self,
        *,
        messages: Iterable[Mapping[str, object]],
        tools: Iterable[Mapping[str, object]] | None = None,
        model: str = "",
        **sampling: object,
    ) -> object:
        for name in ("extra_body", "logprobs", "top_logprobs", "extra_headers", "modalities", "n"):
            sampling.pop(name, None)
        if (limit_ := sampling.pop("max_completion_tokens", None)) is not None:
            sampling.setdefault("max_tokens", limit_)
        tool_args = {"tools": list(tools)} if tools else {}
        output = await self._engine.get_model_response(
            list(messages), application_id=self._application_id(), **tool_args, **sampling
        )
        return {"model": self.model, **_to_response(output)}


def _to_response(output: Any) -> dict[str, object]:
    """Convert a ``ModelOutput`` to an OpenAI response."""
    calls = [_call(call, number) for number, call in enumerate(output.tool_calls or ())]
    message = {
        "role": "assistant",
        "content": output.content if output.content is not None else output.text,
    }
    message |= {"tool_calls": calls} if calls else {}
    message |= {"reasoning_content": output.reasoning} if output.reasoning else {}
    logprobs = (
        None
        if output.logprobs is None
        else {"content": [{"logprob": value} for value in output.logprobs]}
    )
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": output.finish_reason or "stop",
        "logprobs": logprobs,
    }
    response: dict[str, object] = {"id": "", "choices": [choice]}
    if output.completion_ids is not None and output.prompt_ids is not None:
        choice["token_ids"] = list(output.completion_ids)
        response["prompt_token_ids"] = list(output.prompt_ids)
    if getattr(output, "weight_version", None) is not None:
        response["weight_version"] = output.weight_version
    return response


def _call(call: object, number: int) -> dict[str, Any]:
    """Convert a tool call (an object of rLLM, of OpenAI, or a dict) to the wire format."""
    function = field(call, "function") or call
    if isinstance(function, str):
        name, arguments = function, field(call, "arguments")
    else:
        name, arguments = field(function, "name"), field(function, "arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {
        "id": field(call, "id") or f"call-{number}",
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


# --- rollouts -------------------------------------------------------------------------------------


def to_episode(rollout: Mapping[str, Any], env: Environment, task: object, uid: str) -> Any:
    """Convert a rollout to an ``Episode``: one ``Step`` per turn, with all fields that rLLM does
    not set."""
    types, value = RLLM.load("agents.agent"), worth(rollout)
    steps = [] if value.is_masked else [_step(types.Step, step) for step in rollout["trajectory"]]
    trajectory = types.Trajectory(name=TRAJECTORY, steps=steps, reward=value.reward)
    return types.Episode(
        id=uid,
        task=task,
        is_correct=not value.is_unscored and successes([rollout], env.pass_threshold) == [1.0],
        trajectories=[trajectory],
        metrics=known_metrics(rollout) | value.metrics,
        termination_reason=_reason(rollout, env),
    )


def _step(kind: Callable[..., object], step: Mapping[str, Any]) -> object:
    tokens = step["tokens"]
    if tokens is None:
        raise ConfigError(
            "the rollout engine returned no token ids, which rLLM trains on: use an engine that"
            " returns them"
        )
    version = min(np.atleast_1d(tokens["version"]).tolist())
    return kind(
        prompt_ids=tokens["prompt_ids"],
        response_ids=tokens["completion_ids"],
        logprobs=tokens["completion_logprobs"],
        chat_completions=[dict(message) for message in [*step["prompt"], *step["completion"]]],
        reward=float(step["reward"] or 0.0),
        weight_version=None if version < 0 else version,
    )


def _reason(rollout: Mapping[str, Any], env: Environment) -> object:
    reasons, stop = RLLM.load("workflows.workflow").TerminationReason, rollout["stop_condition"]
    error = rollout["error"]
    if error is not None:
        return reasons.TIMEOUT if error["error"] == "RolloutTimeout" else reasons.ERROR
    if rollout["is_truncated"] and stop not in STOPS:
        return reasons.MAX_RESPONSE_LENGTH_EXCEEDED
    if stop == "max_turns_reached" and env.max_turns == 1:
        return reasons.ENV_DONE
    return getattr(reasons, STOPS.get(stop, "ENV_DONE"))


# --- workflow and agent flow ----------------------------------------------------------------------


@functools.cache
def workflow_class(base: type) -> type:
    """Create ``VerifiersWorkflow`` as a subclass of rLLM's ``Workflow``."""

    class VerifiersWorkflow(base):
        """Runs one task of an environment and returns its episode.

        vf_env: the environment. sampling_args: for every model call, in addition to those of the
        engine.
        max_retries: retries of a rollout after a transient error.
        """

        def __init__(
            self,
            rollout_engine: RolloutEngine,
            vf_env: Environment,
            sampling_args: Mapping[str, object] | None = None,
            max_retries: int = 0,
            **options: object,
        ):
            super().__init__(rollout_engine=rollout_engine, **options)
            self.engine, self.vf_env = rollout_engine, vf_env
            self.sampling_args, self.max_retries = dict(sampling_args or {}), max_retries

        async def run(self, task: Mapping[str, object], uid: str, **_: object) -> Any:
            """Run one rollout and return its episode; an error becomes the termination reason, not
            an exception."""
            self.reset(task, uid)
            client = rollout_engine_client(self.engine, _model_of(self.engine), lambda: uid)
            row = row_of(task, self.vf_env.message_type)
            (rollout,) = await generate_group(
                self.vf_env,
                [row],
                client,
                _model_of(self.engine),
                self.sampling_args,
                self.max_retries,
            )
            return to_episode(rollout, self.vf_env, task, uid)

    return VerifiersWorkflow


def _model_of(engine: object) -> str:
    return str(getattr(engine, "model_name", None) or getattr(engine, "model", None) or "policy")


class VerifiersAgentFlow:
    """An ``AgentFlow``: runs a task through the gateway at ``config.base_url``, which records the
    tokens.

    The trajectory of the episode has no steps: the gateway adds those it recorded for
    ``session_uid``.
    """

    def __init__(
        self,
        vf_env: Environment,
        sampling_args: Mapping[str, object] | None = None,
        max_retries: int = 0,
    ):
        self.vf_env = vf_env
        self.sampling_args = dict(sampling_args or {})
        self.max_retries = max_retries

    async def arun(self, task: Any, config: Any) -> Any:
        """Run one rollout and return its episode."""
        import openai

        fields = task if isinstance(task, Mapping) else task.metadata
        row = row_of(fields, self.vf_env.message_type)
        async with openai.AsyncOpenAI(base_url=config.base_url, api_key="none") as client:
            output = await self.vf_env.run_rollout(
                row, client, config.model, sampling_args=self.sampling_args, max_retries=self.max_retries,
                state_columns=["trajectory"],
            )  # fmt: skip
        return to_episode({**output, "trajectory": []}, self.vf_env, fields, config.session_uid)


def __getattr__(name: str) -> Any:
    """Create ``VerifiersWorkflow`` on access, since its base class is rLLM's."""
    if name != "VerifiersWorkflow":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return workflow_class(RLLM.load("workflows.workflow").Workflow)
