"""For unit tests of reward functions and hooks: a finished state in one line, and one rollout in
one call.

    state = make_state("2 + 2?", "4", answer="4")
    assert rubric.score_rollout_sync(state)["reward"] == 1.0

    state = run_rollout_sync(env, ScriptedClient(["4"]))
    assert state["stop_condition"] == "max_turns_reached"

No model is needed. ``run_rollout_sync`` generates a rollout as a run does, without a journal.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from verifiers.clients.protocol import ClientLike
from verifiers.data.messages import normalize_messages
from verifiers.environments.base import Environment
from verifiers.errors import DatasetError
from verifiers.rollouts.state import State, TrajectoryStep
from verifiers.runs.rollout import scored_rollout
from verifiers.runtime.calls import blocking
from verifiers.types import AssistantMessage, Messages, Response


def make_state(
    prompt: object,
    completion: object,
    answer: object = "",
    *,
    message_type: str = "chat",
    **keys: object,
) -> State:
    """The state of a finished rollout, not scored yet, with one step per assistant message.

    Text as ``prompt`` is one user message, text as ``completion`` one assistant message; with
    ``message_type="completion"`` both are kept as text. ``keys`` are set on the state; those that
    are none of its own keys count as columns of the row, which reward functions may ask for by
    name.

    >>> state = make_state("2 + 2?", "4", answer="4", difficulty="easy")
    >>> state["completion"], state["turn"], state["input"]["difficulty"]
    ([{'role': 'assistant', 'content': '4'}], 1, 'easy')
    """
    messages = normalize_messages(prompt, message_type)
    if message_type == "chat" and isinstance(completion, str):
        completion = AssistantMessage(completion)
    replies = normalize_messages(completion, message_type)
    fields = {
        "is_completed": True,
        "completion": replies,
        "trajectory": _steps(messages, replies),
        **keys,
    }
    return State(prompt=messages, answer=answer, **fields)


def _steps(prompt: Messages, completion: Messages) -> list[TrajectoryStep]:
    if isinstance(completion, str):
        return [TrajectoryStep(prompt, completion, Response(AssistantMessage(completion)))]
    steps: list[TrajectoryStep] = []
    for index, message in enumerate(completion):
        if message.role == "assistant":
            before = [*prompt, *completion[:index]]
            previous = steps[-1] if steps else None
            steps.append(TrajectoryStep(before, [message], Response(message), previous=previous))
    return steps


def run_rollout_sync(
    env: Environment, client: ClientLike, row: Mapping[str, object] | None = None
) -> State:
    """Generate and score one rollout and return its state; blocks, also under a running event loop.

    ``row``: a dataset row (``{"question": …, "answer": …}``); default: the first training row, else
    evaluation row. An error of the rollout is in ``state["error"]``. Raises ``DatasetError`` when
    there is no row, ``ConfigError`` for a judge that no reward function asks.
    """
    if not env.rubric.functions:
        env.rubric.check_needs()
    if row is None:
        table = env.train_table if env.train_table is not None else env.eval_table
        if not len(table):
            raise DatasetError("the environment has no rows; give row={'question': …, 'answer': …}")
        row = table[0].row
    work = functools.partial(
        scored_rollout, env, row, client, getattr(client, "model", None) or "scripted"
    )
    return blocking(work)
