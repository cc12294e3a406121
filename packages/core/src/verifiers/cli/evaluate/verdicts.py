"""What is said of a run that has ended: why it counts as failed, and what a reader of its numbers must
know."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifiers.cli.evaluate.planning import Prepared
    from verifiers.results.outputs import GenerateOutputs


def verdict_of(prepared: Prepared, results: GenerateOutputs) -> str | None:
    """Why a completed run counts as failed; None when it does not."""
    from verifiers.results.run_metadata import errors_by_cause, unscored_by_function

    facts = results.metadata
    if not facts.num_rollouts:
        return None
    if facts.avg_error > (limit := prepared.settings.max_error_rate):
        return (
            f"{facts.avg_error:.0%} of the rollouts ended in an error; --max-error-rate allows"
            f" {limit:.0%}"
        )
    if math.isnan(facts.avg_reward) and prepared.env.score_rollouts and prepared.env.has_reward:
        measured = results.measurements()
        causes = unscored_by_function(measured) | errors_by_cause(measured)
        counts = ", ".join(f"{count} x {cause}" for cause, count in causes.items())
        first = next((error for error in results["errors"] if error is not None), None)
        why = f"; the first: {first['error']}: {first['message']}" if first else ""
        return f"none of {facts.num_rollouts} rollouts could be scored: {counts}{why}"
    return None


def notes_of(prepared: Prepared, results: GenerateOutputs) -> list[str]:
    """Sentences below the summary."""
    notes = [f"the combination {prepared.varied} of the ablation"] if prepared.varied else []
    if changed := results.metadata.changed_code:
        when = "changed between two sessions of this run"
        notes.append(f"{', '.join(changed)} {when}: its mean is over both versions")
    if cached := results.metadata.cached:
        notes.append(
            f"{cached['hits']:,} of {cached['hits'] + cached['misses']:,} replies are from the"
            f" cache in {cached['folder']}; tokens and cost count them as if they had been sent"
        )
    if stopped := results.metadata.stopped:
        from verifiers.runs.stopping import Decision

        notes.append(Decision(**stopped).sentence())
    # a folder is the user's own model
    if (facts := results.metadata.local_model) and "quantisation" in facts:
        notes.append(
            f"a small local model ({facts['file']}, {facts['quantisation']}, sha256"
            f" {facts['sha256'][:12]}); its scores say little about the environment"
        )
    return notes
