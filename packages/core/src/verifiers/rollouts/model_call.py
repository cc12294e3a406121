"""``ModelCalls``: the part of an environment that asks the model once and records what it answered.

A call is ``get_model_response``; a turn is a call that ``add_model_response`` appends to the
transcript. Each may be overridden; the loop calls both. ``clients`` sends the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from verifiers.clients.protocol import Client, ClientLike, headers_from_state
from verifiers.clients.resolve import as_client
from verifiers.clients.retry import failed_attempts
from verifiers.data.messages import normalize_messages
from verifiers.rollouts.author_code import maybe_await
from verifiers.rollouts.contract import RolloutEnvironment
from verifiers.rollouts.loop import new_state
from verifiers.rollouts.state import State
from verifiers.rollouts.steps import TrajectoryStep
from verifiers.types import Message, Messages, ModelRequest, Response

DETAILS = "cached_tokens", "cache_write_tokens", "reasoning_tokens"
"""Counts of a response that are in the usage of a rollout where they are not 0."""


class ModelCalls:
    """A base class of ``Environment``: from a prompt to a recorded turn."""

    message_type: str
    sampling_args: dict[str, Any]
    max_seq_len: int | None

    async def init_state(
        self: RolloutEnvironment,
        input: Mapping[str, object],
        client: ClientLike | None,
        model: str,
        sampling_args: Mapping[str, object] | None = None,
    ) -> State:
        """Create the state of a rollout of the row ``input``, which is not copied."""
        return new_state(self, input, client, model, sampling_args)

    async def get_model_response(
        self,
        state: State,
        prompt: Messages,
        client: ClientLike | None = None,
        model: str | None = None,
        tool_defs: Sequence[Mapping[str, object]] | None = None,
        sampling_args: Mapping[str, object] | None = None,
    ) -> Response:
        """A completion of ``prompt`` with the state's client, model, tools and sampling arguments
        as defaults.

        Raises ``ModelError`` when the endpoint returns none, ``OverlongPromptError`` when the
        prompt does not fit.
        """
        run, messages = state.run, self.as_prompt(prompt)
        answering = self.client_of(state, client)
        keys = headers_from_state(answering)
        tools = tool_defs if tool_defs is not None else state.record.tool_defs
        request = ModelRequest(
            prompt=messages,
            model=model or state.record.model,
            message_type=self.message_type,
            tools=tools or None,
            sampling_args={
                **self.sampling_args,
                **(state.record.sampling_args or {}),
                **(sampling_args or {}),
            },
            headers={name: str(state[key]) for name, key in keys.items() if key in state} or None,
            seed=run.seed_of(state) if run is not None else None,
            require_tokens=run is not None and run.require_tokens and answering is run.client,
            rollout_id=state.record.id,
            sample=run.sample_of(state) if run is not None and run.is_cached else None,
            role=self.acting_role(state),
            state=state,
        )
        async with run.generation_slot if run is not None else nullcontext():
            if run is not None:
                run.check_open()
            try:
                response = await answering.complete(request)
            except BaseException as error:
                state.record.count_failed(failed_attempts(error))
                raise
        if response.attempts:
            state.record.count_failed(failed_attempts(response))
        self._count_usage(state, response)
        return response

    def client_of(self, state: State, client: ClientLike | None = None) -> Client:
        """The client that answers a call with this ``client`` argument; None means the client of
        the rollout."""
        run = state.run
        if run is not None and client is None and state["client"] in (run.client, run.given_client):
            of_run: Client = run.client
            return of_run
        return as_client(client or state["client"])

    def acting_role(self, state: State) -> str | None:
        """The role whose turn it is; None in an environment without roles."""
        return None

    def as_prompt(self, messages: object) -> Messages:
        """Normalize messages of any accepted type to a prompt; a list of ``Message`` objects is
        returned unchanged."""
        if (
            self.message_type == "chat"
            and type(messages) is list
            and all(isinstance(message, Message) for message in messages)
        ):
            return messages  # as nearly all are: not copied in every turn
        return normalize_messages(messages, self.message_type)

    async def add_model_response(
        self, state: State, prompt_messages: Messages, response: Response
    ) -> None:
        """Record a response as the next step of the trajectory."""
        truncated, usage = response.finish_reason == "length", response.usage
        previous = self.continued_step(state)
        completion: Messages = [response.message] if self.message_type == "chat" else response.text
        extras = {
            "logprobs": response.token_logprobs,
            "received": getattr(response.message, "received", None),
        }
        step = TrajectoryStep(
            prompt=prompt_messages,
            completion=completion,
            response=response,
            tokens=response.tokens,
            is_truncated=truncated,
            trajectory_id=state.record.id,
            previous=previous,
            timing=dict(state.record.timing),
            extras={name: value for name, value in extras.items() if value is not None},
        )
        if truncated:
            state.record.status = state.record.status.cut()
        self._count_usage(state, response)
        state.counted.clear()
        counts = state.record.usage
        if usage.total_tokens:
            sampled = usage.completion_tokens
            counts["final_output_tokens"] = num_output = (
                counts.get("final_output_tokens", 0) + sampled
            )
            counts["final_input_tokens"] = max(0, usage.prompt_tokens + sampled - num_output)
        for name in DETAILS:
            if num_tokens := getattr(usage, name, 0):
                counts[name] = counts.get(name, 0) + num_tokens
        num_prompt = step.num_prompt if step.has_tokens else usage.prompt_tokens
        if previous is None and self.max_seq_len is not None and num_prompt > self.max_seq_len:
            state["prompt_too_long"] = True
            if step.has_tokens:
                step.token_fields = {"overlong_prompt": True}
        await maybe_await(self.add_trajectory_step(state, step))

    def continued_step(self, state: State) -> TrajectoryStep | None:
        """The step whose conversation the next turn continues: the newest step; None before the
        first."""
        return state.record.transcript[-1] if state.record.transcript else None

    def add_trajectory_step(self, state: State, step: TrajectoryStep) -> Any:
        """Append ``step``; override to set its reward or extras."""
        state.record.transcript.append(step)

    def _count_usage(self, state: State, response: Response) -> None:
        """Count the tokens of a response once, where it is received or where its turn
        is recorded."""
        for counted in state.counted:
            if counted is response:
                return
        state.counted.append(response)
        usage = response.usage
        self.increment_state_usage(state, usage.prompt_tokens, usage.completion_tokens)

    def increment_state_usage(self, state: State, input_tokens: int, output_tokens: int) -> None:
        """Add the tokens of an extra model call to the usage of the rollout."""
        usage = state.record.usage
        usage["input_tokens"] = usage.get("input_tokens", 0) + input_tokens
        usage["output_tokens"] = usage.get("output_tokens", 0) + output_tokens

    def get_state_usage(self, state: State) -> dict[str, int]:
        """Return the token counts of the rollout so far."""
        return dict(state.record.usage)
