"""The summary of a finished run on stdout: as text, or as one JSON object.

Numbers come from ``GenerateOutputs.summary``; an unknown number is "unknown" or null, never 0.
Model text is truncated and its control characters are escaped.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TextIO

from verifiers.clients.payload import left_to_server
from verifiers.results.texts import dollars, duration, number, number_lines

if TYPE_CHECKING:
    from verifiers.results.outputs import GenerateOutputs
    from verifiers.results.rows import RolloutOutput
    from verifiers.results.summary import RunSummary, Throughput
    from verifiers.types import Messages

SCHEMA = 1
RUN_KEYS = (
    "env_id model base_url path num_examples rollouts_per_example num_rollouts num_errors"
    " num_unscored avg_reward reward_stderr success_metric avg_success success_stderr avg_metrics"
    " metric_counts pass_at_k pass_at_k_interval pass_at_k_examples pass_at_k_unknown"
    " pass_at_k_bounds pass_all_k stop_conditions errors usage cost_usd latency throughput seconds"
    " resumed env_args sampling_args left_to_server stopped spent exported coverage"
).split()
MAX_MESSAGE_CHARS = 1200
MAX_MESSAGES = 12


@dataclass(slots=True)
class Report:
    """The result of the command: its runs, exit code and first error."""

    runs: list[RunSummary] = dataclasses.field(default_factory=list)
    exit_code: int = 0
    error: dict[str, object] | None = None
    texts: dict[str, object] = dataclasses.field(default_factory=dict)
    """``config`` of ``--dump-config``, ``plan`` of ``--dry-run``, ``replay`` of ``--replay``."""
    set: dict[str, object] | None = None
    """The set of runs, with a state for each; None for a single run."""

    def failed(self, exit_code: int, error: dict[str, object]) -> None:
        """Record an error: the highest exit code and the first error are kept."""
        self.exit_code = max(self.exit_code, exit_code)
        self.error = self.error or error

    def to_json(self) -> str:
        """The object of ``--json``, on one line."""
        state = {"schema": SCHEMA, "ok": self.exit_code == 0, "exit_code": self.exit_code}
        of_set = {} if self.set is None else {"set": self.set}
        runs = [run_json(run) for run in self.runs]
        content = state | {"runs": runs, **of_set, **self.texts, "error": self.error}
        return json.dumps(content, allow_nan=False)


def throughput(num_rollouts: int, num_tokens: int, seconds: float) -> Throughput:
    """Rollouts and sampled tokens per second of this call; None when it ran no rollout.

    >>> throughput(20, 3000, 10.0)
    {'rollouts_per_s': 2.0, 'output_tokens_per_s': 300.0}
    """
    has_run = num_rollouts > 0 and seconds > 0
    return {
        "rollouts_per_s": num_rollouts / seconds if has_run else None,
        "output_tokens_per_s": num_tokens / seconds if has_run and num_tokens else None,
    }


def run_facts(
    results: GenerateOutputs,
    *,
    throughput: Throughput | None = None,
    exported: Mapping[str, str] | None = None,
    sent: Mapping[str, object] | None = None,
) -> RunSummary:
    """The numbers of a run, with what the command knows of it. ``sent``: the sampling arguments of
    its requests, if they are others than it records."""
    run = results.summary()
    run["exported"] = exported
    if throughput is not None:
        run["throughput"] = throughput
    if local_model := results.metadata.local_model:
        run["local_model"], run["left_to_server"] = local_model, []
    else:
        sent = run["sampling_args"] or {} if sent is None else sent
        run["left_to_server"] = left_to_server(sent, run["base_url"])
    return run


def run_json(run: RunSummary) -> dict[str, object]:
    """A run as an entry of ``runs`` of ``--json``; ``local_model`` only where it was used."""
    local_model = run.get("local_model")
    of_model = {} if local_model is None else {"local_model": local_model}
    return {**{key: run.get(key) for key in RUN_KEYS}, **of_model}


def print_summary(
    results: GenerateOutputs,
    facts: RunSummary,
    *,
    samples: bool,
    notes: Iterable[str],
    stream: TextIO,
) -> None:
    """The numbers of a run, ``run_facts``, and, with ``samples``, its best and its worst rollout."""
    from rich.console import Console
    from rich.text import Text

    from verifiers.runtime.terminal import escape_control

    console = Console(file=stream, highlight=False, markup=False, soft_wrap=True)
    console.print(Text(escape_control(f"{facts['env_id']} · {facts['model']}"), style="bold"))
    lines = [(escape_control(n), escape_control(str(v))) for n, v in _lines(facts, notes)]
    width = max(len(name) for name, _ in lines) + 2
    for name, value in lines:
        line = Text(f"  {name:<{width}}", style="cyan")
        console.print(line.append(value, style="not bold default"))
    if samples:
        for title, output in _samples(results):
            console.print()
            console.print(Text(f"── {title} ──", style="bold"))
            console.print(Text(transcript(output)))


def _lines(facts: RunSummary, notes: Iterable[str]) -> Iterable[tuple[str, str]]:
    """(name, value) of each line; lines without a value are left out."""
    if facts["base_url"]:
        yield "endpoint", facts["base_url"]
    yield "saved in", facts["path"] or "not saved"
    before = f", {facts['resumed']} of them resumed" if facts["resumed"] else ""
    plan = f"{facts['num_examples']} examples × {facts['rollouts_per_example']}"
    yield "rollouts", f"{facts['num_rollouts']} ({plan}){before}"
    yield "sampling", _sampling(facts)
    yield from number_lines(facts)
    for name, path in (facts.get("exported") or {}).items():
        yield "exported", f"{path} ({name})"
    for note in notes:
        yield "note", note


def _sampling(facts: RunSummary) -> str:
    """The sampling arguments of every request: the run's over the local model's; what is left out
    is the server's choice.

    >>> _sampling({"sampling_args": {"max_tokens": 32}, "left_to_server": ["top_p", "top_k"]})
    'max_tokens 32; left to the server: top_p, top_k'
    """
    local_model = facts.get("local_model")
    defaults = {} if local_model is None else local_model.get("sampling", {})
    sampling = {**defaults, **facts["sampling_args"]}
    listed = ", ".join(f"{name} {value}" for name, value in sampling.items())
    names = ", ".join(facts.get("left_to_server", ()))
    return "; ".join(filter(None, (listed, names and f"left to the server: {names}")))


# --- several runs ---------------------------------------------------------------------------------


def table_rows(
    runs: Sequence[RunSummary | None],
    labels: Sequence[Mapping[str, object]],
    states: Sequence[str] | None = None,
) -> list[list[str]]:
    """A heading and a row for each run: what varies among them, its state, then reward, tokens,
    cost and time.

    ``runs``: None for one without results; ``labels``: environment, model and combination of the
    ablation of each; ``states``: None leaves them out.
    """
    keys = dict.fromkeys(["env_id", "model", *itertools.chain.from_iterable(labels)])
    differing = [key for key in keys if len({repr(values.get(key)) for values in labels}) > 1]
    differing = differing or ["env_id"]
    finished = [run for run in runs if run is not None]
    begun = [states is None or state != "pending" for state in states or runs]
    costs = [
        None if run is None else run["cost_usd"]
        for run, has_begun in zip(runs, begun, strict=True)
        if has_begun
    ]
    has_cost = any(cost is not None for cost in costs)
    numbers = ["rollouts", "errors", "tokens", *(["cost"] if has_cost else []), "time"]
    state_name = [] if states is None else ["state"]
    rows = [[*differing, *state_name, "reward ± standard error", *numbers]]
    for index, (run, values) in enumerate(zip(runs, labels, strict=True)):
        labels_of_run = [_cell(values.get(key)) for key in differing]
        labels_of_run += [] if states is None else [states[index]]
        if run is None:
            rows.append([*labels_of_run, *[""] * (1 + len(numbers))])
            continue
        stderr = f" ± {run['reward_stderr']:.3f}" if run["reward_stderr"] is not None else ""
        tokens = sum(count for name, count in run["usage"].items() if not name.startswith("final_"))
        counts = [
            f"{run['num_rollouts']:,}",
            f"{run['num_errors']:,}",
            f"{tokens:,}" if tokens else "not reported",
        ]
        cost = [_cost(run["cost_usd"])] if has_cost else []
        row = [number(run["avg_reward"]) + stderr, *counts, *cost, duration(run["seconds"] or 0.0)]
        rows.append([*labels_of_run, *row])
    if has_cost:
        total = None if None in costs else math.fsum(cost for cost in costs if cost is not None)
        seconds = math.fsum(run["seconds"] or 0.0 for run in finished)
        blanks = [""] * (len(differing) + len(state_name) + 3)
        rows.append(["total", *blanks, _cost(total), duration(seconds)])
    return rows


def _cost(usd: float | None) -> str:
    return "unknown" if usd is None else dollars(usd, 0)


def _cell(value: object) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, default=str)


def print_table(rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    """The rows in columns; numbers, which are all but the first column, are aligned right."""
    from verifiers.runtime.terminal import escape_control

    cells = [[escape_control(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        first, *later = zip(row, widths, strict=True)
        columns = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in later)]
        print("  ".join(columns).rstrip(), file=stream)


# --- samples --------------------------------------------------------------------------------------


def _samples(results: GenerateOutputs) -> list[tuple[str, RolloutOutput]]:
    """The rollouts of the highest and the lowest reward; without a known reward the first."""
    # of a large run they are read from its index: no list of them
    measured = results.measurements()
    rewards, examples = measured.rewards, measured.examples

    def numbers() -> Iterator[tuple[int, float]]:
        return ((n, reward) for n, reward in enumerate(rewards) if not math.isnan(reward))

    best = max(numbers(), key=itemgetter(1), default=None)
    worst = min(numbers(), key=itemgetter(1), default=None)
    if best is None or worst is None:
        picks = [("a rollout", position) for position in range(min(1, len(rewards)))]
    elif best[1] > worst[1]:
        picks = [("best", best[0]), ("worst", worst[0])]
    else:
        different = (n for n, _ in numbers() if examples[n] != examples[best[0]])
        picks = [("a rollout", position) for position in (best[0], *itertools.islice(different, 1))]
    samples = []
    for which, position in picks:
        output = results.at(position)
        reward = "unknown" if math.isnan(output["reward"]) else f"{output['reward']:.3f}"
        samples.append((f"{which}: example {output['example_id']}, reward {reward}", output))
    return samples


def transcript(output: Mapping[str, Any]) -> str:
    """Prompt, completion, answer and error of a rollout, each cut to ``MAX_MESSAGE_CHARS``."""
    from verifiers.runtime.terminal import escape_control

    paragraphs = [p for name in ("prompt", "completion") for p in _conversation(output[name], name)]
    if len(paragraphs) > MAX_MESSAGES:
        left_out = f"… {len(paragraphs) - MAX_MESSAGES} messages left out …"
        half = MAX_MESSAGES // 2
        paragraphs = [*paragraphs[:half], left_out, *paragraphs[-half:]]
    if output["answer"] not in (None, ""):
        paragraphs.append(f"answer: {_cut(escape_control(render_answer(output['answer'])))}")
    if output["error"] is not None:
        description = f"{output['error'].get('error')}: {output['error'].get('message')}"
        paragraphs.append(f"error: {_cut(escape_control(description))}")
    return "\n".join(paragraphs)


def render_answer(answer: object) -> str:
    """An expected answer as text: itself, or as JSON."""
    if isinstance(answer, str):
        return answer
    return json.dumps(answer, ensure_ascii=False, default=str)


def _conversation(messages: Messages | None, role: str) -> list[str]:
    from verifiers.data.messages import render_text

    if isinstance(messages, str):
        return [_cut(f"{role}: {render_text(messages)}")]
    return [_cut(render_text([message])) for message in messages or []]


def _cut(text: str) -> str:
    if len(text) <= MAX_MESSAGE_CHARS:
        return text
    half = MAX_MESSAGE_CHARS // 2
    return f"{text[:half]} … {len(text) - MAX_MESSAGE_CHARS:,} characters left out … {text[-half:]}"
