"""The results of a run: ``GenerateOutputs``, the saved rollouts in it, statistics of them all, and export to files.

``results["rewards"]``, ``results["reward"]`` and ``results.reward`` are one list; ``prompts, completions, rewards =
results`` works; ``results.outputs`` are the rollouts themselves, in the order of their examples, siblings together.

A saved rollout (``RolloutOutput``) is plain data that pickles and encodes as JSON. Unknown numbers are NaN in memory
and null on disk; ``error`` is an ``ErrorInfo`` without secrets; metrics are stored under ``metrics`` and at the top
level, unless a field has that name.

``GenerateMetadata`` describes the whole run: statistics of the rollouts and facts from the runner. Means skip unknown
values. A rollout *error* is a failure of the rollout itself; a rollout without an error whose reward is unknown is
*unscored*.

In a dataset or a Parquet file, a column whose values do not fit one Arrow type is written as JSON text, never dropped.
``storage.journal`` writes the file of a run; ``loading`` reads results.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import numpy as np

from verifiers import compat
from verifiers.clients.protocol import PRICE_FIELDS
from verifiers.data.messages import normalize_messages
from verifiers.errors import ConfigError, JournalError, ScoringError, UsageError
from verifiers.results.agreement import THRESHOLD, Agreement, agreement, label_of
from verifiers.results.comparison import DETECT, Comparison, Measured, compare_runs
from verifiers.results.notebook import results_html
from verifiers.results.statistics import clustered_stderr, known_sum, mean, pass_rates, percentiles, solved
from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rollouts.rollout import Rollout, number, times_of, transcript_of
from verifiers.rollouts.state import State
from verifiers.rollouts.transcript import Transcript
from verifiers.rollouts.views import plain
from verifiers.rubrics.advantages import centered_advantages
from verifiers.rubrics.rubric import SUCCESS
from verifiers.runtime.calls import Finished
from verifiers.runtime.json import canonical_json, decode_row, encode_row
from verifiers.runtime.redaction import redacted_column
from verifiers.runtime.suggest import check_keywords
from verifiers.storage.directory import METADATA_NAME, RESULTS_NAME
from verifiers.storage.files import atomic_write
from verifiers.storage.identity import rollout_key
from verifiers.storage.journal import Journal
from verifiers.types import AttributeDict

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = {
    "prompts": "prompt",
    "completions": "completion",
    "rewards": "reward",
    "states": "state",
    "answers": "answer",
    "infos": "info",
    "tasks": "task",
    "example_ids": "example_id",
    "errors": "error",
    "stop_conditions": "stop_condition",
    "is_truncated": "is_truncated",
    "advantages": "advantage",
    "timings": "timing",
    "is_completed": "is_completed",
    "token_usages": "token_usage",
}
"""Column name -> field of a rollout; both names read the column."""
_BY_FIELD = {field: column for column, field in COLUMNS.items()}

FIELDS = (
    "example_id prompt completion answer task info reward advantage metrics error is_completed is_truncated "
    "stop_condition timing token_usage tool_defs"
).split()
DISK_FIELDS = ("rollout_key", "example_hash", "sibling", "attempts")
DATASET_COLUMNS = "example_id prompt completion answer task info reward average_reward metrics error".split()
RENAMED_METRICS = compat.METRICS
"""Metric names of older versions, on reading."""

MAX_CAUSE_CHARS = 120
"""Longest message of an error in the numbers of a run."""
BATCH_SIZE = 2_000
"""Rollouts that are in memory while a Parquet file is written."""


class GenerateOutputs(Finished):
    """The results of a run. Columns are plain lists, one item per rollout; unknown rewards are NaN.

    Args:
        outputs: The saved rollouts, one dict each.
        metadata: Statistics and settings of the run; None computes the statistics.
        states: The states of the rollouts, where they were kept in memory.

    >>> from verifiers.testing import ScriptedClient
    >>> results = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}]).evaluate(ScriptedClient("2"), "m")
    >>> prompts, completions, rewards = results
    >>> rewards == results["rewards"] == results.reward, len(results), results.metadata.model
    (True, 1, 'm')
    """

    if TYPE_CHECKING:  # the columns, by the names of COLUMNS and of the fields they list
        prompts: list[Any]
        prompt: list[Any]
        completions: list[Any]
        completion: list[Any]
        rewards: list[float]
        reward: list[float]
        states: list[State]
        state: list[State]
        answers: list[Any]
        answer: list[Any]
        infos: list[dict[str, Any]]
        info: list[dict[str, Any]]
        tasks: list[str]
        task: list[str]
        example_ids: list[Any]
        example_id: list[Any]
        errors: list[ErrorInfo | None]
        error: list[ErrorInfo | None]
        stop_conditions: list[str | None]
        stop_condition: list[str | None]
        is_truncated: list[bool]
        is_completed: list[bool]
        advantages: list[float]
        advantage: list[float]
        timings: list[dict[str, float]]
        timing: list[dict[str, float]]
        token_usages: list[dict[str, int] | None]
        token_usage: list[dict[str, int] | None]
        metrics: dict[str, list[float]]

    def __init__(
        self,
        outputs: Sequence[RolloutOutput] | None = None,
        metadata: GenerateMetadata | None = None,
        states: Sequence[State] | None = None,
        **columns: object,
    ):
        if outputs is None or columns:  # an older form: prompt=[…], completion=[…], …
            outputs, metadata, states = compat.load(compat.RESULTS_OF_COLUMNS)(outputs, metadata, states, columns)
        self.outputs: list[RolloutOutput] = list(outputs)
        self.metadata = GenerateMetadata.of(self.outputs) if metadata is None else metadata
        self._states = None if states is None else list(states)
        self._columns: dict[str, Any] = {}

    @overload
    def __getitem__(self, name: Literal["rewards", "reward", "advantages", "advantage"]) -> list[float]: ...
    @overload
    def __getitem__(self, name: Literal["states", "state"]) -> list[State]: ...
    @overload
    def __getitem__(self, name: Literal["metrics"]) -> dict[str, list[float]]: ...
    @overload
    def __getitem__(self, name: Literal["outputs"]) -> list[RolloutOutput]: ...
    @overload
    def __getitem__(self, name: Literal["metadata"]) -> GenerateMetadata: ...
    @overload
    def __getitem__(self, name: str) -> Any: ...
    def __getitem__(self, name: str) -> Any:
        if name in ("outputs", "metadata"):
            return getattr(self, name)
        column = _BY_FIELD.get(name, name)
        if column not in self._columns:
            self._columns[column] = self._make_column(column)
        return self._columns[column]

    if not TYPE_CHECKING:  # hidden, so that a type checker sees a misspelt column

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_") and (name in COLUMNS or name in _BY_FIELD or name == "metrics"):
                return self[name]
            raise AttributeError(f"results have no {name!r}; columns are {', '.join(COLUMNS)}, metrics")

    def __iter__(self) -> Iterator[Any]:
        """Prompts, completions, rewards: for ``prompts, completions, rewards = results``."""
        return iter((self["prompts"], self["completions"], self["rewards"]))

    def __len__(self) -> int:
        return len(self.outputs)

    def __contains__(self, name: object) -> bool:
        return name in ("outputs", "metadata") or (isinstance(name, str) and _BY_FIELD.get(name, name) in self.keys())

    def __repr__(self) -> str:
        return f"<GenerateOutputs of {len(self)} rollouts, mean reward {self.metadata['avg_reward']:.4g}>"

    def _repr_html_(self) -> str:
        """What a notebook shows of the results."""
        return results_html(self.summary(), self.outputs)

    def get(self, name: str, default: object = None) -> Any:
        return self[name] if name in self else default

    def keys(self) -> list[str]:
        """Names of the columns: with ``states`` only when states are available, and with the state columns."""
        extra = [n for n in self.metadata.get("state_columns") or () if n not in COLUMNS and n not in _BY_FIELD]
        return [name for name in COLUMNS if name != "states" or self._has_states()] + ["metrics", *extra]

    def items(self) -> list[tuple[str, Any]]:
        return [(name, self[name]) for name in self.keys()]

    def values(self) -> list[Any]:
        return [self[name] for name in self.keys()]

    def summary(self) -> dict[str, Any]:
        """The numbers of the run as JSON values, unknown ones None; latency is in milliseconds.

        Beside the fields of the metadata: ``usage`` (the sums over the rollouts), ``path``, ``seconds``, ``errors``
        (class -> count), ``error_causes`` (class, message and line -> count), ``unscored`` ("cause in function" ->
        count) and ``latency``.
        """
        names = (
            "env_id model base_url num_examples rollouts_per_example num_rollouts num_errors num_unscored avg_reward "
            "reward_stderr success_metric avg_success success_stderr avg_metrics avg_error pass_at_k "
            "pass_at_k_interval pass_all_k pass_threshold stop_conditions usage cost_usd "
            "resumed env_args sampling_args status stopped spent"
        ).split()
        facts, measured = {name: self.metadata.get(name) for name in names}, self.measurements()
        numbers: dict[str, Any] = json_ready(
            facts
            | {
                "path": self.metadata.get("path_to_save"),
                "usage": total_usage(measured),
                "seconds": self.metadata.get("time"),
                "errors": errors_by_cause(measured),
                "error_causes": error_causes(self._failures()),
                "unscored": unscored_by_function(measured),
                "latency": latency(measured),
            }
        )
        return numbers

    def filter(self, keep: Callable[[RolloutOutput], object]) -> GenerateOutputs:
        """The rollouts for which ``keep(rollout)`` holds, as results; their statistics are computed anew.

        >>> from verifiers.testing import ScriptedClient
        >>> rows = [{"question": "1 + 1", "answer": "2"}, {"question": "1 + 2", "answer": "3"}]
        >>> env = vf.SingleTurnEnv(
        ...     dataset=rows, rubric=vf.Rubric([lambda completion, answer: completion[-1].content == answer])
        ... )
        >>> results = env.evaluate(ScriptedClient("2"), "m")
        >>> wrong = results.filter(lambda rollout: rollout["reward"] < 1)
        >>> len(wrong), wrong.metadata.avg_reward, wrong.rollout(1).answer
        (1, 0.0, '3')
        """
        indices = [index for index, output in enumerate(self.outputs) if keep(output)]
        outputs = [self.outputs[index] for index in indices]
        facts = {name: value for name, value in self.metadata.items() if name in FACTS}
        states = None if self._states is None else [self._states[index] for index in indices]
        return GenerateOutputs(outputs, GenerateMetadata.of(outputs, **facts), states)

    def rollout(self, example_id: object, sibling: int = 0) -> RolloutOutput:
        """One rollout of an example; ``sibling`` counts its rollouts from 0.

        *Raises* KeyError for an example without rollouts, IndexError for a sibling that it does not have.
        """
        siblings = [place for place, each in enumerate(self["example_ids"]) if each == example_id]
        if not siblings:
            raise KeyError(f"results have no example {example_id!r}; their ids are in results['example_ids']")
        if not 0 <= sibling < len(siblings):
            raise IndexError(
                f"example {example_id!r} has {len(siblings)} rollouts: sibling is 0 to {len(siblings) - 1}"
            )
        return self.at(siblings[sibling])

    def compare(
        self,
        *others: GenerateOutputs,
        metrics: Sequence[str] = ("reward",),
        detect: float = DETECT,
        anyway: bool = False,
    ) -> Comparison:
        """Compare other results with these, example by example; see ``comparison.compare_runs``.

        *Raises* ConfigError for a metric that none of them has.

        >>> from verifiers.testing import ScriptedClient
        >>> def right(completion, answer): return float(completion[-1].content == answer)
        >>> rows = [{"question": str(n), "answer": "2"} for n in range(8)]
        >>> env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([right]))
        >>> before, after = (env.evaluate(ScriptedClient(text), "m", num_examples=-1) for text in "12")
        >>> found = before.compare(after).differences[0]
        >>> found.difference, found.won, found.verdict, round(found.p, 4)
        (1.0, 8, 'better', 0.0078)
        """
        named = [(f"run {number}", results, None) for number, results in enumerate((self, *others), 1)]
        return compare_runs(measured(named), metrics, detect=detect, anyway=anyway)

    def agreement(self, labels: str, metric: str = "reward", threshold: float = THRESHOLD) -> Agreement:
        """Compare a judge's metric with the labels in a column, ``human`` or ``info.human``; see ``agreement``.

        *Raises* ConfigError for a metric that the results lack, and when no rollout has a label.

        >>> from verifiers.testing import ScriptedClient
        >>> rows = [{"question": str(n), "info": {"human": n < 6}} for n in range(12)]
        >>> env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([lambda prompt: float(prompt[-1].content < "7")]))
        >>> found = env.evaluate(ScriptedClient("x"), "m", num_examples=-1).agreement("info.human")
        >>> found.num_labelled, round(found.kappa, 2), found.false_yes, round(found.corrected_mean, 2)
        (12, 0.5, 3, 0.5)
        """
        if metric != "reward" and metric not in self["metrics"]:
            raise ConfigError(f"no rollout has the metric {metric!r}; there are reward, {', '.join(self['metrics'])}")
        return agreement(
            self["rewards"] if metric == "reward" else self["metrics"][metric],
            [label_of(output, labels) for output in self.outputs],
            [example_key(output) for output in self.outputs],
            metric=metric,
            column=labels,
            threshold=threshold,
        )

    def to_dataset(self) -> Any:
        """The rollouts as a ``datasets.Dataset``; unknown numbers are null."""
        return rows_to_dataset(self.outputs)

    def to_arrow(self) -> Any:
        """The rollouts as a ``pyarrow.Table``, one row per rollout; unknown numbers are null."""
        return self.to_dataset().data.table

    def to_pandas(self) -> Any:
        """The rollouts as a ``pandas.DataFrame``, one row per rollout; unknown numbers are NaN."""
        return self.to_dataset().to_pandas()

    def to_polars(self) -> Any:
        """The rollouts as a ``polars.DataFrame``, one row per rollout; unknown numbers are null.

        *Raises* ConfigError where polars is not installed.
        """
        try:
            import polars
        except ModuleNotFoundError as error:
            raise ConfigError("to_polars needs polars, which is not installed: pip install polars") from error
        return polars.from_arrow(self.to_arrow())

    def save(self, path: str | Path) -> None:
        """Write a run directory, or one ``.jsonl`` or ``.parquet`` file. *Raises* ConfigError for a used directory."""
        save(self.rollouts, self.metadata, path)

    def known_states(self) -> list[State] | None:
        """The states that were kept, or that the saved trajectories give; None without either."""
        return self._all_states() if self.outputs and self._has_states() else None

    def at(self, place: int) -> RolloutOutput:
        """The rollout at an index of the columns."""
        return self.outputs[place]

    def rollouts(self) -> Iterator[RolloutOutput]:
        """Each rollout in order; of a large saved run, one at a time is in memory.

        >>> from verifiers.testing import ScriptedClient
        >>> results = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}]).evaluate(ScriptedClient("2"), "m")
        >>> [rollout.completion[-1]["content"] for rollout in results.rollouts()]
        ['2']
        """
        return iter(self.outputs)

    def measurements(self) -> Measurements:
        """What the statistics are computed from."""
        return Measurements.of(self.outputs)

    def _failures(self) -> Iterable[ErrorInfo]:
        """The errors of the rollouts that have one."""
        return (error for error in self["errors"] if error is not None)

    def _has_states(self) -> bool:
        return self._states is not None or (bool(self.outputs) and all("trajectory" in o for o in self.outputs))

    def _make_column(self, column: str) -> Any:
        if column == "states":
            return self._all_states()
        if column == "metrics":
            names = dict.fromkeys(name for output in self.outputs for name in output["metrics"])
            return {name: [o["metrics"].get(name, math.nan) for o in self.outputs] for name in names}
        field = COLUMNS.get(column, column)
        if column not in COLUMNS and not any(field in output for output in self.outputs):
            raise KeyError(f"results have no column {column!r}; they have {', '.join(self.keys())}")
        return [output.get(field) for output in self.outputs]

    def _all_states(self) -> list[State]:
        if self._states is not None:
            return self._states
        if self.outputs and not self._has_states():
            raise UsageError(
                'states are not available; run with keep_states=True, or save them with state_columns=["trajectory"]'
            )
        return [output_to_state(output) for output in self.outputs]


def measured(runs: Sequence[tuple[str, GenerateOutputs, Mapping[str, Any] | None]]) -> list[Measured]:
    """Runs as ``comparison`` needs them, from (name, results, configuration or None).

    Examples are matched by the hashes of their rows; where one of the runs has none, by prompt, answer, task and info.
    """
    has_hashes = all(output.get("example_hash") for _, results, _ in runs for output in results.outputs)
    found = []
    for name, results, config in runs:
        values: dict[str, dict[Any, list[float]]] = {"reward": {}}
        for output in results.outputs:
            key = output["example_hash"] if has_hashes else content_hash(output)
            for metric, value in ({**output["metrics"], "reward": output["reward"]}).items():
                values.setdefault(metric, {}).setdefault(key, []).append(value)
        facts = results.metadata
        known_config = {key: facts.get(key) for key in ("env_args", "env_version")} if config is None else config
        found.append(
            Measured(name, facts.get("env_id") or "", values, facts.get("model") or "", known_config, facts["status"])
        )
    return found


def fill_advantages(outputs: Sequence[RolloutOutput]) -> None:
    """Set the advantages of every group that has none: reward minus group mean.

    In a group that has some, missing advantages become NaN: those rewards are unknown.
    """
    if all([output["advantage"] is not None and "trajectory" not in output for output in outputs]):
        return
    groups: dict[Any, list[RolloutOutput]] = {}
    for output in outputs:
        groups.setdefault(example_key(output), []).append(output)
    for group in groups.values():
        advantages = [output["advantage"] for output in group]
        if None in advantages:
            if advantages.count(None) == len(group):
                advantages = centered_advantages([output["reward"] for output in group])
            else:
                advantages = [math.nan if advantage is None else advantage for advantage in advantages]
        for output, advantage in zip(group, advantages, strict=True):
            set_advantage(output, advantage)


def set_advantage(output: RolloutOutput, advantage: float | None) -> None:
    """Set the advantage of a rollout, and of those of its turns that have none of their own."""
    output["advantage"] = advantage
    for step in output.get("trajectory") or ():
        if step["advantage"] is None:
            step["advantage"] = advantage


# --- saved rollouts --------------------------------------------------------------------------------------------------


class RolloutInput(TypedDict, total=False):
    """A dataset row as the input of a rollout; further columns are allowed.

    >>> row: vf.RolloutInput = {"prompt": [vf.UserMessage("2 + 2")], "answer": "4", "info": {"level": 1}}
    """

    prompt: Any
    answer: Any
    task: str
    info: dict[str, Any]
    example_id: int


class RolloutOutput(AttributeDict):
    """One finished rollout: the fields ``FIELDS``, each metric by name, and the requested state columns.

    >>> from verifiers.testing import ScriptedClient
    >>> row = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}]).evaluate(ScriptedClient("2"), "m").outputs[0]
    >>> row["completion"], row.stop_condition, row.error
    ([{'role': 'assistant', 'content': '2'}], 'max_turns_reached', None)
    """

    if TYPE_CHECKING:
        example_id: Any
        prompt: Any
        completion: Any
        answer: Any
        task: str
        info: dict[str, Any]
        reward: float
        advantage: float | None
        metrics: dict[str, float]
        error: ErrorInfo | None
        is_completed: bool
        is_truncated: bool
        stop_condition: str | None
        timing: dict[str, float]
        token_usage: dict[str, int] | None
        tool_defs: list[Any] | None


def state_to_output(state: State, state_columns: Sequence[str] | None = None) -> RolloutOutput:
    """Convert a finished state. A state column ``trajectory`` contains the steps without provider objects."""
    output = RolloutOutput(state.record.fields())
    for name in (*(state_columns or ()), *state.saved_columns):
        if name == "trajectory":
            output[name] = state.record.transcript.without_provider_objects()
        elif name not in output:
            output[name] = redacted_column(json_ready(plain(state.get(name))))
    return _with_flat_metrics(output)


def row_for_disk(output: Mapping[str, Any], example_hash: str, sibling: int, attempts: int = 1) -> dict[str, Any]:
    """The rollout in the journal's format: with its key, and each message and token id of the trajectory once."""
    row = {**output}
    if row.get("trajectory"):
        row["trajectory"] = Transcript(row["trajectory"]).to_json()
    row["rollout_key"] = rollout_key(example_hash, sibling)
    row.update(example_hash=example_hash, sibling=sibling, attempts=attempts)
    return row


