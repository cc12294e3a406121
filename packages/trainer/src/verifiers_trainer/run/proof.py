"""The page of proof of a run: write ``proof.json``, say it in a few lines, and verify it again from
the saved rollouts and checkpoints.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.errors import ConfigError, VerifiersError
from verifiers.rollouts.turn import Turn
from verifiers.runtime.bounded import MAX_FILE_BYTES, read_text
from verifiers.runtime.decoding import decode_json, read_json
from verifiers.storage.proof import ALARM, LAG, PROOF, UNTRAINED, proof_of
from verifiers_trainer.algorithm.batch import TrainBatch
from verifiers_trainer.algorithm.diagnostics import MIN_COMPARED
from verifiers_trainer.algorithm.samples import NOT_SAMPLED, carries_loss
from verifiers_trainer.engines.role_adapters import roles_of
from verifiers_trainer.policy import checkpoint_files
from verifiers_trainer.policy.checkpoint_files import write_json
from verifiers_trainer.policy.folder_client import load_folder
from verifiers_trainer.policy.logprobs import install_logprob_forward
from verifiers_trainer.policy.scoring import scored
from verifiers_trainer.run.metrics_files import COMPLETIONS, METRICS, read_metrics
from verifiers_trainer.run.sanity_checks import END, Agreement, Agreements, mean_noise

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
WORDS = {
    "agree": "the policy that sampled is the policy that was trained",
    "inconclusive": (
        "inconclusive: no push moved the answers by more than the noise, so that a server that kept"
        " its first weights would look the same"
    ),
    "alarm": "sampler and trainer disagreed",
}


def token_uses(batch: TrainBatch, version: int) -> dict[str, int]:
    """The metrics of what became of a step's sampled tokens: ``tokens/lag/<versions>`` of those
    trained while the policy was of ``version``, ``tokens/untrained/<reason>`` of the others."""
    lags: Counter[int] = Counter()
    untrained: Counter[str] = Counter()
    weights = iter(batch.weights)
    for group, samples in zip(batch.groups, batch.samples_G, strict=True):
        for rollout, its_samples in zip(group.rollouts, samples, strict=True):
            num_trained = 0
            for sample in its_samples.samples:
                trained = carries_loss(sample.loss_mask, next(weights))
                trained &= sample.versions != NOT_SAMPLED
                num_trained += int(trained.sum())
                numbers, counts = np.unique(sample.versions[trained], return_counts=True)
                lags.update(dict(zip((version - numbers).tolist(), counts.tolist(), strict=True)))
            if missing := rollout.num_sampled - num_trained:
                reason = its_samples.excluded or ("masked" if num_trained else "no_signal")
                untrained[reason] += missing
    untrained["no_signal"] += sum(r.num_sampled for g in batch.discarded for r in g.rollouts)
    numbers_by_name = {f"{LAG}{lag}": count for lag, count in sorted(lags.items())}
    return numbers_by_name | {f"{UNTRAINED}{name}": n for name, n in sorted(untrained.items()) if n}


def write_proof(
    folder: Path, last: Mapping[str, float], error: BaseException | None = None
) -> None:
    """Write ``proof.json`` of the metrics so far, the ``last`` canary, whose version no step
    follows, and the disagreement that ended the run; nothing without metrics.

    A proof that cannot be written is a warning: it neither hides how the run ended nor loses it."""
    if not (folder / METRICS).is_file():
        return
    try:
        proof = proof_of([*read_metrics(folder / METRICS), last])
        if isinstance(error, VerifiersError) and "disagreement" in error.facts:
            proof |= {"verdict": "ended", "reason": str(error)}
        write_json(folder / PROOF, proof)
    except (OSError, VerifiersError, ArithmeticError, LookupError, TypeError, ValueError) as failed:
        log.warning("%s was not written: %s: %s", folder / PROOF, type(failed).__name__, failed)


def rows_of(proof: dict[str, Any]) -> list[tuple[str, str]]:
    """The proof as rows of a summary."""
    tokens, largest = proof["tokens"], proof["largest"]
    if reason := proof.get("reason"):
        return [("proof", f"ended: {reason}")]
    num_unknown = proof.get("unknown", 0)  # of a file of an older version
    unknown = f", {num_unknown} more of too few tokens" if num_unknown else ""
    if largest is None:
        return [("proof", f"sampler and trainer were not compared{unknown}")]
    canaries = [entry for entry in proof["versions"] if "canary" in entry]
    pushes = proof.get("told_apart", {"told": 0, "of": 0})
    untrained = ", ".join(f"{count:,} {reason}" for reason, count in tokens["untrained"].items())
    return [
        (
            "proof",
            f"{WORDS[proof['verdict']]}: {proof['compared']} comparisons of"
            f" {proof.get('compared_tokens', 0):,} tokens{unknown}, at most {largest['disagreement']:.2g} times"
            f" the noise ({largest['where']}; {ALARM:g} is an alarm, {END:g} ends the run)",
        ),
        (
            "canaries",
            f"{len(canaries)} versions answered; {pushes['told']} of {pushes['of']} pushes moved the"
            f" answers by more than the noise; {proof['restarts']} restarts",
        ),
        (
            "tokens",
            f"{tokens['sampled']:,} sampled, {tokens['trained']:,} trained"
            + (f"; not trained: {untrained}" if untrained else ""),
        ),
    ]


# --- again, from the files ------------------------------------------------------------------------


def verify(folder: Path) -> list[tuple[str, str]]:
    """Score a saved rollout of each version with that version's checkpoint: rows of a summary.

    Raises ``ConfigError`` without a checkpoint whose version sampled a saved rollout, and with what
    is known of a rollout that its checkpoint did not sample.
    """
    if not (folder / METRICS).is_file():
        raise ConfigError(f"{folder} is no training run: it has no {METRICS}")
    rollouts = _saved_rollouts(folder)
    noise = {row["step"]: row.get("sampler/noise") for row in read_metrics(folder / METRICS)}
    rows = []
    for version, checkpoint in sorted(checkpoint_files.steps_in(folder)):
        if version not in rollouts:
            continue
        checkpoint_files.verify(checkpoint)
        step, turns = rollouts[version]
        saved = read_json(checkpoint / "rl_state.json")["configuration"]
        numbers = compare_with(
            *load_folder(checkpoint, with_roles=True),
            turns,
            version,
            temperature=saved.get("temperature", 1.0),
            least=max(noise.get(step) or 0.0, SAVED_NOISE),
            what=f"a rollout of step {step} and {checkpoint.name}",
        )
        rows.append((checkpoint.name, numbers))
    if not rows:
        raise ConfigError(
            f"{folder} has no checkpoint whose version sampled a saved rollout with its tokens:"
            " nothing to verify; the last checkpoint has sampled none, so train with save_steps"
            " below the number of steps, and with log_completions and log_tokens"
        )
    return rows


SAVED_NOISE = 5e-5
"""Nats: saved log-probabilities have four digits."""


def compare_with(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    version: int,
    *,
    temperature: float = 1.0,
    least: float = 0.0,
    what: str,
) -> str:
    """Score turns, each for itself, with a model of this process, and say how near they are.

    Raises ``ConfigError`` for a disagreement.
    """
    install_logprob_forward(model)
    meter = scored(model, [[turn] for turn in turns], version, model.device, temperature)
    agreements = Agreements(
        partial(Agreement, None, tokenizer, temperature, least), roles_of(model)
    )
    numbers = agreements.check(meter, partial(mean_noise, model), what)
    if "sampler/noise" not in numbers:
        raise ConfigError(
            f"{what}: {_least_tokens(turns)} tokens can be compared, which say nothing; at least"
            f" {MIN_COMPARED} are needed, so ask for longer answers, or save more rollouts"
        )
    return (
        f"{meter.num_current} tokens agree to {meter.mean_abs:.2g} nats,"
        f" {numbers['sampler/disagreement']:.2g} times the noise ({numbers['sampler/noise']:.2g})"
    )


def _saved_rollouts(folder: Path) -> dict[int, tuple[int, list[Turn]]]:
    """Version -> (step, turns) of the first saved rollouts that it sampled whole, of one step and
    as many as have ``MIN_COMPARED`` tokens of each role."""
    rollouts: dict[int, tuple[int, list[Turn]]] = {}
    paths = {int(path.stem[5:]): path for path in (folder / COMPLETIONS).glob("step-*.jsonl")}
    for step, path in sorted(paths.items()):
        for line in read_text(path, MAX_FILE_BYTES).split("\n")[:-1]:
            records = decode_json(line).get("turn_tokens") or []
            versions = {json.dumps(record["version"]) for record in records}
            if len(versions) != 1 or not all("prompt_ids" in record for record in records):
                continue
            version = records[0]["version"]
            if not isinstance(version, int):
                continue
            first, turns = rollouts.setdefault(version, (step, []))
            if first == step and _least_tokens(turns) < MIN_COMPARED:
                turns += _turns_of(records)
    return rollouts


def _least_tokens(turns: Sequence[Turn]) -> int:
    """Sampled tokens of the role that has the fewest: each may have weights of its own."""
    counts: Counter[str] = Counter()
    for turn in turns:
        counts[turn.acting_role] += len(turn.completion_ids)
    return min(counts.values(), default=0)


def _turns_of(records: Sequence[Mapping[str, Any]]) -> list[Turn]:
    turns: list[Turn] = []
    for record in records:
        new, ids = record["prompt_ids"], record["completion_ids"]
        earlier = [*turns[-1].prompt_ids, *turns[-1].completion_ids] if turns else []
        prompt = [*earlier, *new] if len(new) < record["prompt_tokens"] else new
        sampled = ids, record["completion_logprobs"], record["version"]
        turns.append(Turn(prompt, *sampled, role=record.get("role", "")))
    return turns
