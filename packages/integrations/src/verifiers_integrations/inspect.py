"""``to_inspect``: a finished run as an Inspect log, for its viewer, its tables and whatever reads
``.eval`` files.

    from verifiers_integrations.inspect import to_inspect
    to_inspect("outputs/evals/reverse-text/…", out="reverse-text.eval")

Promise: every rollout is one sample (epoch = sibling + 1) with its messages, its tool calls and
their results, its
scores, its error. The means in the log are ours: of the known rewards, with errors clustered by
example. An unknown reward has no score; the sample carries the error, and the log counts it.
Nothing is generated again (``inspect_task`` runs an environment inside Inspect).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.data.messages import last_text
from verifiers.errors import ConfigError
from verifiers.results import GenerateOutputs, load_results
from verifiers.results.rows import json_ready
from verifiers.results.statistics import clustered_stderr, known_values, mean
from verifiers.rollouts.values import reported
from verifiers.runtime.json import in_utf8
from verifiers_integrations.inspect_messages import STOP_REASONS, load, to_chat

STATUS = {"complete": "success", "running": "started", "interrupted": "cancelled"}
REWARD = "reward"


def to_inspect(source: GenerateOutputs | str | Path, out: str | Path = "x.eval") -> Path:
    """Write the results, or those of a run directory, to ``out`` (``.eval`` or ``.json``); the
    path.

    *Raises* ImportError without Inspect, ConfigError when there are no results.
    """
    results = load_results(source) if isinstance(source, str | Path) else source
    path = Path(out)
    if path.suffix not in (".eval", ".json"):
        raise ConfigError(
            f"out={str(out)!r} must end in .eval or .json, the formats of Inspect's logs", key="out"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    load("log").write_eval_log(eval_log(results), str(path))
    return path


def eval_log(results: GenerateOutputs) -> Any:
    """The ``EvalLog`` of results."""
    log, facts = load("log"), results.metadata
    created = str(facts["date"])
    model = facts["model"] or "unknown"
    samples = [
        _sample(output, epoch, model)
        for output, epoch in zip(results.outputs, _epochs(results), strict=True)
    ]
    ids = list(dict.fromkeys(sample.id for sample in samples))
    epochs = max((sample.epoch for sample in samples), default=1)
    name = facts["env_id"] or "verifiers"
    plan = log.EvalPlan(
        steps=[log.EvalPlanStep(solver="verifiers", params=json_ready(facts["env_args"]))]
    )
    spec = log.EvalSpec(
        created=created,
        task=name,
        task_id=f"{name}-{facts.get('fingerprint') or created}"[:60],
        run_id=str(facts.get("fingerprint") or created),
        model=model,
        model_base_url=facts.get("base_url") or None,
        task_args=json_ready(facts["env_args"]),
        dataset=log.EvalDataset(name=name, samples=len(ids), sample_ids=ids),
        config=log.EvalConfig(epochs=epochs),
        packages={"verifiers": str((facts.get("version_info") or {}).get("vf_version", ""))},
        metadata={"sampling_args": json_ready(facts["sampling_args"]), "status": facts["status"]},
    )
    return log.EvalLog(
        status=STATUS.get(facts["status"], "error"),
        eval=spec,
        plan=plan,
        results=_results(results),
        stats=log.EvalStats(started_at=created, completed_at=created),
        samples=samples,
    )


def _epochs(results: GenerateOutputs) -> list[int]:
    """Sibling + 1 of each rollout; results that were never on disk are counted off."""
    seen: Counter[object] = Counter()
    epochs = []
    for output in results.outputs:
        key = output["example_id"]
        epochs.append(int(output.get("sibling", seen[key])) + 1)
        seen[key] += 1
    return epochs


def _results(results: GenerateOutputs) -> Any:
    log, outputs = load("log"), results.outputs
    names = dict.fromkeys(name for output in outputs for name in output["metrics"])
    columns = {REWARD: [output["reward"] for output in outputs]}
    columns |= {
        name: [o["metrics"].get(name, math.nan) for o in outputs]
        for name in names
        if name != REWARD
    }
    examples = [output["example_id"] for output in outputs]
    unscored = sum(math.isnan(value) for value in columns[REWARD])
    return log.EvalResults(
        total_samples=len(outputs),
        completed_samples=sum(output["error"] is None for output in outputs),
        scores=[_score_of_all(name, values, examples) for name, values in columns.items()],
        metadata={"vf_unscored": unscored},
    )


def _score_of_all(name: str, values: Sequence[float], examples: Sequence[object]) -> object:
    log = load("log")
    numbers = {"mean": mean(values), "stderr": clustered_stderr(values, examples)}
    metrics = {
        key: log.EvalMetric(name=key, value=value)
        for key, value in numbers.items()
        if not math.isnan(value)
    }
    scored = len(known_values(values))
    return log.EvalScore(
        name=name,
        scorer=name,
        scored_samples=scored,
        unscored_samples=len(values) - scored,
        metrics=metrics,
    )


def _sample(output: Mapping[str, Any], epoch: int, model: str) -> Any:
    output = in_utf8(output)
    log, error = load("log"), output["error"]
    metadata = {
        **{
            name: json_ready(output[name])
            for name in ("task", "info", "stop_condition", "is_truncated")
        },
        "vf_unscored": math.isnan(output["reward"]),
    }
    return log.EvalSample(
        id=output["example_id"],
        epoch=epoch,
        input=to_chat(output["prompt"]),
        target=str(output["answer"]),
        messages=to_chat(output["prompt"]) + to_chat(_completion(output)),
        output=_model_output(output, model),
        scores=_scores(output),
        metadata=metadata,
        error=None if error is None else _error(error),
        total_time=(output["timing"].get("total_ms") or 0.0) / 1000,
    )


def _completion(output: Mapping[str, object]) -> Any:
    completion = output["completion"]
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return completion or []


def _model_output(output: Mapping[str, Any], model: str) -> object:
    types = load("model")
    replies = [m for m in to_chat(_completion(output)) if isinstance(m, types.ChatMessageAssistant)]
    used = reported(output["token_usage"])
    read, written = int(used.get("input_tokens") or 0), int(used.get("output_tokens") or 0)
    reason = STOP_REASONS["length" if output["is_truncated"] else "stop"]
    choices = (
        [types.ChatCompletionChoice(message=replies[-1], stop_reason=reason)] if replies else []
    )
    usage = None
    if used:
        usage = types.ModelUsage(
            input_tokens=read, output_tokens=written, total_tokens=read + written
        )
    return types.ModelOutput(model=model, choices=choices, usage=usage)


def _scores(output: Mapping[str, Any]) -> dict[str, object]:
    """The known numbers of a rollout."""
    score = load("scorer").Score
    answer = last_text(_completion(output), "assistant")
    numbers = {
        REWARD: output["reward"],
        **{k: v for k, v in output["metrics"].items() if k != REWARD},
    }
    return {
        name: score(value=float(value), answer=answer)
        for name, value in numbers.items()
        if not math.isnan(value)
    }


def _error(error: Mapping[str, object]) -> object:
    text = error.get("traceback") or error.get("error_chain_repr") or ""
    return load("log").EvalError(
        message=f"{error.get('error')}: {error.get('message')}", traceback=text, traceback_ansi=text
    )