def row_from_disk(row: Mapping[str, Any], metric_names: Sequence[str] = ()) -> RolloutOutput:
    """Read a saved rollout, also of older versions, whose metrics are only at the top level (``metric_names``).

    ``advantage`` stays None where it is null: unknown or not computed yet, which only the whole group shows.

    *Raises* KeyError for a row without prompt, completion and reward: of something else.
    """
    if row.keys().isdisjoint(("prompt", "completion", "reward")):
        raise KeyError("prompt, completion or reward")
    output = RolloutOutput(dict.fromkeys(FIELDS) | dict(row))
    metrics = row.get("metrics")
    if not isinstance(metrics, Mapping):
        metrics = {name: row[name] for name in metric_names if name in row}
    renamed = {} if "rollout_key" in row else RENAMED_METRICS
    output["metrics"] = {renamed.get(name, name): number(value) for name, value in metrics.items()}
    for old in renamed:
        output.pop(old, None)
    for name in metrics:
        if name not in FIELDS:
            output.pop(name, None)
    output["reward"] = number(row.get("reward"))
    for name in ("prompt", "completion"):
        if isinstance(output[name], list):
            output[name] = normalize_messages(output[name])
    if output["error"] is not None:
        output["error"] = ErrorInfo.of(output["error"])
    timing = output["timing"]
    if not timing or not timing.keys().isdisjoint(compat.TIMES):
        timing = compat.load(compat.FLAT_TIMING)(row)
    output["timing"] = times_of(timing)
    output["info"] = {} if output["info"] is None else output["info"]
    if isinstance(output.get("trajectory"), list):
        output["trajectory"] = transcript_of(output)
    return _with_flat_metrics(output)


