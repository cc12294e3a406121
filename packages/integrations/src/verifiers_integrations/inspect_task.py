"""An environment as an Inspect task: Inspect's models, limits and logs around our rollouts and
rewards.

    from inspect_ai import eval
    from verifiers_integrations.inspect_task import to_task
    eval(to_task(vf.load_environment("reverse-text"), num_examples=20), model="openai/gpt-4.1-mini")

Promise: the rollout and its reward are the environment's own; only the model calls go through
Inspect. A rollout that fails is an error of its sample; a reward that is unknown is no score. Token
ids are not to be had through Inspect's models, so rollouts generated here cannot be trained on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from verifiers.environments.base import Environment
from verifiers.errors import ModelError
from verifiers.results.rows import state_to_output
from verifiers.runs.rollout import scored_rollout
from verifiers.types import ModelRequest, Response, Usage
from verifiers_integrations.inspect_messages import (
    FINISH_REASONS,
    from_assistant,
    load,
    to_chat,
    to_tools,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SAMPLING = frozenset(
    "max_tokens temperature top_p top_k frequency_penalty presence_penalty logit_bias seed"
    " reasoning_effort parallel_tool_calls extra_body".split()
)
"""Sampling arguments that Inspect's ``GenerateConfig`` has by the same name."""
STORE = "verifiers"


class InspectClient:
    """A core ``Client`` over an Inspect model; ``model`` None = the active model of the
    running task."""

    def __init__(self, model: Any = None):
        self._model = model

    async def complete(self, request: ModelRequest) -> Response:
        """A completion. What Inspect raises is this rollout's ``ModelError``."""
        model = self._model or load("model").get_model()
        args = dict(request.sampling_args) | (
            {} if request.seed is None else {"seed": request.seed}
        )
        if (limit := args.pop("max_completion_tokens", None)) is not None:
            args.setdefault("max_tokens", limit)
        stop = args.pop("stop", None)
        settings = {
            name: value for name, value in args.items() if name in SAMPLING and value is not None
        }
        if stop is not None:
            settings["stop_seqs"] = [stop] if isinstance(stop, str) else list(stop)
        try:
            output = await model.generate(
                to_chat(request.prompt),
                tools=to_tools(request.tools),
                config=load("model").GenerateConfig(**settings),
            )
        except Exception as error:  # whatever a provider raises is mapped and chained
            raise ModelError(f"Inspect's model failed: {type(error).__name__}: {error}") from error
        if not output.choices:
            raise ModelError(f"Inspect's model gave no choice: {output.error or 'no reason given'}")
        used = output.usage
        usage = Usage(used.input_tokens, used.output_tokens) if used else Usage()
        finish = FINISH_REASONS.get(output.stop_reason, "stop")
        return Response(
            from_assistant(output.message), finish, usage, model=output.model or request.model
        )


def to_task(
    env: Environment,
    num_examples: int | None = None,
    rollouts_per_example: int = 1,
    **options: object,
) -> Any:
    """An ``inspect_ai.Task``: the evaluation set (the training set when there is none), our
    rollouts, our rewards.

    A failed rollout does not end the evaluation unless ``fail_on_error`` says so. ``options`` go to
    ``Task``.
    """
    task, dataset = load("").Task, load("dataset")
    rows = env.get_eval_dataset()
    count = len(rows) if num_examples is None else min(num_examples, len(rows))
    samples = []
    for n in range(count):
        prompt, answer = to_chat(rows[n]["prompt"]), str(rows[n]["answer"])
        samples.append(
            dataset.Sample(
                input=prompt, target=answer, id=rows[n]["example_id"], metadata={"row": n}
            )
        )
    options = {
        "fail_on_error": False,
        "epochs": rollouts_per_example,
        "name": env.env_id or "verifiers",
        **options,
    }
    return task(
        dataset=dataset.MemoryDataset(samples, name=env.env_id or "verifiers"),
        solver=_solver(env, rows),
        scorer=_scorer(),
        **options,
    )


def _solver(env: Environment, rows: Sequence[Mapping[str, Any]]) -> object:
    module, types = load("solver"), load("model")

    @module.solver(name="verifiers")  # type: ignore[untyped-decorator]
    def verifiers() -> Any:
        async def solve(state: Any, generate: object) -> object:
            rollout = await scored_rollout(
                env, rows[state.metadata["row"]], InspectClient(), str(state.model)
            )
            output = state_to_output(rollout)
            state.messages = to_chat(output["prompt"]) + to_chat(output["completion"] or [])
            replies = [
                message
                for message in state.messages
                if isinstance(message, types.ChatMessageAssistant)
            ]
            if replies:
                choices = [types.ChatCompletionChoice(message=replies[-1])]
                state.output = types.ModelOutput(model=str(state.model), choices=choices)
            metrics = {name: _number(value) for name, value in output["metrics"].items()}
            state.store.set(STORE, {"reward": _number(output["reward"]), "metrics": metrics})
            if rollout["error"] is not None:
                raise rollout["error"]
            return state

        return solve

    return verifiers()


def _scorer() -> Any:
    module = load("scorer")

    @module.scorer(metrics=[module.mean(), module.stderr()], name="reward")  # type: ignore[untyped-decorator]
    def reward() -> Any:
        async def score(state: Any, target: object) -> Any:
            outcome = state.store.get(STORE)
            if outcome is None or outcome["reward"] is None:
                return None
            return module.Score(
                value=outcome["reward"], answer=state.output.completion, metadata=outcome["metrics"]
            )

        return score

    return reward()


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
