"""Score saved rollouts again with another rubric, as a new run that names its origin. The model is
not called.

The rollouts are those on disk: prompts, completions and answers are unchanged, and a rollout that
ended in an error keeps it. Metrics that the environment measures while it plays are kept as they
were. A judge of the new rubric is asked; its tokens are counted anew. Like every run it is saved as
it goes and resumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from verifiers import errors
from verifiers.data.examples import Example, Table
from verifiers.data.messages import last_text
from verifiers.errors import ConfigError, RolloutError, RunError
from verifiers.results import GenerateMetadata, GenerateOutputs, load_results
from verifiers.results.rows import DISK_FIELDS, FIELDS, RolloutOutput, content_hash, output_to_state
from verifiers.results.run_metadata import Measurements
from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rollouts.state import State
from verifiers.rollouts.transcript import UnsavedTurns
from verifiers.rollouts.values import Timing
from verifiers.runs.entry import check_before_run
from verifiers.runs.options import RunOptions
from verifiers.runs.plan import Job, Plan
from verifiers.runs.rollout import GenerateJob, RunContext, RunEnvironment, score
from verifiers.runs.run import Run
from verifiers.runs.store import RunStore
from verifiers.storage.directory import read_config
from verifiers.types import ModelRequest, Response

_POLICY_USAGE = ("input_tokens", "output_tokens", "final_input_tokens", "final_output_tokens")


class SavedModel:
    """Stands for the model of saved rollouts, which is not called again."""

    is_metered = True

    def __init__(self, base_url: str):
        self.base_url = base_url

    def identity(self) -> dict[str, Any]:
        """Nothing of it affects a score."""
        return {"class": type(self).__name__}

    async def complete(self, request: ModelRequest) -> Response:
        """*Raises* RunError."""
        raise RunError(
            f"a reward function called the evaluated model {request.model!r}, which is not there"
            " when saved rollouts are scored again; give it a client of its own (JudgeRubric)"
        )


async def rescore(
    env: RunEnvironment, path: str | Path, options: RunOptions | None = None
) -> GenerateOutputs:
    """Score the rollouts of the run (or results file) in ``path`` with the rubric of ``env``; a new
    run.

    ``options``: where it is saved, and how many rollouts are scored at a time. *Raises* ConfigError
    for a run without rollouts, and for reward functions with arguments that neither the rollouts
    nor the environment's rows have.
    """
    saved = load_results(path)
    if not len(saved):
        raise ConfigError(f"{path} has no rollouts to score", path=str(path))
    columns: dict[str, None] = {}
    for output in saved.outputs:
        fields = {*FIELDS, *DISK_FIELDS, *output["metrics"], "judge_response", "judge_replies"}
        columns |= dict.fromkeys(name for name in output if name not in fields)
    options = replace(
        options or RunOptions(),
        state_columns=tuple(columns),
        preflight=False,
        keep_states=False,
        abort_after=0,  # the saved errors are not faults of this run
        score_rollouts=True,
    )
    return await _Rescoring(env, saved, path, options).execute()


class _Rescoring(Run):
    """A run whose rollouts are read instead of generated."""

    def __init__(
        self, env: RunEnvironment, saved: GenerateOutputs, path: str | Path, options: RunOptions
    ):
        facts = saved.metadata
        groups: dict[str, list[RolloutOutput]] = {}
        for output in saved.outputs:
            groups.setdefault(output.get("example_hash") or content_hash(output), []).append(output)
        rows = _rows(env, groups)
        examples = [
            Example(group[0]["example_id"], key, row)
            for (key, group), row in zip(groups.items(), rows, strict=True)
        ]
        plan = Plan(examples, [len(group) for group in groups.values()])
        check_before_run(env, plan, options)
        client = SavedModel(facts.get("base_url") or "")
        super().__init__(
            env, plan, client, facts.get("model") or "", facts.get("sampling_args") or {}, options
        )
        self._saved = [output for group in groups.values() for output in group]
        stored = read_config(path)
        fingerprint = None if stored is None else stored["fingerprint"]
        self._origin = {
            "path": str(path),
            "fingerprint": fingerprint or facts.get("fingerprint"),
            "env_args": facts.get("env_args") or {},
            "date": facts.get("date"),
            "avg_reward": facts["avg_reward"],
            "num_rollouts": len(saved),
        }

    def config(self) -> dict[str, Any]:
        """As of a run of the environment, with the run that it scores, so that neither is taken for
        the other."""
        return {**super().config(), "rescored": self._origin["fingerprint"] or self._origin["path"]}

    def metadata(self, store: RunStore, measured: Measurements, status: str) -> GenerateMetadata:
        metadata = super().metadata(store, measured, status)
        metadata["origin"] = self._origin
        return metadata

    def generator(self, context: RunContext) -> AbstractAsyncContextManager[GenerateJob]:
        """Score the saved rollout of each job."""

        async def score_saved(env: RunEnvironment, job: Job, context: RunContext) -> State:
            saved = self._saved[job.position : job.position + job.num_branches]
            leaves = [_state_of(env, output, job.example.row, context) for output in saved]
            for leaf in leaves:
                await score(env, leaf, context)
            leaves[0].branches = tuple(leaves[1:])
            return leaves[0]

        return nullcontext(score_saved)


def _rows(
    env: RunEnvironment, groups: Mapping[str, Sequence[RolloutOutput]]
) -> Iterator[dict[str, Any]]:
    """The row of each example: its saved fields, and its other columns where the environment's data
    still have it."""
    columns = {name: dict(group[0]) for name, group in groups.items()}
    # of other authors' trajectories the answer is unknown
    questions = {
        last_text(output["prompt"], "user"): key
        for key, output in columns.items()
        if output["answer"] is None
    }
    more: dict[str, Mapping[str, object]] = {}
    try:
        if questions:
            raise ConfigError("the answers of some rollouts are unknown")
        env.rubric.check_arguments(set(next(iter(columns.values()))))
    except ConfigError:  # a reward function reads a column that is not saved
        tables: list[Table] = [
            table for table in (env.eval_table, env.train_table) if table is not None
        ]
        for example in chain.from_iterable(tables):
            key = example.hash
            if questions:
                key = questions.get(last_text(example.row["prompt"], "user"), key)
            if key in groups:
                more.setdefault(key, example.row)
    for key, output in columns.items():
        saved = {name: output[name] for name in ("prompt", "answer", "info", "task", "example_id")}
        if output["answer"] is None and key in more:
            saved = {name: saved[name] for name in ("prompt", "example_id")}
        elif output["answer"] is None:
            _check_needs_no_answer(env, output)
        yield {**more.get(key, {}), **saved}


def _check_needs_no_answer(env: RunEnvironment, output: Mapping[str, Any]) -> None:
    """*Raises* ConfigError for a reward function that would score against an unknown answer."""
    readers = [f.name for f in env.rubric.functions if {"answer", "answers"} & {*f.required}]
    if readers:
        question = (last_text(output["prompt"], "user") or "")[:80]
        raise ConfigError(
            f"{readers[0]!r} reads the answer, which the rollouts of example"
            f" {output['example_id']} have not, and no row of the environment asks {question!r}:"
            " add one, or take a rubric without it",
            function=readers[0],
        )


def _state_of(
    env: RunEnvironment, output: RolloutOutput, row: Mapping[str, object], context: RunContext
) -> State:
    """The finished, unscored state of a saved rollout."""
    measured = {function.name for function in env.for_row(row).monitor_rubric.functions}
    state = output_to_state(output)
    if "trajectory" not in output:
        state.record.transcript = UnsavedTurns()
    unknown = ("answer", "info", "task") if output["answer"] is None else ()
    state["input"].update(
        (name, value) for name, value in row.items() if name not in output or name in unknown
    )
    state.run, state["model"], state["sampling_args"] = (
        context,
        context.model,
        dict(context.sampling_args),
    )
    state["client"] = context.client
    state["metrics"] = {
        name: value for name, value in output["metrics"].items() if name in measured
    }
    state["reward"] = state["advantage"] = None
    state["judge_response"] = {}
    state["usage"] = {
        name: n for name, n in (output["token_usage"] or {}).items() if name in _POLICY_USAGE
    }
    state["timing"] = Timing(**{**(output["timing"] or {}), "scoring_ms": 0.0})
    state["error"] = raised(output["error"])
    for turn in state.record.transcript.turns:
        turn.rollout_reward = turn.advantage = None
    return state


def raised(info: ErrorInfo | None) -> RolloutError | None:
    """The error of a saved rollout as it was raised; None for an error of its scoring."""
    if info is None or info.is_scoring_error:
        return None
    kind = getattr(errors, str(info.get("error")), RolloutError)
    is_known = isinstance(kind, type) and issubclass(kind, RolloutError)
    error: RolloutError = (kind if is_known else RolloutError)(info.get("message") or "")
    error.recorded = dict(info)  # type: ignore[attr-defined]  # read by ``rows.ErrorInfo.of``
    return error