def saved_row(row: Mapping[str, Any], place: str, metric_names: Sequence[str] = ()) -> RolloutOutput:
    """As ``row_from_disk``. *Raises* JournalError that names ``place``, ``file:line``, for a row of another shape."""
    try:
        return row_from_disk(row, metric_names)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise JournalError(
            f"{place}: this line is not a saved rollout ({type(error).__name__}: {error}); restore the file or remove "
            "the line"
        ) from error


def output_to_state(output: Mapping[str, Any]) -> State:
    """Convert a saved rollout to a state, for code that scores or tokenises it."""
    state = State.of(Rollout.from_json(output))
    known = {*FIELDS, *DISK_FIELDS, *output["metrics"], "trajectory"}
    state.update((name, value) for name, value in output.items() if name not in known)
    return state


def example_key(output: Mapping[str, Any]) -> Any:
    """The key that siblings share: the hash of their example if stored, else its id."""
    return output.get("example_hash") or output["example_id"]


def json_ready(value: object) -> Any:
    """A copy in plain JSON types; NaN becomes None, and unsupported values the journal's marker."""
    return decode_row(encode_row({"value": value}))["value"]


def _with_flat_metrics(output: RolloutOutput) -> RolloutOutput:
    for name, value in output["metrics"].items():
        output.setdefault(name, value)
    return output


