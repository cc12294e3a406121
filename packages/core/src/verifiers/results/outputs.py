"""``GenerateOutputs``: the rollouts of a run, by column, in present and older spellings.

``results["rewards"]``, ``results["reward"]`` and ``results.reward`` are one list; ``prompts, completions, rewards =
results`` works; ``results.outputs`` are the rollouts themselves, in the order of their examples, siblings together.

``GenerateMetadata`` describes the whole run: statistics of the rollouts and facts from the runner. Means skip unknown
values. A rollout *error* is a failure of the rollout itself; a rollout without an error whose reward is unknown is
*unscored*.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from verifiers import compat
from verifiers.clients.protocol import PRICE_FIELDS
from verifiers.errors import ConfigError, ScoringError, UsageError
from verifiers.results.agreement import THRESHOLD, Agreement, agreement, label_of
from verifiers.results.comparison import DETECT, Comparison, Measured, compare_runs
from verifiers.results.export import average_rewards, content_hash, rows_to_dataset, save
from verifiers.results.notebook import results_html
from verifiers.results.rows import ErrorInfo, RolloutOutput, example_key, json_ready, output_to_state
from verifiers.results.statistics import clustered_stderr, known, mean, pass_rates, percentile
from verifiers.rollouts.state import State
from verifiers.rubrics.advantages import centered_advantages
from verifiers.rubrics.scoring import SUCCESS
from verifiers.runtime.suggest import check_keywords
from verifiers.runtime.sync_async import Finished
from verifiers.types import AttributeDict

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
MAX_CAUSE_CHARS = 120
"""Longest message of an error in the numbers of a run."""
_BY_FIELD = {field: column for column, field in COLUMNS.items()}


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
        **columns: Any,
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
                "error_causes": error_causes(self["errors"]),
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
        """Write a run directory, or one ``.jsonl`` or ``.parquet`` file; see ``export.save``."""
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
    groups: dict[Any, list[RolloutOutput]] = {}
    for output in outputs:
        groups.setdefault(example_key(output), []).append(output)
    for group in groups.values():
        if all(output["advantage"] is None for output in group):
            advantages = centered_advantages([output["reward"] for output in group])
        else:
            advantages = [math.nan if o["advantage"] is None else o["advantage"] for o in group]
        for output, advantage in zip(group, advantages, strict=True):
            set_advantage(output, advantage)


def set_advantage(output: RolloutOutput, advantage: float | None) -> None:
    """Set the advantage of a rollout, and of those of its turns that have none of their own."""
    output["advantage"] = advantage
    for step in output.get("trajectory") or ():
        if step["advantage"] is None:
            step["advantage"] = advantage


DATASET_COLUMNS = "example_id prompt completion answer task info reward average_reward metrics error".split()


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
    examples: Sequence[Any]
    """What siblings share: see ``rows.example_key``."""
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
            metrics={n: [m.get(n, math.nan) for m in metrics] for n in dict.fromkeys(n for m in metrics for n in m)},
            errors=[None if error is None else error.get("error") or "unknown" for error in errors],
            causes=[None if error is None else f"{error.cause} in {error.get('where')}" for error in errors],
            stop_conditions=[output["stop_condition"] for output in outputs],
            usage={n: [u.get(n, math.nan) for u in usages] for n in dict.fromkeys(n for u in usages for n in u)},
            total_ms=[(output["timing"] or {}).get("total_ms", math.nan) for output in outputs],
        )

    def __len__(self) -> int:
        return len(self.rewards)


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
    def of(cls, rollouts: Sequence[RolloutOutput] | Measurements, **facts: Any) -> GenerateMetadata:
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
    return _solved([output["reward"] for output in outputs], measured, threshold)


def _solved(rewards: Sequence[float], measured: Sequence[float] | None, threshold: float | None) -> list[float]:
    """``successes`` of columns; ``measured``: the metric ``success``, NaN where a rollout has none."""
    values: list[float] = list(rewards)
    if threshold is not None:
        values = [reward if math.isnan(reward) else float(reward >= threshold) for reward in rewards]
    if measured is not None:
        values = [value if math.isnan(own) else own for own, value in zip(measured, values, strict=True)]
    is_strict = all(value in (0.0, 1.0) for value in known(values))
    return values if is_strict else [math.nan] * len(values)


def _statistics(measured: Measurements, siblings: int, threshold: float | None) -> dict[str, Any]:
    rewards, examples = measured.rewards, measured.examples
    failed = [_is_of_rollout(error) for error in measured.errors]
    solved = _solved(rewards, measured.metrics.get(SUCCESS), threshold)
    passed = pass_rates(solved, examples, siblings)
    return {
        "num_rollouts": len(measured),
        "num_errors": sum(failed),
        "num_unscored": sum(math.isnan(reward) and not bad for reward, bad in zip(rewards, failed, strict=True)),
        "avg_reward": mean(rewards),
        "reward_stderr": clustered_stderr(rewards, examples),
        "avg_success": mean(solved),
        "success_stderr": clustered_stderr(solved, examples),
        "avg_metrics": {name: mean(values) for name, values in measured.metrics.items()},
        "avg_error": sum(failed) / len(measured) if len(measured) else 0.0,
        "stop_conditions": dict(Counter([str(stop) for stop in measured.stop_conditions if stop])),
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


def error_causes(errors: Iterable[ErrorInfo | None]) -> dict[str, int]:
    """``"EnvironmentFault: env_response raised KeyError: 'board' (sums.py:12)"`` -> count, the most frequent first.

    Errors of one class at one line are one cause, with their message where it is the same.
    """
    messages: dict[tuple[str, str | None], Counter[str]] = {}
    for error in errors:
        if error is None or error.is_scoring_error:
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
    times = sorted(known(measured.total_ms))
    return {
        "median_ms": percentile(times, 50),
        "p95_ms": percentile(times, 95),
        "p99_ms": percentile(times, 99),
        "max_ms": percentile(times, 100),
    }


def total_usage(measured: Measurements) -> dict[str, int]:
    """The sum of each count over the rollouts."""
    totals = {name: math.fsum(known(counts)) for name, counts in measured.usage.items()}
    return {name: int(total) for name, total in totals.items() if total}


def _mean_usage(measured: Measurements) -> dict[str, float]:
    """The mean of each count over the rollouts that have counts."""
    columns = measured.usage.values()
    num_counted = sum(any(count == count for count in counts) for counts in zip(*columns, strict=True))
    return {name: math.fsum(known(counts)) / num_counted for name, counts in measured.usage.items()}


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
    totals = (math.fsum(known(counts)) for counts in (inputs, sampled))
    return sum(total * prices[name] for total, name in zip(totals, PRICE_FIELDS, strict=True)) / 1e6
