"""One saved rollout again, with its saved replies and today's code: which of both changed?

    run = vf.load_results("outputs/evals/my-env--m/1f00c2a4")
    print(vf.testing.replay(env, run.rollout(3)))

No model is asked, so a breakpoint in the environment's code is reached after the same replies as
in the run. Sandboxes are opened and judges are asked as in an evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.data.messages import last_text, normalize_chat
from verifiers.environments.base import Environment
from verifiers.errors import ConfigError, ModelError
from verifiers.results.rows import RolloutOutput, json_ready, state_to_output
from verifiers.rollouts.state import State
from verifiers.rollouts.transcript import Transcript
from verifiers.rollouts.turn import Turn
from verifiers.runs.rescoring import raised
from verifiers.runs.rollout import scored_rollout
from verifiers.runtime.calls import blocking
from verifiers.testing.differences import Difference, first_difference
from verifiers.types import Message, ModelRequest, Response, ResponseTokens, Usage


@dataclass(frozen=True, slots=True)
class Replay:
    """What today's code made of the saved replies. ``difference``: None if it did the same."""

    state: State
    difference: Difference | None
    notes: tuple[str, ...] = ()
    """What could not be compared, a sentence each."""

    def to_json(self) -> dict[str, Any]:
        """The difference and the notes as JSON values."""
        difference = None if self.difference is None else self.difference.to_json()
        return {"difference": difference, "notes": list(self.notes)}

    def __str__(self) -> str:
        num_turns = len(self.state["trajectory"])
        turns = (
            "1 turn, its end and its"
            if num_turns == 1
            else f"{num_turns} turns, their end and their"
        )
        same = f"no difference in {turns} scores"
        return "\n".join([str(self.difference or same), *(f"note: {note}" for note in self.notes)])


class SavedReplies:
    """A ``Client`` that answers with the replies of a saved rollout.

    A request gets the reply to an equal prompt, else the next reply, so that agents whose calls
    come in another order get theirs. After the last reply it raises the saved error of the model,
    or a ``ModelError``.
    """

    def __init__(self, rollout: Mapping[str, Any]):
        self._turns: list[Turn] = Transcript(rollout["trajectory"]).turns
        self._prompts = [json_ready(turn.prompt) for turn in self._turns]
        self._unused = list(range(len(self._turns)))
        self._error = raised(rollout.get("error"))
        self.order: list[int] = []
        """The saved turn that answered each call, counted from 0."""
        self.num_refused = 0
        """Calls after the last reply that the saved rollout did not make."""

    async def complete(self, request: ModelRequest) -> Response:
        """A saved reply. *Raises* the model's saved error, ModelError after the last reply."""
        if not self._unused:
            if isinstance(self._error, ModelError):
                raise self._error
            self.num_refused += 1
            raise ModelError(
                f"the saved rollout has {len(self._turns)} replies, and the code asks for another"
            )
        prompt = json_ready(request.prompt)
        equal = (index for index in self._unused if self._prompts[index] == prompt)
        index = next(equal, self._unused[0])
        self._unused.remove(index)
        self.order.append(index)
        return _response(self._turns[index], request.model)

    async def aclose(self) -> None:
        """Nothing to close."""


def replay(
    env: Environment,
    rollout: RolloutOutput,
    *,
    model: str = "saved",
    sampling_args: Mapping[str, object] | None = None,
) -> Replay:
    """Run the saved replies of ``rollout`` through ``env``, and compare what happens with what was
    saved; blocks, also under a running event loop.

    The row is that of the environment's data today: of equal content, else of the same question,
    else of the same id; the saved row if there is none. ``model``, ``sampling_args``: as the code
    sees them in the state. *Raises* ConfigError for a rollout that was saved without its turns.

    >>> rows = [{"question": "1 + 1", "answer": "2"}]
    >>> def right(completion, answer): return float(completion[-1].content == answer)
    >>> def lenient(completion, answer): return float(answer in completion[-1].content)
    >>> env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([right]))
    >>> from verifiers.testing import ScriptedClient, replay
    >>> run = env.evaluate(ScriptedClient("It is 2"), "m", state_columns=["trajectory"])
    >>> print(replay(env, run.rollout(0)))
    no difference in 1 turn, its end and its scores
    >>> env.rubric = vf.Rubric([lenient])
    >>> replay(env, run.rollout(0)).difference.name
    'right'
    """
    return blocking(lambda: a_replay(env, rollout, model=model, sampling_args=sampling_args))