# --- statistics of a whole run ---------------------------------------------------------------------------------------


FACTS: dict[str, Any] = {
    "env_id": "",
    "env_args": {},
    "env_version": "",
    "model": "",
    "base_url": "",
    "sampling_args": {},
    "date": "",
    "time": 0.0,
    "success_metric": None,
    "pass_threshold": None,
    "state_columns": [],
    "path_to_save": None,
    "tools": None,
    "version_info": {"vf_version": None, "vf_commit": None, "env_version": None, "env_commit": None},
    "fingerprint": None,
    "status": "complete",
    "seed": None,
    "resumed": 0,
    "outside_plan": [],
    "changed_code": [],
    "served_models": {},
    "local_model": None,
    "prices": None,
    "stopped": None,
    "spent": None,
    "origin": None,
    "cached": None,
}
"""Facts that are not computed from the rollouts, with defaults. ``time`` is in seconds; ``date`` is ISO 8601;
``success_metric``: the function whose value, 0 or 1, says whether a rollout solved its task; ``pass_threshold``: where
none is named, the reward that does; ``local_model``: ``name sampling`` of a model in this process, of a quantised file
also ``file sha256 quantisation``;
``outside_plan``: keys of saved rollouts outside the plan, which are not counted; ``changed_code``: files and functions
that were changed between two sessions of the run; ``served_models``: names under which the server answered, each with
its number of rollouts, where it is not the requested name alone; ``prices``: see ``clients.protocol.prices_of``;
``stopped``: ``low high num_examples against`` of the interval that ended the run before its plan; ``spent``: ``usd
tokens requests lost max_cost_usd max_total_tokens`` of a run with a limit, over all its sessions; ``origin``: ``path
fingerprint env_args date avg_reward num_rollouts`` of the run whose rollouts were scored again; ``cached``: ``folder
hits misses`` of the last call with a cache."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """What the statistics need of the rollouts, as columns with one item for each; unknown numbers are NaN."""

    rewards: Sequence[float]
    examples: Sequence[Any] | np.ndarray
    """What siblings share: see ``example_key``."""
    metrics: Mapping[str, Sequence[float]]
    errors: Sequence[str | None]
    """Class of the error, of the rollout or of its scoring."""
    causes: Sequence[str | None]
    """Innermost exception of an error, and where it was raised."""
    stop_conditions: Sequence[str | None]
    usage: Mapping[str, Sequence[float]]
    total_ms: Sequence[float]

    @classmethod
    def of(cls, outputs: Sequence[Mapping[str, Any]]) -> Measurements:
        """The columns of rollouts in memory."""
        metrics = [output["metrics"] for output in outputs]
        errors = [output["error"] for output in outputs]
        usages = [output["token_usage"] or {} for output in outputs]
        return cls(
            rewards=[output["reward"] for output in outputs],
            examples=[example_key(output) for output in outputs],
            metrics={n: [m.get(n, math.nan) for m in metrics] for n in _names_in(metrics)},
            errors=[None if error is None else error.get("error") or "unknown" for error in errors],
            causes=[None if error is None else f"{error.cause} in {error.get('where')}" for error in errors],
            stop_conditions=[output["stop_condition"] for output in outputs],
            usage={n: [u.get(n, math.nan) for u in usages] for n in _names_in(usages)},
            total_ms=[(output["timing"] or {}).get("total_ms", math.nan) for output in outputs],
        )

    def __len__(self) -> int:
        return len(self.rewards)


def _names_in(mappings: Iterable[Mapping[str, Any]]) -> dict[str, None]:
    """The keys of all, in order of appearance."""
    return dict.fromkeys(itertools.chain.from_iterable(mappings))


class GenerateMetadata(AttributeDict):
    """The facts and the statistics of a run: ``num_rollouts num_errors num_unscored avg_reward reward_stderr
    avg_success success_stderr avg_metrics avg_error stop_conditions pass_at_k pass_at_k_interval pass_all_k usage
    cost_usd``. ``time_ms``: ``time`` in milliseconds.

    ``avg_success`` is the share of solved rollouts, NaN where nothing says what solved means: a graded reward, and
    neither a success metric nor a ``pass_threshold``; pass@k is empty then. Intervals are 95 %, over the examples.

    >>> from verifiers.testing import ScriptedClient
    >>> env = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}], rubric=vf.Rubric([lambda completion: 0.0]))
    >>> metadata = env.evaluate(ScriptedClient("2"), "m", rollouts_per_example=4).metadata
    >>> metadata.num_rollouts, metadata["num_errors"], metadata.pass_at_k
    (4, 0, {'1': 0.0, '2': 0.0, '4': 0.0})
    """

    if TYPE_CHECKING:
        env_id: str
        env_args: dict[str, Any]
        env_version: str
        model: str
        base_url: str
        sampling_args: dict[str, Any]
        date: str
        time: float
        time_ms: float
        success_metric: str | None
        pass_threshold: float | None
        state_columns: list[str]
        path_to_save: Path | None
        tools: list[Any] | None
        version_info: dict[str, str | None]
        fingerprint: str | None
        status: str
        seed: int | None
        resumed: int
        outside_plan: list[str]
        changed_code: list[str]
        served_models: dict[str, int]
        local_model: dict[str, Any] | None
        prices: dict[str, float] | None
        stopped: dict[str, Any] | None
        spent: dict[str, Any] | None
        origin: dict[str, Any] | None
        cached: dict[str, Any] | None
        num_examples: int
        rollouts_per_example: int
        num_rollouts: int
        num_errors: int
        num_unscored: int
        avg_reward: float
        reward_stderr: float
        avg_success: float
        success_stderr: float
        avg_metrics: dict[str, float]
        avg_error: float
        stop_conditions: dict[str, int]
        pass_at_k: dict[str, float]
        pass_at_k_interval: dict[str, tuple[float, float]]
        pass_all_k: dict[str, float]
        usage: dict[str, float]
        cost_usd: float | None

    @classmethod
    def of(cls, rollouts: Sequence[RolloutOutput] | Measurements, **facts: object) -> GenerateMetadata:
        """Compute the metadata. ``num_examples`` and ``rollouts_per_example`` are counted unless given.

        *Raises* TypeError for an unknown fact.
        """
        measured = rollouts if isinstance(rollouts, Measurements) else Measurements.of(rollouts)
        plan_sizes = {name: facts.pop(name, None) for name in ("num_examples", "rollouts_per_example")}
        if unknown := facts.keys() - FACTS.keys():
            raise TypeError(f"metadata has no field {sorted(unknown)[0]!r}")
        metadata = cls(FACTS | facts)
        if metadata["path_to_save"] is not None:
            metadata["path_to_save"] = Path(metadata["path_to_save"])
        metadata["time_ms"] = metadata["time"] * 1000
        counts = Counter(measured.examples) if None in plan_sizes.values() else Counter()
        metadata["num_examples"] = len(counts) if plan_sizes["num_examples"] is None else plan_sizes["num_examples"]
        siblings = plan_sizes["rollouts_per_example"]
        metadata["rollouts_per_example"] = max(counts.values(), default=1) if siblings is None else siblings
        metadata.update(_statistics(measured, metadata["rollouts_per_example"], metadata["pass_threshold"]))
        metadata["cost_usd"] = cost_usd(metadata["prices"], measured)
        return metadata


def successes(outputs: Sequence[Mapping[str, Any]], threshold: float | None = None) -> list[float]:
    """Whether each rollout solved its task: 1, 0, or NaN where that is unknown.

    It is the metric ``success``; without one whether the reward reaches ``threshold``, or the reward itself where no
    threshold is given. All are NaN when one of them is neither 0 nor 1: a graded reward does not say what solved means.

    >>> graded = [{"reward": 0.7, "metrics": {}}, {"reward": 1.0, "metrics": {}}]
    >>> successes(graded), successes(graded, 0.5)
    ([nan, nan], [1.0, 1.0])
    """
    measured = [output["metrics"].get(SUCCESS, math.nan) for output in outputs]
    return list(solved([output["reward"] for output in outputs], measured, threshold).tolist())


def _statistics(measured: Measurements, siblings: int, threshold: float | None) -> dict[str, Any]:
    rewards, examples = measured.rewards, measured.examples
    num_failed = sum(count for error, count in Counter(measured.errors).items() if _is_of_rollout(error))
    unscored = (error for reward, error in zip(rewards, measured.errors, strict=True) if reward != reward)
    successes = solved(rewards, measured.metrics.get(SUCCESS), threshold)
    passed = pass_rates(successes, examples, siblings)
    return {
        "num_rollouts": len(measured),
        "num_errors": num_failed,
        "num_unscored": sum(not _is_of_rollout(error) for error in unscored),
        "avg_reward": mean(rewards),
        "reward_stderr": clustered_stderr(rewards, examples),
        "avg_success": mean(successes),
        "success_stderr": clustered_stderr(successes, examples),
        "avg_metrics": {name: mean(values) for name, values in measured.metrics.items()},
        "avg_error": num_failed / len(measured) if len(measured) else 0.0,
        "stop_conditions": {str(stop): count for stop, count in Counter(measured.stop_conditions).items() if stop},
        "pass_at_k": passed.any_of,
        "pass_at_k_interval": passed.any_of_interval,
        "pass_all_k": passed.all_of,
        "usage": _mean_usage(measured),
    }


def _is_of_rollout(error: str | None) -> bool:
    """Whether an error of this class is of the rollout itself, not only of a reward function."""
    return error is not None and error != ScoringError.__name__


def errors_by_cause(measured: Measurements) -> dict[str, int]:
    """Class of the rollout error -> count, the most frequent first."""
    return dict(Counter(error for error in measured.errors if error and _is_of_rollout(error)).most_common())


def error_causes(errors: Iterable[ErrorInfo]) -> dict[str, int]:
    """``"EnvironmentFault: env_response raised KeyError: 'board' (sums.py:12)"`` -> count, the most frequent first.

    Errors of one class at one line are one cause, with their message where it is the same.
    """
    messages: dict[tuple[str, str | None], Counter[str]] = {}
    for error in errors:
        if error.is_scoring_error:
            continue
        messages.setdefault((error.get("error", "unknown"), error.author_line), Counter())[_headline(error)] += 1
    causes = Counter(
        {
            f"{name}{f': {next(iter(texts))}' if len(texts) == 1 and any(texts) else ''}{f' ({line})' if line else ''}":
            texts.total() for (name, line), texts in messages.items()
        }
    )  # fmt: skip
    return dict(causes.most_common())


def _headline(error: ErrorInfo) -> str:
    """The first line of the message, at most ``MAX_CAUSE_CHARS``."""
    line = (error.get("message") or "").strip().partition("\n")[0]
    return line if len(line) <= MAX_CAUSE_CHARS else line[: MAX_CAUSE_CHARS - 1] + "…"


def unscored_by_function(measured: Measurements) -> dict[str, int]:
    """``"ConnectionError in flaky"`` -> count of unknown rewards, the most frequent first."""
    rows = zip(measured.rewards, measured.errors, measured.causes, strict=True)
    causes = (cause or "not scored" for reward, error, cause in rows if reward != reward and not _is_of_rollout(error))
    return dict(Counter(causes).most_common())


def latency(measured: Measurements) -> dict[str, float]:
    """Percentiles of the rollouts' total time in milliseconds: ``median_ms p95_ms p99_ms max_ms``."""
    percents = {"median_ms": 50, "p95_ms": 95, "p99_ms": 99, "max_ms": 100}
    return dict(zip(percents, percentiles(measured.total_ms, percents.values()), strict=True))


