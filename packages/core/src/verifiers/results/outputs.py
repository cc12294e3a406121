"""``GenerateOutputs``: the results of a run.

``results["rewards"]``, ``results["reward"]`` and ``results.reward`` are one list; ``prompts,
completions, rewards = results`` works; ``results.outputs`` are the rollouts themselves, in the
order of their examples, siblings together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from verifiers import compat
from verifiers.errors import ConfigError, UsageError
from verifiers.results.agreement import THRESHOLD, Agreement, agreement, label_of
from verifiers.results.atif import to_trajectory
from verifiers.results.comparison import DETECT, Comparison, Measured, compare_runs
from verifiers.results.export import (
    average_rewards,
    facts_of_run,
    rows_to_dataset,
    save,
    write_trajectories,
)
from verifiers.results.notebook import results_html
from verifiers.results.rows import (
    ALWAYS,
    RolloutOutput,
    content_hash,
    example_key,
    json_ready,
    output_to_state,
)
from verifiers.results.run_metadata import (
    FACTS,
    GenerateMetadata,
    Measurements,
    error_causes,
    errors_by_cause,
    latency,
    total_usage,
    unscored_by_function,
)
from verifiers.results.summary import RunSummary, SummaryFields
from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rollouts.rollout import SAVED
from verifiers.rollouts.state import State
from verifiers.rollouts.typed_fields import ResultColumns
from verifiers.runtime.suggest import check_keywords

if TYPE_CHECKING:
    from datasets import Dataset
    from pandas import DataFrame
    from pyarrow import Table

COLUMNS = {SAVED[name].column: name for name in ALWAYS if name != "metrics"} | {"states": "state"}
"""Column name -> field of a rollout; both names read the column."""
DATASET_COLUMNS = (
    "example_id prompt completion answer task info reward average_reward metrics error".split()
)
_BY_FIELD = {field: column for column, field in COLUMNS.items()}


class GenerateOutputs(ResultColumns):
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

    if TYPE_CHECKING:
        states: list[State]
        state: list[State]

    def __init__(
        self,
        outputs: Sequence[RolloutOutput] | None = None,
        metadata: GenerateMetadata | None = None,
        states: Sequence[State] | None = None,
        **columns: object,
    ):
        if outputs is None or columns:
            outputs, metadata, states = self.of_columns(outputs, metadata, states, columns)
        self.outputs: list[RolloutOutput] = list(outputs)
        self.metadata = GenerateMetadata.of(self.outputs) if metadata is None else metadata
        self._states = None if states is None else list(states)
        self._columns: dict[str, object] = {}

    @staticmethod
    def of_columns(*arguments: object) -> Any:
        """The arguments of the constructor from columns, an older form; ``legacy`` sets it."""
        raise TypeError("GenerateOutputs takes a list of rollouts")

    @overload
    def __getitem__(
        self, name: Literal["rewards", "reward", "advantages", "advantage"]
    ) -> list[float]: ...
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
            if not name.startswith("_") and (
                name in COLUMNS or name in _BY_FIELD or name == "metrics"
            ):
                return self[name]
            raise AttributeError(
                f"results have no {name!r}; columns are {', '.join(COLUMNS)}, metrics"
            )

    def __iter__(self) -> Iterator[object]:
        """Prompts, completions, rewards: for ``prompts, completions, rewards = results``."""
        return iter((self["prompts"], self["completions"], self["rewards"]))

    def __len__(self) -> int:
        return len(self.outputs)

    def __contains__(self, name: object) -> bool:
        return name in ("outputs", "metadata") or (
            isinstance(name, str) and _BY_FIELD.get(name, name) in self.keys()
        )

    def __repr__(self) -> str:
        return (
            f"<GenerateOutputs of {len(self)} rollouts, mean reward"
            f" {self.metadata['avg_reward']:.4g}>"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows of the results."""
        return results_html(self.summary(), self.outputs)

    def get(self, name: str, default: object = None) -> Any:
        return self[name] if name in self else default

    def keys(self) -> list[str]:
        """Names of the columns: with ``states`` only when states are available, and with the state
        columns."""
        extra = [
            n
            for n in self.metadata.get("state_columns") or ()
            if n not in COLUMNS and n not in _BY_FIELD
        ]
        return [name for name in COLUMNS if name != "states" or self._has_states()] + [
            "metrics",
            *extra,
        ]

    def items(self) -> list[tuple[str, Any]]:
        return [(name, self[name]) for name in self.keys()]

    def values(self) -> list[Any]:
        return [self[name] for name in self.keys()]

    def summary(self) -> RunSummary:
        """The numbers of the run as JSON values, unknown numbers None; latency is in milliseconds.

        Beside the fields of the metadata: ``usage`` (the sums over the rollouts), ``path``,
        ``seconds``, ``errors`` (class -> count), ``error_causes`` (class, message and line ->
        count), ``unscored`` ("cause in function" -> count) and ``latency``.
        """
        facts = {name: self.metadata.get(name) for name in SummaryFields.__annotations__}
        measured = self.measurements()
        summary: RunSummary = json_ready(
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
        return summary

    def filter(self, keep: Callable[[RolloutOutput], object]) -> GenerateOutputs:
        """The rollouts for which ``keep(rollout)`` holds, as results; their statistics are computed
        anew.

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
        """A rollout of an example; ``sibling`` counts its rollouts from 0.

        *Raises* KeyError for an example without rollouts, IndexError for a sibling that it does not
        have.
        """
        siblings = [index for index, each in enumerate(self["example_ids"]) if each == example_id]
        if not siblings:
            raise KeyError(
                f"results have no example {example_id!r}; their ids are in results['example_ids']"
            )
        if not 0 <= sibling < len(siblings):
            raise IndexError(
                f"example {example_id!r} has {len(siblings)} rollouts: sibling is 0 to"
                f" {len(siblings) - 1}"
            )
        return self.at(siblings[sibling])

    def compare(
        self,
        *runs: GenerateOutputs,
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
        unknown: dict[str, object] = {}
        runs_named = [(f"run {n}", results, unknown) for n, results in enumerate((self, *runs), 1)]
        return compare_runs(measured(runs_named), metrics, detect=detect, anyway=anyway)

    def agreement(
        self, labels: str, metric: str = "reward", threshold: float = THRESHOLD
    ) -> Agreement:
        """Compare a judge's metric with the labels in a column, ``human`` or ``info.human``; see
        ``agreement``.

        *Raises* ConfigError for a metric that the results lack, and when no rollout has a label.

        >>> from verifiers.testing import ScriptedClient
        >>> rows = [{"question": str(n), "info": {"human": n < 6}} for n in range(12)]
        >>> env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([lambda prompt: float(prompt[-1].content < "7")]))
        >>> found = env.evaluate(ScriptedClient("x"), "m", num_examples=-1).agreement("info.human")
        >>> found.num_labelled, round(found.kappa, 2), found.false_yes, round(found.corrected_mean, 2)
        (12, 0.5, 3, 0.5)
        """
        if metric != "reward" and metric not in self["metrics"]:
            raise ConfigError(
                f"no rollout has the metric {metric!r}; there are reward,"
                f" {', '.join(self['metrics'])}"
            )
        return agreement(
            self["rewards"] if metric == "reward" else self["metrics"][metric],
            [label_of(output, labels) for output in self.outputs],
            [example_key(output) for output in self.outputs],
            metric=metric,
            column=labels,
            threshold=threshold,
        )

    def to_dataset(self) -> Dataset:
        """The rollouts as a ``datasets.Dataset``; unknown numbers are null. Each row also names its
        environment, its model and, by ``example_hash``, its example."""
        facts = facts_of_run(self.metadata)
        rows = ({"example_hash": content_hash(output)} | facts | output for output in self.outputs)
        order = [*dict.fromkeys(name for output in self.outputs for name in output)]
        return rows_to_dataset(list(rows), order)

    def to_arrow(self) -> Table:
        """The rollouts as a ``pyarrow.Table``, one row per rollout; unknown numbers are null."""
        return self.to_dataset().data.table

    def to_pandas(self) -> DataFrame:
        """The rollouts as a ``pandas.DataFrame``, one row per rollout; unknown numbers are NaN."""
        return self.to_dataset().to_pandas()

    def to_polars(self) -> Any:
        """The rollouts as a ``polars.DataFrame``, one row per rollout; unknown numbers are null.

        *Raises* ConfigError if polars is not installed.
        """
        try:
            import polars
        except ModuleNotFoundError as error:
            raise ConfigError(
                "to_polars needs polars, which is not installed: pip install polars"
            ) from error
        return polars.from_arrow(self.to_arrow())

    def save(self, path: str | Path) -> None:
        """Write a run directory, or one ``.jsonl``, ``.parquet`` or ``.csv`` file. *Raises*
        ConfigError for a used directory, and for the name of a file of another kind.

        In CSV, lists and objects are JSON texts.
        """
        save(self.rollouts, self.metadata, path)

    def to_atif(self, folder: str | Path | None = None) -> Sequence[dict[str, Any]]:
        """The rollouts as trajectories of the Agent Trajectory Interchange Format, version 1.7; each
        also as a file in ``folder``, which ``vf.load_results`` reads: then each is made when it is
        read, else they are a list.

        Tokens are those of the states, or of the column ``trajectory``.

        >>> from verifiers.testing import ScriptedClient
        >>> results = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}]).evaluate(ScriptedClient("2"), "m")
        >>> [(step["source"], step["message"]) for step in results.to_atif()[0]["steps"]]
        [('user', '1 + 1'), ('agent', '2')]
        """
        documents = Trajectories(self)
        if folder is None:
            return list(documents)
        write_trajectories(documents, self.metadata, Path(folder))
        return documents

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
        """The errors of the rollouts that have an error."""
        return (error for error in self["errors"] if error is not None)

    def _has_states(self) -> bool:
        return self._states is not None or (
            bool(self.outputs) and all("trajectory" in o for o in self.outputs)
        )

    def _make_column(self, column: str) -> object:
        if column == "states":
            return self._all_states()
        if column == "metrics":
            names = dict.fromkeys(name for output in self.outputs for name in output["metrics"])
            return {
                name: [o["metrics"].get(name, math.nan) for o in self.outputs] for name in names
            }
        field = COLUMNS.get(column, column)
        if column not in COLUMNS and not any(field in output for output in self.outputs):
            raise KeyError(f"results have no column {column!r}; they have {', '.join(self.keys())}")
        return [output.get(field) for output in self.outputs]

    def _all_states(self) -> list[State]:
        if self._states is not None:
            return self._states
        if self.outputs and not self._has_states():
            raise UsageError(
                "states are not available; run with keep_states=True, or save them with"
                ' state_columns=["trajectory"]'
            )
        return [output_to_state(output) for output in self.outputs]


class Trajectories(Sequence[dict[str, Any]]):
    """The rollouts of results as ATIF trajectories, each made when it is read."""

    def __init__(self, results: GenerateOutputs):
        self._results = results

    def __len__(self) -> int:
        return len(self._results)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        return self._document(number, self._results.at(number))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return itertools.starmap(self._document, enumerate(self._results.rollouts()))

    def __eq__(self, documents: object) -> bool:
        return list(self) == documents

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def _document(self, index: int, output: RolloutOutput) -> dict[str, object]:
        states, facts = self._results._states, self._results.metadata
        turns = {} if states is None else {"trajectory": states[index]["trajectory"]}
        names = str(facts.get("env_id") or ""), str(facts.get("model") or "")
        return to_trajectory({**turns, **output}, *names)


def measured(
    runs: Sequence[tuple[str, GenerateOutputs, Mapping[str, object]]],
) -> list[Measured]:
    """Runs as ``comparison`` needs them, from (name, results, configuration, empty if unknown).

    Examples are matched by the hashes of their rows; where one of the runs has none, by prompt,
    answer, task and info.
    """
    has_hashes = all(
        output.get("example_hash") for _, results, _ in runs for output in results.outputs
    )
    merged_runs = []
    for name, results, config in runs:
        values: dict[str, dict[object, list[float]]] = {"reward": {}}
        for output in results.outputs:
            key = output["example_hash"] if has_hashes else content_hash(output)
            for metric, value in ({**output["metrics"], "reward": output["reward"]}).items():
                values.setdefault(metric, {}).setdefault(key, []).append(value)
        facts = results.metadata
        known_config = config or {
            key: facts.get(key) for key in ("env_args", "env_version", "sampling_args")
        }
        merged_runs.append(
            Measured(
                name,
                facts.get("env_id") or "",
                values,
                facts.get("model") or "",
                known_config,
                facts["status"],
                facts.get("stopped"),
            )
        )
    return merged_runs


def make_dataset(
    results: GenerateOutputs,
    rollouts_per_example: int | None = None,
    push_to_hub: bool = False,
    hub_name: str | None = None,
    state_columns: Sequence[str] | None = None,
    **older: object,
) -> Dataset:
    """The results as a ``datasets.Dataset`` with the columns ``DATASET_COLUMNS``, each metric, and
    ``state_columns``.

    ``state_columns`` are those of the run unless given; a column that no rollout has is read from
    its state.

    Args:
        results: The results.
        rollouts_per_example: Take this many consecutive rollouts as those of an example, for
            ``average_reward``; None = those of an example id.
        push_to_hub: Publish the dataset as ``hub_name``.
        hub_name: "owner/name" of the published dataset.
        state_columns: Saved state keys that become columns.
        older: Names of these parameters in older versions.

    ``average_reward`` is the mean known reward of the example's rollouts. Unknown rewards are null.
    *Raises* ConfigError for publishing without a name, and for an unknown column.

    >>> from verifiers.testing import ScriptedClient
    >>> env = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}], rubric=vf.Rubric([lambda completion: 0.0]))
    >>> results = env.evaluate(ScriptedClient("2"), "m")
    >>> vf.make_dataset(results)["average_reward"][:]
    [0.0]
    """
    publication = {"push_to_hub": True} if push_to_hub else {}
    options = compat.rename(
        older | publication | ({"hub_name": hub_name} if hub_name else {}), compat.PUBLICATION
    )
    check_keywords(options, ("push_to_hub", "hub_name"), "make_dataset")
    push_to_hub, hub_name = options.get("push_to_hub", False), options.get("hub_name")
    if push_to_hub and not hub_name:
        raise ConfigError('push_to_hub needs a name: hub_name="owner/dataset"')
    metrics = dict.fromkeys(name for output in results.outputs for name in output["metrics"])
    further = results.metadata["state_columns"] if state_columns is None else state_columns
    columns = [
        *DATASET_COLUMNS,
        *(name for name in (*metrics, *further) if name not in DATASET_COLUMNS),
    ]
    averages = average_rewards(results.outputs, rollouts_per_example)
    states: Sequence[Mapping[str, object]] = results.known_states() or [{} for _ in averages]
    rows = []
    for output, average, state in zip(results.outputs, averages, states, strict=True):
        values = dict.fromkeys(metrics) | output | {"average_reward": average}
        values |= {m: v for m, v in output["metrics"].items() if m not in DATASET_COLUMNS}
        if missing := [name for name in columns if name not in values and name not in state]:
            raise ConfigError(
                f"the results have no column {missing[0]!r}; run with state_columns={missing!r}"
            )
        rows.append({name: values[name] if name in values else state[name] for name in columns})
    dataset = rows_to_dataset(rows)
    if push_to_hub:
        dataset.push_to_hub(hub_name)
    return dataset