async def a_replay(
    env: Environment,
    rollout: RolloutOutput,
    *,
    model: str = "saved",
    sampling_args: Mapping[str, object] | None = None,
) -> Replay:
    """``replay`` as a coroutine."""
    if "trajectory" not in rollout:
        raise ConfigError(
            f"the rollout of example {rollout['example_id']} was saved without its turns, so its"
            " replies cannot be given again: save them with vf-eval -C trajectory"
            ' (state_columns=["trajectory"])'
        )
    row, note = _row_today(env, rollout)
    client, limits = SavedReplies(rollout), {"rollout_timeout_s": None}  # a breakpoint takes time
    state = await scored_rollout(env, row, client, model, sampling_args, **limits)
    now = state_to_output(state, ["trajectory"])
    turns = Transcript(now["trajectory"]).turns
    if len(turns) == len(client.order):  # calls of several agents come in any order
        order = sorted(range(len(turns)), key=client.order.__getitem__)
        now["trajectory"] = Transcript(turns[index] for index in order)
    measured = [function.name for function in env.for_row(row).monitor_rubric.functions]
    unscored = [name for name in measured if name.endswith("_time")]
    notes = [note] if note else []
    if env.rubric.has_group_rewards:
        names = [function.name for function in env.rubric.functions if function.is_group]
        unscored += [*names, "reward"]
        notes.append(
            f"{', '.join(names)} and the reward are not compared: they depend on the rollout's"
            " siblings, which are not run"
        )
    if not env.score_rollouts:
        unscored = [*(rollout.get("metrics") or ()), *now["metrics"], "reward"]
    num_asked = len(client.order) + client.num_refused
    difference = first_difference(
        rollout, now, num_asked=num_asked if client.num_refused else None, unscored=unscored
    )
    return Replay(state, difference, tuple(notes))


def _response(turn: Turn, model: str) -> Response:
    completion, tokens, usage = turn.completion, None, Usage()
    if isinstance(completion, str):
        message = Message(role="assistant", content=completion)
    else:
        replies = [message for message in completion if message.role == "assistant"]
        message = normalize_chat(json_ready(replies[-1:] or completion[-1:]))[0]
    if turn.has_tokens:
        tokens = ResponseTokens(
            turn.prompt_ids, turn.completion_ids, turn.sampler_logprobs, turn.version
        )
        usage = Usage(turn.num_prompt, len(turn.completion_ids))
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    reason = "length" if turn.is_truncated else reason
    return Response(message, reason, usage=usage, tokens=tokens, model=model)


def _row_today(
    env: Environment, rollout: Mapping[str, Any]
) -> tuple[Mapping[str, object], str | None]:
    """The row to run, and a sentence if it is not the saved one."""
    tables = [table for table in (env.eval_table, env.train_table) if table is not None]
    example_id = rollout["example_id"]
    of_id = [
        table.at([table.example_ids().index(example_id)])[0]
        for table in tables
        if example_id in table.example_ids()
    ]
    question = last_text(rollout["prompt"], "user")
    if digest := rollout.get("example_hash"):
        for example in of_id:
            if example.hash == digest:
                return example.row, None
        for table in tables:
            for index, digest_today in enumerate(table.hashes()):
                if digest_today == digest:
                    return table.at([index])[0].row, None
    for rows in (of_id, *tables):
        for example in rows:
            if last_text(example.row["prompt"], "user") == question:
                return example.row, None
    if of_id:
        return of_id[0].row, (
            f"the environment's data have no row with the saved question; today's example"
            f" {example_id} is another one, and was run"
        )
    saved = {name: rollout[name] for name in _ROW}
    return saved, "the environment's data no longer have this row; the saved row was run"


_ROW: Sequence[str] = ("prompt", "answer", "info", "task", "example_id")
"""The columns of a row that every rollout saves."""