def total_usage(measured: Measurements) -> dict[str, int]:
    """The sum of each count over the rollouts."""
    totals = {name: known_sum(counts) for name, counts in measured.usage.items()}
    return {name: int(total) for name, total in totals.items() if total}


def _mean_usage(measured: Measurements) -> dict[str, float]:
    """The mean of each count over the rollouts that have counts."""
    unknown = [np.isnan(np.asarray(counts, float)) for counts in measured.usage.values()]
    num_counted = int(np.count_nonzero(~np.logical_and.reduce(unknown)))
    return {name: known_sum(counts) / num_counted for name, counts in measured.usage.items()}


def cost_usd(prices: Mapping[str, float] | None, measured: Measurements) -> float | None:
    """US dollars for the tokens of all rollouts; None without prices, or when an error-free rollout has no counts.

    >>> prices = {"usd_per_million_input_tokens": 2.0, "usd_per_million_output_tokens": 8.0}
    >>> from verifiers.testing import ScriptedClient
    >>> results = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}]).evaluate(ScriptedClient("2"), "m")
    >>> cost_usd(prices, results.measurements()) is None, results.outputs[0].token_usage["input_tokens"]
    (True, 0)
    """
    if not prices:
        return None
    unknown = [math.nan] * len(measured)
    inputs, sampled = (measured.usage.get(name, unknown) for name in ("input_tokens", "output_tokens"))
    has_tokens = (count > 0 for count in inputs)
    if any(error is None and not has for error, has in zip(measured.errors, has_tokens, strict=True)):
        return None
    totals = (known_sum(counts) for counts in (inputs, sampled))
    return sum(total * prices[name] for total, name in zip(totals, PRICE_FIELDS, strict=True)) / 1e6


# --- export ----------------------------------------------------------------------------------------------------------


def make_dataset(
    results: GenerateOutputs,
    rollouts_per_example: int | None = None,
    push_to_hub: bool = False,
    hub_name: str | None = None,
    state_columns: Sequence[str] | None = None,
    **older: object,
) -> Any:
    """The results as a ``datasets.Dataset`` with the columns ``DATASET_COLUMNS``, each metric, and ``state_columns``.

    ``state_columns`` are those of the run unless given; one that no rollout has is read from its state.

    Args:
        results: The results.
        rollouts_per_example: Take this many consecutive rollouts as those of one example, for
            ``average_reward``; None = those of one example id.
        push_to_hub: Publish the dataset as ``hub_name``.
        hub_name: "owner/name" of the published dataset.
        state_columns: Saved state keys that become columns.
        older: Names of these parameters in older versions.

    ``average_reward`` is the mean known reward of the example's rollouts. Unknown rewards are null. *Raises*
    ConfigError for publishing without a name, and for an unknown column.

    >>> from verifiers.testing import ScriptedClient
    >>> env = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}], rubric=vf.Rubric([lambda completion: 0.0]))
    >>> results = env.evaluate(ScriptedClient("2"), "m")
    >>> vf.make_dataset(results)["average_reward"][:]
    [0.0]
    """
    publication = {"push_to_hub": True} if push_to_hub else {}
    named = compat.rename(older | publication | ({"hub_name": hub_name} if hub_name else {}), compat.PUBLICATION)
    check_keywords(named, ("push_to_hub", "hub_name"), "make_dataset")
    push_to_hub, hub_name = named.get("push_to_hub", False), named.get("hub_name")
    if push_to_hub and not hub_name:
        raise ConfigError('push_to_hub needs a name: hub_name="owner/dataset"')
    metrics = dict.fromkeys(name for output in results.outputs for name in output["metrics"])
    further = results.metadata["state_columns"] if state_columns is None else state_columns
    columns = [*DATASET_COLUMNS, *(name for name in (*metrics, *further) if name not in DATASET_COLUMNS)]
    averages = average_rewards(results.outputs, rollouts_per_example)
    states: Sequence[Mapping[str, Any]] = results.known_states() or [{} for _ in averages]
    rows = []
    for output, average, state in zip(results.outputs, averages, states, strict=True):
        values = dict.fromkeys(metrics) | output | {"average_reward": average}
        if missing := [name for name in columns if name not in values and name not in state]:
            raise ConfigError(f"the results have no column {missing[0]!r}; run with state_columns={missing!r}")
        rows.append({name: values[name] if name in values else state[name] for name in columns})
    dataset = rows_to_dataset(rows)
    if push_to_hub:
        dataset.push_to_hub(hub_name)
    return dataset


def rows_to_dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A ``datasets.Dataset`` with the union of the columns of all rollouts; unknown numbers are null."""
    from datasets import Dataset

    plain = [json_ready(row) for row in rows]
    names = dict.fromkeys(name for row in plain for name in row)
    return Dataset.from_dict({name: _arrow_column([row.get(name) for row in plain]) for name in names})


def average_rewards(outputs: Sequence[RolloutOutput], siblings: int | None) -> list[float]:
    """Mean known reward of each rollout's group: one example, or ``siblings`` consecutive rollouts."""
    keys = [index // siblings if siblings else example_key(output) for index, output in enumerate(outputs)]
    groups: dict[Any, list[float]] = {}
    for key, output in zip(keys, outputs, strict=True):
        groups.setdefault(key, []).append(output["reward"])
    averages = {key: mean(rewards) for key, rewards in groups.items()}
    return [averages[key] if not math.isnan(averages[key]) else math.nan for key in keys]


def save(rollouts: Callable[[], Iterator[RolloutOutput]], metadata: Mapping[str, Any], path: str | Path) -> None:
    """Write the results of a run to ``path``: one ``.parquet`` or ``.jsonl`` file, else a run directory.

    ``rollouts()`` yields them in order, and is called again where a format needs it. *Raises* ConfigError when the
    directory already holds results.
    """
    target = Path(path)
    if target.suffix == ".parquet":
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_parquet(rollouts, target)
        return
    rows = _disk_rows(rollouts())
    if target.suffix == ".jsonl":
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, b"".join(encode_row(row) + b"\n" for row in rows))
        return
    if (target / RESULTS_NAME).exists():
        raise ConfigError(f"{target / RESULTS_NAME} already exists; save into another directory", path=str(target))
    target.mkdir(parents=True, exist_ok=True)
    with Journal.open(target / RESULTS_NAME) as journal:
        journal.append_sync(rows)
    content = json.dumps(json_ready({**metadata, "path_to_save": str(target)}), indent=2)
    atomic_write(target / METADATA_NAME, content.encode() + b"\n")


def _disk_rows(outputs: Iterable[RolloutOutput]) -> list[dict[str, Any]]:
    counts: dict[str, int] = {}
    rows = []
    for output in outputs:
        example_hash = output.get("example_hash") or content_hash(output)
        sibling = output.get("sibling", counts.get(example_hash, 0))
        counts[example_hash] = sibling + 1
        rows.append(row_for_disk(output, example_hash, sibling, output.get("attempts") or 1))
    return rows


def content_hash(output: Mapping[str, Any]) -> str:
    """A substitute for the hash of the dataset row, from the columns that the output has."""
    columns = json_ready({name: output[name] for name in ("prompt", "answer", "task", "info")})
    return hashlib.sha256(canonical_json(columns)).hexdigest()


def _write_parquet(rollouts: Callable[[], Iterator[RolloutOutput]], target: Path) -> None:
    """Write one row group for ``BATCH_SIZE`` rollouts; reads them twice where later ones have other columns or types.

    The file appears whole, or not at all.
    """
    hidden = target.with_name(f".{target.name}.tmp")
    types: dict[str, pa.DataType | None] = {}
    try:
        while not _write_batches(rollouts(), types, hidden):
            pass  # again, with the types of all
        hidden.replace(target)
    finally:
        hidden.unlink(missing_ok=True)


def _write_batches(rollouts: Iterator[RolloutOutput], types: dict[str, pa.DataType | None], file: Path) -> bool:
    """Write a Parquet file of columns of these types, those of the first batch where there are none yet.

    ``types`` is extended by what the rollouts have, None for JSON text; returns whether the file has these types.
    """
    import pyarrow as pa
    from pyarrow import parquet

    writer, fits = None, True
    try:
        for columns in _batches(rollouts):
            before, inferred = dict(types), {}
            for name, values in columns.items():
                types[name], inferred[name] = _common_type(types.get(name, pa.null()), values)
            fits = fits and types == (before or types)
            if not fits:
                continue
            schema = pa.schema([(name, pa.string() if kind is None else kind) for name, kind in types.items()])
            writer = writer or parquet.ParquetWriter(str(file), schema)
            absent = [None] * len(next(iter(columns.values())))
            arrays = [_of_type(kind, columns.get(name, absent), inferred.get(name)) for name, kind in types.items()]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        if writer is None:
            parquet.write_table(pa.table({}), file)
    finally:
        if writer is not None:
            writer.close()
    return fits


def _batches(rollouts: Iterator[RolloutOutput]) -> Iterator[dict[str, list[Any]]]:
    """Column -> JSON values of ``BATCH_SIZE`` rollouts at a time; None where a rollout has no such column."""
    while batch := [json_ready(row) for row in itertools.islice(rollouts, BATCH_SIZE)]:
        names = dict.fromkeys(name for row in batch for name in row)
        yield {name: [row.get(name) for row in batch] for name in names}


def _of_type(kind: pa.DataType | None, values: list[Any], inferred: pa.Array | None) -> pa.Array:
    """Values as an Arrow array of a type, None for JSON text; ``inferred``: that of their own type."""
    import pyarrow as pa

    if inferred is not None and inferred.type == kind:
        return inferred
    return pa.array(_texts(values) if kind is None else values, pa.string() if kind is None else kind)


def _common_type(known: pa.DataType | None, values: list[Any]) -> tuple[Any, Any]:
    """(the Arrow type of the values and of those before them, of type ``known``; the values as an array of their own).

    Both are None when no single type fits.
    """
    import pyarrow as pa

    if known is None:
        return None, None
    try:
        found = pa.array(values)
        if found.type == known:
            return known, found
        fields = [pa.field("", kind) for kind in (known, found.type)]
        common = pa.unify_schemas([pa.schema([f]) for f in fields], promote_options="permissive").field(0).type
    except (pa.ArrowException, OverflowError):  # mixed types
        return None, None
    return (None, None) if _has_empty_struct(common) else (common, found)


def _arrow_column(values: list[Any]) -> list[Any]:
    """The values, or their JSON texts when no single Arrow type that Parquet supports fits them."""
    import pyarrow as pa

    try:
        if not _has_empty_struct(pa.array(values).type):
            return values
    except (pa.ArrowException, OverflowError):  # mixed types become JSON texts
        pass
    return _texts(values)


def _texts(values: list[Any]) -> list[Any]:
    return [None if value is None else json.dumps(value) for value in values]


def _has_empty_struct(arrow_type: pa.DataType) -> bool:
    if str(arrow_type).startswith("struct") and not arrow_type.num_fields:
        return True
    return any(_has_empty_struct(arrow_type.field(i).type) for i in range(arrow_type.num_fields))
